"""Presets: every published name is the composition it says, and rejected rows stay out of everything."""

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.policy.advantages import rloo_advantages
from ensemblepp.policy.losses import ppo_clip_loss, reinforce_loss
from ensemblepp.policy.presets import PRESETS, Preset, RolloutCorrection, rollout_correction
from ensemblepp.policy.token_baseline import optimal_token_baseline
from tests.policy_reference import ADVANTAGES, INPUTS, LOGPROB, MASK, OLD, SAMPLER, loss_case
from tests.policy_toy import Tree, make_generator

SUMS = "sequence_mean_token_sum"


def correct(preset: str | Preset, trainer: Tensor = LOGPROB, **options: Tensor) -> RolloutCorrection:
    given = {"sampler_logprob": SAMPLER, "old_logprob": OLD, "mask": MASK, **options}
    return rollout_correction(preset, trainer_logprob=trainer, **given)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("bypass_reinforce|is=None|rs=None:None|seq-mean-token-sum", "reinforce"),
        ("bypass_reinforce|is=token|rs=None:None|seq-mean-token-sum", Preset("bypass", "reinforce", weights="token")),
        (
            "bypass_reinforce|is=None|rs=seq_mean_k3:0.02|seq-mean-token-sum",
            Preset("bypass", "reinforce", rejection="seq_mean_k3", thresholds=0.02),
        ),
        ("bypass_ppo_clip|is=sequence|rs=None:None|seq-mean-token-sum", "bypass_ppo_clip"),
        (
            "bypass_ppo_clip|is=token|rs=seq_mean_k1:0.8_1.25|seq-mean-token-sum",
            Preset("bypass", "ppo_clip", rejection="seq_mean_k1", thresholds="0.8_1.25"),
        ),
        ("ppo_clip_vanilla|seq-mean-token-sum", "ppo"),
        ("ppo_clip_vanilla|seq-mean-token-sum", "disabled"),
    ],
)
def test_a_public_implementation_gets_the_same_updates(name: str, preset: str | Preset) -> None:
    """It divides by the responses that are left, we by all of them."""
    wanted, slope = loss_case(name)
    leaf = LOGPROB.clone().requires_grad_()
    correction = correct(preset, leaf)
    share = correction.keep.any(1).double().mean()
    value = correction.loss(leaf, ADVANTAGES, aggregation=SUMS)
    assert value.item() == pytest.approx(wanted * share.item(), abs=1e-8)
    value.backward()
    torch.testing.assert_close(leaf.grad, slope * share, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", PRESETS)
def test_each_name_says_what_it_does(name: str) -> None:
    preset, parts = PRESETS[name], name.split("_")
    assert preset.source
    if name not in ("ppo", "gspo", "cispo", "dppo", "disabled", "reinforce"):
        assert preset.mode == parts[0]
        assert (preset.loss == "reinforce") == ("pg" in parts)
        assert (preset.rejection is not None) == ("rs" in parts)
        level = "token" if "token" in parts or name == "decoupled_ppo" else "sequence" if "seq" in parts else None
        assert preset.weights == ("sequence" if name == "bypass_pg_is" else level)
    assert preset.rejection == (
        "seq_mean_k1" if "geo" in parts else "seq_mean_k3" if "k3" in parts else "seq_sum_k1" if "rs" in parts else None
    )


@pytest.mark.parametrize("name", PRESETS)
def test_at_equal_policies_every_preset_is_the_plain_gradient(name: str) -> None:
    leaf = LOGPROB.clone().requires_grad_()
    correction = correct(name, leaf, sampler_logprob=LOGPROB, old_logprob=LOGPROB)
    assert torch.equal(correction.keep, MASK.bool())
    assert correction.weights is None or torch.equal(correction.weights, MASK)
    correction.loss(leaf, ADVANTAGES, aggregation="token_mean").backward()
    plain = LOGPROB.clone().requires_grad_()
    reinforce_loss(plain, ADVANTAGES, MASK).backward()
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", PRESETS)
def test_padding_all_masked_and_all_rejected_batches(name: str) -> None:
    clean = correct(name)
    value = clean.loss(LOGPROB, ADVANTAGES)
    junk = [each.masked_fill(~MASK.bool(), torch.nan) for each in (LOGPROB, SAMPLER, OLD)]
    dirty = correct(name, junk[0], sampler_logprob=junk[1], old_logprob=junk[2])
    assert torch.equal(dirty.keep, clean.keep)
    assert torch.equal(dirty.loss(junk[0], ADVANTAGES), value)
    for options in ({"mask": MASK * 0}, {"keep": torch.zeros(6, 5).bool()}):
        leaf = LOGPROB.clone().requires_grad_()
        loss = correct(name, leaf, **options).loss(leaf, ADVANTAGES)
        loss.backward()
        assert loss.item() == 0
        assert torch.equal(leaf.grad, torch.zeros(6, 5, dtype=torch.float64))


def test_decoupled_weights_correct_old_and_bypass_weights_correct_the_trainer() -> None:
    decoupled, bypass = correct("decoupled_seq_is"), correct("bypass_pg_is")
    for correction, corrected in ((decoupled, OLD), (bypass, LOGPROB)):
        wanted = ((corrected - SAMPLER) * MASK).sum(1, keepdim=True).exp().clamp(max=2.0) * MASK
        assert correction.weights is not None
        torch.testing.assert_close(correction.weights, wanted, rtol=0, atol=1e-12)
    direct = ppo_clip_loss(LOGPROB, OLD, ADVANTAGES, MASK, weights=decoupled.weights, clip_low=0.1)
    assert torch.equal(decoupled.loss(LOGPROB, ADVANTAGES, clip_low=0.1), direct)


def test_a_rejected_reward_of_100_changes_no_kept_gradient() -> None:
    """A response the trainer finds far less likely than the sampler did is rejected, whatever it earned."""
    sampler = SAMPLER.clone()
    sampler[1] = OLD[1] + 2
    group, slopes = INPUTS["group"].long(), []
    for reward in (0.0, 100.0):
        rewards = torch.tensor([1.0, reward, 0.5, 2.0, -1.0, 0.3], dtype=torch.float64)
        leaf = LOGPROB.clone().requires_grad_()
        correction = correct("decoupled_seq_is_rs", leaf, sampler_logprob=sampler)
        assert not correction.keep[1].any()
        assert correction.keep[0].any()
        advantages = rloo_advantages(rewards, MASK, group, keep=correction.keep)
        token = optimal_token_baseline(
            rewards, MASK, group, ADVANTAGES.abs(), keep=correction.keep, importance_weights=correction.weights
        )
        correction.loss(leaf, advantages + token).backward()
        slopes.append(leaf.grad)
    assert torch.equal(*slopes)
    assert slopes[0].abs().sum() > 0


def test_sequence_masking_has_the_bias_of_what_it_leaves_out() -> None:
    """E_q[1{rho <= C} rho f] - E_p[f] = -E_p[f 1{rho > C}], by enumeration, for f = R S."""
    tree, generator = Tree(3, 3), make_generator(2)
    sampler, trainer, rewards = (
        tree.random_logits(generator),
        tree.random_logits(generator),
        tree.random_rewards(generator),
    )
    preset = Preset(
        "bypass", "reinforce", weights="sequence", upper=None, rejection="seq_sum_k1", thresholds="0.0000001_1.5"
    )
    q, leaf = tree.probs(sampler), trainer.clone().requires_grad_()
    own = tree.logprobs(leaf)
    correction = rollout_correction(preset, trainer_logprob=own, sampler_logprob=tree.logprobs(sampler), mask=tree.mask)
    signal = (q * len(q) * rewards).unsqueeze(1).expand(tree.mask.shape)
    (slope,) = torch.autograd.grad(-correction.loss(own, signal, aggregation=SUMS), leaf)
    p = tree.probs(trainer)
    outside = p / q > 1.5
    assert 0 < outside.sum() < len(q)
    bias = -(p * rewards * outside) @ tree.scores(trainer)
    wanted = tree.gradient(trainer, rewards).flatten() + bias
    torch.testing.assert_close(slope.flatten(), wanted, rtol=0, atol=1e-10)


def test_what_is_refused() -> None:
    with pytest.raises(ParameterError, match="preset of rollout_correction must be one of 'bypass_pg_geo_rs', "):
        correct("best")
    with pytest.raises(ParameterError, match="old_logprob of rollout_correction must be given in decoupled mode"):
        rollout_correction("ppo", trainer_logprob=LOGPROB, sampler_logprob=SAMPLER, mask=MASK)
    with pytest.raises(ParameterError, match="weights of Preset must stay None for 'ppo_clip' in bypass mode"):
        Preset("bypass", "ppo_clip", weights="token")
    with pytest.raises(ParameterError, match="upper of Preset must be a finite number > 0; got 0"):
        Preset("bypass", "reinforce", upper=0.0)
    with pytest.raises(ParameterError, match="mode of Preset must be one of 'bypass', 'decoupled'"):
        Preset("direct", "reinforce")
    with pytest.raises(ParameterError, match=r"options of Preset must be one of .*; got 'seq_max_k1'"):
        Preset("bypass", "reinforce", rejection="seq_max_k1", thresholds="0.5_2")
    with pytest.raises(ParameterError, match="thresholds of Preset must be numbers >= 0"):
        Preset("bypass", "reinforce", rejection="token_k2")
    with pytest.raises(ParameterError, match="lower of Preset must be a finite number >= 0 and <= 1"):
        Preset("bypass", "reinforce", rejection="token_k1", thresholds="2_1")


def test_no_option_is_silently_ignored() -> None:
    with pytest.raises(ParameterError, match=r"thresholds of Preset must stay None without rejection; got '0.5_2'"):
        Preset("bypass", "reinforce", thresholds="0.5_2")
    with pytest.raises(ParameterError, match="normalise of Preset must stay False without weights; got True"):
        Preset("bypass", "reinforce", normalise=True)
