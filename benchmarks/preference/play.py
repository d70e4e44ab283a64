"""Ask one rule's questions of one judge, all replicas at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.preference.problem import Pool, as_tensors
from ensemblepp.duel_runs import run_duels
from ensemblepp.envs import PreferenceDuels
from ensemblepp.preferences import PreferenceLearner

_BATCH_STEPS = 60


def play(
    config: Mapping[str, Any],
    pool: Pool,
    rule: str,
    scale: str,
    *,
    candidates: str,
    prior_scale: float,
    seed: int,
    num_replicas: int,
) -> dict[str, Any]:
    """Return accuracy curve, regret, best-of-K regret and what a batch fit of the same answers reaches."""
    torch.set_num_threads(1)
    features, reward = as_tensors(pool)
    environment = PreferenceDuels(
        features,
        reward,
        num_candidates=config["num_candidates" if candidates == "redrawn" else "num_fixed"],
        candidates=candidates,  # type: ignore[arg-type]
        reward_scale=None if scale == "fitted" else float(scale),
        num_replicas=num_replicas,
        seed=seed,
    )
    learner = PreferenceLearner(
        environment.feature_dim,
        index_dim=config["index_dim"],
        prior_scale=prior_scale,
        num_replicas=num_replicas,
        seed=seed,
    )
    runs = run_duels(
        learner, environment, config["horizon"], eval_period=config["eval_period"], seed=seed, **config["rules"][rule]
    )
    learner.mean = torch.zeros_like(learner.mean)
    learner.refit(_BATCH_STEPS)
    batch = environment.accuracy(learner.scores(environment.features.expand(num_replicas, -1, -1)).mean)
    accuracy = runs.metrics["eval/accuracy"]
    return {
        "prior_scale": prior_scale,
        "evaluated": runs.evaluated.tolist(),
        "accuracy": [[round(float(v), 5) for v in row] for row in accuracy],
        "batch_accuracy": [round(float(v), 5) for v in batch],
        "regret": [round(float(v), 3) for v in runs.cumulative_regret[:, -1]],
        "best_of_regret": [round(float(v), 5) for v in runs.metrics["eval/best_of_regret"][:, -1]],
        "cpu_ms_per_question": round(1e3 * runs.cpu_seconds / (config["horizon"] * num_replicas), 4),
    }


def queries_to(cell: Mapping[str, Any], accuracy: float, horizon: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return, per replica, the first question after which the accuracy is reached; the horizon if it never is."""
    reached = np.array(cell["accuracy"]) >= accuracy
    first = np.array(cell["evaluated"], dtype=np.float64)[reached.argmax(1)]
    return np.where(reached.any(1), first, float(horizon))
