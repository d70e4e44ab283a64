"""Bias against variance: how far to truncate, how long a product stays usable, how large a step to take."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ensemblepp.errors import check_int, check_real
from ensemblepp.policy.inputs import check_values


def variance_multiplier(chi2: float, horizon: int) -> float:
    """Return (1 + chi2)^T = E_q[rho^2] for T independent tokens: what sequence weights do to the variance.

    Args:
        chi2: chi2(p || q) of one token.
        horizon: T.

    Raises:
        ParameterError: If chi2 or T is negative.

    Source: When Speed Kills Stability, part 2.
    """
    chi2 = check_real("chi2", "variance_multiplier", chi2, at_least=0.0)
    return math.exp(check_int("horizon", "variance_multiplier", horizon, minimum=0) * math.log1p(chi2))


def critical_length(mean_ratio: float, upper: float) -> float:
    """Return T* = log C / log r, the length at which a product of ratios r leaves [0, C] (infinite for r <= 1).

    Args:
        mean_ratio: r, the geometric ratio.
        upper: C, above 1.

    Raises:
        ParameterError: If the ratio is not above 0 or C not above 1.

    Source: When Speed Kills Stability, part 3, the length trap.
    """
    mean_ratio = check_real("mean_ratio", "critical_length", mean_ratio, above=0.0)
    upper = check_real("upper", "critical_length", upper, above=1.0)
    return math.log(upper) / math.log(mean_ratio) if mean_ratio > 1 else math.inf


def seq_tis_bias(upper: float, chi2: float, *, largest: float = 1.0, sharp: bool = False) -> float:
    """Return a bound of the bias of min(rho, C) f: 2 K (1 + chi2) / C, or the sharp K (1 + chi2) / (4 C).

    The sharp one uses E(rho - C)_+ <= E rho^2 / (4 C).

    Args:
        upper: C; raising it lowers the bias.
        chi2: chi2(p || q) of sequences.
        largest: K, the largest |f|.
        sharp: Use the tighter constant.

    Raises:
        ParameterError: If C is not above 0 or another input is negative.

    Source: When Speed Kills Stability, part 2; sharp constant by (x - C)_+ <= x^2 / (4 C).
    """
    upper, chi2, largest = _tis("seq_tis_bias", upper, chi2, largest)
    return (0.25 if sharp else 2.0) * largest * (1 + chi2) / upper


def seq_tis_variance(upper: float, *, largest: float = 1.0, sharp: bool = False) -> float:
    """Return a bound of the variance of min(rho, C) f: K^2 C^2, or the sharp K^2 C.

    The sharp one uses E min(rho, C)^2 <= C E rho = C.

    Args:
        upper: C; raising it raises the variance.
        largest: K, the largest |f|.
        sharp: Use the tighter bound.

    Raises:
        ParameterError: If C is not above 0 or K is negative.

    Source: When Speed Kills Stability, part 2; sharp bound by min(rho, C)^2 <= C rho.
    """
    upper, _, largest = _tis("seq_tis_variance", upper, 0.0, largest)
    return largest**2 * (upper if sharp else upper**2)


def seq_tis_mse(upper: float, chi2: float, *, largest: float = 1.0, sharp: bool = False) -> float:
    """Return a bound of the mean squared error: `seq_tis_bias` squared plus `seq_tis_variance`, U-shaped in C.

    Args:
        upper: C.
        chi2: chi2(p || q) of sequences.
        largest: K, the largest |f|.
        sharp: Use the tighter bounds.

    Raises:
        ParameterError: If C is not above 0 or another input is negative.

    Source: When Speed Kills Stability, part 2.
    """
    return seq_tis_bias(upper, chi2, largest=largest, sharp=sharp) ** 2 + seq_tis_variance(
        upper, largest=largest, sharp=sharp
    )


def seq_tis_threshold(chi2: float, *, sharp: bool = False) -> float:
    """Return the C that minimises `seq_tis_mse`.

    ::

        published  C = sqrt(2 (1 + chi2)), error 4 K^2 (1 + chi2)          sharp  C = ((1 + chi2)^2 / 8)^(1/3)

    Args:
        chi2: chi2(p || q) of sequences.
        sharp: Minimise the tighter bound.

    Raises:
        ParameterError: If chi2 is negative.

    Source: When Speed Kills Stability, part 2.
    """
    chi2 = check_real("chi2", "seq_tis_threshold", chi2, at_least=0.0)
    return ((1 + chi2) ** 2 / 8) ** (1 / 3) if sharp else math.sqrt(2 * (1 + chi2))


def ascent_bound(
    gradient: Float[Tensor, " parameters"],
    bias: Float[Tensor, " parameters"],
    variance: float | Float[Tensor, ""],
    *,
    smoothness: float,
    step: float,
) -> Float[Tensor, ""]:
    """Return a lower bound of E J(theta + eta g) - J(theta) for an L-smooth J and an estimate g = grad J + b + noise.

    ::

        eta (1 - L eta / 2) |grad J|^2 + eta (1 - L eta) <grad J, b> - (L eta^2 / 2) (Var g + |b|^2)

    It is an equality for J(x) = -L |x|^2 / 2.

    Args:
        gradient: grad J.
        bias: b = E g - grad J.
        variance: Var g = E|g - E g|^2.
        smoothness: L.
        step: eta.

    Raises:
        ParameterError: If an input is not finite, a size is negative or the shapes do not match.

    Source: When Speed Kills Stability, part 1, stochastic gradient ascent lemma.
    """
    owner = "ascent_bound"
    check_values("gradient", owner, gradient, "parameters", (None,))
    check_values("bias", owner, bias, "parameters", gradient.shape)
    variance = check_real("variance", owner, float(variance), at_least=0.0)
    smoothness = check_real("smoothness", owner, smoothness, above=0.0)
    step = check_real("step", owner, step, at_least=0.0)
    signal, cross = gradient.square().sum(), gradient @ bias
    slope = step * (1 - smoothness * step / 2) * signal + step * (1 - smoothness * step) * cross
    return slope - smoothness * step**2 / 2 * (variance + bias.square().sum())


def optimal_step(
    gradient_square: float | Float[Tensor, ""], variance: float | Float[Tensor, ""], *, smoothness: float
) -> Float[Tensor, ""]:
    """Return eta = |grad J|^2 / (L (|grad J|^2 + Var g)), which maximises `ascent_bound` without bias.

    Once noise dominates, the step falls like 1 / Var; it is 0 without signal.

    Args:
        gradient_square: |grad J|^2.
        variance: Var g.
        smoothness: L.

    Raises:
        ParameterError: If an input is negative or not finite, or L is not above 0.

    Source: When Speed Kills Stability, part 1.
    """
    smoothness = check_real("smoothness", "optimal_step", smoothness, above=0.0)
    signal, noise = (
        torch.tensor(check_real(name, "optimal_step", float(value), at_least=0.0), dtype=torch.float64)
        for name, value in (("gradient_square", gradient_square), ("variance", variance))
    )
    total = signal + noise
    return torch.where(total > 0, signal / torch.where(total > 0, total, 1.0) / smoothness, 0.0)


def _tis(owner: str, upper: float, chi2: float, largest: float) -> tuple[float, float, float]:
    return (
        check_real("upper", owner, upper, above=0.0),
        check_real("chi2", owner, chi2, at_least=0.0),
        check_real("largest", owner, largest, at_least=0.0),
    )
