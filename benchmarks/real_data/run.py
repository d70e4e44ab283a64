"""Real data: `python benchmarks/real_data/run.py` measures every cell of config.yaml that is not done yet.

The data are read from the folder in ENSEMBLEPP_DATA, or fetched from OpenML. Vowpal Wabbit's rows need
`pip install vowpalwabbit` and are left out where it is absent.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.real_data import analysis
from benchmarks.real_data.play import FOLDER, load_config, play
from benchmarks.search import best


def missing(
    config: dict[str, Any], cells: dict[str, Any], games: list[str], methods: list[str]
) -> list[tuple[str, str]]:
    """Return the (method, game) pairs that are not measured and can be."""
    pairs = []
    for method in methods:
        agent = config["methods"][method]["agent"]
        for game in games:
            disjoint = game.endswith("_disjoint") and method not in config["disjoint_methods"]
            absent = agent == "VowpalWabbit" and importlib.util.find_spec("vowpalwabbit") is None
            lottery = agent == "full_labels" and game == "mushroom_lottery"  # a class is not a decision there
            if f"{game}/{method}" not in cells and not (disjoint or absent or lottery):
                pairs.append((method, game))
    return pairs


def refresh(content: dict[str, Any], config: dict[str, Any], output: Path) -> None:
    """Write the verdicts and the result file, and beside the committed one README and plot."""
    cells = content["cells"]
    content["bars"] = analysis.judge(config, cells)
    common.write_json(output, content)
    if output.parent == FOLDER:
        common.fill_readme(FOLDER / "README.md", analysis.blocks(config, cells, content["bars"]))
        analysis.plot(FOLDER / "real_data.png", config, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    config = load_config()
    parser.add_argument("--games", nargs="+", choices=list(config["games"]), default=list(config["games"]))
    parser.add_argument("--methods", nargs="+", choices=list(config["methods"]), default=list(config["methods"]))
    parser.add_argument("--num-shuffles", type=int, help="fewer shuffles, for a trial (needs --output)")
    parser.add_argument("--horizon", type=int, help="fewer decisions, for a trial (needs --output)")
    parser.add_argument("--output", type=Path, default=FOLDER / "results.json")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    arguments = parser.parse_args()
    if (arguments.num_shuffles or arguments.horizon) and arguments.output.parent == FOLDER:
        parser.error("--num-shuffles and --horizon need --output in another folder: the committed table has its sizes")
    content = common.read_json(arguments.output) or {"cells": {}}
    stamp = common.provenance("real_data", config["seed"], ["vowpalwabbit", "scikit-learn"])
    content = stamp | {"cells": content["cells"]}
    trials = common.read_json(FOLDER / "tuning.json")["trials"]
    cells = {}
    for method, game in missing(config, content["cells"], arguments.games, arguments.methods):
        spec = config["methods"][method]
        sizes = {
            "num_shuffles": arguments.num_shuffles or spec.get("num_shuffles", config["num_shuffles"]),
            "seed": config["seed"],
            "horizon": arguments.horizon or config["horizon"],
        }
        searched = spec.get("greedy_of", method if spec["grid"] else None)
        chosen = best(trials[searched]) if searched else {}
        cells[f"{game}/{method}"] = (play, (config, method, game, chosen), sizes)
    common.measure(cells, content["cells"], lambda: common.write_json(arguments.output, content), arguments.jobs)
    refresh(content, config, arguments.output)


if __name__ == "__main__":
    main()
