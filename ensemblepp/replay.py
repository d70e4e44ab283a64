"""Ring buffer for R learners at once: every datum keeps its own perturbation, and whatever else never changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ensemblepp.errors import CheckpointError, ParameterError, check_all, check_int, check_real, check_shape
from ensemblepp.types import StateDict

_OWNER = "Replay"
_FIRST_ALLOCATION = 256

Columns = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Replay:
    """The last `capacity` data of every replica, as named columns.

    Storage doubles as data come in, so a short run never pays for the full capacity.

    Args:
        capacity: Data kept per replica; the oldest are overwritten.
        columns: Name to (shape of one value, dtype), for instance {"features": ((d,), torch.float32)}.
        num_replicas: R.
        device: Where the data live.

    Raises:
        ParameterError: A size below one or no column.
    """

    def __init__(
        self, capacity: int, columns: Columns, *, num_replicas: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        self.capacity = check_int("capacity", _OWNER, capacity)
        self.num_replicas = check_int("num_replicas", _OWNER, num_replicas)
        if not columns:
            raise ParameterError("columns", _OWNER, "name at least one column", dict(columns))
        self._specs = dict(columns)
        self._device = torch.device(device)
        self.num_added = 0
        self._allocate(min(self.capacity, _FIRST_ALLOCATION))

    def _allocate(self, slots: int) -> None:
        old = getattr(self, "_columns", None)
        self._columns = {
            name: torch.zeros((self.num_replicas, slots, *shape), dtype=dtype, device=self._device)
            for name, (shape, dtype) in self._specs.items()
        }
        self._slots = slots
        self._offset = torch.arange(self.num_replicas, device=self._device).unsqueeze(-1) * slots
        if old is not None:
            for name, column in old.items():
                self._columns[name][:, : column.shape[1]] = column

    @property
    def size(self) -> int:
        """Number of data stored per replica."""
        return min(self.num_added, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(column.nbytes for column in self._columns.values())

    def estimate_bytes(self) -> int:
        """Return the bytes that a full buffer takes."""
        per_datum = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._specs.values())
        return self.num_replicas * self.capacity * per_datum

    def add(self, **columns: Tensor) -> None:
        """Store copies of data, each column (replicas, batch, *shape), the oldest giving way; no gradient is kept.

        Raises:
            ParameterError: A column is missing, unknown, misshapen or of a dtype that its own would cut (floats where
                integers are kept); nothing has moved.
        """
        count = self._check_columns(columns)
        skipped = max(0, count - self.capacity)
        self._grow(min(self.num_added + count, self.capacity))
        start = (self.num_added + skipped) % self.capacity
        first = min(count - skipped, self.capacity - start)
        for name, values in columns.items():
            column, kept = self._columns[name], values.detach()[:, skipped:]
            column[:, start : start + first] = kept[:, :first]
            if first < kept.shape[1]:
                column[:, : kept.shape[1] - first] = kept[:, first:]
        self.num_added += count

    def _check_columns(self, columns: Mapping[str, Tensor]) -> int:
        """Return the number of data per replica once every column fits."""
        if columns.keys() != self._specs.keys():
            raise ParameterError("columns", _OWNER, f"be {', '.join(self._specs)}", ", ".join(columns) or "none")
        batch: int | None = None
        for name, (shape, dtype) in self._specs.items():
            values = check_shape(name, _OWNER, columns[name], "replicas batch ...", (self.num_replicas, batch, *shape))
            if not torch.can_cast(values.dtype, dtype):
                raise ParameterError(name, _OWNER, f"have a dtype that casts to {dtype}", values.dtype)
            batch = values.shape[1]
        return batch or 0

    def _grow(self, needed: int) -> None:
        slots = self._slots
        while slots < needed:
            slots = min(2 * slots, self.capacity)
        if slots > self._slots:
            self._allocate(slots)

    def draw_slots(
        self, batch_size: int, *, generator: torch.Generator, recent: int | None = None, incoming: int = 0
    ) -> Int[Tensor, "replicas batch"]:
        """Draw slots uniformly with replacement, among the `recent` newest data if given.

        `incoming` counts data that are about to be added, so that a minibatch can be drawn before they are.

        Raises:
            ParameterError: Nothing is stored, or a number below one.
        """
        check_int("batch_size", _OWNER, batch_size)
        added = self.num_added + check_int("incoming", _OWNER, incoming, minimum=0)
        size = min(added, self.capacity)
        if not size:
            raise ParameterError("batch_size", _OWNER, "be drawn from a buffer that holds data", "an empty buffer")
        among = size if recent is None else min(size, check_int("recent", _OWNER, recent))
        shape = (self.num_replicas, batch_size)
        slots = torch.randint(among, shape, generator=generator, device=self._device)
        return slots if recent is None else (added - 1 - slots) % self.capacity

    def gather(self, slots: Int[Tensor, "replicas batch"]) -> dict[str, Tensor]:
        """Return the data in `slots`, each column (replicas, batch, *shape).

        Raises:
            ParameterError: Slots of another shape or where nothing is stored.
        """
        check_shape("slots", _OWNER, slots, "replicas batch", (self.num_replicas, None))
        check_all("slots", _OWNER, f"be in [0, {self.size})", (slots >= 0) & (slots < self.size), slots)
        return self._take(slots)

    def _take(self, slots: Tensor) -> dict[str, Tensor]:
        flat = (slots + self._offset).flatten()
        return {
            name: column.flatten(0, 1).index_select(0, flat).view(*slots.shape, *column.shape[2:])
            for name, column in self._columns.items()
        }

    def sample(self, batch_size: int, *, generator: torch.Generator, recent: int | None = None) -> dict[str, Tensor]:
        """Return a minibatch drawn uniformly with replacement; see `draw_slots` and `gather`."""
        return self._take(self.draw_slots(batch_size, generator=generator, recent=recent))

    def stored(self) -> dict[str, Tensor]:
        """Return views of all stored data in slot order, each (replicas, size, *shape)."""
        return {name: column[:, : self.size] for name, column in self._columns.items()}

    def ordered(self) -> dict[str, Tensor]:
        """Return all stored data from the oldest to the newest."""
        shift = 0 if self.num_added <= self.capacity else self.num_added % self.capacity
        return {name: column.roll(-shift, dims=1) for name, column in self.stored().items()}

    def scale(self, column: str, factor: float) -> None:
        """Multiply a floating-point column of everything stored by `factor`: weights that forget.

        Raises:
            ParameterError: No such column, one of integers, or a factor that is not finite.
        """
        if column not in self._columns:
            raise ParameterError("column", _OWNER, f"be one of {', '.join(self._columns)}", repr(column))
        if not self._specs[column][1].is_floating_point:
            raise ParameterError("column", _OWNER, "hold floating-point numbers", repr(column))
        self._columns[column] *= check_real("factor", _OWNER, factor)

    def state_dict(self) -> StateDict:
        """Return what is stored; unused slots are left out."""
        columns = {name: values.clone() for name, values in self.stored().items()}
        return {"capacity": self.capacity, "num_added": self.num_added, "columns": columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the saved data.

        Raises:
            CheckpointError: The saved buffer has other columns or sizes; nothing has moved.
        """
        saved, num_added = state.get("columns", {}), state.get("num_added")
        if isinstance(num_added, bool) or not isinstance(num_added, int) or num_added < 0:
            raise CheckpointError(f"num_added of the saved Replay is {num_added!r}, not a count")
        if saved.keys() != self._specs.keys():
            raise CheckpointError(f"columns of the saved Replay are {list(saved)}, not {list(self._specs)}")
        size = min(num_added, self.capacity)
        for name, (shape, dtype) in self._specs.items():
            wanted, got = (self.num_replicas, size, *shape), tuple(saved[name].shape)
            if got != wanted:
                raise CheckpointError(f"column {name} of the saved Replay is {got}, not {wanted}")
            if not torch.can_cast(saved[name].dtype, dtype):
                raise CheckpointError(f"column {name} of the saved Replay is {saved[name].dtype}, not {dtype}")
        if (capacity := state.get("capacity", self.capacity)) != self.capacity:
            raise CheckpointError(f"capacity of the saved Replay is {capacity}, not {self.capacity}")
        self._grow(size)
        self.num_added = num_added
        for name, column in self._columns.items():
            column[:, :size] = saved[name].detach()
