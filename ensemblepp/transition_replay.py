"""The replay buffer of value learning: transitions in the order of time, joined into n-step returns when drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ensemblepp.errors import CheckpointError, ParameterError, check_int, check_real
from ensemblepp.replay import Columns, Replay
from ensemblepp.types import StateDict

_OWNER = "TransitionReplay"
_FLAGS: Columns = {
    "reward": ((), torch.float32),
    "terminated": ((), torch.bool),
    "ended": ((), torch.bool),
}


class TransitionReplay(Replay):
    """A `Replay` of one transition per replica and step, drawn as n-step transitions.

    A transition drawn at slot t joins m <= n successive ones of the same replica: it stops at the end of an episode and
    at the newest datum, so a window never crosses either, nor the write pointer of a full ring. It holds::

        reward   = sum_{k < m} discount^k r_{t+k}
        discount = discount^m, or 0 where the last of the m is terminated
        next_observation, and every other column of `last`, of the last of the m; all other columns of the first

    Replicas may hold different numbers of data: rows that are not valid are never stored.

    Args:
        capacity: Transitions kept per replica; the oldest are overwritten.
        columns: What a transition has besides "reward", "terminated" and "ended".
        last: Columns that belong to a transition's successor.
        n_step: n.
        discount: gamma.
        num_replicas: R.
        device: Where the data live.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    def __init__(
        self,
        capacity: int,
        columns: Columns,
        *,
        last: tuple[str, ...] = ("next_observation",),
        n_step: int = 1,
        discount: float = 0.99,
        num_replicas: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(capacity, dict(columns) | dict(_FLAGS), num_replicas=num_replicas, device=device)
        self.n_step = check_int("n_step", _OWNER, n_step)
        self.discount = check_real("discount", _OWNER, discount, at_least=0.0, at_most=1.0)
        if missing := set(last) - columns.keys():
            raise ParameterError("last", _OWNER, f"name columns among {', '.join(columns)}", sorted(missing))
        self._last = last
        self.counts = torch.zeros(num_replicas, dtype=torch.int64, device=self._device)
        """Transitions that each replica has stored so far, those overwritten since included."""
        self._powers = self.discount ** torch.arange(n_step + 1, device=self._device)
        self._ahead = torch.arange(n_step, device=self._device)

    def append(self, valid: Bool[Tensor, " replicas"], **columns: Tensor) -> None:
        """Store one transition per replica where `valid`, each column (replicas, *shape); the oldest gives way.

        Raises:
            ParameterError: A column is missing, unknown, misshapen or of a dtype that its own would cut; nothing has
                moved.
        """
        self._check_columns({name: values.unsqueeze(1) for name, values in columns.items()})
        self._grow(min(self.num_added + 1, self.capacity))
        place = self.counts % self.capacity + self._offset.squeeze(-1)
        # Asking costs less than keeping what is there, but an accelerator would have to be waited for.
        every = valid.device.type == "cpu" and bool(valid.all())
        for name, values in columns.items():
            column, rows = self._columns[name].flatten(0, 1), values.detach().to(self._specs[name][1])
            if not every:
                rows = torch.where(valid.view(-1, *[1] * (rows.ndim - 1)), rows, column[place])
            column.index_copy_(0, place, rows)
        self.counts += valid
        self.num_added += 1  # an upper bound of `counts` that is known without asking the device

    def draw(self, batch_size: int, *, generator: torch.Generator) -> dict[str, Tensor]:
        """Return a minibatch drawn uniformly with replacement; every replica must hold data."""
        check_int("batch_size", _OWNER, batch_size)
        if not self.num_added:
            raise ParameterError("batch_size", _OWNER, "be drawn from a buffer that holds data", "an empty buffer")
        shape = (self.num_replicas, batch_size)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=self._device)
        size = self.counts.clamp_max(self.capacity).unsqueeze(-1)
        age = (uniform * size).long().clamp_max(size - 1)
        return self.windows(self.counts.unsqueeze(-1) - size + age)

    def windows(self, first: Int[Tensor, "replicas batch"]) -> dict[str, Tensor]:
        """Return the n-step transitions that begin with datum number `first`, counted from the beginning of time.

        Columns as in `append`, each (replicas, batch, *shape), but "reward" and "discount" as in the class docstring
        and "terminated" of the last; "steps" is m.
        """
        if self.n_step == 1:
            batch = self._take(first % self.capacity)
            del batch["ended"]
            batch["discount"] = ~batch["terminated"] * self.discount
            batch["steps"] = torch.ones_like(first)
            return batch
        ahead = first.unsqueeze(-1) + self._ahead
        inside = ahead < self.counts.view(-1, 1, 1)
        slots = torch.where(inside, ahead, first.unsqueeze(-1)) % self.capacity
        reward, ended = self._read("reward", slots), self._read("ended", slots)
        # A step belongs to the window when it is stored and no earlier step of the window ended its episode.
        alive = inside & (ended.cumsum(-1) - ended.long() == 0)
        steps = alive.sum(-1)
        end = (first + steps - 1) % self.capacity
        names = [name for name in self._specs if name not in ("reward", "ended", "terminated", *self._last)]
        batch = {name: self._read(name, first % self.capacity) for name in names}
        batch |= {name: self._read(name, end) for name in ("terminated", *self._last)}
        batch["reward"] = self._sum_rewards(reward, alive)
        batch["discount"] = torch.where(batch["terminated"], 0.0, self._powers[steps])
        batch["steps"] = steps
        return batch

    def _sum_rewards(self, reward: Float[Tensor, "replicas batch n"], alive: Tensor) -> Float[Tensor, "replicas batch"]:
        return (torch.where(alive, reward, 0.0) * self._powers[:-1]).sum(-1)

    def _read(self, name: str, slots: Int[Tensor, "replicas *slots"]) -> Tensor:
        column = self._columns[name]
        flat = (slots + self._offset.view(-1, *[1] * (slots.ndim - 1))).flatten()
        return column.flatten(0, 1).index_select(0, flat).view(*slots.shape, *column.shape[2:])

    def state_dict(self) -> StateDict:
        """Return what is stored; unused slots are left out."""
        return super().state_dict() | {"counts": self.counts.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the saved data.

        Raises:
            CheckpointError: The saved buffer has other columns or sizes; nothing has moved.
        """
        counts = state.get("counts")
        if not isinstance(counts, Tensor) or counts.shape != self.counts.shape:
            raise CheckpointError(f"the saved {_OWNER} lacks the counts of {self.num_replicas} replicas")
        super().load_state_dict(state)
        self.counts.copy_(counts)
