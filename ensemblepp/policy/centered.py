"""Score centring: take the sampler's mean score out of every prefix, exactly or from the sampler's top tokens.

Under q != p the plain policy gradient E_q[A s] = E_q[A] sbar + Cov_q(A, s) has a drift along the mean score
sbar = E_q[s], a pull towards the sampler that says nothing about reward. Centring subtracts it.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ensemblepp.errors import ParameterError, check_all, check_choice, check_finite, check_real, check_shape
from ensemblepp.policy.aggregation import aggregate, frozen_signal
from ensemblepp.policy.inputs import active_tokens, check_floating, check_integers, check_tokens, own_values, wide
from ensemblepp.policy.ratios import log_ratio_of
from ensemblepp.policy.vocabulary import BLOCK_VALUES, selected_logprobs

CORRECTIONS = {"none": (0.0, math.inf), "tis": (0.0, 2.0), "mis": (0.5, 5.0), "full": (0.0, math.inf)}
"""Weight of a token with ratio r, and its default bounds: 1; min(r, upper); r where lower <= r <= upper; r."""

MASS_FLOOR = 1e-6
"""Least probability that sampler and trainer are taken to leave outside the head."""


def centered_policy_loss(
    trainer_logprob: Float[Tensor, "batch time"],
    sampler_logprob: Float[Tensor, "batch time"],
    head_trainer_logprob: Float[Tensor, "batch time k"],
    head_sampler_logprob: Float[Tensor, "batch time k"],
    advantages: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    correction: str = "none",
    lower: float | None = None,
    upper: float | None = None,
    keep: Bool[Tensor, "batch time"] | None = None,
    aggregation: str = "token_mean",
) -> Float[Tensor, ""]:
    """Return the score-centred loss from the sampler's top k tokens H, the tail modelled as rho times the trainer.

    ::

        rho = (1 - q_H) / (1 - p_H)          alpha = rho f(1 / rho)
        -agg(A (f(p_y / q_y) log p_y - sum_{v in H} (q_v f(p_v / q_v) - alpha p_v) log p_v))

    with f the correction and every coefficient frozen. It equals the dense loss for the sampler that has this tail.
    With constant advantages the expected gradient is zero; with p = q it is REINFORCE.

    Args:
        trainer_logprob: log p(y_t) of the sampled token, inside the head or not.
        sampler_logprob: log q(y_t), as recorded by the sampler at the trainer's temperature, without filtering.
        head_trainer_logprob: log p of the head's tokens; see `vocabulary.selected_logprobs`.
        head_sampler_logprob: log q of the same tokens; -inf fills up a head of fewer than k.
        advantages: A_t; published with group means and without division by the standard deviation.
        mask: 1 on the response's own tokens.
        correction: Weight f of the ratio r = p / q: "none" 1, "tis" min(r, upper), "mis" r inside [lower, upper] and
            0 outside, "full" r (already centred: the head's coefficients vanish).
        lower: Bound on the ratio for "mis", 0.5 by default.
        upper: Bound on the ratio, 2 for "tis" and 5 for "mis" by default; raising it trades bias for variance.
        keep: Tokens that no rule rejected.
        aggregation: The denominator: all own tokens, by default.

    Raises:
        ParameterError: If an input is not finite, an option is out of range or the shapes do not match.

    Source: score centring; published defaults k = 128, "tis" 2, "mis" [0.5, 5].
    """
    owner = "centered_policy_loss"
    own, active = active_tokens(owner, mask, keep)
    head = _active_rows("head_trainer_logprob", owner, head_trainer_logprob, active)
    recorded = _active_rows("head_sampler_logprob", owner, head_sampler_logprob, active, head.shape[-1])
    bounds = _bounds(owner, correction, lower, upper)
    check_finite("head_trainer_logprob", owner, head)
    with torch.no_grad():
        p, q = head.exp(), recorded.exp()
        rho = (1 - q.sum(-1)).clamp(min=MASS_FLOOR) / (1 - p.sum(-1)).clamp(min=MASS_FLOOR)
        alpha = _corrected_mass(torch.ones_like(rho), rho, correction, bounds)
        coefficients = _corrected_mass(p, q, correction, bounds) - alpha.unsqueeze(-1) * p
    return _centered(
        owner,
        (coefficients * head).sum(-1),
        trainer_logprob,
        sampler_logprob,
        advantages,
        (own, active, keep),
        correction,
        bounds,
        aggregation,
    )


def centered_policy_loss_from_logits(
    logits: Float[Tensor, "batch time vocab"],
    tokens: Int[Tensor, "batch time"],
    sampler_logprob: Float[Tensor, "batch time"],
    head_tokens: Int[Tensor, "batch time k"],
    head_sampler_logprob: Float[Tensor, "batch time k"],
    advantages: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    correction: str = "none",
    lower: float | None = None,
    upper: float | None = None,
    keep: Bool[Tensor, "batch time"] | None = None,
    aggregation: str = "token_mean",
    temperature: float = 1.0,
    block_values: int = BLOCK_VALUES,
) -> Float[Tensor, ""]:
    """Return `centered_policy_loss` straight from the trainer's logits, in blocks of tokens.

    Beside the logits and their gradient, in the logits' dtype, one block exists in float32.

    Args:
        logits: Of the trainer.
        tokens: y, the sampled tokens.
        sampler_logprob: log q(y_t), as recorded by the sampler.
        head_tokens: The sampler's top k tokens.
        head_sampler_logprob: log q of those.
        advantages: A_t.
        mask: 1 on the response's own tokens.
        correction: See `centered_policy_loss`.
        lower: See `centered_policy_loss`.
        upper: See `centered_policy_loss`.
        keep: Tokens that no rule rejected.
        aggregation: The denominator: all own tokens, by default.
        temperature: Divides the logits; match the sampler's.
        block_values: See `vocabulary.selected_logprobs`.

    Raises:
        ParameterError: As `centered_policy_loss` and `vocabulary.selected_logprobs`.

    Source: score centring; published defaults k = 128, "tis" 2, "mis" [0.5, 5].
    """
    owner = "centered_policy_loss_from_logits"
    check_integers("tokens", owner, check_shape("tokens", owner, tokens, "batch, time", mask.shape))
    check_integers(
        "head_tokens", owner, check_shape("head_tokens", owner, head_tokens, "batch, time, k", (*mask.shape, None))
    )
    chosen = torch.cat([tokens.unsqueeze(-1), head_tokens], dim=-1)
    logprob = selected_logprobs(logits, chosen, mask, temperature=temperature, block_values=block_values)
    return centered_policy_loss(
        logprob[..., 0],
        sampler_logprob,
        logprob[..., 1:],
        head_sampler_logprob,
        advantages,
        mask,
        correction=correction,
        lower=lower,
        upper=upper,
        keep=keep,
        aggregation=aggregation,
    )


def dense_centered_policy_loss(
    trainer_logprobs: Float[Tensor, "batch time vocab"],
    sampler_logprobs: Float[Tensor, "batch time vocab"],
    tokens: Int[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    correction: str = "none",
    lower: float | None = None,
    upper: float | None = None,
    keep: Bool[Tensor, "batch time"] | None = None,
    aggregation: str = "token_mean",
) -> Float[Tensor, ""]:
    """Return the score-centred loss over the whole vocabulary, the oracle of the top-k form.

    ::

        -agg(A (f(p_y / q_y) log p_y - sum_v q_v f(p_v / q_v) log p_v))

    Args:
        trainer_logprobs: log p of every token.
        sampler_logprobs: log q of every token; -inf where the sampler never goes.
        tokens: y, the sampled tokens.
        advantages: A_t.
        mask: 1 on the response's own tokens.
        correction: See `centered_policy_loss`.
        lower: See `centered_policy_loss`.
        upper: See `centered_policy_loss`.
        keep: Tokens that no rule rejected.
        aggregation: The denominator: all own tokens, by default.

    Raises:
        ParameterError: If an input is not finite, an option is out of range or the shapes do not match.

    Source: score centring, vanilla and weighted forms.
    """
    owner = "dense_centered_policy_loss"
    own, active = active_tokens(owner, mask, keep)
    trainer = _active_rows("trainer_logprobs", owner, trainer_logprobs, active)
    sampler = _active_rows("sampler_logprobs", owner, sampler_logprobs, active, trainer.shape[-1])
    bounds = _bounds(owner, correction, lower, upper)
    with torch.no_grad():
        coefficients = _corrected_mass(trainer.exp(), sampler.exp(), correction, bounds)
    # A token without mass may have log p = -inf, and 0 * inf is NaN.
    weighed = torch.where(coefficients > 0, trainer, 0.0)
    check_finite("trainer_logprobs", owner, weighed)
    drift = (coefficients * weighed).sum(-1)
    check_shape("tokens", owner, tokens, "batch, time", own.shape)
    chosen = check_tokens("tokens", owner, tokens, active, trainer.shape[-1]).unsqueeze(-1)
    trainer_logprob, sampler_logprob = (each.gather(-1, chosen).squeeze(-1) for each in (trainer, sampler))
    return _centered(
        owner,
        drift,
        trainer_logprob,
        sampler_logprob,
        advantages,
        (own, active, keep),
        correction,
        bounds,
        aggregation,
    )


def _centered(
    owner: str,
    drift: Tensor,
    trainer_logprob: Tensor,
    sampler_logprob: Tensor,
    advantages: Tensor,
    tokens: tuple[Tensor, Tensor, Tensor | None],
    correction: str,
    bounds: tuple[float, float],
    aggregation: str,
) -> Tensor:
    """Return -agg(A (f(r_y) log p_y - drift)); `tokens` are own, active and keep."""
    own, active, keep = tokens
    given = {"trainer_logprob": trainer_logprob, "sampler_logprob": sampler_logprob}
    ratio = log_ratio_of(owner, active, given).detach().exp()
    weight = _corrected_mass(ratio, torch.ones_like(ratio), correction, bounds)
    logprob = own_values("trainer_logprob", owner, trainer_logprob, active)
    signal = frozen_signal(owner, advantages, None, active)
    return aggregate(-signal * (weight * logprob - drift), own, aggregation, keep=keep)


def _active_rows(name: str, owner: str, logprob: Tensor, active: Tensor, size: int | None = None) -> Tensor:
    """Return log-probabilities (batch, time, size) in float32 or wider, and any finite ones at inactive tokens.

    Their signal is 0 there. A token with log-probability -inf is one that the policy excludes.
    """
    check_floating(name, owner, check_shape(name, owner, logprob, "batch, time, tokens", (*active.shape, size)))
    rows = torch.where(active.unsqueeze(-1), logprob.to(wide(logprob.dtype)), -1.0)
    check_all(name, owner, "be finite or -inf", rows < math.inf, rows)
    return rows


def _corrected_mass(p: Tensor, q: Tensor, correction: str, bounds: tuple[float, float]) -> Tensor:
    """Return q f(p / q), without the division; p and q of 1 and rho give alpha, of r and 1 the weight f(r)."""
    lower, upper = bounds
    if correction == "none":
        return q
    if correction == "tis":
        return torch.minimum(p, upper * q)
    if correction == "mis":
        return torch.where((lower * q <= p) & (p <= upper * q), p, 0.0)
    return p


def _bounds(owner: str, correction: str, lower: float | None, upper: float | None) -> tuple[float, float]:
    """Return the bounds on the ratio, the correction's own where none is given."""
    default = CORRECTIONS[check_choice("correction", owner, correction, CORRECTIONS)]
    if lower is not None and correction != "mis":
        raise ParameterError("lower", owner, 'stay None unless correction is "mis"', lower)
    if upper is not None and correction in ("none", "full"):
        raise ParameterError("upper", owner, 'stay None unless correction is "tis" or "mis"', upper)
    if correction not in ("tis", "mis"):
        return default
    low = check_real("lower", owner, default[0] if lower is None else lower, at_least=0.0)
    return low, check_real("upper", owner, default[1] if upper is None else upper, above=low)
