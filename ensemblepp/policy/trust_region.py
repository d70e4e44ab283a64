"""Trust region masking: leave out whole responses in which the policies are too far apart.

The error of a token-level surrogate is governed by the largest token divergence (see `bounds`), which clipping single
tokens cannot control. Dropping the response can. Use the masks with a denominator that counts all responses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ensemblepp.errors import ParameterError, check_all, check_int, check_real, check_shape
from ensemblepp.policy.inputs import check_floating, check_log_ratio, check_mask, check_not_nan, wide
from ensemblepp.policy.ratios import k2, k3, masked_max, masked_mean, masked_sum
from ensemblepp.policy.vocabulary import BLOCK_VALUES, blocks


class Divergence(NamedTuple):
    """Exact divergences of the token distributions, 0 where the mask is 0."""

    kl: Float[Tensor, "batch time"]
    """KL(q(. | c_t) || p(. | c_t)), in nats; infinite where p excludes a token that q allows."""
    tv: Float[Tensor, "batch time"]
    """Total variation, in [0, 1]."""


@torch.no_grad()
def token_divergences(
    sampler_logits: Float[Tensor, "batch time vocab"],
    trainer_logits: Float[Tensor, "batch time vocab"],
    mask: Shaped[Tensor, "batch time"],
    *,
    temperature: float = 1.0,
    block_values: int = BLOCK_VALUES,
) -> Divergence:
    """Return KL(q || p) and TV(q, p) of the token distributions softmax(logits / temperature), exactly.

    ::

        KL = sum_v q_v (log q_v - log p_v)          TV = sum_v |q_v - p_v| / 2

    Logits are read in blocks: beside them a handful of blocks exist in float32, never a second copy of them all.

    Args:
        sampler_logits: Of q; -inf excludes a token.
        trainer_logits: Of p.
        mask: 1 on the response's own tokens; rows elsewhere may hold anything.
        temperature: Of both distributions; the sampler's.
        block_values: Logits converted at once; raising it costs memory, 20 bytes each, and hardly changes the speed.

    Returns:
        Both in float32, or float64 for float64 logits.

    Raises:
        ParameterError: If an own row holds NaN or nothing but -inf, an option is out of range or shapes do not match.

    Source: Trust Region Masking (arXiv 2512.23075): the guarantee needs the exact KL.
    """
    owner = "token_divergences"
    own = check_mask(mask, owner)
    check_shape("sampler_logits", owner, sampler_logits, "batch, time, vocab", (*own.shape, None))
    check_shape("trainer_logits", owner, trainer_logits, "batch, time, vocab", sampler_logits.shape)
    temperature = check_real("temperature", owner, temperature, above=0.0)
    block_values = check_int("block_values", owner, block_values)
    check_floating("sampler_logits", owner, sampler_logits)
    check_floating("trainer_logits", owner, trainer_logits)
    dtype = wide(torch.promote_types(sampler_logits.dtype, trainer_logits.dtype))
    kl, tv = torch.zeros((2, *own.shape), dtype=dtype, device=own.device)
    given = {"sampler_logits": sampler_logits, "trainer_logits": trainer_logits}
    valid = {name: torch.ones_like(own) for name in given}
    for part in blocks(sampler_logits, block_values):
        log_q, log_p = ((logits[part].to(dtype) / temperature).log_softmax(-1) for logits in given.values())
        for name, logprobs in zip(given, (log_q, log_p), strict=True):
            valid[name][part] = ~logprobs[..., :1].isnan().any(-1)  # one NaN logit makes NaN of its whole row
        q = log_q.exp()
        tv[part] = log_p.exp().sub_(q).abs_().sum(-1) / 2
        # 0 log 0 = 0, also where both exclude a token.
        gap = log_q.sub_(log_p).masked_fill_(q == 0, 0.0)
        kl[part] = torch.linalg.vecdot(q, gap)
    for name, rows in valid.items():
        check_all(name, owner, "hold at least one finite value per own token and no NaN", rows | ~own, rows)
    kl, tv = torch.where(own, kl, 0.0), torch.where(own, tv, 0.0)
    # Rounding may leave the divergence of nearly equal distributions a little below zero.
    return Divergence(kl.clamp(min=0.0), tv)


@torch.no_grad()
def trust_region_mask(
    divergence: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    max_upper: float | None = None,
    mean_upper: float | None = None,
) -> Bool[Tensor, "batch time"]:
    """Keep the responses whose token divergences stay in the trust region, by maximum, by mean, or both.

    ::

        max_t KL(q(. | c_t) || p(. | c_t)) <= max_upper          mean_t KL <= mean_upper

    Only the maximum controls the error of the token surrogate: one spiky token is enough to leave the region, whatever
    the mean. The mean is length-neutral. Watch the acceptance; above 70 % is recommended.

    Args:
        divergence: KL of each token's distributions, see `token_divergences`.
        mask: 1 on the response's own tokens.
        max_upper: Published: 0.05 alone, 0.1 with a mean bound.
        mean_upper: Published: 0.001 alone, 0.002 with a maximum.

    Raises:
        ParameterError: If neither bound is given, a bound is out of range, an own divergence is NaN or the shapes do
            not match.

    Source: Trust Region Masking (arXiv 2512.23075), algorithm 1 and its average criterion.
    """
    owner = "trust_region_mask"
    own = check_mask(mask, owner)
    check_floating("divergence", owner, check_shape("divergence", owner, divergence, "batch, time", own.shape))
    # Infinite divergences are real; no comparison holds for NaN, which would reject without a word.
    divergence = torch.where(own, divergence, 0.0)
    check_not_nan("divergence", owner, divergence)
    return _trust_region(owner, divergence, divergence, own, max_upper, mean_upper)


@torch.no_grad()
def sampled_trust_region_mask(
    log_ratio: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    max_upper: float | None = None,
    mean_upper: float | None = None,
) -> Bool[Tensor, "batch time"]:
    """Keep responses in the trust region as far as their sampled tokens tell: k2 for the maximum, k3 for the mean.

    k2 judges both directions alike, k3 is unbiased for the KL. The guarantee of `trust_region_mask` needs its exact
    divergences; this is the fall-back without logits.

    Args:
        log_ratio: d, from `ratios.log_ratios`.
        mask: 1 on the response's own tokens.
        max_upper: Bound of max_t k2(d_t).
        mean_upper: Bound of mean_t k3(d_t).

    Raises:
        ParameterError: If neither bound is given, a bound is out of range or the shapes do not match.

    Source: Trust Region Masking (arXiv 2512.23075), sample-based approximation.
    """
    own, log_ratio = check_log_ratio(log_ratio, mask, "sampled_trust_region_mask")
    return _trust_region("sampled_trust_region_mask", k2(log_ratio), k3(log_ratio), own, max_upper, mean_upper)


@torch.no_grad()
def ser_mask(
    log_ratio: Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"], *, upper: float = 0.05
) -> Bool[Tensor, "batch time"]:
    """Keep the responses with mean_t |rho_t - 1| <= upper; E_q |rho_t - 1| is twice the token total variation.

    Args:
        log_ratio: d, from `ratios.log_ratios`.
        mask: 1 on the response's own tokens.
        upper: Published range 0.03 to 0.10; raising it keeps more.

    Raises:
        ParameterError: If an own log-ratio is not finite, an option is out of range or the shapes do not match.

    Source: Trust Region Masking (arXiv 2512.23075), length-neutral variants, SER.
    """
    own, log_ratio = check_log_ratio(log_ratio, mask, "ser_mask")
    upper = check_real("upper", "ser_mask", upper, at_least=0.0)
    return own & (masked_mean(torch.expm1(log_ratio).abs(), own, dim=1) <= upper).unsqueeze(1)


@torch.no_grad()
def length_neutral_mask(
    log_ratio: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    tv_max: float,
    kl_max: float,
    upper: float,
    horizon: int | None = None,
) -> Bool[Tensor, "batch time"]:
    """Keep the responses whose weighted mean distance is at most `upper` (LN-TRM).

    ::

        W = sum_t |rho_t - 1| w_t <= upper sum_t w_t,      w_t = min(1, (T - t) eps, sqrt((T - t) delta / 2))

    w_t bounds the total variation of what may follow token t, so |Error| <= 2 E_q[W] for the token surrogate, where T
    is the horizon. A response of one token can cause no such error and is kept.

    Args:
        log_ratio: d, from `ratios.log_ratios`.
        mask: 1 on the response's own tokens; t counts these.
        tv_max: eps, the largest token total variation.
        kl_max: delta, the largest token KL(q || p), in nats.
        upper: Raising it keeps more.
        horizon: T, the longest response there can be; by default each response's own length, which is neutral in
            length but no bound where the length is random.

    Raises:
        ParameterError: If an own log-ratio is not finite, an option is out of range or the shapes do not match.

    Source: Trust Region Masking (arXiv 2512.23075), length-neutral variants, LN-TRM.
    """
    owner = "length_neutral_mask"
    own, log_ratio = check_log_ratio(log_ratio, mask, owner)
    upper = check_real("upper", owner, upper, at_least=0.0)
    weight = _future_weights(owner, own, tv_max, kl_max, horizon).to(log_ratio.dtype)
    total = masked_sum(torch.expm1(log_ratio).abs() * weight, own, dim=1)
    return own & (total <= upper * masked_sum(weight, own, dim=1)).unsqueeze(1)


def _trust_region(
    owner: str, peak: Tensor, level: Tensor, own: Tensor, max_upper: float | None, mean_upper: float | None
) -> Tensor:
    if max_upper is None and mean_upper is None:
        raise ParameterError("max_upper", owner, "be given, or mean_upper, or both", "neither")
    keep = own
    if max_upper is not None:
        max_upper = check_real("max_upper", owner, max_upper, at_least=0.0)
        keep = keep & (masked_max(peak, own, dim=1) <= max_upper).unsqueeze(1)
    if mean_upper is not None:
        mean_upper = check_real("mean_upper", owner, mean_upper, at_least=0.0)
        keep = keep & (masked_mean(level, own, dim=1) <= mean_upper).unsqueeze(1)
    return keep


def _future_weights(owner: str, own: Tensor, tv_max: float, kl_max: float, horizon: int | None) -> Tensor:
    tv_max = check_real("tv_max", owner, tv_max, at_least=0.0, at_most=1.0)
    kl_max = check_real("kl_max", owner, kl_max, at_least=0.0)
    position = own.cumsum(1)
    length = position[:, -1:] if horizon is None else check_int("horizon", owner, horizon)
    left = (length - position).clamp(min=0)
    return torch.minimum((left * tv_max).clamp(max=1.0), (left * kl_max / 2).sqrt())
