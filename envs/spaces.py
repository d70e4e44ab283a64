"""Gymnasium spaces as tensors: what an observation becomes, and which action a number means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from ensemblepp.errors import ParameterError

_KEPT = {np.dtype(np.uint8): torch.uint8, np.dtype(np.bool_): torch.bool}


@dataclass(frozen=True)
class Observations:
    """How a batch of observations of one space is read.

    Attributes:
        shape: Of one observation; () where it is the number of a state.
        dtype: Of the tensors.
        num_states: Number of states of a `Discrete` space; None elsewhere.
        read: From a batch as gymnasium hands it over to an array (batch, *shape) of its own.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_states: int | None
    read: Callable[[Any], NDArray[Any]]

    def tensor(self, batch: Any) -> torch.Tensor:
        """Return a batch as a new tensor that no environment writes to."""
        return torch.from_numpy(self.read(batch)).to(self.dtype)


def read_observations(space: spaces.Space[Any]) -> Observations:
    """Return how observations of a space are read.

    - `Discrete`: the number of the state, counted from the space's start.
    - `Box`: its array; bytes and booleans stay what they are, all else becomes float32.
    - `MultiBinary`, `MultiDiscrete`, `Dict` and `Tuple`: one float32 vector, leaf after leaf (a `Dict` in the order of
      its sorted keys); `Discrete` and `MultiDiscrete` leaves become one-hot.

    Raises:
        ParameterError: Another space, by name.
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return Observations((), torch.int64, int(space.n), lambda batch: np.array(batch, dtype=np.int64) - start)
    if isinstance(space, spaces.Box):
        dtype = space.dtype if space.dtype in _KEPT else np.dtype(np.float32)
        shape = tuple(space.shape)
        kept = _KEPT.get(np.dtype(space.dtype), torch.float32)
        return Observations(shape, kept, None, lambda batch: np.array(batch, dtype=dtype))
    width = _width(space)

    def read(batch: Any) -> NDArray[Any]:
        return np.concatenate(_flatten(space, batch), axis=1).astype(np.float32)

    return Observations((width,), torch.float32, None, read)


def _width(space: spaces.Space[Any]) -> int:
    """Return the length of a flattened observation."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return sum(_width(part) for part in _parts(space))
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return int(np.prod(space.shape))
    rule = "be Box, Discrete, MultiBinary, MultiDiscrete, or a Dict or Tuple of them"
    raise ParameterError("observation_space", "a gymnasium adapter", rule, space)


def _parts(space: spaces.Dict | spaces.Tuple[Any]) -> list[spaces.Space[Any]]:
    return list(space.spaces.values()) if isinstance(space, spaces.Dict) else list(space.spaces)


def _flatten(space: spaces.Space[Any], batch: Any) -> list[NDArray[Any]]:
    """Return the leaves of a batch, each (batch, width)."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, part in space.spaces.items() for leaf in _flatten(part, batch[key])]
    if isinstance(space, spaces.Tuple):
        return [leaf for part, values in zip(space.spaces, batch, strict=True) for leaf in _flatten(part, values)]
    values = np.asarray(batch)
    if isinstance(space, spaces.Discrete):
        return [_one_hot(values - int(space.start), int(space.n))]
    if isinstance(space, spaces.MultiDiscrete):
        counted = (values - space.start).reshape(len(values), -1)
        return [_one_hot(column, int(n)) for column, n in zip(counted.T, space.nvec.ravel(), strict=True)]
    return [values.reshape(len(values), -1)]


def _one_hot(numbers: NDArray[Any], count: int) -> NDArray[np.float32]:
    hot: NDArray[np.float32] = np.eye(count, dtype=np.float32)[numbers.astype(np.int64)]
    return hot


def stack(space: spaces.Space[Any], observations: list[Any]) -> Any:
    """Return single observations as one batch, in the form in which vector environments hand it over."""
    if isinstance(space, spaces.Dict):
        return {key: stack(part, [each[key] for each in observations]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(stack(part, [each[i] for each in observations]) for i, part in enumerate(space.spaces))
    return np.stack([np.asarray(each) for each in observations])


def check_actions(space: spaces.Space[Any]) -> tuple[int, int]:
    """Return the number of actions of a `Discrete` space and its first one.

    Raises:
        ParameterError: Another space, by name.
    """
    if not isinstance(space, spaces.Discrete):
        raise ParameterError("action_space", "a gymnasium adapter", "be Discrete", space)
    return int(space.n), int(space.start)
