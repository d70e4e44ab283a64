"""Clocks and problems that the sections of the speed benchmark share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ensemblepp.agents import LinearEnsemblePP
from ensemblepp.envs import LinearBandit


def build(size: Mapping[str, int], num_replicas: int, seed: int) -> tuple[LinearEnsemblePP, LinearBandit]:
    """Return an agent with default options and its finite linear bandit."""
    agent = LinearEnsemblePP(size["feature_dim"], num_replicas=num_replicas, prior_covariance=10.0, seed=seed)
    environment = LinearBandit(size["feature_dim"], size["num_arms"], num_replicas=num_replicas, seed=seed)
    return agent, environment


def cpu_seconds(action: Callable[[], object]) -> float:
    """Return the processor time of one call."""
    started = time.process_time()
    action()
    return time.process_time() - started


def cpu_per_call(action: Callable[[], object], batch_seconds: float = 0.04, batches: int = 7) -> float:
    """Return the median over batches of the processor seconds per call, after a warm-up."""
    calls, spent = 1, 0.0
    while True:
        spent = cpu_seconds(partial(_repeat, action, calls))
        if spent >= batch_seconds:
            break
        calls = max(calls + 1, min(calls * 10, int(calls * 1.2 * batch_seconds / max(spent, 1e-6))))
    return statistics.median(cpu_seconds(partial(_repeat, action, calls)) / calls for _ in range(batches))


def _repeat(action: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        action()


def measure_peaks() -> dict[str, Any]:
    """Return this machine's one-thread peaks: sgemm GFLOP/s, and GB/s in buffers of several sizes.

    The bandwidth of a buffer is the best over kernels that read it (sum, dot, matrix-vector product) and that read
    and write it (copy, in-place addition); a copy counts both its sides.
    """
    square = torch.randn(1536, 1536)
    out = torch.empty_like(square)
    gemm = cpu_per_call(lambda: torch.mm(square, square, out=out), 0.2, 5)
    peaks: dict[str, Any] = {"sgemm_gflops": 2 * 1536**3 / gemm / 1e9, "bandwidth": []}
    for megabytes in (0.25, 8.0, 200.0):
        count = int(megabytes * 1e6 / 4)
        buffer, vector = torch.ones(count), torch.ones(250)
        front, back = buffer[: count // 2], buffer[count // 2 : count // 2 * 2]
        kernels: dict[str, Callable[[], object]] = {
            "sum": buffer.sum,
            "dot": partial(torch.dot, front, back),
            "matrix-vector": partial(torch.mv, buffer[: count // 250 * 250].view(-1, 250), vector),
            "copy": partial(front.copy_, back),
            "in place": partial(buffer.add_, 0.0),
        }
        moved = {name: 2.0 if name == "in place" else 1.0 for name in kernels}
        speed = {
            name: 4 * count * moved[name] / cpu_per_call(kernel, 0.05, 5) / 1e9 for name, kernel in kernels.items()
        }
        best = max(speed, key=lambda name: speed[name])
        peaks["bandwidth"].append({"megabytes": megabytes, "gb_per_second": speed[best], "kernel": best})
    return peaks
