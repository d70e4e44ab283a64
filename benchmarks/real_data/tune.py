"""The search of every method: `python benchmarks/real_data/tune.py` fills tuning.json and skips what is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common, search
from benchmarks.real_data.play import FOLDER, load_config, play


def try_by_hand(path: Path) -> None:
    """Add the settings that were tried before the preset's grid was written."""
    config, content = load_config(), common.read_json(path)
    hand, tuning = config["trials_by_hand"], config["tuning"]
    found = content.setdefault("trials_by_hand", {})
    for options in hand["options"]:
        key = json.dumps(options)
        if key not in found:
            sizes = {"num_shuffles": hand["num_shuffles"], "seed": tuning["seed"], "horizon": tuning["horizon"]}
            cell = play(config, hand["method"], hand["game"], {"standardise": False, **options}, **sizes)
            found[key] = cell["regret"][str(tuning["horizon"])]
            print("by hand", key, found[key], flush=True)
            common.write_json(path, content)


if __name__ == "__main__":
    search.main(__doc__, load_config(), FOLDER / "tuning.json", play)
    try_by_hand(FOLDER / "tuning.json")
