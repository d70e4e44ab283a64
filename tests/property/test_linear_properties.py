"""Identities that the linear posterior keeps for every size, prior and order of the data."""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import Tensor

from ensemblepp.linear import LinearPosterior
from ensemblepp.seeding import make_generator

F64 = torch.float64


@dataclass(frozen=True)
class Problem:
    """Sizes and the seed of everything else."""

    dim: int
    members: int
    replicas: int
    arms: int | None
    count: int
    noise_scale: float
    seed: int

    @property
    def lead(self) -> tuple[int, ...]:
        return (self.replicas,) if self.arms is None else (self.replicas, self.arms)

    def draw(self, name: str, *shape: int) -> Tensor:
        return torch.randn(shape, generator=make_generator(self.seed, name), dtype=F64)

    def prior(self) -> dict[str, Tensor]:
        root = self.draw("prior", self.dim, self.dim)
        covariance = root @ root.T / self.dim + 0.1 * torch.eye(self.dim, dtype=F64)
        return {"prior_covariance": covariance, "prior_mean": self.draw("mean", self.dim)}

    def directions(self) -> Tensor:
        return self.draw("directions", *self.lead, self.dim, self.members)

    def build(self, **changed: Any) -> LinearPosterior:
        options: dict[str, Any] = {"directions": self.directions(), "num_replicas": self.replicas} | self.prior()
        options |= {"num_arms": self.arms, "noise_scale": self.noise_scale, "dtype": F64} | changed
        return LinearPosterior(self.dim, options.pop("directions"), **options)

    def data(self) -> list[Tensor]:
        size = (self.replicas, self.count)
        data = [self.draw("x", *size, self.dim), self.draw("y", *size), self.draw("z", *size, self.members)]
        if self.arms is not None:
            data.append(torch.randint(self.arms, size, generator=make_generator(self.seed, "arm")))
        return data


PROBLEMS = st.builds(
    Problem,
    dim=st.integers(1, 6),
    members=st.integers(0, 5),
    replicas=st.integers(1, 3),
    arms=st.none() | st.integers(1, 3),
    count=st.integers(0, 12) | st.integers(60, 140),
    noise_scale=st.floats(0.05, 5.0),
    seed=st.integers(0, 1000),
)
FEW = settings(max_examples=60)


def learn(posterior: LinearPosterior, data: list[Tensor], parts: list[Tensor] | None = None) -> LinearPosterior:
    for part in [torch.arange(data[0].shape[1])] if parts is None else parts:
        posterior.update(*[each[:, part] for each in data])
    return posterior


def assert_equal(first: LinearPosterior, second: LinearPosterior, tolerance: float = 1e-8) -> None:
    for name in ("mean", "factor", "covariance"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=tolerance, atol=tolerance)


@FEW
@given(PROBLEMS)
def test_batched_replicas_equal_a_loop_over_single_learners(problem: Problem) -> None:
    together, data = learn(problem.build(), problem.data()), problem.data()
    directions = problem.directions()
    for i in range(problem.replicas):
        alone = problem.build(directions=directions[[i]], num_replicas=1)
        learn(alone, [each[[i]] for each in data])
        for name in ("mean", "factor", "covariance"):
            torch.testing.assert_close(getattr(together, name)[[i]], getattr(alone, name), rtol=1e-9, atol=1e-9)


@FEW
@given(PROBLEMS, st.data())
def test_any_split_and_order_of_the_data_equals_one_refit(problem: Problem, choices: st.DataObject) -> None:
    order = torch.tensor(choices.draw(st.permutations(range(problem.count))), dtype=torch.int64)
    cuts = sorted(choices.draw(st.lists(st.integers(0, problem.count), max_size=6)))
    parts = list(torch.tensor_split(order, cuts))
    assert_equal(learn(problem.build(), problem.data()), learn(problem.build(), problem.data(), parts))


@FEW
@given(PROBLEMS, st.data())
def test_permuting_members_permutes_the_factor_and_nothing_else(problem: Problem, choices: st.DataObject) -> None:
    order = torch.tensor(choices.draw(st.permutations(range(problem.members))), dtype=torch.int64)
    x, y, z, *arm = problem.data()
    plain = learn(problem.build(), [x, y, z, *arm])
    permuted = learn(problem.build(directions=problem.directions()[..., order]), [x, y, z[..., order], *arm])
    torch.testing.assert_close(permuted.factor, plain.factor[..., order], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(permuted.mean, plain.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(permuted.root, plain.root, rtol=1e-9, atol=1e-9)


@FEW
@given(PROBLEMS, st.floats(-6, 6))
def test_scaled_features_under_the_matching_prior_predict_the_same(problem: Problem, exponent: float) -> None:
    x, y, z, *arm = problem.data()
    scale, prior = 10**exponent, problem.prior()
    plain = learn(problem.build(), [x, y, z, *arm])
    scaled = problem.build(
        prior_covariance=prior["prior_covariance"] / scale**2, prior_mean=prior["prior_mean"] / scale
    )
    learn(scaled, [scale * x, y, z, *arm])
    torch.testing.assert_close(scale * scaled.mean, plain.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(scale * scaled.factor, plain.factor, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(scale**2 * scaled.covariance, plain.covariance, rtol=1e-8, atol=1e-8)


@FEW
@given(PROBLEMS)
def test_rotated_features_under_the_rotated_prior_predict_the_same(problem: Problem) -> None:
    x, y, z, *arm = problem.data()
    prior = problem.prior()
    rotation = torch.linalg.qr(problem.draw("rotation", problem.dim, problem.dim)).Q
    turned = problem.build(
        prior_covariance=rotation @ prior["prior_covariance"] @ rotation.T,
        prior_mean=rotation @ prior["prior_mean"],
        directions=torch.zeros_like(problem.directions()),
    )
    learn(turned, [x @ rotation.T, y, torch.zeros_like(z), *arm])
    plain = learn(problem.build(), [x, y, z, *arm])
    torch.testing.assert_close(turned.mean @ rotation, plain.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(rotation.T @ turned.covariance @ rotation, plain.covariance, rtol=1e-8, atol=1e-8)


@FEW
@given(PROBLEMS, st.floats(-50, 50))
def test_rewards_move_the_mean_linearly_and_leave_factor_and_covariance_alone(problem: Problem, slope: float) -> None:
    x, y, z, *arm = problem.data()
    none, one, many = (learn(problem.build(), [x, k * y, z, *arm]) for k in (0.0, 1.0, slope))
    torch.testing.assert_close(many.mean, none.mean + slope * (one.mean - none.mean), rtol=1e-8, atol=1e-8)
    assert torch.equal(many.state[..., 1:], none.state[..., 1:])


@FEW
@given(PROBLEMS)
def test_data_never_raise_a_variance(problem: Problem) -> None:
    before, after = problem.build(), learn(problem.build(), problem.data())
    difference = torch.linalg.eigvalsh(before.covariance - after.covariance)
    assert float(difference.min()) > -1e-10
    assert float(torch.linalg.eigvalsh(after.covariance).min()) > 0
