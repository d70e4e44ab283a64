"""What every bandit agent does alike: check what comes in, draw an index, score the arms, break ties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ensemblepp.acquisition import choose
from ensemblepp.errors import ParameterError, check_all, check_int, check_shape
from ensemblepp.indices import IndexDistribution
from ensemblepp.seeding import Streams
from ensemblepp.types import Contexts, Decision, Environment, StateDict, Transition, UnitSphere

ACQUISITIONS = ("thompson", "ucb", "greedy")
"""Rules to act by where an agent offers the choice."""


class BanditAgent:
    """Acts greedily on scores; subclasses say which scores, and how they learn.

    Args:
        feature_dim: d, number of features of an arm or context.
        index: Law of the index; None for agents that draw none.
        perturbation: Law of the data's perturbations; None for agents without an ensemble.
        num_arms: K for one output per arm on a shared context; None for arms described by features.
        num_replicas: R, independent learners batched in one set of tensors.
        seed: Root of the agent's random streams.
        streams: Names of the streams that the subclass needs beside "init", "act" and "perturb".
        dtype: Contexts and rewards of any dtype are cast to it.
        device: Where everything lives.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    def __init__(
        self,
        feature_dim: int,
        index: IndexDistribution | None = None,
        perturbation: IndexDistribution | None = None,
        *,
        num_arms: int | None = None,
        num_replicas: int = 1,
        seed: int = 0,
        streams: tuple[str, ...] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._owner = type(self).__name__
        self.feature_dim = check_int("feature_dim", self._owner, feature_dim)
        self.num_arms = None if num_arms is None else check_int("num_arms", self._owner, num_arms)
        self.num_replicas = check_int("num_replicas", self._owner, num_replicas)
        if dtype not in (torch.float32, torch.float64):
            raise ParameterError("dtype", self._owner, "be torch.float32 or torch.float64", dtype)
        self.streams = Streams(seed, "init", "act", "perturb", *streams, device=device)
        self.dtype = dtype
        self._index, self._perturbation = index, perturbation

    @property
    def index_dim(self) -> int:
        """M, number of ensemble members; 0 for agents without an ensemble."""
        return 0 if self._perturbation is None else self._perturbation.index_dim

    @property
    def device(self) -> torch.device:
        """Where the agent lives."""
        return self.streams["act"].device

    def draw_index(self, batch: int) -> Tensor | None:
        """Draw what one decision is random in, for `batch` decisions of every replica; None if nothing."""
        if self._index is None:
            return None
        return self._index.reference(self.num_replicas, batch, generator=self.streams["act"], dtype=self.dtype)

    def draw_perturbation(self, batch: int) -> Float[Tensor, "replicas batch index_dim"] | None:
        """Draw the perturbations of `batch` data of every replica; None without an ensemble."""
        if self._perturbation is None:
            return None
        return self._perturbation.perturbation(
            self.num_replicas, batch, generator=self.streams["perturb"], dtype=self.dtype
        )

    def _draw_directions(self, feature_dim: int, *arms: int) -> Tensor | None:
        """Draw prior directions B for `feature_dim` features (of `arms` blocks); None without an ensemble."""
        if self._perturbation is None:
            return None
        size = (self.num_replicas, *arms, feature_dim)
        return self._perturbation.perturbation(*size, generator=self.streams["init"], dtype=self.dtype)

    def scores(self, contexts: Tensor, index: Tensor | None) -> Float[Tensor, "replicas batch arms"]:
        """Return the scores to maximise."""
        raise NotImplementedError

    def act(
        self,
        contexts: Contexts,
        mask: Bool[Tensor, "replicas batch arms"] | None = None,
        *,
        index: Tensor | None = None,
    ) -> Decision:
        """Choose one action per replica and batch slot.

        Args:
            contexts: Arm features (replicas, batch, arms, feature_dim); with one output per arm one context
                (replicas, batch, feature_dim); or a compact action set.
            mask: True where an arm may be chosen. Features of other arms may be anything, NaN included.
            index: What `draw_index` returns, to repeat a decision exactly; drawn from the stream "act" when None.

        Raises:
            ParameterError: Shapes that do not fit, a non-finite context, a row without an allowed arm. Posterior and
                random streams are as before the call.
        """
        with self.streams.rollback():
            if isinstance(contexts, UnitSphere):
                return self._act_compact(contexts, mask, index)
            contexts = self._check_contexts(contexts)
            index = self.draw_index(contexts.shape[1]) if index is None else index
            scores = self.scores(contexts, index)
            usable = torch.isfinite(scores)
            if mask is not None:
                check_shape("mask", self._owner, mask, "replicas batch arms", scores.shape)
                usable |= ~mask
            # A non-finite context makes its score non-finite; the scores are feature_dim times cheaper to check.
            check_all("contexts", self._owner, "be finite and give finite scores", usable, scores)
            arm = self._choose(scores, mask)
        if self.num_arms is None:
            contexts = torch.take_along_dim(contexts, arm[..., None, None], dim=2).squeeze(2)
        return Decision(arm, contexts, scores)

    def _act_compact(self, contexts: UnitSphere, mask: Tensor | None, index: Tensor | None) -> Decision:
        raise ParameterError("contexts", self._owner, "be features of a finite set of arms", contexts)

    def _choose(self, scores: Tensor, mask: Tensor | None) -> Int[Tensor, "replicas batch"]:
        return choose(scores, mask, generator=self.streams["act"], owner=self._owner)

    def _check_contexts(self, contexts: Tensor) -> Tensor:
        axes, sizes = "replicas batch arms feature_dim", [self.num_replicas, None, None, self.feature_dim]
        if self.num_arms is not None:
            axes, sizes = "replicas batch feature_dim", [self.num_replicas, None, self.feature_dim]
        return check_shape("contexts", self._owner, contexts, axes, sizes).to(self.dtype)

    def update(self, transition: Transition) -> dict[str, Tensor]:
        """Learn from the data and return metrics."""
        raise NotImplementedError

    def check_environment(self, environment: Environment) -> None:
        """Raise unless the environment's sizes are the agent's.

        Raises:
            ParameterError: feature_dim, num_replicas or num_arms differ.
        """
        wanted = {
            "feature_dim": environment.feature_dim,
            "num_replicas": environment.num_replicas,
            "num_arms": environment.num_arms if environment.per_arm else None,
        }
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise ParameterError(name, self._owner, f"equal the environment's {value}", getattr(self, name))

    def state_dict(self) -> StateDict:
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError
