"""The nouns of value learning: what an environment answers, what an agent stores, and the protocols that meet in a run.

Replicas are independent learners, each with its own copy of the environment; every tensor leads with that axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from ensemblepp.types import StateDict


@dataclass(frozen=True)
class ValueStep:
    """What an environment answers to one action per replica. Every tensor is new: the environment never writes to it.

    Attributes:
        observation: (replicas, *obs). What to act on next: where an episode ended and the environment resets by itself
            in the same step, the first observation of the new one.
        next_observation: (replicas, *obs). The true successor of the state that was acted in; at an episode's end its
            last observation, never the first one of the next.
        reward: (replicas,), in reward units.
        terminated: (replicas,). The episode is over and the successor is worth nothing: no bootstrap.
        truncated: (replicas,). The episode was cut short: it is over, and the successor is worth what it is worth.
            Together with `terminated`, terminal.
        valid: (replicas,). False where this step only reset the environment (autoreset in the step after the end): the
            action was ignored, and neither an agent nor a log may take the row for a transition.
    """

    observation: Shaped[Tensor, "replicas *obs"]
    next_observation: Shaped[Tensor, "replicas *obs"]
    reward: Shaped[Tensor, " replicas"]
    terminated: Bool[Tensor, " replicas"]
    truncated: Bool[Tensor, " replicas"]
    valid: Bool[Tensor, " replicas"]


@dataclass(frozen=True)
class ValueTransition:
    """One transition per replica, as an agent stores it; attributes as in `ValueStep`, and what was acted on.

    `observation` is what the agent saw before the action; rows that are not `valid` change nothing. Of one replica,
    transitions come in the order of time: an agent may join successive ones (n-step returns) until an end or a row that
    is not valid.
    """

    observation: Shaped[Tensor, "replicas *obs"]
    action: Int[Tensor, " replicas"]
    reward: Shaped[Tensor, " replicas"]
    next_observation: Shaped[Tensor, "replicas *obs"]
    terminated: Bool[Tensor, " replicas"]
    truncated: Bool[Tensor, " replicas"]
    valid: Bool[Tensor, " replicas"]


@runtime_checkable
class ValueEnvironment(Protocol):
    """`num_replicas` independent copies of one problem with a finite number of actions; they reset by themselves."""

    num_replicas: int
    num_actions: int
    """Actions are 0 .. num_actions - 1; an adapter adds the offset of a gymnasium space that starts elsewhere."""
    observation_shape: tuple[int, ...]
    """Shape of one observation; () where observations are numbers of states."""
    observation_dtype: torch.dtype
    num_states: int | None
    """Where observations are numbers of states, (replicas,) int64 in [0, num_states): how many there are; else None."""
    can_restore: bool
    """False where the environment cannot continue from a saved state (a simulator without one): a resumed run then
    begins a new episode, says so, and differs from an uninterrupted one."""

    def reset(self, seed: int | None = None) -> Shaped[Tensor, "replicas *obs"]:
        """Begin a new episode in every replica and return the observations to act on.

        With a seed all that is random from here on follows from it; what belongs to the problem rather than to its
        episodes (an action map) stays.
        """
        ...

    def step(self, action: Int[Tensor, " replicas"]) -> ValueStep:
        """Play one action per replica.

        Raises:
            ParameterError: Actions of another shape or outside 0 .. num_actions - 1; nothing has moved.
        """
        ...

    def make_evaluation(self, copies: int) -> ValueEnvironment:
        """Return replicas * `copies` environments, `copies` of each replica's own problem side by side.

        They share no state with this one, so that evaluating never changes a run. The caller resets them with a seed.
        """
        ...

    def state_dict(self) -> StateDict:
        """Return all that the following steps depend on, random streams among it ({} where `can_restore` is False)."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class ValueAgent(Protocol):
    """`num_replicas` independent learners of action values in one set of tensors."""

    num_replicas: int

    def check_environment(self, environment: ValueEnvironment) -> None:
        """Raise ParameterError where the sizes do not fit."""
        ...

    def act(self, observation: Shaped[Tensor, "replicas *obs"]) -> Int[Tensor, " replicas"]:
        """Choose one exploring action per replica. Never learns; an index kept for an episode is drawn here."""
        ...

    def draw_evaluation_index(self, episodes: int) -> Tensor | None:
        """Draw fresh indices for `episodes` evaluation episodes of each replica, (replicas, episodes, index_dim).

        Drawn from a random stream of their own, so that evaluating never changes a run; None for agents without one.
        """
        ...

    def act_evaluation(
        self, observation: Shaped[Tensor, "replicas episodes *obs"], index: Tensor | None
    ) -> Int[Tensor, "replicas episodes"]:
        """Choose without exploring: greedily for each episode's index. Changes nothing."""
        ...

    def observe(self, transition: ValueTransition) -> dict[str, Tensor]:
        """Store one transition per replica, train as often as the agent's own schedule says, and return metrics.

        Metrics are named as TensorBoard tags ("train/loss"), one number per replica, (replicas,). Atomic: bad input
        raises before anything moves.

        Raises:
            ParameterError: Shapes that do not fit or a non-finite value; nothing has moved.
            DivergenceError: A training loss became non-finite; the message names the step.
        """
        ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
