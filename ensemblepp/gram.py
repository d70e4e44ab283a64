"""Sums over data in float64 that a refit needs, for all replicas and arms at once and in bounded memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Entries of the largest temporary, 32 MB in float64: copies of all data at once could fill the memory.
_ENTRIES = 2**22
# Rows of a chunk where each chunk must belong to one of many arms.
_ARM_CHUNK = 64


class Sums(NamedTuple):
    """Sums over the data of each replica (and arm).

    Attributes:
        gram: X^T X.
        moment: X^T [y - X mu_0 | targets of the members].
        power: |y - X mu_0|^2 over the data with features that are not all zero.
        num_data: Number of such data.
    """

    gram: Float[Tensor, "*lead feature_dim feature_dim"]
    moment: Float[Tensor, "*lead feature_dim targets"]
    power: Float[Tensor, "*lead"]
    num_data: Int[Tensor, "*lead"]


def sum_data(
    features: Float[Tensor, "replicas batch feature_dim"],
    targets: Float[Tensor, "replicas batch targets"],
    prior_mean: Float[Tensor, " feature_dim"],
    arm: Int[Tensor, "replicas batch"] | None = None,
    num_arms: int | None = None,
) -> Sums:
    """Return the sums of every replica, or of every replica's arms.

    Cost O(n d (d + targets)), whatever the number of arms. Nothing waits for the device.

    Args:
        features: x.
        targets: [y | targets of the members], in reward units.
        prior_mean: mu_0, in float64.
        arm: Which arm each datum belongs to; None for one block.
        num_arms: K; None for one block.
    """
    replicas, count, dim = features.shape
    blocks, width = replicas * (num_arms or 1), dim + targets.shape[-1]
    options = {"dtype": torch.float64, "device": features.device}
    total = torch.zeros(blocks, dim, width, **options)  # type: ignore[call-overload]
    power = torch.zeros(blocks, **options)  # type: ignore[call-overload]
    seen = torch.zeros(blocks, dtype=torch.int64, device=features.device)
    if arm is None or num_arms is None:
        step = max(1, _ENTRIES // (replicas * width))
        for start in range(0, count, step):
            part = slice(start, start + step)
            rows, square, valid = _rows(features[:, part], targets[:, part], prior_mean)
            total.baddbmm_(rows[..., :dim].mT, rows)
            power += square
            seen += valid
    elif count:
        slots, block = _chunks(arm, num_arms)
        step = max(1, _ENTRIES // (replicas * width * max(dim, _ARM_CHUNK)))
        first = torch.arange(replicas, device=arm.device).view(-1, 1, 1) * count
        for start in range(0, slots.shape[1], step):
            places = slots[:, start : start + step]
            flat = (places.clamp_max(count - 1) + first).flatten()
            # An empty place becomes a row of zeros, which adds nothing.
            empty = (places == count).view(-1, _ARM_CHUNK, 1)
            x = features.flatten(0, 1).index_select(0, flat).view(-1, _ARM_CHUNK, dim).masked_fill(empty, 0.0)
            y = targets.flatten(0, 1).index_select(0, flat).view(-1, _ARM_CHUNK, width - dim).masked_fill(empty, 0.0)
            rows, square, valid = _rows(x, y, prior_mean)
            to = block[:, start : start + step].flatten()
            total.index_add_(0, to, rows[..., :dim].mT @ rows)
            power.index_add_(0, to, square)
            seen.index_add_(0, to, valid)
    lead = (replicas,) if num_arms is None else (replicas, num_arms)
    total = total.view(*lead, dim, width)
    return Sums(total[..., :dim], total[..., dim:], power.view(lead), seen.view(lead))


def _rows(features: Tensor, targets: Tensor, prior_mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return [x | y - x^T mu_0 | other targets] in float64, and the sum of squares and number of data per block."""
    rows = torch.cat([features.double(), targets.double()], dim=-1)
    dim = features.shape[-1]
    residual = rows[..., dim]
    residual -= rows[..., :dim] @ prior_mean
    valid = (features != 0).any(-1)
    return rows, torch.where(valid, residual, 0.0).square().sum(-1), valid.sum(-1)


def _chunks(arm: Tensor, num_arms: int) -> tuple[Tensor, Tensor]:
    """Lay data out in chunks that each belong to one arm.

    Returns the data's positions, (replicas, chunks, size) with n marking an empty place, and each chunk's block
    counted over replicas and arms, (replicas, chunks). Their number n // size + K depends on the sizes alone.
    """
    replicas, count = arm.shape
    size, device = _ARM_CHUNK, arm.device
    chunks = count // size + num_arms
    order = arm.argsort(dim=1, stable=True)
    sorted_arm = arm.gather(1, order)
    ones = torch.ones_like(arm)
    number = torch.zeros(replicas, num_arms, dtype=arm.dtype, device=device).scatter_add_(1, arm, ones)
    taken = (number + size - 1) // size
    first_chunk, first_datum = taken.cumsum(1) - taken, number.cumsum(1) - number
    rank = torch.arange(count, device=device) - first_datum.gather(1, sorted_arm)
    place = first_chunk.gather(1, sorted_arm) * size + rank
    positions = torch.full((replicas, chunks * size), count, device=device).scatter_(1, place, order)
    every = torch.arange(chunks, device=device).expand(replicas, -1).contiguous()
    block = torch.searchsorted(taken.cumsum(1), every, right=True).clamp_max(num_arms - 1)
    first_block = torch.arange(replicas, device=device).unsqueeze(-1) * num_arms
    return positions.view(replicas, chunks, size), first_block + block
