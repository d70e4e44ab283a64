import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.envs import (
    NeuralClassificationBandit,
    NeuralRegressionBandit,
    PoolBandit,
    QuadraticBandit,
    VectorQuadraticBandit,
)
from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.types import Decision, Feedback, HasTestPoints

KINDS = [QuadraticBandit, VectorQuadraticBandit, NeuralRegressionBandit, NeuralClassificationBandit]
K = 5  # tolerance of the statistical tests, in standard errors


class Ladder(PoolBandit):
    """The pool is 0, 1, 2, ... plus 10 times the replica, and the mean reward is twice the feature."""

    def _draw_function(self, generator: torch.Generator) -> None:
        self.factor = 2.0

    def _draw_features(self, count: int, generator: torch.Generator) -> Tensor:
        steps = torch.arange(count, dtype=self.dtype).view(1, count, 1)
        return steps + 10 * torch.arange(self.num_replicas, dtype=self.dtype).view(-1, 1, 1)

    def _mean(self, features: Tensor) -> Tensor:
        return self.factor * features[..., 0]


def contexts_of(bandit: PoolBandit) -> Tensor:
    contexts, mask = bandit.observe()
    assert mask is None
    assert isinstance(contexts, Tensor)
    return contexts


def play(bandit: PoolBandit, choice: int) -> Feedback:
    """Play arm (choice + replica) mod K."""
    replicas = torch.arange(bandit.num_replicas).unsqueeze(1)
    arm = (replicas + choice) % contexts_of(bandit).shape[2]
    return bandit.step(Decision(arm, contexts_of(bandit)[replicas, 0, arm]))


def trace(bandit: PoolBandit, steps: int = 6) -> Tensor:
    rows = []
    for step in range(steps):
        seen = contexts_of(bandit).flatten(1).sum(1, keepdim=True)
        feedback = play(bandit, step)
        rows.append(torch.cat([seen, feedback.reward, feedback.regret], dim=1))
    return torch.stack(rows)


def test_reward_and_regret_by_hand() -> None:
    bandit = Ladder(1, 3, pool_size=5, noise_scale=0.0, num_replicas=2)
    for step in range(10):
        x = contexts_of(bandit)[:, 0, :, 0]
        feedback = play(bandit, step)
        for replica in range(2):
            own = x[replica].tolist()
            chosen = own[(replica + step) % 3]
            assert feedback.reward[replica].tolist() == [2 * chosen]
            assert feedback.regret[replica].tolist() == [2 * (max(own) - chosen)]


def test_arms_are_distinct_entries_of_the_replicas_own_pool() -> None:
    bandit = Ladder(1, 4, pool_size=5, num_replicas=3)
    sets = set()
    for step in range(20):
        x = contexts_of(bandit)
        assert x.shape == (3, 1, 4, 1)
        for replica in range(3):
            own = (x[replica].flatten() - 10 * replica).tolist()
            assert len(set(own)) == 4
            assert set(own) <= set(range(5))
            sets.add(tuple(own))
        play(bandit, step)
    assert len(sets) > 20  # of 60 draws among 120 ordered subsets
    whole = Ladder(1, 5, pool_size=5)
    assert sorted(contexts_of(whole).flatten().tolist()) == [0, 1, 2, 3, 4]


def test_fixed_arms_stay_and_changing_arms_change() -> None:
    for arms in ("fixed", "changing"):
        bandit = QuadraticBandit(4, 3, pool_size=20, arms=arms, num_replicas=2)  # type: ignore[arg-type]
        first = contexts_of(bandit)
        kept = first.clone()
        assert torch.equal(first, contexts_of(bandit))
        play(bandit, 0)
        assert torch.equal(first, kept)
        assert torch.equal(contexts_of(bandit), kept) == (arms == "fixed")


@pytest.mark.statistical
def test_every_pool_entry_is_on_offer_equally_often_at_every_place() -> None:
    n, pool, arms = 20_000, 6, 2
    bandit = Ladder(1, arms, pool_size=pool, num_replicas=n)
    own = contexts_of(bandit)[:, 0, :, 0] - 10 * torch.arange(n).unsqueeze(1)
    for place in range(arms):
        counts = torch.bincount(own[:, place].round().long(), minlength=pool)
        p = 1 / pool
        assert bool(((counts / n - p).abs() < K * math.sqrt(p * (1 - p) / n)).all())


def test_quadratic_mean_by_hand() -> None:
    bandit = QuadraticBandit(2, 1, pool_size=1, num_replicas=2)
    # W^T x for x = (1, 2): columns (1, 0) and (3, 1) give 1 and 5; columns (2, 0) and (0, -1) give 2 and -2.
    bandit._weight = torch.tensor([[[1.0, 3.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, -1.0]]])
    x = torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]]])
    assert bandit._mean(x).flatten().tolist() == pytest.approx([0.26, 0.08])


def test_vector_quadratic_mean_by_hand() -> None:
    bandit = VectorQuadraticBandit(2, 1, pool_size=1)
    bandit._theta = torch.tensor([[0.3, -0.4]])
    assert bandit._mean(torch.tensor([[[1.0, 0.0], [0.6, 0.8]]])).flatten().tolist() == pytest.approx([0.9, 0.196])


def test_network_means_are_those_of_plain_layers() -> None:
    regression = NeuralRegressionBandit(3, 2, pool_size=4, num_replicas=2, dtype=torch.float64)
    classification = NeuralClassificationBandit(3, 2, pool_size=4, num_replicas=2, dtype=torch.float64)
    for bandit, outputs in ((regression, 1), (classification, 2)):
        assert [tuple(weight.shape) for weight, _ in bandit._layers] == [(2, 3, 50), (2, 50, 50), (2, 50, outputs)]
        for replica in range(2):
            hidden = bandit.pool[replica]
            for layer, (weight, bias) in enumerate(bandit._layers):
                hidden = torch.nn.functional.linear(hidden, weight[replica].T, bias[replica, 0])
                hidden = hidden.clamp_min(0) if layer < 2 else hidden
            wanted = hidden[:, 0] if outputs == 1 else torch.sigmoid((hidden[:, 1] - hidden[:, 0]) / 0.1)
            assert torch.allclose(bandit.means[replica], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.statistical
def test_moments_of_the_quadratic_function() -> None:
    n, d = 20_000, 3
    bandit = QuadraticBandit(d, 1, pool_size=2, num_replicas=n, seed=2)
    assert torch.allclose(bandit.pool.norm(dim=-1), torch.ones(n, 2))
    centred = bandit.means.double() - 0.01 * d
    similarity = (bandit.pool[:, 0] * bandit.pool[:, 1]).sum(-1).double()
    for error in (
        centred[:, 0],
        centred[:, 0] ** 2 - 2e-4 * d,
        centred[:, 0] * centred[:, 1] - 2e-4 * d * similarity**2,
    ):
        assert abs(error.mean()) < K * error.std() / math.sqrt(n)


@pytest.mark.statistical
def test_theta_is_uniform_in_the_ball() -> None:
    n, d = 20_000, 3
    theta = VectorQuadraticBandit(d, 1, pool_size=1, num_replicas=n, seed=2)._theta.double()
    volume = theta.norm(dim=-1) ** d  # uniform on [0, 1]
    assert float(volume.max()) <= 1 + 1e-6
    assert abs(volume.mean() - 0.5) < K * math.sqrt(1 / 12 / n)
    assert abs((volume**2).mean() - 1 / 3) < K * math.sqrt((1 / 5 - 1 / 9) / n)
    assert bool((theta.mean(0).abs() < K * theta.std(0) / math.sqrt(n)).all())


@pytest.mark.statistical
def test_weights_and_biases_are_uniform_as_in_torch_linear() -> None:
    bandit = NeuralRegressionBandit(4, 1, pool_size=1, num_replicas=200, seed=2)
    for fan_in, layer in zip((4, 50, 50), bandit._layers, strict=True):
        for block in layer:
            unit = block.flatten().double() * math.sqrt(fan_in)  # uniform on [-1, 1]
            n = len(unit)
            assert float(unit.abs().max()) <= 1 + 1e-6
            assert abs(unit.mean()) < K * math.sqrt(1 / 3 / n)
            assert abs((unit**2).mean() - 1 / 3) < K * math.sqrt((1 / 5 - 1 / 9) / n)
    x = bandit.draw_test_points(100).features.flatten().double()
    assert abs(x.mean()) < K / math.sqrt(len(x))
    assert abs(x.var() - 1) < K * math.sqrt(2 / len(x))


@pytest.mark.statistical
def test_moments_of_the_noise() -> None:
    n = 20_000
    bandit = QuadraticBandit(2, 1, pool_size=1, noise_scale=0.5, num_replicas=n, seed=2)
    noise = (play(bandit, 0).reward - bandit.means).double()
    assert abs(noise.mean()) < K * 0.5 / math.sqrt(n)
    assert abs(noise.var() - 0.25) < K * 0.25 * math.sqrt(2 / n)


@pytest.mark.statistical
def test_the_coin_lands_with_the_mean_reward() -> None:
    bandit = NeuralClassificationBandit(20, 5, pool_size=50, num_replicas=200, seed=2)
    points = bandit.draw_test_points(100)
    feedback = play(bandit, 0)
    for reward in (points.reward, feedback.reward):
        assert set(reward.flatten().tolist()) == {0.0, 1.0}
    mean, n = points.mean.double(), points.mean.numel()
    assert float(mean.min()) >= 0
    assert float(mean.max()) <= 1
    spread = (mean * (1 - mean)).sum().sqrt()
    assert abs((points.reward.double() - mean).sum()) < K * spread
    assert abs(((points.reward.double() - mean) * (mean - 0.5)).sum()) < K * spread / 2, n
    assert bool(((feedback.regret >= 0) & (feedback.regret <= 1)).all())


@pytest.mark.statistical
@pytest.mark.parametrize(("kind", "regret"), [(QuadraticBandit, 343.0), (NeuralRegressionBandit, 160.0)])
def test_the_uniform_policys_regret(kind: type[PoolBandit], regret: float) -> None:
    n, steps = 48, 20
    bandit = kind(num_replicas=n, seed=100)
    total = torch.zeros(n)
    for step in range(steps):
        total += play(bandit, step).regret[:, 0]  # the arms are in random order, so any place is a uniform choice
    per_thousand = total * (1000 / steps)
    assert abs(per_thousand.mean() - regret) < K * per_thousand.std() / math.sqrt(n)


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_the_run_and_the_global_generator_stays(kind: type[PoolBandit]) -> None:
    before = torch.get_rng_state()
    first = trace(kind(3, 4, pool_size=9, num_replicas=3, seed=1))
    assert torch.equal(first, trace(kind(3, 4, pool_size=9, num_replicas=3, seed=1)))
    other = trace(kind(3, 4, pool_size=9, num_replicas=3, seed=2))
    assert not (first == other)[..., 0].any()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arms", ["changing", "fixed"])
@pytest.mark.parametrize("seed", [1, 5])
def test_a_saved_run_continues_identically(kind: type[PoolBandit], arms: Any, seed: int) -> None:
    bandit = kind(3, 4, pool_size=9, arms=arms, num_replicas=3, seed=1)
    trace(bandit, 4)
    bandit.draw_test_points(3)
    state = bandit.state_dict()
    rest = trace(bandit)
    resumed = kind(3, 4, pool_size=9, arms=arms, num_replicas=3, seed=seed)
    trace(resumed, 2)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.pool, bandit.pool)
    assert torch.equal(resumed.means, bandit.means)
    assert torch.equal(trace(resumed), rest)
    assert torch.equal(resumed.draw_test_points(3).reward, bandit.draw_test_points(3).reward)


def test_a_saved_state_does_not_hold_the_pool() -> None:
    state = QuadraticBandit(num_replicas=2).state_dict()
    assert sum(value.nbytes for value in state["streams"].values()) < 50_000


def test_a_state_of_another_bandit_is_refused_and_nothing_moves() -> None:
    bandit, twin = (QuadraticBandit(3, 4, pool_size=9, seed=1) for _ in range(2))
    for other in (QuadraticBandit(3, 4, pool_size=8), VectorQuadraticBandit(3, 4, pool_size=9)):
        with pytest.raises(CheckpointError, match="not one of this QuadraticBandit"):
            bandit.load_state_dict(other.state_dict())
    state = twin.state_dict()
    with pytest.raises(CheckpointError, match="lacks the streams arms, eval, function, noise"):
        bandit.load_state_dict(state | {"streams": {"pool": state["streams"]["pool"]}})
    assert torch.equal(trace(bandit), trace(twin))


def test_replicas_do_not_hear_each_other() -> None:
    one, two = (QuadraticBandit(3, 4, pool_size=9, num_replicas=2, seed=8) for _ in range(2))
    assert not torch.equal(one.pool[0], one.pool[1])
    for step in range(5):
        assert torch.equal(contexts_of(one), contexts_of(two))
        features = torch.zeros(2, 1, 3)
        a = one.step(Decision(torch.tensor([[1], [step % 4]]), features))
        b = two.step(Decision(torch.tensor([[1], [(step + 1) % 4]]), features))
        assert torch.equal(a.reward[0], b.reward[0])
        assert torch.equal(a.regret[0], b.regret[0])
        assert not torch.equal(a.reward[1], b.reward[1])


@pytest.mark.parametrize("kind", KINDS)
def test_test_points_are_new_and_do_not_disturb_the_run(kind: type[PoolBandit]) -> None:
    bandit, twin = (kind(3, 4, pool_size=9, num_replicas=2, seed=3) for _ in range(2))
    assert isinstance(bandit, HasTestPoints)
    points, more = bandit.draw_test_points(7), bandit.draw_test_points(7)
    assert points.arm is None
    assert points.features.shape == (2, 7, 3)
    assert points.mean.shape == points.reward.shape == (2, 7)
    assert not torch.equal(points.features, more.features)
    assert torch.equal(points.mean, bandit._mean(points.features))
    assert not torch.equal(points.mean, points.reward)
    assert torch.equal(trace(bandit), trace(twin))
    assert torch.equal(twin.draw_test_points(7).features, points.features)
    with pytest.raises(ParameterError, match=rf"count of {kind.__name__} must be an int >= 1; got 0."):
        bandit.draw_test_points(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_has_the_dtype_and_the_device(kind: type[PoolBandit], dtype: torch.dtype) -> None:
    with torch.device("meta"):
        bandit = kind(3, 2, pool_size=5, num_replicas=2, dtype=dtype, device="cpu")
        contexts, points = contexts_of(bandit), bandit.draw_test_points(3)
    arm = torch.zeros(2, 1, dtype=torch.int64)
    with torch.device("meta"):
        feedback = bandit.step(Decision(arm, contexts[:, :, 0]))
        bandit.load_state_dict(bandit.state_dict())
    made = [contexts, points.features, points.mean, points.reward, feedback.reward, feedback.regret, bandit.means]
    assert {each.dtype for each in made} == {dtype}
    assert {each.device.type for each in made} == {"cpu"}


def test_one_arm_one_feature_one_entry() -> None:
    bandit = QuadraticBandit(1, 1, pool_size=1)
    assert contexts_of(bandit).abs().tolist() == [[[[1.0]]]]
    for _ in range(3):
        assert play(bandit, 0).regret.tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"feature_dim": 0}, "feature_dim of QuadraticBandit must be an int >= 1; got 0."),
        ({"num_arms": 0}, "num_arms of QuadraticBandit must be an int >= 1; got 0."),
        ({"num_arms": 10}, "num_arms of QuadraticBandit must be at most pool_size = 9; got 10."),
        ({"pool_size": 1.5}, "pool_size of QuadraticBandit must be an int >= 1; got 1.5."),
        ({"arms": "new"}, "arms of QuadraticBandit must be one of 'changing', 'fixed'; got 'new'."),
        ({"noise_scale": -1.0}, "noise_scale of QuadraticBandit must be a finite number >= 0; got -1.0."),
        ({"num_replicas": 0}, "num_replicas of QuadraticBandit must be an int >= 1; got 0."),
        ({"seed": -1}, "seed of QuadraticBandit must be an int >= 0; got -1."),
        ({"dtype": torch.int64}, "dtype of QuadraticBandit must be torch.float32 or torch.float64; got torch.int64."),
        ({"device": "abacus"}, "device of QuadraticBandit must name a torch device; got 'abacus'."),
    ],
)
def test_what_the_constructor_refuses(kwargs: dict[str, Any], message: str, without_shape_checks: None) -> None:
    arguments: dict[str, Any] = {"feature_dim": 2, "num_arms": 3, "pool_size": 9} | kwargs
    with pytest.raises(ParameterError) as caught:
        QuadraticBandit(**arguments)
    assert str(caught.value) == message


def test_a_coin_has_no_noise_scale() -> None:
    with pytest.raises(TypeError, match="noise_scale"):
        NeuralClassificationBandit(2, 3, noise_scale=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (None, "arm of QuadraticBandit must be an int tensor (replicas, batch); got None."),
        (torch.tensor([[0], [3]]), "arm of QuadraticBandit must be in [0, 3); got 3 at index (1, 0)."),
    ],
)
def test_a_bad_arm_moves_nothing(arm: Any, message: str, without_shape_checks: None) -> None:
    bandit, twin = (QuadraticBandit(2, 3, pool_size=9, num_replicas=2) for _ in range(2))
    with pytest.raises(ParameterError) as caught:
        bandit.step(Decision(arm, torch.zeros(2, 1, 2)))
    assert str(caught.value) == message
    assert torch.equal(trace(bandit), trace(twin))
