"""Index distributions: the random directions that turn M ensemble members into one posterior sample.

Every distribution serves two roles. The *reference* index zeta weighs the members when acting and satisfies
E[zeta] = 0, E[zeta zeta^T] = I. The *perturbation* z is stored with a datum and trains the members; it is the
reference divided by sqrt(M), so E[z z^T] = I / M and |z| = 1 (for "gaussian" on average).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ensemblepp.errors import ParameterError, check_choice, check_int

_Sampler = Callable[[tuple[int, ...], int, torch.Generator, torch.dtype], Tensor]


def _signs(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randint(2, shape, generator=generator, device=generator.device).to(dtype).mul_(2).sub_(1)


def _gaussian(shape: tuple[int, ...], nonzeros: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)


def _sphere(shape: tuple[int, ...], nonzeros: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.normalize(_gaussian(shape, nonzeros, generator, dtype), dim=-1) * math.sqrt(shape[-1])


def _cube(shape: tuple[int, ...], nonzeros: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return _signs(shape, generator, dtype)


def _sparse(shape: tuple[int, ...], nonzeros: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    # The s largest of M uniform keys are a uniformly random subset of size s.
    keys = torch.rand(shape, generator=generator, device=generator.device)
    support = keys.topk(nonzeros, dim=-1).indices
    values = _signs((*shape[:-1], nonzeros), generator, dtype) * math.sqrt(shape[-1] / nonzeros)
    return torch.zeros(shape, device=generator.device, dtype=dtype).scatter_(-1, support, values)


def _one_hot(shape: tuple[int, ...], nonzeros: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    hot = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator, device=generator.device)
    return torch.zeros(shape, device=generator.device, dtype=dtype).scatter_(-1, hot, 1.0)


_SAMPLERS: dict[str, _Sampler] = {
    "gaussian": _gaussian,
    "sphere": _sphere,
    "cube": _cube,
    "coordinate": _sparse,
    "sparse": _sparse,
    "one_hot": _one_hot,
}

KINDS = tuple(_SAMPLERS)


@dataclass(frozen=True)
class IndexDistribution:
    """One law of the index in `index_dim` = M dimensions.

    - "gaussian": N(0, I). The most robust reference at small M.
    - "sphere": uniform on sqrt(M) S^(M-1).
    - "cube": uniform on {-1, +1}^M.
    - "coordinate": +-sqrt(M) e_m with m uniform ("sparse" with one non-zero entry).
    - "sparse": `nonzeros` = s coordinates at random, each +-sqrt(M / s).
    - "one_hot": e_m with m uniform, unscaled and with non-zero mean: picks one member, as ensemble sampling does.

    Args:
        kind: Name of the law.
        index_dim: Number of ensemble members M.
        nonzeros: s of the "sparse" law; None elsewhere.

    Raises:
        ParameterError: An unknown kind, a size below one, or `nonzeros` where it has no meaning.

    Source: Ensemble++ (arXiv 2407.13195), index distributions and anti-concentration.
    """

    kind: str
    index_dim: int
    nonzeros: int | None = None

    def __post_init__(self) -> None:
        check_choice("kind", "IndexDistribution", self.kind, KINDS)
        check_int("index_dim", "IndexDistribution", self.index_dim)
        if (self.kind == "sparse") != (self.nonzeros is not None):
            raise ParameterError("nonzeros", "IndexDistribution", 'be given exactly for "sparse"', repr(self.nonzeros))
        if self.nonzeros is not None and check_int("nonzeros", "IndexDistribution", self.nonzeros) > self.index_dim:
            raise ParameterError("nonzeros", "IndexDistribution", f"be <= index_dim = {self.index_dim}", self.nonzeros)

    def reference(
        self, *batch: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*batch index_dim"]:
        """Draw reference indices zeta with E[zeta zeta^T] = I ("one_hot": plain unit vectors e_m)."""
        return _SAMPLERS[self.kind]((*batch, self.index_dim), self.nonzeros or 1, generator, dtype)

    def perturbation(
        self, *batch: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*batch index_dim"]:
        """Draw perturbations z with E[z] = 0 and E[z z^T] = I / M.

        Raises:
            ParameterError: The law is "one_hot", whose mean is not zero.
        """
        if self.kind == "one_hot":
            raise ParameterError("kind", "a perturbation", "have mean zero", "'one_hot'", 'Use "coordinate".')
        return self.reference(*batch, generator=generator, dtype=dtype) / math.sqrt(self.index_dim)
