"""From regrets to tables: intervals, paired differences against the best baseline, and the bars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from benchmarks import common
from ensemblepp.intervals import bootstrap_interval

OURS = ("exact_ucb", "exact", "sgd", "logistic", "published", "random_features")
YARDSTICKS = ("uniform", "oracle_thompson", "oracle_ucb")


def regrets(cell: Mapping[str, Any], step: int) -> NDArray[np.float64]:
    """Return the final regret of every replica that did not stop."""
    values = np.array([math.nan if value is None else value for value in cell["regret"][str(step)]], dtype=np.float64)
    return values[np.isfinite(values)]


def standard_error(values: NDArray[np.float64]) -> float:
    """Return the standard error of the mean."""
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def judge(config: Mapping[str, Any], cells: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every bar with what was measured; met when the mean minus one standard error is at or below it."""
    verdicts = []
    for bar in config["bars"]:
        cell = cells.get(f"{bar['game']}/{bar['method']}")
        if cell is not None:
            values = regrets(cell, bar["step"])
            mean, error = float(values.mean()), standard_error(values)
            figures = {"mean": round(mean, 1), "standard_error": round(error, 1), "met": mean - error <= bar["bar"]}
            verdicts.append({**bar, **figures})
    return verdicts


def bars_table(config: Mapping[str, Any], verdicts: list[dict[str, Any]]) -> str:
    """Return the bars as Markdown."""
    rows = []
    for each in verdicts:
        measured = f"{each['mean']:,.1f} ± {each['standard_error']:.1f}"
        title, game = config["methods"][each["method"]]["title"], each["game"].replace("_", " ")
        rows.append(
            [f"{game}, T = {each['step']:,}", title, measured, each["bar"], "met" if each["met"] else "**missed**"]
        )
    return common.make_table(["game", "method", "ours ± s.e.", "bar", ""], rows)


def best_baseline(config: Mapping[str, Any], cells: Mapping[str, Any], game: str, step: int) -> str | None:
    """Return the baseline network or linear model with the lowest mean regret."""
    means = {
        method: regrets(cells[f"{game}/{method}"], step).mean()
        for method in config["methods"]
        if method not in (*OURS, *YARDSTICKS, "linear") and f"{game}/{method}" in cells
    }
    return min(means, key=lambda method: means[method]) if means else None


def game_table(config: Mapping[str, Any], cells: Mapping[str, Any], game: str) -> str:
    """Return one game's methods, best first, with intervals and paired differences."""
    horizon = config["games"][game]["horizon"]
    steps = sorted({min(1000, horizon), horizon})
    rival = best_baseline(config, cells, game, horizon)
    rows = []
    for method, spec in config["methods"].items():
        cell = cells.get(f"{game}/{method}")
        if cell is None:
            continue
        row: list[object] = [spec["title"]]
        for step in steps:
            row.append(str(bootstrap_interval(regrets(cell, step))))
        row.append(_difference(cells, game, method, rival, horizon))
        row += [len(regrets(cell, horizon)), f"{cell['cpu_ms_per_learner_step']:g}"]
        rows.append((float(regrets(cell, horizon).mean()), row))
    rows.sort(key=lambda pair: pair[0])
    title = "" if rival is None else f" minus {config['methods'][rival]['title']}"
    header = [
        "method",
        *(f"regret at {step:,}" for step in steps),
        f"paired{title}",
        "replicas",
        "CPU ms / learner-step",
    ]
    return common.make_table(header, [row for _, row in rows])


def _difference(cells: Mapping[str, Any], game: str, method: str, rival: str | None, step: int) -> str:
    """Return the paired difference to the best baseline; replicas face the same problem in both."""
    if rival is None or method == rival:
        return "-"
    own, other = (cells[f"{game}/{name}"]["regret"][str(step)] for name in (method, rival))
    if len(own) != len(other):
        return "not paired"
    difference = np.array([math.nan if v is None else v for v in own]) - np.array(
        [math.nan if v is None else v for v in other]
    )
    return str(bootstrap_interval(difference[np.isfinite(difference)]))


def tuning_table(config: Mapping[str, Any], trials: Mapping[str, Any]) -> str:
    """Return every configuration that was tried, by method."""
    rows = []
    for method, tried in trials.items():
        lowest = min(each["score"] for each in tried.values())
        for options, each in tried.items():
            regret = [f"{each['regret'][game]:.0f}" for game in config["tuning"]["games"]]
            mark = " (chosen)" if each["score"] == lowest else ""
            rows.append(
                [
                    config["methods"][method]["title"],
                    options.strip("{}").replace('"', ""),
                    *regret,
                    f"{each['score']:.3f}{mark}",
                ]
            )
    names = [game.replace("_", " ") for game in config["tuning"]["games"]]
    return common.make_table(["method", "options", *names, "score"], rows)


def plot(path: Path, config: Mapping[str, Any], cells: Mapping[str, Any]) -> None:
    """Draw each game's regrets relative to uniform play, with 95 % intervals."""
    games = list(config["games"])
    figure, axes = plt.subplots(2, 4, figsize=(16, 9), sharey=True, layout="constrained")
    shown = [method for method in config["methods"] if method not in YARDSTICKS]
    for axis, game in zip(axes.flat, games, strict=True):
        horizon = config["games"][game]["horizon"]
        base = cells.get(f"{game}/uniform")
        if base is None:
            continue
        scale = regrets(base, horizon).mean()
        for place, method in enumerate(reversed(shown)):
            cell = cells.get(f"{game}/{method}")
            if cell is None:
                continue
            interval = bootstrap_interval(regrets(cell, horizon))
            colour = "tab:blue" if method in OURS else "tab:gray"
            low, high = ((interval.estimate if end is None else end) / scale for end in (interval.low, interval.high))
            axis.plot([low, high], [place, place], color=colour, linewidth=2)
            axis.plot(interval.estimate / scale, place, "o", color=colour)
        axis.set_title(f"{game.replace('_', ' ')}, T = {horizon:,}")
        axis.set_yticks(range(len(shown)), [config["methods"][method]["title"] for method in reversed(shown)])
        axis.set_xlabel("regret / uniform play's regret")
        axis.set_xlim(left=0)
        axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
