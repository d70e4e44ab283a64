"""The peer of the speed comparison: independent MLP members, each trained by its own gradient steps on comparisons."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class IndependentMembers:
    """M members dim-width-width-1 with ReLU; every update is one Adam step of each on all stored pairs.

    The usual ensemble of online alignment (arXiv 2411.01493): a Bradley-Terry loss and a pull towards the initial
    weights, which stands for the prior.
    """

    def __init__(self, dim: int, width: int, members: int, *, pull: float, generator: torch.Generator) -> None:
        self.members = [_mlp(dim, width, generator) for _ in range(members)]
        self.anchors = [[p.detach().clone() for p in member.parameters()] for member in self.members]
        self.optimisers = [torch.optim.Adam(member.parameters(), lr=1e-3) for member in self.members]
        self.pull = pull

    def update(self, first: Tensor, second: Tensor) -> None:
        for member, anchor, optimiser in zip(self.members, self.anchors, self.optimisers, strict=True):
            optimiser.zero_grad(set_to_none=True)
            chosen, rejected = member(torch.cat([first, second])).squeeze(-1).chunk(2)
            distance = sum((p - a).square().sum() for p, a in zip(member.parameters(), anchor, strict=True))
            (-nn.functional.logsigmoid(chosen - rejected).mean() + self.pull * distance).backward()
            optimiser.step()


class StackedMembers:
    """The same members in one batched product per layer, with one optimiser: as fast as this design gets."""

    def __init__(self, dim: int, width: int, members: int, *, pull: float, generator: torch.Generator) -> None:
        same = IndependentMembers(dim, width, members, pull=pull, generator=generator)
        parameters = zip(*(member.parameters() for member in same.members), strict=True)
        self.leaves = [torch.stack([p.detach() for p in group]).requires_grad_() for group in parameters]
        self.anchors = [leaf.detach().clone() for leaf in self.leaves]
        self.optimiser = torch.optim.Adam(self.leaves, lr=1e-3)
        self.pull = pull

    def score(self, features: Tensor) -> Tensor:
        """Return the rewards (members, responses)."""
        hidden = features.expand(len(self.leaves[0]), -1, -1)
        for layer in range(0, 6, 2):
            weight, bias = self.leaves[layer], self.leaves[layer + 1].unsqueeze(1)
            hidden = torch.baddbmm(bias, hidden, weight.mT)
            hidden = hidden.relu() if layer < 4 else hidden
        return hidden.squeeze(-1)

    def update(self, first: Tensor, second: Tensor) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        chosen, rejected = self.score(torch.cat([first, second])).chunk(2, dim=-1)
        distance = sum((p - a).square().sum() for p, a in zip(self.leaves, self.anchors, strict=True))
        (-nn.functional.logsigmoid(chosen - rejected).mean(-1).sum() + self.pull * distance).backward()
        self.optimiser.step()


def _mlp(dim: int, width: int, generator: torch.Generator) -> nn.Sequential:
    layers = [nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)]
    with torch.no_grad():
        for layer in layers[::2]:
            bound = layer.in_features**-0.5
            for parameter in layer.parameters():
                parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)
    return nn.Sequential(*layers)
