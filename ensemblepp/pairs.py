"""From posterior scores of responses to what is shown: one response, or the pair to ask a judge about.

Every rule reads an `IndexedOutput` of R sets of N responses: mean (replicas, responses) and members (replicas,
responses, columns), either M ensemble members or the columns of an exact square root. The difference of two responses
then has variance |members_i - members_j|^2, and a random index gives one joint draw of all N.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ensemblepp.acquisition import choose
from ensemblepp.errors import ParameterError, check_all, check_choice, check_real, check_shape
from ensemblepp.heads import IndexedOutput

_OWNER = "the choice of responses"
_NODES = 24


@dataclass(frozen=True)
class Candidates:
    """R sets of up to N responses: their scores, which of them are real, and what rules may draw on.

    Attributes:
        output: Mean and members of every response.
        mask: True for real responses; sets of unequal size are padded.
        scale: How far upper bounds reach, in posterior standard deviations, and what multiplies sampled deviations.
        generator: Source of indices and tie-breaks.
    """

    output: IndexedOutput
    mask: Bool[Tensor, "replicas responses"]
    scale: float
    generator: torch.Generator

    def draw(self) -> Float[Tensor, "replicas responses"]:
        """Return one joint posterior sample of all responses, with one standard normal index per set."""
        members = self.output.members
        size = (members.shape[0], members.shape[-1])
        index = torch.randn(size, generator=self.generator, device=members.device, dtype=members.dtype)
        return self.output.sample(self.scale * index)

    def bound(self) -> Float[Tensor, "replicas responses"]:
        """Return mean + scale * standard deviation."""
        return self.output.mean + self.scale * self.output.standard_deviation()

    def noise(self) -> Float[Tensor, "replicas responses"]:
        """Return independent uniform scores."""
        mean = self.output.mean
        return torch.rand(mean.shape, generator=self.generator, device=mean.device, dtype=mean.dtype)

    def order(self) -> Float[Tensor, "replicas responses"]:
        """Return scores that fall from the first response to the last."""
        mean = self.output.mean
        return -torch.arange(mean.shape[-1], device=mean.device, dtype=mean.dtype).expand_as(mean)

    def best(self, scores: Tensor, excluded: Tensor | None = None) -> Int[Tensor, " replicas"]:
        """Return the real response with the highest score, other than `excluded`."""
        mask = self.mask if excluded is None else self.mask.scatter(-1, excluded.unsqueeze(-1), False)
        return choose(scores, mask, generator=self.generator, owner=_OWNER)

    def top_two(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two real responses with the highest scores."""
        first = self.best(scores)
        return first, self.best(scores, first)

    def gap_variance(self) -> Float[Tensor, "replicas responses responses"]:
        """Return the posterior variance of the difference of every two responses."""
        members = self.output.members
        gram = members @ members.mT
        square = gram.diagonal(dim1=-2, dim2=-1)
        return (square.unsqueeze(-1) + square.unsqueeze(-2) - 2 * gram).clamp_min(0.0)

    def gap(self) -> Float[Tensor, "replicas responses responses"]:
        """Return the posterior mean of response i minus response j at [i, j]."""
        return self.output.mean.unsqueeze(-1) - self.output.mean.unsqueeze(-2)

    def best_pair(self, values: Float[Tensor, "replicas responses responses"]) -> tuple[Tensor, Tensor]:
        """Return the pair [i, j] of two different real responses with the largest value."""
        count = values.shape[-1]
        other = ~torch.eye(count, dtype=torch.bool, device=values.device)
        mask = self.mask.unsqueeze(-1) & self.mask.unsqueeze(-2) & other
        flat = choose(values.flatten(1), mask.flatten(1), generator=self.generator, owner=_OWNER)
        return flat // count, flat % count


def greedy(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the two responses with the highest mean."""
    return candidates.top_two(candidates.output.mean)


def thompson(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the two best responses of one posterior sample."""
    return candidates.top_two(candidates.draw())


def ucb(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the two responses with the highest mean + scale * standard deviation."""
    return candidates.top_two(candidates.bound())


def double_thompson(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the best responses of two independent samples; where both agree, the runner-up of the second.

    Source: Wu and Liu (2016), Double Thompson sampling for dueling bandits (arXiv 1604.07101), with another fall-back:
    a uniform second response, as is common, wastes half of every duel once the posterior has concentrated.
    """
    first = candidates.best(candidates.draw())
    scores = candidates.draw()
    second, runner_up = candidates.top_two(scores)
    return first, torch.where(second == first, runner_up, second)


def best_arm(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the response with the highest mean, and the one whose difference from it is most uncertain.

    Source: the exploration for best-arm identification of sample-efficient alignment (arXiv 2411.01493).
    """
    first = candidates.best(candidates.output.mean)
    place = first.view(-1, 1, 1).expand(-1, 1, candidates.mask.shape[-1])
    variance = candidates.gap_variance().gather(1, place).squeeze(1)
    return first, candidates.best(variance, first)


def infomax(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the pair whose choice probability sigmoid(r_i - r_j) has the largest posterior variance."""
    return candidates.best_pair(probability_variance(candidates.gap(), candidates.gap_variance()))


def information_gain(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the pair with the largest v p (1 - p), v the variance of its logit and p its mean's probability.

    To first order in v, half of it is what the judge's answer tells about the reward, in nats.

    Source: Houlsby et al. (2011), Bayesian active learning by disagreement (arXiv 1112.5745), to first order.
    """
    chance = torch.sigmoid(candidates.gap())
    return candidates.best_pair(candidates.gap_variance() * chance * (1 - chance))


def delta_ucb(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the pair with the largest optimistic gap, mean + scale * standard deviation of r_i - r_j.

    Source: the optimistic reward gap of active preference collection for DPO-style training (delta-UCB), with the
    difference's own standard deviation.
    """
    return candidates.best_pair(candidates.gap() + candidates.scale * candidates.gap_variance().sqrt())


def uniform(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return two different responses at random."""
    return candidates.top_two(candidates.noise())


def passive(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the first two responses, in the order in which they came."""
    return candidates.top_two(candidates.order())


PAIRS: dict[str, Callable[[Candidates], tuple[Tensor, Tensor]]] = {
    rule.__name__: rule
    for rule in (
        greedy,
        thompson,
        ucb,
        double_thompson,
        best_arm,
        infomax,
        information_gain,
        delta_ucb,
        uniform,
        passive,
    )
}
"""Every rule for a pair, by name."""

SINGLES: dict[str, Callable[[Candidates], Tensor]] = {
    "greedy": lambda candidates: candidates.output.mean,
    "best_arm": lambda candidates: candidates.output.mean,
    "thompson": Candidates.draw,
    "double_thompson": Candidates.draw,
    "ucb": Candidates.bound,
    "uniform": Candidates.noise,
    "passive": Candidates.order,
}
"""The scores whose best response a rule shows alone, by name; rules that only make sense for pairs are not here."""


def select_response(
    acquisition: str,
    output: IndexedOutput,
    mask: Bool[Tensor, "replicas responses"] | None = None,
    *,
    generator: torch.Generator,
    scale: float = 1.0,
) -> Int[Tensor, " replicas"]:
    """Return one response of each set.

    Args:
        acquisition: Name of a rule in `SINGLES`.
        output: Mean (replicas, responses) and members (replicas, responses, columns).
        mask: True for real responses; None: all.
        generator: Source of indices and tie-breaks.
        scale: See `Candidates`.

    Raises:
        ParameterError: An unknown rule, a set without a real response, a negative scale.
    """
    check_choice("acquisition", _OWNER, acquisition, SINGLES)
    candidates = _gather(output, mask, scale, generator, minimum=1)
    return candidates.best(SINGLES[acquisition](candidates))


def select_pair(
    acquisition: str,
    output: IndexedOutput,
    mask: Bool[Tensor, "replicas responses"] | None = None,
    *,
    generator: torch.Generator,
    scale: float = 1.0,
) -> tuple[Int[Tensor, " replicas"], Int[Tensor, " replicas"]]:
    """Return two different responses of each set, the order being the rule's own.

    Args:
        acquisition: Name of a rule in `PAIRS`.
        output: Mean (replicas, responses) and members (replicas, responses, columns).
        mask: True for real responses; None: all.
        generator: Source of indices and tie-breaks.
        scale: See `Candidates`.

    Raises:
        ParameterError: An unknown rule, a set of fewer than two real responses, a negative scale.
    """
    check_choice("acquisition", _OWNER, acquisition, PAIRS)
    return PAIRS[acquisition](_gather(output, mask, scale, generator, minimum=2))


def probability_variance(mean: Float[Tensor, "*shape"], variance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return Var sigmoid(g) for g ~ N(mean, variance), by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    deviation = variance.sqrt()
    first, second = torch.zeros_like(mean), torch.zeros_like(mean)
    for node, weight in zip(nodes, weights / math.sqrt(2 * math.pi), strict=True):
        chance = torch.sigmoid(mean + float(node) * deviation)
        first = first + float(weight) * chance
        second = second + float(weight) * chance.square()
    return (second - first.square()).clamp_min(0.0)


def _gather(
    output: IndexedOutput, mask: Tensor | None, scale: float, generator: torch.Generator, minimum: int
) -> Candidates:
    if mask is None:
        mask = torch.ones_like(output.mean, dtype=torch.bool)
    check_shape("mask", _OWNER, mask, "replicas responses", output.mean.shape)
    count = mask.sum(-1)
    if mask.shape[-1] < minimum:
        raise ParameterError("responses", _OWNER, f"be at least {minimum}", mask.shape[-1])
    check_all("responses", _OWNER, f"be at least {minimum} in every set", count >= minimum, count)
    return Candidates(output, mask, check_real("scale", _OWNER, scale, at_least=0.0), generator)
