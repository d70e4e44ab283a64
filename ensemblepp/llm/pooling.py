"""From hidden states of tokens to one vector per text, by the attention mask alone."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ensemblepp.errors import ParameterError, check_all, check_choice, check_shape

POOLINGS = ("last", "mean")


def pool(
    hidden: Shaped[Tensor, "batch tokens dim"], mask: Shaped[Tensor, "batch tokens"], pooling: str = "last"
) -> Float[Tensor, "batch dim"]:
    """Return the hidden state of the last real token, or the mean over real tokens, in float32 or wider.

    Padding may stand on either side and hold anything finite; it never contributes.

    Args:
        hidden: A backbone's last hidden states.
        mask: 1 for real tokens, 0 for padding.
        pooling: "last" or "mean".

    Raises:
        ParameterError: An unknown pooling, shapes that do not fit, or a text without a real token.
    """
    check_choice("pooling", "pool", pooling, POOLINGS)
    check_shape("mask", "pool", mask, "batch tokens", hidden.shape[:2])
    real = mask.bool()
    check_all("mask", "pool", "mark at least one token of every text", real.any(-1), real.any(-1))
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if pooling == "mean":
        kept = torch.where(real.unsqueeze(-1), wide, 0.0)
        return kept.sum(1) / real.sum(-1, keepdim=True)
    last = real.shape[-1] - 1 - real.flip(-1).int().argmax(-1)
    return wide[torch.arange(len(wide), device=wide.device), last]


def infer_mask(input_ids: Tensor, pad_token_id: int | None, eos_token_id: int | list[int] | None) -> Tensor:
    """Return the mask of real tokens where the caller gave none, or refuse when it cannot be known.

    Raises:
        ParameterError: Padding cannot be told from text: the pad token ends texts too, or there is none and several
            texts stand side by side.
    """
    ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    if pad_token_id is None and len(input_ids) == 1:
        return torch.ones_like(input_ids)
    if pad_token_id is None or pad_token_id in ends:
        raise ParameterError(
            "attention_mask",
            "EnsembleRewardModel",
            "be given where padding cannot be told from text",
            f"None with pad_token_id {pad_token_id} and eos_token_id {eos_token_id}",
            "Pass the tokenizer's attention_mask.",
        )
    return (input_ids != pad_token_id).to(input_ids.dtype)


def positions(mask: Shaped[Tensor, "batch tokens"]) -> Tensor:
    """Return position ids that count real tokens from zero, so that left padding does not move a text."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)
