"""Numbers that a public rollout-correction implementation computed on one padded float64 batch.

They are not part of this repository: test modules that build on them skip, with the reason, where they are absent.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

_FILE = Path(__file__).resolve().parents[2] / "shared" / "reference" / "rollout_correction_cases.json"
if not _FILE.is_file():
    pytest.skip(f"no reference numbers at {_FILE}", allow_module_level=True)

CASES: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
INPUTS = {name: torch.tensor(values, dtype=torch.float64) for name, values in CASES["inputs"].items()}
LOGPROB, OLD, SAMPLER = (INPUTS[name] for name in ("log_prob", "old_log_prob", "rollout_log_prob"))
MASK, ADVANTAGES, GROUP = INPUTS["mask"], INPUTS["advantages"], INPUTS["group"].long()


def loss_case(name: str) -> tuple[float, torch.Tensor]:
    """(loss, its gradient in the trainer's log-probabilities)."""
    (case,) = [case for case in CASES["loss"] if case["name"] == name]
    return case["loss"], torch.tensor(case["grad_log_prob"], dtype=torch.float64)
