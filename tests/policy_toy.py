"""The oracle of the policy identities: a small tree whose sequences are all enumerated, in float64.

A policy is a table of logits, one row per prefix. With `eos`, a sequence ends at that token and its later slots are
padding (mask 0), so lengths vary. Expectations are sums over all sequences, exact up to rounding::

    tree = Tree(vocab=3, horizon=3, eos=0)
    sampler, trainer = tree.random_logits(generator), tree.random_logits(generator, requires_grad=True)
    gradient = torch.autograd.grad(tree.expect(trainer, reward), trainer)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Tree:
    """All sequences of at most `horizon` tokens over `vocab` symbols.

    tokens, mask and prefix are (sequences, horizon); prefix holds the row of the logit table a token is drawn from,
    0 at padding (where mask is False and tokens repeat `eos`).
    """

    vocab: int
    horizon: int
    eos: int | None = None
    tokens: Tensor = field(init=False)
    mask: Tensor = field(init=False)
    prefix: Tensor = field(init=False)
    num_prefixes: int = field(init=False)

    def __post_init__(self) -> None:
        rows: dict[tuple[int, ...], int] = {}
        sequences = {self._cut(s) for s in itertools.product(range(self.vocab), repeat=self.horizon)}
        tokens, mask, prefix = [], [], []
        for sequence in sorted(sequences):
            padding = self.horizon - len(sequence)
            tokens.append([*sequence, *[self.eos or 0] * padding])
            mask.append([True] * len(sequence) + [False] * padding)
            prefix.append([rows.setdefault(sequence[:t], len(rows)) for t in range(len(sequence))] + [0] * padding)
        self.tokens, self.mask, self.prefix = torch.tensor(tokens), torch.tensor(mask), torch.tensor(prefix)
        self.num_prefixes = len(rows)

    def _cut(self, sequence: tuple[int, ...]) -> tuple[int, ...]:
        return sequence[: sequence.index(self.eos) + 1] if self.eos in sequence else sequence

    def random_logits(self, generator: torch.Generator, scale: float = 1.0, requires_grad: bool = False) -> Tensor:
        """Logits (prefixes, vocab) of a random policy."""
        logits = scale * torch.randn(self.num_prefixes, self.vocab, generator=generator, dtype=torch.float64)
        return logits.requires_grad_(requires_grad)

    def random_rewards(self, generator: torch.Generator) -> Tensor:
        """Rewards (sequences,) in [0, 1)."""
        return torch.rand(len(self.tokens), generator=generator, dtype=torch.float64)

    def full_logprobs(self, logits: Tensor) -> Tensor:
        """log p(v | c_t) of every token: (sequences, horizon, vocab)."""
        return logits.log_softmax(-1)[self.prefix]

    def logprobs(self, logits: Tensor, padding: float = 0.0) -> Tensor:
        """log p(y_t | c_t): (sequences, horizon), `padding` where the mask is False."""
        own = self.full_logprobs(logits).gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)
        return torch.where(self.mask, own, padding)

    def probs(self, logits: Tensor) -> Tensor:
        """p(y) of whole sequences: (sequences,), summing to 1."""
        return self.logprobs(logits).sum(-1).exp()

    def expect(self, logits: Tensor, values: Tensor) -> Tensor:
        """E_p[values] over the leading axis of sequences."""
        return torch.tensordot(self.probs(logits), values, dims=1)

    def gradient(self, logits: Tensor, rewards: Tensor) -> Tensor:
        """grad E_p[R] with respect to the logits, by differentiating the sum over all sequences."""
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(self.expect(leaf, rewards), leaf)[0]

    def token_scores(self, logits: Tensor) -> Tensor:
        """s_t = grad log p(y_t | c_t) flattened: (sequences, horizon, prefixes * vocab), 0 at padding."""
        logits = logits.detach()
        rows = torch.nn.functional.one_hot(self.prefix, self.num_prefixes).double()
        inner = torch.nn.functional.one_hot(self.tokens, self.vocab) - self.full_logprobs(logits).exp()
        scores = rows.unsqueeze(-1) * inner.unsqueeze(-2)
        return torch.where(self.mask[..., None, None], scores, 0.0).flatten(-2)

    def scores(self, logits: Tensor) -> Tensor:
        """S = sum_t s_t: (sequences, prefixes * vocab)."""
        return self.token_scores(logits).sum(1)

    def mean_shift(self, sampler: Tensor, trainer: Tensor) -> Tensor:
        """sbar(c_t) = E_{v~q}[grad log p(v | c_t)]: (sequences, horizon, prefixes * vocab), 0 at padding."""
        rows = torch.nn.functional.one_hot(self.prefix, self.num_prefixes).double()
        inner = self.full_logprobs(sampler.detach()).exp() - self.full_logprobs(trainer.detach()).exp()
        shift = rows.unsqueeze(-1) * inner.unsqueeze(-2)
        return torch.where(self.mask[..., None, None], shift, 0.0).flatten(-2)

    def token_kl(self, sampler: Tensor, trainer: Tensor) -> Tensor:
        """KL(q(. | c_t) || p(. | c_t)) along each sequence: (sequences, horizon), 0 at padding."""
        log_q, log_p = self.full_logprobs(sampler), self.full_logprobs(trainer)
        return torch.where(self.mask, (log_q.exp() * (log_q - log_p)).sum(-1), 0.0)

    def token_tv(self, sampler: Tensor, trainer: Tensor) -> Tensor:
        """TV(q(. | c_t), p(. | c_t)) along each sequence: (sequences, horizon), 0 at padding."""
        gap = (self.full_logprobs(sampler).exp() - self.full_logprobs(trainer).exp()).abs().sum(-1) / 2
        return torch.where(self.mask, gap, 0.0)

    def sequence_kl(self, sampler: Tensor, trainer: Tensor) -> Tensor:
        """KL(q || p) of whole sequences."""
        q, p = self.probs(sampler), self.probs(trainer)
        return (q * (q.log() - p.log())).sum()

    def sequence_tv(self, sampler: Tensor, trainer: Tensor) -> Tensor:
        """TV(q, p) of whole sequences."""
        return (self.probs(sampler) - self.probs(trainer)).abs().sum() / 2


def make_trees() -> list[Tree]:
    """Small trees of the kinds that matter: fixed length, one token, variable length."""
    return [Tree(3, 3), Tree(4, 1), Tree(3, 3, eos=0), Tree(2, 4, eos=1)]


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def policies(tree: Tree, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(sampler logits, trainer logits, rewards)."""
    generator = make_generator(seed)
    return tree.random_logits(generator), tree.random_logits(generator), tree.random_rewards(generator)


def expected(tree: Tree, sampler: Tensor, values: Tensor) -> Tensor:
    """What to hand in as advantages so that the mean over all sequences becomes an expectation under the sampler."""
    return (tree.probs(sampler) * len(tree.tokens) * values).unsqueeze(1).expand(tree.mask.shape)


def grouped(tree: Tree, sampler: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every ordered group of `size` responses: (rows of the tree, group numbers, probability of each group)."""
    rows = torch.cartesian_prod(*[torch.arange(len(tree.tokens))] * size)
    return rows.flatten(), torch.arange(len(rows)).repeat_interleave(size), tree.probs(sampler)[rows].prod(1)


def gradient(loss: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """d loss / d point."""
    leaf = point.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def close(actual: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> None:
    """Assert that all entries agree to within an absolute tolerance."""
    torch.testing.assert_close(actual, wanted, rtol=0, atol=tolerance)
