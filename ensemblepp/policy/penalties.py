"""KL penalties: estimators whose gradient is that of the divergence they are named after.

An estimator with the right mean can have a wrong gradient: differentiating log p - log p_ref on samples of p gives zero
in expectation. Which form is right depends on who drew the samples, hence two functions.
"""

from __future__ import annotations

from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ensemblepp.errors import check_choice
from ensemblepp.policy.aggregation import aggregate
from ensemblepp.policy.inputs import active_tokens, own_values
from ensemblepp.policy.ratios import ESTIMATORS, log_ratio_of

LEVELS = ("token", "sequence")


def sampler_kl_penalty(
    trainer_logprob: Float[Tensor, "batch time"],
    sampler_logprob: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    estimator: str = "k3",
    keep: Bool[Tensor, "batch time"] | None = None,
    aggregation: str = "token_mean",
) -> Float[Tensor, ""]:
    """Return an estimate of KL(q || p) from samples of the sampler q, differentiable in p.

    ::

        k1 = -log r,   k2 = (log r)^2 / 2,   k3 = r - 1 - log r,          r = p / q

    The mean over responses of summed k1 or k3 has the sequence KL as its expectation, and its gradient -E_q S too. k3
    is never negative and varies less near r = 1. k2 agrees to second order only. Adding beta KL(q || p) to a loss
    is the same, in expectation, as adding beta to every reward of the uncentred policy gradient.

    Args:
        trainer_logprob: log p(y_t) of the policy being trained.
        sampler_logprob: log q(y_t).
        mask: 1 on the response's own tokens.
        estimator: "k1", "k2" or "k3".
        keep: Tokens that no rule rejected.
        aggregation: The denominator: all own tokens, by default.

    Raises:
        ParameterError: If an input is not finite, an option is unknown or the shapes do not match.

    Source: Schulman (2020), Approximating KL divergence.
    """
    owner = "sampler_kl_penalty"
    estimate = ESTIMATORS[check_choice("estimator", owner, estimator, ESTIMATORS)]
    own, active = active_tokens(owner, mask, keep)
    given = {"trainer_logprob": trainer_logprob, "sampler_logprob": sampler_logprob}
    values = estimate(log_ratio_of(owner, active, given, frozen_reference=True))
    return aggregate(values, own, aggregation, keep=keep)


def reference_kl_penalty(
    trainer_logprob: Float[Tensor, "batch time"],
    reference_logprob: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    estimator: str = "k3",
    level: str = "token",
    weights: Float[Tensor, "batch time"] | None = None,
    keep: Bool[Tensor, "batch time"] | None = None,
    aggregation: str = "token_mean",
) -> Float[Tensor, ""]:
    """Return an estimate of KL(p || p_ref) from samples of the trainer p, with the gradient of that divergence.

    The value is k1, k2 or k3 of r = p_ref / p. The gradient is, whatever the value,::

        token:     s_t log(p / p_ref)_t          sequence:  s_t sum_{j >= t} log(p / p_ref)_j

    The token form is the gradient of each token's KL with the visited prefixes held fixed, the usual choice. The
    sequence form also credits a token with the divergence that it leads to: the gradient of the sequence KL.

    Args:
        trainer_logprob: log p(y_t) of the policy being trained.
        reference_logprob: log-probabilities of the policy to stay close to.
        mask: 1 on the response's own tokens.
        estimator: "k1", "k2" or "k3", for the value.
        level: "token" or "sequence", for the gradient.
        weights: Importance weights of trainer over sampler where the samples are not the trainer's.
        keep: Tokens that no rule rejected.
        aggregation: The denominator: all own tokens, by default.

    Raises:
        ParameterError: If an input is not finite, an option is unknown or the shapes do not match.

    Source: Schulman (2020), Approximating KL divergence; the gradient from E_p[s] = 0.
    """
    owner = "reference_kl_penalty"
    estimate = ESTIMATORS[check_choice("estimator", owner, estimator, ESTIMATORS)]
    check_choice("level", owner, level, LEVELS)
    own, active = active_tokens(owner, mask, keep)
    given = {"reference_logprob": reference_logprob, "trainer_logprob": trainer_logprob}
    log_ratio = log_ratio_of(owner, active, given).detach()
    slope = -log_ratio if level == "token" else -log_ratio.flip(1).cumsum(1).flip(1)
    logprob = own_values("trainer_logprob", owner, trainer_logprob, active)
    values = estimate(log_ratio) + slope * (logprob - logprob.detach())
    if weights is not None:
        values = values * own_values("weights", owner, weights, active).detach()
    return aggregate(values, own, aggregation, keep=keep)
