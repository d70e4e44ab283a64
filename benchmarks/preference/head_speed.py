"""Time one update of the head on stored pairs against the same number of independent MLP members.

Everything is timed in one process, alternating, in CPU time of one thread; the ratio is paired by block. Run:
python benchmarks/preference/head_speed.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.preference.independent_members import IndependentMembers, StackedMembers
from benchmarks.speed.timing import cpu_seconds
from ensemblepp.intervals import bootstrap_interval
from ensemblepp.preferences import PreferenceLearner

FOLDER = Path(__file__).resolve().parent
SETTINGS = {"seed": 20261218, "pairs": 128, "feature_dim": 64, "members": 20, "width": 128, "blocks": 40, "calls": 10}
BAR = 1 / 20
SAMPLES = (1, 10, 100, 1000)
NAMES = {
    "head": "ensemblepp: store one pair, refit mean, members and covariance on all",
    "independent": "independent MLP members, one step each",
    "stacked": "the same members stacked into batched products",
}


def build(settings: Mapping[str, int]) -> tuple[dict[str, Callable[[], object]], PreferenceLearner, torch.Tensor]:
    """Return what is timed, by name, the learner, and features to score."""
    generator = torch.Generator().manual_seed(settings["seed"])
    size = (1, settings["pairs"], settings["feature_dim"])
    first, second = (torch.randn(size, generator=generator) for _ in range(2))
    learner = PreferenceLearner(
        settings["feature_dim"],
        index_dim=settings["members"],
        capacity=settings["pairs"],  # a new pair replaces the oldest, so that all calls see the same number
        seed=settings["seed"],
    )
    learner.learn(first, second)
    shape = (settings["feature_dim"], settings["width"], settings["members"])
    peers = [kind(*shape, pull=1e-3, generator=generator) for kind in (IndependentMembers, StackedMembers)]
    actions: dict[str, Callable[[], object]] = {
        "head": lambda: learner.learn(first[:, :1], second[:, :1]),
        "independent": lambda: peers[0].update(first[0], second[0]),
        "stacked": lambda: peers[1].update(first[0], second[0]),
    }
    return actions, learner, first


def measure(settings: Mapping[str, int]) -> dict[str, Any]:
    """Return milliseconds per update of every block, and of scoring once with any number of samples."""
    actions, learner, features = build(settings)

    def repeat(action: Callable[[], object]) -> float:
        return 1e3 * cpu_seconds(lambda: [action() for _ in range(settings["calls"])]) / settings["calls"]

    for action in actions.values():
        repeat(action)
    blocks = [{name: repeat(action) for name, action in actions.items()} for _ in range(settings["blocks"])]
    generator = torch.Generator().manual_seed(settings["seed"])
    sampling = {}
    for count in SAMPLES:
        index = torch.randn(1, count, settings["members"], generator=generator)
        sampling[str(count)] = min(repeat(lambda i=index: learner.scores(features).sample(i)) for _ in range(5))
    return {"update_ms": {name: [block[name] for block in blocks] for name in actions}, "sampling_ms": sampling}


def judge(update_ms: Mapping[str, list[float]], seed: int) -> dict[str, Any]:
    """Return the head's share of each peer's time: the mean over blocks, with a 95 % interval."""
    head = np.asarray(update_ms["head"])
    rows = {}
    for name in ("independent", "stacked"):
        found = bootstrap_interval(head / np.asarray(update_ms[name]), seed=seed)
        rows[name] = {"ratio": found.estimate, "low": found.low, "high": found.high}
    rows["independent"]["met"] = rows["independent"]["high"] <= BAR
    return rows


def table(content: Mapping[str, Any]) -> str:
    """Return the tables of the README."""
    rows = []
    for name, label in NAMES.items():
        ratio = content["ratios"].get(name)
        share = f"1/{1 / ratio['ratio']:.1f} [1/{1 / ratio['low']:.1f}, 1/{1 / ratio['high']:.1f}]" if ratio else ""
        rows.append([label, f"{np.median(content['update_ms'][name]):.2f}", share])
    update = common.make_table(["one update, CPU ms of one thread", "median", "the head's share"], rows)
    scoring = [[f"128 responses, {count} samples each", f"{ms:.3f}"] for count, ms in content["sampling_ms"].items()]
    return update + "\n\n" + common.make_table(["one scoring pass", "CPU ms"], scoring)


def main() -> None:
    torch.set_num_threads(1)
    measured = measure(SETTINGS)
    content = common.provenance("preference", SETTINGS["seed"])
    content["command"] = "python benchmarks/preference/head_speed.py"
    content |= {"settings": SETTINGS, **common.round_floats(measured)}
    content["ratios"] = common.round_floats(judge(content["update_ms"], SETTINGS["seed"]))
    common.write_json(FOLDER / "head_speed.json", content)
    common.fill_readme(FOLDER / "README.md", {"head_speed": table(content)})
    print(table(content))


if __name__ == "__main__":
    main()
