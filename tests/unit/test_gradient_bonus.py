"""NeuralUCB and NeuralThompson against autograd's gradient of every single output."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.agents import NeuralGreedy, NeuralThompson, NeuralUCB
from ensemblepp.agents.gradient_bonus import GradientBonusAgent
from ensemblepp.agents.gradient_model import LayerValues, OutputGradients
from ensemblepp.errors import ParameterError
from ensemblepp.heads import EnsembleNetwork
from ensemblepp.seeding import make_generator
from ensemblepp.types import Transition
from tests.neural_cases import ARMS, DIM, SMALL, contexts_for, datum, normal, taught

REPLICAS = SMALL["num_replicas"]
UCB = partial(NeuralUCB, DIM, **SMALL)
THOMPSON = partial(NeuralThompson, DIM, **SMALL)
CLOSE: dict[str, float] = {"rtol": 1e-9, "atol": 1e-11}


def gradients_by_autograd(network: EnsembleNetwork, x: Tensor) -> Tensor:
    """(replicas, inputs, outputs, parameters), layer by layer, each as weight (in, out) then bias, head last."""
    layers = range(len(network.torso.hidden_dims))
    rows = []
    for r in range(network.num_replicas):
        torso = network.torso.parameters
        names = [f"{kind}_{layer}" for layer in layers for kind in ("weight", "bias")]
        parameters = [torso[name][r].clone().requires_grad_() for name in names]
        parameters += [network.head[name][r].T.clone().requires_grad_() for name in ("weight", "bias")]
        h = x[r]
        for layer in layers:
            h = h @ parameters[2 * layer] + parameters[2 * layer + 1]
            if network.torso.layer_norm:
                h = torch.nn.functional.layer_norm(h, h.shape[-1:])
            h = h.relu()
        outputs = h @ parameters[-2] + parameters[-1]
        for output in outputs.flatten():
            parts = torch.autograd.grad(output, parameters, retain_graph=True)
            rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows).view(network.num_replicas, x.shape[1], network.num_outputs, -1)


def flat(values: LayerValues) -> Tensor:
    return torch.cat([part.flatten(1) for pair in values for part in pair], dim=-1)


def by_arm(agent: GradientBonusAgent, contexts: Tensor) -> Tensor:
    """Gradients of every arm's score, (replicas, batch, arms, parameters)."""
    x = contexts if contexts.ndim == 3 else contexts.flatten(1, 2)
    return gradients_by_autograd(agent.network, x).view(*contexts.shape[:2], ARMS, -1)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("hidden_dims", [(), (5,), (5, 7)])
def test_sums_over_all_parameters_equal_those_of_autograd_gradients(
    hidden_dims: tuple[int, ...], num_outputs: int, layer_norm: bool
) -> None:
    network = EnsembleNetwork(
        DIM,
        hidden_dims,
        0,
        num_outputs=num_outputs,
        num_replicas=REPLICAS,
        layer_norm=layer_norm,
        generator=make_generator(0, "init"),
        dtype=torch.float64,
    )
    x, lead = normal(REPLICAS, 6, DIM), (REPLICAS, 6)
    wanted = gradients_by_autograd(network, x)
    cache = network.forward(x)[1]
    everything = OutputGradients.at(network, cache)
    shapes = [(a.shape[-1], b.shape[-1]) for a, b in zip(everything.inputs, everything.deltas, strict=True)]
    values = [
        (normal(REPLICAS, rows, columns, seed=3 + i), normal(REPLICAS, 1, columns, seed=9 + i))
        for i, (rows, columns) in enumerate(shapes)
    ]
    row = flat(values)[:, None, None]
    assert float(wanted.abs().amax()) > 0.1
    for mine, theirs in ((everything, wanted), (everything.squared(), wanted.square())):
        torch.testing.assert_close(mine.weighted_sum(values).view(*lead, -1), (theirs * row).sum(-1), **CLOSE)
    arm = torch.randint(num_outputs, lead, generator=make_generator(0, "arm"))
    chosen = OutputGradients.at(network, cache, arm)
    own = torch.take_along_dim(wanted, arm[..., None, None], dim=2).squeeze(2)
    torch.testing.assert_close(chosen.weighted_sum(values), (own * row.squeeze(2)).sum(-1), **CLOSE)
    weight = normal(*lead, seed=20)
    total = flat(chosen.squared().total(weight))
    torch.testing.assert_close(total, (weight.unsqueeze(-1) * own.square()).sum(1), **CLOSE)


@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_u_is_lambda_plus_the_squared_gradients_over_m_at_the_parameters_before_each_training(
    num_arms: int | None,
) -> None:
    agent = UCB(num_arms=num_arms, regularisation=0.3)
    u = torch.full((REPLICAS, agent.model.num_parameters), 0.3, dtype=torch.float64)
    torch.testing.assert_close(flat(agent.model.diagonal()), u, **CLOSE)
    for step in range(6):
        new = replace(datum(agent, 3, step), observed=torch.tensor([[True, False, True], [True, True, True]]))
        gradient = gradients_by_autograd(agent.network, new.features)
        arm = torch.zeros(REPLICAS, 3, dtype=torch.int64) if new.arm is None else new.arm
        own = torch.take_along_dim(gradient, arm[..., None, None], dim=2).squeeze(2)
        assert new.observed is not None
        u += torch.where(new.observed.unsqueeze(-1), own.square() / 5, 0.0).sum(1)
        before = agent.network.head.flat.clone()
        agent.update(new)
        torch.testing.assert_close(flat(agent.model.diagonal()), u, **CLOSE)
    assert not torch.equal(before, agent.network.head.flat)
    assert float(u.amax()) > 1


@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_ucb_scores_are_the_formula_of_the_paper_in_reward_units(num_arms: int | None) -> None:
    agent = taught(UCB(num_arms=num_arms, regularisation=0.3, exploration_scale=0.7))
    contexts = contexts_for(agent, 5)
    g, u = by_arm(agent, contexts), flat(agent.model.diagonal())[:, None, None]
    bonus = 0.7 * (0.3 * (g.square() / u).sum(-1) / 5).sqrt()
    assert agent.draw_index(5) is None
    scores, mean = agent.act(contexts).scores, agent.model.mean(contexts)
    scale = agent.calibration.scale.unsqueeze(-1)
    assert float(scale.max()) < 0.5  # far from 1, so that a forgotten unit would show
    torch.testing.assert_close(scores, mean + scale * bonus, **CLOSE)


@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_thompson_scores_move_along_the_gradient_by_one_draw_of_the_weights(num_arms: int | None) -> None:
    agent = taught(THOMPSON(num_arms=num_arms, regularisation=0.3, exploration_scale=0.7))
    contexts, index = contexts_for(agent, 5), agent.draw_index(5)
    assert index is not None
    g, u = by_arm(agent, contexts), flat(agent.model.diagonal())[:, None, None]
    move = 0.7 * (0.3 / 5) ** 0.5 * (g / u.sqrt() * index.unsqueeze(2)).sum(-1)
    wanted = agent.model.mean(contexts) + agent.calibration.scale.unsqueeze(-1) * move
    torch.testing.assert_close(agent.act(contexts, index=index).scores, wanted, **CLOSE)


@pytest.mark.statistical
@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_thompson_samples_have_the_law_of_the_paper_jointly(num_arms: int | None) -> None:
    agent, n = taught(THOMPSON(num_arms=num_arms, exploration_scale=0.5)), 20_000
    x = normal(REPLICAS, 4, DIM, seed=60)
    arm = None if num_arms is None else torch.tensor([[0, 1, 1, 3], [2, 2, 0, 3]])
    streams = agent.streams.state_dict()
    samples = agent.posterior_samples(x, arm, n, make_generator(1, "draw"))
    assert all(torch.equal(streams[name], state) for name, state in agent.streams.state_dict().items())
    g = gradients_by_autograd(agent.network, x)
    place = torch.zeros(REPLICAS, 4, dtype=torch.int64) if arm is None else arm
    g = torch.take_along_dim(g, place[..., None, None], dim=2).squeeze(2)
    g = g * agent.calibration.scale.unsqueeze(-1)
    covariance = 0.25 / 5 * (g / flat(agent.model.diagonal()).unsqueeze(1)) @ g.mT
    mean = agent.model.mean(x if num_arms else x.unsqueeze(2))
    mean = torch.take_along_dim(mean, place.unsqueeze(-1), dim=-1).squeeze(-1)
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert bool(((samples.mean(1) - mean).abs() < 4 * (variance / n).sqrt()).all())
    centred = samples - mean.unsqueeze(1)
    product = variance.unsqueeze(-1) * variance.unsqueeze(-2) + covariance.square()
    assert bool(((centred.mT @ centred / n - covariance).abs() < 4 * (product / n).sqrt()).all())


@pytest.mark.parametrize("make", [UCB, THOMPSON])
def test_without_exploration_the_network_alone_decides(make: Any) -> None:
    agent = taught(make(exploration_scale=0.0))
    contexts = contexts_for(agent, 5)
    torch.testing.assert_close(agent.act(contexts).scores, agent.model.mean(contexts), **CLOSE)


def test_training_is_the_greedy_networks_with_weight_decay_lambda() -> None:
    agent = UCB(regularisation=0.3)
    greedy = NeuralGreedy(DIM, weight_decay=0.3, **SMALL)
    for step in range(6):
        new = datum(agent, 2, step)
        agent.update(new)
        greedy.update(new)
    assert torch.equal(agent.network.torso.parameters.flat, greedy.network.torso.parameters.flat)
    assert torch.equal(agent.network.head.flat, greedy.network.head.flat)


def test_the_bonus_falls_most_where_data_are() -> None:
    agent = UCB(updates_per_step=0, exploration_scale=1.0)
    arms = normal(REPLICAS, 1, 2, DIM, seed=7)
    first = agent.model.bound(arms, 1.0) - agent.model.mean(arms)
    for _ in range(30):
        agent.update(Transition(arms[:, :, 0], torch.ones(REPLICAS, 1)))
    last = (agent.model.bound(arms, 1.0) - agent.model.mean(arms)) / agent.calibration.scale.unsqueeze(-1)
    assert bool((last < first).all())
    shrunk = last / first
    assert bool((shrunk[..., 0] < 0.6).all())
    assert bool((shrunk[..., 0] < shrunk[..., 1]).all())


def test_discount_weighs_what_u_has_seen_and_keeps_lambda() -> None:
    agent = taught(UCB(regularisation=0.3))
    before = flat(agent.model.diagonal())
    agent.discount(0.5)
    torch.testing.assert_close(flat(agent.model.diagonal()) - 0.3, 0.5 * (before - 0.3), **CLOSE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regularisation": 0.0}, "regularisation of NeuralUCB must be a finite number > 0; got 0.0"),
        ({"exploration_scale": -1.0}, "exploration_scale of NeuralUCB must be a finite number >= 0; got -1.0"),
        ({"learning_rate": 0.0}, "learning_rate of NeuralUCB must be a finite number > 0; got 0.0"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        UCB(**options)
