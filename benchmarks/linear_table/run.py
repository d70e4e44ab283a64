"""Run the linear table: `python benchmarks/linear_table/run.py` measures every cell that is not done yet."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.linear_table import analysis
from benchmarks.linear_table.span import measure_span
from ensemblepp.agents import LinearEnsemblePP, LinearThompsonSampling
from ensemblepp.envs import LinearBandit
from ensemblepp.runs import run_bandit

FOLDER = Path(__file__).resolve().parent


def load_config(path: Path = FOLDER / "config.yaml") -> dict[str, Any]:
    """Return the sweep."""
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return config


def run_cell(config: Mapping[str, Any], name: str, dtype: str, *, progress: bool = False) -> dict[str, Any]:
    """Play one cell in one precision and return its regrets and their comparison with the published figure."""
    options = config["cells"][name]
    setting = {key: value for key, value in config["settings"][options["setting"]].items() if key != "title"}
    shared = {"num_replicas": options["num_replicas"], "seed": config["seed"], "dtype": getattr(torch, dtype)}
    environment = LinearBandit(**setting, **config["environment"], **shared)
    model = {"feature_dim": setting["feature_dim"], **config["model"], **shared}
    agent: LinearEnsemblePP | LinearThompsonSampling
    if options["index_dim"] is None:
        agent = LinearThompsonSampling(**model)
    else:
        laws = {key: options[key] for key in ("index", "perturbation") if key in options}
        agent = LinearEnsemblePP(index_dim=options["index_dim"], **laws, **model)
    with warnings.catch_warnings():
        # Too few members on the sphere is what some cells are there to show.
        warnings.filterwarnings("ignore", message="index_dim of LinearEnsemblePP")
        runs = run_bandit(agent, environment, config["horizon"], progress=progress)
    # Rounded first, so that the analysis of the stored numbers gives the stored figures.
    final_regret = [round(float(value), 3) for value in runs.cumulative_regret[:, -1]]
    return {
        "options": dict(options),
        **analysis.compare(final_regret, options["published"]),
        "cpu_seconds": round(runs.cpu_seconds, 2),
        "final_regret": final_regret,
    }


def refresh(content: dict[str, Any], config: Mapping[str, Any], output: Path) -> None:
    """Write the verdicts, the result file and, beside the committed one, README and plot."""
    blocks = {}
    for dtype in config["dtypes"]:
        sweep = content["sweeps"].setdefault(dtype, {"cells": {}})
        sweep["verdict"] = analysis.judge(sweep["cells"], list(config["cells"]), config["rule"])
        verdict = analysis.describe(sweep["verdict"], config["rule"])
        blocks[dtype] = f"{verdict}\n\n{analysis.table(config, sweep['cells'])}"
    common.write_json(output, content)
    if output.parent == FOLDER:
        if "span" in content:
            blocks["span"] = analysis.span_table(content["span"])
        common.fill_readme(FOLDER / "README.md", blocks)
        analysis.plot(FOLDER / "linear_table.png", config, content["sweeps"])


def start(config: Mapping[str, Any], output: Path) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the result file so far, after a check that it was measured with this config, and what it lacks."""
    content = common.read_json(output) or {"sweeps": {}}
    if (content.get("seed", config["seed"]), content.get("horizon", config["horizon"])) != (
        config["seed"],
        config["horizon"],
    ):
        sys.exit(f"{output.name} was measured with another seed or horizon; choose another --output.")
    pending = []
    for dtype in config["dtypes"]:
        cells = content["sweeps"].get(dtype, {"cells": {}})["cells"]
        for name, options in config["cells"].items():
            if name not in cells:
                pending.append((dtype, name))
            elif cells[name]["options"] != options:
                sys.exit(f"{name} in {output.name} was measured with other options; choose another --output.")
    return content, pending


def main() -> None:
    """Measure the cells named on the command line; keep those already measured."""
    config = load_config()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=list(config["cells"]), help="cells to measure; all when left out")
    parser.add_argument("--output", type=Path, default=FOLDER / "results.json", help="result file")
    parser.add_argument("--no-progress", action="store_true", help="hide the progress bars")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    output = arguments.output.resolve()
    content, pending = start(config, output)
    pending = [(dtype, name) for dtype, name in pending if name in (arguments.cells or config["cells"])]
    if pending or "span" not in content:
        origin = common.provenance("linear_table", config["seed"])
        content = {
            **origin,
            "horizon": config["horizon"],
            **{key: content[key] for key in ("sweeps", "span") if key in content},
        }
    else:
        print(f"all cells in {output.name} are done; choose another --output to measure again")
    refresh(content, config, output)
    for position, (dtype, name) in enumerate(pending, 1):
        started = time.perf_counter()
        cell = run_cell(config, name, dtype, progress=sys.stderr.isatty() and not arguments.no_progress)
        content["sweeps"][dtype]["cells"][name] = cell
        # Written after every cell, so that an interrupted sweep continues with the next one.
        refresh(content, config, output)
        print(
            f"[{position}/{len(pending)}] {dtype} {name}: {cell['mean']:.1f} ± {cell['standard_error']:.1f}, "
            f"z {cell['z']:+.2f}, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    if "span" not in content and arguments.cells is None:
        content["span"] = measure_span(config)
        refresh(content, config, output)
    for dtype, sweep in content["sweeps"].items():
        print(f"{dtype}: {analysis.describe(sweep['verdict'], config['rule'])}".replace("**", ""))


if __name__ == "__main__":
    main()
