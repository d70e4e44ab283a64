"""Pooling, features and their cache: padding never matters, texts keep their end, nothing is computed twice."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs the extra [llm]")

from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.llm.feature_cache import FeatureCache, fingerprint
from ensemblepp.llm.features import FeatureExtractor, hidden_states, takes_positions, tokenize
from ensemblepp.llm.pooling import infer_mask, pool, positions
from ensemblepp.llm.texts import join
from tests.llm_cases import RESPONSES, encode, make_backbone, make_tokenizer

pytestmark = pytest.mark.llm

HIDDEN = torch.arange(24, dtype=torch.float32).view(2, 4, 3)


def test_the_last_real_token_is_pooled_on_either_side():
    right, left = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    assert torch.equal(pool(HIDDEN, right), torch.stack([HIDDEN[0, 1], HIDDEN[1, 3]]))
    assert torch.equal(pool(HIDDEN, left), torch.stack([HIDDEN[0, 3], HIDDEN[1, 3]]))
    assert torch.equal(pool(HIDDEN, right, "mean")[0], HIDDEN[0, :2].mean(0))
    assert torch.equal(pool(HIDDEN, left, "mean")[1], HIDDEN[1, 1:].mean(0))


def test_padding_may_hold_nan():
    hidden = HIDDEN.clone()
    hidden[0, 2:] = torch.nan
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    for pooling in ("last", "mean"):
        assert torch.equal(pool(hidden, mask, pooling), pool(HIDDEN, mask, pooling))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_before_it_is_averaged(dtype):
    hidden = torch.full((1, 600, 2), 200.0, dtype=dtype)
    hidden[0, ::2] = 201.0
    pooled = pool(hidden, torch.ones(1, 600), "mean")
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled, hidden.float().mean(1))


def test_what_pooling_refuses():
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    with pytest.raises(ParameterError, match=r"mask of pool must mark at least one token of every text; got False .*1"):
        pool(HIDDEN, mask)
    with pytest.raises(ParameterError, match="pooling of pool must be one of 'last', 'mean'; got 'first'"):
        pool(HIDDEN, mask, "first")


def test_a_missing_mask_is_inferred_or_refused():
    ids = torch.tensor([[5, 6, 2], [5, 6, 7]])
    assert infer_mask(ids, 2, 1).tolist() == [[1, 1, 0], [1, 1, 1]]
    assert infer_mask(ids[:1], None, 1).tolist() == [[1, 1, 1]]
    for pad, eos in ((1, 1), (2, [7, 2]), (None, 1)):
        with pytest.raises(ParameterError, match="attention_mask of EnsembleRewardModel must be given where padding"):
            infer_mask(ids, pad, eos)


def test_positions_count_real_tokens():
    assert positions(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


def tiny(kind, config):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    generator = torch.Generator().manual_seed(0)
    model = kind(config(vocab_size=30, max_position_embeddings=40, pad_token_id=1, **sizes), add_pooling_layer=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


@pytest.mark.parametrize("name", ["llama", "bert", "roberta"])
def test_hidden_states_do_not_depend_on_padding(name):
    backbone = {
        "llama": make_backbone,
        "bert": lambda: tiny(BertModel, BertConfig),
        "roberta": lambda: tiny(RobertaModel, RobertaConfig),
    }[name]()
    assert takes_positions(backbone) == (name != "roberta")
    row, pad = [5, 6, 7], [1] * 4
    sides = {"alone": (row, [1] * 3), "left": (pad + row, [0] * 4 + [1] * 3), "right": (row + pad, [1] * 3 + [0] * 4)}
    found = {}
    for side, (ids, mask) in sides.items():
        hidden = hidden_states(backbone, torch.tensor([ids]), torch.tensor([mask]))
        found[side] = hidden[0][torch.tensor(mask).bool()].detach()
    torch.testing.assert_close(found["left"], found["alone"], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["right"], found["alone"], rtol=0, atol=1e-5)


def extractor(**options):
    return FeatureExtractor(make_backbone(), make_tokenizer(), **options)


def test_features_do_not_depend_on_their_batch():
    extract = extractor(batch_size=3)
    together = extract([*RESPONSES, RESPONSES[0]])
    assert torch.equal(together[0], together[4])
    for text, row in zip(RESPONSES, together, strict=False):
        torch.testing.assert_close(extract([text])[0], row, rtol=0, atol=1e-5)


def test_features_are_the_backbones_hidden_states():
    ids, mask = encode(RESPONSES)
    backbone = make_backbone()
    hidden = backbone(input_ids=ids, attention_mask=mask).last_hidden_state.detach()
    for pooling in ("last", "mean"):
        torch.testing.assert_close(
            extractor(pooling=pooling)(RESPONSES), pool(hidden, mask, pooling), atol=1e-5, rtol=0
        )
    unit = extractor(normalise=True)(RESPONSES)
    torch.testing.assert_close(unit.norm(dim=-1), torch.ones(4))


def test_a_causal_model_gives_its_trunk_and_keeps_its_mode():
    model = make_backbone(causal=True)
    model.train()
    extract = FeatureExtractor(model, make_tokenizer())
    torch.testing.assert_close(extract(RESPONSES), extractor()(RESPONSES))
    assert model.model.training


def test_long_texts_keep_their_end_and_their_first_special_token():
    tokenizer = make_tokenizer()
    ids, mask = tokenize(tokenizer, ["a b c d e f g", "good"], 4)
    assert tokenizer.decode(ids[0]).split() == ["<s>", "e", "f", "g"]
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert extractor().max_length == 64
    assert extractor(max_length=10).max_length == 10


def test_positions_behind_a_padding_index_are_not_overrun():
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = int(1e30)
    extract = FeatureExtractor(tiny(RobertaModel, RobertaConfig), tokenizer, pooling="mean")
    assert extract.max_length == 38  # 40 places, of which the padding index and those before it are no positions
    assert extract([50 * "a "]).isfinite().all()


def test_the_cache_answers_what_it_knows(tmp_path):
    first = extractor(cache=tmp_path / "features.sqlite")
    wanted = first(RESPONSES)
    again = extractor(cache=tmp_path / "features.sqlite")

    def fail(*_):
        raise AssertionError("nothing may be computed again")

    again._encode = fail
    assert torch.equal(again([*reversed(RESPONSES)]), wanted.flip(0))
    with pytest.raises(AssertionError):
        again(["a new text"])


def test_other_weights_pooling_or_length_have_their_own_space(tmp_path):
    path = tmp_path / "features.sqlite"
    base = extractor(cache=path)(RESPONSES)
    others = [
        FeatureExtractor(make_backbone(seed=1), make_tokenizer(), cache=path),
        extractor(cache=path, pooling="mean"),
        extractor(cache=path, max_length=2),
        extractor(cache=path, normalise=True),
    ]
    for other in others:
        assert not torch.allclose(other(RESPONSES), base)
    assert torch.equal(extractor(cache=path)(RESPONSES), base)


def test_a_fingerprint_is_one_of_content():
    assert fingerprint(make_backbone()) == fingerprint(make_backbone())
    changed = make_backbone()
    with torch.no_grad():
        changed.norm.weight[0] += 1e-6
    assert fingerprint(changed) != fingerprint(make_backbone())
    assert fingerprint(nn.Linear(2, 2, bias=False).bfloat16()) != ""


def test_a_file_that_is_no_cache_is_named(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("this is not a database, and it is long enough to be taken for one" * 20)
    with pytest.raises(CheckpointError, match=r"notes.txt is not a feature cache"):
        FeatureCache(path, "space")


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("texts", [[], "one string", ["a", 3], [""]])
def test_bad_texts_are_refused(texts):
    if texts == [""]:
        extract = FeatureExtractor(make_backbone(), make_tokenizer())
        extract.tokenizer.backend_tokenizer.post_processor = None
        extract.tokenizer._tokenizer.post_processor = None
        with pytest.raises(ParameterError, match="texts of FeatureExtractor must have at least one token each"):
            extract(texts)
        return
    with pytest.raises(ParameterError, match="texts of FeatureExtractor must be a non-empty list of strings"):
        extractor()(texts)


@pytest.mark.usefixtures("without_shape_checks")
def test_prompts_are_strings_or_chats():
    tokenizer = make_tokenizer()
    assert join(tokenizer, "hello ", "world") == "hello world"
    chat = [{"role": "user", "content": "hello"}]
    assert join(tokenizer, chat, "world") == "user : hello . assistant : world . "
    with pytest.raises(ParameterError, match="since the tokenizer has no chat template"):
        join(make_tokenizer(chat=False), chat, "world")
    for bad in ([{"role": "user"}], [], 3, [{"role": "user", "content": 3}]):
        with pytest.raises(ParameterError, match="prompt of a reward model must be a string or a non-empty list"):
            join(tokenizer, bad, "world")
    with pytest.raises(ParameterError, match="response of a reward model must be a string; got None"):
        join(tokenizer, "hello", None)
