"""What the linear posterior refuses: by name, and data by index without moving."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.linear import LinearPosterior


def make(num_arms: int | None = None) -> LinearPosterior:
    lead = (2,) if num_arms is None else (2, num_arms)
    return LinearPosterior(3, torch.ones(*lead, 3, 4) / 2, num_replicas=2, num_arms=num_arms)


def spoilt(tensor: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


X, Y, Z, ARM = torch.ones(2, 5, 3), torch.ones(2, 5), torch.ones(2, 5, 4), torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("x", "y", "z", "message"),
    [
        (spoilt(X, (1, 2, 0), torch.nan), Y, Z, r"features .* squared norm; got nan at index \(1, 2\)"),
        (spoilt(X, (0, 4, 2), -torch.inf), Y, Z, r"features .* squared norm; got inf at index \(0, 4\)"),
        (spoilt(X, (1, 0, 1), 1e30), Y, Z, r"features .* squared norm; got inf at index \(1, 0\)"),
        (X, spoilt(Y, (1, 3), torch.nan), Z, r"reward .* finite .*; got nan at index \(1, 3\)"),
        (X, spoilt(Y, (0, 3), torch.inf), Z, r"reward .* finite .*; got inf at index \(0, 3\)"),
        (X, Y, spoilt(Z, (1, 4, 2), torch.nan), r"reward .* finite \(as must its perturbation\).* at index \(1, 4\)"),
    ],
)
def test_non_finite_data_are_named_and_nothing_moves(x: Tensor, y: Tensor, z: Tensor, message: str) -> None:
    posterior = make()
    before = posterior.state.clone()
    with pytest.raises(ParameterError, match=message):
        posterior.update(x, y, z)
    assert torch.equal(posterior.state, before)


@pytest.mark.parametrize("arm", [-1, 3])
def test_an_arm_out_of_range_is_named_and_nothing_moves(arm: int) -> None:
    posterior = make(num_arms=3)
    before = posterior.state.clone()
    message = rf"arm of LinearPosterior must be in \[0, 3\); got {arm} at index \(1, 2\)"
    with pytest.raises(ParameterError, match=message):
        posterior.update(X, Y, Z, spoilt(ARM, (1, 2), arm))
    assert torch.equal(posterior.state, before)


def test_an_arm_belongs_exactly_to_per_arm_blocks() -> None:
    for posterior, arm in ((make(), ARM), (make(num_arms=2), None)):
        with pytest.raises(ParameterError, match="arm of LinearPosterior must be given exactly with per-arm blocks"):
            posterior.update(X, Y, Z, arm)


@pytest.mark.parametrize(
    ("x", "y", "z", "message"),
    [
        (X[:1], Y, Z, r"features .* = \(2, any, 3\); got shape \(1, 5, 3\)"),
        (X[..., :2], Y, Z, r"features .* = \(2, any, 3\); got shape \(2, 5, 2\)"),
        (X, Y.unsqueeze(-1), Z, r"reward .* = \(2, 5\); got shape \(2, 5, 1\)"),
        (X, Y[:, :1], Z, r"reward .* = \(2, 5\); got shape \(2, 1\)"),
        (X, Y, Z[..., :3], r"perturbation .* = \(2, 5, 4\); got shape \(2, 5, 3\)"),
        (X, Y, None, r"perturbation .* = \(2, 5, 4\); got shape \(2, 5, 0\)"),
    ],
)
def test_wrong_shapes_are_refused_never_broadcast(
    without_shape_checks: None, x: Tensor, y: Tensor, z: Tensor | None, message: str
) -> None:
    posterior = make()
    before = posterior.state.clone()
    with pytest.raises(ParameterError, match=message):
        posterior.update(x, y, z)
    assert torch.equal(posterior.state, before)


def test_discount_and_new_arms_check_what_they_get() -> None:
    posterior = make()
    before = posterior.state.clone()
    for factor in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ParameterError, match="factor of LinearPosterior must be a finite number > 0 and <= 1; got"):
            posterior.discount(factor)
    with pytest.raises(ParameterError, match=r"directions of .* = \(2, 3, 4\); got shape \(2, 3, 5\)"):
        posterior.discount(0.5, torch.ones(2, 3, 5))
    assert torch.equal(posterior.state, before)
    with pytest.raises(ParameterError, match=r"num_arms of .* must be set to add arms; got None\. A shared posterior"):
        posterior.add_arms(torch.ones(2, 1, 3, 4))
    with pytest.raises(ParameterError, match=r"directions of .* = \(2, any, 3, 4\); got shape \(2, 1, 3, 5\)"):
        make(num_arms=2).add_arms(torch.ones(2, 1, 3, 5))


BAD_PRIORS: dict[str, Any] = {
    "zero": 0.0,
    "negative": -1.0,
    "infinite": math.inf,
    "a zero on the diagonal": torch.tensor([1.0, 0.0]),
    "singular": torch.ones(2, 2),
    "asymmetric": torch.tensor([[1.0, 0.5], [0.0, 1.0]]),
    "NaN": torch.tensor([1.0, torch.nan]),
}


@pytest.mark.parametrize("case", BAD_PRIORS)
def test_a_prior_without_precision_or_variance_is_refused(case: str) -> None:
    with pytest.raises(ParameterError, match="prior_covariance of LinearPosterior must be"):
        LinearPosterior(2, prior_covariance=BAD_PRIORS[case])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_dim": 0}, "feature_dim of LinearPosterior must be an int >= 1; got 0"),
        ({"num_replicas": 0}, "num_replicas of LinearPosterior must be an int >= 1; got 0"),
        ({"num_arms": 0}, "num_arms of LinearPosterior must be an int >= 1; got 0"),
        ({"noise_scale": 0.0}, "noise_scale of LinearPosterior must be a finite number > 0; got 0.0"),
        (
            {"dtype": torch.float16},
            "dtype of LinearPosterior must be torch.float32 or torch.float64; got torch.float16",
        ),
        ({"prior_mean": torch.zeros(3)}, r"prior_mean of LinearPosterior must have shape \(feature_dim\) = \(2\)"),
        ({"prior_mean": torch.tensor([0.0, torch.nan])}, r"prior_mean of .* must be finite; got nan at index \(1,\)"),
        (
            {"prior_covariance": torch.ones(3)},
            r"prior_covariance of .* must have shape .* = \(2, 2\); got shape \(3, 3\)",
        ),
        ({"directions": torch.zeros(2, 2, 3)}, r"directions of .* must have shape .* = \(1, 2, any\)"),
    ],
)
def test_errors_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        LinearPosterior(**({"feature_dim": 2} | options))
