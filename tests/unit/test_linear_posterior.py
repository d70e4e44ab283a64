"""The linear posterior against numbers computed by hand and against the textbook formulas in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.linear import LinearPosterior
from ensemblepp.seeding import make_generator

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=F64)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=make_generator(seed, "arms"))


def close(first: Tensor, second: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


def test_one_datum_by_hand() -> None:
    # Sigma_0 = diag(4, 1), eta = 2, x = (1, 2): Sigma x = (4, 2), s = 4 + 4 + 4 = 12, gain = (1/3, 1/6).
    directions = torch.tensor([[[0.5], [1.0]]], dtype=F64)  # A_0 = (1, 1)
    options: dict[str, Any] = {"prior_covariance": torch.tensor([4.0, 1.0]), "prior_mean": torch.tensor([1.0, 0.0])}
    posterior = LinearPosterior(2, directions, noise_scale=2.0, dtype=F64, **options)
    error = posterior.update(
        torch.tensor([[[1.0, 2.0]]], dtype=F64), torch.tensor([[4.0]], dtype=F64), torch.tensor([[[0.5]]], dtype=F64)
    )
    close(error, torch.tensor([[3.0]], dtype=F64))  # 4 - 1
    close(posterior.mean, torch.tensor([[2.0, 0.5]], dtype=F64))
    # x^T A = 3, eta z = 1: A moves by gain * (1 - 3).
    close(posterior.factor, torch.tensor([[[1 / 3], [2 / 3]]], dtype=F64))
    wanted = torch.tensor([[[4 - 4 / 3, -2 / 3], [-2 / 3, 1 - 1 / 3]]], dtype=F64)
    close(posterior.covariance, wanted)
    contexts = torch.tensor([[[[1.0, 0.0], [1.0, 2.0]]]], dtype=F64)
    close(posterior.score(contexts, posterior.mean.unsqueeze(1)), torch.tensor([[[2.0, 3.0]]], dtype=F64))
    wanted = torch.tensor([[[(8 / 3) ** 0.5, (8 / 3 - 8 / 3 + 8 / 3) ** 0.5]]], dtype=F64)
    close(posterior.standard_deviation(contexts), wanted)


def prior_matrix(dim: int) -> Tensor:
    root = normal(dim, dim, seed=5)
    return root @ root.T / dim + 0.5 * torch.eye(dim, dtype=F64)


def make(dim: int = 5, members: int = 3, replicas: int = 2, **options: Any) -> LinearPosterior:
    arms = [] if options.get("num_arms") is None else [options["num_arms"]]
    defaults: dict[str, Any] = {"prior_covariance": prior_matrix(dim), "prior_mean": normal(dim, seed=6)}
    options = defaults | {"dtype": F64, "noise_scale": 0.7} | options
    directions = normal(replicas, *arms, dim, members, seed=1)
    return LinearPosterior(dim, directions, num_replicas=replicas, **options)


def data(count: int, dim: int = 5, members: int = 3, replicas: int = 2, seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    one = normal(replicas, count, dim + 1 + members, seed=seed)
    return one[..., :dim], one[..., dim], one[..., dim + 1 :]


def unrolled(
    prior: LinearPosterior, x: Tensor, y: Tensor, z: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, factor and covariance from all data at once, each datum weighted (the prior by weight[0])."""
    eta = prior.noise_scale
    weight = torch.ones(1 + x.shape[1], dtype=F64) if weight is None else weight
    precision0 = torch.linalg.inv(prior.covariance)
    wx = weight[1:, None] * x
    covariance = torch.linalg.inv(weight[0] * precision0 + x.mT @ wx / eta**2)
    mean = covariance @ (weight[0] * precision0 @ prior.mean.unsqueeze(-1) + wx.mT @ y.unsqueeze(-1) / eta**2)
    root = weight.sqrt()
    factor = covariance @ (root[0] * precision0 @ prior.factor + (root[1:, None] * x).mT @ z / eta)
    return mean.squeeze(-1), factor, covariance


def assert_state(posterior: LinearPosterior, wanted: tuple[Tensor, Tensor, Tensor]) -> None:
    for got, want in zip((posterior.mean, posterior.factor, posterior.covariance), wanted, strict=True):
        close(got, want)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("block", [1, 7, 1000])
def test_mean_factor_and_covariance_equal_the_unrolled_formula(count: int, block: int) -> None:
    x, y, z = data(count)
    posterior = make()
    for start in range(0, count, block):
        part = slice(start, start + block)
        posterior.update(x[:, part], y[:, part], z[:, part])
    assert_state(posterior, unrolled(make(), x, y, z))


@pytest.mark.parametrize("num_arms", [None, 3])
def test_a_block_of_k_equals_k_single_updates(num_arms: int | None) -> None:
    x, y, z = data(90)
    arm = None if num_arms is None else integers(num_arms, 2, 90)
    together, single = make(num_arms=num_arms), make(num_arms=num_arms)
    together.update(x, y, z, arm)
    for i in range(90):
        single.update(x[:, [i]], y[:, [i]], z[:, [i]], None if arm is None else arm[:, [i]])
    for name in ("mean", "factor", "covariance"):
        close(getattr(together, name), getattr(single, name))


def test_the_order_of_the_data_does_not_matter() -> None:
    x, y, z = data(70)
    order = torch.randperm(70, generator=make_generator(0, "order"))
    forward, shuffled = make(), make()
    forward.update(x, y, z)
    for part in torch.split(order, 9):
        shuffled.update(x[:, part], y[:, part], z[:, part])
    for name in ("mean", "factor", "covariance"):
        close(getattr(forward, name), getattr(shuffled, name))


def test_the_prediction_error_is_that_before_the_update() -> None:
    x, y, z = data(5)
    posterior = make()
    before = posterior.mean.clone()
    close(posterior.update(x, y, z), y - torch.einsum("rbd,rd->rb", x, before))


def test_per_arm_blocks_equal_the_disjoint_encoding() -> None:
    dim, members, arms, replicas, count = 4, 3, 3, 2, 80
    small = make(dim, members, num_arms=arms, prior_mean=0.3, prior_covariance=prior_matrix(dim))
    prior = prior_matrix(dim)
    joint = LinearPosterior(
        arms * dim,
        normal(replicas, arms, dim, members, seed=1).flatten(1, 2),
        num_replicas=replicas,
        noise_scale=0.7,
        prior_mean=0.3,
        prior_covariance=torch.kron(torch.eye(arms, dtype=F64), prior),
        dtype=F64,
    )
    x, y, z = data(count, dim, members)
    arm = integers(arms, replicas, count)
    encoded = (torch.nn.functional.one_hot(arm, arms).to(F64).unsqueeze(-1) * x.unsqueeze(-2)).flatten(2)
    for part in (slice(0, 1), slice(1, 2), slice(2, count)):
        small.update(x[:, part], y[:, part], z[:, part], arm[:, part])
        joint.update(encoded[:, part], y[:, part], z[:, part])
    close(small.mean.flatten(1), joint.mean)
    close(small.factor.flatten(1, 2), joint.factor)
    for a in range(arms):
        block = slice(a * dim, (a + 1) * dim)
        close(small.covariance[:, a], joint.covariance[:, block, block])
    zeta, contexts = normal(replicas, 6, members, seed=3), normal(replicas, 6, dim, seed=4)
    every = torch.einsum("kl,rbd->rbkld", torch.eye(arms, dtype=F64), contexts).flatten(3)
    close(small.score(contexts, small.sample(zeta)), joint.score(every, joint.sample(zeta)))
    close(small.standard_deviation(contexts), joint.standard_deviation(every))


def test_only_the_chosen_arms_block_moves() -> None:
    posterior = make(num_arms=4)
    before = posterior.state.clone()
    x, y, z = data(2)
    posterior.update(x, y, z, torch.tensor([[1, 1], [1, 3]]))
    moved = (posterior.state != before).flatten(2).any(-1)
    assert moved.tolist() == [[False, True, False, False], [False, True, False, True]]


def test_all_zero_rows_change_nothing() -> None:
    for arm in (None, torch.zeros(2, 3, dtype=torch.int64)):
        posterior = make(num_arms=None if arm is None else 2)
        before = posterior.state.clone()
        x, y, z = data(3)
        posterior.update(torch.zeros_like(x), y, z, arm)
        assert torch.equal(posterior.state, before)
        posterior.update(x[:, :0], y[:, :0], z[:, :0], None if arm is None else arm[:, :0])
        assert torch.equal(posterior.state, before)


def test_a_zero_row_inside_a_block_changes_nothing() -> None:
    x, y, z = data(6)
    x[:, 2] = 0
    kept = [0, 1, 3, 4, 5]
    one, two = make(), make()
    one.update(x, y, z)
    two.update(x[:, kept], y[:, kept], z[:, kept])
    close(one.state[..., :4], two.state[..., :4])
    close(one.covariance, two.covariance)


def test_discount_weighs_data_by_gamma_to_the_discounts_since() -> None:
    gamma = 0.8
    x, y, z = data(60)
    posterior = make()
    for part in range(6):
        rows = slice(10 * part, 10 * part + 10)
        posterior.update(x[:, rows], y[:, rows], z[:, rows])
        posterior.discount(gamma)
    age = torch.cat([torch.tensor([6]), 6 - torch.arange(60) // 10]).to(F64)
    assert_state(posterior, unrolled(make(), x, y, z, gamma**age))


def test_discount_puts_the_prior_back_with_fresh_directions() -> None:
    gamma = 0.6
    posterior = make(num_arms=2)
    x, y, z = data(30)
    posterior.update(x, y, z, integers(2, 2, 30))
    before = make(num_arms=2)
    before.state = posterior.state.clone()
    fresh = normal(2, 2, 5, 3, seed=9)
    posterior.discount(gamma, fresh)
    prior = prior_matrix(5)
    precision0, precision = torch.linalg.inv(prior), torch.linalg.inv(before.covariance)
    covariance = torch.linalg.inv(gamma * precision + (1 - gamma) * precision0)
    close(posterior.covariance, covariance)
    pulls = gamma * precision @ before.mean.unsqueeze(-1)
    pulls = pulls + (1 - gamma) * (precision0 @ normal(5, seed=6)).unsqueeze(-1)
    close(posterior.mean, (covariance @ pulls).squeeze(-1))
    fresh_part = torch.linalg.solve(torch.linalg.cholesky(prior).mT, fresh)  # Sigma_0^-1 A_0 = L^-T B
    factor = covariance @ (gamma**0.5 * precision @ before.factor + (1 - gamma) ** 0.5 * fresh_part)
    close(posterior.factor, factor)


def test_discounting_for_long_forgets_all_but_the_prior_that_is_put_back() -> None:
    posterior = make()
    posterior.update(*data(200))
    for step in range(200):
        posterior.discount(0.8, normal(2, 5, 3, seed=100 + step))
    close(posterior.covariance, prior_matrix(5).expand(2, -1, -1), 1e-8)
    close(posterior.mean, normal(5, seed=6).expand(2, -1), 1e-8)
    state = posterior.state.clone()
    posterior.discount(1.0, normal(2, 5, 3))
    posterior.discount(1.0)
    assert torch.equal(posterior.state, state)


def test_added_arms_start_from_the_prior_and_others_keep_their_place() -> None:
    posterior = make(num_arms=2)
    x, y, z = data(8)
    posterior.update(x, y, z, integers(2, 2, 8))
    before = posterior.state.clone()
    directions = normal(2, 3, 5, 3, seed=8)
    posterior.add_arms(directions)
    assert posterior.num_arms == 5
    assert torch.equal(posterior.state[:, :2], before)
    close(posterior.covariance[:, 2:], prior_matrix(5).expand(2, 3, -1, -1))
    close(posterior.factor[:, 2:], torch.linalg.cholesky(prior_matrix(5)) @ directions)
    posterior.update(x, y, z, torch.full((2, 8), 4))
    assert torch.equal(posterior.state[:, :2], before)
    assert posterior.sample(normal(2, 1, 3)).shape == (2, 1, 5, 5)


@pytest.mark.parametrize("members", [2, 5, 40])
def test_the_tracking_spectrum_is_that_of_the_whitened_factor(members: int) -> None:
    posterior = make(5, members)
    posterior.update(*data(30, 5, members))
    values, vectors = torch.linalg.eigh(posterior.covariance)
    whitener = vectors @ torch.diag_embed(values.rsqrt()) @ vectors.mT
    product = whitener @ posterior.factor @ posterior.factor.mT @ whitener
    spectrum = posterior.tracking_spectrum()
    close(spectrum, torch.linalg.eigvalsh(product), 1e-8)
    missing = max(0, 5 - members)
    assert float(spectrum[:, :missing].abs().sum()) < 1e-8
    assert float(spectrum[:, missing:].min()) > 1e-4


def test_the_prior_as_number_vector_or_matrix() -> None:
    variance, diagonal = 2.0, torch.tensor([2.0, 2.0, 2.0])
    for covariance in (variance, torch.tensor(2.0), diagonal, torch.diag(diagonal)):
        posterior = LinearPosterior(3, prior_covariance=covariance, prior_mean=torch.tensor([1.0, 2.0, 3.0]), dtype=F64)
        close(posterior.covariance, 2 * torch.eye(3, dtype=F64).unsqueeze(0))
        assert posterior.mean.tolist() == [[1.0, 2.0, 3.0]]
    assert LinearPosterior(2, prior_mean=0.5).mean.tolist() == [[0.5, 0.5]]
    assert LinearPosterior(2).index_dim == 0


@pytest.mark.parametrize("num_arms", [None, 2])
def test_samples_are_mean_plus_scaled_factor_or_root(num_arms: int | None) -> None:
    posterior = make(num_arms=num_arms)
    x, y, z = data(20)
    posterior.update(x, y, z, None if num_arms is None else integers(num_arms, 2, 20))
    lead = (2,) if num_arms is None else (2, num_arms)
    zeta, xi = normal(2, 4, 3, seed=3), normal(2, 4, *lead[1:], 5, seed=4)
    for batch in range(4):
        weights = zeta[:, batch].view(2, *[1] * (len(lead) - 1), 3, 1)
        sample = posterior.mean + 0.5 * (posterior.factor @ weights).squeeze(-1)
        close(posterior.sample(zeta, 0.5)[:, batch], sample)
        exact = posterior.mean + 0.5 * (posterior.root @ xi[:, batch].unsqueeze(-1)).squeeze(-1)
        close(posterior.sample_exact(xi, 0.5)[:, batch], exact)


def test_a_saved_state_restores_prior_and_posterior() -> None:
    posterior = make()
    posterior.update(*data(9))
    other = make(prior_covariance=1.0, prior_mean=0.0)
    other.load_state_dict(posterior.state_dict())
    for each in (posterior, other):
        each.discount(0.5, normal(2, 5, 3))
    assert torch.equal(posterior.state, other.state)
    with pytest.raises(ParameterError, match=r"block of LinearPosterior must have shape .* = \(2, 5, 10\); got shape"):
        make(members=4).load_state_dict(posterior.state_dict())
