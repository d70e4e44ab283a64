"""Test points of the linear and the classification bandit; the other environments' tests cover their own."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ensemblepp.envs import ClassificationBandit, ClassificationData, LinearBandit
from ensemblepp.errors import ParameterError
from ensemblepp.types import Decision, HasTestPoints, TestPoints

ROWS = ClassificationData(np.arange(1, 13, dtype=np.float32).reshape(6, 2), np.arange(6) % 3, 3)
K = 5  # tolerance of the statistical tests, in standard errors


def make(kind: str, **options: Any) -> Any:
    if kind in ("shared", "disjoint"):
        return ClassificationBandit(ROWS, encoding=kind, intercept=False, num_replicas=2, **options)  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"action_set": "compact"} if kind == "compact" else {"num_arms": 4, "arms": kind}
    return LinearBandit(3, num_replicas=2, **sizes, **options)


KINDS = ["fixed", "changing", "compact", "shared", "disjoint"]


def trace(bandit: Any, steps: int = 8) -> Tensor:
    """Play arm 0, or the first coordinate direction, and return rewards and regrets."""
    arm, features = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, bandit.feature_dim)
    features[..., 0] = 1.0
    feedback = [bandit.step(Decision(arm, features)) for _ in range(steps)]
    return torch.stack([torch.stack([each.reward, each.regret]) for each in feedback])


@pytest.mark.parametrize("kind", KINDS)
def test_they_do_not_disturb_the_run_and_resume_with_it(kind: str) -> None:
    bandit, twin = (make(kind, seed=3, noise_scale=0.5) for _ in range(2))
    assert isinstance(bandit, HasTestPoints)
    points, more = bandit.draw_test_points(5), bandit.draw_test_points(5)
    assert isinstance(points, TestPoints)
    assert points.features.shape == (2, 5, bandit.feature_dim)
    assert (points.arm is None) == (kind != "shared")
    assert points.mean.shape == points.reward.shape == (2, 5)
    assert not torch.equal(points.features, more.features)
    assert torch.equal(trace(bandit), trace(twin))
    assert torch.equal(twin.draw_test_points(5).reward, points.reward)
    resumed = make(kind, seed=8, noise_scale=0.5)
    resumed.load_state_dict(bandit.state_dict())
    again, wanted = resumed.draw_test_points(5), bandit.draw_test_points(5)
    assert torch.equal(again.features, wanted.features)
    assert torch.equal(again.reward, wanted.reward)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_the_reward_is_the_mean(kind: str) -> None:
    points = make(kind, noise_scale=0.0).draw_test_points(5)
    assert torch.equal(points.reward, points.mean)


@pytest.mark.parametrize("kind", KINDS)
def test_a_count_below_one_is_refused(kind: str) -> None:
    bandit = make(kind)
    with pytest.raises(ParameterError, match=rf"count of {type(bandit).__name__} must be an int >= 1; got 0\."):
        bandit.draw_test_points(0)


@pytest.mark.statistical
@pytest.mark.parametrize("kind", ["fixed", "changing"])
def test_linear_points_have_the_law_of_the_arms(kind: str) -> None:
    n = 20_000
    bandit = make(kind, noise_scale=2.0)
    points = bandit.draw_test_points(n)
    assert torch.allclose(points.mean, torch.einsum("rnd,rd->rn", points.features, bandit.parameter), atol=1e-5)
    low, high = bandit.feature_bounds
    assert low <= float(points.features.min())
    assert float(points.features.max()) <= high
    x = points.features.flatten().double()
    assert abs(x.mean()) < K * math.sqrt(1 / 15 / len(x))
    # Var(x^2) of U[-a, a] is a^4 (1/5 - 1/9), here with a^4 = 1/25.
    assert abs((x**2).mean() - 1 / 15) < K * math.sqrt((1 / 5 - 1 / 9) / 25 / len(x))
    noise = (points.reward - points.mean).flatten().double()
    assert abs(noise.mean()) < K * 2 / math.sqrt(2 * n)
    assert abs(noise.var() - 4) < K * 4 * math.sqrt(2 / (2 * n))


@pytest.mark.statistical
def test_points_of_the_compact_set_are_uniform_on_the_sphere() -> None:
    n = 20_000
    bandit = make("compact")
    points = bandit.draw_test_points(n)
    assert torch.allclose(points.features.norm(dim=-1), torch.ones(2, n))
    assert torch.allclose(points.mean, torch.einsum("rnd,rd->rn", points.features, bandit.parameter), atol=1e-5)
    # Each coordinate of the sphere in three dimensions is uniform on [-1, 1].
    for coordinate in points.features.double().flatten(0, 1).T:
        assert abs(coordinate.mean()) < K * math.sqrt(1 / 3 / (2 * n))
        assert abs((coordinate**2).mean() - 1 / 3) < K * math.sqrt((1 / 5 - 1 / 9) / (2 * n))


@pytest.mark.statistical
def test_classification_points_are_uniform_rows_with_uniform_arms() -> None:
    n = 9000
    shared, disjoint = (make(kind, seed=4).draw_test_points(n) for kind in ("shared", "disjoint"))
    assert shared.arm is not None
    row = ((shared.features[..., 0] - 1) / 2).round().long()
    assert torch.equal(shared.features, torch.as_tensor(ROWS.features)[row])
    assert torch.equal(shared.mean, (shared.arm == row % 3).float())
    cells = torch.bincount((row * 3 + shared.arm).flatten(), minlength=18) / (2 * n)
    assert bool(((cells - 1 / 18).abs() < K * math.sqrt(1 / 18 * 17 / 18 / (2 * n))).all())
    # The other encoding describes the same points: x in the block of its arm, zeros elsewhere.
    blocks = disjoint.features.view(2, n, 3, 2)
    in_block = torch.nn.functional.one_hot(shared.arm, 3).unsqueeze(-1)
    assert torch.equal(blocks, shared.features.unsqueeze(-2) * in_block)
    assert torch.equal(disjoint.mean, shared.mean)
