"""The conformance checker for index distributions."""

from __future__ import annotations

import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.host_sync import forbid_host_sync
from ensemblepp.indices import IndexDistribution
from ensemblepp.seeding import make_generator
from ensemblepp.testing_common import global_random_state_untouched, identical, nearly_equal, require

_NUM_DRAWS = 20_000
_STANDARD_ERRORS = 5.0


def check_index_distribution(distribution: IndexDistribution) -> None:
    """Check the moments of both roles of an index distribution within five standard errors of 20,000 draws.

    The reference has mean 0 and second moment I; the perturbation is the same draw divided by sqrt(M). For "one_hot"
    the mean is 1/M per coordinate, the second moment I/M, and the perturbation must be refused.

    Raises:
        AssertionError: A promise is broken; the message says which.
    """
    dim, one_hot = distribution.index_dim, distribution.kind == "one_hot"

    def draw(role: str, *batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
        values = getattr(distribution, role)(*batch, generator=make_generator(0, "conformance"), dtype=dtype)
        assert isinstance(values, Tensor)
        require(values.shape == (*batch, dim) and values.dtype == dtype, f"{role} must follow batch shape and dtype")
        return values

    with global_random_state_untouched("the distribution"):
        for dtype in (torch.float32, torch.float64):
            for batch in ((), (0,), (2, 3)):
                draw("reference", *batch, dtype=dtype)
        zeta = draw("reference", _NUM_DRAWS)
        require(identical(zeta, draw("reference", _NUM_DRAWS)), "one generator state must give one draw")
        scale = 1 / dim if one_hot else 1.0
        _require_mean(zeta, torch.full((dim,), 1 / dim if one_hot else 0.0), "mean of the reference")
        products = zeta.unsqueeze(-1) * zeta.unsqueeze(-2)
        _require_mean(products, scale * torch.eye(dim), "second moment of the reference")
        if one_hot:
            try:
                draw("perturbation", 1)
            except ParameterError:
                return
            raise AssertionError("a law with non-zero mean must refuse to give perturbations")
        z = draw("perturbation", _NUM_DRAWS)
        require(nearly_equal(z * dim**0.5, zeta), "the perturbation must be the reference divided by sqrt(index_dim)")
        with forbid_host_sync():
            generator = make_generator(0, "conformance")
            distribution.reference(2, generator=generator)
            distribution.perturbation(2, generator=generator)


def _require_mean(values: Tensor, wanted: Tensor, name: str) -> None:
    """Check the mean over the first axis; the smallest error is rounding, for what does not vary."""
    error = (values.mean(0) - wanted.to(values)).abs()
    standard_error = values.std(0) / len(values) ** 0.5
    off = float((error / (standard_error + 1e-12)).max()) if bool((error > 1e-9).any()) else 0.0
    require(off < _STANDARD_ERRORS, f"{name} is {off:.1f} standard errors off")
