"""What every bandit environment checks and restores alike."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ensemblepp.errors import CheckpointError, ParameterError, check_all, check_int, check_shape
from ensemblepp.seeding import Streams
from ensemblepp.types import Decision

NUMPY_DTYPES: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}


def check_setup(
    owner: str, num_replicas: int, seed: int, device: torch.device | str, dtype: torch.dtype
) -> torch.device:
    """Check the arguments that all environments share and return the device.

    Raises:
        ParameterError: `num_replicas` < 1, `seed` < 0, a dtype other than float32 and float64, or a device name that
            torch does not know.
    """
    check_int("num_replicas", owner, num_replicas)
    check_int("seed", owner, seed, minimum=0)
    if dtype not in NUMPY_DTYPES:
        raise ParameterError("dtype", owner, "be torch.float32 or torch.float64", repr(dtype))
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ParameterError("device", owner, "name a torch device", repr(device)) from error


def check_arm(owner: str, decision: Decision, num_replicas: int, num_arms: int) -> Int[Tensor, "replicas batch"]:
    """Return the arms of `decision` as int64 (replicas, 1), each in [0, num_arms).

    Raises:
        ParameterError: no arm, a wrong shape, a dtype that is not an integer, or an arm out of range.
    """
    arm = decision.arm
    if arm is None:
        raise ParameterError("arm", owner, "be an int tensor (replicas, batch)", "None")
    check_shape("arm", owner, arm, "replicas, batch", (num_replicas, 1))
    if arm.dtype == torch.bool or arm.is_floating_point() or arm.is_complex():
        raise ParameterError("arm", owner, "be an int tensor (replicas, batch)", f"dtype {arm.dtype}")
    check_all("arm", owner, f"be in [0, {num_arms})", (arm >= 0) & (arm < num_arms), arm)
    return arm.long()


def add_noise(mean: Float[Tensor, "*batch"], noise_scale: float, generator: torch.Generator) -> Float[Tensor, "*batch"]:
    """Return rewards mean + N(0, noise_scale^2); without noise the mean itself, and nothing is drawn."""
    if noise_scale == 0:
        return mean
    return mean + noise_scale * torch.randn(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)


def check_state(owner: str, state: Mapping[str, Any], problem: Mapping[str, Any], streams: Streams) -> None:
    """Raise CheckpointError unless `state` was saved by an environment with the same `problem` and streams."""
    if state.get("problem") != dict(problem):
        raise CheckpointError(f"the state is not one of this {owner}: it holds {state.get('problem')}, not {problem}")
    missing = sorted(streams.state_dict().keys() - dict(state.get("streams", {})).keys())
    if missing:
        raise CheckpointError(f"the state of {owner} lacks the streams {', '.join(missing)}")


def import_data_library(module: str) -> Any:
    """Return a module of a library that the extra [data] brings.

    Raises:
        ImportError: It is missing; the extra is named.
    """
    try:
        return import_module(module)
    except ImportError as error:
        message = f"{module.partition('.')[0]} is missing; install it with: pip install 'ensemblepp[data]'"
        raise ImportError(message, name=error.name) from error
