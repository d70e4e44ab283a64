"""n-step transitions never cross an episode's end, the newest datum or the write pointer of a full ring."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.seeding import make_generator
from ensemblepp.transition_replay import TransitionReplay

COLUMNS = {"observation": ((), torch.int64), "next_observation": ((), torch.int64)}


def buffer(capacity: int, **options: Any) -> TransitionReplay:
    return TransitionReplay(capacity, COLUMNS, **options)


def append(replay: TransitionReplay, number: int, end: str = "", valid: tuple[bool, ...] = (True,)) -> None:
    """Store datum `number`: state 10 n, successor 10 n + 1, reward 2^n; replica r adds 1000 r to the states."""
    offset = 1000 * torch.arange(replay.num_replicas)
    ones = torch.ones(replay.num_replicas)
    replay.append(
        torch.tensor(valid),
        observation=10 * number + offset,
        next_observation=10 * number + 1 + offset,
        reward=ones * 2.0**number,
        terminated=(ones * (end == "terminated")).bool(),
        ended=(ones * (end != "")).bool(),
    )


def expected(ends: list[str], first: int, newest: int, n: int, gamma: float) -> tuple[float, float, int, int]:
    """Return reward, discount, successor and m of the window at `first`, written out step by step."""
    reward, steps = 0.0, 0
    for number in range(first, min(first + n, newest + 1)):
        reward += gamma**steps * 2.0**number
        steps += 1
        if ends[number]:
            break
    last = first + steps - 1
    return reward, 0.0 if ends[last] == "terminated" else gamma**steps, 10 * last + 1, steps


@given(
    ends=st.lists(st.sampled_from(["", "", "", "terminated", "truncated"]), min_size=1, max_size=14),
    capacity=st.integers(1, 9),
    n=st.integers(1, 5),
)
def test_every_window_of_a_ring_is_the_one_written_out(ends: list[str], capacity: int, n: int) -> None:
    replay = buffer(capacity, n_step=n, discount=0.5)
    for number, end in enumerate(ends):
        append(replay, number, end)
    newest = len(ends) - 1
    firsts = range(max(0, len(ends) - capacity), len(ends))
    batch = replay.windows(torch.tensor([list(firsts)]))
    for place, first in enumerate(firsts):
        reward, discount, successor, steps = expected(ends, first, newest, n, 0.5)
        assert float(batch["reward"][0, place]) == pytest.approx(reward)
        assert float(batch["discount"][0, place]) == pytest.approx(discount)
        assert int(batch["next_observation"][0, place]) == successor
        assert int(batch["steps"][0, place]) == steps
        assert int(batch["observation"][0, place]) == 10 * first


def test_the_bootstrap_discount_uses_the_steps_that_were_joined() -> None:
    replay = buffer(10, n_step=3, discount=0.9)
    for number, end in enumerate(["", "truncated", "", "terminated", ""]):
        append(replay, number, end)
    batch = replay.windows(torch.tensor([[0, 1, 2, 3, 4]]))
    # Cut short after two steps; cut short at once; terminal after two; terminal at once; the newest datum alone.
    assert batch["discount"][0].tolist() == pytest.approx([0.81, 0.9, 0.0, 0.0, 0.9])
    assert batch["steps"][0].tolist() == [2, 1, 2, 1, 1]
    assert batch["reward"][0].tolist() == pytest.approx([1 + 0.9 * 2, 2, 4 + 0.9 * 8, 8, 16])


def test_one_step_windows_equal_n_step_windows_of_one() -> None:
    one, many = buffer(4), buffer(4, n_step=2)
    for number in range(6):
        append(one, number, "truncated" if number % 2 else "terminated")
        append(many, number, "truncated" if number % 2 else "terminated")
    first = torch.tensor([[2, 3, 4, 5]])
    ours, theirs = one.windows(first), many.windows(first)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_rows_that_are_not_valid_are_never_stored_and_replicas_keep_their_own_pace() -> None:
    replay = buffer(3, num_replicas=2, n_step=2, discount=0.5)
    for number in range(6):
        append(replay, number, valid=(True, number % 2 == 0))
    assert replay.counts.tolist() == [6, 3]
    batch = replay.windows(torch.tensor([[3, 4, 5], [0, 1, 2]]))
    assert batch["observation"].tolist() == [[30, 40, 50], [1000, 1020, 1040]]
    assert batch["next_observation"].tolist() == [[41, 51, 51], [1021, 1041, 1041]]
    append(replay, 6, valid=(True, False))  # the ring of replica 1 is full: its oldest datum must stay
    assert replay.windows(torch.tensor([[6], [0]]))["observation"].tolist() == [[60], [1000]]
    drawn = replay.draw(200, generator=make_generator(0, "replay"))["observation"]
    assert set(drawn[0].tolist()) == {40, 50, 60}
    assert set(drawn[1].tolist()) == {1000, 1020, 1040}


def test_draws_are_uniform_over_what_is_stored() -> None:
    replay = buffer(8)
    for number in range(20):
        append(replay, number)
    drawn = replay.draw(8000, generator=make_generator(1, "replay"))["observation"][0] // 10
    counts = torch.bincount(drawn, minlength=20)
    assert counts[:12].sum() == 0
    # Five standard errors of a binomial count with n = 8000 and p = 1/8.
    assert (counts[12:] - 1000).abs().max() < 5 * (8000 / 8 * 7 / 8) ** 0.5


def test_a_saved_buffer_continues_identically() -> None:
    replay, other = (buffer(5, num_replicas=2, n_step=3) for _ in range(2))
    for number in range(7):
        append(replay, number, valid=(True, number != 2))
    other.load_state_dict(replay.state_dict())
    for each in (replay, other):
        append(each, 7, "truncated", valid=(True, True))
    one, two = (each.draw(64, generator=make_generator(3, "replay")) for each in (replay, other))
    assert all(torch.equal(one[name], two[name]) for name in one)
    state = replay.state_dict()
    del state["counts"]
    with pytest.raises(CheckpointError, match="lacks the counts of 2 replicas"):
        buffer(5, num_replicas=2).load_state_dict(state)


def test_bad_input_is_named_and_moves_nothing() -> None:
    replay = buffer(4)
    with pytest.raises(ParameterError, match="an empty buffer"):
        replay.draw(2, generator=make_generator(0, "replay"))
    for (name, wrong), good in itertools.product(
        [("reward", torch.zeros(2)), ("observation", torch.zeros(1))], [{"terminated": torch.tensor([False])}]
    ):
        rows = {
            "observation": torch.zeros(1, dtype=torch.int64),
            "next_observation": torch.zeros(1, dtype=torch.int64),
            "reward": torch.zeros(1),
            "ended": torch.tensor([False]),
        }
        with pytest.raises(ParameterError, match=name):
            replay.append(torch.tensor([True]), **(rows | good | {name: wrong}))
    assert replay.counts.tolist() == [0]
    assert replay.num_added == 0
    with pytest.raises(ParameterError, match="last of TransitionReplay must name columns among"):
        buffer(4, last=("successor",))
    with pytest.raises(ParameterError, match="n_step of TransitionReplay"):
        buffer(4, n_step=0)
