"""What a policy update gains, and how far off a surrogate can be.

Two descriptions of the gain J(p) - J(q) from samples of q, for rewards in an interval of length `reward_range`::

    surrogate   gain = E_q[R sum_t (rho_t - 1)] + error          tangent   gain = Cov_q(R, log rho) + remainder

The error has a family of bounds; the remainder is at most reward_range * KL(q || p) of whole sequences, without any
factor of the horizon, and the same bound holds for the error.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ensemblepp.errors import ParameterError, check_int, check_real, check_shape
from ensemblepp.policy.inputs import check_floating, check_log_ratio, check_values, own_values, sample_weights
from ensemblepp.policy.ratios import k3, masked_max, masked_sum

Scalar: TypeAlias = float | Float[Tensor, ""]


def tv_from_kl(kl: Scalar) -> Float[Tensor, ""]:
    """Return min(1, sqrt(KL / 2)), an upper bound of the total variation.

    Raises:
        ParameterError: If the divergence is negative or NaN.

    Source: Pinsker's inequality.
    """
    return _pinsker(_bound("kl", "tv_from_kl", kl))


def tv_from_chi2(chi2: Scalar, *, sharp: bool = False) -> Float[Tensor, ""]:
    """Return min(1, sqrt(chi2 / 2)), or the sharp min(1, sqrt(chi2) / 2): upper bounds of the total variation.

    The converse fails: a total variation of 0.001 goes with a chi2 of 1000 as well. TV governs the bias of a
    correction, chi2 its variance.

    Args:
        chi2: chi2(p || q) = E_q[rho^2] - 1.
        sharp: Cauchy-Schwarz on E_q|rho - 1| instead of the published constant.

    Raises:
        ParameterError: If chi2 is negative or NaN.

    Source: When Speed Kills Stability, part 1.
    """
    chi2 = _bound("chi2", "tv_from_chi2", chi2)
    return (chi2.sqrt() / 2 if sharp else (chi2 / 2).sqrt()).clamp(max=1.0)


def expectation_gap_bound(largest: Scalar, tv: Scalar) -> Float[Tensor, ""]:
    """Return 2 |f|_inf TV(p, q), which bounds |E_p f - E_q f|.

    Args:
        largest: |f|_inf.
        tv: TV(p, q).

    Raises:
        ParameterError: If an input is negative or NaN.

    Source: When Speed Kills Stability, part 1.
    """
    owner = "expectation_gap_bound"
    return 2 * _bound("largest", owner, largest) * _bound("tv", owner, tv)


def gradient_bias_bound(score_norm: Scalar, tv_max: Scalar, horizon: int) -> Float[Tensor, ""]:
    """Return 2 B eps T^2, which bounds |E_q[R S] - grad J(p)| for rewards in [0, 1]: what ignoring the mismatch costs.

    Args:
        score_norm: B, the largest norm of one token's score.
        tv_max: eps, the largest token total variation.
        horizon: T.

    Raises:
        ParameterError: If the horizon is not at least 1, or another input is negative or NaN.

    Source: Beyond Precision, theorem 3.1; the naive row of When Speed Kills Stability, part 2.
    """
    owner = "gradient_bias_bound"
    steps = check_int("horizon", owner, horizon)
    return expectation_gap_bound(
        steps * _bound("score_norm", owner, score_norm), steps * _bound("tv_max", owner, tv_max)
    )


def context_shift_bounds(
    horizon: int,
    *,
    tv_max: Scalar = 1.0,
    kl_max: Scalar = float("inf"),
    tv_sequence: Scalar = 1.0,
    kl_sequence: Scalar = float("inf"),
) -> Float[Tensor, " horizon"]:
    """Return upper bounds of TV(d_p, d_q) of the contexts before token t = 1 .. horizon (simulation lemma).

    ::

        min(1, (t - 1) eps, sqrt((t - 1) delta / 2), TV(q, p), sqrt(KL(q || p) / 2))

    Args:
        horizon: T, the number of tokens.
        tv_max: eps, the largest token total variation.
        kl_max: delta, the largest token KL(q || p), in nats.
        tv_sequence: Total variation of whole sequences.
        kl_sequence: KL(q || p) of whole sequences, in nats.

    Raises:
        ParameterError: If the horizon is not at least 1, or a divergence is negative or NaN.

    Source: Trust Region Masking (arXiv 2512.23075), context shift.
    """
    owner = "context_shift_bounds"
    before = torch.arange(check_int("horizon", owner, horizon), dtype=torch.float64)
    by_tv = _grown_tv(before, _bound("tv_max", owner, tv_max))
    by_kl = _grown_kl(before, _bound("kl_max", owner, kl_max))
    whole = _pinsker(_bound("kl_sequence", owner, kl_sequence))
    return torch.stack(
        [by_tv, by_kl, _bound("tv_sequence", owner, tv_sequence).expand(horizon), whole.expand(horizon)]
    ).amin(0)


def surrogate_errors(
    log_ratio: Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"]
) -> Float[Tensor, " batch"]:
    """Return e with E_q[R e] = J(p) - J(q) - E_q[R sum_t (rho_t - 1)], exactly.

    ::

        e = sum_t (rho_t - 1) (prod_{j > t} rho_j - 1) = k3(log rho) - sum_t k3(log rho_t)

    It has q-mean 0 and its positive part is at most k3(log rho), so |error| <= reward_range * KL(q || p).

    Args:
        log_ratio: d, from `ratios.log_ratios`.
        mask: 1 on the response's own tokens.

    Raises:
        ParameterError: If an own log-ratio is not finite or the shapes do not match.

    Source: Trust Region Masking (arXiv 2512.23075), exact error; second form by telescoping.
    """
    _, log_ratio = check_log_ratio(log_ratio, mask, "surrogate_errors")
    return k3(log_ratio.sum(1)) - k3(log_ratio).sum(1)


def surrogate_error_bounds(
    horizon: int,
    *,
    kl_max: Scalar = float("inf"),
    tv_max: Scalar | None = None,
    kl_sequence: Scalar = float("inf"),
    tv_sequence: Scalar | None = None,
    mean_tv: Float[Tensor, " horizon"] | None = None,
    reward_range: float = 1.0,
) -> dict[str, Float[Tensor, ""]]:
    """Return upper bounds of |J(p) - J(q) - E_q[R sum_t (rho_t - 1)]|, by name, and their minimum "unified".

    With eps, delta the largest token TV and KL, TVs and KLs of sequences, pk(x) = min(1, sqrt(x / 2))::

        classical              2 T (T - 1) eps^2
        pinsker_marginal_kl    4 pk(delta) sum_t pk((t - 1) delta)          -> (4/3) T^1.5 delta
        pinsker_marginal_tv    4 min(1, eps) sum_t pk((t - 1) delta)        -> (8/3) T^1.5 eps sqrt(delta / 2)
        mixed_kl               4 T pk(delta) pk(KLs)                        -> 2 T sqrt(delta KLs)
        mixed_tv               4 T min(1, eps) min(1, TVs)
        coupling               4 min(1, eps) sum_t min(1, (t - 1) eps)
        adaptive               4 sum_t E_q TV_t min(1, (T - t) eps, pk((T - t) delta))
        sequence_kl            KLs

    All are multiplied by `reward_range`. What is not known counts as infinite, or as what Pinsker's inequality or the
    maximum implies, so every entry is a bound, if perhaps a vacuous one. The maxima must hold over all contexts. A
    surrogate that exceeds the unified bound proves J(p) > J(q).

    Args:
        horizon: T, the longest response, in tokens.
        kl_max: delta, the largest token KL(q || p), in nats.
        tv_max: eps; by default pk(delta).
        kl_sequence: KLs = sum_t E_q KL_t, the expected sequence KL, in nats.
        tv_sequence: TVs; by default pk(KLs).
        mean_tv: E_q TV_t at each position; by default eps.
        reward_range: Largest minus smallest reward.

    Raises:
        ParameterError: If the horizon is not at least 1, or anything else is negative or NaN.

    Source: Trust Region Masking (arXiv 2512.23075), theorems on the bound family; "sequence_kl" follows from
        `surrogate_errors`.
    """
    owner = "surrogate_error_bounds"
    horizon = check_int("horizon", owner, horizon)
    reward_range = check_real("reward_range", owner, reward_range, at_least=0.0)
    delta, divergence = _bound("kl_max", owner, kl_max), _bound("kl_sequence", owner, kl_sequence)
    pinsker, whole = _pinsker(delta), _pinsker(divergence)
    eps = pinsker if tv_max is None else _bound("tv_max", owner, tv_max).clamp(max=1.0)
    tv_whole = whole if tv_sequence is None else _bound("tv_sequence", owner, tv_sequence).clamp(max=1.0)
    position_tv = eps
    if mean_tv is not None:
        check_floating("mean_tv", owner, check_shape("mean_tv", owner, mean_tv, "horizon", (horizon,)))
        position_tv = _bound("mean_tv", owner, mean_tv).flip(0)
    steps = torch.arange(horizon, dtype=torch.float64)
    by_kl, by_tv = _grown_kl(steps, delta), _grown_tv(steps, eps)
    bounds = {
        "classical": 2.0 * horizon * (horizon - 1) * eps.square(),
        "pinsker_marginal_kl": 4 * pinsker * by_kl.sum(),
        "pinsker_marginal_tv": 4 * eps * by_kl.sum(),
        "mixed_kl": 4 * horizon * pinsker * whole,
        "mixed_tv": 4 * horizon * eps * tv_whole,
        "coupling": 4 * eps * by_tv.sum(),
        # Step k from the end is token t = T - k, hence the flip of mean_tv above.
        "adaptive": 4 * (position_tv * torch.minimum(by_tv, by_kl)).sum(),
        "sequence_kl": divergence,
    }
    bounds = {name: reward_range * bound for name, bound in bounds.items()}
    return {**bounds, "unified": torch.stack(list(bounds.values())).amin()}


class Gain(NamedTuple):
    """The gain of an update and its two parts, in reward units: gain = tangent + remainder."""

    gain: Float[Tensor, ""]
    """Cov_q(R, rho) = J(p) - J(q)."""
    tangent: Float[Tensor, ""]
    """Cov_q(R, log rho); its gradient needs the trainer's log-probabilities only."""
    remainder: Float[Tensor, ""]
    """Cov_q(R, k3(log rho))."""
    bound: Float[Tensor, ""]
    """(largest - smallest reward) * E_q k3(log rho), where the mean estimates the sequence KL."""


def gain_decomposition(
    rewards: Float[Tensor, " batch"],
    log_ratio: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    weights: Float[Tensor, " batch"] | None = None,
) -> Gain:
    """Split J(p) - J(q), measured on samples of q, into tangent and remainder, differentiable in the log-ratios.

    ::

        rho = 1 + log rho + k3(log rho)     =>     Cov_q(R, rho) = Cov_q(R, log rho) + Cov_q(R, k3(log rho))

    Args:
        rewards: R of each response.
        log_ratio: d, from `ratios.log_ratios`.
        mask: 1 on the response's own tokens.
        weights: Probabilities of the responses under q, summing to 1, where all of them are enumerated. By default
            the responses are samples and covariances divide by n - 1.

    Raises:
        ParameterError: If an input is not finite, the weights are no distribution or the shapes do not match.

    Source: tangent and remainder of the covariance loss.
    """
    owner = "gain_decomposition"
    own, log_ratio = check_log_ratio(log_ratio, mask, owner)
    check_values("rewards", owner, rewards, "batch", own.shape[:1])
    whole = log_ratio.sum(1)
    excess = k3(whole)
    unbiased = len(rewards) / max(1, len(rewards) - 1) if weights is None else 1.0
    weights = sample_weights(owner, weights, rewards)
    signal = unbiased * weights * (rewards - weights @ rewards)
    everyone = torch.ones_like(rewards, dtype=torch.bool).unsqueeze(1)
    width = masked_max(rewards.unsqueeze(1), everyone) + masked_max(-rewards.unsqueeze(1), everyone)
    return Gain(signal @ torch.expm1(whole), signal @ whole, signal @ excess, width * (weights @ excess))


def baseline_tangent(
    rewards: Float[Tensor, " batch"],
    log_ratio: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    baseline: Float[Tensor, "batch time"],
    *,
    weights: Float[Tensor, " batch"] | None = None,
) -> Float[Tensor, ""]:
    """Return T_b = E_q sum_t (R - b_t) log rho_t, a tangent of the gain for any prefix baseline.

    ::

        gain - T_b = E_q[R k3(log rho)] - sum_t E_q[b_t KL_t],       |gain - T_b| <= reward_range * KL(q || p)

    for baselines b_t(c_t) inside the range of the rewards. b = 0 gives the classical lower bound, b = E_q R the
    sequence covariance, b = V_t the covariance per prefix; all have the gradient E_q sum_t (R - b_t) s_t. Subtracting
    beta KL(q || p) adds beta to the reward; beta = reward_range turns the tangent into a guaranteed gain.

    Args:
        rewards: R of each response.
        log_ratio: d, from `ratios.log_ratios`.
        mask: 1 on the response's own tokens.
        baseline: b_t, a function of what precedes token t.
        weights: Probabilities under q where all responses are enumerated; samples by default.

    Raises:
        ParameterError: If an input is not finite, the weights are no distribution or the shapes do not match.

    Source: tangent and remainder of the covariance loss.
    """
    owner = "baseline_tangent"
    own, log_ratio = check_log_ratio(log_ratio, mask, owner)
    check_values("rewards", owner, rewards, "batch", own.shape[:1])
    baseline = own_values("baseline", owner, baseline, own)
    value = masked_sum((rewards.unsqueeze(1) - baseline) * log_ratio, own, dim=1)
    return sample_weights(owner, weights, rewards) @ value


def _bound(name: str, owner: str, value: float | Tensor) -> Tensor:
    """Return a bound in float64 on the CPU: bounds are read by people, and some devices lack the type.

    Infinity is a bound that says nothing.
    """
    tensor = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    if not bool((tensor >= 0).all()):
        raise ParameterError(name, owner, "be at least 0", value)
    return tensor


def _pinsker(kl: Tensor) -> Tensor:
    return (kl / 2).sqrt().clamp(max=1.0)


def _grown_tv(steps: Tensor, tv_max: Tensor) -> Tensor:
    return (steps * tv_max).clamp(max=1.0)


def _grown_kl(steps: Tensor, kl_max: Tensor) -> Tensor:
    """Return pk(steps * delta); no step makes no difference, even at infinite divergence."""
    return torch.where(steps > 0, _pinsker(steps * kl_max), 0.0)
