"""Arithmetic and memory traffic of one step against the machine's measured peaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.speed.timing import build, cpu_per_call, measure_peaks
from ensemblepp.types import Transition

_FLOAT = 4  # bytes


def count_update(replicas: int, dim: int, members: int) -> tuple[float, float]:
    """Return FLOPs and bytes of one rank-1 update; a multiplication and an addition are two FLOPs.

    The block [mu | A | S] has n = d (1 + M + d) numbers. x^T [mu | A | S] reads it (2 n FLOPs), S f reads S again
    (2 d^2), and the rank-1 step reads and writes the block (2 n). Vectors of length d and M are not counted.
    """
    block = dim * (1 + members + dim)
    return replicas * (4.0 * block + 2.0 * dim**2), replicas * _FLOAT * (3.0 * block + dim**2)


def count_act(replicas: int, dim: int, members: int, arms: int) -> tuple[float, float]:
    """Return FLOPs and bytes of one decision: mu + A zeta reads d (1 + M) numbers, the scores read K d."""
    numbers = dim * (1 + members) + arms * dim
    return replicas * 2.0 * numbers, replicas * _FLOAT * float(numbers)


def bound_seconds(flops: float, moved: float, resident: float, peaks: Mapping[str, Any]) -> float:
    """Return the least time for `flops` and `moved` bytes: the slower of arithmetic and memory at their peaks.

    The bandwidth is that of the smallest measured buffer that holds the `resident` bytes, or of the largest one.
    """
    levels = peaks["bandwidth"]
    fits = [level["gb_per_second"] for level in levels if resident <= 1.05e6 * level["megabytes"]]
    bandwidth = fits[0] if fits else levels[-1]["gb_per_second"]
    return float(max(flops / peaks["sgemm_gflops"], moved / bandwidth) / 1e9)


def measure_roofline(config: Mapping[str, Any]) -> dict[str, Any]:
    """Time `update` and `act`, as an agent and as bare posterior arithmetic, over sizes and replicas."""
    peaks = measure_peaks()
    rows = [
        _measure(problem, replicas, config["seed"], peaks)
        for problem in config["roofline"]["problems"]
        for replicas in config["roofline"]["num_replicas"]
    ]
    return {"peaks": peaks, "rows": rows}


def _measure(problem: Mapping[str, int], replicas: int, seed: int, peaks: Mapping[str, Any]) -> dict[str, Any]:
    agent, environment = build(problem, replicas, seed)
    contexts, _ = environment.observe()
    assert isinstance(contexts, torch.Tensor)
    decision = agent.act(contexts)
    index, perturbation = agent.draw_index(1), agent.draw_perturbation(1)
    assert index is not None
    reward = environment.step(decision).reward
    posterior, transition = agent.posterior, Transition(decision.features, reward, decision.arm)
    dim, members, arms = agent.feature_dim, agent.index_dim, problem["num_arms"]
    update, act = count_update(replicas, dim, members), count_act(replicas, dim, members, arms)
    resident = replicas * _FLOAT * dim * (1.0 + members + dim)
    timed = {
        "update": (
            (*update, resident),
            lambda: agent.update(transition),
            lambda: posterior.update(decision.features, reward, perturbation),
        ),
        "act": (
            (*act, act[1]),
            lambda: agent.act(contexts),
            lambda: posterior.score(contexts, posterior.sample(index)),
        ),
    }
    row: dict[str, Any] = {"feature_dim": dim, "index_dim": members, "num_arms": arms, "num_replicas": replicas}
    for name, ((flops, moved, held), whole, bare) in timed.items():
        bound = bound_seconds(flops, moved, held, peaks)
        agent_time, posterior_time = cpu_per_call(whole), cpu_per_call(bare)
        row[name] = {
            "flops": flops,
            "bytes": moved,
            "resident_bytes": held,
            "agent_us": agent_time * 1e6,
            "posterior_us": posterior_time * 1e6,
            "bound_us": bound * 1e6,
            "agent_share": bound / agent_time,
            "posterior_share": bound / posterior_time,
        }
    return row
