"""Rank and leak of expected updates below and at the output layer."""

import pytest
import torch

from ensemblepp.errors import ParameterError
from ensemblepp.policy.output_layer import (
    entropy_rank,
    head_update,
    hidden_update,
    output_update,
    rank_bound,
    stable_rank,
    top_energy,
)
from tests.policy_toy import make_generator

EXACT = {"rtol": 0.0, "atol": 1e-10}
CONTEXTS, VOCAB, WIDTH, INPUTS = 12, 9, 8, 7


def problem(tail: float = 0.0, head_size: int = 4) -> tuple[torch.Tensor, ...]:
    """(q, advantages, U, h, head): all contexts compete among the same tokens, but for `tail` of their mass."""
    generator = make_generator()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    head = (torch.arange(VOCAB) < head_size).expand(CONTEXTS, VOCAB)
    logits = draw(CONTEXTS, VOCAB)
    inside, outside = (logits.masked_fill(part, -torch.inf).softmax(1) for part in (~head, head))
    q = (1 - tail) * inside + tail * outside
    return q, draw(CONTEXTS, VOCAB), draw(VOCAB, WIDTH), draw(CONTEXTS, INPUTS), head


def test_updates_are_the_gradients_of_the_expected_loss() -> None:
    q, advantages, unembedding, hidden, _ = problem(0.3)
    weight = torch.randn(WIDTH, INPUTS, generator=make_generator(1), dtype=torch.float64)
    # Take as sampler the network itself, whatever that is, so that scores are centred.
    logits = hidden @ weight.T @ unembedding.T
    q = logits.softmax(1)
    centred = advantages - (q * advantages).sum(1, keepdim=True)
    w, u = weight.clone().requires_grad_(), unembedding.clone().requires_grad_()
    gain = (q * centred * (hidden @ w.T @ u.T).log_softmax(1)).sum(1).mean()
    by_weight, by_unembedding = torch.autograd.grad(gain, (w, u))
    torch.testing.assert_close(hidden_update(q, advantages, unembedding, hidden), by_weight, **EXACT)
    torch.testing.assert_close(output_update(q, advantages, hidden @ weight.T), by_unembedding, **EXACT)


def test_rank_is_the_number_of_competitors_minus_one() -> None:
    q, advantages, unembedding, hidden, head = problem()
    update = hidden_update(q, advantages, unembedding, hidden)
    assert int(torch.linalg.matrix_rank(update)) == 3 == rank_bound(head, unembedding)
    main, leak = head_update(q, advantages, unembedding, hidden, head)
    torch.testing.assert_close(main, update, **EXACT)
    assert leak.exact.item() == 0.0
    assert top_energy(update, 3).item() == pytest.approx(1.0)


def test_rank_adds_up_over_different_heads() -> None:
    q, advantages, unembedding, hidden, _ = problem()
    head = torch.zeros(CONTEXTS, VOCAB, dtype=torch.bool)
    head[:6, :3] = True  # tokens 0 1 2
    head[6:, 2:5] = True  # tokens 2 3 4
    logits = torch.randn(CONTEXTS, VOCAB, generator=make_generator(3), dtype=torch.float64)
    q = logits.masked_fill(~head, -torch.inf).softmax(1)
    assert rank_bound(head, unembedding) == 4
    assert int(torch.linalg.matrix_rank(hidden_update(q, advantages, unembedding, hidden))) == 4
    # No more than the contexts that have a choice, and no more than U allows.
    assert rank_bound(head[:1], unembedding) == 1
    assert rank_bound(torch.ones(3, VOCAB, dtype=torch.bool), unembedding) == 3
    assert rank_bound(torch.ones(CONTEXTS, VOCAB, dtype=torch.bool), unembedding[:, :2]) == 2
    single = torch.arange(VOCAB).eq(0).expand(CONTEXTS, VOCAB)
    assert rank_bound(single, unembedding) == 0


@pytest.mark.parametrize("tail", [1e-4, 1e-2, 0.3])
def test_tail_leaks_no_more_than_its_bounds(tail: float) -> None:
    q, advantages, unembedding, hidden, head = problem(tail)
    update = hidden_update(q, advantages, unembedding, hidden)
    main, leak = head_update(q, advantages, unembedding, hidden, head)
    distance = (update - main).norm()
    assert 0 < distance <= leak.exact <= min(leak.by_largest, leak.by_spread)
    assert int(torch.linalg.matrix_rank(main)) == 3
    assert torch.linalg.svdvals(update)[3] <= leak.exact
    assert 1 - top_energy(update, 3) <= (leak.exact / update.norm()).square()


def test_output_rows_without_mass_cannot_move_and_rows_sum_to_zero() -> None:
    q, advantages, _, hidden, head = problem()
    update = output_update(q, advantages, hidden)
    assert not update[~head[0]].any()
    assert update[head[0]].abs().min() > 0
    torch.testing.assert_close(update.sum(0), torch.zeros(INPUTS, dtype=torch.float64), **EXACT)
    # Without centering the score, such a row moves with the mean advantage: -p_v h E[A].
    p = torch.full((CONTEXTS, VOCAB), 1 / VOCAB, dtype=torch.float64)
    uncentred = ((q * advantages) - p * (q * advantages).sum(1, keepdim=True)).T @ hidden
    assert uncentred[~head[0]].abs().max() > 1e-3


def test_certain_samplers_send_no_signal() -> None:
    _, advantages, unembedding, hidden, _ = problem()
    q = torch.eye(VOCAB, dtype=torch.float64)[torch.arange(CONTEXTS) % VOCAB]
    assert not hidden_update(q, advantages, unembedding, hidden).any()
    assert not output_update(q, advantages, hidden).any()
    assert not hidden_update(q[:0], advantages[:0], unembedding, hidden[:0]).any()


def test_elementwise_normalisation_hides_the_low_rank() -> None:
    q, advantages, unembedding, hidden, _ = problem()
    update = hidden_update(q, advantages, unembedding, hidden)
    sign = update.sign()
    assert int(torch.linalg.matrix_rank(sign)) > 3
    assert stable_rank(sign) < 5


def test_ranks_by_hand() -> None:
    matrix = torch.diag(torch.tensor([2.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    assert stable_rank(matrix).item() == pytest.approx(1.5)
    share = torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64) / 6
    assert entropy_rank(matrix).item() == pytest.approx(float((-share * share.log()).sum().exp()))
    assert entropy_rank(torch.eye(4)).item() == pytest.approx(4.0)
    assert top_energy(matrix, 1).item() == pytest.approx(4 / 6)
    zero = torch.zeros(2, 3)
    assert (stable_rank(zero).item(), top_energy(zero, 1).item(), entropy_rank(zero).item()) == (0.0, 0.0, 1.0)


def test_bad_input_is_named(without_shape_checks: None) -> None:
    q, advantages, unembedding, hidden, head = problem()
    with pytest.raises(ParameterError, match="advantages of hidden_update must have shape"):
        hidden_update(q, advantages[:, :2], unembedding, hidden)
    with pytest.raises(ParameterError, match="hidden of output_update must have shape"):
        output_update(q, advantages, hidden[:2])
    with pytest.raises(ParameterError, match="head of head_update must have shape"):
        head_update(q, advantages, unembedding, hidden, head[:2])
    with pytest.raises(ParameterError, match="k of top_energy must be an int >= 0"):
        top_energy(torch.eye(2), -1)
