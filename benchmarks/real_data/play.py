"""Build and play one method on one set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.real_data.full_labels import play_full_labels
from benchmarks.real_data.vowpal_wabbit import VowpalWabbit
from ensemblepp import agents, envs
from ensemblepp.runs import run_bandit

FOLDER = Path(__file__).resolve().parent


def load_config(path: Path = FOLDER / "config.yaml") -> dict[str, Any]:
    """Return the sweep."""
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for spec in config["methods"].values():
        spec.setdefault("grid", {})
    return config


def state_bytes(state: Any) -> int:
    """Return the bytes of all tensors in a nested state."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(state_bytes(part) for part in state.values()) if isinstance(state, Mapping) else 0


def play(
    config: Mapping[str, Any],
    method: str,
    game: str,
    chosen: Mapping[str, Any],
    *,
    num_shuffles: int,
    seed: int,
    horizon: int,
) -> dict[str, Any]:
    """Play one method with its chosen options on one set and return the regret of every shuffle."""
    torch.set_num_threads(1)
    spec, problem = config["methods"][method], config["games"][game]
    kind = getattr(agents, spec["agent"], None)
    linear = kind is not None and issubclass(kind, agents.LinearAgent)
    options = {**spec["options"], **chosen}
    shared: dict[str, Any] = {"num_replicas": num_shuffles, "seed": seed}
    # Networks and random features bring a constant of their own.
    environment = getattr(envs, problem["environment"])(**problem["options"], intercept=linear, **shared)
    cell: dict[str, Any] = {"options": options}
    if spec["agent"] == "full_labels":
        regret, seconds = play_full_labels(environment, horizon, seed)
    else:
        agent: Any
        if kind is None:
            agent = VowpalWabbit(environment.num_arms, exploration=options["exploration"], **shared)
        else:
            told = {"reward_scale": problem["reward_scale"]} if "reward_scale" in problem else {}
            if linear:
                scale = told.get("reward_scale", 1.0)
                variance = (config["linear"]["prior_sd"] * scale) ** 2 / environment.feature_dim
                options |= {"noise_scale": config["linear"]["noise_scale"] * scale, "prior_covariance": variance}
            elif kind is agents.RandomFeatureEnsemblePP:
                options = {**told, **options}
                if options.get("noise_scale") is not None:  # stated for rewards of 0 and 1
                    options["noise_scale"] *= told.get("reward_scale", 1.0)
            else:
                options = {**told, **config["network"], **options}
            num_arms = environment.num_arms if environment.per_arm else None
            agent = kind(environment.feature_dim, num_arms=num_arms, **options, **shared)
        runs = run_bandit(agent, environment, horizon)
        regret, seconds = runs.cumulative_regret, runs.cpu_seconds
        cell["stopped"] = {str(replica): step for replica, step in runs.stopped.items()}
        if kind is not None:
            cell["kib_per_learner"] = round(state_bytes(agent.state_dict()) / num_shuffles / 1024)
    marks = sorted({max(1, horizon // 10), horizon})
    cell["regret"] = {str(step): [round(float(v), 2) for v in regret[:, step - 1]] for step in marks}
    cell["cpu_ms_per_learner_step"] = float(f"{1e3 * seconds / (horizon * num_shuffles):.3g}")
    return cell
