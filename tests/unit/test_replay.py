"""The replay buffer keeps the newest data, and every datum's own columns together."""

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.replay import Replay
from ensemblepp.seeding import make_generator

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


@given(st.integers(1, 7), st.lists(st.integers(0, 9), max_size=8))
def test_the_buffer_is_a_bounded_queue(capacity: int, batches: list[int]) -> None:
    buffer, model, first = Replay(capacity, COLUMNS, num_replicas=2), deque[int](maxlen=capacity), 0
    for count in batches:
        buffer.add(**data(first, count))
        model.extend(range(first, first + count))
        first += count
    assert (buffer.size, buffer.num_added) == (len(model), first)
    numbers = consistent(buffer.ordered())
    assert numbers[0].tolist() == list(model)
    assert numbers[1].tolist() == [1000 + number for number in model]


def test_storage_grows_by_doubling_up_to_the_capacity() -> None:
    buffer = Replay(1000, COLUMNS, num_replicas=2)
    small = buffer.nbytes
    buffer.add(**data(0, 300))
    assert buffer.nbytes == 2 * small
    buffer.add(**data(300, 300))
    assert consistent(buffer.ordered())[0].tolist() == list(range(600))
    assert buffer.nbytes == buffer.estimate_bytes() == 2 * 1000 * (8 + 8 + 8)


def test_memory_stays_flat_once_full() -> None:
    buffer = Replay(100, COLUMNS)
    for step in range(20_000):
        buffer.add(**data(step, 1, replicas=1))
    assert buffer.nbytes == buffer.estimate_bytes()
    assert consistent(buffer.ordered())[0].tolist() == list(range(19_900, 20_000))


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


def test_a_saved_buffer_continues_identically() -> None:
    buffer, copy = Replay(8, COLUMNS, num_replicas=2), Replay(8, COLUMNS, num_replicas=2)
    buffer.add(**data(0, 13))
    saved = buffer.state_dict()
    copy.load_state_dict(saved)
    for each in (buffer, copy):
        each.add(**data(13, 2))
        each.scale("reward", 1.0)
    assert torch.equal(consistent(buffer.stored()), consistent(copy.stored()))
    with pytest.raises(CheckpointError, match="column features of the saved Replay"):
        Replay(5, COLUMNS, num_replicas=2).load_state_dict(saved)


def test_scaling_a_column_reaches_everything_stored() -> None:
    buffer = Replay(8, COLUMNS, num_replicas=2)
    buffer.add(**data(0, 13))
    before = buffer.ordered()["reward"].clone()
    buffer.scale("reward", 0.5)
    assert torch.equal(buffer.ordered()["reward"], 0.5 * before)
    with pytest.raises(ParameterError, match="column of Replay must be one of features, reward, arm"):
        buffer.scale("rewards", 0.5)


def test_bad_data_change_nothing() -> None:
    buffer = Replay(8, COLUMNS, num_replicas=2)
    buffer.add(**data(0, 3))
    good = data(3, 2)
    for bad in (
        {"features": good["features"]},
        {**good, "extra": good["reward"]},
        {**good, "reward": good["reward"][:, :1]},
        {**good, "features": good["features"][..., :1]},
    ):
        with pytest.raises(ParameterError):
            buffer.add(**bad)
    assert consistent(buffer.stored())[0].tolist() == [0, 1, 2]
    with pytest.raises(ParameterError, match="an empty buffer"):
        Replay(8, COLUMNS).sample(1, generator=make_generator(0, "replay"))
    with pytest.raises(ParameterError, match="columns of Replay must name at least one column"):
        Replay(8, {})
