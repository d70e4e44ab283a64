"""The optimal token baseline, its energies from logits, and what it does to bias and variance, by enumeration."""

import itertools

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.policy.advantages import group_mean_advantages, reward_to_go, rloo_advantages, weighted_advantages
from ensemblepp.policy.token_baseline import gradient_noise, optimal_token_baseline, token_energy
from ensemblepp.policy.vocabulary import energy_from_logits, selected_logprobs
from ensemblepp.seeding import make_generator as named_generator
from tests.policy_reference import GROUP, INPUTS, MASK
from tests.policy_toy import Tree, close, grouped, make_generator, make_trees, policies

REWARDS = INPUTS["token_level_rewards"]
ENERGY = token_energy(INPUTS["old_log_prob"], INPUTS["sum_pi_squared"], MASK)
TREES = make_trees()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=named_generator(seed, "data"), dtype=torch.float64)


def test_energy_is_the_squared_logit_gradient_and_averages_to_the_gini_impurity() -> None:
    logits = normal(1, 5, 7, seed=1)
    tokens, mask = torch.tensor([[0, 3, 6, 2, 2]]), torch.ones(1, 5)
    pi = logits.softmax(-1)
    direct = (torch.nn.functional.one_hot(tokens, 7) - pi).square().sum(-1)
    close(energy_from_logits(logits, tokens, mask), direct)
    collision = (logits.mul(2).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp()
    close(collision, pi.square().sum(-1))
    logprob = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    close(token_energy(logprob, collision, mask), direct)
    every = torch.arange(7).expand(1, 7)
    all_tokens = energy_from_logits(logits[:, 1:2].expand(1, 7, 7), every, torch.ones(1, 7))
    close((pi[0, 1] * all_tokens[0]).sum(), 1 - pi[0, 1].square().sum())


def test_an_output_matrix_gets_the_energy_times_the_squared_feature_norm() -> None:
    hidden, matrix = normal(4, seed=2), normal(6, 4, seed=3).requires_grad_()
    logits = matrix @ hidden
    (gradient,) = torch.autograd.grad(logits.log_softmax(0)[2], matrix)
    energy = energy_from_logits(logits.detach().view(1, 1, 6), torch.tensor([[2]]), torch.ones(1, 1))
    close(gradient.square().sum(), energy[0, 0] * hidden.square().sum())


@pytest.mark.parametrize("block", [1, 13, 40, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_blocks_do_not_change_energies_or_logprobs(block: int, temperature: float) -> None:
    logits = normal(3, 5, 8, seed=4)[:, :-1].requires_grad_()
    tokens, mask = torch.arange(24).view(3, 4, 2) % 8, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    wanted = (logits / temperature).log_softmax(-1)
    options = {"temperature": temperature, "block_values": block}
    energy = energy_from_logits(logits, tokens[..., 0], mask, **options)
    direct = (torch.nn.functional.one_hot(tokens[..., 0], 8) - wanted.exp()).square().sum(-1)
    close(energy, (direct * mask).detach())
    weights = normal(3, 4, 2, seed=5)
    chosen = selected_logprobs(logits, tokens, mask, **options)
    reference = wanted.gather(-1, tokens) * mask.unsqueeze(-1)
    close(chosen, reference)
    slopes = [torch.autograd.grad((weights * each).sum(), logits, retain_graph=True)[0] for each in (chosen, reference)]
    close(*slopes)


def test_logits_at_padding_may_hold_anything_and_low_precision_is_widened() -> None:
    logits = normal(2, 2, 5, seed=6).to(torch.bfloat16)
    logits[1, 1] = torch.nan
    logits.requires_grad_()
    tokens = torch.tensor([[[0], [1]], [[4], [-100]]])
    mask = torch.tensor([[1, 1], [1, 0]])
    chosen = selected_logprobs(logits, tokens, mask)
    assert chosen.dtype == torch.float32
    chosen.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    assert logits.grad.isfinite().all()
    assert torch.equal(logits.grad[1, 1], torch.zeros(5, dtype=torch.bfloat16))
    energy = energy_from_logits(logits, tokens.squeeze(-1), mask)
    assert energy.dtype == torch.float32
    assert energy[1, 1] == 0
    with pytest.raises(ParameterError, match="logits of selected_logprobs must be finite"):
        selected_logprobs(logits, tokens.clamp(min=0), torch.ones(2, 2))


def test_uniform_policy_and_equal_lengths_reduce_to_the_group_mean() -> None:
    rewards, mask, group = normal(6, seed=7), torch.ones(6, 4), torch.tensor([0, 0, 0, 1, 1, 1])
    energy = torch.full((6, 4), 1 - 1 / 32, dtype=torch.float64)
    close(
        optimal_token_baseline(rewards, mask, group, energy, eps=0.0, zero_tail=False),
        group_mean_advantages(rewards, mask, group),
    )
    close(
        optimal_token_baseline(rewards, mask, group, energy, eps=0.0, leave_one_out=True),
        rloo_advantages(rewards, mask, group),
    )


def test_one_token_responses_reduce_to_the_optimal_scalar_baseline() -> None:
    rewards, mask, group = normal(5, seed=8), torch.ones(5, 1), torch.zeros(5, dtype=torch.long)
    energy = normal(5, 1, seed=9).abs()
    scalar = weighted_advantages(rewards, mask, group, energy.squeeze(1))
    close(optimal_token_baseline(rewards, mask, group, energy, eps=0.0), scalar)
    close(scalar.squeeze(1), rewards - (energy.squeeze(1) * rewards).sum() / energy.sum())


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_a_shift_of_all_rewards_moves_the_baseline_alone(leave_one_out: bool) -> None:
    rewards, mask, group = normal(6, seed=7), torch.ones(6, 4), torch.tensor([0, 0, 0, 1, 1, 1])
    energy = normal(6, 4, seed=9).abs()
    before, after = (
        optimal_token_baseline(each, mask, group, energy, eps=0.0, leave_one_out=leave_one_out)
        for each in (rewards, rewards + 3)
    )
    close(before, after)


def test_weighted_residuals_sum_to_zero_at_every_position() -> None:
    advantages = optimal_token_baseline(REWARDS, MASK, GROUP, ENERGY, eps=0.0, zero_tail=False)
    accumulated = (ENERGY * MASK).cumsum(1)
    for group in (0, 1):
        rows = group == GROUP
        close((accumulated * advantages * MASK)[rows].sum(0), torch.zeros(5, dtype=torch.float64))


def test_leaving_one_out_equals_a_loop_over_the_others() -> None:
    actual = optimal_token_baseline(REWARDS, MASK, GROUP, ENERGY, leave_one_out=True)
    accumulated, togo = (ENERGY * MASK).cumsum(1), reward_to_go(REWARDS, MASK)
    for row in range(6):
        for time in range(5):
            others = [i for i in range(6) if i != row and GROUP[i] == GROUP[row] and MASK[i, time]]
            mass = sum((accumulated[i, time] for i in others), torch.tensor(1e-8, dtype=torch.float64))
            mean = sum((accumulated[i, time] * togo[i, time] for i in others), torch.zeros(())) / mass
            wanted = (togo[row, time] - mean) * MASK[row, time]
            close(actual[row, time], wanted)


def test_tool_output_between_own_tokens_changes_nothing_in_the_multi_turn_form() -> None:
    places = torch.tensor(
        [[0, 2, 3, 6, 7], [1, 2, 5, 6, 7], [0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [0, 4, 5, 6, 7], [2, 3, 4, 6, 7]]
    )

    def spread(compact: Tensor, fill: float) -> Tensor:
        return torch.full((6, 8), fill, dtype=torch.float64).scatter(1, places, compact)

    mask = spread(MASK, 0.0)
    wanted = optimal_token_baseline(REWARDS, MASK, GROUP, ENERGY, multi_turn=True)
    actual = optimal_token_baseline(spread(REWARDS, torch.nan), mask, GROUP, spread(ENERGY, torch.nan), multi_turn=True)
    close(actual, spread(wanted, 0.0))
    assert (optimal_token_baseline(spread(REWARDS, 0.0), mask, GROUP, spread(ENERGY, 0.0)) - actual).abs().max() > 0.01


def test_importance_weights_enter_squared() -> None:
    weights = normal(6, 5, seed=3).abs()
    close(
        optimal_token_baseline(REWARDS, MASK, GROUP, ENERGY, importance_weights=weights),
        optimal_token_baseline(REWARDS, MASK, GROUP, ENERGY * weights.square()),
    )


def test_gradient_noise_by_hand() -> None:
    advantages = torch.tensor([[1.0, 3.0], [2.0, 0.0], [9.0, 9.0]], dtype=torch.float64)
    energy = torch.tensor([[0.5, 1.0], [2.0, 7.0], [1.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    noise = gradient_noise(advantages, energy, mask, torch.tensor(2.0, dtype=torch.float64))
    assert (noise.signal.item(), noise.power.item(), noise.noise.item()) == (4.0, 7.0, 3.0)
    assert gradient_noise(advantages, energy, mask, torch.tensor(9.0, dtype=torch.float64)).noise == 0
    assert gradient_noise(advantages, energy, mask * 0, torch.tensor(0.0, dtype=torch.float64)).power == 0


# ----- bias and variance by enumeration ----------------------------------------------------------------------------


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
