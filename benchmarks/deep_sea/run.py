"""DeepSea: `python benchmarks/deep_sea/run.py` measures every cell of config.yaml that is not done yet."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.deep_sea import analysis, cost, stuck
from benchmarks.deep_sea.play import FOLDER, load_config, play, preset


def missing(
    config: dict[str, Any], cells: dict[str, Any], methods: list[str], sizes: list[int] | None
) -> list[tuple[str, int]]:
    """Return the (method, size) pairs that are not measured, of the given sizes or of all."""
    return [
        (method, size)
        for method in methods
        for size in config["methods"][method]["cells"]
        if f"{method}/{size}" not in cells and (sizes is None or size in sizes)
    ]


def refresh(content: dict[str, Any], config: dict[str, Any], output: Path) -> None:
    """Write verdicts and exponents into the result file, and beside the committed one README and plot."""
    cells = content["cells"]
    content["bars"] = analysis.judge(config, cells)
    content["growth"] = analysis.growth(config, cells)
    common.write_json(output, content)
    if output.parent == FOLDER:
        blocks = {
            "table": analysis.table(config, cells),
            "bars": analysis.bars_table(config, content["bars"]),
            "growth": analysis.growth_table(config, content["growth"]),
        }
        if "cost" in content:
            blocks["cost"] = cost.rate_table(content["cost"])
            blocks["profile"] = cost.profile_table(content["cost"])
        if "stuck" in content:
            blocks["stuck"] = stuck.table(content["stuck"])
        common.fill_readme(FOLDER / "README.md", blocks)
        analysis.plot(FOLDER / "deep_sea.png", config, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    config = load_config()
    parser.add_argument("--methods", nargs="+", choices=list(config["methods"]), default=list(config["methods"]))
    parser.add_argument("--sizes", nargs="+", type=int, help="only these N")
    parser.add_argument("--output", type=Path, default=FOLDER / "results.json")
    parser.add_argument("--work", type=Path, help="folder for checkpoints, so that a killed cell continues")
    parser.add_argument("--cost", action="store_true", help="measure rates and the profile, and no cell")
    parser.add_argument("--stuck", action="store_true", help="measure other initial weights, and no cell")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    arguments = parser.parse_args()
    content = common.read_json(arguments.output) or {"cells": {}}
    measured = {name: content[name] for name in ("cells", "cost", "stuck") if name in content}
    content = common.provenance("deep_sea", config["seed"]) | measured
    if arguments.cost:
        presets = {name: preset(name) for name in ("hyper_fqi", "hyper_fqi_optimistic")}
        content["cost"] = cost.measure(presets, config["seed"])
    if arguments.stuck:
        content["stuck"] = stuck.measure(config["stuck"], preset("hyper_fqi_optimistic"))
    if arguments.cost or arguments.stuck:
        refresh(content, config, arguments.output)
        return
    with ProcessPoolExecutor(arguments.jobs) as pool:
        waiting = {}
        for method, size in missing(config, content["cells"], arguments.methods, arguments.sizes):
            work = None if arguments.work is None else arguments.work / f"{method}-{size}"
            waiting[pool.submit(play, config, method, size, work)] = f"{method}/{size}"
        for done in as_completed(waiting):
            name = waiting[done]
            content["cells"][name] = done.result()
            print(f"{name}: {content['cells'][name]['episodes_to_solve']}", flush=True)
            refresh(content, config, arguments.output)
    refresh(content, config, arguments.output)


if __name__ == "__main__":
    main()
