import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.envs import LinearBandit
from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.types import Decision, Feedback, UnitSphere

KINDS: list[dict[str, Any]] = [
    {"num_arms": 4},
    {"num_arms": 4, "arms": "changing"},
    {"num_arms": 4, "bayesian": False},
    {"num_arms": 4, "bayesian": False, "arms": "changing"},
    {"action_set": "compact"},
    {"action_set": "compact", "bayesian": False},
]


def contexts_of(bandit: LinearBandit) -> Tensor:
    contexts, mask = bandit.observe()
    assert mask is None
    assert isinstance(contexts, Tensor)
    return contexts


def play(bandit: LinearBandit, choice: int) -> Feedback:
    """Play arm (choice + replica) mod K, or the coordinate direction of that number."""
    replicas = torch.arange(bandit.num_replicas).unsqueeze(1)
    if bandit.num_arms is None:
        directions = torch.eye(bandit.feature_dim, dtype=bandit.dtype)
        return bandit.step(Decision(None, directions[(replicas + choice) % bandit.feature_dim]))
    arm = (replicas + choice) % bandit.num_arms
    features = contexts_of(bandit)[replicas, 0, arm]
    return bandit.step(Decision(arm, features))


def trace(bandit: LinearBandit, steps: int = 6) -> Tensor:
    rows = []
    for step in range(steps):
        contexts, _ = bandit.observe()
        seen = contexts.flatten(1).sum(1, keepdim=True) if isinstance(contexts, Tensor) else bandit.parameter[:, :1]
        feedback = play(bandit, step)
        rows.append(torch.cat([seen, feedback.reward, feedback.regret], dim=1))
    return torch.stack(rows)


def test_reward_and_regret_by_hand() -> None:
    theta = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
    bandit = LinearBandit(2, 3, parameter=theta, noise_scale=0.0, num_replicas=2)
    x = contexts_of(bandit)
    first = [float(a[0]) * 1.0 + float(a[1]) * 2.0 for a in x[0, 0]]
    second = [float(a[0]) * -3.0 + float(a[1]) * 0.5 for a in x[1, 0]]
    for one, two in [(0, 2), (1, 0), (2, 1)]:
        feedback = bandit.step(Decision(torch.tensor([[one], [two]]), x[:, :, 0]))
        assert feedback.reward.shape == feedback.regret.shape == (2, 1)
        assert feedback.reward.flatten().tolist() == pytest.approx([first[one], second[two]], abs=1e-6)
        wanted = [max(first) - first[one], max(second) - second[two]]
        assert feedback.regret.flatten().tolist() == pytest.approx(wanted, abs=1e-6)


def test_the_sphere_by_hand() -> None:
    bandit = LinearBandit(2, action_set="compact", parameter=torch.tensor([3.0, 4.0]), noise_scale=0.0, num_replicas=2)
    contexts, mask = bandit.observe()
    assert contexts == UnitSphere(2)
    assert mask is None
    assert bandit.num_arms is None
    assert bandit.feature_bounds == (-1.0, 1.0)
    feedback = bandit.step(Decision(None, torch.tensor([[[0.6, 0.8]], [[1.0, 0.0]]])))
    assert feedback.reward.flatten().tolist() == pytest.approx([5.0, 3.0])
    assert feedback.regret.flatten().tolist() == pytest.approx([0.0, 2.0], abs=1e-6)
    assert bool((feedback.regret >= 0).all())


def test_the_best_arm_has_no_regret_and_no_arm_has_less() -> None:
    bandit = LinearBandit(5, 7, arms="changing", num_replicas=9, seed=3)
    for _ in range(5):
        means = torch.einsum("rbkd,rd->rbk", contexts_of(bandit), bandit.parameter)
        feedback = bandit.step(Decision(means.argmax(-1), torch.zeros(9, 1, 5)))
        assert feedback.regret.tolist() == [[0.0]] * 9


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_the_run(kind: dict[str, Any]) -> None:
    first = trace(LinearBandit(3, num_replicas=3, seed=1, **kind))
    assert torch.equal(first, trace(LinearBandit(3, num_replicas=3, seed=1, **kind)))
    other = trace(LinearBandit(3, num_replicas=3, seed=2, **kind))
    assert not (first == other).any(dim=0)[:, :2].any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_global_generator_stays(kind: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    trace(LinearBandit(3, num_replicas=2, **kind))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_made_on_the_default_device(kind: dict[str, Any]) -> None:
    with torch.device("meta"):
        bandit = LinearBandit(3, num_replicas=2, device="cpu", **kind)
        contexts, _ = bandit.observe()
    assert bandit.parameter.device.type == "cpu"
    if isinstance(contexts, Tensor):
        assert contexts.device.type == "cpu"
    arm, features = torch.zeros(2, 1, dtype=torch.int64), torch.eye(3)[:2].unsqueeze(1)
    with torch.device("meta"):
        feedback = bandit.step(Decision(arm, features))
        bandit.load_state_dict(bandit.state_dict())
    assert feedback.reward.device.type == feedback.regret.device.type == "cpu"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_has_the_dtype(kind: dict[str, Any], dtype: torch.dtype) -> None:
    bandit = LinearBandit(3, num_replicas=2, dtype=dtype, **kind)
    contexts, _ = bandit.observe()
    feedback = play(bandit, 0)
    assert {bandit.parameter.dtype, feedback.reward.dtype, feedback.regret.dtype} == {dtype}
    if isinstance(contexts, Tensor):
        assert contexts.dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 5])
def test_a_saved_run_continues_identically(kind: dict[str, Any], seed: int) -> None:
    bandit = LinearBandit(3, num_replicas=3, seed=1, **kind)
    trace(bandit, 4)
    state = bandit.state_dict()
    rest = trace(bandit)
    resumed = LinearBandit(3, num_replicas=3, seed=seed, **kind)
    trace(resumed, 2)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.parameter, bandit.parameter)
    assert torch.equal(trace(resumed), rest)
    assert torch.equal(trace(resumed), trace(bandit))


def test_a_state_of_another_bandit_is_refused_and_nothing_moves() -> None:
    bandit = LinearBandit(3, 4, num_replicas=2, seed=1)
    twin = LinearBandit(3, 4, num_replicas=2, seed=1)
    with pytest.raises(CheckpointError, match="not one of this LinearBandit"):
        bandit.load_state_dict(LinearBandit(3, 5, num_replicas=2).state_dict())
    state = twin.state_dict()
    with pytest.raises(CheckpointError, match=r"theta in the state of LinearBandit is \(1, 1, 3\), not \(2, 1, 3\)"):
        bandit.load_state_dict(state | {"theta": torch.zeros(1, 1, 3)})
    with pytest.raises(CheckpointError, match="lacks the streams arms, eval, noise"):
        bandit.load_state_dict(state | {"streams": {"theta": state["streams"]["theta"]}})
    assert torch.equal(trace(bandit), trace(twin))


def test_a_saved_state_does_not_hold_the_arms() -> None:
    state = LinearBandit(50, 10_000, num_replicas=2).state_dict()
    sizes = [value.nbytes for value in (state["theta"], *state["streams"].values())]
    assert sum(sizes) < 50_000


@pytest.mark.parametrize("kind", KINDS[:4])
def test_observing_twice_changes_nothing_and_stepping_leaves_old_contexts(kind: dict[str, Any]) -> None:
    bandit = LinearBandit(3, num_replicas=2, **kind)
    first = contexts_of(bandit)
    kept = first.clone()
    assert torch.equal(first, contexts_of(bandit))
    play(bandit, 0)
    assert torch.equal(first, kept)
    assert torch.equal(contexts_of(bandit), kept) == (kind.get("arms") != "changing")


def test_replicas_do_not_hear_each_other() -> None:
    one, two = (LinearBandit(3, 4, arms="changing", num_replicas=2, seed=8) for _ in range(2))
    for step in range(5):
        assert torch.equal(contexts_of(one), contexts_of(two))
        features = torch.zeros(2, 1, 3)
        a = one.step(Decision(torch.tensor([[1], [step % 4]]), features))
        b = two.step(Decision(torch.tensor([[1], [(step + 1) % 4]]), features))
        assert torch.equal(a.reward[0], b.reward[0])
        assert torch.equal(a.regret[0], b.regret[0])
        assert not torch.equal(a.reward[1], b.reward[1])


def test_what_replicas_share() -> None:
    bayesian = LinearBandit(3, 4, num_replicas=5)
    assert len(set(bayesian.parameter[:, 0].tolist())) == 5
    assert len(set(contexts_of(bayesian)[:, 0, 0, 0].tolist())) == 5
    frequentist = LinearBandit(3, 4, num_replicas=5, bayesian=False)
    assert torch.equal(frequentist.parameter, frequentist.parameter[:1].expand(5, 3))
    contexts = contexts_of(frequentist)
    assert contexts.shape == (5, 1, 4, 3)
    assert torch.equal(contexts, contexts[:1].expand(5, 1, 4, 3))
    assert contexts.untyped_storage().nbytes() == 4 * 3 * 4  # one arm set in memory, five in view
    changing = LinearBandit(3, 4, num_replicas=5, bayesian=False, arms="changing")
    assert len(set(contexts_of(changing)[:, 0, 0, 0].tolist())) == 5
    # Same feedback for the same arm, apart from each replica's own noise.
    feedback = frequentist.step(Decision(torch.full((5, 1), 2), torch.zeros(5, 1, 3)))
    assert len(set(feedback.regret.flatten().tolist())) == 1
    assert len(set(feedback.reward.flatten().tolist())) == 5


def test_a_theta_of_each_replica_over_shared_arms() -> None:
    theta = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    bandit = LinearBandit(2, 3, bayesian=False, parameter=theta, num_replicas=2, noise_scale=0.0)
    x = contexts_of(bandit)
    feedback = bandit.step(Decision(torch.tensor([[1], [1]]), x[:, :, 1]))
    assert feedback.reward.flatten().tolist() == pytest.approx([float(x[0, 0, 1, 0]), float(x[0, 0, 1, 1])])


def test_the_callers_theta_is_copied() -> None:
    theta = torch.ones(2)
    bandit = LinearBandit(2, 3, parameter=theta)
    theta.zero_()
    assert bandit.parameter.tolist() == [[1.0, 1.0]]
    columns = torch.arange(6.0).view(2, 3).t()  # not contiguous
    assert torch.equal(LinearBandit(2, 3, parameter=columns, num_replicas=3).parameter, columns)


@pytest.mark.statistical
def test_moments_of_theta_features_and_noise() -> None:
    n, k = 20_000, 5
    theta = LinearBandit(2, 1, theta_variance=10.0, num_replicas=n, seed=4).parameter.flatten().double()
    assert abs(theta.mean()) < k * math.sqrt(10 / (2 * n))
    assert abs(theta.var() - 10) < k * 10 * math.sqrt(2 / (2 * n))
    bandit = LinearBandit(2, 3, num_replicas=n, noise_scale=2.0, parameter=torch.zeros(2), seed=4)
    x = contexts_of(bandit).flatten().double()
    m, bound = len(x), 1 / math.sqrt(5)
    assert abs(x.mean()) < k * math.sqrt(1 / 15 / m)
    # Var(x^2) of U[-a, a] is a^4 (1/5 - 1/9).
    assert abs((x**2).mean() - 1 / 15) < k * math.sqrt(bound**4 * (1 / 5 - 1 / 9) / m)
    assert float(x.abs().max()) <= bandit.feature_bounds[1]
    assert float(x.abs().max()) > bound * (1 - k * 3 / m)
    noise = bandit.step(Decision(torch.zeros(n, 1, dtype=torch.int64), torch.zeros(n, 1, 2))).reward.double()
    assert abs(noise.mean()) < k * 2 / math.sqrt(n)
    assert abs(noise.var() - 4) < k * 4 * math.sqrt(2 / n)


def test_one_arm_and_one_replica() -> None:
    bandit = LinearBandit(1, 1)
    assert contexts_of(bandit).shape == (1, 1, 1, 1)
    for _ in range(3):
        feedback = bandit.step(Decision(torch.zeros(1, 1, dtype=torch.int64), contexts_of(bandit)[:, :, 0]))
        assert feedback.regret.tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"feature_dim": 0}, "feature_dim of LinearBandit must be an int >= 1; got 0."),
        ({"num_arms": None}, "num_arms of LinearBandit must be an int >= 1; got None."),
        ({"num_arms": 0}, "num_arms of LinearBandit must be an int >= 1; got 0."),
        ({"num_arms": True}, "num_arms of LinearBandit must be an int >= 1; got True."),
        ({"action_set": "sphere"}, "action_set of LinearBandit must be one of 'compact', 'finite'; got 'sphere'."),
        ({"arms": "new"}, "arms of LinearBandit must be one of 'changing', 'fixed'; got 'new'."),
        ({"action_set": "compact"}, "num_arms of LinearBandit must be None on the compact action set; got 3."),
        (
            {"action_set": "compact", "num_arms": None, "arms": "changing"},
            "arms of LinearBandit must be 'fixed' on the compact action set; got 'changing'.",
        ),
        ({"theta_variance": 0.0}, "theta_variance of LinearBandit must be a finite number > 0; got 0.0."),
        ({"noise_scale": -1.0}, "noise_scale of LinearBandit must be a finite number >= 0; got -1.0."),
        ({"num_replicas": 0}, "num_replicas of LinearBandit must be an int >= 1; got 0."),
        ({"seed": -1}, "seed of LinearBandit must be an int >= 0; got -1."),
        ({"dtype": torch.int64}, "dtype of LinearBandit must be torch.float32 or torch.float64; got torch.int64."),
        ({"device": "abacus"}, "device of LinearBandit must name a torch device; got 'abacus'."),
        (
            {"parameter": torch.zeros(3)},
            "parameter of LinearBandit must have shape (feature_dim) = (2); got shape (3,).",
        ),
        (
            {"parameter": torch.zeros(3, 2)},
            "parameter of LinearBandit must have shape (replicas, feature_dim) = (1, 2); got shape (3, 2).",
        ),
        (
            {"parameter": torch.tensor([0.0, math.nan])},
            "parameter of LinearBandit must be finite; got nan at index (1,).",
        ),
        ({"parameter": [1.0, 2.0]}, "parameter of LinearBandit must be a tensor (replicas, feature_dim); got list."),
    ],
)
def test_what_the_constructor_refuses(kwargs: dict[str, Any], message: str, without_shape_checks: None) -> None:
    arguments: dict[str, Any] = {"feature_dim": 2, "num_arms": 3} | kwargs
    with pytest.raises(ParameterError) as caught:
        LinearBandit(**arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (None, "arm of LinearBandit must be an int tensor (replicas, batch); got None."),
        (
            torch.zeros(2, dtype=torch.int64),
            "arm of LinearBandit must have shape (replicas, batch) = (2, 1); got shape (2,).",
        ),
        (torch.zeros(2, 1), "arm of LinearBandit must be an int tensor (replicas, batch); got dtype torch.float32."),
        (torch.tensor([[0], [3]]), "arm of LinearBandit must be in [0, 3); got 3 at index (1, 0)."),
        (torch.tensor([[-1], [0]]), "arm of LinearBandit must be in [0, 3); got -1 at index (0, 0)."),
    ],
)
def test_a_bad_arm_moves_nothing(arm: Any, message: str, without_shape_checks: None) -> None:
    bandit, twin = (LinearBandit(2, 3, arms="changing", num_replicas=2) for _ in range(2))
    with pytest.raises(ParameterError) as caught:
        bandit.step(Decision(arm, torch.zeros(2, 1, 2)))
    assert str(caught.value) == message
    assert torch.equal(trace(bandit), trace(twin))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            torch.zeros(1, 2),
            "features of LinearBandit must have shape (replicas, batch, feature_dim) = (1, 1, 2); got shape (1, 2).",
        ),
        (torch.tensor([[[0.6, 0.9]]]), "features of LinearBandit must have norm 1; got "),
        (torch.tensor([[[math.nan, 1.0]]]), "features of LinearBandit must have norm 1; got nan at index (0, 0)."),
    ],
)
def test_a_bad_direction_moves_nothing(features: Tensor, message: str, without_shape_checks: None) -> None:
    bandit, twin = (LinearBandit(2, action_set="compact") for _ in range(2))
    with pytest.raises(ParameterError) as caught:
        bandit.step(Decision(None, features))
    assert str(caught.value).startswith(message)
    assert torch.equal(trace(bandit), trace(twin))
