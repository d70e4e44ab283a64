"""Why precision matters with fewer members than dimensions on the sphere: rounding leads out of the span."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ensemblepp.agents import LinearEnsemblePP
from ensemblepp.envs import LinearBandit
from ensemblepp.runs import run_bandit
from ensemblepp.types import Transition


class SpanWatcher(LinearEnsemblePP):
    """Ensemble++ that notes which share of what it plays lies outside the span of its prior directions.

    Every action is played on |x| = 1, so the share is |x - P x| with the projection P onto the span of A_0.
    """

    steps: tuple[int, ...] = ()
    confined = False
    """True plays P theta instead of theta: what exact arithmetic would do by itself."""

    def __init__(self, feature_dim: int, **options: Any) -> None:
        super().__init__(feature_dim, **options)
        self.basis = torch.linalg.qr(self.posterior.factor.double())[0]
        self.outside: dict[int, float] = {}
        self._played = 0

    def project(self, vector: Tensor) -> Tensor:
        """Return P v for v of shape (replicas, batch, feature_dim)."""
        inside: Tensor = ((vector.double() @ self.basis) @ self.basis.mT).to(vector.dtype)
        return inside

    def parameter(self, index: Tensor | None) -> Tensor:
        parameter = super().parameter(index)
        return self.project(parameter) if self.confined else parameter

    def update(self, transition: Transition) -> dict[str, Tensor]:
        self._played += 1
        if self._played in self.steps:
            outside = torch.linalg.vector_norm(transition.features - self.project(transition.features), dim=-1)
            self.outside[self._played] = float(outside.median())
        return super().update(transition)


def measure_span(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return regret and outside share of one cell in float32, in float64, and in float64 confined to the span.

    `floor` is the regret of playing the best action inside the span at every step, T (|theta| - |P theta|), the mean
    over replicas: no learner that stays inside can have less.
    """
    options = config["cells"][config["span"]["cell"]]
    setting = {key: value for key, value in config["settings"][options["setting"]].items() if key != "title"}
    steps = tuple(config["span"]["steps"])
    rows = {}
    for name, confined in (("float32", False), ("float64", False), ("float64, confined to the span", True)):
        dtype = getattr(torch, name.split(",")[0])
        shared = {"num_replicas": options["num_replicas"], "seed": config["seed"], "dtype": dtype}
        environment = LinearBandit(**setting, **config["environment"], **shared)
        agent = SpanWatcher(setting["feature_dim"], index_dim=options["index_dim"], **config["model"], **shared)
        agent.steps, agent.confined = steps, confined
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="index_dim of SpanWatcher")
            regret = run_bandit(agent, environment, config["horizon"]).cumulative_regret[:, -1]
        theta = environment.parameter.unsqueeze(1).double()
        lost = torch.linalg.vector_norm(theta, dim=-1) - torch.linalg.vector_norm(agent.project(theta), dim=-1)
        rows[name] = {
            "mean": round(float(regret.mean()), 1),
            "standard_error": round(float(regret.std(ddof=1)) / math.sqrt(len(regret)), 1),
            "floor": round(config["horizon"] * float(lost.mean()), 1),
            "outside": [float(f"{agent.outside[step]:.3g}") for step in steps],
        }
    return {"cell": config["span"]["cell"], "steps": list(steps), "rows": rows}
