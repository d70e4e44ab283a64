"""Score centring: no drift, the right sampler in the tail, and stable weights."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.policy.centered import (
    CORRECTIONS,
    centered_policy_loss,
    centered_policy_loss_from_logits,
    dense_centered_policy_loss,
)
from ensemblepp.policy.losses import reinforce_loss
from tests.policy_toy import Tree, close, expected, gradient, make_generator, make_trees, policies

SUMS = "sequence_mean_token_sum"
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like,
    "tis": lambda r: r.clamp(max=2.0),
    "mis": lambda r: torch.where((r >= 0.5) & (r <= 5.0), r, 0.0),
    "full": lambda r: r,
}


def dense(tree: Tree, sampler: Tensor, advantages: Tensor, **options: object) -> Callable[[Tensor], Tensor]:
    """The dense loss as a function of the trainer's logits."""
    return lambda trainer: dense_centered_policy_loss(
        tree.full_logprobs(trainer),
        tree.full_logprobs(sampler),
        tree.tokens,
        advantages,
        tree.mask,
        aggregation=SUMS,
        **options,  # type: ignore[arg-type]
    )


def topk(tree: Tree, sampler: Tensor, k: int, advantages: Tensor, **options: object) -> Callable[[Tensor], Tensor]:
    """The top-k loss as a function of the trainer's logits."""
    head = tree.full_logprobs(sampler).topk(k, -1)

    def loss(trainer: Tensor) -> Tensor:
        return centered_policy_loss(
            tree.logprobs(trainer, torch.nan),
            tree.logprobs(sampler, torch.nan),
            tree.full_logprobs(trainer).gather(-1, head.indices),
            head.values,
            advantages,
            tree.mask,
            aggregation=SUMS,
            **options,  # type: ignore[arg-type]
        )

    return loss


# ----- the dense oracle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", make_trees())
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_constant_advantages_move_nothing_in_expectation(tree: Tree, correction: str) -> None:
    sampler, trainer, _ = policies(tree)
    constant = expected(tree, sampler, torch.ones(len(tree.tokens), dtype=torch.float64))
    close(gradient(dense(tree, sampler, constant, correction=correction), trainer), torch.zeros_like(trainer))
    if correction == "none":
        plain = gradient(lambda z: reinforce_loss(tree.logprobs(z), constant, tree.mask, aggregation=SUMS), trainer)
        assert plain.abs().max() > 0.1


@pytest.mark.parametrize("tree", make_trees())
def test_the_expected_gradient_is_the_covariance_with_the_centred_score(tree: Tree) -> None:
    sampler, trainer, rewards = policies(tree)
    q = tree.probs(sampler)
    centred = tree.token_scores(trainer) - tree.mean_shift(sampler, trainer)
    close(torch.einsum("r,rtp->p", q, centred), torch.zeros(trainer.numel(), dtype=torch.float64))
    wanted = torch.einsum("r,rtp->p", q * rewards, centred)
    slope = -gradient(dense(tree, sampler, expected(tree, sampler, rewards)), trainer).flatten()
    close(slope, wanted)
    # The tangent's decomposition: what centring leaves out is the value-weighted drift.
    mean, values = q @ rewards, torch.zeros(tree.num_prefixes, dtype=torch.float64)
    for row in range(tree.num_prefixes):
        through = ((tree.prefix == row) & tree.mask).any(1)
        values[row] = (q * rewards)[through].sum() / q[through].sum()
    drift = torch.einsum("r,rt,rtp->p", q, values[tree.prefix] - mean, tree.mean_shift(sampler, trainer))
    close((q * (rewards - mean)) @ tree.scores(trainer), wanted + drift)


def test_a_token_the_sampler_never_draws_does_not_move() -> None:
    """Tabular logits: the row's own score variance is q (1 - q), and the drift -p A would move it without centring."""
    tree = Tree(3, 1)
    sampler = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.float64)
    trainer, rewards = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([1.0, 0.2, 0.7], dtype=torch.float64)
    signal = expected(tree, sampler, rewards)
    reachable = torch.tensor([0, 1])
    q = tree.full_logprobs(sampler)[reachable]

    def loss(z: Tensor, centred: bool) -> Tensor:
        if centred:
            return dense_centered_policy_loss(
                tree.full_logprobs(z)[reachable], q, tree.tokens[reachable], signal[reachable], tree.mask[reachable]
            )
        return reinforce_loss(tree.logprobs(z)[reachable], signal[reachable], tree.mask[reachable])

    assert gradient(partial(loss, centred=True), trainer)[0, 2].abs() < 1e-15
    assert gradient(partial(loss, centred=False), trainer)[0, 2].abs() > 0.1


@pytest.mark.parametrize("tree", make_trees()[:2])
def test_gradients_stay_under_the_fisher_cap(tree: Tree) -> None:
    """|E_q[A stilde_i]| <= std(A) sqrt(Var_q stilde_i) for the sequence's centred score."""
    sampler, trainer, rewards = policies(tree, seed=3)
    q = tree.probs(sampler)
    scores = tree.scores(trainer) - q @ tree.scores(trainer)
    slope, variance = (q * rewards) @ scores, q @ scores.square()
    std = (q @ (rewards - q @ rewards).square()).sqrt()
    assert (slope.abs() <= std * variance.sqrt() + 1e-12).all()
    fisher = torch.einsum("r,rp,ru->pu", q, scores, scores)
    assert slope @ torch.linalg.pinv(fisher, hermitian=True) @ slope <= std.square() + 1e-10


def test_differentiating_through_the_sampled_weight_breaks_centring() -> None:
    tree = make_trees()[0]
    sampler, trainer, _ = policies(tree)
    constant = expected(tree, sampler, torch.ones(len(tree.tokens), dtype=torch.float64))

    def leaky(z: Tensor) -> Tensor:
        p, q = tree.full_logprobs(z), tree.full_logprobs(sampler)
        drift = (torch.minimum(p.exp(), 2 * q.exp()).detach() * p).sum(-1)
        ratio = (tree.logprobs(z) - tree.logprobs(sampler)).exp().clamp(max=2)
        return -(constant * (ratio * tree.logprobs(z) - drift) * tree.mask).sum(1).mean()

    close(leaky(trainer), dense(tree, sampler, constant, correction="tis")(trainer))
    assert gradient(leaky, trainer).abs().max() > 0.1


# ----- the head -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_with_p_equal_to_q_it_is_reinforce(correction: str) -> None:
    tree = make_trees()[2]
    _, trainer, rewards = policies(tree)
    signal = expected(tree, trainer, rewards)
    wanted = gradient(lambda z: reinforce_loss(tree.logprobs(z), signal, tree.mask, aggregation=SUMS), trainer)
    for k in (1, 2, 3):
        close(gradient(topk(tree, trainer, k, signal, correction=correction), trainer), wanted)
    close(gradient(dense(tree, trainer, signal, correction=correction), trainer), wanted)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_head_formula_is_the_dense_one_for_the_sampler_with_the_modelled_tail(correction: str, k: int) -> None:
    """Also where the sampled token lies outside the head; there its recorded ratio still weighs its own score."""
    generator = make_generator(3)
    q = torch.rand(40, 1, 4, generator=generator, dtype=torch.float64)
    trainer = 2 * torch.randn(40, 1, 4, generator=generator, dtype=torch.float64)
    q = q / q.sum(-1, keepdim=True)
    p = trainer.softmax(-1)
    head = q.topk(k, -1)
    inside = torch.zeros_like(q).scatter(-1, head.indices, 1.0).bool()
    rho = (1 - head.values.sum(-1, keepdim=True)) / (1 - (p * inside).sum(-1, keepdim=True))
    modelled = torch.where(inside, q, rho.nan_to_num(1.0) * p)
    tokens = torch.arange(40).view(40, 1) % 4
    signal, mask = torch.randn(40, 1, generator=generator, dtype=torch.float64), torch.ones(40, 1)
    chosen = tokens.unsqueeze(-1)
    f = WEIGHTS[correction]

    def by_hand(z: Tensor) -> Tensor:
        log_p = z.log_softmax(-1)
        mass = modelled * f(p / modelled)
        weight = f(p / q).gather(-1, chosen)
        return -(signal * (weight * log_p.gather(-1, chosen) - (mass * log_p).sum(-1, keepdim=True)).squeeze(-1)).mean()

    def ours(z: Tensor) -> Tensor:
        return centered_policy_loss_from_logits(
            z, tokens, q.log().gather(-1, chosen).squeeze(-1), head.indices, head.values.log(), signal, mask,
            correction=correction, block_values=8,
        )  # fmt: skip

    close(gradient(ours, trainer), gradient(by_hand, trainer))
    if k == 4:
        dense_slope = gradient(
            lambda z: dense_centered_policy_loss(
                z.log_softmax(-1), q.log(), tokens, signal, mask, correction=correction
            ),
            trainer,
        )
        close(gradient(ours, trainer), dense_slope)


def test_published_coefficients() -> None:
    """q_H = (.5, .3), p_H = (.4, .4): rho = 1 and the head's coefficients are (.1, -.1)."""
    p = torch.tensor([[[0.4, 0.4]]], dtype=torch.float64).log()
    q = torch.tensor([[[0.5, 0.3]]], dtype=torch.float64).log()
    one = torch.ones(1, 1, dtype=torch.float64)
    slope = gradient(lambda head: centered_policy_loss(p[..., 0], q[..., 0], head, q, one, one), p)
    close(slope, torch.tensor([[[0.1, -0.1]]], dtype=torch.float64))


def test_full_weights_are_already_centred() -> None:
    tree = make_trees()[0]
    sampler, trainer, rewards = policies(tree)
    signal = expected(tree, sampler, rewards)
    weights = (tree.logprobs(trainer) - tree.logprobs(sampler)).exp()
    wanted = gradient(
        lambda z: reinforce_loss(tree.logprobs(z), signal, tree.mask, weights=weights, aggregation=SUMS), trainer
    )
    for loss in (topk(tree, sampler, 2, signal, correction="full"), dense(tree, sampler, signal, correction="full")):
        close(gradient(loss, trainer), wanted)


def test_bounds_are_inclusive_and_of_the_ratio() -> None:
    ratio = torch.tensor([[0.25, 0.5, 1.0, 4.0, 8.0]], dtype=torch.float64)
    zeros, ones = torch.zeros_like(ratio), torch.ones_like(ratio)
    # A head without sampler mass: the drift is 0 only where its frozen coefficient is, so look at the token's slope.
    head = torch.full((1, 5, 1), -0.7, dtype=torch.float64)

    def slope(**options: object) -> Tensor:
        return -gradient(
            lambda p: centered_policy_loss(p, zeros, head, head, ones, ones, aggregation="token_sum", **options),  # type: ignore[arg-type]
            ratio.log(),
        )

    close(slope(correction="mis", lower=0.5, upper=4.0), torch.tensor([[0, 0.5, 1, 4, 0]], dtype=torch.float64))
    close(slope(correction="mis"), torch.tensor([[0, 0.5, 1, 4, 0]], dtype=torch.float64))
    close(slope(correction="tis"), torch.tensor([[0.25, 0.5, 1, 2, 2]], dtype=torch.float64))
    close(slope(correction="tis", upper=6.0), torch.tensor([[0.25, 0.5, 1, 4, 6]], dtype=torch.float64))
    close(slope(), torch.ones(1, 5, dtype=torch.float64))


# ----- padding and refusals -----------------------------------------------------------------------------------------


def test_padding_rejection_and_short_heads_stay_harmless() -> None:
    generator = make_generator(1)
    logits = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
    q = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    tokens = torch.arange(12).view(3, 4) % 6
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    keep = torch.ones(3, 4, dtype=torch.bool)
    keep[0, 0] = False
    head = q.topk(3, -1)
    signal = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    own = q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def loss(z: Tensor, junk: float | None = None, mask: Tensor = mask, keep: Tensor = keep) -> Tensor:
        dead = ~mask.bool() | ~keep

        def spoil(values: Tensor) -> Tensor:
            flat = dead.view(*dead.shape, *[1] * (values.ndim - 2))
            return values if junk is None else values.masked_fill(flat, junk)

        return centered_policy_loss_from_logits(
            z, tokens, spoil(own), head.indices, spoil(head.values), spoil(signal), mask, keep=keep, correction="tis"
        )

    clean = gradient(loss, logits)
    assert clean.abs().sum() > 0
    for junk in (torch.nan, -torch.inf):
        spoilt = logits.masked_fill(~mask.bool().unsqueeze(-1), junk)
        close(gradient(partial(loss, junk=junk), spoilt), clean)
        close(loss(spoilt, junk), loss(logits))
    for rows, dead_mask, dead_keep in ((3, mask * 0, keep), (3, mask, keep & False)):
        leaf = logits[:rows].clone().requires_grad_()
        value = loss(leaf, mask=dead_mask, keep=dead_keep)
        assert value.item() == 0
        value.backward()
        assert torch.equal(leaf.grad, torch.zeros_like(logits[:rows]))
    # A head of two, filled up with a token of no sampler mass, is another model of the tail but a finite one.
    short = head.values.clone()
    short[..., 2] = -torch.inf
    value = centered_policy_loss_from_logits(logits, tokens, own, head.indices, short, signal, mask)
    assert value.isfinite()


def test_only_the_trainer_carries_gradient() -> None:
    tree = make_trees()[0]
    sampler, trainer, rewards = policies(tree)
    sampler.requires_grad_()
    for loss in (
        topk(tree, sampler, 2, expected(tree, sampler, rewards)),
        dense(tree, sampler, rewards[:, None] * tree.mask),
    ):
        assert torch.autograd.grad(loss(trainer.clone().requires_grad_()), sampler, allow_unused=True)[0] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "ppo"}, "correction of centered_policy_loss must be one of 'full', 'mis', 'none', 'tis'"),
        (
            {"correction": "tis", "lower": 0.5},
            'lower of centered_policy_loss must stay None unless correction is "mis"',
        ),
        ({"upper": 2.0}, "upper of centered_policy_loss must stay None unless"),
        ({"correction": "mis", "lower": 6.0}, "upper of centered_policy_loss must be a finite number > 6"),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str) -> None:
    one, head = torch.ones(1, 1), torch.full((1, 1, 2), -1.0)
    with pytest.raises(ParameterError, match=message):
        centered_policy_loss(-one, -one, head, head, one, one, **options)  # type: ignore[arg-type]
