"""Build and play one method on one game."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from ensemblepp import agents, envs
from ensemblepp.runs import run_bandit

FOLDER = Path(__file__).resolve().parent
# What a linear model must assume of the rewards; the networks measure it themselves.
LINEAR_MODEL: dict[str, dict[str, float]] = {
    "quadratic": {"noise_scale": 0.1, "prior_covariance": 1.0},
    "quadratic_fixed": {"noise_scale": 0.1, "prior_covariance": 1.0},
    "neural_regression": {"noise_scale": 0.1, "prior_covariance": 0.01},
    "linear": {"noise_scale": 1.0, "prior_covariance": 10.0},
    "vector_quadratic": {"noise_scale": 0.1, "prior_covariance": 1.0},
    "wheel": {"noise_scale": 0.01, "prior_covariance": 2500.0},
    "wheel_told": {"noise_scale": 0.01, "prior_covariance": 2500.0},
    "neural_classification": {"noise_scale": 0.5, "prior_covariance": 0.01},
}


def load_config(path: Path = FOLDER / "config.yaml") -> dict[str, Any]:
    """Return the sweep."""
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return config


def play(
    config: Mapping[str, Any],
    method: str,
    game: str,
    chosen: Mapping[str, Any],
    *,
    num_replicas: int,
    seed: int,
    horizon: int,
) -> dict[str, Any]:
    """Play one method with its chosen options on one game and return the regrets of every replica."""
    torch.set_num_threads(1)
    spec, problem = config["methods"][method], config["games"][game]
    shared: dict[str, Any] = {"num_replicas": num_replicas, "seed": seed}
    environment = getattr(envs, problem["environment"])(**problem["options"], **shared)
    options = {**spec["options"], **chosen}
    kind = getattr(agents, spec["agent"])
    if kind is agents.GaussianProcessOracle:
        agent = kind.for_quadratic(environment, **options, seed=seed)
    else:
        if issubclass(kind, agents.LinearAgent):
            options |= LINEAR_MODEL[game]
        elif issubclass(kind, agents.NeuralAgent):
            network = {} if kind is agents.RandomFeatureEnsemblePP else config["network"]
            options = {**network, **problem.get("told", {}), **options}
        num_arms = environment.num_arms if environment.per_arm else None
        agent = kind(environment.feature_dim, num_arms=num_arms, **options, **shared)
    runs = run_bandit(agent, environment, horizon)
    steps = sorted({min(1000, horizon), horizon})
    return {
        "options": options,
        "steps": steps,
        "regret": {str(step): [round(float(v), 2) for v in runs.cumulative_regret[:, step - 1]] for step in steps},
        "cpu_ms_per_learner_step": float(f"{1e3 * runs.cpu_seconds / (horizon * num_replicas):.3g}"),
        "stopped": {str(replica): step for replica, step in runs.stopped.items()},
    }
