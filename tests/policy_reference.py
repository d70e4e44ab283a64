"""Numbers that a public rollout-correction implementation computed on one padded float64 batch."""

import json
from pathlib import Path
from typing import Any

import torch

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "reference" / "rollout_correction_cases.json").read_text())
INPUTS = {name: torch.tensor(values, dtype=torch.float64) for name, values in CASES["inputs"].items()}
LOGPROB, OLD, SAMPLER = (INPUTS[name] for name in ("log_prob", "old_log_prob", "rollout_log_prob"))
MASK, ADVANTAGES, GROUP = INPUTS["mask"], INPUTS["advantages"], INPUTS["group"].long()


def loss_case(name: str) -> tuple[float, torch.Tensor]:
    """(loss, its gradient in the trainer's log-probabilities)."""
    (case,) = [case for case in CASES["loss"] if case["name"] == name]
    return case["loss"], torch.tensor(case["grad_log_prob"], dtype=torch.float64)
