"""What value runs write down: every episode, every evaluation, and training metrics at regular steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ensemblepp.value_types import ValueStep

WINDOW = 100
"""Episodes over which `rollout/ep_rew_mean` and `rollout/ep_len_mean` average."""


class EpisodeLog:
    """Returns and lengths of all finished episodes of every replica, and of those that are running."""

    def __init__(self, num_replicas: int, device: torch.device | str) -> None:
        self._returns = torch.zeros(num_replicas, dtype=torch.float64, device=device)
        self._lengths = torch.zeros(num_replicas, dtype=torch.int64, device=device)
        self._rows: list[tuple[int, int, float, int]] = []
        self._recent: list[list[tuple[float, int]]] = [[] for _ in range(num_replicas)]
        self.counts = [0] * num_replicas
        """Finished episodes of each replica."""

    def add(self, step: ValueStep, number: int) -> None:
        """Count one step of every replica, the `number`-th; rows that are not valid are left out."""
        self._returns += torch.where(step.valid, step.reward.double(), 0.0)
        self._lengths += step.valid
        ended = step.valid & (step.terminated | step.truncated)
        if not ended.any():
            return
        returns, lengths = self._returns.tolist(), self._lengths.tolist()
        for replica in ended.nonzero().flatten().tolist():
            self._enter(replica, number, returns[replica], lengths[replica])
        self._returns.masked_fill_(ended, 0.0)
        self._lengths.masked_fill_(ended, 0)

    def _enter(self, replica: int, number: int, episode_return: float, length: int) -> None:
        self._rows.append((replica, number, episode_return, length))
        self.counts[replica] += 1
        recent = self._recent[replica]
        recent.append((episode_return, length))
        del recent[:-WINDOW]

    def drop_running(self) -> None:
        """Forget the episodes that have not ended: their environments are gone."""
        self._returns.zero_()
        self._lengths.zero_()

    def means(self) -> dict[str, NDArray[np.float64]]:
        """Return the means over each replica's last `WINDOW` episodes, (replicas,); NaN before the first."""
        means = [np.mean(recent, axis=0) if recent else np.full(2, np.nan) for recent in self._recent]
        table = np.array(means, dtype=np.float64)
        return {"rollout/ep_rew_mean": table[:, 0], "rollout/ep_len_mean": table[:, 1]}

    def table(self) -> dict[str, NDArray[Any]]:
        """Return all finished episodes in the order of their ends: replica, step of the end, return, length."""
        columns = np.array(self._rows, dtype=np.float64).reshape(-1, 4).T
        return {
            "replica": columns[0].astype(np.int64),
            "step": columns[1].astype(np.int64),
            "return": columns[2],
            "length": columns[3].astype(np.int64),
        }

    def to_csv(self) -> str:
        """Return the episodes as lines `replica,episode,step,return,length`, episodes counted from 1."""
        counts = [0] * len(self.counts)
        lines = ["replica,episode,step,return,length\n"]
        for replica, step, episode_return, length in self._rows:
            counts[replica] += 1
            lines.append(f"{replica},{counts[replica]},{step},{episode_return!r},{length}\n")
        return "".join(lines)

    def state_dict(self) -> dict[str, Any]:
        rows = torch.tensor(self._rows, dtype=torch.float64).view(-1, 4)
        return {"rows": rows, "returns": self._returns.clone(), "lengths": self._lengths.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._returns.copy_(state["returns"])
        self._lengths.copy_(state["lengths"])
        self.__dict__ |= {"_rows": [], "_recent": [[] for _ in self.counts], "counts": [0] * len(self.counts)}
        for replica, step, episode_return, length in state["rows"].tolist():
            self._enter(int(replica), int(step), episode_return, int(length))


class Curves:
    """Metrics measured at some steps, one number per replica."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._points: dict[str, dict[int, list[float]]] = {}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write down metrics, each (replicas,), of one step."""
        for name, values in metrics.items():
            row = values.tolist()
            self._points.setdefault(name, {})[step] = row

    def at(self, step: int) -> dict[str, float]:
        """Return the means over replicas of what was measured at a step, without those that have no value."""
        rows = {name: np.array(points[step]) for name, points in self._points.items() if step in points}
        return {name: float(row[~np.isnan(row)].mean()) for name, row in rows.items() if not np.isnan(row).all()}

    def table(self) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
        """Return all steps (points,), and every metric (replicas, points), NaN where it was not measured."""
        steps = sorted({step for points in self._points.values() for step in points})
        missing = [np.nan] * self._num_replicas
        return np.array(steps, dtype=np.int64), {
            name: np.array([points.get(step, missing) for step in steps], dtype=np.float64).T
            for name, points in self._points.items()
        }

    def state_dict(self) -> dict[str, Any]:
        # Metric names hold slashes, which separate keys in a checkpoint.
        return {
            "names": list(self._points),
            "steps": {str(i): list(points) for i, points in enumerate(self._points.values())},
            "values": {
                str(i): torch.tensor(list(points.values()), dtype=torch.float64)
                for i, points in enumerate(self._points.values())
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._points = {}
        for i, name in enumerate(state["names"]):
            values: Tensor = state["values"][str(i)]
            self._points[name] = dict(zip(state["steps"][str(i)], values.tolist(), strict=True))
