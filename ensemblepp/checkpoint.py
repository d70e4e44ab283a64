"""Checkpoints: one safetensors file whose header carries a JSON manifest; written atomically, never unpickled."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ensemblepp.errors import CheckpointError
from ensemblepp.files import write_atomic

FORMAT_VERSION = 1
_SEPARATOR = "/"


def save(path: str | Path, state: Mapping[str, Any], *, kind: str) -> None:
    """Write a state dictionary to `path`, replacing the old file only when the new one is safely on disk.

    Args:
        path: File to write; its folder is made if needed.
        state: Nested string-keyed dictionaries of tensors and JSON values.
        kind: What the state belongs to; `load` refuses another kind.

    Raises:
        TypeError: A value that is neither a tensor nor JSON.
    """
    tensors: dict[str, Tensor] = {}
    values = _split(state, "", tensors)
    manifest = json.dumps(
        {
            "format_version": FORMAT_VERSION,
            "kind": kind,
            "values": values,
            "checksum": _checksum(values, tensors),
        }
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, safetensors.torch.save(tensors, {"manifest": manifest}))


def load(path: str | Path, *, kind: str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the state dictionary that `save` wrote, with tensors on `device` (generator states stay on the CPU).

    Raises:
        FileNotFoundError: No such file.
        CheckpointError: The file is damaged, of another kind, or of an unknown format version.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            manifest = json.loads((file.metadata() or {})["manifest"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        version, found, values = manifest["format_version"], manifest["kind"], manifest["values"]
        intact = version != FORMAT_VERSION or manifest["checksum"] == _checksum(values, tensors)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable checkpoint ({error})") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format version {version}; this version reads {FORMAT_VERSION}")
    if not intact:
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
    if found != kind:
        raise CheckpointError(f"{path} holds a {found!r}, not a {kind!r}")
    state: dict[str, Any] = values
    for name, tensor in tensors.items():
        *parents, leaf = name.split(_SEPARATOR)
        node = state
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = tensor if tensor.dtype is torch.uint8 else tensor.to(device)
    return state


def _checksum(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    checksum = zlib.crc32(json.dumps(values).encode())
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        if tensor.numel():
            checksum = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, checksum)
    return checksum


def _split(state: Mapping[str, Any], prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Collect the tensors of `state` by path and return what is left."""
    values: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, str) or _SEPARATOR in key:
            raise TypeError(f"state keys must be strings without {_SEPARATOR!r}; got {key!r}")
        if isinstance(value, Tensor):
            tensors[prefix + key] = value.detach().cpu().contiguous().clone()
        elif isinstance(value, Mapping):
            values[key] = _split(value, prefix + key + _SEPARATOR, tensors)
        else:
            values[key] = value
    return values
