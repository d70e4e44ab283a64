"""What stays when models are cast, trained or reloaded: the head's precision, and features only while they are true."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra [llm]")

from ensemblepp.errors import ParameterError
from ensemblepp.llm import EnsembleRewardModel, FeatureExtractor, ResponseSelector
from ensemblepp.llm.feature_cache import fingerprint
from ensemblepp.llm.features import tokenizer_identity
from ensemblepp.llm.texts import join
from tests.llm_cases import RESPONSES, encode, make_backbone, make_model, make_tokenizer

pytestmark = pytest.mark.llm

PROMPT = "hello "


def count_passes(extractor: FeatureExtractor) -> list[int]:
    """Note the number of texts of every forward pass from now on."""
    passes: list[int] = []
    extractor.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return passes


def test_learning_from_what_was_compared_takes_no_forward_pass() -> None:
    chooser = ResponseSelector(make_model(), make_tokenizer())
    passes = count_passes(chooser.extractor)
    first, second = chooser.select_pair(PROMPT, RESPONSES)
    assert passes == [4]
    for _ in range(3):
        chooser.learn(PROMPT, chosen=RESPONSES[first], rejected=RESPONSES[second])
        chooser.scores(PROMPT, RESPONSES, num_samples=1000)
    assert passes == [4]
    chooser.scores(PROMPT, [*RESPONSES, "yes"])
    assert passes == [4, 1]


def test_memory_is_bounded_and_keeps_the_latest() -> None:
    extract = FeatureExtractor(make_backbone(), make_tokenizer(), memory=2)
    passes = count_passes(extract)
    extract(["a", "b"])
    extract(["a"])  # the latest now
    extract(["c"])  # takes the place of "b"
    assert passes == [2, 1]
    extract(["a", "c"])
    assert passes == [2, 1]
    extract(["b"])
    assert passes == [2, 1, 1]
    forgetful = FeatureExtractor(make_backbone(), make_tokenizer(), memory=0)
    passes = count_passes(forgetful)
    for _ in range(2):
        forgetful(["a"])
    assert passes == [1, 1]


@pytest.mark.parametrize("cached", [False, True])
def test_features_of_trained_weights_are_new(tmp_path, cached: bool) -> None:
    backbone = make_backbone()
    extract = FeatureExtractor(backbone, make_tokenizer(), cache=tmp_path / "features.sqlite" if cached else None)
    old = extract(RESPONSES)
    optimiser = torch.optim.SGD(backbone.parameters(), lr=0.1)
    ids, mask = encode(RESPONSES)
    backbone(input_ids=ids, attention_mask=mask).last_hidden_state.square().sum().backward()
    optimiser.step()
    fresh = FeatureExtractor(backbone, make_tokenizer())(RESPONSES)
    assert not torch.allclose(fresh, old, atol=1e-3)
    torch.testing.assert_close(extract(RESPONSES), fresh)


def test_a_fingerprint_covers_what_weights_do_not_say() -> None:
    one, other = make_backbone(), make_backbone()
    other.config.rms_norm_eps = 0.1
    assert fingerprint(one) != fingerprint(other)
    named = make_backbone()
    named.config._name_or_path = "elsewhere"
    assert fingerprint(one) == fingerprint(named)


def test_a_tokenizers_identity_covers_its_rules() -> None:
    changed = make_tokenizer()
    changed.backend_tokenizer.post_processor = None
    assert tokenizer_identity(changed) != tokenizer_identity(make_tokenizer())
    assert tokenizer_identity(make_tokenizer()) == tokenizer_identity(make_tokenizer())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_head_stays_in_float32_when_the_model_is_cast(tmp_path, dtype: torch.dtype) -> None:
    model = make_model()
    with torch.no_grad():
        model.head.mean.copy_(torch.linspace(-1, 1, 32) / 3)
    members = model(*encode(RESPONSES)).members
    head = {name: tensor.clone() for name, tensor in model.head.state_dict().items()}
    model.save_pretrained(tmp_path)
    loaded = EnsembleRewardModel.from_pretrained(tmp_path, dtype=dtype)
    model.to(dtype)
    for each in (model, loaded):
        assert each.backbone.layers[0].self_attn.q_proj.weight.dtype == dtype
        for name, tensor in each.head.state_dict().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, head[name]), name
        torch.testing.assert_close(each(*encode(RESPONSES)).members, members, rtol=0, atol=0.05)  # the backbone's own


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_not_silently_left_untrained() -> None:
    peft = pytest.importorskip("peft", reason="needs the extra [llm]")
    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["head"], r=2)
    model = peft.get_peft_model(make_model(freeze_backbone=True), settings).train()
    with pytest.raises(ParameterError, match="freeze_backbone of EnsembleRewardModel must be False to train adapters"):
        model(*encode(RESPONSES))
    model.eval()
    assert model(*encode(RESPONSES)).logits.shape == (4, 1)
    adapted = peft.get_peft_model(make_backbone(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ParameterError, match=r"backbone of EnsembleRewardModel must be a model without adapters"):
        EnsembleRewardModel.from_backbone(adapted)
    features = FeatureExtractor(adapted, make_tokenizer())(RESPONSES)
    torch.testing.assert_close(features, FeatureExtractor(make_backbone(), make_tokenizer())(RESPONSES))


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_model_with_adapters_selects_and_learns() -> None:
    peft = pytest.importorskip("peft", reason="needs the extra [llm]")
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["head"], r=2)
    adapted = peft.get_peft_model(make_model(freeze_backbone=False), settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    with pytest.raises(ParameterError, match=r"got PeftModel. With adapters, pass model.get_base_model\(\)."):
        ResponseSelector(adapted, make_tokenizer())
    chooser = ResponseSelector(adapted.get_base_model(), make_tokenizer())
    plain = ResponseSelector(make_model(), make_tokenizer())
    assert not torch.allclose(chooser.extractor(RESPONSES), plain.extractor(RESPONSES), atol=1e-3)
    chooser.learn(PROMPT, chosen=RESPONSES[0], rejected=RESPONSES[1])
    scores = chooser.scores(PROMPT, RESPONSES)
    assert scores[0] > scores[1]
    logits = adapted(*encode([PROMPT + text for text in RESPONSES])).logits[:, 0]
    torch.testing.assert_close(logits, scores, rtol=0, atol=1e-5)


def test_the_callers_backbone_is_neither_frozen_nor_moved() -> None:
    backbone = make_backbone()
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    chooser = ResponseSelector(EnsembleRewardModel.from_backbone(backbone, index_dim=4), make_tokenizer())
    chooser.learn(PROMPT, chosen="good", rejected="bad")
    assert all(parameter.requires_grad for parameter in backbone.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())


def test_a_template_that_begins_with_the_begin_token_has_it_once() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    text = join(tokenizer, [{"role": "user", "content": "hello"}], "good")
    assert tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) == 1
    tokenizer.backend_tokenizer.post_processor = None  # a tokenizer that leaves it to the template
    text = join(tokenizer, [{"role": "user", "content": "hello"}], "good")
    assert tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("acquisition", ["double_thompson", "greedy", "infomax", "uniform", "passive"])
def test_copies_of_a_response_are_no_pair_while_there_is_another(acquisition: str) -> None:
    chooser = ResponseSelector(make_model(), make_tokenizer(), acquisition=acquisition)
    for _ in range(5):
        chooser.learn(PROMPT, chosen="good", rejected="bad")
    copies = ["good", "good", "bad", "good"]
    for group in (copies, ["good", "good", "bad"]):
        for _ in range(10):
            first, second = chooser.select_pair(PROMPT, group)
            assert group[first] != group[second]
    pairs = chooser.select_pair([PROMPT, "yes "], [copies, ["bad", "bad"]])
    assert copies[pairs[0][0]] != copies[pairs[0][1]]
    assert set(pairs[1]) == {0, 1}
