"""Vowpal Wabbit as an agent of this library, so that it meets the very same rows in the same order."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from ensemblepp.types import Decision, Environment, StateDict, Transition


class VowpalWabbit:
    """Contextual bandit with one workspace per replica; quadratic features.

    Args:
        num_arms: K actions on a shared context.
        num_replicas: Workspaces.
        exploration: Command-line options, such as "--bag 5" or "--epsilon 0.02".
        seed: Of its own draws, and of the draw of an action from the distribution it returns.

    Raises:
        ImportError: vowpalwabbit is not installed.
    """

    def __init__(self, num_arms: int, *, num_replicas: int, exploration: str, seed: int) -> None:
        library: Any = importlib.import_module("vowpalwabbit")
        self.num_replicas = num_replicas
        self._learners = [
            library.Workspace(
                f"--cb_explore {num_arms} {exploration} --quadratic xx --random_seed {seed + replica} --quiet"
            )
            for replica in range(num_replicas)
        ]
        self._generator = torch.Generator().manual_seed(seed)
        self._last: list[tuple[str, int, float]] = []

    def check_environment(self, environment: Environment) -> None:
        """Accept any environment with a shared context; sizes were given at construction."""
        if not environment.per_arm:
            raise ValueError("Vowpal Wabbit is adapted to one context shared by all arms")

    def act(self, contexts: Tensor, mask: Tensor | None = None) -> Decision:
        """Draw one action per replica from the distribution that Vowpal Wabbit predicts."""
        # Names start with a letter: Vowpal Wabbit uses a number as its own hash, and those of small numbers collide.
        lines = [
            "|x " + " ".join(f"f{place}:{value:.6g}" for place, value in enumerate(row) if value)
            for row in contexts[:, 0].tolist()
        ]
        every = [learner.predict(line) for learner, line in zip(self._learners, lines, strict=True)]
        probability = torch.tensor(every, dtype=torch.float64)
        arm = torch.multinomial(probability, 1, generator=self._generator)
        chosen = probability.gather(1, arm).squeeze(1) / probability.sum(1)
        self._last = list(zip(lines, arm.squeeze(1).tolist(), chosen.tolist(), strict=True))
        return Decision(arm, contexts)

    def update(self, transition: Transition) -> dict[str, Tensor]:
        """Tell each workspace the cost of its action: minus the reward."""
        costs = (-transition.reward.squeeze(1)).tolist()
        for learner, (line, arm, probability), cost in zip(self._learners, self._last, costs, strict=True):
            learner.learn(f"{arm + 1}:{cost}:{probability:.6g} {line}")
        return {}

    def state_dict(self) -> StateDict:
        """A workspace lives in its library, so that a run cannot be resumed: an error, not a half state."""
        raise NotImplementedError("Vowpal Wabbit runs from its first decision to its last; it cannot be saved")

    def load_state_dict(self, state: Mapping[str, Any]) -> NoReturn:
        raise NotImplementedError("Vowpal Wabbit runs from its first decision to its last; it cannot be loaded")
