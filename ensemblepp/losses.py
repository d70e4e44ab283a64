"""Losses on index-conditioned outputs: per datum, with the gradient with respect to the block [mean | members]."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from ensemblepp.heads import IndexedOutput

PointLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(prediction, target) -> loss and its derivative with respect to the prediction, elementwise."""


def expected_index_loss(
    output: IndexedOutput,
    target: Float[Tensor, "*lead"],
    perturbation: Float[Tensor, "*lead index_dim"] | None,
    noise_scale: float | Tensor,
    index_weight: float = 1.0,
) -> tuple[Float[Tensor, "*lead"], Float[Tensor, "*lead columns"]]:
    """Return E_zeta (y + sigma <z, zeta> - f(zeta))^2 exactly, for E[zeta] = 0 and E[zeta zeta^T] = c I.

    The expectation over the update index is a regression of the mean on y and of every member on its perturbation::

        (y - mean)^2 + c |sigma z - members|^2

    so targets are one block [y | sigma z], as in the closed-form update, and nothing is sampled. The average over the
    2M indices +-sqrt(c M) e_m is the same number.

    Args:
        output: Of one output per datum: mean (*lead, 1), members (*lead, 1, index_dim).
        target: y.
        perturbation: z, stored with the datum; None where sigma is zero and nothing was stored.
        noise_scale: sigma, the noise's standard deviation in the units of y.
        index_weight: c: 1 for reference indices, 1 / M for indices of norm 1.

    Returns:
        The loss of each datum, and its gradient with respect to [mean | members].

    Source: Ensemble++ (arXiv 2407.13195), equation of the symmetrised loss; expectation in closed form.
    """
    mean_error = output.mean - target.unsqueeze(-1)
    errors = output.members.squeeze(-2)
    if perturbation is not None:
        errors = errors - noise_scale * perturbation
    gradient = torch.cat([mean_error, errors if index_weight == 1.0 else index_weight * errors], dim=-1).mul_(2)
    loss = mean_error.squeeze(-1).square() + index_weight * errors.square().sum(-1)
    return loss, gradient


def sampled_index_loss(
    output: IndexedOutput,
    target: Float[Tensor, "*lead"],
    perturbation: Float[Tensor, "*lead index_dim"],
    index: Float[Tensor, "*lead samples index_dim"],
    noise_scale: float | Tensor,
    point_loss: PointLoss,
) -> tuple[Float[Tensor, "*lead"], Float[Tensor, "*lead columns"]]:
    """Return the average over S update indices of point_loss(f(zeta) - sigma <z, zeta>, y).

    The perturbation is taken from the prediction, which for the squared loss is adding it to the target, and which
    keeps targets such as labels in their range for others.

    Args:
        output: Of one output per datum: mean (*lead, 1), members (*lead, 1, index_dim).
        target: y.
        perturbation: z, stored with the datum.
        index: The S update indices of each datum.
        noise_scale: sigma in the units of the prediction.
        point_loss: For instance `squared_loss` or `logistic_loss`.

    Returns:
        The loss of each datum, and its gradient with respect to [mean | members].
    """
    prediction = output.sample(index).squeeze(-1) - noise_scale * (index @ perturbation.unsqueeze(-1)).squeeze(-1)
    loss, slope = point_loss(prediction, target.unsqueeze(-1))
    weights = torch.cat([torch.ones_like(index[..., :1]), index], dim=-1)
    gradient = (slope.unsqueeze(-2) @ weights).squeeze(-2) / index.shape[-2]
    return loss.mean(-1), gradient


def ensemble_loss(
    output: IndexedOutput,
    target: Float[Tensor, "*lead"],
    perturbation: Float[Tensor, "*lead index_dim"],
    noise_scale: float | Tensor,
) -> tuple[Float[Tensor, "*lead"], Float[Tensor, "*lead columns"]]:
    """Return sum_m (y + sigma sqrt(M) z_m - member_m)^2: M separate regressions on separately perturbed rewards.

    The perturbation has E[z z^T] = I / M, so each member's own reward noise has standard deviation sigma. The mean
    takes no part (one-hot indices: a sample is one member).

    Args:
        output: Of one output per datum: members (*lead, 1, index_dim).
        target: y.
        perturbation: z, stored with the datum.
        noise_scale: sigma in the units of y.

    Returns:
        The loss of each datum, and its gradient with respect to [mean | members].

    Source: Osband et al. (2018), Randomized prior functions (arXiv 1806.03335), algorithm 1.
    """
    members = output.members.squeeze(-2)
    errors = members - target.unsqueeze(-1) - noise_scale * math.sqrt(members.shape[-1]) * perturbation
    gradient = torch.cat([torch.zeros_like(output.mean), 2 * errors], dim=-1)
    return errors.square().sum(-1), gradient


def squared_loss(prediction: Float[Tensor, "*shape"], target: Tensor) -> tuple[Tensor, Tensor]:
    """Return (prediction - target)^2 and its derivative."""
    error = prediction - target
    return error.square(), 2 * error


def logistic_loss(prediction: Float[Tensor, "*shape"], target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy -y log s(f) - (1 - y) log s(-f) of a logit f, and its derivative s(f) - y.

    Targets are labels in {0, 1} or soft labels in between.
    """
    target = target.expand_as(prediction)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(prediction, target, reduction="none")
    return loss, torch.sigmoid(prediction) - target


def bradley_terry_loss(
    first: IndexedOutput,
    second: IndexedOutput,
    label: Float[Tensor, "*lead"],
    perturbation: Float[Tensor, "*lead index_dim"],
    index: Float[Tensor, "*lead samples index_dim"],
    noise_scale: float | Tensor = 1.0,
    margin: float | Tensor = 0.0,
) -> tuple[Float[Tensor, "*lead"], Float[Tensor, "*lead columns"]]:
    """Return the average over S update indices of the preference loss, both responses under the same index.

    With the logit l(zeta) = f_first(zeta) - f_second(zeta) - margin - sigma <z, zeta>::

        loss = mean_zeta [-y log s(l) - (1 - y) log s(-l)]

    Args:
        first: Of the first response: mean (*lead, 1), members (*lead, 1, index_dim).
        second: Of the second response.
        label: y, the probability that the first is preferred: 1, 0, 0.5 for a tie, or between.
        perturbation: z, stored with the datum.
        index: The S update indices of each datum.
        noise_scale: sigma, in logits.
        margin: By how much a preferred response has to be better, in logits.

    Returns:
        The loss of each datum, and its gradient with respect to [mean | members] of the first response; that with
        respect to the second is its negative.

    Source: Bradley and Terry (1952); the index-sampled form as `sampled_index_loss`.
    """
    difference = IndexedOutput(first.mean - second.mean - margin, first.members - second.members)
    return sampled_index_loss(difference, label, perturbation, index, noise_scale, logistic_loss)
