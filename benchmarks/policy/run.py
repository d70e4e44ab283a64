"""Policy updates: `python benchmarks/policy/run.py` measures every cell of config.yaml that is not done yet."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.policy import analysis
from benchmarks.policy.memory import FORMS, TASKS, measure
from benchmarks.policy.toy import train

FOLDER = Path(__file__).resolve().parent


def load_config(path: Path = FOLDER / "config.yaml") -> dict[str, Any]:
    """Return the sweep."""
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return config


def cell_names(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """Yield (phase, mismatch, method, rate), the tuning seed first."""
    for phase in ("tuning", "main"):
        for mismatch in config["mismatches"]:
            for method in config["methods"]:
                for rate in config["game"]["rates"]:
                    yield phase, mismatch, method, rate


def play(config: Mapping[str, Any], phase: str, mismatch: str, method: str, rate: float) -> dict[str, Any]:
    """Return one cell: exact returns and divergences at every evaluation, and the CPU time."""
    sizes = config["tuning"] if phase == "tuning" else config
    start = time.process_time()
    figures = train(
        config["game"],
        config["methods"][method],
        config["mismatches"][mismatch],
        rate=rate,
        num_replicas=sizes["num_replicas"],
        seed=sizes["seed"],
    )
    return common.round_floats(figures | {"cpu_seconds": time.process_time() - start}, 4)  # type: ignore[no-any-return]


def refresh(content: dict[str, Any], config: dict[str, Any], output: Path) -> None:
    """Write the result file, and beside the committed one README and plot."""
    common.write_json(output, content)
    if output.parent == FOLDER:
        cells = content["cells"]
        blocks = {name: analysis.mismatch_table(config, cells, name) for name in config["mismatches"]}
        blocks["baseline"] = analysis.baseline_table(config, cells)
        blocks["corrections"] = analysis.correction_table(config, cells)
        blocks["memory"] = analysis.memory_table(content["memory"])
        common.fill_readme(FOLDER / "README.md", blocks)
        analysis.plot(FOLDER / "policy.png", config, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER / "results.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config()
    content = {"cells": {}, "memory": {}, **common.read_json(arguments.output)}
    content = common.provenance("policy", config["seed"]) | {key: content[key] for key in ("memory", "cells")}
    for task in TASKS:
        for form in FORMS:
            if f"{task}/{form}" not in content["memory"]:
                figures = measure(task, form, config["memory"], config["seed"])
                content["memory"][f"{task}/{form}"] = common.round_floats(figures)
                common.write_json(arguments.output, content)
    for names in cell_names(config):
        name = "/".join(map(str, names))
        if name not in content["cells"]:
            content["cells"][name] = play(config, *names)
            print(f"{name}: {content['cells'][name]['cpu_seconds']} s", flush=True)
            common.write_json(arguments.output, content)
    refresh(content, config, arguments.output)


if __name__ == "__main__":
    main()
