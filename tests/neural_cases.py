"""Small neural agents in float64 and the data they are taught, shared by their tests."""

from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ensemblepp.agents import (
    EnsemblePlus,
    EpiNet,
    LangevinTS,
    NeuralAgent,
    NeuralDropout,
    NeuralEnsemblePP,
    NeuralGreedy,
    NeuralLinear,
    NeuralThompson,
    NeuralUCB,
)
from ensemblepp.seeding import make_generator
from ensemblepp.types import Transition

AgentT = TypeVar("AgentT", bound=NeuralAgent)
DIM, ARMS = 3, 4
SMALL: dict[str, Any] = {
    "hidden_dims": (6, 5),
    "batch_size": 4,
    "updates_per_step": 2,
    "num_replicas": 2,
    "dtype": torch.float64,
}
EXACT = partial(NeuralEnsemblePP, DIM, index_dim=4, **SMALL)
SGD = partial(EXACT, head="sgd")
EVERY: dict[str, Any] = {
    "exact": partial(EXACT, refit_period=3),
    "sgd": SGD,
    "logistic": partial(SGD, loss="logistic"),
    "ensemble_plus": partial(EnsemblePlus, DIM, index_dim=4, **SMALL),
    "epi_net": partial(EpiNet, DIM, index_dim=4, **SMALL),
    "neural_linear": partial(NeuralLinear, DIM, refit_period=3, **SMALL),
    "greedy": partial(NeuralGreedy, DIM, **SMALL),
    "neural_ucb": partial(NeuralUCB, DIM, **SMALL),
    "neural_thompson": partial(NeuralThompson, DIM, **SMALL),
    "langevin_ts": partial(LangevinTS, DIM, **SMALL),
    "neural_dropout": partial(NeuralDropout, DIM, **SMALL),
}

ON_ONE_NETWORK = ["neural_ucb", "neural_thompson", "langevin_ts", "neural_dropout"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=torch.float64)


def datum(agent: NeuralAgent, count: int, seed: int) -> Transition:
    size = (agent.num_replicas, count)
    reward = torch.rand(size, generator=make_generator(seed, "reward"), dtype=torch.float64)
    arm = None
    if agent.num_arms is not None:
        arm = torch.randint(agent.num_arms, size, generator=make_generator(seed, "arm"))
    return Transition(normal(*size, agent.feature_dim, seed=seed), reward, arm)


def taught(agent: AgentT, steps: int = 12, count: int = 2, seed: int = 100) -> AgentT:
    for step in range(steps):
        agent.update(datum(agent, count, seed + step))
    return agent


def contexts_for(agent: NeuralAgent, batch: int, seed: int = 7) -> Tensor:
    arms = () if agent.num_arms else (ARMS,)
    return normal(agent.num_replicas, batch, *arms, agent.feature_dim, seed=seed)
