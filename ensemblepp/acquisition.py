"""From scores to choices: the masked maximum with uniform tie-break, and how often each arm would be chosen."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ensemblepp.errors import ParameterError, check_all, check_shape


def choose(
    scores: Float[Tensor, "*batch arms"],
    mask: Bool[Tensor, "*batch arms"] | None = None,
    *,
    generator: torch.Generator,
    owner: str = "choose",
) -> Int[Tensor, "*batch"]:
    """Return argmax over the allowed arms of `scores`, drawn uniformly among the arms that tie.

    A score of -inf is an ordinary (lowest) score: a masked arm is never chosen, even when every allowed arm has it.

    Args:
        scores: One score per arm.
        mask: True where an arm may be chosen; None allows all.
        generator: Source of the tie-break.
        owner: Who asks, for error messages.

    Raises:
        ParameterError: No arm at all, a mask row that allows none, a mask of another shape, or a NaN score of an
            allowed arm.
    """
    best = candidates(scores, mask, owner=owner)
    rank = best.cumsum(-1, dtype=torch.int32)
    count = rank[..., -1:]
    draw = torch.rand(count.shape, generator=generator, device=scores.device)
    # float32 draws stay below 1, but draw * count may round up to count: clamp to the last tie.
    pick = torch.minimum((draw * count).to(torch.int32), count - 1)
    return torch.searchsorted(rank, pick, right=True).squeeze(-1)


def candidates(
    scores: Float[Tensor, "*batch arms"], mask: Bool[Tensor, "*batch arms"] | None = None, *, owner: str = "candidates"
) -> Bool[Tensor, "*batch arms"]:
    """Return True for every allowed arm whose score equals the largest allowed score.

    Raises:
        ParameterError: As `choose`.
    """
    if scores.shape[-1] == 0:
        raise ParameterError("scores", owner, "have at least one arm", f"shape {tuple(scores.shape)}")
    if mask is None:
        check_all("scores", owner, "not be NaN", ~torch.isnan(scores), scores)
        return scores == scores.amax(-1, keepdim=True)
    check_shape("mask", owner, mask, "as scores", scores.shape)
    any_allowed = mask.any(-1)
    check_all("mask", owner, "allow at least one arm in every row", any_allowed, any_allowed)
    check_all("scores", owner, "not be NaN", ~(torch.isnan(scores) & mask), scores)
    allowed = torch.where(mask, scores, -torch.inf)
    return (allowed == allowed.amax(-1, keepdim=True)) & mask


def choice_shares(
    scores: Float[Tensor, "samples arms"], mask: Bool[Tensor, " arms"] | None = None
) -> Float[np.ndarray, " arms"]:
    """Return the share of posterior samples under which each arm is chosen, ties counted in equal parts.

    With S independent samples the share p of an arm has standard error sqrt(p (1 - p) / S).
    """
    best = candidates(scores, None if mask is None else mask.expand(scores.shape)).to(torch.float64)
    return (best / best.sum(-1, keepdim=True)).mean(0).numpy(force=True)
