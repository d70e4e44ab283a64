"""Any gymnasium environment with a finite number of actions as a problem of value learning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from jaxtyping import Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from ensemblepp.envs.common import check_setup, check_state
from ensemblepp.envs.spaces import check_actions, read_observations, stack
from ensemblepp.errors import CheckpointError, ParameterError, check_all, check_int, check_shape
from ensemblepp.seeding import Streams
from ensemblepp.types import StateDict
from ensemblepp.value_types import ValueStep

_LARGEST_SEED = 2**31 - 1


class _GymProblem:
    """What both adapters share: spaces, checks and counting."""

    num_replicas: int
    _owner: str

    def _read_spaces(self, observation: gymnasium.Space[Any], action: gymnasium.Space[Any]) -> None:
        self._space, self._action_space = observation, action
        self._observations = read_observations(observation)
        self.num_actions, self._first_action = check_actions(action)
        self.observation_shape = self._observations.shape
        self.observation_dtype = self._observations.dtype
        self.num_states = self._observations.num_states
        self._steps = 0

    def _check_action(self, action: Tensor) -> list[int]:
        """Return the environment's own actions."""
        check_shape("action", self._owner, action, "replicas", (self.num_replicas,))
        allowed = (action >= 0) & (action < self.num_actions)
        check_all("action", self._owner, f"be in [0, {self.num_actions})", allowed, action)
        return [each + self._first_action for each in action.tolist()]

    def _tensor(self, batch: Any) -> Tensor:
        """Return observations as a tensor on the problem's device.

        Raises:
            ParameterError: An observation is not finite; the step is named.
        """
        tensor = self._observations.tensor(batch).to(self.device)
        if tensor.is_floating_point():
            finite = torch.isfinite(tensor)
            check_all("observation", self._owner, f"be finite (step {self._steps})", finite, tensor)
        return tensor

    def _flags(self, values: Any) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=np.bool_)).to(self.device)

    def _rewards(self, values: Any) -> Tensor:
        rewards = torch.from_numpy(np.array([float(each) for each in values], dtype=np.float32)).to(self.device)
        check_all("reward", self._owner, f"be finite (step {self._steps})", torch.isfinite(rewards), rewards)
        return rewards

    device: torch.device


class GymValue(_GymProblem):
    """R copies of a `gymnasium.Env`, stepped one after the other; an episode that ends is followed by the next at once.

    Every episode begins with `reset(seed=...)`, its seed drawn from the problem's own stream, so that a saved run can
    continue exactly: the episode is begun again with its seed and its actions are played again. That needs an
    environment whose episodes follow from their seeds, which is checked: the observation reached is the saved one.

    Args:
        env: An id such as "CartPole-v1", or a function that makes one environment.
        num_replicas: R.
        seed: Root of the episodes' seeds.
        device: Where tensors go.
        **make_options: For `gymnasium.make`, with an id only.

    Raises:
        ParameterError: A value that breaks a rule, or a space that is not supported, by name.
        gymnasium.error.Error: As `gymnasium.make`.

    Source: Gymnasium (arXiv 2407.17032).
    """

    can_restore = True

    def __init__(
        self,
        env: str | Callable[[], gymnasium.Env[Any, Any]],
        *,
        num_replicas: int = 1,
        seed: int = 0,
        device: torch.device | str = "cpu",
        **make_options: Any,
    ) -> None:
        self._owner = "GymValue"
        self.device = check_setup(self._owner, num_replicas, seed, device, torch.float32)
        self.num_replicas = num_replicas
        self._id = env if isinstance(env, str) else None
        if isinstance(env, str):
            self._make: Callable[[], gymnasium.Env[Any, Any]] = lambda: gymnasium.make(env, **make_options)
        elif callable(env):
            if make_options:
                name = sorted(make_options)[0]
                raise ParameterError(name, self._owner, "be given with an id only", repr(make_options[name]))
            self._make = env
        else:
            raise ParameterError("env", self._owner, "be an id or a function", type(env).__name__)
        self._seed, self._options = seed, make_options
        self._begin(num_replicas)

    def _begin(self, count: int) -> None:
        self.num_replicas = count
        self._envs = [self._make() for _ in range(count)]
        self._read_spaces(self._envs[0].observation_space, self._envs[0].action_space)
        self._name = self._envs[0].spec.id if self._envs[0].spec is not None else type(self._envs[0].unwrapped).__name__
        self._streams = Streams(self._seed, "episodes")
        self._seeds = [0] * count
        self._actions: list[list[int]] = [[] for _ in range(count)]
        self._rows: list[Any] = [None] * count

    def make_evaluation(self, copies: int) -> GymValue:
        """Return R * `copies` environments of their own; gymnasium's have no memory that replicas could differ in."""
        check_int("copies", self._owner, copies)
        return self._copy(self.num_replicas * copies, self._make)

    def _copy(self, count: int, make: Callable[[], gymnasium.Env[Any, Any]]) -> GymValue:
        copy = object.__new__(GymValue)
        copy.__dict__ |= self.__dict__
        copy._make = make
        copy._begin(count)
        return copy

    def check_rendering(self) -> None:
        """Raise unless the environments can draw themselves as pixels.

        Raises:
            ParameterError: "rgb_array" is not among their render modes, or a function made them with another one.
        """
        env = self._envs[0]
        modes = env.metadata.get("render_modes", [])
        if "rgb_array" not in modes:
            raise ParameterError("env", self._owner, 'have the render mode "rgb_array" to be drawn', modes or "none")
        if self._id is None and env.render_mode != "rgb_array":
            rule = 'make environments with render_mode="rgb_array" to be drawn'
            raise ParameterError("env", self._owner, rule, repr(env.render_mode))

    def make_rendering(self) -> GymValue:
        """Return R environments that draw themselves as pixels, see `render`.

        Raises:
            ParameterError: As `check_rendering`.
        """
        self.check_rendering()
        if self._id is None:
            return self._copy(self.num_replicas, self._make)
        name, options = self._id, {**self._options, "render_mode": "rgb_array"}
        return self._copy(self.num_replicas, lambda: gymnasium.make(name, **options))

    def render(self, replica: int = 0) -> NDArray[np.uint8]:
        """Return what one replica looks like now, (height, width, 3), of an environment from `make_rendering`.

        Raises:
            ImportError: What the environment draws with is missing.
        """
        try:
            return np.asarray(self._envs[replica].render(), dtype=np.uint8)
        except gymnasium.error.DependencyNotInstalled as error:
            raise ImportError(f"{error}. The extra brings it: pip install 'ensemblepp[video]'") from error

    def _begin_episode(self, replica: int) -> None:
        draw = torch.randint(_LARGEST_SEED, (), generator=self._streams["episodes"])
        self._seeds[replica], self._actions[replica] = int(draw), []
        self._rows[replica] = self._read(self._envs[replica].reset(seed=self._seeds[replica])[0])

    def _read(self, observation: Any) -> Any:
        """Return one observation as a batch of one, at once: the environment may write its next one into the same."""
        return self._observations.read(stack(self._space, [observation]))

    def reset(self, seed: int | None = None) -> Shaped[Tensor, "replicas *obs"]:
        """Begin an episode in every copy; a seed begins the stream of episode seeds anew."""
        if seed is not None:
            self._streams = Streams(seed, "episodes")
        for replica in range(self.num_replicas):
            self._begin_episode(replica)
        return self._join(self._rows)

    def step(self, action: Int[Tensor, " replicas"]) -> ValueStep:
        """Play one action per copy.

        Raises:
            ParameterError: Actions of another shape or out of range, before anything moves; or an observation or reward
                that is not finite, naming the step.
        """
        chosen = self._check_action(action)
        self._check_begun("step")
        self._steps += 1
        rewards, terminated, truncated = [], [], []
        for replica, own in enumerate(chosen):
            answer = self._envs[replica].step(self._cast(own))
            self._actions[replica].append(own)
            self._rows[replica] = self._read(answer[0])
            rewards.append(float(answer[1]))
            terminated.append(bool(answer[2]))
            truncated.append(bool(answer[3]))
        successor = self._join(self._rows)
        for replica in range(self.num_replicas):
            if terminated[replica] or truncated[replica]:
                self._begin_episode(replica)
        return ValueStep(
            self._join(self._rows),
            successor,
            self._rewards(rewards),
            self._flags(terminated),
            self._flags(truncated),
            valid=torch.ones(self.num_replicas, dtype=torch.bool, device=self.device),
        )

    def _cast(self, action: int) -> Any:
        """Return an action in the space's own dtype."""
        return self._action_space.dtype.type(action) if self._action_space.dtype is not None else action

    def _join(self, rows: list[Any]) -> Tensor:
        tensor = torch.from_numpy(np.concatenate(rows)).to(self.device, self.observation_dtype)
        if tensor.is_floating_point():
            finite = torch.isfinite(tensor)
            check_all("observation", self._owner, f"be finite (step {self._steps})", finite, tensor)
        return tensor

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()

    def state_dict(self) -> StateDict:
        """Return every episode's seed and actions so far, and the stream of seeds."""
        self._check_begun("state_dict")
        return {
            "problem": self._problem(),
            "streams": self._streams.state_dict(),
            "seeds": list(self._seeds),
            "lengths": [len(each) for each in self._actions],
            "actions": torch.tensor([each for actions in self._actions for each in actions], dtype=torch.int64),
            "observation": self._join(self._rows).cpu(),
            "steps": self._steps,
        }

    def _check_begun(self, call: str) -> None:
        if any(row is None for row in self._rows):
            raise ParameterError(call, self._owner, "come after reset", "an environment without an episode")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the saved episodes, by playing their actions again.

        Raises:
            CheckpointError: The state belongs to another problem, or an episode does not follow from its seed.
        """
        check_state(self._owner, state, self._problem(), self._streams)
        actions = state["actions"].split(state["lengths"])
        if len(actions) != self.num_replicas:
            raise CheckpointError(f"the state of GymValue holds {len(actions)} replicas, not {self.num_replicas}")
        self._streams.load_state_dict(state["streams"])
        self._steps = int(state["steps"])
        for replica, played in enumerate(actions):
            self._seeds[replica], self._actions[replica] = int(state["seeds"][replica]), played.tolist()
            observation = self._envs[replica].reset(seed=self._seeds[replica])[0]
            for action in self._actions[replica]:
                observation = self._envs[replica].step(self._cast(action))[0]
            self._rows[replica] = self._read(observation)
        reached = self._join(self._rows).cpu()
        if not torch.equal(reached, state["observation"]):
            raise CheckpointError(
                f"{self._name} cannot be restored: its episodes do not follow from their seeds and actions"
            )

    def _problem(self) -> dict[str, Any]:
        options = {key: repr(value) for key, value in sorted(self._options.items())}
        return {"env": self._name, "num_replicas": self.num_replicas, "seed": self._seed, "options": options}


class VectorGymValue(_GymProblem):
    """A `gymnasium.vector.VectorEnv` of your own, in any autoreset mode.

    - NEXT_STEP: the step after an episode's end ignores the action and only resets; its row is not `valid`.
    - SAME_STEP: the successor is taken from `info["final_obs"]`, what to act on next from the observation.
    - DISABLED: copies that ended are reset here, through `options={"reset_mask": ...}`.

    Args:
        env: The vector environment; it is used, not copied, and cannot be restored or evaluated on copies.
        seed: Seed of the first reset.
        device: Where tensors go.

    Raises:
        ParameterError: No vector environment, or a space that is not supported, by name.
    """

    can_restore = False

    def __init__(self, env: VectorEnv[Any, Any, Any], *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self._owner = "VectorGymValue"
        if not isinstance(env, VectorEnv):
            raise ParameterError("env", self._owner, "be a gymnasium.vector.VectorEnv", type(env).__name__)
        self.device = check_setup(self._owner, env.num_envs, seed, device, torch.float32)
        self._env, self._seed, self.num_replicas = env, seed, env.num_envs
        mode = env.metadata.get("autoreset_mode")
        if mode not in list(AutoresetMode):
            rule = 'say how it resets in metadata["autoreset_mode"]'
            raise ParameterError("env", self._owner, rule, mode)
        self._mode = AutoresetMode(mode)
        self._read_spaces(env.single_observation_space, env.single_action_space)
        self._ended = np.zeros(self.num_replicas, dtype=np.bool_)

    def make_evaluation(self, copies: int) -> VectorGymValue:
        """Refuse: nobody knows how to make more of a given vector environment.

        Raises:
            ParameterError: Always.
        """
        remedy = "Use GymValue with an id or a function, or set evaluation.period=null."
        raise ParameterError("env", self._owner, "be made by an id to be evaluated on copies", "one vector", remedy)

    def reset(self, seed: int | None = None) -> Shaped[Tensor, "replicas *obs"]:
        """Begin an episode in every copy."""
        self._ended[:] = False
        observation, _ = self._env.reset(seed=self._seed if seed is None else seed)
        return self._tensor(observation)

    def step(self, action: Int[Tensor, " replicas"]) -> ValueStep:
        """Play one action per copy.

        Raises:
            ParameterError: As `GymValue.step`, or a final observation that is missing.
        """
        own = np.array(self._check_action(action), dtype=self._action_space.dtype)
        self._steps += 1
        observation, reward, terminated, truncated, info = self._env.step(own)
        ended = np.array(terminated, dtype=np.bool_) | np.array(truncated, dtype=np.bool_)
        valid = np.ones(self.num_replicas, dtype=np.bool_)
        successor = now = self._tensor(observation)
        if self._mode is AutoresetMode.NEXT_STEP:
            valid = ~self._ended
            ended &= valid
        elif ended.any() and self._mode is AutoresetMode.SAME_STEP:
            successor = self._final(now, ended, info)
        elif ended.any():
            now = self._tensor(self._env.reset(options={"reset_mask": ended})[0])
        self._ended = ended
        rewards = self._rewards(np.where(valid, reward, 0.0))
        over, cut = (self._flags(np.array(each, dtype=np.bool_) & valid) for each in (terminated, truncated))
        return ValueStep(now, successor, rewards, over, cut, valid=self._flags(valid))

    def _final(self, observation: Tensor, ended: Any, info: Mapping[str, Any]) -> Tensor:
        """Return the true successors: `final_obs` where an episode ended."""
        known = np.array(info.get("_final_obs", np.zeros_like(ended)), dtype=np.bool_)
        if (ended & ~known).any():
            raise ParameterError("final_obs", self._owner, "be in info where an episode ended", "none")
        places = np.flatnonzero(ended).tolist()
        final = self._tensor(stack(self._space, [_pick(info["final_obs"], i) for i in places]))
        successor = observation.clone()
        successor[places] = final
        return successor

    def state_dict(self) -> StateDict:
        """Return nothing: a given vector environment cannot be restored."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin new episodes, as there is nothing to restore."""


def _pick(batch: Any, place: int) -> Any:
    """Return one observation of a batch of final observations, which are nested as the space is."""
    if isinstance(batch, Mapping):
        return {key: _pick(values, place) for key, values in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_pick(values, place) for values in batch)
    return batch[place]
