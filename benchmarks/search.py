"""The search that every method of a comparison gets: all combinations of its grid, the lowest score wins."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks import common

Trial = Callable[[Mapping[str, Any], str, Mapping[str, Any]], dict[str, Any]]
"""From configuration, method and options to a result with its "score"; runs in a process of its own."""


def candidates(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of a method's grid."""
    names = list(spec["grid"])
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*spec["grid"].values())]


def best(trials: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the trial with the lowest score."""
    options: dict[str, Any] = json.loads(min(trials, key=lambda key: trials[key]["score"]))
    return options


def search(config: Mapping[str, Any], path: Path, trial: Trial, jobs: int) -> None:
    """Try what is not in the file at `path` yet, and keep it up to date."""
    name = path.parent.name
    content = common.read_json(path) or {"trials": {}}
    content = common.provenance(name, config["tuning"]["seed"]) | {
        "command": f"python benchmarks/{name}/tune.py --jobs {jobs}",
        "trials": content["trials"],
    }
    with ProcessPoolExecutor(jobs) as pool:
        waiting = {}
        for method, spec in config["methods"].items():
            if not spec["grid"]:
                continue
            trials = content["trials"].setdefault(method, {})
            for chosen in candidates(spec):
                key = json.dumps(chosen)
                if key not in trials:
                    waiting[pool.submit(trial, config, method, chosen)] = (method, key)
        for done in as_completed(waiting):
            method, key = waiting[done]
            content["trials"][method][key] = done.result()
            print(method, key, content["trials"][method][key], flush=True)
            common.write_json(path, content)
