"""Mixture-of-experts routing under top-k: which router logits get no gradient, and how far the output jumps.

With the k chosen gates renormalised among themselves, a router logit outside the chosen set enters nothing: its
gradient is exactly zero (blackout) until it overtakes, and then the output jumps. First-order reasoning about a policy
(its score, its trust region) says nothing across that jump.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ensemblepp.errors import ParameterError, check_choice, check_int, check_shape
from ensemblepp.policy.inputs import check_floating, check_mask, check_not_nan, check_values

GATES = ("softmax", "sigmoid")


def topk_gates(
    router_logits: Float[Tensor, "*lead experts"], k: int, *, gate: str = "softmax", renormalise: bool = True
) -> Float[Tensor, "*lead experts"]:
    """Return the gate of every expert, 0 outside the k largest logits; differentiable within a fixed chosen set.

    Args:
        router_logits: h.
        k: Experts per token; raising it makes switches smaller, because the gate that switches is.
        gate: "softmax", or "sigmoid" of each logit by itself.
        renormalise: Normalise softmax gates over the chosen experts instead of over all. Over all of them, logits
            outside the set still enter the denominator, and the blackout is not exact.

    Raises:
        ParameterError: If k is not in 1..experts, a logit is NaN or `gate` is unknown.

    Source: top-k blackout and first-order failure.
    """
    chosen = _top("topk_gates", "router_logits", router_logits, k)
    if check_choice("gate", "topk_gates", gate, GATES) == "sigmoid":
        return torch.where(chosen, router_logits.sigmoid(), 0.0)
    if renormalise:
        return router_logits.masked_fill(~chosen, -torch.inf).softmax(-1)
    return torch.where(chosen, router_logits.softmax(-1), 0.0)


def topk_set(router_logits: Float[Tensor, "*lead experts"], k: int) -> Bool[Tensor, "*lead experts"]:
    """Return which experts are among the k largest logits; of equal logits, as many as fit.

    Raises:
        ParameterError: If k is not in 1..experts or a logit is NaN.

    Source: top-k blackout and first-order failure.
    """
    return _top("topk_set", "router_logits", router_logits, k)


def topk_mixture(
    router_logits: Float[Tensor, "*lead experts"],
    expert_outputs: Float[Tensor, "*lead experts out"],
    k: int,
    *,
    gate: str = "softmax",
    renormalise: bool = True,
) -> Float[Tensor, "*lead out"]:
    """Return sum_j w_j E_j over the chosen experts; see `topk_gates`.

    For renormalised softmax gates d / d h_j = w_j (E_j - mixture) for chosen experts, which sums to zero, and exactly
    0 for all others.

    Args:
        router_logits: h.
        expert_outputs: E_j, of every expert (a reference implementation for tests and diagnostics, not for speed).
        k: Experts per token.
        gate: See `topk_gates`.
        renormalise: See `topk_gates`.

    Raises:
        ParameterError: As `topk_gates`, or if the shapes do not match.

    Source: top-k blackout and first-order failure.
    """
    _check_outputs("topk_mixture", router_logits, expert_outputs)
    gates = topk_gates(router_logits, k, gate=gate, renormalise=renormalise)
    return (gates.unsqueeze(-2) @ expert_outputs).squeeze(-2)


class SwitchJump(NamedTuple):
    """The nearest change of experts: how far away it is, and what happens there."""

    margin: Float[Tensor, "*lead"]
    gate: Float[Tensor, "*lead"]
    jump: Float[Tensor, "*lead out"]


def switch_jump(
    router_logits: Float[Tensor, "*lead experts"],
    expert_outputs: Float[Tensor, "*lead experts out"],
    k: int,
    *,
    gate: str = "softmax",
    renormalise: bool = True,
) -> SwitchJump:
    """Return how the mixture jumps when the (k+1)-th logit rises to the k-th and takes its place.

    ::

        margin = h_(k) - h_(k+1)          jump = w_(k) (E_(k+1) - E_(k)),   w_(k) the k-th gate at the tie

    It is zero only if both experts agree on this input or the gate vanishes.

    Args:
        router_logits: h.
        expert_outputs: E_j, of every expert.
        k: Experts per token, fewer than there are.
        gate: See `topk_gates`.
        renormalise: See `topk_gates`.

    Returns:
        Margin in logits, the gate at the tie, and the output after the switch minus the output before it.

    Raises:
        ParameterError: If k is not in 1..experts - 1 or the shapes do not match.

    Source: top-k blackout and first-order failure.
    """
    owner = "switch_jump"
    _check_k(owner, "router_logits", router_logits, k, leave=1)
    _check_outputs(owner, router_logits, expert_outputs)
    values, order = router_logits.topk(k + 1, dim=-1)
    last, rival = order[..., k - 1 : k], order[..., k : k + 1]
    # Exactly at the tie top-k may pick either. The k-th gate is wanted, so the rival ends a rounding step below.
    level = torch.nextafter(values[..., k - 1 : k], values.new_full((), -torch.inf))
    tied = router_logits.scatter(-1, rival, level)
    weight = topk_gates(tied, k, gate=gate, renormalise=renormalise).gather(-1, last)
    before, after = (expert_outputs.gather(-2, _columns(each, expert_outputs)).squeeze(-2) for each in (last, rival))
    return SwitchJump(values[..., k - 1] - values[..., k], weight.squeeze(-1), weight * (after - before))


def switch_rate(
    trainer_router_logits: Float[Tensor, "*lead experts"],
    sampler_router_logits: Float[Tensor, "*lead experts"],
    k: int,
    mask: Bool[Tensor, "*lead"] | None = None,
) -> Float[Tensor, ""]:
    """Return the share of tokens that sampler and trainer route to different experts; 0 without any token.

    Args:
        trainer_router_logits: h under the policy being trained.
        sampler_router_logits: h as recorded by the sampler.
        k: Experts per token.
        mask: Which tokens count; all by default.

    Raises:
        ParameterError: If k is not in 1..experts, a counted logit is NaN or the shapes do not match.

    Source: top-k blackout and first-order failure.
    """
    owner, lead = "switch_rate", trainer_router_logits.shape[:-1]
    check_shape("sampler_router_logits", owner, sampler_router_logits, "*lead, experts", trainer_router_logits.shape)
    counted = trainer_router_logits.new_ones(lead, dtype=torch.bool)
    if mask is not None:
        counted = check_mask(check_shape("mask", owner, mask, "*lead", lead).reshape(1, -1), owner).view(lead)
    # Where no token counts, routers may hold anything.
    trainer, sampler = (
        _top(owner, name, torch.where(counted.unsqueeze(-1), check_floating(name, owner, logits), 0.0), k)
        for name, logits in (
            ("trainer_router_logits", trainer_router_logits),
            ("sampler_router_logits", sampler_router_logits),
        )
    )
    return ((trainer != sampler).any(-1) & counted).sum() / counted.sum().clamp(min=1)


def blackout_share(router_gradient: Float[Tensor, "*lead experts"]) -> Float[Tensor, ""]:
    """Return the share of router logits whose gradient is exactly zero: 1 - k / experts under a full blackout.

    Raises:
        ParameterError: If a gradient is NaN.

    Source: top-k blackout and first-order failure.
    """
    check_not_nan(
        "router_gradient", "blackout_share", check_floating("router_gradient", "blackout_share", router_gradient)
    )
    return (router_gradient == 0).to(torch.float32).mean()


def _columns(index: Tensor, expert_outputs: Tensor) -> Tensor:
    return index.unsqueeze(-1).expand(*index.shape, expert_outputs.shape[-1])


def _top(owner: str, name: str, router_logits: Tensor, k: int) -> Tensor:
    _check_k(owner, name, router_logits, k)
    index = router_logits.detach().topk(k, dim=-1).indices
    return torch.zeros_like(router_logits, dtype=torch.bool).scatter(-1, index, True)


def _check_k(owner: str, name: str, router_logits: Tensor, k: int, leave: int = 0) -> None:
    # A router may exclude experts by -inf; NaN would count as the largest.
    check_not_nan(name, owner, check_floating(name, owner, router_logits))
    most = router_logits.shape[-1] - leave
    if check_int("k", owner, k) > most:
        raise ParameterError("k", owner, f"be an int in 1..{most}", k)


def _check_outputs(owner: str, router_logits: Tensor, expert_outputs: Tensor) -> None:
    check_values("expert_outputs", owner, expert_outputs, "*lead, experts, out", (*router_logits.shape, None))
