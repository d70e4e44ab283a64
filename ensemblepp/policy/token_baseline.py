"""The optimal token baseline: one for every position, weighted by the gradient energy that responses spent so far."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ensemblepp.errors import check_all, check_real
from ensemblepp.policy.advantages import check_group, own_tokens_first, reward_to_go
from ensemblepp.policy.inputs import check_mask, check_values, own_values


def token_energy(
    trainer_logprob: Float[Tensor, "batch time"],
    collision: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """Return w_t = 1 - 2 pi(y_t) + sum_v pi(v)^2 = |e_y - pi|^2, the squared gradient of log pi(y_t) in the logits.

    Args:
        trainer_logprob: log pi(y_t) under the policy being trained.
        collision: sum_v pi(v)^2 of the same distribution; see `vocabulary.energy_from_logits` to get w from logits.
        mask: 1 on the response's own tokens; w is 0 elsewhere.

    Returns:
        w_t in [0, 2], without gradient.

    Raises:
        ParameterError: If an own value is not finite or the shapes do not match.

    Source: the optimal token baseline's logit-gradient proxy.
    """
    own = check_mask(mask, "token_energy")
    probability = own_values("trainer_logprob", "token_energy", trainer_logprob, own).detach().exp()
    collision = own_values("collision", "token_energy", collision, own).detach()
    # Never negative in exact arithmetic; rounding could make a sure token's energy -1e-8.
    return torch.where(own, (1 - 2 * probability + collision).clamp(min=0.0), 0.0)


@torch.no_grad()
def optimal_token_baseline(
    rewards: Float[Tensor, " batch"] | Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    group: Int[Tensor, " batch"],
    energy: Float[Tensor, "batch time"],
    *,
    importance_weights: Float[Tensor, "batch time"] | None = None,
    keep: Bool[Tensor, "batch time"] | None = None,
    leave_one_out: bool = False,
    multi_turn: bool = False,
    zero_tail: bool | None = None,
    eps: float = 1e-8,
) -> Float[Tensor, "batch time"]:
    """Return A_t = G_t - B_t with a baseline for every position, weighted by the gradient energy spent so far.

    ::

        W_t = sum_{j <= t} w_j rho_j^2          B_t = sum_i W_t^i G_t^i / (sum_i W_t^i + eps)

    over the responses of the group that are still alive at t. It minimises the variance that reward-to-go G_t adds
    through the score accumulated up to t, E[W_t (G_t - B_t)^2]. A group of one response has B = 0.

    Args:
        rewards: Of each response, paid at its end, or of each token.
        mask: 1 on the response's own tokens.
        group: Prompt of each response, any integers.
        energy: w_t >= 0 of each token, from `token_energy` or `vocabulary.energy_from_logits`.
        importance_weights: rho_t of each token where data are off-policy; they enter squared.
        keep: Tokens that no rule rejected; a row without any is left out of its group and gets 0.
        leave_one_out: Leave the own response out of its baseline: unbiased, B = 0 where nobody else is alive. The
            inclusive form shrinks the expected gradient by about 1 - 1 / n.
        multi_turn: Count positions in own tokens, so that responses interrupted by tool output still align.
        zero_tail: B = 0 where one response is alive alone, whose inclusive advantage would otherwise vanish. None:
            as `multi_turn`.
        eps: Added to the weights' sum; 0 makes the weighted residuals sum to 0 exactly.

    Raises:
        ParameterError: If an input is not finite, an energy is negative or the shapes do not match.

    Source: optimal token baseline, inclusive form as published; the leave-one-out form keeps it unbiased.
    """
    owner = "optimal_token_baseline"
    eps = check_real("eps", owner, eps, at_least=0.0)
    own, rewards, pairs = check_group(owner, rewards, mask, group, keep)
    alive = own & pairs.any(1, keepdim=True)
    weight = _accumulated_energy(owner, energy, importance_weights, alive).to(rewards.dtype)
    togo = reward_to_go(rewards, own)
    order = own_tokens_first(own) if multi_turn else None
    if order is not None:
        weight, togo, alive = (each.gather(1, order) for each in (weight, togo, alive))
    weight = torch.where(alive, weight, 0.0)  # the sum so far goes on through padding
    # One product with the pairs' matrix. Subtracting the own term from the group's sum would cancel badly.
    peers = (pairs & ~torch.eye(len(own), dtype=torch.bool, device=own.device) if leave_one_out else pairs).to(togo)
    mass = peers @ weight + eps
    baseline = (peers @ (weight * togo)) / torch.where(mass > 0, mass, 1.0)
    needed = 2 if (multi_turn if zero_tail is None else zero_tail) else 1
    count = pairs.to(togo) @ alive.to(togo)
    baseline = torch.where((count >= needed) & (pairs.sum(1, keepdim=True) > 1), baseline, 0.0)
    advantages = torch.where(alive, togo - baseline, 0.0)
    return advantages if order is None else torch.zeros_like(advantages).scatter(1, order, advantages)


class GradientNoise(NamedTuple):
    """How much of a batch's mean gradient is signal; all three are squared norms in the proxy's logit units."""

    signal: Float[Tensor, ""]
    power: Float[Tensor, ""]
    noise: Float[Tensor, ""]


@torch.no_grad()
def gradient_noise(
    advantages: Float[Tensor, "batch time"],
    energy: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    gradient_norm: Float[Tensor, ""],
) -> GradientNoise:
    """Return the squared mean gradient, the mean squared gradient, and the variance of the mean that they imply.

    ::

        signal = |mean g|^2,   power = mean_i W_i A_i^2,   noise = max(0, (power - signal) / (N - 1))

    Args:
        advantages: A_t; a response's A_i is their mean over its tokens.
        energy: w_t; a response's W_i is their sum.
        mask: 1 on the response's own tokens.
        gradient_norm: |mean g|, as measured by the optimiser before clipping.

    Raises:
        ParameterError: If an input is not finite, an energy is negative or the shapes do not match.

    Source: the optimal token baseline's variance proxies.
    """
    owner = "gradient_noise"
    own = check_mask(mask, owner)
    length = own.sum(1)
    mean = own_values("advantages", owner, advantages, own).sum(1) / length.clamp(min=1)
    count = (length > 0).sum()
    power = (_accumulated_energy(owner, energy, None, own)[:, -1:].sum(1) * mean.square()).sum() / count.clamp(min=1)
    signal = check_values("gradient_norm", owner, gradient_norm, "", ()).square()
    return GradientNoise(signal, power, ((power - signal) / (count - 1).clamp(min=1)).clamp(min=0.0))


def _accumulated_energy(owner: str, energy: Tensor, importance_weights: Tensor | None, own: Tensor) -> Tensor:
    """Return W_t = sum_{j <= t} w_j rho_j^2 over own tokens."""
    energy = own_values("energy", owner, energy, own).detach()
    check_all("energy", owner, "be at least 0", energy >= 0, energy)
    if importance_weights is not None:
        energy = energy * own_values("importance_weights", owner, importance_weights, own).detach().square()
    return energy.cumsum(1)
