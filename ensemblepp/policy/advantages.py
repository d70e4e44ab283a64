"""Advantages: how much better a response, or the rest of it, did than its prompt group expects.

All functions are pure and carry no gradient. Rows that a keep-mask rejects enter no baseline and get advantage 0, so
that one absurd reward in a rejected response cannot shift the group it came from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ensemblepp.errors import ParameterError, check_all, check_finite, check_real, check_shape
from ensemblepp.policy.ratios import check_mask


def reward_to_go(
    rewards: Float[Tensor, " batch"] | Float[Tensor, "batch time"], mask: Shaped[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """Return G_t = sum_{j >= t} r_j over a response's own tokens, 0 elsewhere.

    Args:
        rewards: One per response, paid at its end, or one per token (ignored where the mask is 0).
        mask: 1 on the response's own tokens.

    Raises:
        ParameterError: If a reward is not finite or the shapes do not match.
    """
    own = check_mask(mask, "reward_to_go")
    rewards = _check_rewards("reward_to_go", rewards, own)
    togo = rewards.unsqueeze(1) if rewards.ndim == 1 else rewards.flip(1).cumsum(1).flip(1)
    return torch.where(own, togo, 0.0)


@torch.no_grad()
def group_mean_advantages(
    rewards: Float[Tensor, " batch"] | Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    group: Int[Tensor, " batch"],
    *,
    keep: Bool[Tensor, "batch time"] | None = None,
    scale_by_std: bool = False,
    eps: float = 1e-6,
) -> Float[Tensor, "batch time"]:
    """Return R_i minus its group's mean, over the group's standard deviation if asked.

    ::

        A_i = R_i - mean_j R_j                  A_i = (R_i - mean_j R_j) / (std_j R_j + eps)

    The own response is part of the mean, which shrinks the expected gradient by 1 - 1 / n in a group of n. A response
    alone in its group has no baseline, and a standard deviation of 1: A = R. Equal rewards give exactly 0.

    Args:
        rewards: Of each response, or of each token (then summed).
        mask: 1 on the response's own tokens.
        group: Prompt of each response, any integers.
        keep: Tokens that no rule rejected; a row without any is left out of its group and gets 0.
        scale_by_std: Divide by the standard deviation (with n - 1). It makes rewards comparable between prompts, and
            weighs prompts that are nearly always or nearly never solved the most.
        eps: Added to the standard deviation; raising it damps groups of nearly equal rewards.

    Raises:
        ParameterError: If a reward is not finite or the shapes do not match.

    Source: GRPO (arXiv 2402.03300), section 4.1; without the division Dr. GRPO (arXiv 2503.20783), section 3.
    """
    owner = "group_mean_advantages"
    eps = check_real("eps", owner, eps, above=0.0)
    own, rewards, pairs = check_group(owner, rewards, mask, group, keep)
    total, size = _total(rewards), pairs.sum(1)
    centered = torch.where(size > 1, lead_over_group(rewards, pairs) / size.clamp(min=1), total)
    if scale_by_std:
        # sum_j (R_i - mean)^2 taken from centred values: exactly 0 for equal rewards, whatever their rounding.
        squares = torch.where(pairs, centered.square(), 0.0).sum(1)
        std = torch.where(size > 1, (squares / (size - 1).clamp(min=1)).sqrt(), 1.0)
        centered = centered / (std + eps)
    return _spread(centered, own, pairs)


@torch.no_grad()
def rloo_advantages(
    rewards: Float[Tensor, " batch"] | Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    group: Int[Tensor, " batch"],
    *,
    keep: Bool[Tensor, "batch time"] | None = None,
) -> Float[Tensor, "batch time"]:
    """Return A_i = R_i - mean_{j != i} R_j, the other responses to the same prompt being the baseline.

    Unbiased, because the baseline does not contain the own reward; n / (n - 1) times the group-mean advantage. A
    response alone in its group has A = R.

    Args:
        rewards: Of each response, or of each token (then summed).
        mask: 1 on the response's own tokens.
        group: Prompt of each response, any integers.
        keep: Tokens that no rule rejected; a row without any is left out of its group and gets 0.

    Raises:
        ParameterError: If a reward is not finite or the shapes do not match.

    Source: Back to Basics (arXiv 2402.14740), section 3.
    """
    own, rewards, pairs = check_group("rloo_advantages", rewards, mask, group, keep)
    others = pairs.sum(1) - 1
    mean_lead = lead_over_group(rewards, pairs) / others.clamp(min=1)
    return _spread(torch.where(others > 0, mean_lead, _total(rewards)), own, pairs)


@torch.no_grad()
def weighted_advantages(
    rewards: Float[Tensor, " batch"] | Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    group: Int[Tensor, " batch"],
    energy: Float[Tensor, " batch"],
    *,
    keep: Bool[Tensor, "batch time"] | None = None,
) -> Float[Tensor, "batch time"]:
    """Return R_i - B with B = sum_j W_j R_j / sum_j W_j, the variance-optimal scalar baseline for W = |S|^2.

    Args:
        rewards: Of each response, or of each token (then summed).
        mask: 1 on the response's own tokens.
        group: Prompt of each response, any integers.
        energy: W >= 0: squared gradient norm of each response, exact or a proxy such as `token_energy` summed.
        keep: Tokens that no rule rejected; a row without any is left out of its group and gets 0.

    Raises:
        ParameterError: If an input is not finite, an energy is negative or the shapes do not match.

    Source: Greensmith, Bartlett and Baxter (2004), Variance reduction techniques for gradient estimates, section 4.
    """
    owner = "weighted_advantages"
    own, rewards, pairs = check_group(owner, rewards, mask, group, keep)
    check_shape("energy", owner, energy, "batch", own.shape[:1])
    # Rejected rows may have any energy, even NaN.
    weight = torch.where(pairs.any(1), energy.detach().to(rewards.dtype), 0.0)
    check_finite("energy", owner, weight)
    check_all("energy", owner, "be at least 0", weight >= 0, weight)
    mass = torch.where(pairs, weight, 0.0).sum(1)
    alone = (pairs.sum(1) <= 1) | (mass <= 0)
    mean_lead = lead_over_group(rewards, pairs, weight) / torch.where(alone, 1.0, mass)
    return _spread(torch.where(alone, _total(rewards), mean_lead), own, pairs)


def opo_advantages(
    rewards: Float[Tensor, " batch"] | Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    group: Int[Tensor, " batch"],
    *,
    keep: Bool[Tensor, "batch time"] | None = None,
) -> Float[Tensor, "batch time"]:
    """Return R_i - sum_j L_j R_j / sum_j L_j, the optimal baseline if a response's gradient energy is its length L.

    Args:
        rewards: Of each response, or of each token (then summed).
        mask: 1 on the response's own tokens.
        group: Prompt of each response, any integers.
        keep: Tokens that no rule rejected; a row without any is left out of its group and gets 0.

    Raises:
        ParameterError: If a reward is not finite or the shapes do not match.

    Source: On-Policy RL with Optimal Reward Baseline (arXiv 2505.23585), equation 8.
    """
    length = check_mask(mask, "opo_advantages").sum(1).to(torch.promote_types(rewards.dtype, torch.float32))
    return weighted_advantages(rewards, mask, group, length, keep=keep)


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

    Source: the optimal token baseline's logit-gradient proxy.
    """
    own = check_mask(mask, "token_energy")
    probability = torch.where(own, trainer_logprob.detach(), 0.0).exp()
    # Never negative in exact arithmetic; rounding could make a sure token's energy -1e-8.
    return torch.where(own, (1 - 2 * probability + collision.detach()).clamp(min=0.0), 0.0)


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
        energy: w_t of each token, from `token_energy` or `vocabulary.energy_from_logits`.
        importance_weights: rho_t of each token where data are off-policy; they enter squared.
        keep: Tokens that no rule rejected; a row without any is left out of its group and gets 0.
        leave_one_out: Leave the own response out of its baseline: unbiased, B = 0 where nobody else is alive. The
            inclusive form shrinks the expected gradient by about 1 - 1 / n.
        multi_turn: Count positions in own tokens, so that responses interrupted by tool output still align.
        zero_tail: B = 0 where one response is alive alone, whose inclusive advantage would otherwise vanish. None:
            as `multi_turn`.
        eps: Added to the weights' sum; 0 makes the weighted residuals sum to 0 exactly.

    Raises:
        ParameterError: If an input is not finite or the shapes do not match.

    Source: optimal token baseline, inclusive form as published; the leave-one-out form keeps it unbiased.
    """
    owner = "optimal_token_baseline"
    eps = check_real("eps", owner, eps, at_least=0.0)
    own, rewards, pairs = check_group(owner, rewards, mask, group, keep)
    weight = _accumulated_energy(owner, energy, importance_weights, own).to(rewards.dtype)
    togo = reward_to_go(rewards, own)
    alive = own & pairs.any(1, keepdim=True)
    order = own_tokens_first(own) if multi_turn else None
    if order is not None:
        weight, togo, alive = (each.gather(1, order) for each in (weight, togo, alive))
    weight = torch.where(alive, weight, 0.0)
    # One product with the pairs' matrix. Subtracting the own term from the group's sum would cancel badly.
    peers = (pairs & ~torch.eye(len(own), dtype=torch.bool, device=own.device) if leave_one_out else pairs).to(togo)
    mass = peers @ weight + eps
    baseline = (peers @ (weight * togo)) / torch.where(mass > 0, mass, 1.0)
    needed = 2 if (multi_turn if zero_tail is None else zero_tail) else 1
    count = pairs.to(togo) @ alive.to(togo)
    baseline = torch.where((count >= needed) & (pairs.sum(1, keepdim=True) > 1), baseline, 0.0)
    advantages = torch.where(alive, togo - baseline, 0.0)
    return advantages if order is None else torch.zeros_like(advantages).scatter(1, order, advantages)


@torch.no_grad()
def generalised_advantages(
    rewards: Float[Tensor, "batch time"],
    values: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    discount: float = 1.0,
    trace: float = 0.95,
    final_value: Float[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch time"]:
    """Return A_t = sum_{l >= 0} (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t.

    The next position is the next own token: tool output in between is skipped. Value targets are A + V.

    Args:
        rewards: Of each token.
        values: V_t of each token's context.
        mask: 1 on the response's own tokens; rewards and values elsewhere are ignored, whatever they hold.
        discount: gamma in [0, 1] per own token.
        trace: lambda in [0, 1]; raising it lowers the bias that wrong values bring and raises the variance.
        final_value: Value after the last token of a response that was cut off; 0, a finished response, by default.

    Raises:
        ParameterError: If an input is not finite, an option is out of range or the shapes do not match.

    Source: Schulman et al. (arXiv 1506.02438), equation 16.
    """
    owner = "generalised_advantages"
    discount = check_real("discount", owner, discount, at_least=0.0, at_most=1.0)
    decay = discount * check_real("trace", owner, trace, at_least=0.0, at_most=1.0)
    own = check_mask(mask, owner)
    rewards = _check_rewards(owner, check_shape("rewards", owner, rewards, "batch, time", own.shape), own)
    check_shape("values", owner, values, "batch, time", own.shape)
    values = torch.where(own, values, 0.0).to(rewards.dtype)
    check_finite("values", owner, values)
    order = own_tokens_first(own)
    rewards, values, alive = (each.gather(1, order) for each in (rewards, values, own))
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    if final_value is not None:
        last = alive & ~torch.nn.functional.pad(alive[:, 1:], (0, 1))
        following = torch.where(last, final_value.to(rewards.dtype).unsqueeze(1), following)
    advantages = torch.where(alive, rewards + discount * following - values, 0.0)
    # A discounted suffix sum in log2(time) doublings: after k of them each entry holds 2^k terms.
    step = 1
    while step < own.shape[1]:
        later = torch.nn.functional.pad(advantages[:, step:], (0, step))
        advantages = advantages + decay**step * later
        step *= 2
    return torch.where(own, torch.zeros_like(advantages).scatter(1, order, advantages), 0.0)


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

    Source: the optimal token baseline's variance proxies.
    """
    owner = "gradient_noise"
    own = check_mask(mask, owner)
    length = own.sum(1)
    mean = torch.where(own, advantages, 0.0).sum(1) / length.clamp(min=1)
    count = (length > 0).sum()
    power = (_accumulated_energy(owner, energy, None, own)[:, -1:].sum(1) * mean.square()).sum() / count.clamp(min=1)
    signal = gradient_norm.square()
    return GradientNoise(signal, power, ((power - signal) / (count - 1).clamp(min=1)).clamp(min=0.0))


def own_tokens_first(mask: Bool[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
    """Return the order that moves each row's own tokens to the front and keeps their sequence."""
    return torch.argsort(~mask, dim=1, stable=True)


def _accumulated_energy(owner: str, energy: Tensor, importance_weights: Tensor | None, own: Tensor) -> Tensor:
    """Return W_t = sum_{j <= t} w_j rho_j^2 over own tokens."""
    check_shape("energy", owner, energy, "batch, time", own.shape)
    if importance_weights is not None:
        check_shape("importance_weights", owner, importance_weights, "batch, time", own.shape)
        energy = energy * importance_weights.square()
    energy = torch.where(own, energy.detach(), 0.0).clamp(min=0.0)
    check_finite("energy", owner, energy)
    return energy.cumsum(1)


def _check_rewards(owner: str, rewards: Tensor, own: Tensor) -> Tensor:
    """Return rewards without gradient, in float32 or better, 0 at tokens that are not the response's own."""
    if rewards.ndim == 2:
        rewards = torch.where(own, check_shape("rewards", owner, rewards, "batch, time", own.shape), 0.0)
    else:
        check_shape("rewards", owner, rewards, "batch", own.shape[:1])
    check_finite("rewards", owner, rewards)
    return rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))


def check_group(
    owner: str, rewards: Tensor, mask: Tensor, group: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the own tokens, the rewards with 0 in rejected rows, and which pairs of kept rows share a group.

    Pairs instead of group numbers: no loop, and no wait for the device to count the groups.
    """
    own = check_mask(mask, owner)
    check_shape("group", owner, group, "batch", own.shape[:1])
    if group.dtype.is_floating_point or group.dtype.is_complex or group.dtype == torch.bool:
        raise ParameterError("group", owner, "be integers", group.dtype)
    kept = own if keep is None else own & check_shape("keep", owner, keep, "batch, time", own.shape)
    kept = kept.any(1)
    rewards = torch.where(kept if rewards.ndim == 1 else kept.unsqueeze(1), rewards, 0.0)
    pairs = (group.unsqueeze(1) == group) & kept.unsqueeze(1) & kept
    return own, _check_rewards(owner, rewards, own), pairs


def lead_over_group(rewards: Tensor, pairs: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Return sum_j W_j (R_i - R_j) over the group; differences first, so that equal rewards give exactly 0."""
    total = _total(rewards)
    return torch.where(pairs, weight * (total.unsqueeze(1) - total), 0.0).sum(1)


def _total(rewards: Tensor) -> Tensor:
    return rewards if rewards.ndim == 1 else rewards.sum(1)


def _spread(advantage: Tensor, own: Tensor, pairs: Tensor) -> Tensor:
    """Return each kept row's advantage on its own tokens."""
    return torch.where(own & pairs.any(1, keepdim=True), advantage.unsqueeze(1), 0.0)
