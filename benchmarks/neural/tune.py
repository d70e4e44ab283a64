"""The search that every method gets: `python benchmarks/neural/tune.py` writes tuning.json and skips what is there."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.neural.play import FOLDER, load_config, play


def candidates(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of a method's grid."""
    names = list(spec["grid"])
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*spec["grid"].values())]


def best(trials: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the trial with the lowest score."""
    options: dict[str, Any] = json.loads(min(trials, key=lambda key: trials[key]["score"]))
    return options


def _try(config: Mapping[str, Any], method: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    tuning = config["tuning"]
    means = {}
    for game in tuning["games"]:
        sizes = {key: tuning[key] for key in ("num_replicas", "seed", "horizon")}
        regret = play(config, method, game, chosen, **sizes)["regret"][str(tuning["horizon"])]
        means[game] = round(statistics.mean(regret), 2)
    score = statistics.mean(means[game] / tuning["uniform_regret"][game] for game in means)
    return {"regret": means, "score": round(score, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    jobs = parser.parse_args().jobs
    config, path = load_config(), FOLDER / "tuning.json"
    content = common.read_json(path) or {"trials": {}}
    content = common.provenance("neural", config["tuning"]["seed"]) | {
        "command": f"python benchmarks/neural/tune.py --jobs {jobs}",
        "trials": content["trials"],
    }
    with ProcessPoolExecutor(jobs) as pool:
        waiting = {}
        for method, spec in config["methods"].items():
            trials = content["trials"].setdefault(method, {}) if spec["grid"] else {}
            for chosen in candidates(spec) if spec["grid"] else []:
                key = json.dumps(chosen)
                if key not in trials:
                    waiting[pool.submit(_try, config, method, chosen)] = (method, key)
        for done in as_completed(waiting):
            method, key = waiting[done]
            content["trials"][method][key] = done.result()
            print(method, key, content["trials"][method][key], flush=True)
            common.write_json(path, content)


if __name__ == "__main__":
    main()
