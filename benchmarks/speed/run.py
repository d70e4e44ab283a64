"""Run the speed benchmark: `python benchmarks/speed/run.py` measures all sections, `--sections` some of them anew."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.speed import tables
from benchmarks.speed.batching import measure_batching, measure_flatness
from benchmarks.speed.latency import PEERS, measure_latency
from benchmarks.speed.profiling import measure_profile
from benchmarks.speed.roofline import measure_roofline

FOLDER = Path(__file__).resolve().parent
SECTIONS: dict[str, tuple[Callable[[Mapping[str, Any]], dict[str, Any]], Callable[[Mapping[str, Any]], str]]] = {
    "batching": (measure_batching, tables.batching),
    "latency": (measure_latency, tables.latency),
    "flatness": (measure_flatness, tables.flatness),
    "roofline": (measure_roofline, tables.roofline),
    "profile": (measure_profile, tables.profile),
}


def load_config(path: Path = FOLDER / "config.yaml") -> dict[str, Any]:
    """Return what to measure."""
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return config


def render(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the README's block of every measured section."""
    return {
        name: table(content["sections"][name]) for name, (_, table) in SECTIONS.items() if name in content["sections"]
    }


def main() -> None:
    """Measure the sections named on the command line; other sections of the result file stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--sections",
        nargs="*",
        metavar="SECTION",
        default=list(SECTIONS),
        help="what to measure; none: write the tables",
    )
    parser.add_argument("--output", type=Path, default=FOLDER / "results.json", help="result file")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"unknown sections {sorted(unknown)}; known: {list(SECTIONS)}")
    torch.set_num_threads(1)
    config, output = load_config(), arguments.output.resolve()
    origin = common.provenance("speed", config["seed"], PEERS)
    content = common.read_json(output)
    sections = content.get("sections", {})
    for name in SECTIONS:
        if name not in arguments.sections:
            continue
        started = time.perf_counter()
        print(f"{name} ...", flush=True)
        # Each section says for itself which source it timed: one of them may be measured again later.
        sections[name] = {
            "commit": origin["commit"],
            "modified": origin["modified"],
            **common.round_floats(SECTIONS[name][0](config)),
        }
        content = {**origin, "config": config, "sections": {key: sections[key] for key in SECTIONS if key in sections}}
        common.write_json(output, content)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    if sections and output.parent == FOLDER:
        common.fill_readme(FOLDER / "README.md", render(content))


if __name__ == "__main__":
    main()
