"""The replay buffer against a bounded queue in plain Python, for every sequence of calls."""

from collections import deque

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from ensemblepp.replay import Replay
from ensemblepp.seeding import make_generator

COLUMNS = {"features": ((2,), torch.float32), "reward": ((), torch.float64), "arm": ((), torch.int64)}
Model = deque[tuple[int, float]]
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9)),
        st.tuples(st.just("add"), st.sampled_from([255, 256, 257, 600])),
        st.tuples(st.just("scale"), st.sampled_from([0, 1, 2])),
        st.tuples(st.just("reload"), st.just(0)),
        st.tuples(st.just("sample"), st.integers(1, 12)),
    ),
    max_size=12,
)


def data(first: int, count: int, replicas: int) -> dict[str, torch.Tensor]:
    number = torch.arange(first, first + count) + 10_000 * torch.arange(replicas).unsqueeze(-1)
    features = torch.stack([number, -number], dim=-1).float()
    return {"features": features, "reward": number.double(), "arm": number}


def assert_among(batch: dict[str, torch.Tensor], model: list[tuple[int, float]]) -> None:
    """Assert that every sampled datum is one of the model's, with its own features and scaled reward."""
    weight = dict(model)
    for replica, row in enumerate(batch["arm"].tolist()):
        for place, number in enumerate(row):
            assert number - 10_000 * replica in weight
            assert batch["features"][replica, place].tolist() == [number, -number]
            assert batch["reward"][replica, place] == number * weight[number - 10_000 * replica]


@settings(max_examples=150)
@given(st.integers(1, 7) | st.sampled_from([256, 300, 513]), st.integers(1, 3), CALLS)
def test_the_buffer_is_a_bounded_queue(capacity: int, replicas: int, calls: list[tuple[str, int]]) -> None:
    buffer, model, added = Replay(capacity, COLUMNS, num_replicas=replicas), Model(maxlen=capacity), 0
    generator = make_generator(0, "replay")
    for call, argument in calls:
        if call == "add":
            buffer.add(**data(added, argument, replicas))
            model.extend((number, 1.0) for number in range(added, added + argument))
            added += argument
        elif call == "scale":
            buffer.scale("reward", 0.5**argument)
            model = Model([(number, weight * 0.5**argument) for number, weight in model], capacity)
        elif call == "reload":
            state = buffer.state_dict()
            buffer = Replay(capacity, COLUMNS, num_replicas=replicas)
            buffer.load_state_dict(state)
        elif model:
            assert_among(buffer.sample(5, generator=generator), list(model))
            assert_among(buffer.sample(5, generator=generator, recent=argument), list(model)[-argument:])
        assert (buffer.size, buffer.num_added) == (len(model), added)
        assert buffer.nbytes <= buffer.estimate_bytes()
    ordered = buffer.ordered()
    for replica in range(replicas):
        numbers = [number + 10_000 * replica for number, _ in model]
        assert ordered["arm"][replica].tolist() == numbers
        assert ordered["features"][replica].tolist() == [[number, -number] for number in numbers]
        assert ordered["reward"][replica].tolist() == [(number + 10_000 * replica) * weight for number, weight in model]
    # Datum i lies in slot i modulo the capacity, so that slots drawn before an addition mean the same after it.
    for slot, number in enumerate(buffer.stored()["arm"][0].tolist()):
        assert number % capacity == slot
