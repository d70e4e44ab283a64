"""The checkers themselves: each broken promise is found, and what is allowed passes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ensemblepp.agents import LinearThompsonSampling
from ensemblepp.envs import LinearBandit
from ensemblepp.indices import IndexDistribution
from ensemblepp.testing import check_agent, check_environment, check_index_distribution, forbid_host_sync
from ensemblepp.types import Contexts, Decision, Feedback, StateDict, Transition

X = torch.arange(6.0).view(2, 3)
MASK = X > 2

STALLS: dict[str, Callable[[], object]] = {
    "item": lambda: X[0, 0].item(),
    "float": lambda: float(X[0, 0]),
    "int": lambda: int(X[0, 0]),
    "bool": lambda: bool(MASK.all()),
    "if": lambda: 1 if MASK.any() else 0,
    "index": lambda: [1, 2][MASK.sum().to(torch.int64) - 3],
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "array": lambda: np.asarray(X),
    "forced numpy": lambda: X.numpy(force=True),
    "format": lambda: f"{X[0, 0]:.2f}",
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(MASK),
    "mask read": lambda: X[MASK],
    "mask write": lambda: X.clone().__setitem__(MASK, 0.0),
    "masked_select": lambda: X.masked_select(MASK),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "unique": lambda: torch.unique_consecutive(X),
    "contains": lambda: 3.0 in X,
    "one_hot": lambda: torch.nn.functional.one_hot(X.long()),
    "cholesky": lambda: torch.linalg.cholesky(X.new_ones(1, 1)),
}
DEFAULTS: dict[str, Callable[[], object]] = {
    "zeros": lambda: torch.zeros(3),
    "full": lambda: torch.full((3,), 1.0),
    "arange": lambda: torch.arange(3),
    "eye": lambda: torch.eye(3, dtype=torch.float64),
    "no device": lambda: torch.ones(3, device=None),
    "rand": lambda: torch.rand(3, generator=torch.Generator()),
    "tensor": lambda: torch.tensor(1.0),
    "as_tensor": lambda: torch.as_tensor([1.0]),
    "new_tensor": lambda: X.new_tensor([1.0]),
    "from_numpy": lambda: torch.from_numpy(np.zeros(3)),
    "Tensor": lambda: torch.Tensor([1.0]),
    "FloatTensor": lambda: torch.FloatTensor([1.0]),
}
ALLOWED: dict[str, Callable[[], object]] = {
    "device given": lambda: torch.arange(3, device=X.device) + torch.zeros(3, device=X.device),
    "like": lambda: torch.zeros_like(X) + X.new_zeros(3) + X.new_full((), 2.0),
    "numbers": lambda: torch.where(MASK, X, 0.0) * 2 + 1,
    "index": lambda: X[:, torch.arange(2, device=X.device)],
    "slice write": lambda: X.clone().__setitem__(0, 0.0),
    "cast": lambda: X.to(torch.float64),
    "as_tensor of a tensor": lambda: torch.as_tensor(X),
    "numpy of a host tensor": lambda: X.numpy(),
    "cholesky_ex": lambda: torch.linalg.cholesky_ex(X.new_ones(1, 1)),
    "shape": lambda: X.shape[0] + X.ndim + len(X),
}


@pytest.mark.parametrize("case", STALLS)
def test_a_host_sync_is_found(case: str) -> None:
    with pytest.raises(AssertionError, match="waits for the device"), forbid_host_sync():
        STALLS[case]()
    STALLS[case]()  # and only inside the block


@pytest.mark.parametrize("case", DEFAULTS)
def test_a_default_device_tensor_is_found(case: str) -> None:
    with pytest.raises(AssertionError, match=r"default device|from the host"), forbid_host_sync():
        DEFAULTS[case]()
    DEFAULTS[case]()


@pytest.mark.parametrize("case", ALLOWED)
def test_what_does_not_wait_is_allowed(case: str) -> None:
    with forbid_host_sync():
        ALLOWED[case]()


class Agent(LinearThompsonSampling):
    """A sound agent for the broken ones to change one thing of."""


class SyncsInAct(Agent):
    def _choose(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        float(scores.max())
        return super()._choose(scores, mask)


class SyncsInUpdate(Agent):
    def update(self, transition: Transition) -> dict[str, Tensor]:
        transition.reward.sum().item()
        return super().update(transition)


class DefaultDeviceInAct(Agent):
    def scores(self, contexts: Tensor, index: Tensor | None) -> Tensor:
        return super().scores(contexts, index) + torch.zeros(1)


class LearnsInAct(Agent):
    def scores(self, contexts: Tensor, index: Tensor | None) -> Tensor:
        self.posterior.state *= 1.0001
        return super().scores(contexts, index)


class IgnoresMask(Agent):
    def _choose(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super()._choose(scores, None if mask is None else mask | (mask.any(-1, keepdim=True) & (scores > 1)))


class LastArmOfTies(Agent):
    def _choose(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super()._choose(scores + 1e-3 * torch.arange(scores.shape[-1], device=scores.device), mask)


class GlobalRandom(Agent):
    def _choose(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        torch.rand(1, device=scores.device)
        return super()._choose(scores, mask)


class UnseededTies(Agent):
    def _choose(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super()._choose(torch.rand(scores.shape, device=scores.device), mask)


class AcceptsNaN(Agent):
    def update(self, transition: Transition) -> dict[str, Tensor]:
        reward = torch.nan_to_num(transition.reward, posinf=0.0, neginf=0.0)
        return super().update(Transition(transition.features, reward, transition.arm, None, transition.observed))


class DrawsBeforeRefusing(Agent):
    def update(self, transition: Transition) -> dict[str, Tensor]:
        self.draw_index(1)
        return super().update(transition)


class ForgetsState(Agent):
    def state_dict(self) -> StateDict:
        return {"posterior": self.posterior.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.posterior.load_state_dict(state["posterior"])


class LiveState(Agent):
    def state_dict(self) -> StateDict:
        state = super().state_dict()
        return state | {"posterior": state["posterior"] | {"block": self.posterior.state}}


class MixesReplicas(Agent):
    def update(self, transition: Transition) -> dict[str, Tensor]:
        mixed = transition.reward + 1e-3 * transition.reward.double().mean(0)
        arm, z, observed = transition.arm, transition.perturbation, transition.observed
        return super().update(Transition(transition.features, mixed, arm, z, observed))


class OneSeed(Agent):
    def __init__(self, *args: Any, seed: int, **options: Any) -> None:
        super().__init__(*args, seed=0, **options)


class WrongFeatures(Agent):
    def act(self, contexts: Contexts, mask: Tensor | None = None, *, index: Tensor | None = None) -> Decision:
        decision = super().act(contexts, mask, index=index)
        return Decision(decision.arm, decision.features + 1, decision.scores)


BROKEN_AGENTS: dict[type[Agent], str] = {
    SyncsInAct: "host sync: reading one value",
    SyncsInUpdate: "host sync: reading one value",
    DefaultDeviceInAct: r"torch\.zeros without device= makes a tensor on the default device",
    LearnsInAct: "act must not change the posterior: posterior/block differs",
    IgnoresMask: r"arm \d must (be chosen when no other is allowed|never be chosen when masked)",
    LastArmOfTies: "ties must be broken uniformly|identical features must have identical scores",
    GlobalRandom: "the agent draws from a global random generator",
    UnseededTies: "two agents with one seed must act alike|must act as",
    AcceptsNaN: "nan in a reward must raise ParameterError",
    DrawsBeforeRefusing: "nan in a reward must leave everything as it was: streams/act differs",
    ForgetsState: "must act as no mask|must continue with the same actions|must act as their explicit cast",
    LiveState: "must leave everything as it was|snapshot|act as no mask|learn|cast",
    MixesReplicas: "replicas must be independent",
    OneSeed: "two agents with different seeds must act differently",
    WrongFeatures: r"Decision\.features must be those of the chosen arm",
}


@pytest.mark.parametrize("broken", BROKEN_AGENTS, ids=lambda broken: broken.__name__)
def test_a_broken_agent_is_found(broken: type[Agent]) -> None:
    with pytest.raises(AssertionError, match=BROKEN_AGENTS[broken]):
        check_agent(partial(broken, 3), partial(LinearBandit, 3, 4))


class SyncsInStep(LinearBandit):
    def step(self, decision: Decision) -> Feedback:
        feedback = super().step(decision)
        feedback.regret.max().item()
        return feedback


class MovesInObserve(LinearBandit):
    def observe(self) -> tuple[Contexts, None]:
        self._set_optimum()
        return super().observe()


class NegativeRegret(LinearBandit):
    def step(self, decision: Decision) -> Feedback:
        feedback = super().step(decision)
        return Feedback(feedback.reward, feedback.regret - 0.1)


class ForgetsNoise(LinearBandit):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        noise = self._streams["noise"].get_state()
        super().load_state_dict(state)
        self._streams["noise"].set_state(noise)


class ClampsArms(LinearBandit):
    def step(self, decision: Decision) -> Feedback:
        assert decision.arm is not None
        return super().step(Decision(decision.arm.clamp(0, (self.num_arms or 1) - 1), decision.features))


class WrongBounds(LinearBandit):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.feature_bounds = (0.0, 1.0)


class GlobalNoise(LinearBandit):
    def step(self, decision: Decision) -> Feedback:
        torch.rand(1, device=self.device)
        return super().step(decision)


BROKEN_ENVIRONMENTS: dict[type[LinearBandit], str] = {
    SyncsInStep: "host sync: reading one value",
    MovesInObserve: "observe must repeat itself until step",
    NegativeRegret: "regret must never be negative",
    ForgetsNoise: "must continue the same run",
    ClampsArms: "an illegal decision must raise ParameterError",
    WrongBounds: r"features must be finite and in \[0.0, 1.0\]",
    GlobalNoise: "the environment draws from a global random generator",
}


@pytest.mark.parametrize("broken", BROKEN_ENVIRONMENTS, ids=lambda broken: broken.__name__)
def test_a_broken_environment_is_found(broken: type[LinearBandit]) -> None:
    with pytest.raises(AssertionError, match=BROKEN_ENVIRONMENTS[broken]):
        check_environment(partial(broken, 3, 4))


class Shifted(IndexDistribution):
    def reference(self, *batch: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
        return super().reference(*batch, generator=generator, dtype=dtype) + 0.05


class TooWide(Shifted):
    def reference(self, *batch: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
        return IndexDistribution.reference(self, *batch, generator=generator, dtype=dtype) * 1.03


class UnitReference(Shifted):
    def perturbation(self, *batch: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
        return IndexDistribution.reference(self, *batch, generator=generator, dtype=dtype)

    reference = IndexDistribution.reference


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Shifted, "mean of the reference is .* standard errors off"),
        (TooWide, "second moment of the reference is .* standard errors off"),
        (UnitReference, r"must be the reference divided by sqrt\(index_dim\)"),
    ],
)
def test_a_broken_index_distribution_is_found(broken: type[IndexDistribution], message: str) -> None:
    for kind in ("gaussian", "cube"):
        with pytest.raises(AssertionError, match=message):
            check_index_distribution(broken(kind, 4))
