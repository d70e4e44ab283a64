"""From episodes to solve to tables: means with intervals, bars, growth with size, and the plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from benchmarks import common
from ensemblepp.intervals import bootstrap_interval

_RESAMPLES = 10_000


def counts(cell: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return every learner's episodes to solve, an unsolved one counted at the budget."""
    return np.array([cell["budget"] if each is None else each for each in cell["episodes_to_solve"]], dtype=np.float64)


def unsolved(cell: Mapping[str, Any]) -> int:
    """Return the number of learners that the budget did not suffice for."""
    return sum(each is None for each in cell["episodes_to_solve"])


def judge(config: Mapping[str, Any], cells: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every measured bar with its verdict: met when the mean is at or below it and every learner solved."""
    verdicts = []
    for method, spec in config["methods"].items():
        for size, bar in spec.get("bars", {}).items():
            cell = cells.get(f"{method}/{size}")
            if cell is not None:
                mean = float(counts(cell).mean())
                left = unsolved(cell)
                met = mean <= bar and left == 0
                verdicts.append(
                    {"method": method, "size": size, "bar": bar, "mean": round(mean, 1), "unsolved": left, "met": met}
                )
    return verdicts


def growth(config: Mapping[str, Any], cells: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return, per method with three sizes or more, the exponent b of mean episodes = a N^b.

    Least squares on logarithms; the 95 % interval resamples learners within each size.
    """
    fits = {}
    for method, spec in config["methods"].items():
        measured = {size: counts(cells[f"{method}/{size}"]) for size in spec["cells"] if f"{method}/{size}" in cells}
        if len(measured) < 3:
            continue
        generator = np.random.default_rng(0)
        means = np.stack(
            [generator.choice(values, (_RESAMPLES, len(values))).mean(axis=1) for values in measured.values()]
        )
        resampled = _slopes(list(measured), means)
        exact = _slopes(list(measured), np.array([[values.mean()] for values in measured.values()]))
        low, high = np.quantile(resampled, [0.025, 0.975])
        fits[method] = {
            "sizes": list(measured),
            "exponent": round(float(exact[0]), 2),
            "interval": [round(float(low), 2), round(float(high), 2)],
        }
    return fits


def _slopes(sizes: list[int], means: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.log(np.array(sizes, dtype=np.float64))
    x -= x.mean()
    slopes: NDArray[np.float64] = x @ np.log(means) / (x @ x)
    return slopes


def table(config: Mapping[str, Any], cells: Mapping[str, Any]) -> str:
    """Return all measured cells as Markdown."""
    rows = []
    for method, spec in config["methods"].items():
        for size in spec["cells"]:
            cell = cells.get(f"{method}/{size}")
            if cell is None:
                continue
            values = counts(cell)
            rows.append(
                [
                    spec["title"],
                    size,
                    cell["updates_per_step"],
                    "-" if cell["index_dim"] is None else cell["index_dim"],
                    str(bootstrap_interval(values)),
                    f"{values.min():.0f} to {values.max():.0f}",
                    f"{len(values) - unsolved(cell)} of {len(values)}",
                    f"{cell['budget']:,}",
                    f"{cell['cpu_seconds'] / len(values):.1f}",
                ]
            )
    header = [
        "method",
        "N",
        "updates per step",
        "M",
        "episodes to solve",
        "range",
        "solved",
        "budget",
        "CPU-s / learner",
    ]
    return common.make_table(header, rows)


def bars_table(config: Mapping[str, Any], verdicts: list[dict[str, Any]]) -> str:
    """Return the bars as Markdown."""
    rows = [
        [
            config["methods"][each["method"]]["title"],
            each["size"],
            f"{each['mean']:g}",
            each["bar"],
            each["unsolved"],
            "met" if each["met"] else "**missed**",
        ]
        for each in verdicts
    ]
    return common.make_table(["method", "N", "mean episodes", "bar", "unsolved", ""], rows)


def growth_table(config: Mapping[str, Any], fits: Mapping[str, Any]) -> str:
    """Return the exponents as Markdown, the published ones by the same fit beside them."""
    rows = []
    for method, fit in fits.items():
        sizes = ", ".join(str(size) for size in fit["sizes"])
        low, high = fit["interval"]
        rows.append([config["methods"][method]["title"], sizes, f"{fit['exponent']:.2f} [{low:.2f}, {high:.2f}]"])
    for name, points in config["published"].items():
        solved = {size: mean for size, mean in points.items() if mean < 10_000}
        if len(solved) >= 3:
            slope = _slopes(list(solved), np.array([[float(mean)] for mean in solved.values()]))[0]
            rows.append([f"published: {name}", ", ".join(str(size) for size in solved), f"{slope:.2f}"])
    return common.make_table(["method", "N", "exponent"], rows)


def plot(path: Path, config: Mapping[str, Any], cells: Mapping[str, Any]) -> None:
    """Draw mean episodes to solve against N beside the published curves, on logarithmic axes."""
    figure, axis = plt.subplots(figsize=(8, 5.5), layout="constrained")
    for name, points in config["published"].items():
        axis.plot(list(points), list(points.values()), "--", color="tab:gray", alpha=0.7)
        axis.annotate(name, (max(points), points[max(points)]), fontsize=7, color="tab:gray", ha="right", va="bottom")
    for place, (method, spec) in enumerate(config["methods"].items()):
        measured = {size: cells[f"{method}/{size}"] for size in spec["cells"] if f"{method}/{size}" in cells}
        if not measured:
            continue
        sizes, values = list(measured), [counts(cell) for cell in measured.values()]
        colour = f"C{place}"
        axis.plot(sizes, [each.mean() for each in values], "o-", color=colour, label=spec["title"])
        for size, each in zip(sizes, values, strict=True):
            interval = bootstrap_interval(each)
            if interval.low is not None and interval.high is not None:
                axis.plot([size, size], [interval.low, interval.high], color=colour, linewidth=2)
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = [10, 20, 30, 40, 60, 80, 100]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("N")
    axis.set_ylabel("episodes to solve (unsolved: the budget; published: 10,000)")
    axis.legend(fontsize=7, loc="upper left")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
