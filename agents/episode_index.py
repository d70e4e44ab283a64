"""The acting index of value learners: one per replica, kept for an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ensemblepp.indices import IndexDistribution
from ensemblepp.seeding import Streams
from ensemblepp.types import StateDict


class EpisodeIndex:
    """One index per replica (or `count` of them), drawn anew for every episode of that replica.

    Args:
        law: Law of the index.
        num_replicas: R.
        streams: The agent's random streams; acting draws from "act".
        factor: What every index is multiplied by.
        count: Indices that are kept together.
        resampling: Probability of a new draw at every step, besides those at episodes' beginnings.
        dtype: Of the indices.
        device: Where they live.
    """

    def __init__(
        self,
        law: IndexDistribution,
        num_replicas: int,
        streams: Streams,
        *,
        factor: float = 1.0,
        count: int = 1,
        resampling: float = 0.0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._law, self._streams, self._factor, self._resampling = law, streams, factor, resampling
        self._current = torch.zeros(num_replicas, count, law.index_dim, dtype=dtype, device=device)
        self._ended = torch.ones(num_replicas, dtype=torch.bool, device=device)

    def draw(self, *batch: int, stream: str) -> Float[Tensor, "*batch index_dim"]:
        """Draw indices of the same law and size from another stream."""
        return self._factor * self._law.reference(*batch, generator=self._streams[stream], dtype=self._current.dtype)

    def next(self) -> Float[Tensor, "replicas count index_dim"]:
        """Return the indices to act under now, fresh ones where an episode begins."""
        renew = self._ended
        if self._resampling:
            generator = self._streams["act"]
            renew = renew | (torch.rand(renew.shape, generator=generator, device=renew.device) < self._resampling)
        # Drawn at every step, so that the stream does not depend on when other replicas' episodes end.
        fresh = self.draw(*self._current.shape[:2], stream="act")
        self._current = torch.where(renew.view(-1, 1, 1), fresh, self._current)
        self._ended = torch.zeros_like(renew)
        return self._current

    def note_ends(self, ended: Bool[Tensor, " replicas"]) -> None:
        """Hear which replicas ended an episode."""
        self._ended = self._ended | ended

    def state_dict(self) -> StateDict:
        return {"current": self._current.clone(), "ended": self._ended.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._current, self._ended = state["current"].to(self._current), state["ended"].to(self._ended)
