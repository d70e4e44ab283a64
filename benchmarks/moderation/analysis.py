"""From regrets to tables, bars and the picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import common
from benchmarks.search import best
from ensemblepp.intervals import bootstrap_interval, paired_difference

OURS = ("linear", "linear_full", "neural", "neural_upper", "random_features", "preset")


def trials_of(content: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return a method's trials by their options."""
    prefix = f"{method}/"
    return {name.removeprefix(prefix): trial for name, trial in content["trials"].items() if name.startswith(prefix)}


def judge(config: Mapping[str, Any], cells: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every bar: a strict one needs the whole interval below zero, another a lower end below zero."""
    verdicts = []
    for bar in config["bars"]:
        pair = [cells.get(f"posts_64/{bar[side]}") for side in ("ours", "other")]
        if pair[0] is None or pair[1] is None:
            continue
        step = str(bar["step"])
        found = paired_difference(pair[0]["regret"][step], pair[1]["regret"][step])
        end = found.high if bar["strict"] else found.low
        assert end is not None
        verdicts.append({**bar, "difference": str(found), "met": bool(end < 0)})
    return verdicts


def bars_table(config: Mapping[str, Any], verdicts: list[dict[str, Any]]) -> str:
    """Return the bars as Markdown."""
    rows = []
    for each in verdicts:
        titles = [config["methods"][each[side]]["title"] for side in ("ours", "other")]
        rule = "interval below 0" if each["strict"] else "interval not above 0"
        claim = f"{titles[0]} minus {titles[1]}, {each['step']:,} posts"
        rows.append([claim, each["difference"], rule, "met" if each["met"] else "**missed**"])
    return common.make_table(["paired difference of regret", "measured", "bar", ""], rows)


def game_table(config: Mapping[str, Any], cells: Mapping[str, Any], game: str) -> str:
    """Return one number of features: regret, shifted regret and cost, best first."""
    rows = []
    horizon = config["games"][game]["horizon"]
    marks = sorted({5000, horizon})
    for method, spec in config["methods"].items():
        cell = cells.get(f"{game}/{method}")
        if cell is None:
            continue
        regret = [str(bootstrap_interval(cell["regret"][str(step)])) for step in marks]
        options = ", ".join(f"{k} {v}" for k, v in cell["options"].items() if k in spec["grid"])
        shifted = str(bootstrap_interval(cell["shifted_regret"]))
        row = [spec["title"], options, *regret, shifted, f"{cell['cpu_ms_per_learner_step']:g}"]
        rows.append((float(np.mean(cell["regret"][str(horizon)])), row))
    rows.sort(key=lambda pair: pair[0])
    header = ["method", "found", *(f"regret at {step:,}" for step in marks), "regret per shifted post", "CPU ms / post"]
    return common.make_table(header, [row for _, row in rows])


def search_table(config: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Return every configuration that was tried."""
    rows = []
    for method, spec in config["methods"].items():
        tried = trials_of(content, method)
        chosen = json.dumps(best(tried)) if tried else None
        for options, trial in tried.items():
            mark = " (chosen)" if options == chosen else ""
            regret = f"{trial['regret']['posts_64']:.0f}{mark}"
            rows.append([spec["title"], options.strip("{}").replace('"', ""), regret])
    return common.make_table(["method", "options", "regret at 5,000"], rows)


def blocks(config: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, str]:
    """Return every generated block of the README."""
    cells = content["cells"]
    tables = {game: game_table(config, cells, game) for game in config["games"]}
    return tables | {"bars": bars_table(config, content["bars"]), "search": search_table(config, content)}


def plot(path: Path, config: Mapping[str, Any], cells: Mapping[str, Any]) -> None:
    """Draw regret and its interval for every method, a panel per number of features and of posts."""
    panels = [("posts_64", 5000), ("posts_64", 20000), ("posts_384", 5000)]
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained", sharey=True)
    names = list(config["methods"])
    for axis, (game, step) in zip(axes, panels, strict=True):
        for place, method in enumerate(names):
            cell = cells.get(f"{game}/{method}")
            if cell is None:
                continue
            found = bootstrap_interval(cell["regret"][str(step)])
            colour = "C0" if method in OURS else "gray"
            low, high = (found.estimate if end is None else end for end in (found.low, found.high))
            axis.plot([low, high], [place, place], color=colour)
            axis.plot(found.estimate, place, "o", color=colour)
        axis.set_title(f"{game.removeprefix('posts_')} features, {step:,} posts")
        axis.set_xlabel("regret")
        axis.set_xlim(left=0)
    axes[0].set_yticks(range(len(names)), [config["methods"][name]["title"] for name in names], fontsize=8)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110)
    plt.close(figure)
