"""From regrets to tables and the picture: regret against time and memory, all methods, all sets."""

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

OURS = ("preset", "features_thompson", "features_scaled", "exact_ucb", "exact", "sgd", "linear", "linear_scaled")
REFERENCES = ("uniform", "full_labels")
PUBLISHED = {
    "shuttle": "107 (BART-TS)",
    "mushroom": "54 (BART-TS)",
    "magic": "1490 (BART-TS)",
    "adult": "1540 (BART-TS)",
    "covertype": "3480 (NeuralTS)",
}


def regrets(cell: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return the final regret of every shuffle whose learner did not stop."""
    final = cell["regret"][max(cell["regret"], key=int)]
    values = np.array([math.nan if value is None else value for value in final], dtype=np.float64)
    return values[np.isfinite(values)]


def judge(config: Mapping[str, Any], cells: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every bar with the preset's figure; met when the mean minus one standard error is at or below it."""
    verdicts = []
    for game, bar in config["bars"].items():
        if f"{game}/preset" in cells:
            values = regrets(cells[f"{game}/preset"])
            mean, error = float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))
            figures = {"mean": round(mean, 1), "standard_error": round(error, 1), "met": mean - error <= bar}
            verdicts.append({"game": game, "bar": bar, **figures})
    return verdicts


def bars_table(cells: Mapping[str, Any], verdicts: list[dict[str, Any]]) -> str:
    """Return the bars as Markdown, beside Vowpal Wabbit's better row and the best published figure."""
    rows = []
    for each in verdicts:
        names = [f"{each['game']}/{method}" for method in ("vowpal_bag", "vowpal_epsilon")]
        vowpal = [float(regrets(cells[name]).mean()) for name in names if name in cells]
        rows.append(
            [
                each["game"],
                f"{each['mean']:,.0f} ± {each['standard_error']:.0f}",
                each["bar"],
                "met" if each["met"] else "**missed**",
                f"{min(vowpal):,.0f}" if vowpal else "-",
                PUBLISHED.get(each["game"], "-"),
            ]
        )
    header = ["set", "preset ± s.e.", "bar", "", "Vowpal Wabbit, better row", "best published (encodings may differ)"]
    return common.make_table(header, rows)


def game_table(config: Mapping[str, Any], cells: Mapping[str, Any], game: str) -> str:
    """Return one set's methods, best first, with intervals and paired differences against the preset."""
    rows = []
    preset = cells.get(f"{game}/preset")
    for method, spec in config["methods"].items():
        cell = cells.get(f"{game}/{method}")
        if cell is None:
            continue
        values = regrets(cell)
        difference = "-"
        if preset is not None and method != "preset":
            base = regrets(preset)
            paired = len(values) == len(base)
            difference = str(bootstrap_interval(values - base)) if paired else "not paired"
        mark = "" if len(values) == config["num_shuffles"] else f" ({len(values)} shuffles)"
        memory = f"{cell['kib_per_learner']:,}" if "kib_per_learner" in cell else "-"
        time = f"{cell['cpu_ms_per_learner_step']:g}"
        row = [spec["title"] + mark, str(bootstrap_interval(values)), difference, time, memory]
        rows.append((float(values.mean()), row))
    rows.sort(key=lambda pair: pair[0])
    header = ["method", "regret", "minus preset, paired", "CPU ms / decision", "KiB / learner"]
    return common.make_table(header, [row for _, row in rows])


def tuning_table(config: Mapping[str, Any], trials: Mapping[str, Any]) -> str:
    """Return every configuration that was tried, by method."""
    rows = []
    games = config["tuning"]["games"]
    for method, tried in trials.items():
        lowest = min(each["score"] for each in tried.values())
        for options, each in tried.items():
            mark = " (chosen)" if each["score"] == lowest else ""
            regret = [f"{each['regret'][game]:.0f}" for game in games]
            title = config["methods"][method]["title"]
            rows.append([title, options.strip("{}").replace('"', ""), *regret, f"{each['score']:.3f}{mark}"])
    return common.make_table(["method", "options", *games, "score"], rows)


def by_hand_table(config: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return what was tried by hand."""
    rows = []
    for options, regret in found.items():
        each = ", ".join(f"{value:.0f}" for value in regret)
        rows.append([options.strip("{}").replace('"', ""), f"{np.mean(regret):.0f}", each])
    return common.make_table(["options", f"mean on {config['trials_by_hand']['game']}", "every shuffle"], rows)


def blocks(config: Mapping[str, Any], cells: Mapping[str, Any], verdicts: list[dict[str, Any]]) -> dict[str, str]:
    """Return every generated block of the README."""
    tables = {game: game_table(config, cells, game) for game in config["games"]}
    search = common.read_json(Path(__file__).with_name("tuning.json"))
    return tables | {
        "bars": bars_table(cells, verdicts),
        "tuning": tuning_table(config, search["trials"]),
        "by_hand": by_hand_table(config, search["trials_by_hand"]),
    }


def plot(path: Path, config: Mapping[str, Any], cells: Mapping[str, Any]) -> None:
    """Draw regret against CPU time per decision, a panel per set; a dot's area is the learner's memory."""
    games = [game for game in config["games"] if not game.endswith("_disjoint")]
    figure, axes = plt.subplots(2, 4, figsize=(18, 9), layout="constrained")
    shown = [method for method in config["methods"] if method not in REFERENCES]
    colours = dict(zip(shown, plt.get_cmap("tab20")(np.arange(len(shown)) % 20), strict=True))
    for axis, game in zip(axes.flat, games, strict=False):
        for place, method in enumerate(shown):
            cell = cells.get(f"{game}/{method}")
            if cell is None:
                continue
            interval = bootstrap_interval(regrets(cell))
            low, high = (interval.estimate if end is None else end for end in (interval.low, interval.high))
            time = cell["cpu_ms_per_learner_step"]
            axis.plot([time, time], [low, high], color=colours[method], linewidth=1)
            marker = "o" if method in OURS else "s" if place % 2 else "D"
            area = 12 + 4 * math.sqrt(cell.get("kib_per_learner", 0))
            label = config["methods"][method]["title"]
            axis.scatter(time, interval.estimate, s=area, color=colours[method], marker=marker, label=label)
        for method, style in (("uniform", ":"), ("full_labels", "--")):
            if f"{game}/{method}" in cells:
                level = regrets(cells[f"{game}/{method}"]).mean()
                axis.axhline(level, color="gray", linestyle=style, linewidth=1)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(game.replace("_", " "))
        axis.set_xlabel("CPU ms per decision")
        axis.set_ylabel(f"regret after {config['horizon']:,}")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    axes.flat[-1].axis("off")
    axes.flat[-1].legend(handles, labels, fontsize=7, loc="center", title="circles: Ensemble++; area: memory")
    figure.savefig(path, dpi=100)
    plt.close(figure)
