"""The replay buffer keeps the newest data, and every datum's own columns together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from ensemblepp import checkpoint
from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.replay import Replay
from ensemblepp.seeding import make_generator
from ensemblepp.testing import forbid_host_sync

COLUMNS = {"features": ((2,), torch.float32), "reward": ((), torch.float64), "arm": ((), torch.int64)}


def data(first: int, count: int, replicas: int = 2) -> dict[str, torch.Tensor]:
    """Data whose every column tells datum and replica."""
    number = torch.arange(first, first + count).expand(replicas, -1) + 1000 * torch.arange(replicas).unsqueeze(-1)
    return {
        "features": torch.stack([number, -number], dim=-1).float(),
        "reward": number.double() / 2,
        "arm": number % 7,
    }


def consistent(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the datum numbers of a batch after checking that its columns belong together."""
    number = batch["features"][..., 0]
    assert torch.equal(batch["features"][..., 1], -number)
    assert torch.equal(batch["reward"], number.double() / 2)
    assert torch.equal(batch["arm"], number.long() % 7)
    return number.long()


def stored(buffer: Replay) -> list[int]:
    """Return the datum numbers of the first replica in slot order."""
    numbers: list[int] = consistent(buffer.stored())[0].tolist()
    return numbers


def test_the_newest_data_overwrite_the_oldest_in_place() -> None:
    buffer = Replay(5, COLUMNS, num_replicas=2)
    buffer.add(**data(0, 3))
    assert (stored(buffer), buffer.size, buffer.num_added) == ([0, 1, 2], 3, 3)
    buffer.add(**data(3, 0))
    assert (stored(buffer), buffer.num_added) == ([0, 1, 2], 3)
    buffer.add(**data(3, 4))  # two fill the buffer, two wrap round
    assert (stored(buffer), buffer.size, buffer.num_added) == ([5, 6, 2, 3, 4], 5, 7)
    assert consistent(buffer.ordered())[1].tolist() == [1002, 1003, 1004, 1005, 1006]
    buffer.add(**data(7, 5))  # exactly the capacity
    assert stored(buffer) == [10, 11, 7, 8, 9]


def test_of_a_batch_beyond_the_capacity_the_last_are_kept() -> None:
    buffer = Replay(3, COLUMNS, num_replicas=2)
    buffer.add(**data(0, 8))
    # Datum i lies in slot i % 3, as if the eight had come one by one.
    assert (stored(buffer), buffer.num_added) == ([6, 7, 5], 8)
    buffer.add(**data(8, 1))
    assert stored(buffer) == [6, 7, 8]


def test_a_batch_on_the_first_add_grows_the_storage_and_keeps_every_column_together() -> None:
    buffer = Replay(700, COLUMNS, num_replicas=2)
    for first, count in ((0, 1), (1, 600), (601, 300)):
        buffer.add(**data(first, count))
    assert consistent(buffer.ordered())[0].tolist() == list(range(201, 901))


def test_stored_values_are_views_and_take_no_gradient_along() -> None:
    buffer = Replay(4, {"reward": ((), torch.float32)})
    leaf = torch.ones(1, 2, requires_grad=True)
    buffer.add(reward=3 * leaf)
    view = buffer.stored()["reward"]
    assert not view.requires_grad
    assert view.data_ptr() == buffer.stored()["reward"].data_ptr()
    buffer.add(reward=torch.full((1, 1), 7, dtype=torch.int64))  # integers fit into floats
    assert buffer.stored()["reward"].tolist() == [[3.0, 3.0, 7.0]]


def test_a_minibatch_can_be_repeated_from_its_slots() -> None:
    buffer = Replay(8, COLUMNS, num_replicas=2)
    buffer.add(**data(0, 11))
    slots = buffer.draw_slots(6, generator=make_generator(1, "replay"))
    sample = buffer.sample(6, generator=make_generator(1, "replay"))
    for first, second in zip(buffer.gather(slots).values(), sample.values(), strict=True):
        assert torch.equal(first, second)
    assert torch.equal(consistent(buffer.gather(torch.tensor([[2, 3], [3, 2]]))), torch.tensor([[10, 3], [1003, 1010]]))


def test_neither_storing_nor_sampling_waits_for_the_device() -> None:
    buffer, generator = Replay(8, COLUMNS, num_replicas=2), make_generator(0, "replay")
    more = data(0, 11)
    with forbid_host_sync():
        buffer.add(**more)
        buffer.sample(4, generator=generator, recent=3)
        buffer.gather(buffer.draw_slots(4, generator=generator))
        buffer.scale("reward", 0.9)
        buffer.ordered()


def test_storage_grows_by_doubling_up_to_the_capacity() -> None:
    buffer = Replay(1000, COLUMNS, num_replicas=2)
    small = buffer.nbytes
    buffer.add(**data(0, 300))
    assert buffer.nbytes == 2 * small
    buffer.add(**data(300, 300))
    assert consistent(buffer.ordered())[0].tolist() == list(range(600))
    assert buffer.nbytes == buffer.estimate_bytes() == 2 * 1000 * (8 + 8 + 8)


def test_memory_stays_flat_once_full() -> None:
    buffer = Replay(300, {"reward": ((), torch.float32)})
    one = torch.zeros(1, 1)
    buffer.add(reward=torch.zeros(1, 300))
    storage = buffer.stored()["reward"].data_ptr()
    for _ in range(100_000):
        buffer.add(reward=one)
    assert buffer.nbytes == buffer.estimate_bytes() == 300 * 4
    assert buffer.stored()["reward"].data_ptr() == storage
    assert buffer.num_added == 100_300


def test_samples_are_uniform_with_replacement_and_independent_per_replica() -> None:
    buffer, generator = Replay(8, COLUMNS, num_replicas=2), make_generator(0, "replay")
    buffer.add(**data(0, 11))
    numbers = consistent(buffer.sample(20_000, generator=generator)) - torch.tensor([[0], [1000]])
    for row in numbers:
        counts = torch.bincount(row, minlength=11)
        assert counts[:3].tolist() == [0, 0, 0]
        assert chisquare(counts[3:].numpy()).pvalue > 1e-4
    assert not torch.equal(numbers[0], numbers[1])


@pytest.mark.parametrize("added", [3, 8, 9, 21])
def test_recent_samples_are_among_the_newest(added: int) -> None:
    buffer, generator = Replay(8, COLUMNS, num_replicas=2), make_generator(0, "replay")
    buffer.add(**data(0, added))
    numbers = consistent(buffer.sample(200, generator=generator, recent=3))[0]
    assert sorted(set(numbers.tolist())) == list(range(added - 3, added))


def test_slots_can_be_drawn_before_their_data_arrive() -> None:
    buffer = Replay(8, COLUMNS, num_replicas=2)
    buffer.add(**data(0, 3))
    early = buffer.draw_slots(50, generator=make_generator(0, "replay"), incoming=2)
    buffer.add(**data(3, 2))
    assert torch.equal(early, buffer.draw_slots(50, generator=make_generator(0, "replay")))


@pytest.mark.parametrize("added", [0, 3, 8, 13])
def test_a_saved_buffer_continues_identically(added: int, tmp_path: Path) -> None:
    buffer, copy = Replay(8, COLUMNS, num_replicas=2), Replay(8, COLUMNS, num_replicas=2)
    buffer.add(**data(0, added))
    copy.add(**data(50, 17))  # what was there before is forgotten
    state = buffer.state_dict()
    assert state["columns"]["reward"].shape == (2, min(added, 8))
    checkpoint.save(tmp_path / "buffer", state, kind="replay")
    copy.load_state_dict(checkpoint.load(tmp_path / "buffer", kind="replay"))
    for first, count in ((added, 2), (added + 2, 9)):
        for each in (buffer, copy):
            each.add(**data(first, count))
        assert copy.num_added == buffer.num_added
        for name, values in buffer.stored().items():
            assert torch.equal(copy.stored()[name], values)
        one, two = (each.sample(9, generator=make_generator(0, "replay"), recent=4) for each in (buffer, copy))
        assert torch.equal(consistent(one), consistent(two))


def test_a_buffer_saved_before_the_capacity_was_still_loads() -> None:
    buffer, copy = Replay(8, COLUMNS, num_replicas=2), Replay(8, COLUMNS, num_replicas=2)
    buffer.add(**data(0, 9))
    state = buffer.state_dict()
    del state["capacity"]
    copy.load_state_dict(state)
    assert stored(copy) == stored(buffer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 9}, "capacity of the saved Replay is 9, not 8"),
        ({"num_added": -1}, "num_added of the saved Replay is -1, not a count"),
        ({"num_added": 2}, r"column features of the saved Replay is \(2, 3, 2\), not \(2, 2, 2\)"),
        ({"columns": {}}, "columns of the saved Replay are"),
        ({"columns": {"arm": torch.zeros(2, 3)}}, "column arm of the saved Replay is torch.float32, not torch.int64"),
        ({"columns": {"arm": torch.zeros(1, 3)}}, r"column arm of the saved Replay is \(1, 3\), not \(2, 3\)"),
    ],
)
def test_a_saved_buffer_of_other_sizes_is_refused(change: dict[str, Any], message: str) -> None:
    buffer, other = Replay(8, COLUMNS, num_replicas=2), Replay(8, COLUMNS, num_replicas=2)
    buffer.add(**data(5, 2))
    other.add(**data(0, 3))
    state = other.state_dict()
    if change.get("columns"):
        change = {"columns": state["columns"] | change["columns"]}
    with pytest.raises(CheckpointError, match=message):
        buffer.load_state_dict(state | change)
    assert (stored(buffer), buffer.num_added) == ([5, 6], 2)


def test_scaling_a_column_reaches_everything_stored() -> None:
    buffer = Replay(8, COLUMNS, num_replicas=2)
    buffer.add(**data(0, 13))
    before = buffer.ordered()["reward"].clone()
    buffer.scale("reward", 0.5)
    assert torch.equal(buffer.ordered()["reward"], 0.5 * before)
    with pytest.raises(ParameterError, match="column of Replay must be one of features, reward, arm"):
        buffer.scale("rewards", 0.5)
    with pytest.raises(ParameterError, match="column of Replay must hold floating-point numbers; got 'arm'"):
        buffer.scale("arm", 0.5)
    with pytest.raises(ParameterError, match="factor of Replay must be a finite number; got nan"):
        buffer.scale("reward", float("nan"))
    assert torch.equal(buffer.ordered()["reward"], 0.5 * before)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": None}, "columns of Replay must be features, reward, arm; got features, arm."),
        ({"extra": torch.zeros(2, 2)}, "columns of Replay must be .*; got features, reward, arm, extra."),
        ({"reward": torch.zeros(2, 1)}, r"reward of Replay must have shape .* = \(2, 2\); got shape \(2, 1\)"),
        ({"features": torch.zeros(2, 2, 1)}, r"features of Replay must have shape .* = \(2, any, 2\); got shape"),
        ({"features": torch.zeros(2)}, "features of Replay must have shape"),
        ({"arm": torch.zeros(2)}, "arm of Replay must have shape"),
        (
            {"arm": torch.full((2, 2), 1.7)},
            "arm of Replay must have a dtype that casts to torch.int64; got torch.float",
        ),
        ({"arm": [[0, 1], [0, 1]]}, "arm of Replay must be a tensor .*; got list"),
    ],
)
def test_bad_data_change_nothing(change: dict[str, Any], message: str) -> None:
    buffer = Replay(8, COLUMNS, num_replicas=2)
    buffer.add(**data(0, 3))
    before = buffer.state_dict()
    columns = {name: values for name, values in (data(3, 2) | change).items() if values is not None}
    with pytest.raises(ParameterError, match=message):
        buffer.add(**columns)
    after = buffer.state_dict()
    assert after["num_added"] == before["num_added"]
    assert all(torch.equal(after["columns"][name], values) for name, values in before["columns"].items())


def test_slots_without_data_are_refused() -> None:
    buffer = Replay(8, COLUMNS, num_replicas=2)
    buffer.add(**data(0, 3))
    for bad in (3, -1, 300):  # a slot beyond the storage would be another replica's
        with pytest.raises(ParameterError, match=rf"slots of Replay must be in \[0, 3\); got {bad} at index \(1, 0\)"):
            buffer.gather(torch.tensor([[0], [bad]]))
    with pytest.raises(ParameterError, match=r"slots of Replay must have shape .* = \(2, any\)"):
        buffer.gather(torch.tensor([[0]]))


def test_wrong_sizes_are_refused_by_name() -> None:
    generator = make_generator(0, "replay")
    with pytest.raises(ParameterError, match="an empty buffer"):
        Replay(8, COLUMNS).sample(1, generator=generator)
    with pytest.raises(ParameterError, match="columns of Replay must name at least one column"):
        Replay(8, {})
    with pytest.raises(ParameterError, match="capacity of Replay must be an int >= 1; got 0"):
        Replay(0, COLUMNS)
    with pytest.raises(ParameterError, match="num_replicas of Replay must be an int >= 1; got 0"):
        Replay(8, COLUMNS, num_replicas=0)
    buffer = Replay(8, COLUMNS)
    buffer.add(**data(0, 3, replicas=1))
    for name in ("batch_size", "recent"):
        with pytest.raises(ParameterError, match=f"{name} of Replay must be an int >= 1; got 0"):
            buffer.sample(**({"batch_size": 1} | {name: 0}), generator=generator)
