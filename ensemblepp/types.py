"""The nouns of the library: what an agent sees, decides and learns from, and the two protocols that meet in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

StateDict: TypeAlias = dict[str, Any]
"""Nested string-keyed dictionary of tensors and JSON values; what `checkpoint.save` writes."""


@dataclass(frozen=True)
class UnitSphere:
    """The compact action set {x : |x| = 1}, on which the maximiser of a linear function is known exactly."""

    feature_dim: int

    def argmax(self, parameter: Float[Tensor, "*batch feature_dim"]) -> Float[Tensor, "*batch feature_dim"]:
        """Return argmax over |x| = 1 of <x, parameter>, which is parameter / |parameter|."""
        return torch.nn.functional.normalize(parameter, dim=-1)


Contexts: TypeAlias = (
    Shaped[Tensor, "replicas batch arms feature_dim"] | Shaped[Tensor, "replicas batch feature_dim"] | UnitSphere
)
"""One feature vector per arm, or one context shared by all arms (per-arm posteriors), or a compact action set.

Any numeric dtype: an agent casts to its own."""


@dataclass(frozen=True)
class Decision:
    """What an agent chose; scores are the posterior sample it maximised (None on a compact action set)."""

    arm: Int[Tensor, "replicas batch"] | None
    features: Float[Tensor, "replicas batch feature_dim"]
    scores: Float[Tensor, "replicas batch arms"] | None = None


@dataclass(frozen=True)
class Feedback:
    """What an environment answers: the noisy reward, and the expected regret in reward units."""

    reward: Float[Tensor, "replicas batch"]
    regret: Float[Tensor, "replicas batch"]


@dataclass(frozen=True)
class DuelFeedback:
    """What a judge of two responses answers: 1 where the first is preferred, else 0; and the regret in logits."""

    label: Float[Tensor, " replicas"]
    regret: Float[Tensor, " replicas"]


@dataclass(frozen=True)
class Transition:
    """One datum per replica and batch slot.

    `perturbation` is the datum's random direction z (drawn by the agent when None); `observed` marks the slots
    whose reward arrived (all of them when None): an unobserved slot changes nothing.
    """

    features: Shaped[Tensor, "replicas batch feature_dim"]
    reward: Shaped[Tensor, "replicas batch"]
    arm: Int[Tensor, "replicas batch"] | None = None
    perturbation: Float[Tensor, "replicas batch index_dim"] | None = None
    observed: Bool[Tensor, "replicas batch"] | None = None


@dataclass(frozen=True)
class TestPoints:
    """Points to judge a posterior at: features, their arm (None unless per arm), true mean and one noisy reward."""

    __test__ = False  # not a test case, whatever pytest thinks of the name

    features: Float[Tensor, "replicas points feature_dim"]
    arm: Int[Tensor, "replicas points"] | None
    mean: Float[Tensor, "replicas points"]
    reward: Float[Tensor, "replicas points"]


@runtime_checkable
class Environment(Protocol):
    """A vectorised bandit problem: `num_replicas` independent copies in one set of tensors, one decision a step."""

    num_replicas: int
    feature_dim: int
    num_arms: int | None
    """None on a compact action set."""
    action_set: Literal["finite", "compact"]
    per_arm: bool
    """True when contexts have no arm axis, so that agents keep one posterior per arm (the disjoint encoding)."""

    feature_bounds: tuple[float, float]
    """Smallest and largest value that a feature can take."""

    def observe(self) -> tuple[Contexts, Bool[Tensor, "replicas batch arms"] | None]:
        """Return the current contexts and the mask of allowed arms (None: all of them). Repeatable until `step`."""
        ...

    def step(self, decision: Decision) -> Feedback:
        """Play one decision per replica and move to the next step."""
        ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class HasTestPoints(Protocol):
    """An environment that can draw test points, from a random stream of their own."""

    def draw_test_points(self, count: int) -> TestPoints: ...


@runtime_checkable
class Agent(Protocol):
    """`num_replicas` independent learners in one set of tensors."""

    num_replicas: int

    def check_environment(self, environment: Environment) -> None:
        """Raise ParameterError where the sizes do not fit; warn where the setting is known to fail."""
        ...

    def act(self, contexts: Contexts, mask: Bool[Tensor, "replicas batch arms"] | None = None) -> Decision:
        """Choose one action per replica and batch slot. Never changes the posterior."""
        ...

    def update(self, transition: Transition) -> dict[str, Tensor]:
        """Learn from the data and return metrics. Atomic: bad input raises before anything moves."""
        ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Stoppable(Protocol):
    """An agent whose replicas can stop learning: a stopped one keeps acting, uniformly, and the others go on."""

    stopped: Int[Tensor, " replicas"]
    """Data a replica had learned from when its learning became non-finite and was stopped; -1 while it runs."""


@runtime_checkable
class Predictive(Protocol):
    """An agent that predicts: joint samples of its posterior over the mean rewards of any points."""

    def posterior_samples(
        self,
        features: Float[Tensor, "replicas points feature_dim"],
        arm: Int[Tensor, "replicas points"] | None,
        num_samples: int,
        generator: torch.Generator,
    ) -> Float[Tensor, "replicas samples points"]:
        """Return mean rewards in reward units, each sample joint over all points, with every draw from `generator`."""
        ...
