"""What full labels would give: extremely randomised trees that see the class of every row, grown anew at doublings."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ensemblepp.types import Decision

FIRST_BATCH = 10


def play_full_labels(environment: Any, horizon: int, seed: int) -> tuple[NDArray[np.float64], float]:
    """Return the mistakes of each replica up to each step, and the CPU-seconds.

    The first `FIRST_BATCH` rows are guessed uniformly; from then on the trees of all rows before the last doubling
    name the class. No bandit sees this much: a mistake here also shows the right answer.
    """
    from sklearn.ensemble import ExtraTreesClassifier

    start = time.process_time()
    rows, labels = [], []
    arm = torch.zeros(environment.num_replicas, 1, dtype=torch.int64)
    for _ in range(horizon):
        contexts, _ = environment.observe()
        rows.append(contexts[:, 0].numpy())
        labels.append(environment.label[:, 0].numpy())
        environment.step(Decision(arm, contexts))
    x, y = np.stack(rows, axis=1), np.stack(labels, axis=1)
    mistakes = np.full(y.shape, 1 - 1 / environment.num_arms)
    end = FIRST_BATCH
    while end < horizon:
        block = slice(end, min(2 * end, horizon))
        for replica in range(len(y)):
            trees = ExtraTreesClassifier(200, random_state=seed + replica)
            with warnings.catch_warnings():
                # With more classes than half the rows the library wonders whether they are numbers; they are not.
                warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
                trees.fit(x[replica, :end], y[replica, :end])
            mistakes[replica, block] = trees.predict(x[replica, block]) != y[replica, block]
        end *= 2
    return mistakes.cumsum(axis=1), time.process_time() - start
