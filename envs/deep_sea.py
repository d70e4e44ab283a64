"""DeepSea: a grid in which the one rewarded path is found by exploration that plans ahead, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from ensemblepp.envs.common import check_setup, check_state
from ensemblepp.errors import CheckpointError, ParameterError, check_all, check_int, check_real, check_shape
from ensemblepp.seeding import Streams, make_generator
from ensemblepp.types import StateDict
from ensemblepp.value_types import ValueStep

OPTIMAL_RETURN = 0.99
"""Return of the optimal policy of the deterministic problem with the usual move cost; every other policy has less."""


class DeepSea:
    """R copies of an N x N grid: each step goes one row down and one column left or right; N steps are an episode.

    A diver starts in the top left cell. In every cell one of the two actions means right, the other left; which one is
    drawn once per copy and never changes. A move to the right costs move_cost / N. A move to the right in the last
    column pays 1, which needs N moves to the right: of 2^N paths one is worth 1 - move_cost. An episode ends by
    termination after N steps.

    The stochastic variant moves right with probability 1 - 1 / N only, and adds N(0, 1) noise to the reward of the last
    row's first and last cell.

    Observations are numbers of states, row * N + column, and N^2 after the last step (all zeros in the grid form of
    `one_hot`).

    Args:
        size: N.
        stochastic: The stochastic variant.
        move_cost: Cost of N moves to the right, in reward units.
        num_replicas: R, each with its own action map.
        seed: Root of the action maps and of the noise, which are independent streams.
        device: Where everything lives.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Osband et al. (2019), Deep exploration via randomized value functions (arXiv 1703.07608); the dynamics are
        those of the behaviour suite (arXiv 1908.03568).
    """

    num_actions = 2
    observation_shape: tuple[int, ...] = ()
    observation_dtype = torch.int64
    can_restore = True

    def __init__(
        self,
        size: int,
        *,
        stochastic: bool = False,
        move_cost: float = 0.01,
        num_replicas: int = 1,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size = check_int("size", "DeepSea", size)
        self.stochastic = bool(stochastic)
        self.move_cost = check_real("move_cost", "DeepSea", move_cost)
        self.device = check_setup("DeepSea", num_replicas, seed, device, torch.float32)
        self.num_replicas = num_replicas
        self.num_states = size * size + 1
        self._seed = seed
        generator = make_generator(seed, "action_map", self.device)
        cells = (num_replicas, size * size)
        self.action_map = torch.randint(2, cells, generator=generator, device=self.device).bool()
        """(replicas, states): the action that means right in each cell."""
        self._begin(Streams(seed, "noise", device=self.device))

    def _begin(self, streams: Streams) -> None:
        self.streams = streams
        self._row = 0
        self._column = torch.zeros(self.num_replicas, dtype=torch.int64, device=self.device)

    def make_evaluation(self, copies: int) -> DeepSea:
        """Return R * `copies` grids, `copies` of each replica's own side by side, with noise of their own."""
        check_int("copies", "DeepSea", copies)
        copy = object.__new__(DeepSea)
        copy.__dict__ |= self.__dict__
        copy.num_replicas = self.num_replicas * copies
        copy.action_map = self.action_map.repeat_interleave(copies, dim=0)
        copy._begin(Streams(self._seed, "noise", device=self.device))
        return copy

    def _observe(self) -> Int[Tensor, " replicas"]:
        return self._row * self.size + self._column

    def reset(self, seed: int | None = None) -> Int[Tensor, " replicas"]:
        """Put every diver into the top left cell and return the observations; a seed begins the noise anew."""
        if seed is not None:
            self.streams = Streams(seed, "noise", device=self.device)
        self._row = 0
        self._column = torch.zeros_like(self._column)
        return self._observe()

    def step(self, action: Int[Tensor, " replicas"]) -> ValueStep:
        """Move every diver; after the N-th step the next observation is the first cell's again.

        Raises:
            ParameterError: Actions of another shape or outside {0, 1}; nothing has moved.
        """
        check_shape("action", "DeepSea", action, "replicas", (self.num_replicas,))
        check_all("action", "DeepSea", "be 0 or 1", (action == 0) | (action == 1), action)
        column, edge = self._column, self.size - 1
        state = self._observe().unsqueeze(-1)
        right = action.bool() == self.action_map.gather(1, state).squeeze(-1)
        reward = (right & (column == edge)).float()
        moves = right
        if self.stochastic:
            reward, moves = self._disturb(reward, right)
        reward = reward - right * (self.move_cost / self.size)
        self._column = torch.where(right, column + moves, column - 1).clamp(0, edge)
        self._row += 1
        ended = self._row == self.size
        successor = torch.full_like(column, self.size * self.size) if ended else self._observe()
        observation = self.reset() if ended else successor
        never, always = torch.zeros_like(right), torch.ones_like(right)
        return ValueStep(observation, successor, reward, always if ended else never, never, valid=always)

    def _disturb(
        self, reward: Float[Tensor, " replicas"], right: Bool[Tensor, " replicas"]
    ) -> tuple[Float[Tensor, " replicas"], Bool[Tensor, " replicas"]]:
        """Return noisy rewards, and which of the moves to the right succeed."""
        generator = self.streams["noise"]
        uniform = torch.rand(self.num_replicas, generator=generator, device=self.device)
        noise = torch.randn(self.num_replicas, generator=generator, device=self.device)
        if self._row == self.size - 1:
            reward = reward + noise * ((self._column == 0) | (self._column == self.size - 1))
        return reward, right & (uniform > 1 / self.size)

    def one_hot(self, observation: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch size size"]:
        """Return observations as grids with a one at the diver's cell; all zeros after the last step."""
        cells = torch.arange(self.size * self.size, device=observation.device)
        return (observation.unsqueeze(-1) == cells).float().view(*observation.shape, self.size, self.size)

    def state_dict(self) -> StateDict:
        return {
            "problem": self._problem(),
            "row": self._row,
            "column": self._column.clone(),
            "streams": self.streams.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved episode.

        Raises:
            CheckpointError: The state belongs to another problem; nothing has moved.
        """
        check_state("DeepSea", state, self._problem(), self.streams)
        if tuple(state["column"].shape) != (self.num_replicas,):
            raise CheckpointError(f"the state of DeepSea holds columns of shape {tuple(state['column'].shape)}")
        self._row, self._column = int(state["row"]), state["column"].to(self._column)
        self.streams.load_state_dict(state["streams"])

    def _problem(self) -> dict[str, Any]:
        names = ("size", "stochastic", "move_cost", "num_replicas")
        return {name: getattr(self, name) for name in names} | {"seed": self._seed}


class DeepSeaEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """`DeepSea` as a `gymnasium.Env` with N x N grids as observations; registered as `ensemblepp/DeepSea-v0`.

    The action map belongs to the environment, not to the episode: it follows from `map_seed`, and `reset(seed=...)`
    seeds the noise alone. `info["state"]` is the number of the state.

    Args:
        size: See `DeepSea`.
        stochastic: See `DeepSea`.
        move_cost: See `DeepSea`.
        map_seed: Seed of the action map.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium declares it as a plain attribute)

    def __init__(self, size: int = 10, *, stochastic: bool = False, move_cost: float = 0.01, map_seed: int = 0) -> None:
        self.problem = DeepSea(size, stochastic=stochastic, move_cost=move_cost, seed=map_seed)
        self.observation_space = spaces.Box(0.0, 1.0, (size, size), np.float32)
        self.action_space = spaces.Discrete(2)
        self._running: bool | None = None  # None before the first reset

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode; a seed begins the noise anew, and the action map stays."""
        super().reset(seed=seed)
        begin = seed is not None or self._running is None
        self._running = True
        return self._show(self.problem.reset(int(self.np_random.integers(2**31)) if begin else None))

    def step(self, action: np.int64 | int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move the diver; terminated after N steps.

        Raises:
            ParameterError: The action is not 0 or 1.
            gymnasium.error.ResetNeeded: The episode is over or has not begun.
        """
        if not self._running:
            raise gymnasium.error.ResetNeeded("DeepSeaEnv needs reset() before this step")
        if not self.action_space.contains(action):
            raise ParameterError("action", "DeepSeaEnv", f"be in {self.action_space}", repr(action))
        answer = self.problem.step(torch.tensor([int(action)], device=self.problem.device))
        self._running = not answer.terminated.item()
        observation, info = self._show(answer.next_observation)
        return observation, answer.reward.item(), not self._running, False, info

    def _show(self, state: Int[Tensor, " one"]) -> tuple[NDArray[np.float32], dict[str, Any]]:
        return self.problem.one_hot(state)[0].numpy(force=True), {"state": int(state)}
