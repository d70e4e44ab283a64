"""Closed-form heads: the batch formula after refits and between them, noise levels, random features."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from ensemblepp.agents import (
    NeuralAgent,
    NeuralLinear,
    RandomFeatureEnsemblePP,
)
from ensemblepp.errors import ParameterError
from ensemblepp.linear import LinearPosterior
from tests.neural_cases import ARMS, DIM, EVERY, EXACT, SMALL, datum, normal, taught


def features_by_hand(agent: NeuralAgent, x: np.ndarray, weight: np.ndarray, parts: tuple[str, ...]) -> np.ndarray:
    """phi of one replica's data, from the documented formula: equal shares of prior_scale^2 = 1."""
    assert agent.closed_form is not None
    h = agent.closed_form.torso(torch.as_tensor(x)).numpy()
    raw = {"features": h, "input": x, "constant": np.ones_like(x[..., :1])}
    columns = []
    for part in parts:
        square = (raw[part] ** 2).sum(-1)
        mean = (square * weight).sum(-1, keepdims=True) / weight.sum(-1, keepdims=True)
        columns.append(raw[part] / np.sqrt(len(parts) * mean)[..., None])
    return np.concatenate(columns, axis=-1)


def batch_formula(
    phi: np.ndarray, y: np.ndarray, z: np.ndarray, start: np.ndarray, eta: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Textbook posterior of theta ~ N(0, I): mean, ensemble factor and covariance."""
    sigma = np.linalg.inv(np.eye(phi.shape[1]) + phi.T @ phi / eta**2)
    return sigma @ phi.T @ y / eta**2, sigma @ (start + phi.T @ z / eta), sigma


@pytest.mark.parametrize("known", [0.2, None])
@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_after_a_refit_the_exact_head_is_the_batch_formula_on_all_stored_data(
    num_arms: int | None, known: float | None
) -> None:
    agent = EXACT(refit_period=1, num_arms=num_arms, noise_scale=known)
    assert agent.closed_form is not None
    start = agent.closed_form.posterior.factor.numpy().copy()
    taught(agent, 14)
    if known is None:
        before = agent.calibration.noise.numpy().ravel()
    last = datum(agent, 3, 50)
    agent.update(replace(last, observed=torch.tensor([[True, False, True], [True, True, True]])))
    data = {name: value.numpy() for name, value in agent.replay.stored().items()}
    x, w, z, arm = (data[name] for name in ("features", "weight", "perturbation", "arm"))
    assert w.sum(-1).tolist() == [30.0, 31.0]
    phi = features_by_hand(agent, x, w, ("features", "input", "constant"))
    posterior = agent.closed_form.posterior
    for r in range(2):
        seen = w[r] > 0
        reward = data["reward"][r][seen]
        scale = reward.std()
        eta = before[r] if known is None else known / scale
        for k in range(num_arms or 1):
            place = (r, k) if num_arms else (r,)
            own = seen & (arm[r] == k)
            y = (data["reward"][r][own] - reward.mean()) / scale
            mean, factor, sigma = batch_formula(phi[r][own], y, z[r][own], start[place], eta)
            np.testing.assert_allclose(posterior.mean[place].numpy(), mean, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(posterior.factor[place].numpy(), factor, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(posterior.covariance[place].numpy(), sigma, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_a_refit_estimates_the_noise_from_its_residuals_and_the_parameters_that_the_data_determine(
    num_arms: int | None,
) -> None:
    agent = EXACT(refit_period=1, num_arms=num_arms, updates_per_step=0)
    assert agent.closed_form is not None
    taught(agent, 40)
    eta = agent.calibration.noise.numpy().ravel()
    agent.update(datum(agent, 1, 50))
    data = {name: value.numpy() for name, value in agent.replay.stored().items()}
    phi = features_by_hand(agent, data["features"], data["weight"], ("features", "input", "constant"))
    for r in range(2):
        y = (data["reward"][r] - data["reward"][r].mean()) / data["reward"][r].std()
        residual, gamma = 0.0, 0.0
        for k in range(num_arms or 1):
            own = data["arm"][r] == k
            mean, _, sigma = batch_formula(phi[r][own], y[own], np.zeros((own.sum(), 4)), np.zeros((14 - 5, 4)), eta[r])
            residual += ((y[own] - phi[r][own] @ mean) ** 2).sum()
            gamma += len(sigma) - np.trace(sigma)
        assert len(y) - gamma > 2
        assert float(agent.calibration.noise[r]) == pytest.approx((residual / (len(y) - gamma)) ** 0.5, rel=1e-9)


def test_between_refits_every_datum_moves_the_exact_head_as_the_batch_formula_would() -> None:
    agent = taught(EXACT(refit_period=20, noise_scale=0.5, standardise=False), 7)
    assert agent.closed_form is not None
    refitted = agent._refitted_at
    agent.update(datum(agent, 1, 50))
    agent.update(datum(agent, 2, 51))
    assert agent._refitted_at == refitted
    data = agent.replay.stored()
    whole = LinearPosterior(9, agent.closed_form._directions, num_replicas=2, noise_scale=0.5, dtype=torch.float64)
    whole.refit(
        agent.closed_form.phi(data["features"]),
        data["reward"],
        data["perturbation"],
        directions=agent.closed_form._directions,
    )
    own = agent.closed_form.posterior
    for mine, wanted in ((own.mean, whole.mean), (own.factor, whole.factor), (own.covariance, whole.covariance)):
        # The agent whitens its rows by the noise level, which is the same posterior.
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)


RANDOM = partial(RandomFeatureEnsemblePP, DIM, num_features=5, index_dim=4, num_replicas=2, dtype=torch.float64)


@pytest.mark.parametrize("option", ["updates_per_step", "replay_capacity", "batch_size", "update_period", "min_data"])
def test_random_features_have_no_options_of_training(option: str) -> None:
    with pytest.raises(ParameterError, match=rf"^{option} of RandomFeatureEnsemblePP .*; got 2\.$"):
        RANDOM(**{option: 2})


@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_after_its_calibration_data_a_random_feature_agent_is_purely_incremental(num_arms: int | None) -> None:
    agent = taught(RANDOM(calibration_data=12, num_arms=num_arms), 6)
    head = agent.closed_form
    assert head is not None
    refitted = agent._refitted_at
    assert 0 < refitted <= 12
    offset, scale, noise = (each.clone() for each in head._units())
    plain = copy.deepcopy(head.posterior)
    weights = head.torso.parameters.flat.clone()
    for step in range(15):
        new = replace(datum(agent, 2, 700 + step), perturbation=normal(2, 2, 4, seed=800 + step))
        new = replace(new, reward=10 * new.reward)  # other units from now on, which must not matter
        agent.update(new)
        rows = head.phi(new.features) / noise.unsqueeze(-1)
        plain.update(rows, (new.reward - offset) / scale / noise, new.perturbation, new.arm)
    assert agent._refitted_at == refitted
    torch.testing.assert_close(head.posterior.state, plain.state, rtol=1e-12, atol=1e-12)
    assert torch.equal(head.torso.parameters.flat, weights)
    assert agent.replay.size == 12


def test_a_first_batch_larger_than_the_calibration_data_is_calibrated_on() -> None:
    agent = RANDOM(calibration_data=6)
    agent.update(datum(agent, 10, 0))
    assert agent.closed_form is not None
    x = normal(2, 5, DIM)
    # phi of an input must not depend on the inputs it is asked with.
    together, apart = agent.closed_form.phi(x), agent.closed_form.phi(x[:, :1])
    torch.testing.assert_close(together[:, :1], apart)


def test_random_features_are_relu_of_a_fixed_gaussian_projection() -> None:
    agent = RandomFeatureEnsemblePP(4, num_features=500, num_replicas=1, dtype=torch.float64)
    assert agent.closed_form is not None
    x = normal(1, 1, 4)
    h = agent.closed_form.torso(x).flatten()
    # relu(s u) with u ~ N(0, 1) and s = |x| / sqrt(d): mean square s^2 / 2, fourth moment 3 s^4 / 2.
    s2 = float(x.square().mean())
    assert float((h == 0).double().mean()) == pytest.approx(0.5, abs=4 * (0.25 / 500) ** 0.5)
    assert float(h.square().mean()) == pytest.approx(s2 / 2, abs=4 * s2 * (1.25 / 500) ** 0.5)
    torch.testing.assert_close(agent.closed_form.torso(3 * x).flatten(), 3 * h)


@pytest.mark.parametrize("refit_period", [1, 20])
@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_neural_linear_on_a_fixed_torso_is_textbook_bayesian_regression(
    num_arms: int | None, refit_period: int
) -> None:
    options = SMALL | {"updates_per_step": 0, "num_arms": num_arms, "refit_period": refit_period}
    agent = taught(NeuralLinear(DIM, noise_scale=0.3, standardise=False, **options), 15, count=1)
    head = agent.closed_form
    assert head is not None
    assert head.posterior.index_dim == 0
    assert torch.equal(head.torso.parameters.flat, agent.network.torso.parameters.flat)
    data = agent.replay.stored()
    if refit_period == 1:
        phi = features_by_hand(agent, data["features"].numpy(), data["weight"].numpy(), ("features", "constant"))
    else:
        assert agent._refitted_at < 15
        phi = head.phi(data["features"]).numpy()
    for r in range(2):
        for k in range(num_arms or 1):
            place = (r, k) if num_arms else (r,)
            own = data["arm"][r].numpy() == k
            y = data["reward"][r].numpy()[own]
            empty = np.zeros((own.sum(), 0))
            mean, _, sigma = batch_formula(phi[r][own], y, empty, np.zeros((phi.shape[-1], 0)), 0.3)
            np.testing.assert_allclose(head.posterior.mean[place].numpy(), mean, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(head.posterior.covariance[place].numpy(), sigma, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["exact", "neural_linear"])
def test_only_a_refit_moves_the_noise_level_of_an_exact_head(name: str) -> None:
    agent = taught(EVERY[name](refit_period=20), 18)
    levels = []
    for step in range(2):
        agent.update(datum(agent, 1, 900 + step))
        levels.append((agent._refitted_at, agent.calibration.noise.clone()))
    assert levels[0][0] == levels[1][0]
    assert torch.equal(levels[0][1], levels[1][1])
