"""Gradients of every policy loss against central differences of the objective that its documentation states.

Frozen coefficients are computed at the point and held there, written out here with nothing but torch, so that a leak
through a weight, a baseline or a clipped ratio, or a lost factor, shows as a difference.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ensemblepp.policy import (
    AGGREGATIONS,
    centered_policy_loss,
    centered_policy_loss_from_logits,
    cispo_loss,
    covariance_loss,
    dense_centered_policy_loss,
    dppo_loss,
    gspo_loss,
    log_ratios,
    ppo_clip_loss,
    reference_kl_penalty,
    reinforce_loss,
    sampler_kl_penalty,
    selected_logprobs,
    sequence_ratios,
)
from tests.policy_reference import ADVANTAGES, GROUP, LOGPROB, MASK, OLD, SAMPLER
from tests.policy_toy import close, gradient, make_generator

STEP = 1e-6
TOLERANCE = 1e-8
KEEP = torch.ones(6, 5, dtype=torch.bool)
KEEP[2], KEEP[0, 3:] = False, False
ACTIVE = MASK.bool() & KEEP
WEIGHTS = (OLD - SAMPLER).exp().clamp(max=1.2)
SIGNAL = WEIGHTS * ADVANTAGES
TOKENS = MASK.sum()
TOTAL = ADVANTAGES.sum(1)
RATIO, LOSS_RATIO = (LOGPROB - SAMPLER).exp(), (LOGPROB - OLD).exp()

Objective = Callable[[Tensor], Tensor]


def differences(objective: Objective, point: Tensor) -> Tensor:
    """Central differences in every entry."""
    slope = torch.zeros_like(point)
    for place in range(point.numel()):
        values = []
        for side in (STEP, -STEP):
            moved = point.clone()
            moved.view(-1)[place] += side
            values.append(objective(moved))
        slope.view(-1)[place] = (values[0] - values[1]) / (2 * STEP)
    return slope


def mean(values: Tensor) -> Tensor:
    """Over all own tokens, the rejected ones counting with 0."""
    return torch.where(ACTIVE, values, 0.0).sum() / TOKENS


def clipped(logprob: Tensor) -> Tensor:
    ratio = (logprob - OLD).exp()
    return torch.minimum(ratio * ADVANTAGES, ratio.clamp(0.8, 1.2) * ADVANTAGES)


def unclipped_dual(logprob: Tensor) -> Tensor:
    return torch.where(ADVANTAGES < 0, torch.maximum(clipped(logprob), 1.3 * ADVANTAGES), clipped(logprob))


def geometric(logprob: Tensor) -> Tensor:
    """Of whole responses with one advantage each, where the published token form is the sequence form."""
    ratio = (((logprob - OLD) * MASK).sum(1) / MASK.sum(1)).exp()
    return torch.minimum(ratio * TOTAL, ratio.clamp(0.9, 1.1) * TOTAL)


def geometric_tokens(logprob: Tensor) -> Tensor:
    """s_t = sg[s] p_t / sg[p_t], s over all own tokens, the rejected ones too; clipped responses stand still."""
    frozen = (((LOGPROB - OLD) * MASK).sum(1) / MASK.sum(1)).exp()
    free = torch.where(TOTAL > 0, frozen <= 1.1, frozen >= 0.9)
    per_token = (free * frozen * TOTAL).unsqueeze(1) * (logprob - LOGPROB).exp()
    return torch.where(ACTIVE, per_token, 0.0).sum(1) / MASK.sum(1)


def trusted(divergence: Tensor, threshold: float) -> Tensor:
    outward = torch.where(SIGNAL > 0, LOGPROB > OLD, LOGPROB < OLD)
    return SIGNAL * LOSS_RATIO.clamp(max=20.0) * ~((divergence > threshold) & outward)


def bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def kept_lead() -> Tensor:
    """n / (n - 1) (R - mean) over the kept rows of each group; row 2 is rejected."""
    lead = torch.zeros(6, dtype=torch.float64)
    for group in GROUP.unique():
        rows = torch.tensor([row for row in range(6) if GROUP[row] == group and ACTIVE[row].any()])
        if len(rows) > 1:
            lead[rows] = (TOTAL[rows] - TOTAL[rows].mean()) * len(rows) / (len(rows) - 1)
    return lead


PAIR = {"mask": MASK, "keep": KEEP}
FROM_OLD = {"old_logprob": OLD, "advantages": ADVANTAGES, **PAIR}
CASES: dict[str, tuple[Objective, Objective]] = {
    "reinforce": (
        lambda p: reinforce_loss(p, ADVANTAGES, weights=WEIGHTS, **PAIR),
        lambda p: -mean(SIGNAL * p),
    ),
    "ppo": (
        lambda p: ppo_clip_loss(p, weights=WEIGHTS, **FROM_OLD),
        lambda p: -mean(WEIGHTS * clipped(p)),
    ),
    "dual clip": (
        lambda p: ppo_clip_loss(p, dual_clip=1.3, **FROM_OLD),
        lambda p: -mean(unclipped_dual(p)),
    ),
    "gspo": (
        lambda p: gspo_loss(
            p, OLD, TOTAL.unsqueeze(1).expand(6, 5), MASK, clip_low=0.1, clip_high=0.1, keep=KEEP.all(1)[:, None] & KEEP
        ),
        lambda p: -torch.where(KEEP.all(1), geometric(p), 0.0).mean(),
    ),
    "gspo, part of a response": (
        lambda p: gspo_loss(p, OLD, TOTAL.unsqueeze(1).expand(6, 5), MASK, clip_low=0.1, clip_high=0.1, keep=KEEP),
        lambda p: -geometric_tokens(p).mean(),
    ),
    "cispo": (
        lambda p: cispo_loss(p, lower=0.9, upper=1.1, weights=WEIGHTS, **FROM_OLD),
        lambda p: -mean(SIGNAL * LOSS_RATIO.clamp(0.9, 1.1) * p),
    ),
    "dppo, total variation": (
        lambda p: dppo_loss(p, threshold=0.05, weights=WEIGHTS, **FROM_OLD),
        lambda p: -mean(trusted((LOGPROB.exp() - OLD.exp()).abs(), 0.05) * p),
    ),
    "dppo, kl": (
        lambda p: dppo_loss(p, divergence="kl", threshold=0.01, weights=WEIGHTS, **FROM_OLD),
        lambda p: -mean(trusted(bernoulli_kl(OLD.exp(), LOGPROB.exp()), 0.01) * p),
    ),
    "covariance": (
        lambda p: covariance_loss(p, TOTAL, MASK, GROUP, sampler_logprob=SAMPLER, keep=KEEP),
        lambda p: -(kept_lead() * torch.where(ACTIVE, p - SAMPLER, 0.0).sum(1)).mean(),
    ),
    "sampler kl, k1": (
        lambda p: sampler_kl_penalty(p, SAMPLER, estimator="k1", **PAIR),
        lambda p: mean(SAMPLER - p),
    ),
    "sampler kl, k2": (
        lambda p: sampler_kl_penalty(p, SAMPLER, estimator="k2", **PAIR),
        lambda p: mean((p - SAMPLER).square() / 2),
    ),
    "sampler kl, k3": (
        lambda p: sampler_kl_penalty(p, SAMPLER, estimator="k3", **PAIR),
        lambda p: mean((p - SAMPLER).exp() - 1 - (p - SAMPLER)),
    ),
    "reference kl, token": (
        lambda p: reference_kl_penalty(p, SAMPLER, weights=WEIGHTS, **PAIR),
        lambda p: mean(WEIGHTS * (LOGPROB - SAMPLER) * p),
    ),
    "reference kl, sequence": (
        lambda p: reference_kl_penalty(p, SAMPLER, level="sequence", **PAIR),
        lambda p: mean(torch.where(ACTIVE, LOGPROB - SAMPLER, 0.0).flip(1).cumsum(1).flip(1) * p),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_loss_has_the_gradient_of_what_it_states(name: str) -> None:
    loss, objective = CASES[name]
    slope = gradient(loss, LOGPROB)
    close(slope, differences(objective, LOGPROB), TOLERANCE)
    assert (slope != 0).sum() >= 5
    assert not slope[~MASK.bool()].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_denominator_scales_the_gradient(aggregation: str) -> None:
    length, rows = MASK.sum(1, keepdim=True), 6
    share = {
        "token_mean": 1 / TOKENS,
        "token_sum": 1.0,
        "sequence_mean_token_sum": 1 / rows,
        "sequence_mean_token_mean": 1 / (rows * length),
        "sequence_mean_token_sum_norm": 1 / (rows * 5),
    }[aggregation]
    slope = gradient(lambda p: ppo_clip_loss(p, aggregation=aggregation, **FROM_OLD), LOGPROB)
    close(slope, differences(lambda p: -torch.where(ACTIVE, share * clipped(p), 0.0).sum(), LOGPROB), TOLERANCE)


# ----- losses of whole distributions --------------------------------------------------------------------------------

VOCAB, K = 4, 2
GENERATOR = make_generator(11)
LOGITS = torch.randn(3, 2, VOCAB, generator=GENERATOR, dtype=torch.float64)
LOG_Q = torch.randn(3, 2, VOCAB, generator=GENERATOR, dtype=torch.float64).log_softmax(-1)
DRAWN = torch.tensor([[0, 3], [2, 1], [1, 1]])
OWN = torch.tensor([[True, True], [True, True], [True, False]])
CREDIT = torch.randn(3, 2, generator=GENERATOR, dtype=torch.float64)
HEAD = LOG_Q.topk(K, -1)
F: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like,
    "tis": lambda r: r.clamp(max=2.0),
    "mis": lambda r: torch.where((r >= 0.5) & (r <= 5.0), r, 0.0),
    "full": lambda r: r,
}


def chosen(values: Tensor) -> Tensor:
    return values.gather(-1, DRAWN.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("correction", F)
def test_centred_losses_have_the_gradient_of_what_they_state(correction: str) -> None:
    f, p, q = F[correction], LOGITS.softmax(-1), LOG_Q.exp()
    weight = f(chosen(p) / chosen(q))

    def objective(z: Tensor, mass: Tensor, where: Tensor) -> Tensor:
        log_p = z.log_softmax(-1)
        drift = (mass * log_p.gather(-1, where)).sum(-1)
        return -torch.where(OWN, CREDIT * (weight * chosen(log_p) - drift), 0.0).sum() / OWN.sum()

    def dense(z: Tensor) -> Tensor:
        return dense_centered_policy_loss(z.log_softmax(-1), LOG_Q, DRAWN, CREDIT, OWN, correction=correction)

    def by_head(z: Tensor) -> Tensor:
        return centered_policy_loss_from_logits(
            z, DRAWN, chosen(LOG_Q), HEAD.indices, HEAD.values, CREDIT, OWN, correction=correction, block_values=5
        )

    every = torch.arange(VOCAB).expand_as(LOGITS)
    close(gradient(dense, LOGITS), differences(lambda z: objective(z, q * f(p / q), every), LOGITS), TOLERANCE)
    p_head, q_head = p.gather(-1, HEAD.indices), HEAD.values.exp()
    rho = (1 - q_head.sum(-1, keepdim=True)) / (1 - p_head.sum(-1, keepdim=True))
    mass = q_head * f(p_head / q_head) - rho * f(1 / rho) * p_head
    close(gradient(by_head, LOGITS), differences(lambda z: objective(z, mass, HEAD.indices), LOGITS), TOLERANCE)


def test_selected_logprobs_and_ratios_have_the_gradient_of_their_values() -> None:
    """Nothing is frozen here, so the function itself is what is differenced."""
    tilt = torch.randn(3, 2, K, generator=GENERATOR, dtype=torch.float64)

    def selected(z: Tensor) -> Tensor:
        return (tilt * selected_logprobs(z, HEAD.indices, OWN, temperature=0.7, block_values=5)).sum()

    def ratio(p: Tensor) -> Tensor:
        return (TOTAL * sequence_ratios(log_ratios(p, SAMPLER, MASK), MASK)).sum()

    for function, point in ((selected, LOGITS), (ratio, LOGPROB)):
        close(gradient(function, point), differences(function, point), 10 * TOLERANCE)


# ----- batches without a token, and padding -------------------------------------------------------------------------


@pytest.mark.parametrize("correction", F)
@pytest.mark.parametrize("rows", [0, 3])
def test_centred_losses_of_batches_without_a_token_are_zero_with_gradient_zero(rows: int, correction: str) -> None:
    nothing = torch.zeros(rows, 2, dtype=torch.bool)
    junk = torch.full((rows, 2, VOCAB), torch.nan, dtype=torch.float64)
    for mask, keep, point in ((nothing, None, junk), (~nothing, nothing, LOGITS[:rows])):
        q, where = LOG_Q[:rows] if mask.any() else junk, HEAD.indices[:rows]
        leaves = [point.clone().requires_grad_() for _ in range(3)]
        given = {"advantages": q[..., 0], "mask": mask, "keep": keep, "correction": correction}
        losses = [
            dense_centered_policy_loss(leaves[0], q, DRAWN[:rows], **given),
            centered_policy_loss_from_logits(leaves[1], DRAWN[:rows], q[..., 0], where, q[..., :K], **given),
            centered_policy_loss(leaves[2][..., 0], q[..., 0], leaves[2][..., 1:], q[..., 1:], **given),
        ]
        for loss, leaf in zip(losses, leaves, strict=True):
            assert loss.item() == 0
            loss.backward()
            assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("junk", [torch.nan, -torch.inf])
def test_padding_reaches_neither_value_nor_gradient_of_the_dense_loss(junk: float) -> None:
    def loss(log_p: Tensor, fill: float | None) -> Tensor:
        log_q, credit = LOG_Q, CREDIT
        if fill is not None:
            log_q, credit = log_q.masked_fill(~OWN.unsqueeze(-1), fill), credit.masked_fill(~OWN, fill)
        return dense_centered_policy_loss(log_p, log_q, DRAWN, credit, OWN, correction="tis")

    log_p = LOGITS.log_softmax(-1)
    spoilt = log_p.masked_fill(~OWN.unsqueeze(-1), junk)
    assert torch.equal(loss(spoilt, junk), loss(log_p, None))
    assert torch.equal(gradient(lambda z: loss(z, junk), spoilt), gradient(lambda z: loss(z, None), log_p))
