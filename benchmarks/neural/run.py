"""Neural bandits: `python benchmarks/neural/run.py` measures every cell of config.yaml that is not done yet."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.neural import analysis
from benchmarks.neural.play import FOLDER, load_config, play
from benchmarks.search import best


def missing(
    config: dict[str, Any], cells: dict[str, Any], games: list[str], methods: list[str]
) -> list[tuple[str, str]]:
    """Return the (method, game) pairs that are not measured, the costly methods first."""
    order = sorted(methods, key=lambda method: method not in ("ensemble_plus", "epi_net"))
    return [
        (method, game)
        for method in order
        for game in config["methods"][method].get("games", games)
        if game in games and f"{game}/{method}" not in cells
    ]


def refresh(content: dict[str, Any], config: dict[str, Any], output: Path) -> None:
    """Write the verdicts and the result file, and beside the committed one README and plot."""
    cells = content["cells"]
    content["bars"] = analysis.judge(config, cells)
    common.write_json(output, content)
    if output.parent == FOLDER:
        blocks = {game: analysis.game_table(config, cells, game) for game in config["games"]}
        blocks["bars"] = analysis.bars_table(config, content["bars"])
        blocks["tuning"] = analysis.tuning_table(config, common.read_json(FOLDER / "tuning.json")["trials"])
        common.fill_readme(FOLDER / "README.md", blocks)
        analysis.plot(FOLDER / "neural.png", config, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    config = load_config()
    parser.add_argument("--games", nargs="+", choices=list(config["games"]), default=list(config["games"]))
    parser.add_argument("--methods", nargs="+", choices=list(config["methods"]), default=list(config["methods"]))
    parser.add_argument("--num-replicas", type=int, help="fewer learners, for a trial (needs --output)")
    parser.add_argument("--output", type=Path, default=FOLDER / "results.json")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    arguments = parser.parse_args()
    if arguments.num_replicas is not None and arguments.output.parent == FOLDER:
        parser.error("--num-replicas needs --output in another folder: the committed table has the stated size")
    content = common.read_json(arguments.output) or {"cells": {}}
    content = common.provenance("neural", config["seed"]) | {"cells": content["cells"]}
    trials = common.read_json(FOLDER / "tuning.json")["trials"]
    cells = {}
    for method, game in missing(config, content["cells"], arguments.games, arguments.methods):
        spec = config["methods"][method]
        sizes = {
            "num_replicas": arguments.num_replicas or spec.get("num_replicas", config["num_replicas"]),
            "seed": config["seed"],
            "horizon": config["games"][game]["horizon"],
        }
        chosen = best(trials[method]) if spec["grid"] else {}
        cells[f"{game}/{method}"] = (play, (config, method, game, chosen), sizes)
    common.measure(cells, content["cells"], lambda: common.write_json(arguments.output, content), arguments.jobs)
    refresh(content, config, arguments.output)


if __name__ == "__main__":
    main()
