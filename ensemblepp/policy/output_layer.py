"""What reaches the network through the output layer: updates of low rank, plus a leak set by the tail's mass.

Logits are z = U x with x = W h. For a token y drawn from q, the gradient that enters below the output layer is
u_y - ubar with ubar = sum_v q_v u_v, a difference of rows of U. Averaged over contexts c::

    G = mean_c sum_v q_v A_v (u_v - ubar) h_c^T                update of W
    dU_v = mean_c q_v A_v h_c                                  update of row v of U

with advantages centred in each context, sum_v q_v A_v = 0 (the functions centre them). Where only tokens of a set of
size k have mass, columns of G lie in the span of k - 1 differences. Values that are not finite, probabilities that do
not sum to 1 and shapes that do not match raise a ParameterError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ensemblepp.errors import check_all, check_int, check_shape
from ensemblepp.policy.inputs import check_distribution, check_mask, check_values


def hidden_update(
    probabilities: Float[Tensor, "contexts vocab"],
    advantages: Float[Tensor, "contexts vocab"],
    unembedding: Float[Tensor, "vocab width"],
    hidden: Float[Tensor, "contexts inputs"],
) -> Float[Tensor, "width inputs"]:
    """Return G, the expected update of the linear map W that feeds the output layer; 0 where q is one-hot.

    Args:
        probabilities: q of each token.
        advantages: A of each token.
        unembedding: U.
        hidden: h of each context.

    Raises:
        ParameterError: See the module.

    Source: output-layer rank of policy-gradient updates.
    """
    signal = _signal("hidden_update", probabilities, advantages, hidden)
    _check_unembedding("hidden_update", unembedding, probabilities.shape[1])
    return (signal @ unembedding).T @ hidden / max(1, len(hidden))


def output_update(
    probabilities: Float[Tensor, "contexts vocab"],
    advantages: Float[Tensor, "contexts vocab"],
    hidden: Float[Tensor, "contexts inputs"],
) -> Float[Tensor, "vocab inputs"]:
    """Return the expected update of U: only rows of competing tokens move, and the rows sum to 0.

    Args:
        probabilities: q of each token.
        advantages: A of each token.
        hidden: The output layer's input at each context.

    Raises:
        ParameterError: See the module.

    Source: output-layer rank of policy-gradient updates.
    """
    return _signal("output_update", probabilities, advantages, hidden).T @ hidden / max(1, len(hidden))


class Leak(NamedTuple):
    """Upper bounds of |G - G_head| in the Frobenius norm, from tight to simple."""

    exact: Float[Tensor, ""]
    """mean_c sum_tail q_v |A_v| |u_v - ubar_head| |h_c|"""
    by_largest: Float[Tensor, ""]
    """mean_c eps_c max|A| D |h_c| with tail mass eps_c, and D the largest |u_v - ubar_head|."""
    by_spread: Float[Tensor, ""]
    """mean_c sqrt(eps_c) std_c(A) D |h_c|"""


def head_update(
    probabilities: Float[Tensor, "contexts vocab"],
    advantages: Float[Tensor, "contexts vocab"],
    unembedding: Float[Tensor, "vocab width"],
    hidden: Float[Tensor, "contexts inputs"],
    head: Bool[Tensor, "contexts vocab"],
) -> tuple[Float[Tensor, "width inputs"], Leak]:
    """Return the part of G in the head's span, and bounds of the rest.

    ::

        G_head = mean_c sum_{v in head} q_v A_v (u_v - ubar_head) h_c^T          rank <= |head| - 1 if shared

    with ubar_head the head's mean under q. By Eckart-Young, singular value number |head| of G is at most the leak, so
    a low-rank adapter of rank |head| - 1 carries the main part.

    Args:
        probabilities: q of each token.
        advantages: A of each token.
        unembedding: U.
        hidden: h of each context.
        head: The competing tokens of each context, at least one.

    Raises:
        ParameterError: See the module, or if a context has no token in its head.

    Source: output-layer rank of policy-gradient updates.
    """
    signal = _signal("head_update", probabilities, advantages, hidden)
    _check_unembedding("head_update", unembedding, probabilities.shape[1])
    head = _check_head("head_update", head, probabilities.shape)
    inside = torch.where(head, probabilities, 0.0)
    mass = inside.sum(1, keepdim=True)
    center = inside @ unembedding / mass.clamp(min=torch.finfo(mass.dtype).tiny)
    main = torch.where(head, signal, 0.0)
    update = (main @ unembedding - main.sum(1, keepdim=True) * center).T @ hidden / max(1, len(hidden))
    distance = torch.where(head, 0.0, torch.cdist(center, unembedding))
    size = hidden.norm(dim=1)
    tail, reach = (probabilities - inside).sum(1), distance.amax(1)
    advantage = _centred(probabilities, advantages)
    spread = (probabilities * advantage.square()).sum(1).sqrt()
    largest = torch.where(head, 0.0, advantage.abs()).amax(1)
    bounds = (
        (signal.abs() * distance).sum(1) * size,
        tail * largest * reach * size,
        tail.sqrt() * spread * reach * size,
    )
    return update, Leak(*(bound.sum() / max(1, len(hidden)) for bound in bounds))


def rank_bound(head: Bool[Tensor, "contexts vocab"], unembedding: Float[Tensor, "vocab width"]) -> int:
    """Return the largest rank that G can have when each context puts mass on its head only.

    It is the dimension of the sum of the spans of {u_i - u_j : i, j in head_c}, and at most the number of contexts.

    Args:
        head: The competing tokens of each context, at least one.
        unembedding: U.

    Raises:
        ParameterError: See the module, or if a context has no token in its head.

    Source: output-layer rank of policy-gradient updates.
    """
    _check_unembedding("rank_bound", unembedding, None)
    head = _check_head("rank_bound", head, (None, len(unembedding)))
    first = head.int().argmax(1)
    differences = torch.where(head.unsqueeze(-1), unembedding - unembedding[first].unsqueeze(1), 0.0)
    # Contexts with the same competitors add nothing; the rank does not depend on repetitions.
    spans = int(torch.linalg.matrix_rank(differences.flatten(0, 1)))
    competing = int((head.sum(1) > 1).sum())
    return min(spans, competing)


def stable_rank(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, ""]:
    """Return |M|_F^2 / sigma_1^2, which small singular values hardly raise; 0 for a zero matrix."""
    energy = _energy(matrix)
    return _ratio(energy.sum(), energy[:1].sum())


def entropy_rank(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, ""]:
    """Return exp of the entropy of sigma_i^2 / |M|_F^2, the number of directions that carry the energy.

    A zero matrix has rank 1, as a single direction would.
    """
    energy = _energy(matrix)
    entropy: Tensor = torch.special.entr(_ratio(energy, energy.sum())).sum()
    return entropy.exp()


def top_energy(matrix: Float[Tensor, "rows columns"], k: int) -> Float[Tensor, ""]:
    """Return the share of |M|_F^2 in the k largest singular values, in [0, 1]; 0 for a zero matrix.

    Args:
        matrix: An update, for instance of one weight matrix between two checkpoints.
        k: For instance the number of competing tokens minus 1.
    """
    energy = _energy(matrix)
    return _ratio(energy[: check_int("k", "top_energy", k, minimum=0)].sum(), energy.sum())


def _signal(owner: str, probabilities: Tensor, advantages: Tensor, hidden: Tensor) -> Tensor:
    check_shape("probabilities", owner, probabilities, "contexts, vocab", (None, None))
    check_distribution("probabilities", owner, probabilities)
    check_values("advantages", owner, advantages, "contexts, vocab", probabilities.shape)
    check_values("hidden", owner, hidden, "contexts, inputs", (len(probabilities), None))
    return probabilities * _centred(probabilities, advantages)


def _check_unembedding(owner: str, unembedding: Tensor, vocab: int | None) -> None:
    check_values("unembedding", owner, unembedding, "vocab, width", (vocab, None))


def _check_head(owner: str, head: Tensor, shape: Sequence[int | None]) -> Tensor:
    mask = check_mask(check_shape("head", owner, head, "contexts, vocab", shape), owner, "head")
    check_all("head", owner, "hold a token in every context", mask.any(1), mask.sum(1))
    return mask


def _centred(probabilities: Tensor, advantages: Tensor) -> Tensor:
    return advantages - (probabilities * advantages).sum(1, keepdim=True)


def _energy(matrix: Tensor) -> Tensor:
    values: Tensor = torch.linalg.svdvals(matrix)
    return values.square()


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1.0), 0.0)
