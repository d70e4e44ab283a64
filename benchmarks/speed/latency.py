"""How long one decision and one lesson take, beside other libraries where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import ROOT
from ensemblepp import OnlineBandit

PEERS = ("mabwiser", "bayesianbandits")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Array = NDArray[np.float64]
Contestant = tuple[Callable[[Array], Any], Callable[[Any, Array], None]]
"""Decide on an observation; learn a reward of one for a decision on it."""

SHARED = "one posterior, features of every arm"
PER_ARM = "one posterior per arm, one context"


def measure_latency(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return latencies for each number of threads, each in a process of its own that starts with that number."""
    threads: list[dict[str, Any]] = []
    for count in config["latency"]["threads"]:
        environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, str(count))
        task = json.dumps({**config["latency"], "seed": config["seed"], "thread_count": count})
        command = [sys.executable, "-m", "benchmarks.speed.latency", task]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        threads.append({"threads": count, "contestants": json.loads(done.stdout)})
    absent = [name for name in PEERS if importlib.util.find_spec(name) is None]
    sizes = {key: config["latency"][key] for key in ("feature_dim", "num_arms")}
    return {**sizes, "absent": absent, "runs": threads}


def contestants(options: Mapping[str, Any]) -> Iterator[tuple[str, str, Callable[[], Contestant]]]:
    """Yield library, kind of model and builder; libraries that are not installed are left out."""
    arms, dim, seed = options["num_arms"], options["feature_dim"], options["seed"]
    yield "ensemblepp", SHARED, lambda: _ensemblepp(OnlineBandit.linear(feature_dim=dim, seed=seed))
    if importlib.util.find_spec("bayesianbandits"):
        yield "bayesianbandits", SHARED, lambda: _bayesianbandits_shared(arms, dim, seed)
    yield "ensemblepp", PER_ARM, lambda: _ensemblepp(OnlineBandit.linear(feature_dim=dim, num_arms=arms, seed=seed))
    if importlib.util.find_spec("bayesianbandits"):
        yield "bayesianbandits", PER_ARM, lambda: _bayesianbandits_per_arm(arms, dim, seed)
    if importlib.util.find_spec("mabwiser"):
        yield "mabwiser", PER_ARM, lambda: _mabwiser(arms, dim, seed)


def _ensemblepp(bandit: OnlineBandit) -> Contestant:
    return bandit.decide, lambda decision, observed: bandit.learn(decision.token, 1.0)


def _bayesianbandits_shared(arms: int, dim: int, seed: int) -> Contestant:
    """One regression on arm features; the features of all arms travel as one long context."""
    library: Any = importlib.import_module("bayesianbandits")

    def featurize(contexts: Array, tokens: list[int]) -> Array:
        features: Array = np.asarray(contexts, dtype=np.float64).reshape(-1, arms, dim)
        chosen: Array = features if len(tokens) == arms else features[:, tokens]
        return chosen.transpose(0, 2, 1)

    agent = library.LipschitzContextualAgent(
        [library.Arm(arm) for arm in range(arms)],
        library.ThompsonSampling(),
        library.FunctionArmFeaturizer(featurize),
        library.NormalRegressor(alpha=1.0, beta=1.0),
        random_seed=seed,
    )
    return (
        lambda observed: agent.pull(observed.reshape(1, -1))[0],
        lambda decision, observed: agent.update(observed.reshape(1, -1), np.ones(1)),
    )


def _bayesianbandits_per_arm(arms: int, dim: int, seed: int) -> Contestant:
    library: Any = importlib.import_module("bayesianbandits")
    models = [library.Arm(arm, learner=library.NormalRegressor(alpha=1.0, beta=1.0)) for arm in range(arms)]
    agent = library.ContextualAgent(models, library.ThompsonSampling(), random_seed=seed)
    for arm, context in enumerate(_first_contexts(arms, dim, seed)):
        agent.select_for_update(arm).update(context[None], np.ones(1))
    return (
        lambda observed: agent.pull(observed[None])[0],
        lambda decision, observed: agent.update(observed[None], np.ones(1)),
    )


def _mabwiser(arms: int, dim: int, seed: int) -> Contestant:
    library: Any = importlib.import_module("mabwiser.mab")
    agent = library.MAB(list(range(arms)), library.LearningPolicy.LinTS(alpha=1.0), seed=seed)
    agent.fit(list(range(arms)), [1.0] * arms, _first_contexts(arms, dim, seed))
    return (
        lambda observed: agent.predict(observed[None]),
        lambda decision, observed: agent.partial_fit([decision], [1.0], observed[None]),
    )


def _first_contexts(arms: int, dim: int, seed: int) -> Array:
    """Return one context per arm: libraries that fit an arm lazily are measured after every arm has one datum."""
    return np.random.default_rng(seed + 1).normal(scale=dim**-0.5, size=(arms, dim))


def _time(contestant: Contestant, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return percentiles of the wall time of one call, and the processor time, over `calls` decisions and lessons."""
    decide, learn = contestant
    shape = (options["num_arms"], options["feature_dim"]) if kind == SHARED else (options["feature_dim"],)
    # Not the contestants' seed: a posterior sample must not repeat the features' random numbers.
    rng = np.random.default_rng(options["seed"] + 2)
    spent: dict[str, list[float]] = {"decide": [], "learn": []}
    cpu = {"decide": 0.0, "learn": 0.0}
    started = time.perf_counter()
    for call in range(-options["warm_up"], options["calls"]):
        observed = rng.standard_normal(shape) / np.sqrt(options["feature_dim"])
        times = [(time.perf_counter(), time.process_time())]
        decision = decide(observed)
        times.append((time.perf_counter(), time.process_time()))
        learn(decision, observed)
        times.append((time.perf_counter(), time.process_time()))
        elapsed = times[-1][0] - started
        if call >= 0:
            for name, before, after in zip(spent, times, times[1:], strict=False):
                spent[name].append(after[0] - before[0])
                cpu[name] += after[1] - before[1]
            if call + 1 >= options["min_calls"] and elapsed > options["max_seconds"]:
                break
        elif elapsed > options["max_seconds"] / 5:  # a slow contestant is warm long before
            break
    calls = len(spent["decide"])
    if calls == 0:
        return _time(contestant, kind, {**options, "warm_up": 0})
    result: dict[str, Any] = {"calls": calls}
    for name, values in spent.items():
        quantiles = np.percentile(np.asarray(values) * 1e3, (50, 95, 99))
        result[name] = dict(zip(("p50_ms", "p95_ms", "p99_ms"), map(float, quantiles), strict=True))
        result[name]["cpu_ms"] = cpu[name] / calls * 1e3
    return result


def _work(options: Mapping[str, Any]) -> None:
    torch.set_num_threads(options["thread_count"])
    rows = []
    for library, kind, build in contestants(options):
        rows.append({"library": library, "model": kind, **_time(build(), kind, options)})
    print(json.dumps(rows))


if __name__ == "__main__":
    _work(json.loads(sys.argv[1]))
