"""What a caller may give as the mean and covariance of a Gaussian prior, checked and in one form."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ensemblepp.errors import ParameterError, check_all, check_real, check_shape

_OWNER = "LinearPosterior"


def as_vector(
    name: str, value: float | Tensor, feature_dim: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return a number or vector as (feature_dim,)."""
    if not isinstance(value, Tensor):
        return torch.full((feature_dim,), check_real(name, _OWNER, value), dtype=dtype, device=device)
    check_shape(name, _OWNER, value, "feature_dim", (feature_dim,))
    check_all(name, _OWNER, "be finite", torch.isfinite(value), value)
    return value.to(device, dtype)


def square_root(
    covariance: float | Tensor, feature_dim: int, dtype: torch.dtype, device: torch.device | str
) -> Float[Tensor, "feature_dim feature_dim"]:
    """Return the lower-triangular square root of a variance, a diagonal or a covariance matrix."""
    name, rule = "prior_covariance", "be symmetric positive definite"
    if not isinstance(covariance, Tensor):
        if not isinstance(covariance, (int, float)):
            raise ParameterError(name, _OWNER, "be a number > 0 or a torch tensor", type(covariance).__name__)
        covariance = torch.tensor(check_real(name, _OWNER, covariance, above=0.0), dtype=torch.float64)
    wide = covariance.to("cpu", torch.float64)
    if wide.ndim < 2:
        wide = torch.diag(wide.expand(feature_dim) if wide.ndim == 0 else wide)
    check_shape(name, _OWNER, wide, "feature_dim feature_dim", (feature_dim, feature_dim))
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(wide)
    # Cholesky reads the lower triangle only, so symmetry is a rule of its own.
    if failed or not torch.isfinite(root).all() or not torch.allclose(wide, wide.mT, rtol=1e-6, atol=0.0):
        raise ParameterError(name, _OWNER, rule, wide.tolist())
    return root.to(device, dtype)
