"""Errors that name parameter, owner, rule and value, and the checks every public entry makes once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor


class ParameterError(ValueError):
    """A value that a caller handed in breaks a rule; the object's state is as it was before the call."""

    def __init__(self, name: str, owner: str, rule: str, got: object, remedy: str = "") -> None:
        super().__init__(f"{name} of {owner} must {rule}; got {got}." + (f" {remedy}" if remedy else ""))


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or that belongs to something else."""


class DivergenceError(RuntimeError):
    """Learning became non-finite and was stopped."""


def check_int(name: str, owner: str, value: object, *, minimum: int = 1) -> int:
    """Return `value` as an int at least `minimum`; booleans are refused."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ParameterError(name, owner, f"be an int >= {minimum}", repr(value))
    return int(value)


def check_real(
    name: str,
    owner: str,
    value: object,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    at_most: float = math.inf,
) -> float:
    """Return `value` as a finite float inside the given bounds."""
    rule = "be a finite number"
    if above > -math.inf:
        rule += f" > {above:g}"
    if at_least > -math.inf:
        rule += f" >= {at_least:g}"
    if at_most < math.inf:
        rule += f" and <= {at_most:g}"
    valid = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or not (above < value and at_least <= value <= at_most):  # type: ignore[operator]
        raise ParameterError(name, owner, rule, repr(value))
    return float(value)  # type: ignore[arg-type]


def refuse_fixed(owner: str, options: Mapping[str, object], *names: str) -> None:
    """Refuse options that the owner sets itself."""
    for name in names:
        if name in options:
            raise ParameterError(name, owner, "be left out, as it is fixed here", repr(options[name]))


def check_choice(name: str, owner: str, value: object, choices: Collection[str]) -> str:
    """Return `value` if it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ParameterError(name, owner, f"be one of {', '.join(map(repr, sorted(choices)))}", repr(value))
    return value


def check_shape(name: str, owner: str, tensor: object, axes: str, shape: Sequence[int | None]) -> Tensor:
    """Return `tensor` if it has exactly `shape` (None: any size); `axes` names the axes in the message."""
    if not isinstance(tensor, Tensor):
        raise ParameterError(name, owner, f"be a tensor ({axes})", f"{type(tensor).__name__}")
    fits = tensor.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=False)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ParameterError(name, owner, f"have shape ({axes}) = ({wanted})", f"shape {tuple(tensor.shape)}")
    return tensor


def check_all(name: str, owner: str, rule: str, valid: Tensor, values: Tensor) -> None:
    """Raise unless every entry of `valid` is True, naming the first index that is not and its value.

    On the CPU the check is exact and recoverable. On an accelerator it runs asynchronously, so that hot code never
    waits for the device; a failure then stops the process at its next synchronisation.
    """
    if valid.device.type != "cpu":
        torch._assert_async(valid.all(), f"{name} of {owner} must {rule}")
        return
    flags = valid.numpy()
    if flags.all():
        return
    index = tuple(int(i) for i in np.argwhere(~flags)[0])
    value = values.numpy(force=True)[index]
    raise ParameterError(name, owner, rule, f"{value} at index {index}")


def check_finite(name: str, owner: str, tensor: Tensor) -> None:
    """Raise if `tensor` holds NaN or infinity (see `check_all`)."""
    check_all(name, owner, "be finite", torch.isfinite(tensor), tensor)
