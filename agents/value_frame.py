"""The frame of every agent that learns action values: store, train on a schedule, follow a target network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ensemblepp.agents.sgd_model import Optimiser
from ensemblepp.errors import (
    DivergenceError,
    ParameterError,
    check_all,
    check_finite,
    check_int,
    check_real,
    check_shape,
)
from ensemblepp.seeding import Streams
from ensemblepp.transition_replay import TransitionReplay
from ensemblepp.types import StateDict
from ensemblepp.value_types import ValueEnvironment, ValueTransition

_DEVICE_CHECK_PERIOD = 100


class ValueOptions(TypedDict, total=False):
    """Options of every agent of this family; see `ValueLearner`."""

    num_states: int | None
    observation_dtype: torch.dtype
    hidden_dims: Sequence[int]
    num_replicas: int
    discount: float
    n_step: int
    updates_per_step: int
    update_period: int
    batch_size: int
    random_steps: int
    replay_capacity: int
    target_update_period: int
    learning_rate: float
    adam_epsilon: float
    double: bool
    seed: int
    dtype: torch.dtype
    device: torch.device | str


class ValueLearner:
    """An agent that stores transitions, learns action values from minibatches, and acts on them.

    A subclass builds `network` and `target` in its constructor, calls `_start_learning`, and says how to act
    (`_choose`), how to judge (`act_evaluation`) and what the gradient of a minibatch is (`_backward`).

    Args:
        observation_shape: Shape of one observation; () with `num_states`.
        num_actions: A.
        num_states: Number of states where observations are numbers of states; None where they are tensors.
        observation_dtype: Of the observations as they are stored.
        hidden_dims: Widths of the torso's layers.
        num_replicas: R, independent learners batched in one set of tensors.
        discount: gamma, per step.
        n_step: Steps whose rewards a target sums before it bootstraps. Raising it passes rewards back faster and learns
            from actions that the present policy would not take: there is no correction for that.
        updates_per_step: Minibatch updates per environment step. Raising it learns more from the same data, at
            proportional cost.
        update_period: Environment steps between trainings.
        batch_size: Transitions per minibatch and replica, drawn uniformly with replacement.
        random_steps: First environment steps, in which actions are uniformly random and nothing is trained.
        replay_capacity: Transitions kept per replica; the oldest are overwritten.
        target_update_period: Updates between two copies of the network into the target network.
        learning_rate: Adam's step size. Raising it learns faster and less stably.
        adam_epsilon: Adam's epsilon. Raising it shortens the steps of parameters with small gradients.
        double: Let the online network choose the action that the target network judges.
        seed: Root of the agent's random streams "init", "act", "perturb", "replay", "target" and "evaluate".
        dtype: float32 or float64.
        device: Where everything lives.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    network: Any
    target: Any

    def __init__(
        self,
        observation_shape: Sequence[int],
        num_actions: int,
        *,
        num_states: int | None = None,
        observation_dtype: torch.dtype = torch.float32,
        hidden_dims: Sequence[int] = (64, 64),
        num_replicas: int = 1,
        discount: float = 0.99,
        n_step: int = 1,
        updates_per_step: int = 1,
        update_period: int = 1,
        batch_size: int = 128,
        random_steps: int = 128,
        replay_capacity: int = 100_000,
        target_update_period: int = 4,
        learning_rate: float = 1e-3,
        adam_epsilon: float = 1.5e-4,
        double: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        owner = self._owner = type(self).__name__
        self.observation_shape = tuple(observation_shape)
        self.observation_dtype = torch.int64 if num_states is not None else observation_dtype
        self.num_states = None if num_states is None else check_int("num_states", owner, num_states)
        if num_states is not None and self.observation_shape:
            raise ParameterError("observation_shape", owner, "be () with num_states", self.observation_shape)
        self.num_actions = check_int("num_actions", owner, num_actions, minimum=2)
        self.num_replicas = check_int("num_replicas", owner, num_replicas)
        self.hidden_dims = hidden_dims
        self.discount = check_real("discount", owner, discount, at_least=0.0, at_most=1.0)
        self.n_step = check_int("n_step", owner, n_step)
        self.updates_per_step = check_int("updates_per_step", owner, updates_per_step)
        self.update_period = check_int("update_period", owner, update_period)
        self.batch_size = check_int("batch_size", owner, batch_size)
        self.random_steps = check_int("random_steps", owner, random_steps, minimum=0)
        self.replay_capacity = check_int("replay_capacity", owner, replay_capacity)
        self.target_update_period = check_int("target_update_period", owner, target_update_period)
        self.learning_rate = check_real("learning_rate", owner, learning_rate, above=0.0)
        self.adam_epsilon = check_real("adam_epsilon", owner, adam_epsilon, above=0.0)
        self.double = bool(double)
        if dtype not in (torch.float32, torch.float64):
            raise ParameterError("dtype", owner, "be torch.float32 or torch.float64", dtype)
        self.dtype, self.device = dtype, torch.device(device)
        self.streams = Streams(seed, "init", "act", "perturb", "replay", "target", "evaluate", device=self.device)
        self.num_steps = 0
        self.num_updates = 0
        self._diverged_at = torch.full((num_replicas,), -1, device=self.device)

    def _start_learning(self) -> None:
        """Build the optimiser and the buffer, once the network is known."""
        self.optimiser = Optimiser(
            self.network,
            owner=self._owner,
            learning_rate=self.learning_rate,
            weight_decay=0.0,
            epsilon=self.adam_epsilon,
        )
        self.replay = self._build_replay()

    def _build_replay(self) -> TransitionReplay:
        observation = (self.observation_shape, self.observation_dtype)
        return TransitionReplay(
            self.replay_capacity,
            {"observation": observation, "action": ((), torch.int64), "next_observation": observation}
            | self._columns(),
            n_step=self.n_step,
            discount=self.discount,
            num_replicas=self.num_replicas,
            device=self.device,
        )

    def _columns(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return what is stored with a transition besides the transition."""
        return {}

    def _draw_columns(self) -> dict[str, Tensor]:
        """Return the values of `_columns` for one transition per replica."""
        return {}

    def encode(self, observation: Shaped[Tensor, "replicas batch *obs"]) -> Shaped[Tensor, "replicas batch *in_dim"]:
        """Return what the network reads: numbers of states as they are, all else as a vector, bytes divided by 255."""
        if self.num_states is not None:
            return observation
        x = observation.flatten(2).to(self.dtype)
        return x / 255 if self.observation_dtype is torch.uint8 else x

    def check_environment(self, environment: ValueEnvironment) -> None:
        """Raise unless the environment's sizes are the agent's.

        Raises:
            ParameterError: A size or the observations' dtype differs.
        """
        for name in ("num_replicas", "num_actions", "num_states", "observation_shape", "observation_dtype"):
            wanted, got = getattr(environment, name), getattr(self, name)
            if wanted != got:
                raise ParameterError(name, self._owner, f"equal the environment's {wanted}", got)

    def act(self, observation: Shaped[Tensor, "replicas *obs"]) -> Int[Tensor, " replicas"]:
        """Choose one exploring action per replica; uniformly random ones in the first `random_steps` steps.

        Raises:
            ParameterError: An observation of another shape or dtype.
        """
        self._check_observation("observation", observation, (self.num_replicas,))
        if self.num_steps < self.random_steps:
            return self._random_action()
        return self._choose(self.encode(observation.unsqueeze(1))).squeeze(1)

    def _random_action(self) -> Int[Tensor, " replicas"]:
        size = (self.num_replicas,)
        return torch.randint(self.num_actions, size, generator=self.streams["act"], device=self.device)

    def _choose(self, x: Tensor) -> Int[Tensor, "replicas one"]:
        """Return the exploring actions for encoded observations (replicas, 1, ...)."""
        raise NotImplementedError

    def draw_evaluation_index(self, episodes: int) -> Tensor | None:
        """Draw fresh indices (replicas, episodes, index_dim), from the stream "evaluate"; None without an index."""
        check_int("episodes", self._owner, episodes)
        return None

    def act_evaluation(
        self, observation: Shaped[Tensor, "replicas episodes *obs"], index: Tensor | None
    ) -> Int[Tensor, "replicas episodes"]:
        """Choose greedily under each episode's index; nothing changes.

        Raises:
            ParameterError: An observation of another shape or dtype.
        """
        self._check_observation("observation", observation, (self.num_replicas, None))
        return self._values(self.encode(observation), index).argmax(-1)

    def _values(self, x: Tensor, index: Tensor | None) -> Float[Tensor, "replicas batch actions"]:
        """Return the action values of encoded observations (replicas, batch, ...), one index per observation."""
        raise NotImplementedError

    def observe(self, transition: ValueTransition) -> dict[str, Tensor]:
        """Store one transition per replica where it is valid, and train as the schedule says.

        Returns:
            "train/loss": mean minibatch loss in squared reward units, (replicas,); only when trained.

        Raises:
            ParameterError: Shapes that do not fit or a non-finite value; nothing has moved.
            DivergenceError: A training loss became non-finite; the message names step and replica.
        """
        self._check_transition(transition)
        ended = transition.terminated | transition.truncated
        self.replay.append(
            transition.valid,
            observation=transition.observation,
            action=transition.action,
            next_observation=transition.next_observation,
            reward=transition.reward,
            terminated=transition.terminated,
            ended=ended,
            **self._draw_columns(),
        )
        self._note_ends(ended & transition.valid)
        self.num_steps += 1
        if self.num_steps < max(self.random_steps, 1) or self.num_steps % self.update_period:
            return {}
        total = torch.zeros(self.num_replicas, dtype=self.dtype, device=self.device)
        for _ in range(self.updates_per_step):
            total += self._update()
        self._check_divergence(total)
        return {"train/loss": total / self.updates_per_step}

    def _update(self) -> Float[Tensor, " replicas"]:
        """Take one optimiser step on a fresh minibatch, and let the target follow when it is time."""
        batch = self.replay.draw(self.batch_size, generator=self.streams["replay"])
        loss = self._backward(batch)
        self.optimiser.step(1)
        self.num_updates += 1
        if self.num_updates % self.target_update_period == 0:
            for own, online in zip(self.target.blocks, self.network.blocks, strict=True):
                own.copy_(online)
        return loss

    def _backward(self, batch: Mapping[str, Tensor]) -> Float[Tensor, " replicas"]:
        """Write the gradient of the mean minibatch loss into the network and return that loss per replica."""
        raise NotImplementedError

    def _note_ends(self, ended: Tensor) -> None:
        """Hear which replicas ended an episode."""

    def _check_divergence(self, loss: Tensor) -> None:
        if self.device.type == "cpu" and bool(torch.isfinite(loss).all()):
            return
        failed = ~torch.isfinite(loss) & (self._diverged_at < 0)
        self._diverged_at = torch.where(failed, self.num_steps, self._diverged_at)
        # Reading a flag waits for an accelerator, so there the error comes late; the step it names is the first.
        if self.device.type != "cpu" and self.num_steps % _DEVICE_CHECK_PERIOD:
            return
        steps = self._diverged_at.tolist()
        if max(steps) >= 0:
            first = min(step for step in steps if step >= 0)
            replicas = [replica for replica, step in enumerate(steps) if step >= 0]
            raise DivergenceError(
                f"the training loss of {self._owner} became non-finite at step {first} in replicas {replicas}. "
                "Rewards of this size need a smaller unit, or learning_rate is too high."
            )

    def _check_observation(self, name: str, observation: Tensor, lead: Sequence[int | None]) -> None:
        axes = "replicas *obs" if len(lead) == 1 else "replicas episodes *obs"
        check_shape(name, self._owner, observation, axes, (*lead, *self.observation_shape))
        if observation.dtype != self.observation_dtype:
            raise ParameterError(name, self._owner, f"have dtype {self.observation_dtype}", observation.dtype)

    def _check_transition(self, transition: ValueTransition) -> None:
        owner, lead, valid = f"{self._owner} at step {self.num_steps + 1}", (self.num_replicas,), transition.valid
        for name in ("action", "reward", "terminated", "truncated", "valid"):
            check_shape(name, owner, getattr(transition, name), "replicas", lead)
        for name in ("observation", "next_observation"):
            values = getattr(transition, name)
            self._check_observation(name, values, lead)
            if values.is_floating_point():
                check_finite(name, owner, values)
            elif self.num_states is not None:
                check_all(name, owner, f"be in [0, {self.num_states})", _within(values, self.num_states), values)
        check_all("reward", owner, "be finite", torch.isfinite(transition.reward) | ~valid, transition.reward)
        action = transition.action
        check_all("action", owner, f"be in [0, {self.num_actions})", _within(action, self.num_actions), action)

    def state_dict(self) -> StateDict:
        return {
            "network": self.network.state_dict(),
            "target": self.target.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "replay": self.replay.state_dict(),
            "streams": self.streams.state_dict(),
            "num_steps": self.num_steps,
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore networks, optimiser, buffer, counters and random streams.

        Raises:
            ParameterError, CheckpointError: The saved agent has other sizes.
        """
        self.replay.load_state_dict(state["replay"])
        self.network.load_state_dict(state["network"])
        self.target.load_state_dict(state["target"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.streams.load_state_dict(state["streams"])
        self.num_steps, self.num_updates = int(state["num_steps"]), int(state["num_updates"])


def _within(values: Tensor, bound: int) -> Tensor:
    return (values >= 0) & (values < bound)
