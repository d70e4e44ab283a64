"""The frame of every neural agent: store, train between decisions, act on a model's scores."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ensemblepp.agents.closed_form_model import ClosedFormModel
from ensemblepp.agents.frame import ACQUISITIONS, BanditAgent
from ensemblepp.agents.sgd_model import Steps
from ensemblepp.calibration import Calibration
from ensemblepp.errors import ParameterError, check_all, check_choice, check_finite, check_int, check_real, check_shape
from ensemblepp.indices import IndexDistribution
from ensemblepp.networks import MLP
from ensemblepp.replay import Replay
from ensemblepp.types import StateDict, Transition


class ModelOptions(TypedDict, total=False):
    """Options of every agent of this family; see `NeuralAgent`."""

    num_arms: int | None
    num_replicas: int
    standardise: bool
    reward_scale: float | None
    noise_scale: float | None
    seed: int
    dtype: torch.dtype
    device: torch.device | str


class NeuralOptions(ModelOptions, total=False):
    """Options of every agent that trains a network; see `NeuralAgent`."""

    updates_per_step: int
    update_period: int
    batch_size: int
    min_data: int
    replay_capacity: int


class ScoringOptions(NeuralOptions, total=False):
    """`NeuralOptions`, and the rule to act by."""

    acquisition: str
    exploration_scale: float


@runtime_checkable
class Scorer(Protocol):
    """What an agent acts on; scores are in reward units, (replicas, batch, arms)."""

    def sample(self, contexts: Tensor, index: Tensor, scale: float) -> Tensor: ...

    def mean(self, contexts: Tensor) -> Tensor: ...

    def bound(self, contexts: Tensor, width: float) -> Tensor: ...

    def joint(self, x: Tensor, arm: Tensor | None, index: Tensor) -> Tensor: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Minibatch:
    """What one training update is random in: slots of the buffer, and whatever else the trainer draws for it."""

    slots: Int[Tensor, "replicas batch"]
    index: Float[Tensor, "replicas *draw"] | None


@runtime_checkable
class Trainer(Protocol):
    """What learns from minibatches of the replay buffer."""

    optimiser: Steps

    @property
    def columns(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]: ...

    def observe(self, x: Tensor, arm: Tensor | None, weight: Tensor) -> dict[str, Tensor]: ...

    def draw_index(self, batch_size: int) -> Tensor | None: ...

    def train(self, batch: Mapping[str, Tensor], index: Tensor | None, num_data: int) -> Tensor: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class NeuralAgent(BanditAgent):
    """An agent that stores what it sees, learns on minibatches between decisions, and acts on a model's scores.

    A subclass sets `scorer`, `trainer` and, for a closed-form head, `closed_form`.

    A replica whose training loss or parameters become non-finite or huge is stopped: `stopped` names the number of data
    at which that happened, and from then on it chooses uniformly. The others do not notice.

    Args:
        feature_dim: d, number of features of an arm or context.
        index: Law of the index; None for agents that draw none.
        perturbation: Law of the perturbations; None without an ensemble.
        acquisition: "thompson" acts on a posterior sample, "ucb" on mean + exploration_scale * sd, "greedy" on the
            mean.
        exploration_scale: 1 is Thompson sampling under the model; smaller values act closer to the mean.
        num_arms: K for one output per arm on a shared context; None for arms described by features.
        num_replicas: R, independent learners batched in one set of tensors.
        updates_per_step: Minibatch updates per call of `update`. Raising it learns more from the same data, at
            proportional cost.
        update_period: Calls of `update` between trainings.
        batch_size: Data per minibatch, drawn uniformly with replacement.
        min_data: Data to have before training starts.
        replay_capacity: Data kept; the oldest are overwritten.
        standardise: Learn rewards in units of their running mean and standard deviation.
        reward_scale: Standard deviation of the rewards where it is known; None measures it on the rewards so far. Those
            are the learner's own: they say nothing of rare, far larger rewards before the first, and their spread
            shrinks as decisions improve, and a prior in their unit with it. Tell it where you can.
        noise_scale: Standard deviation of the reward noise, in reward units; None estimates it.
        seed: Root of the agent's random streams "init", "act", "perturb" and "replay".
        dtype: float32 or float64.
        device: Where everything lives.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    replay: Replay
    scorer: Scorer
    trainer: Trainer | None = None
    closed_form: ClosedFormModel | None = None
    _labels = False

    def __init__(
        self,
        feature_dim: int,
        index: IndexDistribution | None = None,
        perturbation: IndexDistribution | None = None,
        *,
        acquisition: str = "thompson",
        exploration_scale: float = 1.0,
        num_arms: int | None = None,
        num_replicas: int = 1,
        updates_per_step: int = 4,
        update_period: int = 1,
        batch_size: int = 128,
        min_data: int = 4,
        replay_capacity: int = 10_000,
        standardise: bool = True,
        reward_scale: float | None = None,
        noise_scale: float | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            feature_dim,
            index,
            perturbation,
            num_arms=num_arms,
            num_replicas=num_replicas,
            seed=seed,
            streams=("replay",),
            dtype=dtype,
            device=device,
        )
        self.acquisition = check_choice("acquisition", self._owner, acquisition, ACQUISITIONS)
        self.exploration_scale = check_real("exploration_scale", self._owner, exploration_scale, at_least=0.0)
        self.updates_per_step = check_int("updates_per_step", self._owner, updates_per_step, minimum=0)
        self.update_period = check_int("update_period", self._owner, update_period)
        self.batch_size = check_int("batch_size", self._owner, batch_size)
        self.min_data = check_int("min_data", self._owner, min_data)
        self._capacity = check_int("replay_capacity", self._owner, replay_capacity)
        self.calibration = Calibration(
            num_replicas,
            standardise=standardise,
            reward_scale=reward_scale,
            noise_scale=noise_scale,
            dtype=dtype,
            device=device,
        )
        self.stopped = torch.full((num_replicas,), -1, device=device)
        self._num_updates = 0
        self._refitted_at = 0
        self._refit_until = sys.maxsize

    def _add_closed_form(
        self, torso: MLP, parts: Mapping[str, float], prior_scale: float, refit_period: int, *, learned: bool = True
    ) -> None:
        """Act on a closed-form head on `torso`'s features, which are `learned` or stay as they are."""
        self._refit_period = check_int("refit_period", self._owner, refit_period)
        self._torso = torso if learned else None
        copy = torso.clone() if learned else torso
        arms = () if self.num_arms is None else (self.num_arms,)
        directions = self._draw_directions(ClosedFormModel.feature_dim(copy, parts), *arms)
        self.scorer = self.closed_form = ClosedFormModel(
            copy,
            parts,
            directions,
            self.calibration,
            owner=self._owner,
            prior_scale=prior_scale,
            num_arms=self.num_arms,
            dtype=self.dtype,
            device=self.device,
        )

    def _build_replay(self) -> Replay:
        """Build the buffer once the trainer is known."""
        columns: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "features": ((self.feature_dim,), self.dtype),
            "reward": ((), self.dtype),
            "weight": ((), self.dtype),
            "perturbation": ((self.index_dim,), self.dtype),
            "arm": ((), torch.int64),
        }
        extra = {} if self.trainer is None else self.trainer.columns
        return Replay(self._capacity, columns | extra, num_replicas=self.num_replicas, device=self.device)

    def scores(self, contexts: Tensor, index: Tensor | None) -> Float[Tensor, "replicas batch arms"]:
        """Return the scores to maximise, in reward units; equal ones for a stopped replica."""
        if index is not None:
            scores = self.scorer.sample(contexts, index, self.exploration_scale)
        elif self.acquisition == "ucb":
            scores = self.scorer.bound(contexts, self.exploration_scale)
        else:
            scores = self.scorer.mean(contexts)
        return torch.where((self.stopped >= 0).view(-1, 1, 1), 0.0, scores)

    def draw_index(self, batch: int) -> Tensor | None:
        """Draw the index of `batch` decisions of every replica; None where the acquisition uses none."""
        return super().draw_index(batch) if self.acquisition == "thompson" else None

    def draw_minibatches(self, batch: int = 1) -> list[Minibatch]:
        """Draw what the next `update`, with `batch` data per replica, trains on; empty where it will not train."""
        size = min(self.replay.num_added + batch, self.replay.capacity)
        due = (self._num_updates + 1) % self.update_period == 0 and size >= self.min_data
        if self.trainer is None or not due:
            return []
        generator = self.streams["replay"]
        return [
            Minibatch(
                self.replay.draw_slots(self.batch_size, generator=generator, incoming=batch),
                self.trainer.draw_index(self.batch_size),
            )
            for _ in range(self.updates_per_step)
        ]

    def update(self, transition: Transition, *, minibatches: Sequence[Minibatch] | None = None) -> dict[str, Tensor]:
        """Store the data, move the closed-form posterior by them, and train.

        Args:
            transition: The data.
            minibatches: What `draw_minibatches` returns, to repeat an update exactly; drawn when None.

        Returns:
            "train/loss": mean minibatch loss in squared standardised units, (replicas, 1); only when trained.
            "train/noise_scale": noise level in reward units, (replicas, 1).

        Raises:
            ParameterError: Shapes that do not fit, or a non-finite value; nothing has moved.
        """
        data = self._check_transition(transition)
        if minibatches is None:
            minibatches = self.draw_minibatches(transition.reward.shape[1])
        self._num_updates += 1
        x, arm = data["features"], data["arm"] if self.num_arms else None
        self.calibration.observe(data["reward"], data["weight"])
        if self.trainer is not None:
            data |= self.trainer.observe(x, arm, data["weight"])
        self.replay.add(**data)
        if self.closed_form is not None:
            self._update_closed_form(self.closed_form, data)
        metrics = {"train/noise_scale": self.calibration.noise * self.calibration.scale}
        if self.trainer is not None and minibatches:
            metrics["train/loss"] = self._train(self.trainer, minibatches)
        return metrics

    def _train(self, trainer: Trainer, minibatches: Sequence[Minibatch]) -> Float[Tensor, "replicas 1"]:
        total = torch.zeros(self.num_replicas, dtype=self.dtype, device=self.device)
        for minibatch in minibatches:
            total += trainer.train(self.replay.gather(minibatch.slots), minibatch.index, self.replay.size)
        sound = torch.isfinite(total) & trainer.optimiser.sound(self.num_replicas)
        failed = ~sound & (self.stopped < 0)
        self.stopped = torch.where(failed, self.replay.num_added, self.stopped)
        return total.unsqueeze(-1) / len(minibatches)

    def _update_closed_form(self, head: ClosedFormModel, data: Mapping[str, Tensor]) -> None:
        """Move the closed-form posterior by new data; rebuild it when enough have come since the last time."""
        since = self.replay.num_added - self._refitted_at
        period = max(1, min(self._refit_period, self.replay.size // 4))
        if not head.fitted or (since >= period and self.replay.num_added <= self._refit_until):
            # The first batch is all there is, even where the buffer keeps less.
            head.refit(self.replay.stored() if head.fitted else data, self._torso)
            self._refitted_at = self.replay.num_added
        else:
            head.update(data)

    def _check_transition(self, transition: Transition) -> dict[str, Tensor]:
        """Return the data as columns of the replay buffer; unobserved slots have weight zero."""
        features, reward = transition.features.to(self.dtype), transition.reward.to(self.dtype)
        sizes = (self.num_replicas, None, self.feature_dim)
        check_shape("features", self._owner, features, "replicas batch feature_dim", sizes)
        lead = features.shape[:2]
        check_shape("reward", self._owner, reward, "replicas batch", lead)
        weight = torch.ones_like(reward)
        if transition.observed is not None:
            check_shape("observed", self._owner, transition.observed, "replicas batch", lead)
            weight = transition.observed.to(self.dtype)
            reward = torch.where(transition.observed, reward, 0.0)
            features = torch.where(transition.observed.unsqueeze(-1), features, 0.0)
        check_finite("features", self._owner, features)
        check_finite("reward", self._owner, reward)
        if self._labels:
            rule = "be in [0, 1] with the logistic loss"
            check_all("reward", self._owner, rule, (reward >= 0) & (reward <= 1), reward)
        arm = transition.arm
        if self.num_arms is None:
            arm = torch.zeros_like(reward, dtype=torch.int64)
        elif arm is None:
            raise ParameterError("arm", self._owner, "be given with one output per arm", None)
        else:
            check_shape("arm", self._owner, arm, "replicas batch", lead)
            check_all("arm", self._owner, f"be in [0, {self.num_arms})", (arm >= 0) & (arm < self.num_arms), arm)
        perturbation = transition.perturbation
        if perturbation is None:
            perturbation = self.draw_perturbation(lead[1])
        if perturbation is None:
            perturbation = reward.new_empty(*lead, 0)
        check_shape("perturbation", self._owner, perturbation, "replicas batch index_dim", (*lead, self.index_dim))
        return {"features": features, "reward": reward, "weight": weight, "perturbation": perturbation, "arm": arm}

    def discount(self, factor: float, *, keep_prior: bool = True) -> None:
        """Forget: weigh all stored data by `factor` from now on; the prior keeps its weight.

        Raises:
            ParameterError: A factor outside (0, 1], or `keep_prior=False`: a network's prior cannot be forgotten.
        """
        check_real("factor", self._owner, factor, above=0.0, at_most=1.0)
        if not keep_prior:
            raise ParameterError("keep_prior", self._owner, "be True: a network's prior stays", keep_prior)
        self.replay.scale("weight", factor)
        self.calibration.forget(factor)
        if self.closed_form is not None and self.replay.size:
            self.closed_form.refit(self.replay.stored(), None)

    def add_arms(self, count: int = 1) -> None:
        """Refuse: the network has one output per arm.

        Raises:
            ParameterError: Always.
        """
        remedy = "Describe arms by features instead (num_arms=None), and they come and go freely."
        raise ParameterError("num_arms", self._owner, "stay what the network was built with", count, remedy)

    def posterior_samples(
        self,
        features: Float[Tensor, "replicas points feature_dim"],
        arm: Tensor | None,
        num_samples: int,
        generator: torch.Generator,
    ) -> Float[Tensor, "replicas samples points"]:
        """Return joint posterior samples of the mean rewards, in reward units; the agent's streams stay put.

        Raises:
            ParameterError: The agent has no posterior.
        """
        if self._index is None:
            raise ParameterError("posterior_samples", self._owner, "belong to an agent with a posterior", "none")
        index = self._index.reference(self.num_replicas, num_samples, generator=generator, dtype=self.dtype)
        return self.scorer.joint(features.to(self.dtype), arm if self.num_arms else None, index)

    def state_dict(self) -> StateDict:
        state: StateDict = {
            "scorer": self.scorer.state_dict(),
            "calibration": self.calibration.state_dict(),
            "replay": self.replay.state_dict(),
            "stopped": self.stopped,
            "num_updates": self._num_updates,
            "refitted_at": self._refitted_at,
            "streams": self.streams.state_dict(),
        }
        if self.trainer is not None and self.closed_form is not None:
            state["trainer"] = self.trainer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore model, optimiser, buffer, calibration and random streams.

        Raises:
            ParameterError, CheckpointError: The saved agent has other sizes.
        """
        self.replay.load_state_dict(state["replay"])
        self.scorer.load_state_dict(state["scorer"])
        if self.trainer is not None and self.closed_form is not None:
            self.trainer.load_state_dict(state["trainer"])
        self.calibration.load_state_dict(state["calibration"])
        self.stopped = state["stopped"].to(self.stopped)
        self._num_updates = int(state["num_updates"])
        self._refitted_at = int(state["refitted_at"])
        self.streams.load_state_dict(state["streams"])
