"""The search of every method: `python benchmarks/real_data/tune.py` fills tuning.json and skips what is there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import search
from benchmarks.real_data.play import FOLDER, load_config, play

if __name__ == "__main__":
    search.main(__doc__, load_config(), FOLDER / "tuning.json", play)
