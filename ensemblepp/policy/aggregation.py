"""From per-token values to one number: five denominators, and the frozen signal that losses multiply with."""

from __future__ import annotations

from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ensemblepp.errors import check_choice
from ensemblepp.policy.inputs import active_tokens, own_values

AGGREGATIONS = (
    "token_mean",
    "token_sum",
    "sequence_mean_token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum_norm",
)


def aggregate(
    values: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    aggregation: str,
    *,
    keep: Bool[Tensor, "batch time"] | None = None,
) -> Float[Tensor, ""]:
    """Return the values of kept tokens, summed and divided by a count of all responses or tokens.

    With v summed over kept own tokens, L a response's own tokens, N the responses that have any, T the time axis::

        token_mean                    sum v / sum L
        token_sum                     sum v; divide by a count of your own, for instance over accumulated batches
        sequence_mean_token_sum       (1 / N) sum_i sum_t v
        sequence_mean_token_mean      (1 / N) sum_i (1 / L_i) sum_t v
        sequence_mean_token_sum_norm  (1 / (N T)) sum_i sum_t v

    What `keep` rejects contributes zero and stays in every denominator, so that rejecting half of a batch halves the
    gradient. To renormalise over what was kept, pass `mask & keep` as the mask. Without any token the result is 0.

    Args:
        values: Of each token; ignored where the mask or `keep` is 0, whatever they hold.
        mask: 1 on the response's own tokens.
        aggregation: One of the five names.
        keep: Tokens that no rule rejected; all by default.

    Raises:
        ParameterError: If a kept value is not finite, `aggregation` is unknown or the shapes do not match.
    """
    check_choice("aggregation", "aggregate", aggregation, AGGREGATIONS)
    own, active = active_tokens("aggregate", mask, keep)
    total = own_values("values", "aggregate", values, active)
    length = own.sum(1)
    if aggregation.startswith("token"):
        summed = total.sum()
        return summed / length.sum().clamp(min=1) if aggregation == "token_mean" else summed
    per_sequence = total.sum(1)
    if aggregation == "sequence_mean_token_mean":
        per_sequence = per_sequence / length.clamp(min=1)
    elif aggregation == "sequence_mean_token_sum_norm":
        per_sequence = per_sequence / max(1, own.shape[1])
    return per_sequence.sum() / (length > 0).sum().clamp(min=1)


def frozen_signal(owner: str, advantages: Tensor, weights: Tensor | None, active: Tensor) -> Tensor:
    """Return w_t A_t without gradient, 0 at inactive tokens.

    The weights must be frozen: d(w log p) = w s + log p dw, and the second term is a bias.
    """
    signal = own_values("advantages", owner, advantages, active).detach()
    if weights is None:
        return signal
    return signal * own_values("weights", owner, weights, active).detach()
