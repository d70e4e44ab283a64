"""Policy gradient on a small sequence model whose every sequence is enumerated, with a sampler that lags and rounds.

A response is `horizon` tokens of `vocab` symbols. Logits are linear in fixed random features of the prefix, so that
prefixes share weights. A few responses earn 1, more of them 0.5, and an observed reward is flipped now and then. The
sampler is the trainer as of the last synchronisation plus Gaussian noise on every weight. Seeds are a tensor axis: all
replicas of a method advance in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ensemblepp.policy.advantages import group_mean_advantages
from ensemblepp.policy.centered import centered_policy_loss_from_logits
from ensemblepp.policy.presets import Preset, RolloutCorrection, rollout_correction
from ensemblepp.policy.token_baseline import optimal_token_baseline
from ensemblepp.policy.trust_region import token_divergences, trust_region_mask
from ensemblepp.policy.vocabulary import energy_from_logits
from ensemblepp.seeding import make_generator

AGGREGATION = "sequence_mean_token_sum"
DTYPE = torch.float64  # a rounding difference must not flip a draw


@dataclass
class Tree:
    """All sequences, and the table row of every prefix."""

    tokens: Tensor
    prefix: Tensor
    num_prefixes: int

    @classmethod
    def full(cls, vocab: int, horizon: int) -> Tree:
        """Enumerate: prefix rows are numbered level by level, in the order of their digits."""
        number = torch.arange(vocab**horizon)
        powers = vocab ** torch.arange(horizon - 1, -1, -1)
        tokens = number.unsqueeze(1) // powers % vocab
        starts = torch.tensor([(vocab**t - 1) // (vocab - 1) for t in range(horizon)])
        prefix = starts + number.unsqueeze(1) // (powers * vocab)
        return cls(tokens, prefix, (vocab**horizon - 1) // (vocab - 1))


class Game:
    """The replicas of one task: features, targets and the true return of any weights."""

    def __init__(self, config: Mapping[str, Any], num_replicas: int, seed: int) -> None:
        self.vocab, self.horizon = config["vocab"], config["horizon"]
        self.tree = Tree.full(self.vocab, self.horizon)
        generator = make_generator(seed, "env")
        features = torch.randn(
            num_replicas, self.tree.num_prefixes, config["features"], generator=generator, dtype=DTYPE
        )
        self.features = torch.nn.functional.normalize(features, dim=-1)
        luck = torch.rand(num_replicas, len(self.tree.tokens), generator=generator, dtype=DTYPE)
        winner, decoy = luck < config["winners"], luck < config["winners"] + config["decoys"]
        self.rewards = (winner.to(DTYPE) + decoy) / 2

    def logits(self, weights: Tensor) -> Tensor:
        """Return logits (replicas, prefixes, vocab)."""
        return self.features @ weights

    def sequence_logprob(self, weights: Tensor) -> Tensor:
        """Return log p of every sequence (replicas, sequences)."""
        table = self.logits(weights).log_softmax(-1).flatten(1)
        return table[:, self.tree.prefix * self.vocab + self.tree.tokens].sum(-1)

    def true_return(self, weights: Tensor) -> Tensor:
        """Return E_p[R] of each replica, exactly."""
        return (self.sequence_logprob(weights).exp() * self.rewards).sum(-1)

    def sequence_kl(self, sampler: Tensor, trainer: Tensor) -> Tensor:
        """Return KL(q || p) over sequences of each replica, in nats, exactly."""
        log_q, log_p = self.sequence_logprob(sampler), self.sequence_logprob(trainer)
        return (log_q.exp() * (log_q - log_p)).sum(-1)


@dataclass
class Batch:
    """What one update sees; rows are the responses of all replicas, one after the other."""

    logits: Tensor
    sampler_logits: Tensor
    tokens: Tensor
    rewards: Tensor
    group: Tensor
    mask: Tensor

    def logprob(self, logits: Tensor) -> Tensor:
        """Return log-probabilities of the drawn tokens."""
        return logits.log_softmax(-1).gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)


def loss_of(method: Mapping[str, Any], batch: Batch) -> Tensor:
    """Return a method's loss, the mean over all rows."""
    trainer, sampler = batch.logprob(batch.logits), batch.logprob(batch.sampler_logits)
    keep = None
    if "max_kl" in method:
        divergence = token_divergences(batch.sampler_logits, batch.logits.detach(), batch.mask)
        keep = trust_region_mask(divergence.kl, batch.mask, max_upper=method["max_kl"])
    preset = Preset("bypass", "reinforce", **method.get("correction", {"weights": None}))
    correction = rollout_correction(
        preset, trainer_logprob=trainer, sampler_logprob=sampler, mask=batch.mask, keep=keep
    )
    advantages = _advantages(method, batch, correction)
    if "centered" not in method:
        return correction.loss(trainer, advantages, aggregation=AGGREGATION)
    head = batch.sampler_logits.log_softmax(-1).topk(method["head"], dim=-1)
    return centered_policy_loss_from_logits(
        batch.logits,
        batch.tokens,
        sampler,
        head.indices,
        head.values,
        advantages,
        batch.mask,
        correction=method["centered"],
        aggregation=AGGREGATION,
    )


def _advantages(method: Mapping[str, Any], batch: Batch, correction: RolloutCorrection) -> Tensor:
    if method.get("baseline", "group_mean") == "group_mean":
        return group_mean_advantages(batch.rewards, batch.mask, batch.group, keep=correction.keep)
    return optimal_token_baseline(
        batch.rewards,
        batch.mask,
        batch.group,
        energy_from_logits(batch.logits.detach(), batch.tokens, batch.mask),
        importance_weights=correction.weights,
        keep=correction.keep,
    )


def train(
    config: Mapping[str, Any],
    method: Mapping[str, Any],
    mismatch: Mapping[str, Any],
    *,
    rate: float,
    num_replicas: int,
    seed: int,
) -> dict[str, Any]:
    """Train all replicas of one method and return their exact returns and divergences.

    Every method sees the same tasks, the same sampler noise and the same uniform draws; only what it learned differs.
    """
    game = Game(config, num_replicas, seed)
    draws, noise = make_generator(seed, "act"), make_generator(seed, "perturb")
    weights = torch.zeros(num_replicas, config["features"], game.vocab, dtype=DTYPE, requires_grad=True)
    group_size, rows = config["group_size"], torch.arange(num_replicas).unsqueeze(1)
    curve, divergence = [], []
    for update in range(config["updates"]):
        if update % mismatch["sync"] == 0:
            sampler = weights.detach() + mismatch["noise"] * torch.randn(weights.shape, generator=noise, dtype=DTYPE)
        log_q = game.sequence_logprob(sampler)
        uniform, luck = torch.rand(2, num_replicas, group_size, generator=draws, dtype=DTYPE)
        flips = (luck < config["flips"]).to(DTYPE)
        cumulative = log_q.softmax(-1).cumsum(-1)
        chosen = torch.searchsorted(cumulative, uniform).clamp(max=cumulative.shape[1] - 1)
        prefix = game.tree.prefix[chosen]
        batch = Batch(
            logits=game.logits(weights)[rows.unsqueeze(-1), prefix].flatten(0, 1),
            sampler_logits=game.logits(sampler)[rows.unsqueeze(-1), prefix].flatten(0, 1),
            tokens=game.tree.tokens[chosen].flatten(0, 1),
            rewards=(game.rewards[rows, chosen] - flips).abs().flatten(),
            group=rows.expand(-1, group_size).flatten(),
            mask=torch.ones(num_replicas * group_size, game.horizon, dtype=torch.bool),
        )
        # The loss is a mean over the rows of all replicas; each replica's own mean is that times their number.
        (slope,) = torch.autograd.grad(num_replicas * loss_of(method, batch), weights)
        with torch.no_grad():
            weights -= rate * slope
        if (update + 1) % config["period"] == 0:
            with torch.no_grad():
                curve.append(game.true_return(weights).tolist())
                divergence.append(game.sequence_kl(sampler, weights).tolist())
    return {"rate": rate, "returns": curve, "kl": divergence}
