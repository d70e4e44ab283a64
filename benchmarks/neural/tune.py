"""The search that every method gets: `python benchmarks/neural/tune.py` writes tuning.json and skips what is there."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.neural.play import FOLDER, load_config, play
from benchmarks.search import search


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
    search(load_config(), FOLDER / "tuning.json", _try, parser.parse_args().jobs)


if __name__ == "__main__":
    main()
