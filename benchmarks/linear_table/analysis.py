"""From final regrets to the table: comparison with the published figures, verdict, Markdown and plot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import make_table
from ensemblepp.files import write_atomic
from ensemblepp.intervals import bootstrap_interval
from ensemblepp.plots import THEMES, render_figure


def compare(final_regret: list[float], published: Mapping[str, float]) -> dict[str, Any]:
    """Return mean, standard error and interval of our replicas, and how far they lie from the published mean.

    z = (ours - published) / sqrt(se_ours^2 + se_published^2).

    Args:
        final_regret: Cumulative regret at the horizon, one number per replica, in reward units.
        published: `mean` and `standard_error`, in reward units.
    """
    values = np.asarray(final_regret, dtype=np.float64)
    interval = bootstrap_interval(values)
    error = float(values.std(ddof=1) / math.sqrt(len(values)))
    z = (interval.estimate - published["mean"]) / math.hypot(error, published["standard_error"])
    return {
        "mean": round(interval.estimate, 3),
        "standard_error": round(error, 3),
        "interval": [round(end, 3) for end in (interval.low, interval.high) if end is not None],
        "z": round(z, 3),
    }


def judge(cells: Mapping[str, Mapping[str, Any]], wanted: list[str], rule: Mapping[str, float]) -> dict[str, Any]:
    """Return the verdict: every wanted cell measured, no |z| above `limit`, at most `allowed` above `notable`."""
    size = {name: abs(cell["z"]) for name, cell in cells.items()}
    missing = [name for name in wanted if name not in cells]
    notable = [name for name in size if size[name] > rule["notable"]]
    beyond = [name for name in size if size[name] > rule["limit"]]
    return {
        "reproduced": not missing and not beyond and len(notable) <= rule["allowed"],
        "largest_abs_z": max(size.values(), default=0.0),
        "above_notable": notable,
        "above_limit": beyond,
        "missing": missing,
    }


def method_name(cell: Mapping[str, Any]) -> str:
    """Return how tables and plots call the method of one cell."""
    if cell["index_dim"] is None:
        return "Thompson sampling"
    law = f", {cell['index']}" if "index" in cell else ""
    return f"Ensemble++ M = {cell['index_dim']}{law}"


def table(config: Mapping[str, Any], cells: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the Markdown table, one row per measured cell."""
    header = ("setting", "method", "replicas", "ours ± s.e.", "95 % interval", "published ± s.e.", "z", "CPU s")
    rows = []
    for name, options in config["cells"].items():
        if name not in cells:
            continue
        cell, published = cells[name], options["published"]
        low, high = cell["interval"]
        digits = 1 if cell["standard_error"] < 10 else 0
        rows.append(
            (
                config["settings"][options["setting"]]["title"],
                method_name(options),
                options["num_replicas"],
                f"{cell['mean']:,.{digits}f} ± {cell['standard_error']:.{digits}f}",
                f"{low:,.{digits}f} to {high:,.{digits}f}",
                f"{published['mean']:,g} ± {published['standard_error']:g}",
                f"{cell['z']:+.2f}",
                f"{cell['cpu_seconds']:.0f}",
            )
        )
    return make_table(header, rows)


def describe(verdict: Mapping[str, Any], rule: Mapping[str, float]) -> str:
    """Return the verdict as one sentence."""
    word = "Reproduced" if verdict["reproduced"] else "Not reproduced"
    notable = ", ".join(f"`{name}`" for name in verdict["above_notable"]) or "none"
    text = f"**{word}**: largest |z| {verdict['largest_abs_z']:.2f} (limit {rule['limit']:g})"
    text += f"; above {rule['notable']:g}: {notable} ({rule['allowed']:g} allowed)."
    return text + (f" Missing: {', '.join(verdict['missing'])}." if verdict["missing"] else "")


def span_table(span: Mapping[str, Any]) -> str:
    """Return the Markdown table of what is played outside the span of the prior directions."""
    header = ("precision", "regret ± s.e.", "floor inside the span", *(f"step {step:,}" for step in span["steps"]))
    rows = [
        (
            name,
            f"{row['mean']:,.0f} ± {row['standard_error']:.0f}",
            f"{row['floor']:,.0f}",
            *(f"{share:.2g}" for share in row["outside"]),
        )
        for name, row in span["rows"].items()
    ]
    return make_table(header, rows)


def plot(path: Path, config: Mapping[str, Any], sweeps: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw every mean with its 95 % interval as a ratio to the published mean, whose interval is 1.96 s.e. wide."""
    theme = THEMES["light"]
    names = list(config["cells"])
    figure = Figure(figsize=(8.0, 0.7 + 0.46 * len(names)), dpi=150, facecolor=theme.canvas, layout="constrained")
    axes = figure.add_subplot()

    def draw(
        label: str, shift: float, color: str, marker: str, ranges: Mapping[str, tuple[float, float, float]]
    ) -> None:
        rows = [names.index(name) + shift for name in ranges]
        low, center, high = zip(*ranges.values(), strict=True)
        axes.hlines(rows, low, high, color=color, linewidth=1.6)
        axes.plot(center, rows, marker, color=color, markersize=4.5, label=label)

    published = {name: options["published"] for name, options in config["cells"].items()}
    half = {name: 1.96 * value["standard_error"] / value["mean"] for name, value in published.items()}
    draw("published", -0.25, theme.curves[1], "D", {name: (1 - half[name], 1.0, 1 + half[name]) for name in names})
    for position, (dtype, sweep) in enumerate(sweeps.items()):
        ranges = {}
        for name, cell in sweep["cells"].items():
            scale = published[name]["mean"]
            low, high = cell["interval"]
            ranges[name] = (low / scale, cell["mean"] / scale, high / scale)
        if ranges:
            draw(f"this library, {dtype}", 0.25 * position, theme.curves[2 * position], "o", ranges)
    labels = []
    for options in config["cells"].values():
        labels.append(f"{config['settings'][options['setting']]['title']}\n{method_name(options)}")
    axes.set_yticks(range(len(names)), labels, fontsize=7.5)
    axes.invert_yaxis()
    axes.axvline(1.0, color=theme.grid, linewidth=1, zorder=0)
    axes.set_xlabel("final cumulative regret / published mean (95 % intervals)", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=8.5)
    write_atomic(path, render_figure(figure, "png"))
