"""Every value learner and every problem with states keeps the promises of `value_types`; broken ones are found."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.agents import DQN, BootstrappedDQN, EnnDQN, HyperFQI
from ensemblepp.envs import DeepSea
from ensemblepp.testing import check_value_agent, check_value_environment
from ensemblepp.value_types import ValueStep

SMALL: dict[str, Any] = {"hidden_dims": [6], "batch_size": 4, "random_steps": 3}
AGENTS = {
    "hyper_fqi": partial(HyperFQI, index_dim=3, noise_scale=0.1, **SMALL),
    "hyper_fqi_max": partial(HyperFQI, index_dim=3, act_rule="max", target_rule="max", num_indices=3, **SMALL),
    "hyper_fqi_bound": partial(HyperFQI, index_dim=3, act_rule="bound", target_rule="bound", n_step=2, **SMALL),
    "dqn": partial(DQN, **SMALL),
    "bootstrapped_dqn": partial(BootstrappedDQN, index_dim=2, **SMALL),
    "enn_dqn": partial(EnnDQN, index_dim=2, **SMALL),
}


@pytest.mark.parametrize("make", AGENTS.values(), ids=AGENTS)
def test_agents_keep_their_promises(make: Any) -> None:
    check_value_agent(make, partial(DeepSea, 4, stochastic=True), steps=20)


@pytest.mark.parametrize("stochastic", [False, True])
def test_environments_keep_their_promises(stochastic: bool) -> None:
    check_value_environment(partial(DeepSea, 4, stochastic=stochastic))


class Writes(DeepSea):
    """Hands out the tensor that it writes to."""

    def step(self, action: Tensor) -> ValueStep:
        answer = super().step(action)
        kept = self.__dict__.setdefault("kept", torch.zeros_like(answer.reward))
        kept.copy_(answer.reward)
        return ValueStep(*(kept if name == "reward" else value for name, value in vars(answer).items()))


class TakesAny(DeepSea):
    """Takes any action for one of its own."""

    def step(self, action: Tensor) -> ValueStep:
        return super().step(torch.zeros(self.num_replicas, dtype=torch.int64) if len(action) != 3 else action.abs() % 2)


class MovesTheOriginal(DeepSea):
    """Resets the original when copies are asked for."""

    def make_evaluation(self, copies: int) -> DeepSea:
        self._row = 2
        return super().make_evaluation(copies)


class ForgetsToStop(DQN):
    """Learns from rewards that are no numbers."""

    def _check_transition(self, transition: Any) -> None:
        pass

    def _check_divergence(self, loss: Tensor) -> None:
        pass


class LearnsFromEvaluation(DQN):
    """Draws its exploration anew when it is evaluated."""

    def draw_evaluation_index(self, episodes: int) -> None:
        self._random_action()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Writes, "never write to an answer"),
        (TakesAny, "must raise ParameterError"),
        (MovesTheOriginal, "must move nothing of the original"),
    ],
)
def test_a_broken_environment_is_found(broken: type[DeepSea], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_value_environment(partial(broken, 4, move_cost=0.1))


@pytest.mark.parametrize(
    ("broken", "message"),
    [(ForgetsToStop, "must raise ParameterError"), (LearnsFromEvaluation, "evaluating must not change it")],
)
def test_a_broken_agent_is_found(broken: type[DQN], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_value_agent(partial(broken, epsilon_start=1.0, **SMALL), partial(DeepSea, 4), steps=20)
