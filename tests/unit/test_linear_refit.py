"""The batch formula: one refit equals all updates, and its statistics are those of textbook regression."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ensemblepp import gram
from ensemblepp.errors import ParameterError
from ensemblepp.linear import LinearPosterior
from ensemblepp.seeding import make_generator
from ensemblepp.testing import forbid_host_sync

REPLICAS, DIM, MEMBERS = 3, 5, 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=torch.float64)


def posterior(
    arms: int | None, dtype: torch.dtype = torch.float64, prior: str = "full", **changed: Any
) -> tuple[LinearPosterior, Tensor]:
    lead = (REPLICAS,) if arms is None else (REPLICAS, arms)
    directions = draw(*lead, DIM, MEMBERS, seed=1).to(dtype)
    root = draw(DIM, DIM, seed=2)
    covariance = {"full": root @ root.T + torch.eye(DIM), "diagonal": root[0].exp(), "number": torch.tensor(0.5)}[prior]
    options = {"noise_scale": 0.3, "prior_mean": draw(DIM, seed=3), "prior_covariance": covariance} | changed
    return LinearPosterior(DIM, directions, num_replicas=REPLICAS, num_arms=arms, dtype=dtype, **options), directions


def data(count: int, arms: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Data of which every fifth has all-zero features, though a reward."""
    features = draw(REPLICAS, count, DIM, seed=4)
    features[:, ::5] = 0.0
    arm = None
    if arms is not None:  # the last arm gets no data
        arm = torch.randint(arms - 1, (REPLICAS, count), generator=make_generator(6, "arm"))
    return features, draw(REPLICAS, count, seed=5), draw(REPLICAS, count, MEMBERS, seed=7), arm


def assert_equal(first: LinearPosterior, second: LinearPosterior, tolerance: float = 1e-10) -> None:
    for name in ("mean", "factor", "covariance"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("prior", ["full", "diagonal", "number"])
@pytest.mark.parametrize("arms", [None, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 1000])
def test_a_refit_equals_all_updates(arms: int | None, count: int, prior: str) -> None:
    (step, _), (batch, directions) = posterior(arms, prior=prior), posterior(arms, prior=prior)
    batch.update(*data(9, arms))  # a refit forgets what was there
    step.update(*data(count, arms))
    batch.refit(*data(count, arms), directions=directions)
    assert_equal(batch, step)
    # What was rebuilt goes on like what was built step by step, also when it forgets.
    for each in (step, batch):
        each.update(*data(3, arms))
        each.discount(0.9, directions)
        each.update(*data(70, arms))
    assert_equal(batch, step)


def test_one_datum_by_hand() -> None:
    # Sigma_0 = diag(4, 1), eta = 2, x = (1, 2), y = 4, mu_0 = (1, 0): gain (1/3, 1/6), prediction error 3.
    directions = torch.tensor([[[0.5], [1.0]]], dtype=torch.float64)
    covariance, mean = torch.tensor([4.0, 1.0]), torch.tensor([1.0, 0.0])
    model = LinearPosterior(
        2, directions, noise_scale=2.0, prior_covariance=covariance, prior_mean=mean, dtype=torch.float64
    )
    x, y, z = (torch.tensor(each, dtype=torch.float64) for each in ([[[1.0, 2.0]]], [[4.0]], [[[0.5]]]))
    fit = model.refit(x, y, z, directions=directions)
    assert model.mean.tolist() == [pytest.approx([2.0, 0.5])]
    assert model.factor.flatten().tolist() == pytest.approx([1 / 3, 2 / 3])
    assert model.covariance.flatten().tolist() == pytest.approx([8 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert fit.residual_sum_squares.tolist() == pytest.approx([1.0])  # 4 - (2 + 1)
    assert fit.effective_dim.tolist() == pytest.approx([2 - (8 / 3 / 4 + 2 / 3)])
    assert fit.count.tolist() == [1]


@pytest.mark.parametrize("arms", [None, 4])
@pytest.mark.parametrize("count", [0, 1, 50, 300])
def test_posterior_and_statistics_are_those_of_dense_regression(arms: int | None, count: int) -> None:
    model, directions = posterior(arms)
    features, reward, perturbation, arm = data(count, arms)
    fit = model.refit(features, reward, perturbation, arm, directions=directions)
    root, mean, eta = model.prior_root.numpy(), model.prior_mean.numpy(), 0.3
    precision0 = np.linalg.inv(root @ root.T)
    for replica in range(REPLICAS):
        for block in [None] if arms is None else range(arms):
            own = torch.ones(count, dtype=torch.bool) if arm is None or block is None else arm[replica] == block
            own = (own & (features[replica] != 0).any(-1)).numpy()
            place = (replica,) if block is None else (replica, block)
            x, y = features[replica].numpy()[own], reward[replica].numpy()[own]
            covariance = np.linalg.inv(precision0 + x.T @ x / eta**2)
            wanted = covariance @ (precision0 @ mean + x.T @ y / eta**2)
            pull = precision0 @ root @ directions[place].numpy() + x.T @ perturbation[replica].numpy()[own] / eta
            np.testing.assert_allclose(model.mean[place], wanted, rtol=1e-9, atol=1e-10)
            np.testing.assert_allclose(model.factor[place], covariance @ pull, rtol=1e-9, atol=1e-10)
            np.testing.assert_allclose(model.covariance[place], covariance, rtol=1e-9, atol=1e-10)
            residual = ((y - x @ wanted) ** 2).sum()
            np.testing.assert_allclose(fit.residual_sum_squares[place], residual, rtol=1e-9, atol=1e-9)
            gamma = DIM - np.trace(precision0 @ covariance)
            np.testing.assert_allclose(fit.effective_dim[place], gamma, rtol=1e-9, atol=1e-9)
            assert int(fit.count[place]) == own.sum()
    assert float(fit.residual_sum_squares.min()) >= 0.0


@pytest.mark.parametrize("arms", [None, 4])
def test_all_zero_rows_change_nothing(arms: int | None) -> None:
    model, directions = posterior(arms)
    features, reward, perturbation, arm = data(40, arms)
    fit = model.refit(torch.zeros_like(features), 100 * reward, perturbation, arm, directions=directions)
    prior, _ = posterior(arms)
    assert_equal(model, prior, 1e-14)
    for value in (fit.residual_sum_squares, fit.effective_dim, fit.count):
        assert float(value.abs().max()) < 1e-12


@pytest.mark.parametrize("ratio", [1e-4, 1e-2, 1e2, 1e4])
def test_small_and_large_noise_keep_float32_within_a_thousandth(ratio: float) -> None:
    # Fewer data than features: squaring the features in float32 would lose the prior beside the data.
    dim, count = 60, 40
    truth = draw(2, dim, 1, seed=8)
    features = draw(2, count, dim, seed=9).float()
    reward = (features.double() @ truth).squeeze(-1) + ratio * draw(2, count, seed=10)
    single, double = (
        LinearPosterior(dim, num_replicas=2, noise_scale=ratio, dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    single.refit(features, reward.float())
    double.refit(features.double(), reward.float().double())
    for name in ("mean", "covariance"):
        got, want = getattr(single, name).double(), getattr(double, name)
        assert float((got - want).norm() / want.norm()) < 1e-3


@pytest.mark.parametrize("arms", [None, 1, 4])
def test_temporaries_stay_bounded_and_their_bound_changes_nothing(
    arms: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, directions = posterior(arms, torch.float32)
    parts, _ = posterior(arms, torch.float32)
    features, reward, perturbation, arm = data(3000, None if arms is None else arms + 1)
    rows = (features.float(), reward.float(), perturbation.float(), arm)
    wanted = whole.refit(*rows, directions=directions)
    # Enough for a chunk of one arm's data of all replicas, far less than the 3 * 3000 * 10 entries of all data.
    bound = REPLICAS * 64 * (DIM + 1 + MEMBERS)
    monkeypatch.setattr(gram, "_ENTRIES", bound)
    watch = LargestWide()
    with watch:
        fit = parts.refit(*rows, directions=directions)
    assert 0 < watch.entries <= bound
    assert_equal(parts, whole, 1e-6)
    for name in ("residual_sum_squares", "effective_dim", "count"):
        torch.testing.assert_close(getattr(fit, name), getattr(wanted, name), rtol=1e-10, atol=1e-10)


class LargestWide(TorchDispatchMode):
    """Notes the entries of the largest float64 storage that an operation returns."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.dtype is torch.float64:
                self.entries = max(self.entries, value.untyped_storage().nbytes() // 8)
        return result


@pytest.mark.parametrize("arms", [None, 4])
def test_a_refit_waits_for_no_device(arms: int | None) -> None:
    model, directions = posterior(arms)
    rows = data(200, arms)
    with forbid_host_sync():
        model.refit(*rows, directions=directions)


def test_a_float32_refit_is_solved_in_float64() -> None:
    single, directions = posterior(None, torch.float32)
    double, _ = posterior(None)
    features, reward, perturbation, arm = data(700, None)
    single.refit(features.float(), reward.float(), perturbation.float(), arm, directions=directions)
    double.refit(features, reward, perturbation, arm, directions=directions.double())
    torch.testing.assert_close(single.mean.double(), double.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(single.covariance.double(), double.covariance, rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("arms", "change", "message"),
    [
        (None, {"reward": torch.tensor([torch.nan])}, "reward of LinearPosterior must be finite"),
        (None, {"features": torch.tensor([torch.inf])}, "features of LinearPosterior must be finite"),
        (None, {"perturbation": torch.tensor([torch.nan])}, "perturbation"),
        (None, {"perturbation": None}, "perturbation of LinearPosterior must have shape"),
        (None, {"directions": None}, "directions of LinearPosterior must have shape"),
        (None, {"directions": torch.tensor([torch.nan])}, "directions of LinearPosterior must be finite"),
        (None, {"arm": torch.zeros(REPLICAS, 9, dtype=torch.int64)}, "arm of LinearPosterior must be given exactly"),
        (4, {"arm": None}, "arm of LinearPosterior must be given exactly with per-arm blocks"),
        (4, {"arm": torch.tensor([4])}, r"arm of LinearPosterior must be in \[0, 4\); got 4 at index \(1, 2\)"),
        (4, {"arm": torch.tensor([-1])}, r"arm of LinearPosterior must be in \[0, 4\); got -1 at index \(1, 2\)"),
    ],
)
def test_a_refused_refit_changes_nothing(arms: int | None, change: dict[str, Tensor | None], message: str) -> None:
    model, directions = posterior(arms)
    features, reward, perturbation, arm = data(9, arms)
    model.update(features, reward, perturbation, arm)
    before = model.state.clone()
    given: dict[str, Any] = {"features": features, "reward": reward, "perturbation": perturbation, "arm": arm}
    given |= {"directions": directions}
    for name, value in change.items():
        if value is not None and value.numel() == 1:  # one bad entry
            bad = given[name].clone()
            bad[1, 2] = value
            value = bad
        given[name] = value
    with pytest.raises(ParameterError, match=message):
        model.refit(**given)
    assert torch.equal(model.state, before)
