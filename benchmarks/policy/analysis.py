"""Tables and plot of the policy benchmark from its stored numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import common
from benchmarks.policy.memory import FORMS, TASKS
from ensemblepp.intervals import Interval, bootstrap_interval, paired_difference

TASK_TITLES = {
    "energy": "token-baseline energy",
    "centered": "score-centred loss with TIS, forward and backward",
}
FORM_TITLES = {"blocks": "ours, in blocks", "naive": "naive, whole vocabulary in float32"}
PAIRS = (("otb", "none"), ("seq_tis_otb", "seq_tis"))


def best_rate(config: Mapping[str, Any], cells: Mapping[str, Any], mismatch: str, method: str) -> str:
    """Return the learning rate with the highest mean return on the tuning seed; the smaller one of equals."""
    tried = {str(rate): cells[f"tuning/{mismatch}/{method}/{rate}"] for rate in config["game"]["rates"]}
    return max(tried, key=lambda rate: np.mean(tried[rate]["returns"][-1]))


def final(
    config: Mapping[str, Any], cells: Mapping[str, Any], mismatch: str, method: str, field: str, rate: str = ""
) -> list[float]:
    """Return one figure per replica after the last update, at the method's own rate unless one is named."""
    rate = rate or best_rate(config, cells, mismatch, method)
    values: list[float] = cells[f"main/{mismatch}/{method}/{rate}"][field][-1]
    return values


def mismatch_table(config: Mapping[str, Any], cells: Mapping[str, Any], mismatch: str) -> str:
    """Return one mismatch's methods in the order of the configuration."""
    rates = [str(rate) for rate in config["game"]["rates"]]
    rows = []
    for method, spec in config["methods"].items():
        row = [spec["title"], best_rate(config, cells, mismatch, method)]
        row += [str(bootstrap_interval(final(config, cells, mismatch, method, field))) for field in ("returns", "kl")]
        row += [f"{np.mean(final(config, cells, mismatch, method, 'returns', rate)):.3f}" for rate in rates]
        rows.append(row)
    header = ["method", "rate", "final true return", "final KL(q, p), nats", *(f"return at {rate}" for rate in rates)]
    return common.make_table(header, rows)


def baseline_table(config: Mapping[str, Any], cells: Mapping[str, Any]) -> str:
    """Return the optimal token baseline minus the group mean, on equal replicas."""
    rows = []
    for mismatch, spec in config["mismatches"].items():
        row = [spec["title"]]
        for ours, theirs in PAIRS:
            values = (final(config, cells, mismatch, method, "returns") for method in (ours, theirs))
            row.append(str(paired_difference(*values)))
        rows.append(row)
    return common.make_table(["mismatch", "no correction", "sequence TIS"], rows)


def correction_table(config: Mapping[str, Any], cells: Mapping[str, Any]) -> str:
    """Return every correction minus no correction under group means, on equal replicas."""
    mismatches = [name for name in config["mismatches"] if name != "none"]
    rows = []
    for method, spec in config["methods"].items():
        if method != "none" and "baseline" not in spec:
            row = [spec["title"]]
            for mismatch in mismatches:
                values = (final(config, cells, mismatch, each, "returns") for each in (method, "none"))
                row.append(str(paired_difference(*values)))
            rows.append(row)
    return common.make_table(["method", *(config["mismatches"][name]["title"] for name in mismatches)], rows)


def memory_table(figures: Mapping[str, Any]) -> str:
    """Return peak memory beside the logits, and CPU time."""
    rows = []
    for task in TASKS:
        for form in FORMS:
            each = figures[f"{task}/{form}"]
            extra, seconds = each["extra_peak_mib"], each["cpu_seconds"]
            rows.append([TASK_TITLES[task], FORM_TITLES[form], f"{extra:,.0f}", f"{seconds:.1f}"])
    return common.make_table(["what", "how", "peak MiB beside the logits", "CPU seconds"], rows)


def plot(path: Path, config: Mapping[str, Any], cells: Mapping[str, Any]) -> None:
    """Draw final returns and divergences at each method's own rate, with 95 % intervals."""
    figure, axes = plt.subplots(2, len(config["mismatches"]), figsize=(15, 8), sharey=True, layout="constrained")
    methods = list(reversed(config["methods"]))
    for column, (mismatch, spec) in enumerate(config["mismatches"].items()):
        for axis, field in zip(axes[:, column], ("returns", "kl"), strict=True):
            for place, method in enumerate(methods):
                _draw(axis, place, bootstrap_interval(final(config, cells, mismatch, method, field)))
            axis.set_yticks(range(len(methods)), [config["methods"][method]["title"] for method in methods])
            axis.grid(axis="x", alpha=0.3)
        axes[0, column].set_title(spec["title"].replace(", ", ",\n"), fontsize=10)
        axes[0, column].set_xlabel("final true return")
        axes[0, column].set_xlim(0, 1.02)
        axes[1, column].set_xlabel("final KL(sampler, trainer), nats")
        axes[1, column].set_xscale("symlog", linthresh=0.1)
        # On-policy divergences are smaller than a tick: show at least the linear part of the axis.
        axes[1, column].set_xlim(-0.01, max(0.2, axes[1, column].get_xlim()[1]))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(axis: Any, place: int, interval: Interval) -> None:
    low, high = (interval.estimate if end is None else end for end in (interval.low, interval.high))
    axis.plot([low, high], [place, place], color="tab:blue", linewidth=2)
    axis.plot(interval.estimate, place, "o", color="tab:blue")
