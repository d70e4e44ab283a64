"""What every function checks of its inputs, once at its boundary, and how padding is kept out of everything after.

Padding is excluded with `where` before anything is computed, so NaN or -inf there reaches neither value nor gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ensemblepp.errors import ParameterError, check_all, check_finite, check_shape


def check_mask(mask: Shaped[Tensor, "batch time"], owner: str, name: str = "mask") -> Bool[Tensor, "batch time"]:
    """Return a mask as booleans.

    Args:
        mask: 1 (or True) on the response's own tokens, 0 on padding, prompt and tool output.
        owner: The function whose caller gets the error.
        name: The parameter that the error names.

    Raises:
        ParameterError: If the mask is not two-dimensional or holds anything but 0 and 1.
    """
    check_shape(name, owner, mask, "batch, time", (None, None))
    if mask.dtype == torch.bool:
        return mask
    own = mask != 0
    check_all(name, owner, "hold 0 and 1 only", ~own | (mask == 1), mask)
    return own


def active_tokens(owner: str, mask: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the response's own tokens, and those of them that no rule rejected."""
    own = check_mask(mask, owner)
    if keep is None:
        return own, own
    if check_shape("keep", owner, keep, "batch, time", own.shape).dtype != torch.bool:
        raise ParameterError("keep", owner, "be boolean", keep.dtype)
    return own, own & keep


def own_values(name: str, owner: str, values: Tensor, own: Tensor) -> Tensor:
    """Return values in float32 or wider, and 0 where `own` is False, whatever they hold there.

    Raises:
        ParameterError: If an own value is not finite, they are not floating point or the shapes do not match.
    """
    check_floating(name, owner, check_shape(name, owner, values, "batch, time", own.shape))
    values = torch.where(own, values.to(wide(values.dtype)), 0.0)
    check_finite(name, owner, values)
    return values


def check_log_ratio(
    log_ratio: Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"], owner: str
) -> tuple[Bool[Tensor, "batch time"], Float[Tensor, "batch time"]]:
    """Return the response's own tokens, and the log-ratios with 0 elsewhere.

    Args:
        log_ratio: d, from `log_ratios` or cut from it; what it holds elsewhere is ignored.
        mask: 1 on the response's own tokens.
        owner: The function whose caller gets the error.

    Raises:
        ParameterError: If an own log-ratio is not finite, the mask is not one of 0 and 1 or the shapes do not match.
    """
    own = check_mask(mask, owner)
    return own, own_values("log_ratio", owner, log_ratio, own)


def check_values(name: str, owner: str, values: object, axes: str, shape: Sequence[int | None]) -> Tensor:
    """Return `values` if they are finite, floating point and of this shape."""
    tensor = check_floating(name, owner, check_shape(name, owner, values, axes, shape))
    check_finite(name, owner, tensor)
    return tensor


def check_not_nan(name: str, owner: str, values: Tensor) -> None:
    """Raise if `values` hold NaN where infinity has a meaning."""
    check_all(name, owner, "not be NaN", ~values.isnan(), values)


def check_floating(name: str, owner: str, values: Tensor) -> Tensor:
    """Return `values` if they are real floating-point numbers."""
    if not values.is_floating_point():
        raise ParameterError(name, owner, "be floating point", values.dtype)
    return values


def check_integers(name: str, owner: str, values: Tensor) -> Tensor:
    """Return `values` if they are integers; booleans are refused."""
    if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool:
        raise ParameterError(name, owner, "be integers", values.dtype)
    return values


def check_tokens(
    name: str, owner: str, tokens: Int[Tensor, "batch time *k"], own: Bool[Tensor, "batch time"], vocab: int
) -> Int[Tensor, "batch time *k"]:
    """Return token numbers for indexing, 0 at padding, where they may be -100 or the like.

    Raises:
        ParameterError: If an own token is not in the vocabulary, or they are not integers.
    """
    check_integers(name, owner, tokens)
    tokens = torch.where(own if tokens.ndim == 2 else own.unsqueeze(-1), tokens, 0).long()
    check_all(name, owner, f"be in 0 .. {vocab - 1}", (tokens >= 0) & (tokens < max(1, vocab)), tokens)
    return tokens


def check_distribution(name: str, owner: str, probabilities: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Return probabilities if they are at least 0 and sum to 1 along `dim`, up to rounding.

    Raises:
        ParameterError: If they are not floating point, one is negative or not finite, or a sum differs from 1.
    """
    check_finite(name, owner, check_floating(name, owner, probabilities))
    check_all(name, owner, "be at least 0", probabilities >= 0, probabilities)
    total = probabilities.sum(dim)
    check_all(name, owner, "sum to 1", (total - 1).abs() <= torch.finfo(probabilities.dtype).eps ** 0.5, total)
    return probabilities


def sample_weights(owner: str, weights: Tensor | None, samples: Tensor) -> Tensor:
    """Return the probabilities of the rows of `samples`: as given where all are enumerated, else the same for each."""
    if weights is None:
        return samples.new_full(samples.shape[:1], 1 / max(1, len(samples)))
    return check_distribution("weights", owner, check_shape("weights", owner, weights, "batch", samples.shape[:1]))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or the dtype itself if it is wider."""
    return torch.promote_types(dtype, torch.float32)
