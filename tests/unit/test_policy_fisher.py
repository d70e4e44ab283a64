"""Fisher caps, natural gradient and the log-odds speed limit against enumeration and closed forms."""

import pytest
import torch
from scipy.integrate import quad

from ensemblepp.errors import ParameterError
from ensemblepp.policy.fisher import (
    demonstration_time,
    fisher_matrix,
    gradient_caps,
    log_odds_speed,
    natural_gradient,
    policy_gradient_time,
)
from tests.policy_toy import Tree, make_generator, make_trees

EXACT = {"rtol": 0.0, "atol": 1e-10}
SLACK = 1e-13


def tabular(p: torch.Tensor) -> torch.Tensor:
    """Scores e_y - p of one logit per response."""
    return torch.eye(len(p), dtype=p.dtype) - p


def random_policy(seed: int, size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities, advantages)."""
    first, second = torch.randn(2, size, generator=make_generator(seed), dtype=torch.float64)
    return first.softmax(0), second


@pytest.mark.parametrize("tree", make_trees())
def test_fisher_matrix_is_the_sum_over_tokens_on_policy(tree: Tree) -> None:
    logits = tree.random_logits(make_generator())
    p, tokens = tree.probs(logits), tree.token_scores(logits)
    martingale = torch.einsum("s,sti,stj->ij", p, tokens, tokens)
    torch.testing.assert_close(fisher_matrix(tree.scores(logits), weights=p), martingale, **EXACT)
    assert (p @ tree.scores(logits)).abs().max() < 1e-12


@pytest.mark.parametrize("tree", make_trees())
@pytest.mark.parametrize("off_policy", [False, True])
def test_gradients_are_covariances_below_their_caps(tree: Tree, off_policy: bool) -> None:
    for seed in range(10):
        generator = make_generator(seed)
        sampler, trainer = tree.random_logits(generator), tree.random_logits(generator)
        rewards = tree.random_rewards(generator)
        policy = trainer if off_policy else sampler
        q = tree.probs(sampler)
        scores = (tree.token_scores(policy) - tree.mean_shift(sampler, policy)).sum(1)
        cap = gradient_caps(scores, rewards, weights=q)
        torch.testing.assert_close(cap.value, (q * rewards) @ scores, **EXACT)
        if not off_policy:
            torch.testing.assert_close(cap.value, tree.gradient(sampler, rewards).flatten(), **EXACT)
        assert (cap.value.abs() <= cap.limit + SLACK).all()
        torch.testing.assert_close(gradient_caps(scores, rewards + 7, weights=q).value, cap.value, **EXACT)
        # A signal affine in one score reaches that score's cap.
        tight = gradient_caps(scores, 3 - 2 * scores[:, 0], weights=q)
        torch.testing.assert_close(tight.value[0].abs(), tight.limit[0], **EXACT)


@pytest.mark.parametrize("tree", make_trees())
def test_natural_gradient_is_the_weighted_regression_of_the_signal(tree: Tree) -> None:
    generator = make_generator()
    logits, rewards = tree.random_logits(generator), tree.random_rewards(generator)
    p, scores = tree.probs(logits), tree.scores(logits)
    direction, explained = natural_gradient(scores, rewards, weights=p)
    fisher, gradient = fisher_matrix(scores, weights=p), tree.gradient(logits, rewards).flatten()
    torch.testing.assert_close(direction, torch.linalg.pinv(fisher, hermitian=True, rtol=1e-10) @ gradient, **EXACT)
    root = p.sqrt()
    columns = torch.cat([torch.ones_like(scores[:, :1]), scores], 1)
    fit = torch.linalg.lstsq(root.unsqueeze(1) * columns, root * rewards, driver="gelsd").solution
    torch.testing.assert_close(
        scores @ direction - p @ scores @ direction, scores @ fit[1:] - p @ scores @ fit[1:], **EXACT
    )
    variance = p @ (rewards - p @ rewards).square()
    assert explained.item() == pytest.approx(float(gradient @ direction / variance), abs=1e-10)
    # One logit per prefix and token explains everything a sequence's reward can be, up to interactions of tokens.
    assert explained.item() == pytest.approx(1.0) if tree.horizon == 1 else 0 < explained.item() <= 1 + 1e-12


def test_constant_signals_and_parameters_without_variance_stay_put() -> None:
    p, advantages = random_policy(0)
    scores = torch.cat([tabular(p), torch.zeros(5, 1, dtype=torch.float64)], 1)
    cap = gradient_caps(scores, advantages, weights=p)
    assert cap.value[-1].item() == cap.limit[-1].item() == 0.0
    parameter = torch.ones(6, dtype=torch.float64)
    for _ in range(10):
        parameter = parameter + 0.1 * gradient_caps(scores, advantages, weights=p).value
    assert parameter[-1].item() == 1.0
    direction, explained = natural_gradient(
        scores, 0 * advantages + 2.0, weights=torch.full((5,), 0.2, dtype=torch.float64)
    )
    assert direction.abs().max() < 1e-12
    assert explained.item() == 0.0


def test_samples_weigh_the_same() -> None:
    scores, advantages = torch.randn(7, 3, generator=make_generator()), torch.arange(7.0)
    equal = torch.full((7,), 1 / 7)
    for one, two in zip(
        gradient_caps(scores, advantages), gradient_caps(scores, advantages, weights=equal), strict=True
    ):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(fisher_matrix(scores), torch.cov(scores.T, correction=0))
    assert gradient_caps(scores[:0], advantages[:0]).value.tolist() == [0.0] * 3


def test_log_odds_keep_the_speed_limit_on_random_trees() -> None:
    pairs = 0
    for tree in make_trees():
        for seed in range(5):
            generator = make_generator(seed)
            sampler, trainer = tree.random_logits(generator), tree.random_logits(generator)
            rewards, q = tree.random_rewards(generator), tree.probs(sampler)
            scores = tree.scores(trainer)
            step = (tree.token_scores(trainer) - tree.mean_shift(sampler, trainer)).sum(1)
            for _ in range(10):
                y, other = torch.randint(len(q), (2,), generator=generator).tolist()
                speed = log_odds_speed(step, rewards, scores[y] - scores[other], weights=q)
                assert speed.value.abs() <= speed.limit + SLACK
                # The speed is the derivative of the log-odds along the update.
                leaf = trainer.clone().requires_grad_()
                odds = tree.logprobs(leaf).sum(1)
                slope = torch.autograd.grad(odds[y] - odds[other], leaf)[0].flatten()
                torch.testing.assert_close(speed.value, slope @ ((q * rewards) @ step), **EXACT)
                pairs += 1
    assert pairs == 200


def test_speed_limit_is_tight_for_affine_signals_and_two_arms() -> None:
    p, _ = random_policy(1)
    scores = tabular(p)
    difference = scores[0] - scores[1]
    speed = log_odds_speed(scores, 2 * scores @ difference - 1, difference, weights=p)
    torch.testing.assert_close(speed.value, speed.limit, **EXACT)
    for seed in range(5):
        p, advantages = random_policy(seed, size=2)
        scores = tabular(p)
        speed = log_odds_speed(scores, advantages, scores[0] - scores[1], weights=p)
        torch.testing.assert_close(speed.value.abs(), speed.limit, **EXACT)


def test_tabular_closed_forms() -> None:
    p, advantages = random_policy(2)
    scores = tabular(p)
    fisher = fisher_matrix(scores, weights=p)
    torch.testing.assert_close(fisher, torch.diag(p) - torch.outer(p, p), **EXACT)
    difference = scores[3] - scores[1]
    width = p[3] + p[1] - (p[3] - p[1]).square()
    torch.testing.assert_close(difference @ fisher @ difference, width, **EXACT)
    speed = log_odds_speed(scores, advantages, difference, weights=p)
    spread = (p @ (advantages - p @ advantages).square()).sqrt()
    torch.testing.assert_close(speed.limit, spread * width.sqrt(), **EXACT)
    # The natural gradient does not care how rare a response is.
    natural, _ = natural_gradient(scores, advantages, weights=p)
    torch.testing.assert_close(difference @ natural, advantages[3] - advantages[1], **EXACT)


@pytest.mark.parametrize(
    ("p", "by_gradient", "by_demonstration"), [(0.05, 12.4, 1.95), (0.01, 54.1, 2.79), (0.002, 255.7, 3.61)]
)
def test_rare_responses_take_the_published_times(p: float, by_gradient: float, by_demonstration: float) -> None:
    assert policy_gradient_time(p) == pytest.approx(by_gradient, abs=0.06)
    assert demonstration_time(p) == pytest.approx(by_demonstration, abs=0.006)
    # dt = dp / p', with the speed of the log-odds of two arms rewarded 1 and 0.
    probabilities = torch.tensor([p, 1 - p], dtype=torch.float64)
    scores = tabular(probabilities)
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    speed = log_odds_speed(scores, rewards, scores[0] - scores[1], weights=probabilities)
    assert speed.value.item() == pytest.approx(2 * p * (1 - p))
    assert policy_gradient_time(p) == pytest.approx(quad(lambda x: 1 / (2 * (x * (1 - x)) ** 2), p, 0.5)[0], rel=1e-6)
    time = quad(lambda x: 1 / (2 * x * (1 - x) ** 2), p, 0.5)[0]
    assert demonstration_time(p) == pytest.approx(time, rel=1e-6)


def test_times_scale_like_one_over_p_and_like_its_logarithm() -> None:
    assert policy_gradient_time(1e-6) / policy_gradient_time(1e-5) == pytest.approx(10, rel=1e-3)
    assert demonstration_time(1e-6) - demonstration_time(1e-5) == pytest.approx(
        torch.tensor(10.0).log().item() / 2, rel=1e-4
    )
    assert policy_gradient_time(0.5) == demonstration_time(0.5) == 0.0


def test_a_shared_feature_speeds_up_a_rare_response() -> None:
    # Response 0 is rare but shares a feature with the common response 1; only those two are rewarded.
    p = torch.tensor([0.001, 0.499, 0.5], dtype=torch.float64)
    rewards = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)

    def speed(features: torch.Tensor) -> float:
        scores = features - p @ features
        return float(log_odds_speed(scores, rewards, scores[0] - scores[2], weights=p).value)

    alone = torch.eye(3, dtype=torch.float64)
    shared = torch.cat([alone, torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float64)], 1)
    assert speed(shared) > speed(alone) + 0.2


def test_bad_input_is_named(without_shape_checks: None) -> None:
    scores = torch.zeros(4, 3)
    with pytest.raises(ParameterError, match="advantages of gradient_caps must have shape"):
        gradient_caps(scores, torch.zeros(3))
    with pytest.raises(ParameterError, match="weights of fisher_matrix must have shape"):
        fisher_matrix(scores, weights=torch.zeros(3))
    with pytest.raises(ParameterError, match="difference of log_odds_speed must have shape"):
        log_odds_speed(scores, torch.zeros(4), torch.zeros(4))
    with pytest.raises(ParameterError, match="probability of policy_gradient_time must be"):
        policy_gradient_time(0.6)
