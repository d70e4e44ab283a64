"""Find code that waits for an accelerator, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_FACTORIES = {
    getattr(torch, name)
    for name in (
        *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand"),
        *("randint", "randn", "randperm", "scalar_tensor", "tril_indices", "triu_indices", "zeros"),
    )
}
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
_READ_BACK = {"tolist", "cpu", "__array__"}
_SYNCING = {
    "_local_scalar_dense": "reading one value (item, bool, int, float, an if on a tensor)",
    "nonzero": "nonzero, or where with one argument",
    "masked_select": "masked_select",
    "equal": "torch.equal",
    "allclose": "torch.allclose",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique_consecutive",
    "bincount": "bincount",
    "repeat_interleave": "repeat_interleave with a tensor of counts",
    "_linalg_check_errors": "a linear solver that checks for failure (use its _ex variant)",
}


class _FunctionGuard(TorchFunctionMode):
    """Sees what Python code asks of torch: factories, constants and explicit reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func in _FACTORIES and kwargs.get("device") is None and not any(isinstance(a, Tensor) for a in args):
            raise AssertionError(f"torch.{name} without device= makes a tensor on the default device")
        if func in _FROM_HOST and not isinstance(kwargs.get("data", next(iter(args), None)), Tensor):
            raise AssertionError(f"torch.{name} copies a constant from the host; torch.full with device= does not")
        if name == "new_tensor":
            raise AssertionError("Tensor.new_tensor copies a constant from the host; Tensor.new_full does not")
        if name in _READ_BACK or (name == "numpy" and kwargs.get("force")):
            raise AssertionError(f"host sync: Tensor.{name} waits for the device")
        self.inside = True
        try:
            return func(*args, **kwargs)
        finally:
            self.inside = False


class _DispatchGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what torch executes, wherever the call came from."""

    def __init__(self, functions: _FunctionGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._functions = functions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _SYNCING:
            raise AssertionError(f"host sync: {_SYNCING[name]} waits for the device")
        if name in {"index", "index_put", "index_put_", "_unsafe_index"}:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise AssertionError("host sync: indexing with a boolean mask waits for the device; use torch.where")
        if name in {"lift_fresh", "empty"} and not self._functions.inside:
            raise AssertionError("a tensor made from host memory (from_numpy, torch.Tensor) is on the default device")
        result = func(*args, **(kwargs or {}))
        if name in {"_to_copy", "copy_"}:
            devices = {each.device.type for each in (*args, result) if isinstance(each, Tensor)}
            if len(devices) > 1:
                raise AssertionError(f"host sync: a copy between {' and '.join(sorted(devices))} waits for the device")
        return result


@contextmanager
def forbid_host_sync() -> Iterator[None]:
    """Fail on a host sync, or on a tensor made on the default device, inside the block.

    The operations are recognised by name, so the check finds on the CPU what would stall an accelerator: `item`,
    `cpu`, `tolist`, `bool(tensor)`, `nonzero`, indexing with a boolean mask, solvers that look for failure, factories
    without `device=` and constants copied from the host. Copies between devices are only seen where there are two.

    `Tensor.numpy()` without `force=True` is allowed: it works only on a tensor that is on the CPU already, where
    nothing waits. The library's own input checks use it there; on an accelerator they assert asynchronously.

    Raises:
        AssertionError: At the line that breaks the rule.
    """
    functions = _FunctionGuard()
    with functions, _DispatchGuard(functions):
        yield
