"""The reward model: scores, priors, saving, adapters, and what trainers of reward models expect."""

import math

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra [llm]")

from transformers import AutoModel, AutoModelForSequenceClassification

from ensemblepp.errors import ParameterError
from ensemblepp.llm.head import SamplerHead
from ensemblepp.llm.reward_model import EnsembleRewardConfig, EnsembleRewardModel
from tests.llm_cases import RESPONSES, encode, make_backbone, make_model, make_tokenizer

pytestmark = pytest.mark.llm


def trained(model):
    """Give mean and members some weights, as training would."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for part in (model.head.mean, model.head.members):
            part.copy_(torch.randn(part.shape, generator=generator))
    return model


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_scores_do_not_depend_on_batch_or_padding_side(pooling):
    model = trained(make_model(pooling=pooling))
    outputs = {side: model(*encode(RESPONSES, side)) for side in ("left", "right")}
    alone = [model(*encode([text])) for text in RESPONSES]
    for name in ("logits", "members"):
        wanted = torch.cat([output[name] for output in alone])
        for output in outputs.values():
            torch.testing.assert_close(output[name], wanted, rtol=0, atol=1e-5)


def test_one_forward_pass_gives_any_sample():
    model = trained(make_model())
    ids, mask = encode(RESPONSES)
    output = model(ids, mask)
    index = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    for zeta in index:
        sample = model(ids, mask, index=zeta).logits
        torch.testing.assert_close(sample[:, 0], output.mean + output.members @ zeta)
    own = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(ids, mask, index=own).logits[:, 0], output.mean + (output.members * own).sum(-1))
    assert output.logits.shape == (4, 1)
    assert torch.equal(output.logits[:, 0], output.mean)


def test_the_head_is_its_formula():
    head = SamplerHead(8, 3, 0.5)
    head.draw_prior(4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.mean.copy_(torch.randn(8, generator=generator))
        head.members.copy_(torch.randn(8, 3, generator=generator))
    features = 5 + 3 * torch.randn(2, 8, generator=generator)
    phi = (features - features.mean(-1, keepdim=True)) / features.std(-1, correction=0, keepdim=True) / math.sqrt(8)
    output = head(features)
    torch.testing.assert_close(output.mean[:, 0], phi @ head.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.members[:, 0], phi @ (head.members + 0.5 * head.prior), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.phi(features).norm(dim=-1), torch.ones(2), rtol=1e-4, atol=1e-4)


@pytest.mark.statistical
def test_before_any_data_the_reward_has_the_stated_prior():
    model = make_model(index_dim=4000, prior_scale=2.0)
    output = model(*encode(RESPONSES))
    assert torch.equal(output.mean, torch.zeros(4))
    variance = output.members.square().sum(-1).detach()
    assert bool(((variance / 4 - 1).abs() <= 4.5 * math.sqrt(2 / 4000)).all())


def test_priors_are_buffers_and_seeds_set_them():
    model = make_model()
    assert "head.prior" in dict(model.named_buffers())
    assert "head.prior" in model.state_dict()
    assert {n for n, _ in model.named_parameters() if "head" in n} == {"head.mean", "head.members"}
    assert torch.equal(model.head.prior, make_model().head.prior)
    assert not torch.equal(model.head.prior, make_model(seed=2).head.prior)


@pytest.mark.parametrize("kind", [EnsembleRewardModel, AutoModel, AutoModelForSequenceClassification])
def test_saved_and_loaded_scores_alike(tmp_path, kind):
    model = trained(make_model(prior_scale=0.7, pooling="mean"))
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path)
    assert type(loaded) is EnsembleRewardModel
    assert loaded.config.prior_scale == 0.7
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(loaded(*encode(RESPONSES)).members, model(*encode(RESPONSES)).members)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_saved_and_loaded_scores_alike(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra [llm]")
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["head"], r=2)
    model = peft.get_peft_model(make_model(freeze_backbone=False), settings)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert any("lora" in name for name in trainable)
    assert not any("prior" in name for name in trainable)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trainable:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    wanted = model.eval()(*encode(RESPONSES)).members
    model.save_pretrained(tmp_path)
    other = make_model(freeze_backbone=False, seed=9)  # another prior: the saved one must come back
    loaded = peft.PeftModel.from_pretrained(other, tmp_path).eval()
    torch.testing.assert_close(loaded(*encode(RESPONSES)).members, wanted, rtol=0, atol=1e-6)


def test_a_frozen_backbone_gets_no_gradient_and_stays_as_it_was():
    backbone = make_backbone()
    model = EnsembleRewardModel.from_backbone(backbone, index_dim=4)
    model(*encode(RESPONSES)).logits.sum().backward()
    assert all(parameter.grad is None and parameter.requires_grad for parameter in backbone.parameters())
    assert model.head.mean.grad is not None
    open_model = EnsembleRewardModel.from_backbone(backbone, index_dim=4, freeze_backbone=False)
    trained(open_model)(*encode(RESPONSES)).logits.sum().backward()
    assert backbone.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_backbones_have_a_head_in_float32(dtype):
    model = EnsembleRewardModel.from_backbone(make_backbone().to(dtype), index_dim=4)
    output = model(*encode(RESPONSES))
    assert output.members.dtype == output.logits.dtype == torch.float32
    assert bool(torch.isfinite(output.members).all())


def test_a_causal_model_gives_its_trunk():
    model = EnsembleRewardModel.from_backbone(make_backbone(causal=True), index_dim=6, seed=1)
    torch.testing.assert_close(model(*encode(RESPONSES)).members, make_model()(*encode(RESPONSES)).members)


def test_the_last_real_token_is_pooled_where_the_pad_token_ends_texts():
    tokenizer = make_tokenizer(pad_is_eos=True)
    backbone = make_backbone(pad_token_id=1)
    model = trained(EnsembleRewardModel.from_backbone(backbone, index_dim=6, seed=1))
    for side in ("left", "right"):
        ids, mask = encode(RESPONSES, side, tokenizer)
        alone = torch.cat([model(*encode([text])).logits for text in RESPONSES])
        torch.testing.assert_close(model(ids, mask).logits, alone, rtol=0, atol=1e-5)
        with pytest.raises(ParameterError, match="attention_mask of EnsembleRewardModel must be given where padding"):
            model(ids)


def test_a_mask_is_inferred_from_a_pad_token_of_its_own():
    model = trained(make_model())
    ids, mask = encode(RESPONSES)
    torch.testing.assert_close(model(ids).logits, model(ids, mask).logits)


def test_calls_as_trainers_make_them():
    """Chosen and rejected in one batch, use_cache passed along, the first logit a scalar reward with a gradient."""
    model = trained(make_model(freeze_backbone=False)).train()
    ids, mask = encode(RESPONSES)
    rewards = model(input_ids=ids, attention_mask=mask, use_cache=False, return_dict=True).logits[:, 0]
    chosen, rejected = rewards.chunk(2)
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    loss.backward()
    assert model.head.mean.grad.abs().sum() > 0
    assert model.config.num_labels == 1
    assert isinstance(model(ids, mask, return_dict=False), tuple)


def test_what_is_refused():
    model = make_model()
    ids, mask = encode(RESPONSES)
    with pytest.raises(ParameterError, match=r"index of EnsembleRewardModel must have shape \(6,\) or \(4, 6\)"):
        model(ids, mask, index=torch.zeros(5))
    with pytest.raises(ParameterError, match="labels of EnsembleRewardModel must be an argument of forward"):
        model(ids, mask, labels=ids)
    for option, value in (("index_dim", 0), ("prior_scale", -1.0), ("pooling", "first")):
        with pytest.raises(ParameterError, match=f"{option} of EnsembleRewardModel must"):
            make_model(**{option: value})
    with pytest.raises(ParameterError, match="revision of EnsembleRewardModel must be given only with the name"):
        make_model(revision="main")
    with pytest.raises(ParameterError, match="backbone of EnsembleRewardModel must be given"):
        EnsembleRewardModel(EnsembleRewardConfig())
