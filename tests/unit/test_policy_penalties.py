"""The covariance loss and the KL penalties: their expectations and gradients by enumeration of small trees."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ensemblepp.policy.advantages import rloo_advantages
from ensemblepp.policy.losses import covariance_loss, reinforce_loss
from ensemblepp.policy.penalties import reference_kl_penalty, sampler_kl_penalty
from tests.policy_reference import ADVANTAGES, GROUP, LOGPROB, MASK, SAMPLER
from tests.policy_toy import Tree, close, expected, gradient, grouped, make_trees, policies

SUMS = "sequence_mean_token_sum"
TREES = make_trees()


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
