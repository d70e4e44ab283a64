"""Policy losses against enumeration of a small tree, a public implementation's numbers and finite differences."""

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.policy.advantages import rloo_advantages, weighted_advantages
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
from ensemblepp.policy.token_baseline import optimal_token_baseline
from tests.policy_toy import Tree, make_generator, make_trees

CASES = json.loads((Path(__file__).parents[1] / "reference" / "rollout_correction_cases.json").read_text())
INPUTS = {name: torch.tensor(values, dtype=torch.float64) for name, values in CASES["inputs"].items()}
LOGPROB, OLD, SAMPLER = (INPUTS[name] for name in ("log_prob", "old_log_prob", "rollout_log_prob"))
MASK, ADVANTAGES = INPUTS["mask"], INPUTS["advantages"]
SUMS = "sequence_mean_token_sum"
TREES = make_trees()

Loss = Callable[[Tensor], Tensor]


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def gradient(loss: Loss, point: Tensor) -> Tensor:
    leaf = point.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def policies(tree: Tree, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(sampler logits, trainer logits, rewards)."""
    generator = make_generator(seed)
    return tree.random_logits(generator), tree.random_logits(generator), tree.random_rewards(generator)


def expected(tree: Tree, sampler: Tensor, values: Tensor) -> Tensor:
    """What to multiply advantages with so that the mean over all sequences becomes an expectation under the sampler."""
    return (tree.probs(sampler) * len(tree.tokens) * values).unsqueeze(1).expand(tree.mask.shape)


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
    (case,) = [case for case in CASES["loss"] if case["name"] == name]
    leaf = LOGPROB.clone().requires_grad_()
    value = loss(leaf, advantages=ADVANTAGES, mask=MASK)  # type: ignore[call-arg]
    assert value.item() == pytest.approx(case["loss"], abs=1e-8)
    value.backward()
    close(leaf.grad, torch.tensor(case["grad_log_prob"], dtype=torch.float64), 1e-8)


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
    (case,) = [case for case in CASES["loss"] if "seq_mean_k3" in case["name"]]
    kept = torch.tensor(case["grad_log_prob"]).abs().sum(1) > 0
    mask = MASK * kept.unsqueeze(1)
    wanted = torch.tensor(case["loss"], dtype=torch.float64)
    close(reinforce_loss(LOGPROB, ADVANTAGES, mask, aggregation=SUMS), wanted, 1e-8)
    shrunk = reinforce_loss(LOGPROB, ADVANTAGES, MASK, keep=mask.bool(), aggregation=SUMS)
    close(shrunk, wanted * kept.double().mean(), 1e-8)


# ----- every loss ---------------------------------------------------------------------------------------------------

GROUP = INPUTS["group"].long()
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


# ----- baselines ----------------------------------------------------------------------------------------------------


def grouped(tree: Tree, sampler: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every ordered group of `size` responses: (rows of the tree, group numbers, probability of each group)."""
    rows = torch.cartesian_prod(*[torch.arange(len(tree.tokens))] * size)
    return rows.flatten(), torch.arange(len(rows)).repeat_interleave(size), tree.probs(sampler)[rows].prod(1)


def group_gradients(tree: Tree, trainer: Tensor, rows: Tensor, advantages: Tensor, size: int) -> Tensor:
    """The mean of sum_t A_t s_t over each group: (groups, parameters)."""
    terms = torch.einsum("rt,rtp->rp", advantages, tree.token_scores(trainer)[rows])
    return terms.unflatten(0, (-1, size)).mean(1)


def logit_energy(tree: Tree, trainer: Tensor) -> Tensor:
    """|s_t|^2 of the tabular policy, which is |e_y - pi|^2."""
    return tree.token_scores(trainer).square().sum(-1)


@pytest.mark.parametrize("tree", [Tree(2, 3), Tree(3, 2, eos=0)])
def test_leave_one_out_baselines_are_unbiased_and_inclusive_ones_shrink(tree: Tree) -> None:
    _, trainer, rewards = policies(tree, seed=1)
    rows, group, probability = grouped(tree, trainer, 2)
    energy, mask = logit_energy(tree, trainer)[rows], tree.mask[rows]
    true = tree.gradient(trainer, rewards).flatten()
    for leave_one_out in (True, False):
        advantages = optimal_token_baseline(rewards[rows], mask, group, energy, leave_one_out=leave_one_out)
        mean = probability @ group_gradients(tree, trainer, rows, advantages, 2)
        assert ((mean - true).abs().max() < 1e-10) == leave_one_out
        assert leave_one_out or mean.norm() < 0.7 * true.norm()
    rloo = rloo_advantages(rewards[rows], mask, group)
    close(probability @ group_gradients(tree, trainer, rows, rloo, 2), true)


@pytest.mark.parametrize("seed", range(4))
def test_second_moments_fall_from_no_baseline_to_the_optimal_token_baseline(seed: int) -> None:
    """One group of all sequences, each weighted by its probability (a weight enters squared)."""
    tree, generator = Tree(3, 3), make_generator(seed)
    trainer, rewards = tree.random_logits(generator, scale=2.0), 3 + tree.random_rewards(generator)
    p, scores, mask = tree.probs(trainer), tree.token_scores(trainer), tree.mask
    group, weights = torch.zeros(len(p), dtype=torch.long), p.sqrt().unsqueeze(1).expand(mask.shape)

    def second_moment(advantages: Tensor) -> Tensor:
        return p @ torch.einsum("rt,rtp->rp", advantages.expand(mask.shape), scores).square().sum(1)

    energy = scores.square().sum(-1)
    token = optimal_token_baseline(rewards, mask, group, energy, importance_weights=weights, eps=0.0)
    scalar = weighted_advantages(rewards, mask, group, p * scores.sum(1).square().sum(1))
    # The best constants per position solve M B = v, and M is diagonal on-policy.
    matrix = torch.einsum("r,rtp,rup->tu", p, scores, scores)
    close(matrix, matrix.diag().diag())
    best = torch.linalg.solve(matrix, torch.einsum("r,rtp,rp->t", p * rewards, scores, scores.sum(1)))
    column = rewards.unsqueeze(1)
    moments = [second_moment(each) for each in (column, column - p @ rewards, scalar, token, column - best)]
    assert moments[1] < 0.05 * moments[0]
    assert all(worse > better for worse, better in itertools.pairwise(moments))


def test_score_energy_accumulates_and_weights_the_best_baseline() -> None:
    tree = TREES[2]
    _, trainer, rewards = policies(tree, seed=3)
    partial_scores = tree.token_scores(trainer).cumsum(1)
    exact = tree.expect(trainer, partial_scores.square().sum(-1) * tree.mask)
    close(exact, tree.expect(trainer, logit_energy(tree, trainer).cumsum(1) * tree.mask))
    weight = partial_scores[:, -1].square().sum(-1)
    best = tree.expect(trainer, weight * rewards) / tree.expect(trainer, weight)

    def second_moment(baseline: Tensor) -> Tensor:
        return tree.expect(trainer, weight * (rewards - baseline).square())

    assert all(second_moment(best) < second_moment(best + shift) for shift in (-0.01, 0.01))


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


# ----- covariance ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [Tree(2, 3), Tree(4, 1), Tree(3, 2, eos=0)])
def test_the_covariance_loss_is_the_tangent_of_the_gain(tree: Tree) -> None:
    sampler, trainer, rewards = policies(tree, seed=4)
    rows, group, probability = grouped(tree, sampler, 2)
    options = {"rewards": rewards[rows], "mask": tree.mask[rows], "group": group}

    def loss(trainer: Tensor, weight: Tensor) -> Tensor:
        """Expectation over groups: the value is a mean over rows, so weight each group's reward differences."""
        scaled = rewards[rows] * (weight * len(weight)).repeat_interleave(2)
        return covariance_loss(
            tree.logprobs(trainer)[rows], **{**options, "rewards": scaled}, sampler_logprob=tree.logprobs(sampler)[rows]
        )

    log_rho = (tree.logprobs(trainer) - tree.logprobs(sampler)).sum(1)
    q = tree.probs(sampler)
    mean = q @ rewards
    tangent = q @ ((rewards - mean) * log_rho)
    close(-loss(trainer, probability), tangent)
    wanted = (q * (rewards - mean)) @ tree.scores(trainer)
    close(-gradient(lambda z: loss(z, probability), trainer).flatten(), wanted)
    gain = tree.expect(trainer, rewards) - q @ rewards
    assert (gain - tangent).abs() <= (rewards.max() - rewards.min()) * tree.sequence_kl(sampler, trainer)
    # On-policy the scores have mean zero, so the covariance is the whole gradient and no baseline matters.
    p = tree.probs(trainer)
    for baseline in (0.0, 5.0):
        close((p * (rewards - baseline)) @ tree.scores(trainer), tree.gradient(trainer, rewards).flatten())


def test_without_sampler_the_covariance_loss_has_the_same_gradient_and_singletons_add_nothing() -> None:
    rewards = ADVANTAGES.sum(1)
    slopes = [
        gradient(lambda p, q=q: covariance_loss(p, rewards, MASK, GROUP, sampler_logprob=q), LOGPROB)
        for q in (None, SAMPLER)
    ]
    close(*slopes)
    assert torch.equal(slopes[0][5], torch.zeros(5, dtype=torch.float64))
    reinforce = gradient(
        lambda p: reinforce_loss(p, rloo_advantages(rewards, MASK, GROUP), MASK, aggregation=SUMS), LOGPROB
    )
    close(slopes[0][:5], reinforce[:5])


# ----- KL penalties -------------------------------------------------------------------------------------------------


def enumerated(tree: Tree, weight: Tensor, loss: Callable[[slice], Tensor]) -> Tensor:
    """The expectation of a per-batch loss by summing over batches of one sequence."""
    return torch.stack([each * loss(slice(row, row + 1)) for row, each in enumerate(weight)]).sum()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_sampler_penalty_estimates_the_sequence_kl_and_its_gradient(tree: Tree, estimator: str) -> None:
    sampler, trainer, _ = policies(tree, seed=5)
    q = tree.probs(sampler)

    def penalty(trainer: Tensor) -> Tensor:
        p, own = tree.logprobs(trainer), tree.logprobs(sampler)
        return enumerated(
            tree,
            q,
            lambda row: sampler_kl_penalty(p[row], own[row], tree.mask[row], estimator=estimator, aggregation=SUMS),
        )

    exact = estimator != "k2"
    assert ((penalty(trainer) - tree.sequence_kl(sampler, trainer)).abs() < 1e-10) == exact
    slope = gradient(penalty, trainer)
    close(gradient(lambda z: tree.sequence_kl(sampler, z), trainer).flatten(), -(q @ tree.scores(trainer)))
    assert ((slope.flatten() + q @ tree.scores(trainer)).abs().max() < 1e-10) == exact


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_reference_penalty_has_the_gradient_of_the_divergence_for_every_estimator(
    tree: Tree, estimator: str
) -> None:
    reference, trainer, _ = policies(tree, seed=6)
    p = tree.probs(trainer)

    def penalty(z: Tensor, level: str) -> Tensor:
        own, other = tree.logprobs(z), tree.logprobs(reference)
        return enumerated(
            tree,
            p,
            lambda row: reference_kl_penalty(
                own[row], other[row], tree.mask[row], estimator=estimator, level=level, aggregation=SUMS
            ),
        )

    if estimator != "k2":
        close(penalty(trainer, "token"), tree.sequence_kl(trainer, reference))
    close(
        gradient(lambda z: penalty(z, "sequence"), trainer), gradient(lambda z: tree.sequence_kl(z, reference), trainer)
    )
    visited = gradient(lambda z: p @ tree.token_kl(z, reference).sum(1), trainer)
    close(gradient(lambda z: penalty(z, "token"), trainer), visited)


def test_a_kl_penalty_is_a_constant_added_to_the_reward_of_the_uncentred_gradient() -> None:
    tree, beta = TREES[2], 0.7
    sampler, trainer, rewards = policies(tree, seed=7)
    q, mean = tree.probs(sampler), tree.expect(sampler, rewards)
    penalised = gradient(
        lambda z: (
            reinforce_loss(tree.logprobs(z), expected(tree, sampler, rewards - mean), tree.mask, aggregation=SUMS)
            + beta * tree.sequence_kl(sampler, z)
        ),
        trainer,
    )
    shifted = gradient(
        lambda z: reinforce_loss(
            tree.logprobs(z), expected(tree, sampler, rewards - mean + beta), tree.mask, aggregation=SUMS
        ),
        trainer,
    )
    close(penalised, shifted)
    assert (q @ tree.scores(trainer)).abs().max() > 0.01


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
