"""How good a value agent is without exploring: whole episodes on copies of its problems, one fresh index each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ensemblepp.errors import ParameterError, check_choice, check_int, check_real
from ensemblepp.value_types import ValueAgent, ValueEnvironment

_OWNER = "Evaluation"


@dataclass(frozen=True)
class Evaluation:
    """When and how a run evaluates, and what it calls solved.

    Attributes:
        period: Steps or episodes between evaluations.
        unit: "steps" of every learner, or "episodes" of the learner that has finished the fewest.
        episodes: Evaluation episodes per learner and evaluation, each with a fresh index.
        copies: Environments per learner that play at once; None: as many as episodes. It divides `episodes`.
        solve_return: Mean return from which a learner counts as solved; None: nothing counts.
        stop_when_solved: End the run once every learner has been solved at some evaluation.
    """

    period: int
    unit: str = "episodes"
    episodes: int = 100
    copies: int | None = None
    solve_return: float | None = None
    stop_when_solved: bool = False

    def __post_init__(self) -> None:
        check_int("period", _OWNER, self.period)
        check_choice("unit", _OWNER, self.unit, ("steps", "episodes"))
        check_int("episodes", _OWNER, self.episodes)
        if self.copies is not None and self.episodes % check_int("copies", _OWNER, self.copies):
            raise ParameterError("copies", _OWNER, f"divide episodes = {self.episodes}", self.copies)
        if self.solve_return is not None:
            check_real("solve_return", _OWNER, self.solve_return)
        elif self.stop_when_solved:
            raise ParameterError("stop_when_solved", _OWNER, "come with a solve_return", True)


@dataclass(frozen=True)
class EpisodeReturns:
    """Undiscounted return, in reward units, and length, in steps, of every evaluation episode."""

    returns: Float[Tensor, "replicas episodes"]
    lengths: Int[Tensor, "replicas episodes"]


def evaluate(agent: ValueAgent, environment: ValueEnvironment, episodes: int, *, seed: int) -> EpisodeReturns:
    """Let `agent` play `episodes` whole episodes per replica, greedily under one fresh index each.

    Args:
        agent: Its stream of evaluation indices moves; nothing else does.
        environment: What `make_evaluation(copies)` returns, or the agent's own environment (copies = 1).
        episodes: A multiple of the number of copies.
        seed: All that is random in the environments follows from it.

    Raises:
        ParameterError: Numbers of replicas or episodes that do not divide.
    """
    check_int("episodes", "evaluate", episodes)
    replicas = agent.num_replicas
    copies, left = divmod(environment.num_replicas, replicas)
    if left or not copies:
        raise ParameterError(
            "environment", "evaluate", f"have a multiple of the agent's {replicas} replicas", environment.num_replicas
        )
    if episodes % copies:
        raise ParameterError("episodes", "evaluate", f"be a multiple of the {copies} copies", episodes)
    index = agent.draw_evaluation_index(episodes)
    rounds = []
    for number in range(episodes // copies):
        part = None if index is None else index[:, number * copies : (number + 1) * copies]
        observation = environment.reset(seed) if number == 0 else environment.reset()
        rounds.append(_play(agent, environment, observation, part, (replicas, copies)))
    returns, lengths = zip(*rounds, strict=True)
    return EpisodeReturns(torch.cat(returns, dim=1), torch.cat(lengths, dim=1))


def _play(
    agent: ValueAgent, environment: ValueEnvironment, observation: Tensor, index: Tensor | None, lead: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return returns and lengths of the first episode of every copy."""
    returns = torch.zeros(environment.num_replicas, dtype=torch.float64, device=observation.device)
    lengths = torch.zeros_like(returns, dtype=torch.int64)
    playing = torch.ones_like(returns, dtype=torch.bool)
    while playing.any():
        action = agent.act_evaluation(observation.view(*lead, *observation.shape[1:]), index)
        step = environment.step(action.flatten())
        counts = playing & step.valid
        returns += torch.where(counts, step.reward.double(), 0.0)
        lengths += counts
        playing &= ~(step.valid & (step.terminated | step.truncated))
        observation = step.observation
    return returns.view(lead), lengths.view(lead)
