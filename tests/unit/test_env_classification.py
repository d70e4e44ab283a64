from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ensemblepp.envs import ClassificationBandit, ClassificationData
from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.types import Decision, Feedback

ENCODINGS = ["shared", "disjoint"]


def rows(n: int = 6, classes: int = 3, dim: int = 2) -> ClassificationData:
    """Row i is (i + 1, -(i + 1), ...) with label i mod classes, so that a context names its row."""
    sign = np.where(np.arange(dim) % 2 == 0, 1, -1)
    features = (np.arange(1, n + 1)[:, None] * sign).astype(np.float32)
    return ClassificationData(features, np.arange(n) % classes, classes)


def contexts_of(bandit: ClassificationBandit) -> Tensor:
    contexts, mask = bandit.observe()
    assert mask is None
    assert isinstance(contexts, Tensor)
    return contexts


def row_numbers(bandit: ClassificationBandit) -> Tensor:
    """The row that each replica sees, for data of `rows`; in either encoding the first number is its first feature."""
    return contexts_of(bandit).flatten(1)[:, 0].round().long() - 1


def play(bandit: ClassificationBandit, arms: Tensor) -> Feedback:
    return bandit.step(Decision(arms.view(-1, 1), torch.zeros(bandit.num_replicas, 1, bandit.feature_dim)))


def trace(bandit: ClassificationBandit, steps: int = 10) -> Tensor:
    seen = []
    for step in range(steps):
        contexts = contexts_of(bandit).flatten(1)
        arms = (torch.arange(bandit.num_replicas) + step) % bandit.data.num_classes
        feedback = play(bandit, arms)
        seen.append(torch.cat([contexts, feedback.reward, feedback.regret], dim=1))
    return torch.stack(seen)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_reward_and_regret_by_hand(encoding: Any) -> None:
    bandit = ClassificationBandit(rows(), encoding=encoding, num_replicas=4)
    for step in range(12):
        label = row_numbers(bandit) % 3
        right = torch.tensor([True, False, step % 2 == 0, True])
        feedback = play(bandit, torch.where(right, label, (label + 1) % 3))
        assert feedback.reward.flatten().tolist() == right.float().tolist()
        assert feedback.regret.flatten().tolist() == (~right).float().tolist()


def test_noise_is_on_the_reward_only() -> None:
    loud = ClassificationBandit(rows(), noise_scale=0.5, num_replicas=50, seed=2)
    quiet = ClassificationBandit(rows(), num_replicas=50, seed=2)
    arms = torch.zeros(50, dtype=torch.int64)
    a, b = play(loud, arms), play(quiet, arms)
    assert torch.equal(a.regret, b.regret)
    assert torch.equal(b.reward, 1 - b.regret)
    assert len((a.reward - b.reward).unique()) == 50


@pytest.mark.statistical
def test_moments_of_the_noise() -> None:
    n, k = 20_000, 5
    bandit = ClassificationBandit(rows(3, 1), noise_scale=0.5, num_replicas=n)
    noise = play(bandit, torch.zeros(n, dtype=torch.int64)).reward.double() - 1
    assert abs(noise.mean()) < k * 0.5 / n**0.5
    assert abs(noise.var() - 0.25) < k * 0.25 * (2 / n) ** 0.5


def test_shared_contexts_are_the_rows() -> None:
    bandit = ClassificationBandit(rows(), num_replicas=5)
    contexts = contexts_of(bandit)
    assert contexts.shape == (5, 1, 3)
    assert bandit.per_arm
    assert (bandit.feature_dim, bandit.num_arms, bandit.feature_bounds) == (3, 3, (-6.0, 6.0))
    number = row_numbers(bandit) + 1
    assert contexts[:, 0].tolist() == torch.stack([number, -number, torch.ones(5)], dim=1).tolist()


def test_disjoint_contexts_place_the_row_in_the_block_of_the_arm() -> None:
    shared = ClassificationBandit(rows(dim=4), num_replicas=3, seed=7)
    disjoint = ClassificationBandit(rows(dim=4), num_replicas=3, seed=7, encoding="disjoint")
    assert not disjoint.per_arm
    assert disjoint.feature_dim == 3 * 5
    for _ in range(8):
        x, blocks = contexts_of(shared), contexts_of(disjoint)
        assert blocks.shape == (3, 1, 3, 15)
        wanted = torch.zeros(3, 1, 3, 15)
        for replica in range(3):
            for arm in range(3):
                wanted[replica, 0, arm, arm * 5 : (arm + 1) * 5] = x[replica, 0]
        assert torch.equal(blocks, wanted)
        arms = torch.tensor([0, 1, 2])
        assert torch.equal(play(shared, arms).reward, play(disjoint, arms).reward)


def test_bounds_count_the_zeros_of_other_blocks() -> None:
    data = ClassificationData(np.full((4, 2), 3.0, np.float32), np.arange(4) % 2, 2)
    assert ClassificationBandit(data, intercept=False).feature_bounds == (3.0, 3.0)
    assert ClassificationBandit(data, intercept=False, encoding="disjoint").feature_bounds == (0.0, 3.0)
    alone = ClassificationData(data.features, np.zeros(4, np.int64), 1)
    assert ClassificationBandit(alone, intercept=False, encoding="disjoint").feature_bounds == (3.0, 3.0)


def test_unit_norm_and_intercept() -> None:
    data = ClassificationData(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32), np.array([0, 1]), 2)
    prepared = ClassificationBandit(data, scaling="unit_norm").data
    assert prepared.features.tolist() == pytest.approx(np.array([[0.6, 0.8, 1.0], [0.0, 0.0, 1.0]]))
    assert prepared.features.dtype == np.float32
    assert ClassificationBandit(data, intercept=False).data is data


def test_every_row_is_dealt_once_per_pass_in_an_order_of_each_replica() -> None:
    bandit = ClassificationBandit(rows(30), num_replicas=4)
    passes = []
    for _ in range(3):
        order = []
        for _ in range(30):
            order.append(row_numbers(bandit))
            play(bandit, torch.zeros(4, dtype=torch.int64))
        passes.append(torch.stack(order, dim=1))
        assert torch.equal(passes[-1].sort(dim=1).values, torch.arange(30).expand(4, 30))
    orders = {tuple(row.tolist()) for order in passes for row in order}
    assert len(orders) == 12


@pytest.mark.statistical
def test_orders_are_uniform() -> None:
    n, k = 6000, 5
    first = row_numbers(ClassificationBandit(rows(6), num_replicas=n, seed=1))
    counts = torch.bincount(first, minlength=6)
    assert float((counts - n / 6).abs().max()) < k * (n * 1 / 6 * 5 / 6) ** 0.5


def test_one_row_one_arm_one_replica() -> None:
    bandit = ClassificationBandit(rows(1, 1), encoding="disjoint")
    assert (bandit.num_arms, bandit.num_replicas, bandit.feature_dim) == (1, 1, 3)
    for _ in range(3):
        assert contexts_of(bandit).tolist() == [[[[1.0, -1.0, 1.0]]]]
        feedback = play(bandit, torch.zeros(1, dtype=torch.int64))
        assert (feedback.reward.tolist(), feedback.regret.tolist()) == ([[1.0]], [[0.0]])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_seed_decides_the_run_and_the_global_generators_stay(encoding: Any) -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1]
    runs = [
        trace(ClassificationBandit(rows(40), encoding=encoding, noise_scale=0.1, num_replicas=2, seed=seed))
        for seed in (3, 3, 4)
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("steps", [0, 5, 6, 9, 13])
def test_a_saved_run_continues_identically(encoding: Any, steps: int) -> None:
    def make(seed: int) -> ClassificationBandit:
        return ClassificationBandit(rows(), encoding=encoding, noise_scale=0.1, num_replicas=3, seed=seed)

    bandit, resumed = make(1), make(2)
    for _ in range(steps):
        play(bandit, torch.tensor([0, 1, 2]))
    state = bandit.state_dict()
    rest = trace(bandit, 20)
    trace(resumed, 4)
    resumed.load_state_dict(state)
    assert torch.equal(trace(resumed, 20), rest)


def test_a_state_of_other_data_is_refused_and_nothing_moves() -> None:
    bandit, twin = (ClassificationBandit(rows(), num_replicas=2) for _ in range(2))
    with pytest.raises(CheckpointError, match="not one of this ClassificationBandit"):
        bandit.load_state_dict(ClassificationBandit(rows(7), num_replicas=2).state_dict())
    with pytest.raises(CheckpointError, match="not one of this ClassificationBandit"):
        bandit.load_state_dict({})
    with pytest.raises(CheckpointError, match="position"):
        bandit.load_state_dict(bandit.state_dict() | {"position": 6})
    assert torch.equal(trace(bandit), trace(twin))


def test_observing_twice_changes_nothing() -> None:
    bandit = ClassificationBandit(rows())
    assert torch.equal(contexts_of(bandit), contexts_of(bandit))


def test_replicas_do_not_hear_each_other() -> None:
    one, two = (ClassificationBandit(rows(), noise_scale=0.1, num_replicas=2, seed=8) for _ in range(2))
    for step in range(14):
        assert torch.equal(contexts_of(one), contexts_of(two))
        a = play(one, torch.tensor([1, step % 3]))
        b = play(two, torch.tensor([1, (step + 1) % 3]))
        assert torch.equal(a.reward[0], b.reward[0])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_tensor_is_made_on_the_default_device(encoding: Any) -> None:
    arms = torch.zeros(2, dtype=torch.int64).view(2, 1)
    features = torch.zeros(2, 1, 3)
    with torch.device("meta"):
        bandit = ClassificationBandit(rows(2), encoding=encoding, noise_scale=0.1, num_replicas=2, device="cpu")
        for _ in range(3):
            assert contexts_of(bandit).device.type == "cpu"
            feedback = bandit.step(Decision(arms, features))
            assert feedback.reward.device.type == feedback.regret.device.type == "cpu"
        bandit.load_state_dict(bandit.state_dict())
        assert contexts_of(bandit).device.type == "cpu"


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_everything_has_the_dtype_whatever_the_default(encoding: Any, default: torch.dtype) -> None:
    wanted = torch.float64 if default == torch.float32 else torch.float32
    torch.set_default_dtype(default)
    try:
        bandit = ClassificationBandit(rows(), encoding=encoding, noise_scale=0.1, dtype=wanted)
        contexts = contexts_of(bandit)
        feedback = bandit.step(
            Decision(torch.zeros(1, 1, dtype=torch.int64), contexts.flatten(0, -2)[:1].view(1, 1, -1))
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert {contexts.dtype, feedback.reward.dtype, feedback.regret.dtype} == {wanted}


def test_digits_by_name() -> None:
    bandit = ClassificationBandit(num_replicas=3)
    assert (bandit.num_arms, bandit.feature_dim, bandit.data.name) == (10, 65, "digits")
    assert contexts_of(bandit).shape == (3, 1, 65)
    low, high = bandit.feature_bounds
    assert (low, high) == (float(bandit.data.features.min()), float(bandit.data.features.max()))
    assert -5.0 <= low < 0.0 < high == 5.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"encoding": "one_hot"},
            "encoding of ClassificationBandit must be one of 'disjoint', 'shared'; got 'one_hot'.",
        ),
        (
            {"scaling": "none"},
            "scaling of ClassificationBandit must be one of 'standard', 'unit_norm'; got 'none'.",
        ),
        ({"noise_scale": -0.1}, "noise_scale of ClassificationBandit must be a finite number >= 0; got -0.1."),
        ({"num_replicas": 0}, "num_replicas of ClassificationBandit must be an int >= 1; got 0."),
        ({"seed": 1.5}, "seed of ClassificationBandit must be an int >= 0; got 1.5."),
        (
            {"dtype": torch.float16},
            "dtype of ClassificationBandit must be torch.float32 or torch.float64; got torch.float16.",
        ),
        (
            {"data_dir": "somewhere"},
            "data_dir of ClassificationBandit must be None for data of your own; got 'somewhere'.",
        ),
        ({"dataset": 3}, "dataset of ClassificationBandit must be a name or ClassificationData; got int."),
        ({"dataset": "iris"}, "name of load_dataset must be one of 'adult', "),
    ],
)
def test_what_the_constructor_refuses(kwargs: dict[str, Any], message: str, without_shape_checks: None) -> None:
    arguments: dict[str, Any] = {"dataset": rows()} | kwargs
    with pytest.raises(ParameterError) as caught:
        ClassificationBandit(**arguments)
    assert str(caught.value).startswith(message)


def test_a_bad_arm_moves_nothing() -> None:
    bandit, twin = (ClassificationBandit(rows(), noise_scale=0.1, num_replicas=2) for _ in range(2))
    with pytest.raises(ParameterError) as caught:
        play(bandit, torch.tensor([0, 3]))
    assert str(caught.value) == "arm of ClassificationBandit must be in [0, 3); got 3 at index (1, 0)."
    with pytest.raises(ParameterError, match="must be an int tensor"):
        bandit.step(Decision(None, torch.zeros(2, 1, 3)))
    assert torch.equal(trace(bandit), trace(twin))
