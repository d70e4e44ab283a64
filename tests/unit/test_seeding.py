"""Named random streams."""

import numpy as np
import pytest
import torch

from ensemblepp.errors import ParameterError
from ensemblepp.seeding import Streams, make_generator


def numbers(generator: torch.Generator, count: int = 4) -> list[float]:
    return torch.rand(count, generator=generator).tolist()


def test_seed_and_name_make_a_stream() -> None:
    first = numbers(make_generator(3, "act"))
    assert first == numbers(make_generator(3, "act"))
    others = [
        numbers(make_generator(seed, name)) for seed, name in [(4, "act"), (3, "perturb"), (3, "acT"), (2**40, "a")]
    ]
    assert all(first != other for other in others)


def test_neighbouring_seeds_are_uncorrelated() -> None:
    draws = torch.stack([torch.randn(10_000, generator=make_generator(seed, "act")) for seed in range(20)])
    correlation = torch.corrcoef(draws) - torch.eye(20)
    assert float(correlation.abs().max()) < 4.5 / 100  # 190 pairs, standard error 1 / sqrt(10,000)


def test_an_odd_seed_is_refused(without_shape_checks: None) -> None:
    for seed in (-1, 0.5, True, None):
        with pytest.raises(ParameterError, match="seed of stream 'act' must be an int >= 0"):
            make_generator(seed, "act")  # type: ignore[arg-type]


def test_streams_are_independent_of_each_other() -> None:
    one, two = Streams(0, "act", "perturb"), Streams(0, "act", "perturb")
    numbers(one["perturb"], 100)
    assert numbers(one["act"]) == numbers(two["act"])
    assert numbers(one["perturb"]) != numbers(two["perturb"])


def test_streams_continue_from_their_saved_state() -> None:
    streams = Streams(0, "act", "perturb")
    numbers(streams["act"])
    state = streams.state_dict()
    rest = numbers(streams["act"]), numbers(streams["perturb"])
    other = Streams(9, "act", "perturb")
    other.load_state_dict(state)
    assert rest == (numbers(other["act"]), numbers(other["perturb"]))


def test_rollback_undoes_the_draws_of_a_failed_block_only() -> None:
    streams, same = Streams(0, "act", "perturb"), Streams(0, "act", "perturb")

    def fail() -> None:
        with streams.rollback():
            numbers(streams["act"])
            numbers(streams["perturb"])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert numbers(streams["act"]) == numbers(same["act"])
    with streams.rollback():
        drawn = numbers(streams["perturb"])
    assert drawn == numbers(same["perturb"])
    assert numbers(streams["perturb"]) == numbers(same["perturb"])


def test_global_generators_stay_untouched() -> None:
    before = torch.get_rng_state(), str(np.random.get_state())
    numbers(Streams(0, "act")["act"])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == str(np.random.get_state())
