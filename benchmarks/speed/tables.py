"""The result file as Markdown: one block of text per section of the README."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.common import make_table


def _sizes(size: Mapping[str, Any]) -> str:
    return f"d = {size['feature_dim']}, {size['num_arms']:,} arms"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.0995 else f"{100 * share:.0f} %"


def batching(result: Mapping[str, Any]) -> str:
    """Return the ratio table and the curve over replicas."""
    ratios, curve = [], []
    for size in result["sizes"].values():
        repeats = ", ".join(f"{ratio:.4f}" for ratio in size["ratios"])
        together, apart = (statistics.median(size[f"{name}_cpu_seconds"]) for name in ("together", "apart"))
        verdict = "met" if size["met"] else "missed"
        target = f"{size['target']:g} ({verdict})"
        ratios.append((_sizes(size), f"{together:.2f}", f"{apart:.2f}", repeats, f"1/{1 / size['ratio']:.1f}", target))
    for points in zip(*(size["curve"] for size in result["sizes"].values()), strict=True):
        cells = [f"{point[key]:,.1f}" for point in points for key in ("step_us", "step_us_per_replica")]
        curve.append((points[0]["num_replicas"], *cells))
    replicas = result["num_replicas"]
    header = ("problem", f"{replicas} together, CPU s", f"{replicas} apart, CPU s", "ratios", "median", "target")
    names = [_sizes(size) for size in result["sizes"].values()]
    curve_header = ["replicas", *(f"{name}: {unit}" for name in names for unit in ("µs a step", "per replica"))]
    return make_table(header, ratios) + "\n\n" + make_table(curve_header, curve)


def latency(result: Mapping[str, Any]) -> str:
    """Return one row per contestant and number of threads."""
    header = (
        "model",
        "library",
        "threads",
        "calls",
        *(f"{verb} {quantile}" for verb in ("decide", "learn") for quantile in ("p50", "p95", "p99", "CPU")),
    )
    rows = []
    for run in result["runs"]:
        for row in run["contestants"]:
            cells = [f"{row[verb][key]:.3g}" for verb in ("decide", "learn") for key in row[verb]]
            rows.append((row["model"], row["library"], run["threads"], row["calls"], *cells))
    rows.sort(key=lambda row: (row[0], row[2]))
    absent = f"\n\nNot installed, so not measured: {', '.join(result['absent'])}." if result["absent"] else ""
    return make_table(header, rows) + absent


def flatness(result: Mapping[str, Any]) -> str:
    """Return the CPU time per step of every window."""
    period = result["horizon"] // result["windows"]
    header = ("replicas", *(f"to {period * (i + 1):,}" for i in range(result["windows"])), "late / early")
    rows = [
        (row["num_replicas"], *(f"{step:.0f}" for step in row["step_us"]), f"{row['late_over_early']:.3f}")
        for row in result["replicas"]
    ]
    return make_table(header, rows)


def roofline(result: Mapping[str, Any]) -> str:
    """Return the measured peaks and one row per size."""
    peaks = result["peaks"]
    bandwidth = ", ".join(
        f"{level['gb_per_second']:.0f} GB/s in {level['megabytes']:g} MB ({level['kernel']})"
        for level in peaks["bandwidth"]
    )
    header = ["d", "M", "arms", "replicas"]
    for verb in ("update", "act"):
        header += [f"{verb} MFLOP", "MB", "bound µs", "posterior µs", "share", "agent µs", "share"]
    rows = []
    for row in result["rows"]:
        cells = [row["feature_dim"], row["index_dim"], row["num_arms"], row["num_replicas"]]
        for verb in ("update", "act"):
            one = row[verb]
            cells += [f"{one['flops'] / 1e6:.3g}", f"{one['bytes'] / 1e6:.3g}", f"{one['bound_us']:.3g}"]
            cells += [f"{one['posterior_us']:.4g}", _percent(one["posterior_share"])]
            cells += [f"{one['agent_us']:.4g}", _percent(one["agent_share"])]
        rows.append(cells)
    return f"Peaks: sgemm {peaks['sgemm_gflops']:.0f} GFLOP/s; {bandwidth}.\n\n{make_table(header, rows)}"


def profile(result: Mapping[str, Any]) -> str:
    """Return parts and operators of a step, one pair of tables per size."""
    blocks = []
    for size in result["sizes"].values():
        title = f"{_sizes(size)}, {result['num_replicas']} replicas: {size['step_us']:.0f} µs a step"
        parts = [(row["part"], f"{row['step_us']:.1f}", f"{row['share']:.1%}") for row in size["parts"]]
        operators = [
            (f"`{row['operator']}`", row["calls_per_step"], f"{row['share_of_operator_time']:.1%}")
            for row in size["operators"]
        ]
        blocks += [f"### {title}", make_table(("part", "µs", "share"), parts)]
        blocks += [make_table(("torch operator", "calls a step", "share of operator time"), operators)]
    return "\n\n".join(blocks)
