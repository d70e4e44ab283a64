"""What needs the whole vocabulary: log-probabilities of chosen tokens and gradient energies, straight from logits.

Logits of a batch of long responses are the largest tensor of the update. Both functions read them in blocks of
tokens, so that beside the logits (and their gradient) only one block exists in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ensemblepp.errors import check_finite, check_int, check_real, check_shape
from ensemblepp.policy.inputs import check_floating, check_mask, check_tokens, wide

BLOCK_VALUES = 2**23
"""Logits per block: 32 MiB in float32."""


def selected_logprobs(
    logits: Float[Tensor, "batch time vocab"],
    tokens: Int[Tensor, "batch time k"],
    mask: Shaped[Tensor, "batch time"],
    *,
    temperature: float = 1.0,
    block_values: int = BLOCK_VALUES,
) -> Float[Tensor, "batch time k"]:
    """Return log softmax(logits / temperature) at k tokens of each position, differentiable in the logits.

    ::

        log p_v = z_v - logsumexp(z)          d/dz sum_v g_v log p_v = g - softmax(z) sum_v g_v

    The backward pass computes the softmax again block by block and writes into a gradient of the logits' dtype; it
    cannot itself be differentiated.

    Args:
        logits: z; rows where the mask is 0 may hold anything and get gradient 0.
        tokens: The k tokens of each position, in any order.
        mask: 1 on the response's own tokens; the result is 0 elsewhere.
        temperature: Of the distribution; match the sampler's.
        block_values: Logits converted at once; raising it costs memory, 4 bytes each, and hardly changes the speed.

    Returns:
        Log-probabilities in float32, or float64 for float64 logits.

    Raises:
        ParameterError: If a result is not finite, a token or an option is out of range or the shapes do not match.
    """
    owner = "selected_logprobs"
    own = _check_logits(owner, logits, mask)
    temperature = check_real("temperature", owner, temperature, above=0.0)
    values = check_int("block_values", owner, block_values)
    check_shape("tokens", owner, tokens, "batch, time, k", (*own.shape, None))
    chosen = check_tokens("tokens", owner, tokens, own, logits.shape[-1])
    logprob: Tensor = _SelectedLogprobs.apply(logits, chosen, own, temperature, values)  # type: ignore[no-untyped-call]
    check_finite("logits", owner, logprob)
    return logprob


@torch.no_grad()
def energy_from_logits(
    logits: Float[Tensor, "batch time vocab"],
    tokens: Int[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    temperature: float = 1.0,
    block_values: int = BLOCK_VALUES,
) -> Float[Tensor, "batch time"]:
    """Return w_t = 1 - 2 pi(y_t) + sum_v pi(v)^2 without keeping a softmax, for the optimal token baseline.

    ::

        pi(y) = exp(z_y - lse(z))          sum_v pi(v)^2 = exp(lse(2 z) - 2 lse(z))

    One exponential per logit serves both sums.

    Args:
        logits: z; rows where the mask is 0 may hold anything.
        tokens: y, the sampled tokens.
        mask: 1 on the response's own tokens; w is 0 elsewhere.
        temperature: Of the distribution.
        block_values: Logits converted at once; raising it costs memory, 4 bytes each, and hardly changes the speed.

    Returns:
        w_t in [0, 2], in float32, or float64 for float64 logits; without gradient.

    Raises:
        ParameterError: If a result is not finite, a token or an option is out of range or the shapes do not match.

    Source: the optimal token baseline's logit-gradient proxy.
    """
    owner = "energy_from_logits"
    own = _check_logits(owner, logits, mask)
    temperature = check_real("temperature", owner, temperature, above=0.0)
    values = check_int("block_values", owner, block_values)
    check_shape("tokens", owner, tokens, "batch, time", own.shape)
    chosen = check_tokens("tokens", owner, tokens, own, logits.shape[-1]).unsqueeze(-1)
    energy = torch.empty(own.shape, dtype=wide(logits.dtype), device=logits.device)
    for part in blocks(logits, values):
        scaled, _ = _shifted(logits[part], temperature)
        weights = scaled.exp_()
        mass = weights.sum(-1)
        probability = weights.gather(-1, chosen[part]).squeeze(-1) / mass
        collision = torch.linalg.vecdot(weights, weights) / mass.square()
        energy[part] = 1 - 2 * probability + collision
    energy = torch.where(own, energy.clamp(min=0.0), 0.0)
    check_finite("logits", owner, energy)
    return energy


def _check_logits(owner: str, logits: Tensor, mask: Tensor) -> Tensor:
    """Return the own tokens. Finiteness is checked on the results, which are a vocabulary smaller."""
    own = check_mask(mask, owner)
    check_floating("logits", owner, check_shape("logits", owner, logits, "batch, time, vocab", (*own.shape, None)))
    return own


class _SelectedLogprobs(torch.autograd.Function):
    """Gather from a log-softmax that never exists as a whole."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, own: Tensor, temperature: float, values: int) -> Tensor:
        selected = torch.empty(tokens.shape, dtype=wide(logits.dtype), device=logits.device)
        normaliser = torch.empty((*own.shape, 1), dtype=selected.dtype, device=logits.device)
        for part in blocks(logits, values):
            scaled, peak = _shifted(logits[part], temperature)
            chosen = scaled.gather(-1, tokens[part])
            log_mass = scaled.exp_().sum(-1, keepdim=True).log_()
            selected[part] = chosen - log_mass
            normaliser[part] = peak + log_mass
        ctx.save_for_backward(logits, tokens, own, normaliser)
        ctx.temperature, ctx.values = temperature, values
        return selected.masked_fill_(~own.unsqueeze(-1), 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, tokens, own, normaliser = ctx.saved_tensors
        foreign = ~own.unsqueeze(-1)
        slope = slope.masked_fill(foreign, 0.0) / ctx.temperature
        gradient = torch.empty_like(logits)
        for part in blocks(logits, ctx.values):
            scaled = logits[part].to(slope.dtype, copy=True)
            softmax = scaled.div_(ctx.temperature).sub_(normaliser[part]).exp_()
            softmax.mul_(-slope[part].sum(-1, keepdim=True)).scatter_add_(-1, tokens[part], slope[part])
            # Positions that are not own may hold NaN, and 0 * NaN is NaN.
            gradient[part] = softmax.masked_fill_(foreign[part], 0.0)
        return gradient, None, None, None, None


def blocks(logits: Tensor, values: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of about `values` logits: whole responses if they fit, else pieces of one.

    Slices of both axes instead of a flattened view, because logits are often a shifted, non-contiguous slice.
    """
    batch, time, vocab = logits.shape
    width = max(1, min(time, values // max(1, vocab)))
    height = max(1, values // max(1, width * vocab))
    for row in range(0, batch, height):
        for column in range(0, time, width):
            yield slice(row, row + height), slice(column, column + width)


def _shifted(block: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return a fresh wide copy of z / temperature minus its maxima over the vocabulary, and the maxima."""
    scaled = block.to(wide(block.dtype), copy=True)
    if temperature != 1.0:
        scaled.div_(temperature)
    peak = scaled.amax(-1, keepdim=True)
    return scaled.sub_(peak), peak
