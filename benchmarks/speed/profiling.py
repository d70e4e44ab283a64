"""Where the time of one step goes: by part of the library, and by torch operator."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.speed.timing import build
from ensemblepp.agents import LinearEnsemblePP
from ensemblepp.envs import LinearBandit
from ensemblepp.runs import run_bandit

_NUM_OPERATORS = 10
_OPERATOR_STEPS = 100  # the profiler takes far longer to sort its records than to collect them


class _Clock:
    """Processor time per named part; a part's time does not count in the part that called it."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def wrap(self, owner: object, method: str, part: str) -> None:
        """Time every call of `owner.method`, on this one object."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            started = time.process_time()
            try:
                return original(*arguments, **options)
            finally:
                total = time.process_time() - started
                self.spent[part] += total - self._inner.pop()
                if self._inner:
                    self._inner[-1] += total

        setattr(owner, method, timed)


def _wrap_parts(clock: _Clock, agent: LinearEnsemblePP, environment: LinearBandit) -> None:
    parts = [
        (environment, "observe", "environment"),
        (environment, "step", "environment"),
        (agent, "act", "act: finiteness check, gathering features, the rest"),
        (agent, "_check_contexts", "act: shape and dtype check"),
        (agent, "_choose", "act: argmax with random tie-break"),
        (agent.posterior, "sample", "act: posterior sample mu + A zeta"),
        (agent.posterior, "score", "act: scores of all arms"),
        (agent, "draw_index", "drawing index and perturbation"),
        (agent, "draw_perturbation", "drawing index and perturbation"),
        (agent.streams, "state_dict", "generator snapshots for rollback"),
        (agent, "update", "update: the rest"),
        (agent.posterior, "_check_data", "update: validation and target block"),
        (agent.posterior, "_condition", "update: rank-1 step"),
    ]
    for owner, method, part in parts:
        clock.wrap(owner, method, part)


def measure_profile(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the split of one `run_bandit` step, by part and by operator, for every size."""
    options, seed = config["profile"], config["seed"]
    result: dict[str, Any] = {**options, "sizes": {}}
    for name, size in config["sizes"].items():
        run_bandit(*build(size, options["num_replicas"], seed), 200)  # warm-up
        plain = run_bandit(*build(size, options["num_replicas"], seed), options["steps"]).cpu_seconds
        result["sizes"][name] = {
            **size,
            "step_us": plain / options["steps"] * 1e6,
            "parts": _split_by_part(size, options, seed),
            "operators": _split_by_operator(size, options, seed),
        }
    return result


def _split_by_part(size: Mapping[str, int], options: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    agent, environment = build(size, options["num_replicas"], seed)
    clock = _Clock()
    _wrap_parts(clock, agent, environment)
    runs = run_bandit(agent, environment, options["steps"])
    clock.spent["loop: records"] = runs.cpu_seconds - sum(clock.spent.values())
    return [
        {"part": part, "step_us": spent / options["steps"] * 1e6, "share": spent / runs.cpu_seconds}
        for part, spent in sorted(clock.spent.items(), key=lambda item: -item[1])
    ]


def _split_by_operator(size: Mapping[str, int], options: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    agent, environment = build(size, options["num_replicas"], seed)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run_bandit(agent, environment, _OPERATOR_STEPS)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return [
        {
            "operator": event.key,
            "calls_per_step": round(event.count / _OPERATOR_STEPS, 2),
            "share_of_operator_time": event.self_cpu_time_total / total,
        }
        for event in events[:_NUM_OPERATORS]
    ]
