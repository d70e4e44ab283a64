"""The sampler head on a backbone's features: a mean, M members and their fixed prior functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from ensemblepp.heads import IndexedOutput
from ensemblepp.indices import IndexDistribution
from ensemblepp.seeding import make_generator


class SamplerHead(nn.Module):
    """Linear Ensemble++ head in float32.

    With phi the normalised features, |phi| = 1::

        phi      = layer_norm(features) / sqrt(dim)
        mean     = <w, phi>
        member_m = <a_m, phi> + prior_scale <b_m, phi>

    The head stays in float32 whatever the model around it is cast to. The prior functions b_m are persistent buffers,
    not parameters: frozen parameters come back trainable after `from_pretrained` and under peft. w and a_m start at
    zero, so before any data the reward has mean 0 and standard deviation prior_scale |phi| over the index.

    Args:
        dim: Length of the features.
        index_dim: M.
        prior_scale: Prior standard deviation of the reward. Raising it explores more.

    Source: Ensemble++ (arXiv 2407.13195), section 4, on features of a language model.
    """

    prior: Tensor

    def __init__(self, dim: int, index_dim: int, prior_scale: float) -> None:
        super().__init__()
        self.prior_scale = prior_scale
        self.mean = nn.Parameter(torch.zeros(dim, dtype=torch.float32))
        self.members = nn.Parameter(torch.zeros(dim, index_dim, dtype=torch.float32))
        self.register_buffer("prior", torch.zeros(dim, index_dim, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SamplerHead:
        """Follow the model to another device, not to another dtype."""

        def in_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(in_float32, recurse)  # type: ignore[no-untyped-call]
        return self

    def draw_prior(self, seed: int) -> None:
        """Draw the prior directions b (rows with E[b b^T] = I / M) from their own stream."""
        law = IndexDistribution("sphere", self.prior.shape[1])
        self.prior.copy_(law.perturbation(len(self.prior), generator=make_generator(seed, "prior")))

    @staticmethod
    def phi(features: Shaped[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Return the normalised features, in float32."""
        wide = features.float()
        return nn.functional.layer_norm(wide, wide.shape[-1:]) / math.sqrt(wide.shape[-1])

    def forward(self, features: Shaped[Tensor, "*batch dim"]) -> IndexedOutput:
        """Return mean (*batch, 1) and members (*batch, 1, M), the prior among them; one forward, any sample."""
        phi = self.phi(features)
        members = phi @ (self.members + self.prior_scale * self.prior)
        return IndexedOutput((phi @ self.mean).unsqueeze(-1), members.unsqueeze(-2))
