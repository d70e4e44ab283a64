"""Peak memory and CPU time of one function on one batch of logits, each in a process of its own.

`python benchmarks/policy/memory.py energy blocks 8 2048 32000 128 0` prints one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from ensemblepp.policy.centered import centered_policy_loss, centered_policy_loss_from_logits
from ensemblepp.policy.token_baseline import token_energy
from ensemblepp.policy.vocabulary import energy_from_logits

TASKS = ("energy", "centered")
FORMS = ("blocks", "naive")


def measure(task: str, form: str, sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
    """Return what a fresh process measures."""
    arguments = [task, form, *(str(sizes[name]) for name in ("batch", "time", "vocab", "head")), str(seed)]
    command = [sys.executable, __file__, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def _memory(field: str) -> float:
    """Return VmRSS or VmHWM (peak) of this process in MiB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(field)


def _energy(form: str, logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    if form == "blocks":
        return energy_from_logits(logits, tokens, mask)
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return token_energy(chosen, logprobs.exp().square().sum(-1), mask)


def _centered(form: str, logits: Tensor, tokens: Tensor, mask: Tensor, head: int, generator: torch.Generator) -> Tensor:
    shape = (*tokens.shape, head)
    head_tokens = torch.arange(head).expand(shape)
    recorded = torch.randn(*shape, generator=generator).log_softmax(-1) - 0.01
    sampler = torch.full(tokens.shape, -8.0)
    advantages = torch.randn(tokens.shape, generator=generator)
    logits.requires_grad_()
    if form == "blocks":
        loss = centered_policy_loss_from_logits(
            logits, tokens, sampler, head_tokens, recorded, advantages, mask, correction="tis"
        )
    else:
        logprobs = logits.float().log_softmax(-1)
        own = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        chosen = logprobs.gather(-1, head_tokens)
        loss = centered_policy_loss(own, sampler, chosen, recorded, advantages, mask, correction="tis")
        del logprobs
    loss.backward()
    return loss.detach()


def main() -> None:
    task, form, *numbers = sys.argv[1:]
    batch, length, vocab, head, seed = map(int, numbers)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.empty(batch, length, vocab, dtype=torch.bfloat16)
    for row in logits:  # row by row, so that making the input does not set the peak
        row.normal_(generator=generator)
    tokens = torch.randint(vocab, (batch, length), generator=generator)
    mask = torch.ones(batch, length, dtype=torch.bool)
    work: Callable[[], Tensor] = {
        "energy": lambda: _energy(form, logits, tokens, mask),
        "centered": lambda: _centered(form, logits, tokens, mask, head, generator),
    }[task]
    before, peak_before = _memory("VmRSS"), _memory("VmHWM")
    start = time.process_time()
    value = work()
    seconds = time.process_time() - start
    figures = {
        "extra_peak_mib": _memory("VmHWM") - before,
        "peak_before_mib": peak_before - before,
        "cpu_seconds": seconds,
        "value": value.double().mean().item(),
    }
    if logits.grad is not None:
        figures["gradient_norm"] = sum(row.float().square().sum().item() for row in logits.grad) ** 0.5
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
