"""NeuralDropout: masks by hand, in decisions and in training."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.agents import NeuralDropout, NeuralGreedy
from ensemblepp.errors import ParameterError
from ensemblepp.seeding import make_generator
from ensemblepp.testing_common import leaves, require_same_state, snapshot
from tests.neural_cases import ARMS, DIM, SMALL, contexts_for, datum, normal, taught

REPLICAS, UNITS = SMALL["num_replicas"], sum(SMALL["hidden_dims"])
MAKE = partial(NeuralDropout, DIM, dropout_rate=0.4, **SMALL)
CLOSE: dict[str, float] = {"rtol": 1e-9, "atol": 1e-11}


def parameters(agent: NeuralDropout) -> list[dict[str, Tensor]]:
    """Torso and head by name."""
    return [block.split(block.flat) for block in agent.network.blocks]


def masked_output(blocks: list[dict[str, Tensor]], x: Tensor, mask: Tensor, replica: int) -> Tensor:
    """Standardised outputs of one replica at inputs (rows, DIM) under one mask or a mask per row."""
    (torso, head), start = blocks, 0
    for layer, width in enumerate((6, 5)):
        x = (x @ torso[f"weight_{layer}"][replica] + torso[f"bias_{layer}"][replica]).relu()
        x = x * mask[..., start : start + width]
        start += width
    return x @ head["weight"][replica].T + head["bias"][replica].T


@pytest.mark.parametrize("num_arms", [None, ARMS])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_decision_is_the_network_under_one_mask_for_all_arms(num_arms: int | None, batch: int) -> None:
    agent = taught(MAKE(num_arms=num_arms))
    contexts, masks = contexts_for(agent, batch), agent.draw_index(batch)
    assert masks is not None
    assert masks.shape == (REPLICAS, batch, UNITS)
    rows = contexts.unsqueeze(2) if num_arms else contexts
    wanted = [
        [masked_output(parameters(agent), rows[r, b], masks[r, b], r).flatten() for b in range(batch)]
        for r in range(REPLICAS)
    ]
    scores = torch.stack([torch.stack(each) for each in wanted])
    decision = agent.act(contexts, index=masks)
    torch.testing.assert_close(decision.scores, agent.calibration.restore(scores), **CLOSE)
    again = agent.act(contexts, index=masks)
    assert decision.scores is not None
    assert again.scores is not None
    assert torch.equal(decision.scores, again.scores)


@pytest.mark.statistical
def test_units_are_dropped_at_their_rate_and_rescaled_to_mean_one() -> None:
    agent, n = MAKE(), 4000
    masks = agent.draw_index(n)
    assert masks is not None
    assert masks.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    dropped = (masks == 0).double().mean((0, 1))
    assert bool(((dropped - 0.4).abs() < 4 * (0.24 / (n * REPLICAS)) ** 0.5).all())


@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_training_follows_the_gradient_of_autograd_under_a_mask_per_datum(num_arms: int | None) -> None:
    agent = taught(MAKE(num_arms=num_arms, updates_per_step=1))
    (minibatch,) = agent.draw_minibatches(2)
    assert minibatch.index is not None
    assert minibatch.index.shape == (REPLICAS, 4, UNITS)
    before = [{name: part.clone().requires_grad_() for name, part in each.items()} for each in parameters(agent)]
    metrics = agent.update(datum(agent, 2, 50), minibatches=[minibatch])
    batch, losses = agent.replay.gather(minibatch.slots), []
    for r in range(REPLICAS):
        output = masked_output(before, batch["features"][r], minibatch.index[r], r)
        own = output[:, 0] if num_arms is None else output.gather(1, batch["arm"][r].unsqueeze(-1)).squeeze(-1)
        losses.append((own - agent.calibration.standardise(batch["reward"])[r]).square().mean())
    torch.testing.assert_close(metrics["train/loss"].flatten(), torch.stack(losses), **CLOSE)
    torch.stack(losses).sum().backward()
    for block, wanted in zip(agent.network.blocks, before, strict=True):
        for name, part in wanted.items():
            assert part.grad is not None
            torch.testing.assert_close(block.grad(name), part.grad, **CLOSE)


def test_a_rate_of_zero_is_the_greedy_network() -> None:
    dropout, greedy = MAKE(dropout_rate=0.0), NeuralGreedy(DIM, **SMALL)
    for step in range(6):
        minibatches = dropout.draw_minibatches(2)
        dropout.update(datum(dropout, 2, step), minibatches=minibatches)
        greedy.update(datum(dropout, 2, step), minibatches=[replace(each, index=None) for each in minibatches])
    for name, leaf in leaves(greedy.state_dict()["scorer"]).items():
        torch.testing.assert_close(leaves(dropout.state_dict()["scorer"])[name], leaf, **CLOSE)
    contexts = contexts_for(dropout, 3)
    torch.testing.assert_close(dropout.act(contexts).scores, greedy.act(contexts).scores, **CLOSE)


def test_greedy_acts_on_the_whole_network_and_the_scale_moves_towards_it() -> None:
    whole, half, full = (
        taught(MAKE(**options)) for options in ({"acquisition": "greedy"}, {"exploration_scale": 0.5}, {})
    )
    assert whole.draw_index(5) is None
    contexts, masks = contexts_for(whole, 5), full.draw_index(5)
    mean = whole.act(contexts).scores
    small, large = (agent.act(contexts, index=masks).scores for agent in (half, full))
    assert mean is not None
    assert large is not None
    everything = torch.ones(REPLICAS, 5, UNITS, dtype=torch.float64)
    torch.testing.assert_close(mean, full.model.sample(contexts, everything, 1.0), **CLOSE)
    assert float((large - mean).abs().max()) > 0.01
    torch.testing.assert_close(small, (large + mean) / 2, **CLOSE)


@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_posterior_samples_are_joint_and_move_nothing(num_arms: int | None) -> None:
    agent, num_samples = taught(MAKE(num_arms=num_arms)), 70  # more than are drawn at once
    x = normal(REPLICAS, 4, DIM, seed=60)
    arm = None if num_arms is None else torch.tensor([[0, 1, 1, 3], [2, 2, 0, 3]])
    before = snapshot(agent)
    samples = agent.posterior_samples(x, arm, num_samples, make_generator(1, "draw"))
    require_same_state(before, agent.state_dict(), "posterior samples must move nothing")
    generator = make_generator(1, "draw")
    masks = torch.cat([agent.model.draw_masks(count, generator) for count in (64, 6)], dim=1)
    for r in range(REPLICAS):
        place = torch.zeros(4, dtype=torch.int64) if arm is None else arm[r]
        for s in (0, 63, 64, 69):
            output = masked_output(parameters(agent), x[r], masks[r, s], r).gather(1, place.unsqueeze(-1)).squeeze(-1)
            wanted = agent.calibration.offset[r] + agent.calibration.scale[r] * output
            torch.testing.assert_close(samples[r, s], wanted, **CLOSE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_rate": -0.1}, "dropout_rate of NeuralDropout must be a finite number >= 0 and <= 0.99; got -0.1"),
        ({"dropout_rate": 1.0}, "dropout_rate of NeuralDropout must be a finite number >= 0 and <= 0.99; got 1.0"),
        ({"acquisition": "ucb"}, 'acquisition of NeuralDropout must be "thompson" or "greedy"; got \'ucb\''),
        ({"hidden_dims": ()}, "hidden_dims of NeuralDropout must have a layer whose units can be dropped"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        MAKE(**options)
