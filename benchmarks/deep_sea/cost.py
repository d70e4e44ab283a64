"""What a step of learning costs: rate per CPU-second, share of the FLOP floor, and where the time goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import common
from benchmarks.neural_speed.run import sgemm_peak
from ensemblepp.agents import HyperFQI
from ensemblepp.envs import DeepSea
from ensemblepp.value_runs import run_value

_SIZE, _WIDTH, _BATCH, _STEPS, _ROUNDS = 20, 64, 128, 400, 5
# Operators by what they do; all that is left is bookkeeping: views, random numbers, checks, the optimiser's Python.
_KINDS = {
    "matrix products": ("baddbmm", "bmm", "mm", "addmm"),
    "Adam": ("_fused_adam_",),
    "reading and writing rows": ("index_select", "index_copy_", "index_add_", "scatter_add_", "gather"),
    "elementwise and reductions": (
        *("add", "add_", "sub", "mul", "mul_", "div", "div_", "square", "pow", "remainder", "where", "copy_", "cat"),
        *("relu_", "clamp_min_", "threshold_backward", "sum", "mean", "amax", "argmax", "linalg_vector_norm"),
        *("fill_", "zero_"),
    ),
}


def flops(index_dim: int, actions: int = 2) -> int:
    """Return the floating-point operations of the matrix products of one update of one learner.

    Forward passes of s and s' and the backward pass of s (two products per layer); the first layer reads rows.
    """
    forward = 2 * _BATCH * (_WIDTH * _WIDTH + _WIDTH * actions * (1 + index_dim))
    return 4 * forward


def _problem(preset: Mapping[str, Any], replicas: int, seed: int) -> tuple[HyperFQI, DeepSea]:
    environment = DeepSea(_SIZE, num_replicas=replicas, seed=seed)
    agent = HyperFQI((), 2, num_states=environment.num_states, num_replicas=replicas, seed=seed, **preset)
    return agent, environment


def measure(presets: Mapping[str, Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """Return rates of both presets at 1 update per step, the whole loop without evaluation, and a profile."""
    torch.set_num_threads(1)
    rows = []
    for name, preset in presets.items():
        for replicas in (1, 8, 20):
            agent, environment = _problem({**preset, "updates_per_step": 1}, replicas, seed)
            run_value(agent, environment, 100, log_period=100)
            rates = []
            for _ in range(_ROUNDS):
                started = time.process_time()
                run_value(agent, environment, _STEPS, log_period=_STEPS)
                rates.append(replicas * _STEPS / (time.process_time() - started))
            peak = sgemm_peak()
            median = statistics.median(rates)
            work = flops(agent.index_dim)
            rows.append(
                {
                    "preset": name,
                    "index_dim": agent.index_dim,
                    "learners": replicas,
                    "rate": median,
                    "range": [min(rates), max(rates)],
                    "mflop_per_update": work / 1e6,
                    "sgemm_gflops": peak,
                    "share": work * median / peak / 1e9,
                }
            )
    return common.round_floats({"rows": rows, "profile": _profile(presets, seed)}, 3)


def _profile(presets: Mapping[str, Mapping[str, Any]], seed: int) -> dict[str, float]:
    """Return each kind's share of the operators' own time: preset hyper_fqi_optimistic, 8 learners.

    Python between the operators is not traced.
    """
    agent, environment = _problem({**presets["hyper_fqi_optimistic"], "updates_per_step": 1}, 8, seed)
    run_value(agent, environment, 200, log_period=200)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run_value(agent, environment, 200, log_period=200)
    total = sum(event.self_cpu_time_total for event in recorded.key_averages())
    spent = {event.key.removeprefix("aten::"): event.self_cpu_time_total for event in recorded.key_averages()}
    shares = {kind: sum(spent.get(name, 0.0) for name in names) / total for kind, names in _KINDS.items()}
    return shares | {"bookkeeping: views, draws, checks": 1 - sum(shares.values())}


def rate_table(section: Mapping[str, Any]) -> str:
    """Return the rates as Markdown."""
    rows = [
        [
            row["preset"],
            row["index_dim"],
            row["learners"],
            f"{row['rate']:,.0f} ({row['range'][0]:,.0f} to {row['range'][1]:,.0f})",
            f"{row['mflop_per_update']:g}",
            f"{row['sgemm_gflops']:g}",
            f"{row['share']:.0%}",
        ]
        for row in section["rows"]
    ]
    header = ["preset", "M", "learners", "learner-steps per CPU-second", "MFLOP per update", "sgemm GFLOP/s", "share"]
    return common.make_table(header, rows)


def profile_table(section: Mapping[str, Any]) -> str:
    """Return the profile as Markdown."""
    ordered = sorted(section["profile"].items(), key=lambda pair: -pair[1])
    return common.make_table(["where the time goes", "share"], [[kind, f"{share:.0%}"] for kind, share in ordered])
