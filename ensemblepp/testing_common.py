"""What the conformance checkers share: factories, and comparisons that raise AssertionError with the reason."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.random import get_state
from torch import Tensor

from ensemblepp import checkpoint
from ensemblepp.types import Agent, Environment, StateDict

NUM_REPLICAS = 3


AgentFactory: TypeAlias = Callable[..., Agent]
"""Builds a fresh agent from the keywords num_replicas, seed and dtype: a class whose other arguments
`functools.partial` has bound is one."""

EnvironmentFactory: TypeAlias = Callable[..., Environment]
"""Builds a fresh environment from the keywords num_replicas and seed."""


def require(condition: bool, message: str) -> None:
    """Raise AssertionError, also where Python drops assert statements, unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def leaves(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested state dictionary; the names of the levels are joined by a slash."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        found |= leaves(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def is_stream(leaf: object) -> bool:
    """Return True for a generator's state: by convention the only uint8 tensors in a state dictionary."""
    return isinstance(leaf, Tensor) and leaf.dtype is torch.uint8


def identical(first: Any, second: Any) -> bool:
    """Return True for equal values of one type; tensors in shape, dtype and every entry, NaN equal to NaN."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return type(first) is type(second) and bool(first == second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


def require_same_state(
    first: Mapping[str, Any], second: Mapping[str, Any], message: str, *, streams: bool = True
) -> None:
    """Require two state dictionaries to be identical, with or without the states of their generators."""
    one, two = leaves(first), leaves(second)
    require(one.keys() == two.keys(), f"{message}: the entries of state_dict differ")
    for name, leaf in one.items():
        if streams or not is_stream(leaf):
            require(identical(leaf, two[name]), f"{message}: {name} differs")


def snapshot(thing: Agent | Environment) -> StateDict:
    """Return the state as a copy that shares no memory, whatever `state_dict` returns."""
    return copy.deepcopy(thing.state_dict())


def through_file(state: StateDict) -> StateDict:
    """Save a state to a checkpoint file and return what loading it gives."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.ckpt"
        checkpoint.save(path, state, kind="conformance")
        return checkpoint.load(path, kind="conformance")


@contextmanager
def global_random_state_untouched(owner: str) -> Iterator[None]:
    """Require the block to draw nothing from the global generators of torch and numpy."""

    def states() -> list[Any]:
        # Not Python's own: run-time type checkers draw from it.
        _, key, position, *normal = get_state()
        return [torch.get_rng_state(), np.asarray(key).tobytes(), position, normal]

    before = states()
    yield
    require(all(map(identical, before, states())), f"{owner} draws from a global random generator")


def nearly_equal(first: Tensor, second: Tensor) -> bool:
    """Return True where float64 results differ by rounding only."""
    return torch.allclose(first.double(), second.double(), rtol=1e-9, atol=1e-9)


def one_replica(state: Mapping[str, Any], alone: Mapping[str, Any], index: int) -> StateDict:
    """Return the part of `state` that belongs to one replica, in the shapes of a lone learner's state."""
    part: StateDict = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            part[key] = one_replica(value, alone[key], index)
        elif isinstance(value, Tensor) and value.shape != alone[key].shape:
            own = alone[key].shape[0]  # more than one where a replica consists of several networks
            part[key] = value[index * own : (index + 1) * own]
        else:
            part[key] = value
    return part
