"""Ratios of trainer to sampler: validated, masked and clamped once, then everything else is built on them.

With q the policy that generated the data and p the policy being trained, d_t = log p(y_t) - log q(y_t)::

    token  exp(d_t)        sequence  exp(sum_t d_t)        geometric  exp(mean_t d_t)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ensemblepp.errors import check_all, check_real, check_shape
from ensemblepp.policy.inputs import check_log_ratio, check_mask, own_values

CLAMP = 20.0
"""Largest |log ratio| by default, in nats: exp(20) is 5e8, beyond which a ratio only overflows."""


def log_ratios(
    trainer_logprob: Float[Tensor, "batch time"],
    sampler_logprob: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    clamp: float = CLAMP,
) -> Float[Tensor, "batch time"]:
    """Return d_t = log p(y_t) - log q(y_t) clamped to [-clamp, clamp], and 0 where the mask is 0.

    Half-precision inputs are widened to float32 first. Gradient flows to both arguments, and is 0 where the clamp acts.

    Args:
        trainer_logprob: log p of each token.
        sampler_logprob: log q of each token.
        mask: 1 on the response's own tokens; what the others hold is ignored.
        clamp: In nats; raising it lets rarer tokens weigh more, until exp overflows.

    Raises:
        ParameterError: If a log-probability of an own token is not finite, or the shapes do not match.
    """
    own = check_mask(mask, "log_ratios")
    given = {"trainer_logprob": trainer_logprob, "sampler_logprob": sampler_logprob}
    return log_ratio_of("log_ratios", own, given, clamp=clamp)


def log_ratio_of(
    owner: str,
    own: Bool[Tensor, "batch time"],
    logprobs: dict[str, Tensor],
    *,
    clamp: float = CLAMP,
    frozen_reference: bool = False,
) -> Float[Tensor, "batch time"]:
    """Return `log_ratios` of the first to the second of two named log-probabilities, in whose names errors speak.

    With `frozen_reference` no gradient reaches the second.
    """
    clamp = check_real("clamp", owner, clamp, above=0.0)
    trainer, reference = (own_values(name, owner, values, own) for name, values in logprobs.items())
    return (trainer - (reference.detach() if frozen_reference else reference)).clamp(-clamp, clamp)


def token_ratios(
    log_ratio: Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"], *, clamp: float = CLAMP
) -> Float[Tensor, "batch time"]:
    """Return rho_t = exp(d_t), and 0 where the mask is 0.

    Args:
        log_ratio: d, from `log_ratios`.
        mask: 1 on the response's own tokens.
        clamp: Largest |d_t|, in nats.

    Raises:
        ParameterError: If an own log-ratio is not finite, an option is out of range or the shapes do not match.

    Source: When Speed Kills Stability, token weights.
    """
    own, log_ratio = check_log_ratio(log_ratio, mask, "token_ratios")
    return torch.where(own, _exp("token_ratios", log_ratio, clamp), 0.0)


def sequence_ratios(
    log_ratio: Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"], *, clamp: float = CLAMP
) -> Float[Tensor, " batch"]:
    """Return rho = exp(sum_t d_t), the ratio of the whole response; 1 for a response without tokens.

    Args:
        log_ratio: d, from `log_ratios`.
        mask: 1 on the response's own tokens.
        clamp: Largest |sum_t d_t|, in nats.

    Raises:
        ParameterError: If an own log-ratio is not finite, an option is out of range or the shapes do not match.

    Source: When Speed Kills Stability, sequence weights.
    """
    _, log_ratio = check_log_ratio(log_ratio, mask, "sequence_ratios")
    return _exp("sequence_ratios", log_ratio.sum(1), clamp)


def geometric_ratios(
    log_ratio: Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"], *, clamp: float = CLAMP
) -> Float[Tensor, " batch"]:
    """Return rho^(1/T) = exp(mean_t d_t), which does not grow with length; 1 for a response without tokens.

    Under the sampler its logarithm has the mean -(1/T) KL(q || p). Repeating a response's ratios leaves it unchanged.

    Args:
        log_ratio: d, from `log_ratios`.
        mask: 1 on the response's own tokens.
        clamp: Largest |mean_t d_t|, in nats.

    Raises:
        ParameterError: If an own log-ratio is not finite, an option is out of range or the shapes do not match.

    Source: When Speed Kills Stability, part 3 (length-neutral masks).
    """
    own, log_ratio = check_log_ratio(log_ratio, mask, "geometric_ratios")
    return _exp("geometric_ratios", masked_mean(log_ratio, own, dim=1), clamp)


def k1(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return -d: unbiased for KL(q || p) on samples of q, of either sign.

    Source: Schulman (2020), Approximating KL divergence.
    """
    return -log_ratio


def k2(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return d^2 / 2: never negative, the same for p / q and q / p, equal to the KL to second order only.

    Source: Schulman (2020), Approximating KL divergence.
    """
    return log_ratio.square() / 2


def k3(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return exp(d) - 1 - d: never negative, unbiased for KL(q || p) on samples of q.

    With the ratio inverted (q / p) its mean under q would be another number: the direction is part of the estimator.

    Source: Schulman (2020), Approximating KL divergence.
    """
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""The three estimators by name."""


def masked_sum(
    values: Shaped[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"], *, dim: int | None = None
) -> Shaped[Tensor, "..."]:
    """Return the sum over own tokens: of the batch, or along `dim`; 0 without tokens."""
    own = check_mask(mask, "masked_sum")
    values = torch.where(own, check_shape("values", "masked_sum", values, "batch, time", own.shape), 0)
    return values.sum() if dim is None else values.sum(dim)


def masked_mean(
    values: Shaped[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"], *, dim: int | None = None
) -> Float[Tensor, "..."]:
    """Return the sum over own tokens divided by their number: of the batch, or along `dim`; 0 without tokens."""
    own = check_mask(mask, "masked_mean")
    check_shape("values", "masked_mean", values, "batch, time", own.shape)
    count = own.sum() if dim is None else own.sum(dim)
    return masked_sum(values, own, dim=dim) / count.clamp(min=1)


def masked_max(
    values: Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"], *, dim: int | None = None
) -> Float[Tensor, "..."]:
    """Return the maximum over own tokens: of the batch, or along `dim`; 0 without tokens."""
    own = check_mask(mask, "masked_max")
    values = torch.where(own, check_shape("values", "masked_max", values, "batch, time", own.shape), -math.inf)
    if dim is None:
        own, values, dim = own.flatten(), values.flatten(), 0
    # One more entry, because the maximum of no entries is an error.
    floor = torch.full_like(values.sum(dim, keepdim=True), -math.inf)
    largest = torch.cat([values, floor], dim).amax(dim)
    return torch.where(own.any(dim), largest, 0.0)


def effective_sample_size(
    weights: Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"]
) -> Float[Tensor, ""]:
    """Return (sum w)^2 / (n sum w^2) over own tokens, in (0, 1]: the share of samples that equal weights would need.

    1 for equal weights, 1 / n when one weight dominates; 0 without tokens or when every weight is 0.

    Raises:
        ParameterError: If an own weight is negative or not finite, or the shapes do not match.
    """
    own = check_mask(mask, "effective_sample_size")
    weights = own_values("weights", "effective_sample_size", weights, own)
    check_all("weights", "effective_sample_size", "be at least 0", weights >= 0, weights)
    total, squares, count = weights.sum(), weights.square().sum(), own.sum()
    return torch.where(squares > 0, total.square() / (count * squares).clamp(min=torch.finfo(weights.dtype).tiny), 0.0)


@torch.no_grad()
def mismatch_report(
    trainer_logprob: Float[Tensor, "batch time"],
    sampler_logprob: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    lower: float | None = None,
    upper: float = 2.0,
    advantages: Float[Tensor, "batch time"] | None = None,
    clamp: float = CLAMP,
) -> dict[str, Float[Tensor, ""]]:
    """Return how far trainer and sampler are apart on this batch, as scalars without gradient.

    Token means run over all own tokens, sequence means over the responses that have any; without tokens all are 0.
    Estimates of divergences between q and p hold for samples of q::

        kl, k3                   mean of -d_t and of k3(d_t), both estimates of the token KL(q || p)
        chi2_token, _sequence    mean rho_t^2 - 1 and mean rho^2 - 1: what importance weights do to the variance
        ess_token, _sequence     effective sample size of weights truncated at upper, in (0, 1]
        perplexity_trainer, _sampler                   mean over responses of exp(-mean_t log p)
        log_perplexity_trainer, _sampler               the same without exp
        log_perplexity_gap, _abs, _max, _min           of mean_t log q - mean_t log p, per response
        perplexity_ratio         mean over responses of exp(gap), which is 1 / geometric ratio
        clip_fraction_high, _low, clip_fraction_raw    own tokens with rho_t > upper, < lower, either
        clip_fraction_applied    those where the bound changes the loss

    A bound is applied by truncation above `upper`. With `advantages` it is that of a clipped objective instead: above
    `upper` where A > 0 and below `lower` where A < 0, because the minimum ignores the others.

    Args:
        trainer_logprob: log p of each token.
        sampler_logprob: log q of each token.
        mask: 1 on the response's own tokens.
        lower: Of the ratio; 1 / upper by default.
        upper: Of the ratio.
        advantages: Of each token, to judge a clipped objective.
        clamp: Largest |log ratio|, in nats.

    Raises:
        ParameterError: If an own log-probability is not finite, a bound is out of range or the shapes do not match.

    Source: When Speed Kills Stability, sections on vllm-kl and perplexity; token and sequence chi2 of part 1.
    """
    owner = "mismatch_report"
    own = check_mask(mask, owner)
    if lower is None:
        upper = check_real("upper", owner, upper, at_least=1.0)
        lower = 1 / upper
    upper = check_real("upper", owner, upper, above=0.0)
    lower = check_real("lower", owner, lower, at_least=0.0, at_most=upper)
    given = {"trainer_logprob": trainer_logprob, "sampler_logprob": sampler_logprob}
    log_ratio = log_ratio_of(owner, own, given, clamp=clamp)
    ratio, sequence_ratio = token_ratios(log_ratio, own, clamp=clamp), sequence_ratios(log_ratio, own, clamp=clamp)
    log_p, log_q = (masked_mean(values.to(log_ratio.dtype), own, dim=1) for values in given.values())
    alive = own.any(1, keepdim=True)

    def over_sequences(values: Tensor) -> Tensor:
        return masked_mean(values.unsqueeze(1), alive)

    gap = log_q - log_p
    high, low = own & (ratio > upper), own & (ratio < lower)
    applied = high
    if advantages is not None:
        advantages = own_values("advantages", owner, advantages, own)
        applied = (high & (advantages > 0)) | (low & (advantages < 0))
    some = own.any()
    return {
        "kl": masked_mean(k1(log_ratio), own),
        "k3": masked_mean(k3(log_ratio), own),
        "chi2_token": torch.where(some, masked_mean(ratio.square(), own) - 1, 0.0),
        "chi2_sequence": torch.where(some, over_sequences(sequence_ratio.square()) - 1, 0.0),
        "ess_token": effective_sample_size(ratio.clamp(max=upper), own),
        "ess_sequence": effective_sample_size(sequence_ratio.clamp(max=upper).unsqueeze(1), alive),
        "perplexity_trainer": over_sequences(torch.exp(-log_p)),
        "perplexity_sampler": over_sequences(torch.exp(-log_q)),
        "log_perplexity_trainer": over_sequences(-log_p),
        "log_perplexity_sampler": over_sequences(-log_q),
        "log_perplexity_gap": over_sequences(gap),
        "log_perplexity_gap_abs": over_sequences(gap.abs()),
        "log_perplexity_gap_max": masked_max(gap.unsqueeze(1), alive),
        "log_perplexity_gap_min": -masked_max(-gap.unsqueeze(1), alive),
        "perplexity_ratio": over_sequences(gap.clamp(-clamp, clamp).exp()),
        "clip_fraction_high": masked_mean(high.to(ratio.dtype), own),
        "clip_fraction_low": masked_mean(low.to(ratio.dtype), own),
        "clip_fraction_raw": masked_mean((high | low).to(ratio.dtype), own),
        "clip_fraction_applied": masked_mean(applied.to(ratio.dtype), own),
    }


def _exp(owner: str, log_ratio: Tensor, clamp: float) -> Tensor:
    clamp = check_real("clamp", owner, clamp, above=0.0)
    return log_ratio.clamp(-clamp, clamp).exp()
