"""Where a policy gradient can move the policy, and how fast: covariance of signal and score against the Fisher matrix.

With centred scores S of responses drawn from q (on-policy, or centred under q), the expected gradient is Cov_q(A, S)
and F = Cov_q(S). A parameter without variance cannot move whatever the reward; the reward decides among the others.

Weights are the probabilities of the responses under q where all are enumerated, else 1 / n each. A score or signal
that is not finite, weights that are no distribution and shapes that do not match raise a ParameterError.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ensemblepp.errors import check_real
from ensemblepp.policy.inputs import check_values, sample_weights


class Cap(NamedTuple):
    """A signed quantity and the largest size it can have."""

    value: Float[Tensor, "*shape"]
    limit: Float[Tensor, "*shape"]


def fisher_matrix(
    scores: Float[Tensor, "batch parameters"], *, weights: Float[Tensor, " batch"] | None = None
) -> Float[Tensor, "parameters parameters"]:
    """Return F = Cov_q(S), which on-policy is the sum over tokens of E[s_t s_t^T].

    Args:
        scores: S of each response, for instance flattened gradients of its log-probability.
        weights: See the module.

    Raises:
        ParameterError: See the module.

    Source: covariance view of the policy gradient.
    """
    weights, centred = _centred("fisher_matrix", scores, weights)
    return (weights.unsqueeze(1) * centred).T @ centred


def gradient_caps(
    scores: Float[Tensor, "batch parameters"],
    advantages: Float[Tensor, " batch"],
    *,
    weights: Float[Tensor, " batch"] | None = None,
) -> Cap:
    """Return Cov_q(A, S) and std_q(A) sqrt(diag F), which bounds it parameter by parameter.

    Equality holds iff A is affine in that score. The caps concern raw gradients: Adam rescales them.

    Args:
        scores: S of each response.
        advantages: A of each response; a constant added changes nothing.
        weights: See the module.

    Raises:
        ParameterError: See the module.

    Source: covariance view of the policy gradient.
    """
    weights, centred = _centred("gradient_caps", scores, weights)
    signal = _signal("gradient_caps", advantages, weights)
    return Cap((weights * signal) @ centred, _std(signal, weights) * (weights @ centred.square()).sqrt())


def natural_gradient(
    scores: Float[Tensor, "batch parameters"],
    advantages: Float[Tensor, " batch"],
    *,
    weights: Float[Tensor, " batch"] | None = None,
) -> tuple[Float[Tensor, " parameters"], Float[Tensor, ""]]:
    """Return F^+ g, the least-squares regression of A on S, and its R^2 = g^T F^+ g / Var(A).

    Args:
        scores: S of each response.
        advantages: A of each response.
        weights: See the module.

    Returns:
        The direction, and the share of the signal's variance that one linear step can use, in [0, 1]; 0 for a
        constant signal.

    Raises:
        ParameterError: See the module.

    Source: covariance view of the policy gradient.
    """
    weights, centred = _centred("natural_gradient", scores, weights)
    signal = _signal("natural_gradient", advantages, weights)
    root = weights.sqrt()
    design = root.unsqueeze(1) * centred
    # The pseudo-inverse of the design, not of F, whose condition number is the square.
    direction = torch.linalg.pinv(design) @ (root * signal)
    variance = weights @ signal.square()
    explained = (design @ direction).square().sum()
    # A constant signal keeps the rounding of its mean, whose regression would be noise.
    varies = variance > (8 * torch.finfo(signal.dtype).eps) ** 2 * (weights @ advantages.square())
    return direction, torch.where(varies, explained / torch.where(varies, variance, 1.0), 0.0)


def log_odds_speed(
    scores: Float[Tensor, "batch parameters"],
    advantages: Float[Tensor, " batch"],
    difference: Float[Tensor, " parameters"],
    *,
    weights: Float[Tensor, " batch"] | None = None,
) -> Cap:
    """Return how fast the log-odds of two responses move per unit step, and the speed limit.

    ::

        d/d eta log p(y) / p(y') = Cov_q(A, S . d),        at most std_q(A) sqrt(d^T F d),        d = S(y) - S(y')

    Equality holds iff A is affine in S . d. The limit concerns one step of the covariance gradient: shared features
    (a large d^T F d), further steps and another sampler reach farther.

    Args:
        scores: S of each response drawn from q.
        advantages: A of each response.
        difference: d, the difference of the two responses' scores.
        weights: See the module.

    Raises:
        ParameterError: See the module.

    Source: log-odds speed limit.
    """
    check_values("scores", "log_odds_speed", scores, "batch, parameters", (None, None))
    check_values("difference", "log_odds_speed", difference, "parameters", scores.shape[1:])
    return Cap(
        *(cap.squeeze(0) for cap in gradient_caps((scores @ difference).unsqueeze(1), advantages, weights=weights))
    )


def policy_gradient_time(probability: float) -> float:
    """Return the time in which gradient flow on a two-armed bandit lifts the rewarded arm to 1/2.

    ::

        z' = 2 p (1 - p)     =>     t = log((1 - p) / p) + (1 - 2 p) / (2 p (1 - p))  ~  1 / (2 p)

    Args:
        probability: p of the rewarded arm at the start, at most 1/2.

    Raises:
        ParameterError: If the probability is not in (0, 1/2].

    Source: log-odds speed limit, rare responses.
    """
    p = _rare("policy_gradient_time", probability)
    return math.log((1 - p) / p) + (1 - 2 * p) / (2 * p * (1 - p))


def demonstration_time(probability: float) -> float:
    """Return the time in which imitation of the rewarded arm lifts it to 1/2, in the units of `policy_gradient_time`.

    ::

        z' = 2 (1 - p)     =>     t = (log((1 - p) / p) + 1 - p / (1 - p)) / 2  ~  log(1 / p) / 2

    Its signal is the mean shift, which no Fisher matrix caps.

    Args:
        probability: p of the rewarded arm at the start, at most 1/2.

    Raises:
        ParameterError: If the probability is not in (0, 1/2].

    Source: log-odds speed limit, rare responses.
    """
    p = _rare("demonstration_time", probability)
    return (math.log((1 - p) / p) + 1 - p / (1 - p)) / 2


def _rare(owner: str, probability: float) -> float:
    return check_real("probability", owner, probability, above=0.0, at_most=0.5)


def _centred(owner: str, scores: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    check_values("scores", owner, scores, "batch, parameters", (None, None))
    weights = sample_weights(owner, weights, scores)
    return weights, scores - weights @ scores


def _signal(owner: str, advantages: Tensor, weights: Tensor) -> Tensor:
    check_values("advantages", owner, advantages, "batch", weights.shape)
    return advantages - weights @ advantages


def _std(signal: Tensor, weights: Tensor) -> Tensor:
    return (weights @ signal.square()).sqrt()
