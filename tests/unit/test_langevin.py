"""LangevinTS: one step by hand, and its stationary law where that is known."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.agents import LangevinTS
from ensemblepp.errors import ParameterError
from ensemblepp.seeding import make_generator
from ensemblepp.types import Transition
from tests.neural_cases import ARMS, DIM, datum, normal, taught

SMALL: dict[str, Any] = {"hidden_dims": (5,), "batch_size": 4, "updates_per_step": 2, "dtype": torch.float64}
MAKE = partial(LangevinTS, DIM, num_replicas=2, **SMALL)


def parameters(agent: LangevinTS) -> list[Tensor]:
    """The parameters in the order of the noise, each (replicas, ...)."""
    torso, head = agent.network.torso.parameters, agent.network.head
    return [torso["weight_0"], torso["bias_0"], head["weight"], head["bias"]]


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("temperature", [None, 0.3])
@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_a_step_is_the_formula_with_the_gradient_of_autograd(
    num_arms: int | None, temperature: float | None, layer_norm: bool
) -> None:
    options: dict[str, Any] = {
        "layer_norm": layer_norm,
        "learning_rate": 0.1,
        "weight_decay": 0.7,
        "updates_per_step": 1,
    }
    agent = taught(MAKE(num_arms=num_arms, temperature=temperature, **options), 4)
    (minibatch,) = agent.draw_minibatches(1)
    new = datum(agent, 1, 50)
    before = [each.clone().requires_grad_() for each in parameters(agent)]
    agent.update(new, minibatches=[minibatch])
    n, batch = 9, agent.replay.gather(minibatch.slots)
    assert agent.replay.size == n
    weight, bias, head, head_bias = before
    h = batch["features"] @ weight + bias
    h = torch.nn.functional.layer_norm(h, (5,)) if layer_norm else h
    outputs = h.relu() @ head.mT + head_bias.mT
    own = outputs[..., 0] if num_arms is None else outputs.gather(2, batch["arm"].unsqueeze(-1)).squeeze(-1)
    error = own - agent.calibration.standardise(batch["reward"])
    # n / batch size times the minibatch's sum estimates the sum over all data.
    loss = n * error.square().mean(-1).sum() + 0.7 / 2 * sum(each.square().sum() for each in before)
    gradients = torch.autograd.grad(loss, before)
    assert minibatch.index is not None
    noise = list(minibatch.index.split([each[0].numel() for each in before], dim=-1))
    # A minibatch moves the noise level before its step is taken.
    eta, level = 0.1 / n, agent.calibration.noise
    assert float((level - 0.5).abs().min()) > 1e-6
    spread = 2 * level.square() if temperature is None else torch.full_like(level, temperature)
    for now, old, gradient, draw in zip(parameters(agent), before, gradients, noise, strict=True):
        scale = (2 * eta * spread).sqrt().view(-1, 1, 1)
        torch.testing.assert_close(now, old - eta * gradient + scale * draw.view_as(now), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decisions_follow_the_noise_unless_the_temperature_is_zero(temperature: float) -> None:
    agent, twin = (taught(MAKE(temperature=temperature)) for _ in range(2))
    draws = agent.draw_minibatches(2)
    mirrored = [replace(each, index=-each.index) for each in draws if each.index is not None]
    assert len(mirrored) == 2
    agent.update(datum(agent, 2, 50), minibatches=draws)
    twin.update(datum(twin, 2, 50), minibatches=mirrored)
    contexts = normal(2, 1, ARMS, DIM, seed=7)
    scores, twins = agent.act(contexts).scores, twin.act(contexts).scores
    assert scores is not None
    assert twins is not None
    assert torch.equal(scores, twins) == (temperature == 0.0)


@pytest.mark.statistical
def test_full_gradient_steps_on_a_linear_model_have_the_posterior_as_their_law() -> None:
    replicas, n, sigma, decay, rate = 4000, 12, 0.6, 1.5, 0.05
    agent = LangevinTS(
        2,
        hidden_dims=(),
        num_replicas=replicas,
        updates_per_step=0,
        standardise=False,
        noise_scale=sigma,
        temperature=None,
        learning_rate=rate,
        weight_decay=decay,
        dtype=torch.float64,
    )
    x, y = normal(1, n, 2), normal(1, n, seed=1)
    agent.update(Transition(x.expand(replicas, -1, -1), y.expand(replicas, -1)))
    model, generator = agent.trainer, make_generator(0, "noise")
    assert model is not None
    batch = agent.replay.stored()
    for _ in range(400):
        noise = torch.randn(replicas, 3, generator=generator, dtype=torch.float64)
        model.train(batch, noise, n)
    head = agent.network.head
    theta = torch.cat([head["weight"].flatten(1), head["bias"].flatten(1)], dim=1)
    design = torch.cat([x[0], torch.ones(n, 1, dtype=torch.float64)], dim=1)
    # Gaussian noise of this level and theta ~ N(0, 2 sigma^2 / decay): the textbook posterior.
    precision = (design.T @ design + decay / 2 * torch.eye(3, dtype=torch.float64)) / sigma**2
    mean = torch.linalg.solve(precision, design.T @ y[0] / sigma**2)
    # A finite step widens it, exactly by (I - eta A / 2)^-1, A = 2 sigma^2 precision and eta = rate / n.
    widening = torch.eye(3, dtype=torch.float64) - rate / n * sigma**2 * precision
    covariance = torch.linalg.inv(precision @ widening)
    assert float((covariance @ precision).diagonal().max()) < 1.15
    variance = covariance.diagonal()
    assert bool(((theta.mean(0) - mean).abs() < 4 * (variance / replicas).sqrt()).all())
    product = variance.unsqueeze(-1) * variance + covariance.square()
    assert bool(((theta.T.cov() - covariance).abs() < 4 * (product / replicas).sqrt()).all())


def test_one_set_of_weights_is_no_posterior() -> None:
    with pytest.raises(ParameterError, match="posterior_samples of LangevinTS must belong to an agent with"):
        MAKE().posterior_samples(normal(2, 3, DIM), None, 5, make_generator(1, "draw"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature of LangevinTS must be a finite number >= 0; got -1.0"),
        ({"temperature": float("nan")}, "temperature of LangevinTS must be a finite number >= 0; got nan"),
        ({"learning_rate": 0.0}, "learning_rate of LangevinTS must be a finite number > 0; got 0.0"),
        ({"weight_decay": -1.0}, "weight_decay of LangevinTS must be a finite number >= 0; got -1.0"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        MAKE(**options)
