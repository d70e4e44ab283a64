"""Running moments, reward units, noise level and prior size against numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ensemblepp.calibration import Calibration, PriorScale, RunningMoments
from ensemblepp.errors import ParameterError
from ensemblepp.seeding import make_generator

REPLICAS = 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=make_generator(seed, "data"), dtype=torch.float64)


def make(**options: Any) -> Calibration:
    return Calibration(REPLICAS, **({"dtype": torch.float64} | options))


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_running_moments_are_the_weighted_moments_of_everything_seen(offset: float) -> None:
    values, weight = normal(REPLICAS, 57) + offset, uniform(REPLICAS, 57, seed=1)
    moments = RunningMoments(REPLICAS)
    for chunk in (slice(0, 1), slice(1, 2), slice(2, 30), slice(30, 30), slice(30, 57)):
        moments.add(values[:, chunk], weight[:, chunk])
    x, w = values.numpy(), weight.numpy()
    mean = (w * x).sum(-1) / w.sum(-1)
    variance = (w * (x - mean[:, None]) ** 2).sum(-1) / w.sum(-1)
    np.testing.assert_allclose(moments.count.numpy(), w.sum(-1), rtol=1e-12)
    np.testing.assert_allclose(moments.mean.numpy(), mean, rtol=1e-12, atol=1e-12)
    # At 1e6 the deviations themselves carry a rounding error of 1e-10.
    np.testing.assert_allclose(moments.variance.numpy(), variance, rtol=1e-12 if not offset else 1e-9)


def test_moments_of_float32_streams_are_kept_in_float64() -> None:
    values = (1000 + normal(REPLICAS, 4000)).float()
    moments = RunningMoments(REPLICAS)
    for value in values.split(1, dim=1):
        moments.add(value, torch.ones_like(value))
    np.testing.assert_allclose(moments.mean.numpy(), values.double().numpy().mean(-1), rtol=1e-12)
    np.testing.assert_allclose(moments.variance.numpy(), values.double().numpy().var(-1), rtol=1e-9)


def test_values_of_weight_zero_change_nothing() -> None:
    values, weight = normal(REPLICAS, 10), torch.ones(REPLICAS, 10, dtype=torch.float64)
    moments, nothing = RunningMoments(REPLICAS), torch.zeros(REPLICAS, 4)
    moments.add(normal(REPLICAS, 4, seed=5), nothing)
    assert moments.state_dict()["moments"].tolist() == [[0.0, 0.0, 0.0]] * REPLICAS
    moments.add(values, weight)
    before = moments.state_dict()["moments"]
    moments.add(1e9 * normal(REPLICAS, 4, seed=5), nothing)
    assert torch.equal(moments.state_dict()["moments"], before)
    # In one replica only, and inside a batch.
    weight[1, 4:] = 0
    mixed = RunningMoments(REPLICAS)
    mixed.add(values, weight)
    np.testing.assert_allclose(float(mixed.mean[1]), values[1, :4].numpy().mean(), rtol=1e-12)
    np.testing.assert_allclose(float(mixed.variance[1]), values[1, :4].numpy().var(), rtol=1e-12)
    assert mixed.count.tolist() == [10.0, 4.0, 10.0]


def test_an_empty_stream_has_mean_and_variance_zero() -> None:
    moments = RunningMoments(REPLICAS)
    for value in (moments.count, moments.mean, moments.variance):
        assert value.tolist() == [0.0] * REPLICAS


def test_forgetting_weighs_the_past_and_keeps_its_moments() -> None:
    old, new, one = normal(REPLICAS, 20), normal(REPLICAS, 10, seed=1) + 3, torch.ones(REPLICAS, 30)
    moments = RunningMoments(REPLICAS)
    moments.add(old, one[:, :20])
    mean, variance = moments.mean.clone(), moments.variance.clone()
    moments.forget(0.25)
    assert moments.count.tolist() == [5.0] * REPLICAS
    torch.testing.assert_close(moments.mean, mean)
    torch.testing.assert_close(moments.variance, variance)
    moments.add(new, one[:, :10])
    weighed = RunningMoments(REPLICAS)
    weighed.add(torch.cat([old, new], dim=1), torch.cat([0.25 * one[:, :20], one[:, :10]], dim=1))
    for name in ("count", "mean", "variance"):
        torch.testing.assert_close(getattr(moments, name), getattr(weighed, name), rtol=1e-12, atol=1e-12)


def test_standardised_rewards_have_mean_zero_and_sd_one_and_come_back() -> None:
    rewards = normal(REPLICAS, 100) * column(1e-3, 1, 1e3) + column(5, -2, 1e4)
    calibration = make()
    calibration.observe(rewards, torch.ones_like(rewards))
    standard = calibration.standardise(rewards)
    torch.testing.assert_close(standard.mean(-1), torch.zeros(REPLICAS, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(standard.std(-1, correction=0), torch.ones(REPLICAS, dtype=torch.float64))
    torch.testing.assert_close(calibration.restore(standard), rewards, rtol=1e-12, atol=1e-12)
    scores = standard.view(REPLICAS, 10, 10)
    torch.testing.assert_close(calibration.restore(scores), rewards.view(REPLICAS, 10, 10), rtol=1e-12, atol=1e-12)


def test_before_any_reward_the_units_are_the_rewards_own() -> None:
    rewards = normal(REPLICAS, 4)
    assert torch.equal(make().standardise(rewards), rewards)
    assert torch.equal(make().restore(rewards), rewards)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e30, -1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_keep_scale_one(value: float, dtype: torch.dtype) -> None:
    calibration = make(dtype=dtype)
    for _ in range(50):
        calibration.observe(torch.full((REPLICAS, 3), value, dtype=dtype), torch.ones(REPLICAS, 3, dtype=dtype))
    assert calibration.scale.tolist() == [[1.0]] * REPLICAS
    assert calibration.offset.flatten().tolist() == pytest.approx([value] * REPLICAS, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_rewards_stay_finite(dtype: torch.dtype) -> None:
    calibration, rewards = make(dtype=dtype), (1e30 * normal(REPLICAS, 50)).to(dtype)
    calibration.observe(rewards, torch.ones_like(rewards))
    standard = calibration.standardise(rewards)
    for value in (calibration.offset, calibration.scale, calibration.noise, standard, calibration.restore(standard)):
        assert torch.isfinite(value).all()
    assert float(standard.abs().max()) < 5
    torch.testing.assert_close(calibration.restore(standard), rewards, rtol=1e-4, atol=1e25)


def test_tiny_rewards_are_given_their_own_scale() -> None:
    calibration, rewards = make(), 1e-20 * normal(REPLICAS, 50)
    calibration.observe(rewards, torch.ones_like(rewards))
    torch.testing.assert_close(calibration.scale.squeeze(-1), rewards.std(-1, correction=0), rtol=1e-9, atol=0)


def test_without_standardising_rewards_keep_their_units() -> None:
    calibration, rewards = make(standardise=False), 7 + 3 * normal(REPLICAS, 20)
    calibration.observe(rewards, torch.ones_like(rewards))
    assert calibration.offset.tolist() == [[0.0]] * REPLICAS
    assert calibration.scale.tolist() == [[1.0]] * REPLICAS
    assert torch.equal(calibration.standardise(rewards), rewards)
    assert torch.equal(calibration.restore(rewards), rewards)


@pytest.mark.parametrize("standardise", [True, False])
def test_a_known_reward_scale_is_the_unit_from_the_first_reward_on(standardise: bool) -> None:
    calibration = make(standardise=standardise, reward_scale=40.0)
    assert calibration.scale.tolist() == [[40.0]] * REPLICAS
    rewards = 7 + 3 * normal(REPLICAS, 20)
    calibration.observe(rewards, torch.ones_like(rewards))
    assert calibration.scale.tolist() == [[40.0]] * REPLICAS
    offset = rewards.mean(-1, keepdim=True) if standardise else torch.zeros(REPLICAS, 1, dtype=torch.float64)
    torch.testing.assert_close(calibration.offset, offset)
    torch.testing.assert_close(calibration.standardise(rewards), (rewards - offset) / 40)


def test_unobserved_rewards_change_no_unit() -> None:
    calibration, rewards = make(), normal(REPLICAS, 6)
    weight = torch.ones_like(rewards)
    calibration.observe(rewards, weight)
    before = calibration.state_dict()
    calibration.observe(1e6 * rewards, 0 * weight)
    assert torch.equal(calibration.state_dict()["levels"], before["levels"])


def test_the_noise_estimate_is_the_root_of_the_residuals_over_their_degrees_of_freedom() -> None:
    calibration = make(noise_floor=0.05, initial_noise=0.4)
    assert calibration.noise.tolist() == [[0.4]] * REPLICAS
    calibration.estimate_noise(column(8, 1e-9, 8).squeeze(-1), column(32, 10, 1.99).squeeze(-1))
    # By the formula; at the floor; kept, for fewer than two degrees of freedom.
    assert calibration.noise.flatten().tolist() == pytest.approx([0.5, 0.05, 0.4], rel=1e-12)
    calibration.estimate_noise(column(torch.nan, torch.inf, 8).squeeze(-1), column(32, 10, 2).squeeze(-1))
    assert calibration.noise.flatten().tolist() == pytest.approx([0.5, 0.05, 2.0], rel=1e-12)
    calibration.estimate_noise(column(1, 1, 1).squeeze(-1), column(-5, 0, 4).squeeze(-1))
    assert calibration.noise.flatten().tolist() == pytest.approx([0.5, 0.05, 0.5], rel=1e-12)


def test_tracked_noise_moves_towards_the_mean_square_and_stops_at_the_floor() -> None:
    calibration = make(noise_floor=0.1, initial_noise=0.5)
    calibration.track_noise(torch.tensor([1.0, 0.25, 0.0]), rate=0.2)
    assert calibration.noise.flatten().tolist() == pytest.approx([(0.8 * 0.25 + 0.2) ** 0.5, 0.5, 0.2**0.5])
    for _ in range(200):
        calibration.track_noise(torch.tensor([1.0, 0.25, 0.0]), rate=0.2)
    assert calibration.noise.flatten().tolist() == pytest.approx([1.0, 0.5, 0.1])


def test_a_known_noise_level_is_never_estimated() -> None:
    calibration = make(noise_scale=3.0, noise_floor=0.02)
    assert calibration.noise.tolist() == [[3.0]] * REPLICAS
    calibration.estimate_noise(torch.full((REPLICAS,), 100.0), torch.full((REPLICAS,), 4.0))
    calibration.track_noise(torch.full((REPLICAS,), 100.0), rate=1.0)
    assert calibration.noise.tolist() == [[3.0]] * REPLICAS
    rewards = torch.tensor([-1.0, 1.0]) * column(1, 2, 1e4)
    calibration.observe(rewards, torch.ones_like(rewards))
    # In standardised units it is a share of the rewards' own spread, and never less than the floor.
    assert calibration.noise.flatten().tolist() == pytest.approx([3.0, 1.5, 0.02], rel=1e-12)


def test_forgetting_rewards_lets_new_ones_count_more() -> None:
    one, calibration, steady = torch.ones(REPLICAS, 100), make(), make()
    for each in (calibration, steady):
        each.observe(normal(REPLICAS, 100), one)
    calibration.forget(0.01)
    for each in (calibration, steady):
        each.observe(normal(REPLICAS, 100, seed=1) + 10, one)
    assert (calibration.offset > 9).all()
    assert ((steady.offset - 5).abs() < 1).all()


@pytest.mark.parametrize("scale", [0.35, 2.0])
def test_the_prior_has_the_stated_sd_over_inputs_and_indices(scale: float) -> None:
    members, out = 4, 2
    prior = normal(REPLICAS, 6, out, members) * column(1e-3, 1, 50).view(-1, 1, 1, 1)
    measured = PriorScale(REPLICAS, scale, owner="A", device="cpu")
    at_hand = measured.factor(prior)
    assert at_hand.shape == (REPLICAS, 1, 1, 1)
    measured.observe(prior[:, :2], torch.ones(REPLICAS, 2))
    measured.observe(prior[:, 2:], torch.ones(REPLICAS, 4))
    torch.testing.assert_close(measured.factor(prior), at_hand, rtol=1e-12, atol=0)
    # Enumerate the reference indices +-sqrt(M) e_m: the mean is zero and the mean square is the variance.
    index = members**0.5 * torch.eye(members, dtype=torch.float64)
    draws = measured.factor(prior) * torch.cat([prior @ index, prior @ -index], dim=-1)
    assert float(draws.mean(-1).abs().max()) < 1e-12
    sd = draws.square().flatten(1).mean(-1).sqrt()
    torch.testing.assert_close(sd, torch.full((REPLICAS,), scale, dtype=torch.float64), rtol=1e-12, atol=0)


def test_once_inputs_were_measured_the_factor_no_longer_depends_on_those_at_hand() -> None:
    prior, measured = normal(REPLICAS, 6, 1, 4), PriorScale(REPLICAS, 1.0, owner="A")
    assert not torch.equal(measured.factor(prior), measured.factor(2 * prior))
    weight = torch.ones(REPLICAS, 6)
    weight[:, 3:] = 0
    measured.observe(prior, weight)
    assert torch.equal(measured.factor(prior), measured.factor(2 * prior))
    torch.testing.assert_close(
        measured.factor(prior), PriorScale(REPLICAS, 1.0, owner="A").factor(prior[:, :3]), rtol=1e-12, atol=0
    )


def test_prior_functions_that_are_zero_and_a_scale_of_zero_give_finite_factors() -> None:
    prior = normal(REPLICAS, 6, 1, 4)
    assert PriorScale(REPLICAS, 0.0, owner="A").factor(prior).tolist() == [[[[0.0]]]] * REPLICAS
    measured = PriorScale(REPLICAS, 0.5, owner="A")
    assert measured.factor(0 * prior).flatten().tolist() == [0.5] * REPLICAS
    measured.observe(0 * prior, torch.ones(REPLICAS, 6))
    assert measured.factor(prior).flatten().tolist() == [0.5] * REPLICAS


def test_states_come_back_and_are_copies() -> None:
    rewards, prior = normal(REPLICAS, 9), normal(REPLICAS, 9, 1, 4)
    one = torch.ones_like(rewards)
    calibration, measured = make(), PriorScale(REPLICAS, 1.0, owner="A")
    calibration.observe(rewards, one)
    calibration.estimate_noise(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([9.0, 9.0, 9.0]))
    measured.observe(prior, one)
    saved, saved_prior = calibration.state_dict(), measured.state_dict()
    wanted = [calibration.offset, calibration.scale, calibration.noise, measured.factor(prior)]
    others = make(), PriorScale(REPLICAS, 1.0, owner="A")
    for each in (calibration, *others[:1]):
        each.observe(5 * rewards, one)
        each.track_noise(torch.ones(REPLICAS), rate=0.5)
    others[0].load_state_dict(saved)
    others[1].load_state_dict(saved_prior)
    got = [others[0].offset, others[0].scale, others[0].noise, others[1].factor(prior)]
    for mine, original in zip(got, wanted, strict=True):
        assert torch.equal(mine, original)
    others[0].observe(100 * rewards, one)
    others[0].forget(0.5)
    again = make()
    again.load_state_dict(saved)
    assert torch.equal(again.scale, wanted[1])
    assert again.rewards.count.tolist() == [9.0] * REPLICAS


def test_states_of_another_number_of_replicas_are_refused() -> None:
    with pytest.raises(ParameterError, match="levels of Calibration must have shape"):
        make().load_state_dict(Calibration(REPLICAS + 1).state_dict())
    with pytest.raises(ParameterError, match="moments of RunningMoments must have shape"):
        RunningMoments(REPLICAS).load_state_dict(RunningMoments(1).state_dict())
    with pytest.raises(ParameterError, match="moments of RunningMoments must have shape"):
        PriorScale(REPLICAS, 1.0, owner="A").load_state_dict(PriorScale(1, 1.0, owner="A").state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_scale": 0.0}, r"noise_scale of Calibration must be a finite number > 0; got 0\.0"),
        ({"noise_floor": -1.0}, r"noise_floor of Calibration must be a finite number > 0; got -1\.0"),
        ({"initial_noise": 0.001}, r"initial_noise of Calibration must be a finite number >= 0\.01; got 0\.001"),
    ],
)
def test_levels_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make(**options)


def test_a_negative_prior_scale_is_refused_in_its_owners_name() -> None:
    with pytest.raises(ParameterError, match=r"prior_scale of EpiNet must be a finite number >= 0; got -0\.1"):
        PriorScale(1, -0.1, owner="EpiNet")
