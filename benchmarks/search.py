"""The search that every method of a comparison gets: all combinations of its grid, the lowest score wins."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks import common

Play = Callable[..., dict[str, Any]]
"""play(config, method, game, options, seed=, horizon=, ...) returns a cell with the "regret" of every learner."""


def candidates(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of a method's grid."""
    names = list(spec["grid"])
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*spec["grid"].values())]


def best(trials: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the trial with the lowest score."""
    options: dict[str, Any] = json.loads(min(trials, key=lambda key: trials[key]["score"]))
    return options


def attempt(play: Play, config: Mapping[str, Any], method: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean regret on every game of the search, and the score: their mean in units of uniform play's."""
    tuning = config["tuning"]
    sizes = {key: size for key, size in tuning.items() if key not in ("games", "uniform_regret")}
    means = {}
    for game in tuning["games"]:
        regret = play(config, method, game, chosen, **sizes)["regret"][str(tuning["horizon"])]
        means[game] = round(statistics.mean(regret), 2)
    score = statistics.mean(means[game] / tuning["uniform_regret"][game] for game in means)
    return {"regret": means, "score": round(score, 4)}


def search(config: Mapping[str, Any], path: Path, play: Play, jobs: int) -> None:
    """Try what is not in the file at `path` yet, and keep it up to date."""
    name = path.parent.name
    content = common.read_json(path) or {"trials": {}}
    content |= common.provenance(name, config["tuning"]["seed"])
    content["command"] = f"python benchmarks/{name}/tune.py --jobs {jobs}"
    with ProcessPoolExecutor(jobs) as pool:
        waiting = {}
        for method, spec in config["methods"].items():
            if not spec["grid"]:
                continue
            trials = content["trials"].setdefault(method, {})
            for chosen in candidates(spec):
                key = json.dumps(chosen)
                if key not in trials:
                    waiting[pool.submit(attempt, play, config, method, chosen)] = (method, key)
        for done in as_completed(waiting):
            method, key = waiting[done]
            content["trials"][method][key] = done.result()
            print(method, key, content["trials"][method][key], flush=True)
            common.write_json(path, content)


def main(description: str | None, config: Mapping[str, Any], path: Path, play: Play) -> None:
    """Run the search from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    search(config, path, play, parser.parse_args().jobs)
