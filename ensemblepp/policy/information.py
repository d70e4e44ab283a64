"""How many bits about the best policy one episode can deliver, by the kind of learning signal.

A response is drawn from a policy that the history already fixes, so by itself it tells nothing about the unknown reward
parameter xi. What tells is the signal, and it carries at most its own entropy: log2 B for a scalar advantage of B
values, up to T log2 B for T rewards. All results are in bits.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ensemblepp.errors import check_all, check_choice, check_int, check_real, check_shape
from ensemblepp.policy.inputs import check_distribution, check_floating, check_integers, check_not_nan, check_values

SIGNALS = ("scalar", "terminal", "dense")


def entropy(probabilities: Float[Tensor, "*lead outcomes"]) -> Float[Tensor, "*lead"]:
    """Return -sum_i p_i log2 p_i.

    Args:
        probabilities: Summing to 1 along the last axis.

    Raises:
        ParameterError: If they are no distribution.
    """
    return _entropy(check_distribution("probabilities", "entropy", probabilities))


def binary_entropy(probability: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return h_b(p), what one pass or fail tells: at most 1 bit, little where the outcome is predictable.

    Args:
        probability: Of passing, given the response and the history.

    Raises:
        ParameterError: If one is not in [0, 1].

    Source: information bandwidth of policy-gradient signals.
    """
    return _binary_entropy("probability", "binary_entropy", probability)


def mutual_information(joint: Float[Tensor, "*lead rows columns"]) -> Float[Tensor, "*lead"]:
    """Return I(row; column) = H(row) + H(column) - H(row, column) of joint probabilities.

    Args:
        joint: Summing to 1 over the last two axes.

    Raises:
        ParameterError: If it is no distribution.
    """
    return _mutual_information(check_distribution("joint", "mutual_information", joint, (-2, -1)))


def conditional_information(joint: Float[Tensor, "conditions rows columns"]) -> Float[Tensor, ""]:
    """Return I(row; column | condition), the average over conditions.

    Args:
        joint: Probabilities of (condition, row, column), summing to 1.

    Raises:
        ParameterError: If it is no distribution.

    Source: information bandwidth of policy-gradient signals.
    """
    owner = "conditional_information"
    check_distribution(
        "joint", owner, check_shape("joint", owner, joint, "conditions, rows, columns", (None,) * 3), (0, 1, 2)
    )
    weight = joint.sum((1, 2))
    return weight @ _mutual_information(joint / torch.where(weight > 0, weight, 1.0)[:, None, None])


def quantise(values: Float[Tensor, "*shape"], levels: int, *, low: float, high: float) -> Float[Tensor, "*shape"]:
    """Return the nearest of `levels` equally spaced values from low to high.

    A real number can hide any amount of information: with a generic discount, one return reveals every reward it sums.
    Bits of a signal mean something only after a quantiser.

    Args:
        values: The signal; what lies outside [low, high] goes to the nearer end.
        levels: B, at least 2.
        low: The smallest level.
        high: The largest level.

    Raises:
        ParameterError: If a value is NaN or an option is out of range.

    Source: information bandwidth of policy-gradient signals.
    """
    check_not_nan("values", "quantise", check_floating("values", "quantise", values))
    levels = check_int("levels", "quantise", levels, minimum=2)
    low = check_real("low", "quantise", low)
    step = (check_real("high", "quantise", high, above=low) - low) / (levels - 1)
    return low + step * ((values - low) / step).round().clamp(0, levels - 1)


def signal_information(
    signals: Float[Tensor, "parameters size"],
    prior: Float[Tensor, " parameters"],
    *,
    best: Int[Tensor, " parameters"] | None = None,
) -> Float[Tensor, ""]:
    """Return the information of a deterministic signal about the reward parameter, or about the best policy.

    Given the response, each parameter xi implies one signal. Its information on xi is its entropy under the prior,
    H(signal | response, history); on the best policy, which may be the same for several xi, it can be less.

    Args:
        signals: The signal each parameter implies for this response (quantise it first); equal rows are one outcome.
        prior: Probability of each parameter given the history.
        best: Label of the best policy under each parameter; by default all differ.

    Raises:
        ParameterError: If a signal is not finite, the prior is no distribution or the shapes do not match.

    Source: information bandwidth of policy-gradient signals.
    """
    owner = "signal_information"
    check_values("signals", owner, signals, "parameters, size", (None, None))
    check_distribution("prior", owner, check_shape("prior", owner, prior, "parameters", signals.shape[:1]))
    outcomes, outcome = torch.unique(signals, dim=0, return_inverse=True)
    if best is None:
        best = torch.arange(len(prior), device=prior.device)
    check_integers("best", owner, check_shape("best", owner, best, "parameters", prior.shape))
    label = torch.unique(best, return_inverse=True)[1]
    joint = prior.new_zeros(len(prior), len(outcomes)).index_put_((label, outcome), prior, accumulate=True)
    return _mutual_information(joint)


def noisy_information(
    likelihood: Float[Tensor, "parameters outcomes"], prior: Float[Tensor, " parameters"]
) -> Float[Tensor, ""]:
    """Return I(r; xi | response, history) = H(r | response, history) - H(r | response, xi, history) of noisy rewards.

    Args:
        likelihood: Probability of each outcome under each parameter.
        prior: Probability of each parameter given the history.

    Raises:
        ParameterError: If the prior or a row of the likelihood is no distribution or the shapes do not match.

    Source: information bandwidth of policy-gradient signals.
    """
    owner = "noisy_information"
    check_distribution(
        "likelihood", owner, check_shape("likelihood", owner, likelihood, "parameters, outcomes", (None, None))
    )
    check_distribution("prior", owner, check_shape("prior", owner, prior, "parameters", likelihood.shape[:1]))
    return _entropy(prior @ likelihood) - prior @ _entropy(likelihood)


def group_information_bound(pass_probability: Float[Tensor, "*lead rollouts"]) -> Float[Tensor, "*lead"]:
    """Return sum_g h_b(p_g), which bounds what the pass-or-fail outcomes of a group of rollouts tell.

    Args:
        pass_probability: Of each rollout, given the response and the history.

    Raises:
        ParameterError: If one is not in [0, 1].

    Source: information bandwidth of policy-gradient signals.
    """
    return _binary_entropy("pass_probability", "group_information_bound", pass_probability).sum(-1)


def episode_bound(levels: int, signal: str, *, horizon: int = 1) -> float:
    """Return the most bits that one episode can deliver.

    ::

        scalar, terminal    log2 B                   dense    T log2 B

    N episodes deliver at most N times as much, whatever the capacity of the adapter that learns from them.

    Args:
        levels: B, distinct values of the scalar advantage, of the terminal reward, or of each dense reward.
        signal: "scalar" advantage, per-token advantages of a "terminal" reward, or of independent "dense" rewards.
        horizon: T.

    Raises:
        ParameterError: If B or T is not at least 1 or the signal is unknown.

    Source: information bandwidth of policy-gradient signals.
    """
    bits = math.log2(check_int("levels", "episode_bound", levels))
    horizon = check_int("horizon", "episode_bound", horizon)
    return bits * (horizon if check_choice("signal", "episode_bound", signal, SIGNALS) == "dense" else 1)


def discounted_returns(rewards: Float[Tensor, "*lead time"], discount: float = 1.0) -> Float[Tensor, "*lead time"]:
    """Return G_t = sum_{j >= t} discount^(j - t) r_j, from which `rewards_from_returns` recovers every reward.

    Args:
        rewards: r_t.
        discount: In [0, 1].

    Raises:
        ParameterError: If the discount is not in [0, 1].

    Source: information bandwidth of policy-gradient signals.
    """
    discount = check_real("discount", "discounted_returns", discount, at_least=0.0, at_most=1.0)
    step = torch.arange(rewards.shape[-1], device=rewards.device)
    ahead = step.unsqueeze(1) - step
    powers = torch.where(ahead >= 0, discount ** ahead.clamp(min=0).to(rewards.dtype), 0.0)
    return rewards @ powers


def rewards_from_returns(returns: Float[Tensor, "*lead time"], discount: float = 1.0) -> Float[Tensor, "*lead time"]:
    """Return r_t = G_t - discount G_{t+1}: returns-to-go are rewards in other coordinates.

    Args:
        returns: G_t.
        discount: In [0, 1], that of the returns.

    Raises:
        ParameterError: If the discount is not in [0, 1].

    Source: information bandwidth of policy-gradient signals.
    """
    discount = check_real("discount", "rewards_from_returns", discount, at_least=0.0, at_most=1.0)
    following = torch.nn.functional.pad(returns, (0, 1))[..., 1:]
    return returns - discount * following


def td_errors(
    rewards: Float[Tensor, "*lead time"], values: Float[Tensor, "*lead time"], discount: float = 1.0
) -> Float[Tensor, "*lead time"]:
    """Return delta_t = r_t + discount V_{t+1} - V_t, with V = 0 after the end: rewards plus a known offset.

    Args:
        rewards: r_t.
        values: V_t, known before the rewards are.
        discount: In [0, 1].

    Raises:
        ParameterError: If the discount is not in [0, 1] or the shapes do not match.

    Source: information bandwidth of policy-gradient signals.
    """
    check_shape("values", "td_errors", values, "..., time", rewards.shape)
    return rewards - rewards_from_returns(values, discount)


def _entropy(probabilities: Tensor) -> Tensor:
    values: Tensor = torch.special.entr(probabilities)
    return values.sum(-1) / math.log(2)


def _binary_entropy(name: str, owner: str, probability: Tensor) -> Tensor:
    check_floating(name, owner, probability)
    check_all(name, owner, "be in [0, 1]", (probability >= 0) & (probability <= 1), probability)
    return _entropy(torch.stack([probability, 1 - probability], -1))


def _mutual_information(joint: Tensor) -> Tensor:
    return _entropy(joint.sum(-1)) + _entropy(joint.sum(-2)) - _entropy(joint.flatten(-2))
