import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.envs import WheelBandit
from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.types import Decision, Feedback, HasTestPoints

K = 5  # tolerance of the statistical tests, in standard errors


def context_of(bandit: WheelBandit) -> Tensor:
    contexts, mask = bandit.observe()
    assert mask is None
    assert isinstance(contexts, Tensor)
    return contexts


def play(bandit: WheelBandit, choice: int) -> Feedback:
    arm = (torch.arange(bandit.num_replicas).unsqueeze(1) + choice) % 5
    return bandit.step(Decision(arm, context_of(bandit)))


def trace(bandit: WheelBandit, steps: int = 8) -> Tensor:
    rows = []
    for step in range(steps):
        seen = context_of(bandit).flatten(1)
        feedback = play(bandit, step)
        rows.append(torch.cat([seen, feedback.reward, feedback.regret], dim=1))
    return torch.stack(rows)


def test_means_by_hand() -> None:
    means = WheelBandit(0.5).mean_rewards(
        torch.tensor([[0.3, 0.4], [0.6, 0.6], [0.6, -0.6], [-0.6, 0.6], [-0.6, -0.6], [0.0, 0.9], [-0.9, 0.0]])
    )
    rim = [[1.0] * 4 for _ in range(7)]
    for row, arm in enumerate((None, 1, 2, 3, 4, 1, 3)):
        if arm is not None:
            rim[row][arm - 1] = 50.0
    assert torch.equal(means, torch.tensor([[1.2, *row] for row in rim]))


@pytest.mark.parametrize("delta", [0.0, 0.5, 1.0])
def test_reward_and_regret_by_hand(delta: float) -> None:
    bandit = WheelBandit(delta, noise_scale=0.0, num_replicas=10)
    for step in range(10):
        x = context_of(bandit)[:, 0]
        assert x.shape == (10, 2)
        feedback = play(bandit, step)
        for replica, (first, second) in enumerate(x.tolist()):
            quadrant = {(False, False): 1, (False, True): 2, (True, False): 3, (True, True): 4}[first < 0, second < 0]
            means = [1.2, 1.0, 1.0, 1.0, 1.0]
            if math.hypot(first, second) > delta:
                means[quadrant] = 50.0
            chosen = means[(replica + step) % 5]
            assert feedback.reward[replica].tolist() == pytest.approx([chosen])
            assert feedback.regret[replica].tolist() == pytest.approx([max(means) - chosen])


@pytest.mark.statistical
def test_contexts_are_uniform_on_the_disc() -> None:
    n = 40_000
    x = WheelBandit(num_replicas=n, seed=2).observe()[0]
    assert isinstance(x, Tensor)
    x = x[:, 0].double()
    area = (x**2).sum(-1)  # uniform on [0, 1]
    assert float(area.max()) <= 1 + 1e-6
    assert abs(area.mean() - 0.5) < K * math.sqrt(1 / 12 / n)
    assert abs((area**2).mean() - 1 / 3) < K * math.sqrt((1 / 5 - 1 / 9) / n)
    # A coordinate of the uniform law on the disc has variance 1/4.
    assert bool((x.mean(0).abs() < K * math.sqrt(1 / 4 / n)).all())
    for quadrant in range(4):
        inside = ((x[:, 0] < 0) == bool(quadrant & 2)) & ((x[:, 1] < 0) == bool(quadrant & 1))
        assert abs(inside.double().mean() - 0.25) < K * math.sqrt(0.25 * 0.75 / n)


@pytest.mark.statistical
def test_moments_of_the_noise() -> None:
    n = 20_000
    bandit = WheelBandit(1.0, num_replicas=n, seed=2, dtype=torch.float64)
    reward = bandit.step(Decision(torch.zeros(n, 1, dtype=torch.int64), context_of(bandit))).reward
    assert abs(reward.mean() - 1.2) < K * 0.01 / math.sqrt(n)
    assert abs(reward.var() - 1e-4) < K * 1e-4 * math.sqrt(2 / n)


@pytest.mark.statistical
def test_test_points_have_random_arms_and_do_not_disturb_the_run() -> None:
    bandit, twin = (WheelBandit(0.5, num_replicas=2, seed=3) for _ in range(2))
    assert isinstance(bandit, HasTestPoints)
    n = 5000
    points = bandit.draw_test_points(n)
    assert points.arm is not None
    assert points.features.shape == (2, n, 2)
    assert points.arm.shape == points.mean.shape == points.reward.shape == (2, n)
    wanted = bandit.mean_rewards(points.features).gather(-1, points.arm.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(points.mean, wanted)
    counts = torch.bincount(points.arm.flatten(), minlength=5) / (2 * n)
    assert bool(((counts - 0.2).abs() < K * math.sqrt(0.2 * 0.8 / (2 * n))).all())
    noise = (points.reward - points.mean).double()
    assert abs(noise.var() - 1e-4) < K * 1e-4 * math.sqrt(2 / (2 * n))
    assert torch.equal(trace(bandit), trace(twin))
    with pytest.raises(ParameterError, match=r"count of WheelBandit must be an int >= 1; got 0."):
        bandit.draw_test_points(0)


def test_the_seed_decides_the_run_and_the_global_generator_stays() -> None:
    before = torch.get_rng_state()
    first = trace(WheelBandit(0.5, num_replicas=3, seed=1))
    assert torch.equal(first, trace(WheelBandit(0.5, num_replicas=3, seed=1)))
    assert not (first == trace(WheelBandit(0.5, num_replicas=3, seed=2)))[..., :3].any()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("seed", [1, 5])
def test_a_saved_run_continues_identically(seed: int) -> None:
    bandit = WheelBandit(0.5, num_replicas=3, seed=1)
    trace(bandit, 4)
    bandit.draw_test_points(2)
    state = bandit.state_dict()
    rest = trace(bandit)
    resumed = WheelBandit(0.5, num_replicas=3, seed=seed)
    trace(resumed, 2)
    resumed.load_state_dict(state)
    assert torch.equal(trace(resumed), rest)
    assert torch.equal(resumed.draw_test_points(3).reward, bandit.draw_test_points(3).reward)


def test_a_state_of_another_wheel_is_refused_and_nothing_moves() -> None:
    bandit, twin = (WheelBandit(0.5, seed=1) for _ in range(2))
    with pytest.raises(CheckpointError, match="not one of this WheelBandit"):
        bandit.load_state_dict(WheelBandit(0.6).state_dict())
    assert torch.equal(trace(bandit), trace(twin))


def test_replicas_do_not_hear_each_other() -> None:
    one, two = (WheelBandit(0.5, num_replicas=2, seed=8) for _ in range(2))
    for step in range(5):
        assert torch.equal(context_of(one), context_of(two))
        a = one.step(Decision(torch.tensor([[1], [0]]), context_of(one)))
        b = two.step(Decision(torch.tensor([[1], [1 + step % 4]]), context_of(two)))
        assert torch.equal(a.reward[0], b.reward[0])
        assert not torch.equal(a.reward[1], b.reward[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_has_the_dtype_and_the_device(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        bandit = WheelBandit(num_replicas=2, dtype=dtype, device="cpu")
        context, points = context_of(bandit), bandit.draw_test_points(3)
    arm = torch.zeros(2, 1, dtype=torch.int64)
    with torch.device("meta"):
        feedback = bandit.step(Decision(arm, context))
        bandit.load_state_dict(bandit.state_dict())
    made = [context, points.features, points.mean, points.reward, feedback.reward, feedback.regret]
    assert {each.dtype for each in made} == {dtype}
    assert {each.device.type for each in made} == {"cpu"}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"delta": 1.5}, "delta of WheelBandit must be a finite number >= 0 and <= 1; got 1.5."),
        ({"delta": math.nan}, "delta of WheelBandit must be a finite number >= 0 and <= 1; got nan."),
        ({"noise_scale": -1.0}, "noise_scale of WheelBandit must be a finite number >= 0; got -1.0."),
        ({"num_replicas": 0}, "num_replicas of WheelBandit must be an int >= 1; got 0."),
        ({"dtype": torch.int64}, "dtype of WheelBandit must be torch.float32 or torch.float64; got torch.int64."),
    ],
)
def test_what_the_constructor_refuses(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        WheelBandit(**kwargs)
    assert str(caught.value) == message


def test_a_bad_arm_moves_nothing() -> None:
    bandit, twin = (WheelBandit(num_replicas=2) for _ in range(2))
    with pytest.raises(ParameterError) as caught:
        bandit.step(Decision(torch.tensor([[0], [5]]), context_of(bandit)))
    assert str(caught.value) == "arm of WheelBandit must be in [0, 5); got 5 at index (1, 0)."
    assert torch.equal(trace(bandit), trace(twin))
