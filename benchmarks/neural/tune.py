"""The search that every method gets: `python benchmarks/neural/tune.py` fills tuning.json and skips what is there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import search
from benchmarks.neural.play import FOLDER, load_config, play

if __name__ == "__main__":
    search.main(__doc__, load_config(), FOLDER / "tuning.json", play)
