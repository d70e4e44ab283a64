"""Policy losses against enumeration of a small tree, a public implementation's numbers and hand-computed values."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.policy.aggregation import AGGREGATIONS, aggregate
from ensemblepp.policy.losses import (
    cispo_loss,
    covariance_loss,
    dppo_loss,
    gspo_loss,
    ppo_clip_loss,
    reinforce_loss,
)
from ensemblepp.policy.penalties import reference_kl_penalty, sampler_kl_penalty
from tests.policy_reference import ADVANTAGES, GROUP, LOGPROB, MASK, OLD, SAMPLER, loss_case
from tests.policy_toy import Tree, close, expected, gradient, make_trees, policies

SUMS = "sequence_mean_token_sum"
TREES = make_trees()

Loss = Callable[[Tensor], Tensor]


# ----- a public implementation --------------------------------------------------------------------------------------

TOKEN_WEIGHTS = (LOGPROB - SAMPLER).exp().clamp(max=2.0)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        *(
            (f"ppo_clip_vanilla|{theirs}", partial(ppo_clip_loss, old_logprob=OLD, aggregation=ours, dual_clip=3.0))
            for theirs, ours in zip(
                ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
                AGGREGATIONS,
                strict=True,
            )
        ),
        ("dppo_tv|token-mean", partial(dppo_loss, old_logprob=OLD, threshold=0.2)),
        ("gspo|token-mean", partial(gspo_loss, old_logprob=OLD, clip_low=0.2, clip_high=0.2)),
        ("bypass_reinforce|is=None|rs=None:None|seq-mean-token-sum", partial(reinforce_loss, aggregation=SUMS)),
        (
            "bypass_reinforce|is=token|rs=None:None|seq-mean-token-sum",
            partial(reinforce_loss, weights=TOKEN_WEIGHTS, aggregation=SUMS),
        ),
        (
            "bypass_ppo_clip|is=sequence|rs=None:None|seq-mean-token-sum",
            partial(ppo_clip_loss, old_logprob=SAMPLER, aggregation=SUMS),
        ),
    ],
)
def test_a_public_implementation_gets_the_same_loss_and_gradient(name: str, loss: Loss) -> None:
    wanted, slope = loss_case(name)
    leaf = LOGPROB.clone().requires_grad_()
    value = loss(leaf, advantages=ADVANTAGES, mask=MASK)  # type: ignore[call-arg]
    assert value.item() == pytest.approx(wanted, abs=1e-8)
    value.backward()
    close(leaf.grad, slope, 1e-8)


# ----- denominators -------------------------------------------------------------------------------------------------


def test_the_five_denominators_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, torch.nan], [5.0, torch.inf, torch.nan], [torch.nan] * 3], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    for aggregation, wanted in zip(AGGREGATIONS, (8 / 3, 8.0, 4.0, 3.25, 4 / 3), strict=True):
        assert aggregate(values, mask, aggregation).item() == pytest.approx(wanted)
        assert aggregate(values, mask * 0, aggregation).item() == 0
        assert aggregate(values[:0], mask[:0], aggregation).item() == 0
    with pytest.raises(ParameterError, match="aggregation of aggregate must be one of 'sequence_mean_token_mean', "):
        aggregate(values, mask, "mean")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rejecting_half_of_the_batch_halves_the_gradient(aggregation: str) -> None:
    twice = [torch.cat([each, each]) for each in (LOGPROB, ADVANTAGES, MASK)]
    keep = torch.cat([torch.ones(6, 5), torch.zeros(6, 5)]).bool()
    whole = gradient(lambda p: reinforce_loss(p, *twice[1:], aggregation=aggregation), twice[0])
    half = gradient(lambda p: reinforce_loss(p, *twice[1:], keep=keep, aggregation=aggregation), twice[0])
    assert torch.equal(half[:6], whole[:6])
    assert torch.equal(half[6:], torch.zeros(6, 5, dtype=torch.float64))
    close(half.sum(), whole.sum() / 2)


def test_masking_out_rejected_rows_renormalises_instead() -> None:
    value, slope = loss_case("bypass_reinforce|is=None|rs=seq_mean_k3:0.02|seq-mean-token-sum")
    kept = slope.abs().sum(1) > 0
    mask = MASK * kept.unsqueeze(1)
    wanted = torch.tensor(value, dtype=torch.float64)
    close(reinforce_loss(LOGPROB, ADVANTAGES, mask, aggregation=SUMS), wanted, 1e-8)
    shrunk = reinforce_loss(LOGPROB, ADVANTAGES, MASK, keep=mask.bool(), aggregation=SUMS)
    close(shrunk, wanted * kept.double().mean(), 1e-8)


# ----- every loss ---------------------------------------------------------------------------------------------------

EVERY: dict[str, Callable[..., Tensor]] = {
    "reinforce": lambda p, a, m, **o: reinforce_loss(p, a, m, weights=TOKEN_WEIGHTS[: len(p)], **o),
    "ppo": lambda p, a, m, **o: ppo_clip_loss(p, OLD[: len(p)], a, m, weights=TOKEN_WEIGHTS[: len(p)], **o),
    "dual": lambda p, a, m, **o: ppo_clip_loss(p, SAMPLER[: len(p)], a, m, dual_clip=1.1, **o),
    "gspo": lambda p, a, m, **o: gspo_loss(p, OLD[: len(p)], a, m, clip_low=0.2, clip_high=0.2, **o),
    "cispo": lambda p, a, m, **o: cispo_loss(p, SAMPLER[: len(p)], a, m, lower=0.9, upper=1.1, **o),
    "dppo_tv": lambda p, a, m, **o: dppo_loss(p, OLD[: len(p)], a, m, threshold=0.1, **o),
    "dppo_kl": lambda p, a, m, **o: dppo_loss(p, OLD[: len(p)], a, m, threshold=0.01, divergence="kl", **o),
    "covariance": lambda p, a, m, **o: covariance_loss(p, a, m, GROUP[: len(p)], **o),
    "tangent": lambda p, a, m, **o: covariance_loss(p, a, m, GROUP[: len(p)], sampler_logprob=SAMPLER[: len(p)], **o),
    "sampler_kl": lambda p, a, m, **o: sampler_kl_penalty(p, SAMPLER[: len(p)], m, **o),
    "reference_kl": lambda p, a, m, **o: reference_kl_penalty(p, SAMPLER[: len(p)], m, level="sequence", **o),
}


@pytest.mark.parametrize("name", EVERY)
def test_padding_and_rejected_tokens_never_reach_value_or_gradient(name: str) -> None:
    loss = EVERY[name]
    keep = torch.ones(6, 5).bool()
    keep[2], keep[0, 3:] = False, False
    clean = loss(LOGPROB, ADVANTAGES, MASK, keep=keep)
    slope = gradient(lambda p: loss(p, ADVANTAGES, MASK, keep=keep), LOGPROB)
    assert slope.abs().sum() > 0
    outside = ~MASK.bool() | (~keep if name != "gspo" else False)
    for junk in (torch.nan, -torch.inf):
        dirty = LOGPROB.masked_fill(outside, junk)
        advantages = ADVANTAGES.masked_fill(~MASK.bool(), torch.nan)
        assert torch.equal(loss(dirty, advantages, MASK, keep=keep), clean)
        assert torch.equal(gradient(lambda p, a=advantages: loss(p, a, MASK, keep=keep), dirty), slope)
    assert torch.equal(slope[~MASK.bool()], torch.zeros_like(slope[~MASK.bool()]))


@pytest.mark.parametrize("name", EVERY)
def test_batches_without_a_token_give_zero_with_gradient_zero(name: str) -> None:
    loss, nothing = EVERY[name], torch.zeros(6, 5).bool()
    for rows, mask, keep in ((6, nothing, None), (6, MASK, nothing), (0, MASK, None)):
        leaf = LOGPROB[:rows].clone().requires_grad_()
        value = loss(leaf, ADVANTAGES[:rows], mask[:rows], keep=None if keep is None else keep[:rows])
        assert value.item() == 0
        value.backward()
        assert torch.equal(leaf.grad, torch.zeros(rows, 5, dtype=torch.float64))


@pytest.mark.parametrize("name", EVERY)
def test_nothing_but_the_trainer_carries_gradient(name: str) -> None:
    leaf, advantages = LOGPROB.clone().requires_grad_(), ADVANTAGES.clone().requires_grad_()
    EVERY[name](leaf, advantages, MASK).backward()
    assert advantages.grad is None
    old, weights = OLD.clone().requires_grad_(), TOKEN_WEIGHTS.clone().requires_grad_()
    for loss in (ppo_clip_loss, gspo_loss, cispo_loss, dppo_loss):
        loss(leaf, old, ADVANTAGES, MASK, weights=weights).backward()
    covariance_loss(leaf, ADVANTAGES, MASK, GROUP, sampler_logprob=old).backward()
    sampler_kl_penalty(leaf, old, MASK).backward()
    reference_kl_penalty(leaf, old, MASK, weights=weights).backward()
    assert old.grad is None
    assert weights.grad is None


def test_half_precision_is_widened() -> None:
    for loss in EVERY.values():
        half = loss(LOGPROB.to(torch.bfloat16), ADVANTAGES.float(), MASK)
        assert half.dtype in (torch.float32, torch.float64)


# ----- REINFORCE and importance weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
def test_sequence_weights_give_the_true_gradient_and_token_weights_only_that_of_the_surrogate(tree: Tree) -> None:
    sampler, trainer, rewards = policies(tree)
    log_ratio = tree.logprobs(trainer) - tree.logprobs(sampler)
    signal = expected(tree, sampler, rewards)

    def slope(weights: Tensor) -> Tensor:
        return gradient(
            lambda z: (
                -reinforce_loss(tree.logprobs(z, torch.nan), signal, tree.mask, weights=weights, aggregation=SUMS)
            ),
            trainer,
        )

    true = tree.gradient(trainer, rewards)
    close(slope(log_ratio.sum(1, keepdim=True).exp().expand_as(log_ratio)), true, 1e-12)
    token = slope(log_ratio.exp())
    surrogate = gradient(
        lambda z: (signal[:, 0] / len(tree.tokens)) @ (tree.logprobs(z) - tree.logprobs(sampler)).exp().sum(1), trainer
    )
    close(token, surrogate)
    assert ((token - true).abs().max() < 1e-12) == (tree.horizon == 1)


def test_the_gradient_is_the_weighted_score_and_differentiating_the_weights_biases_it() -> None:
    tree = TREES[0]
    sampler, trainer, rewards = policies(tree)
    signal = rewards.unsqueeze(1).expand(tree.mask.shape)
    weights = (tree.logprobs(trainer) - tree.logprobs(sampler)).exp()
    loss = partial(reinforce_loss, advantages=signal, mask=tree.mask, weights=weights, aggregation="token_sum")
    wanted = -((weights * signal).unsqueeze(-1) * tree.token_scores(trainer)).sum((0, 1)).view_as(trainer)
    close(gradient(lambda z: loss(tree.logprobs(z)), trainer), wanted)
    step = 1e-6
    for place in ((0, 0), (3, 2)):
        moved = [trainer.clone(), trainer.clone()]
        moved[0][place] += step
        moved[1][place] -= step
        finite = (loss(tree.logprobs(moved[0])) - loss(tree.logprobs(moved[1]))) / (2 * step)
        close(finite, wanted[place], 1e-7)
    through = gradient(
        lambda z: -((tree.logprobs(z) - tree.logprobs(sampler)).exp() * signal * tree.logprobs(z)).sum(), trainer
    )
    assert (through - wanted).abs().max() > 0.1


# ----- clipped losses -----------------------------------------------------------------------------------------------


def test_clipping_by_hand() -> None:
    ratio = torch.tensor([[1.5, 0.5, 1.5, 0.5, 4.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    zeros, mask = torch.zeros_like(ratio), torch.ones(1, 5)
    loss = partial(ppo_clip_loss, old_logprob=zeros, advantages=advantages, mask=mask, aggregation="token_sum")
    slope = gradient(lambda p: loss(p), ratio.log())
    close(slope, torch.tensor([[0.0, -0.5, 1.5, 0.0, 4.0]], dtype=torch.float64))
    assert loss(ratio.log()).item() == pytest.approx(-1.2 - 0.5 + 1.5 + 0.8 + 4.0)
    dual = partial(loss, dual_clip=3.0)
    assert dual(ratio.log()).item() == pytest.approx(-1.2 - 0.5 + 1.5 + 0.8 + 3.0)
    assert gradient(dual, ratio.log())[0, 4] == 0
    wide = gradient(partial(loss, clip_high=0.6, clip_low=0.6), ratio.log())
    close(wide[0, [0, 3]], torch.tensor([-1.5, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("loss", [ppo_clip_loss, gspo_loss, cispo_loss, dppo_loss])
def test_at_ratio_one_every_surrogate_has_the_gradient_of_reinforce(loss: Callable[..., Tensor]) -> None:
    options = {"mask": MASK, "advantages": ADVANTAGES, "weights": TOKEN_WEIGHTS, "aggregation": "token_sum"}
    wanted = gradient(lambda p: reinforce_loss(p, **options), LOGPROB)
    close(gradient(lambda p: loss(p, LOGPROB, **options), LOGPROB), wanted)


def test_decoupled_clipping_multiplies_two_corrections() -> None:
    """w r = (p_old / q)(p / p_old) is the whole ratio while nothing clips."""
    options = {"advantages": ADVANTAGES, "mask": MASK, "clip_low": 1.0, "clip_high": 1e6}
    whole = ppo_clip_loss(LOGPROB, SAMPLER, **options)
    close(ppo_clip_loss(LOGPROB, OLD, weights=(OLD - SAMPLER).exp(), **options), whole)


def test_gspo_is_the_clipped_sequence_objective_when_advantages_are_per_response() -> None:
    advantages = ADVANTAGES[:, :1].expand(6, 5)

    def direct(logprob: Tensor) -> Tensor:
        geometric = (((logprob - OLD) * MASK).sum(1) / MASK.sum(1)).exp()
        clipped = geometric.clamp(0.95, 1.05)
        return -torch.minimum(geometric * advantages[:, 0], clipped * advantages[:, 0]).mean()

    def ours(logprob: Tensor) -> Tensor:
        return gspo_loss(logprob, OLD, advantages, MASK, clip_low=0.05, clip_high=0.05)

    close(ours(LOGPROB), direct(LOGPROB))
    close(gradient(ours, LOGPROB), gradient(direct, LOGPROB))


def test_cispo_is_reinforce_with_frozen_clipped_ratios() -> None:
    weights = (LOGPROB - SAMPLER).exp().clamp(0.9, 1.1)
    wanted = partial(reinforce_loss, advantages=ADVANTAGES, mask=MASK, weights=weights)
    actual = partial(cispo_loss, old_logprob=SAMPLER, advantages=ADVANTAGES, mask=MASK, lower=0.9, upper=1.1)
    close(actual(LOGPROB), wanted(LOGPROB))
    close(gradient(actual, LOGPROB), gradient(wanted, LOGPROB))


@pytest.mark.parametrize(("divergence", "threshold"), [("tv", 0.2), ("kl", 0.05)])
def test_dppo_blocks_only_tokens_far_away_and_moving_outward(divergence: str, threshold: float) -> None:
    new = torch.tensor([[0.9, 0.52, 0.1, 0.9, 1e-4, 0.1]], dtype=torch.float64)
    old = torch.tensor([[0.5, 0.5, 0.5, 0.5, 1e-6, 0.5]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, 1.0, 1.0]], dtype=torch.float64)
    slope = gradient(
        lambda p: dppo_loss(
            p,
            old.log(),
            advantages,
            torch.ones(1, 6),
            divergence=divergence,
            threshold=threshold,
            aggregation="token_sum",
        ),
        new.log(),
    )
    close(slope, torch.tensor([[0.0, -1.04, 0.0, 1.8, -20.0, -0.2]], dtype=torch.float64))


# ----- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ppo_clip_loss(LOGPROB, OLD, ADVANTAGES, MASK, clip_low=1.5), "clip_low of ppo_clip_loss must be"),
        (lambda: ppo_clip_loss(LOGPROB, OLD, ADVANTAGES, MASK, dual_clip=1.0), "dual_clip of ppo_clip_loss must be"),
        (lambda: cispo_loss(LOGPROB, OLD, ADVANTAGES, MASK, lower=2.0), "upper of cispo_loss must be"),
        (lambda: dppo_loss(LOGPROB, OLD, ADVANTAGES, MASK, divergence="js"), "divergence of dppo_loss must be one of"),
        (
            lambda: reinforce_loss(LOGPROB * torch.nan, ADVANTAGES, MASK),
            "trainer_logprob of reinforce_loss must be fin",
        ),
        (lambda: reinforce_loss(LOGPROB, ADVANTAGES / 0, MASK), "advantages of reinforce_loss must be finite"),
        (lambda: reinforce_loss(LOGPROB, ADVANTAGES, MASK * 2), "mask of reinforce_loss must hold 0 and 1 only"),
        (lambda: sampler_kl_penalty(LOGPROB, OLD, MASK, estimator="k4"), "estimator of sampler_kl_penalty must be one"),
        (lambda: reference_kl_penalty(LOGPROB, OLD, MASK, level="word"), "level of reference_kl_penalty must be one"),
    ],
)
def test_what_is_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()
