"""What batching replicas saves, and whether a step stays as cheap as the run grows old."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.speed.timing import build, cpu_seconds
from ensemblepp.envs import LinearBandit
from ensemblepp.runs import run_bandit
from ensemblepp.types import Contexts


def measure_batching(config: Mapping[str, Any]) -> dict[str, Any]:
    """Compare one run of R replicas with R runs of one replica, all in this warm process."""
    options, seed = config["batching"], config["seed"]
    replicas, horizon = options["num_replicas"], options["horizon"]
    result: dict[str, Any] = {"num_replicas": replicas, "horizon": horizon, "sizes": {}}
    for name, size in config["sizes"].items():
        _play(size, 1, 200, seed)  # warm-up
        together, apart = [], []
        for repeat in range(options["repeats"]):
            # Construction counts too: whoever runs one replica at a time builds every one of them.
            together.append(cpu_seconds(partial(_play, size, replicas, horizon, seed + repeat)))
            singles = [cpu_seconds(partial(_play, size, 1, horizon, seed + i)) for i in range(replicas)]
            apart.append(sum(singles))
        ratios = [one / many for one, many in zip(together, apart, strict=True)]
        ratio, target = statistics.median(ratios), options["target"][name]
        result["sizes"][name] = {
            **size,
            "together_cpu_seconds": together,
            "apart_cpu_seconds": apart,
            "ratios": ratios,
            "ratio": ratio,
            "target": target,
            "met": ratio <= target,
            "curve": _curve(size, options["curve"], seed),
        }
    return result


def _curve(size: Mapping[str, int], options: Mapping[str, Any], seed: int) -> list[dict[str, float]]:
    """Return the CPU time of one step, of all replicas and of each, over the number of replicas."""
    points = []
    for replicas in options["num_replicas"]:
        spent = [_play(size, replicas, options["horizon"], seed) for _ in range(options["repeats"])]
        step = statistics.median(spent) / options["horizon"] * 1e6
        points.append({"num_replicas": replicas, "step_us": step, "step_us_per_replica": step / replicas})
    return points


def _play(size: Mapping[str, int], replicas: int, horizon: int, seed: int) -> float:
    return run_bandit(*build(size, replicas, seed), horizon).cpu_seconds


class Stopwatch(LinearBandit):
    """A bandit that notes the processor time each time another `period` steps begin."""

    period = 0

    def observe(self) -> tuple[Contexts, None]:
        if not hasattr(self, "marks"):
            self.marks: list[float] = []
            self.played = 0
        if self.played % self.period == 0:
            self.marks.append(time.process_time())
        self.played += 1
        return super().observe()


def measure_flatness(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the CPU time per step in equal windows of one long run; the median over repeats of each window."""
    options, seed = config["flatness"], config["seed"]
    size, horizon, windows = config["sizes"][options["size"]], options["horizon"], options["windows"]
    result: dict[str, Any] = {**size, "horizon": horizon, "windows": windows, "replicas": []}
    for replicas in options["num_replicas"]:
        repeats = []
        for _ in range(options["repeats"]):
            agent, _unused = build(size, replicas, seed)
            environment = Stopwatch(size["feature_dim"], size["num_arms"], num_replicas=replicas, seed=seed)
            environment.period = horizon // windows
            run_bandit(agent, environment, horizon)
            marks = [*environment.marks, time.process_time()]
            repeats.append([(b - a) / environment.period * 1e6 for a, b in itertools.pairwise(marks)])
        step = [statistics.median(window) for window in zip(*repeats, strict=True)]
        # The first window warms the process up, so the trend is taken from the second on.
        half = len(step) // 2
        trend = statistics.mean(step[half:]) / statistics.mean(step[1:half])
        result["replicas"].append({"num_replicas": replicas, "step_us": step, "late_over_early": trend})
    return result
