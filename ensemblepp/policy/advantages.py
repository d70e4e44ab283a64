"""Advantages: how much better a response, or the rest of it, did than its prompt group expects.

All functions are pure and carry no gradient. Rows that a keep-mask rejects enter no baseline and get advantage 0, so
that one absurd reward in a rejected response cannot shift the group it came from.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ensemblepp.errors import check_all, check_real, check_shape
from ensemblepp.policy.inputs import (
    active_tokens,
    check_floating,
    check_integers,
    check_mask,
    check_values,
    own_values,
    wide,
)


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
    kept = pairs.any(1, keepdim=True)
    weight = own_values("energy", owner, energy.unsqueeze(1), kept).squeeze(1).to(rewards.dtype)
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
    length = check_mask(mask, "opo_advantages").sum(1).to(torch.float32)
    return weighted_advantages(rewards, mask, group, length, keep=keep)


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
    values = own_values("values", owner, values, own).to(rewards.dtype)
    order = own_tokens_first(own)
    rewards, values, alive = (each.gather(1, order) for each in (rewards, values, own))
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    if final_value is not None:
        last = alive & ~torch.nn.functional.pad(alive[:, 1:], (0, 1))
        final_value = check_values("final_value", owner, final_value, "batch", own.shape[:1]).to(rewards.dtype)
        following = torch.where(last, final_value.unsqueeze(1), following)
    advantages = torch.where(alive, rewards + discount * following - values, 0.0)
    # A discounted suffix sum in log2(time) doublings: after k of them each entry holds 2^k terms.
    step = 1
    while step < own.shape[1]:
        later = torch.nn.functional.pad(advantages[:, step:], (0, step))
        advantages = advantages + decay**step * later
        step *= 2
    return torch.where(own, torch.zeros_like(advantages).scatter(1, order, advantages), 0.0)


def own_tokens_first(mask: Bool[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
    """Return the order that moves each row's own tokens to the front and keeps their sequence."""
    return torch.argsort(~mask, dim=1, stable=True)


def _check_rewards(owner: str, rewards: Tensor, own: Tensor) -> Tensor:
    """Return rewards without gradient, in float32 or better, 0 at tokens that are not the response's own."""
    if isinstance(rewards, Tensor) and rewards.ndim == 2:
        return own_values("rewards", owner, rewards, own).detach()
    return check_values("rewards", owner, rewards, "batch", own.shape[:1]).detach().to(wide(rewards.dtype))


def check_group(
    owner: str, rewards: Tensor, mask: Tensor, group: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the own tokens, the rewards with 0 in rejected rows, and which pairs of kept rows share a group.

    Pairs instead of group numbers: no loop, and no wait for the device to count the groups.
    """
    own, active = active_tokens(owner, mask, keep)
    check_integers("group", owner, check_shape("group", owner, group, "batch", own.shape[:1]))
    kept = active.any(1)
    # A rejected row's reward may be NaN.
    shape = own.shape[:1] if rewards.ndim == 1 else own.shape
    axes = "batch" if rewards.ndim == 1 else "batch, time"
    check_floating("rewards", owner, check_shape("rewards", owner, rewards, axes, shape))
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
