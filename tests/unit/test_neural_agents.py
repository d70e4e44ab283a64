"""What the neural agents compute, beyond the promises that all agents share."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from ensemblepp.agents import (
    NeuralAgent,
    NeuralEnsemblePP,
)
from ensemblepp.errors import ParameterError
from ensemblepp.seeding import make_generator
from ensemblepp.testing_common import is_stream, leaves, one_replica, require_same_state
from ensemblepp.types import Transition
from tests.neural_cases import ARMS, DIM, EVERY, ON_ONE_NETWORK, SGD, contexts_for, datum, normal, taught


@pytest.mark.parametrize("num_arms", [None, ARMS])
@pytest.mark.parametrize("name", ["exact", "sgd", "logistic", "ensemble_plus", "epi_net", *ON_ONE_NETWORK])
def test_each_replica_of_a_batch_of_16_equals_the_same_learner_alone(name: str, num_arms: int | None) -> None:
    make = partial(EVERY[name], num_arms=num_arms)
    together = taught(make(num_replicas=16), 3)
    watched = (0, 7, 15)
    alone = {r: make(num_replicas=1, seed=3) for r in watched}
    for r, agent in alone.items():
        agent.load_state_dict(one_replica(together.state_dict(), agent.state_dict(), r))
    for step in range(6):
        contexts = contexts_for(together, 2, seed=200 + step)
        zeta, z, minibatches = together.draw_index(2), together.draw_perturbation(2), together.draw_minibatches(2)
        scores = together.act(contexts, index=zeta).scores
        transition = replace(datum(together, 2, 300 + step), perturbation=z)
        together.update(transition, minibatches=minibatches)
        assert len(minibatches) == 2
        assert scores is not None
        for r, agent in alone.items():
            one = slice(r, r + 1)
            single = agent.act(contexts[one], index=None if zeta is None else zeta[one]).scores
            torch.testing.assert_close(single, scores[one], rtol=1e-9, atol=1e-9)
            own = [
                replace(each, slots=each.slots[one], index=None if each.index is None else each.index[one])
                for each in minibatches
            ]
            arm = None if transition.arm is None else transition.arm[one]
            part = Transition(transition.features[one], transition.reward[one], arm, None if z is None else z[one])
            agent.update(part, minibatches=own)
    for r, agent in alone.items():
        wanted = leaves(one_replica(together.state_dict(), agent.state_dict(), r))
        for key, leaf in leaves(agent.state_dict()).items():
            if isinstance(leaf, Tensor) and not is_stream(leaf):
                torch.testing.assert_close(leaf, wanted[key], rtol=1e-9, atol=1e-9, msg=f"{key} of replica {r}")


@pytest.mark.parametrize(
    ("head", "name", "value"),
    [
        ("exact", "prior", "frozen"),
        ("exact", "posterior_scale", 1.0),
        ("exact", "index_weight", 1.0),
        ("exact", "loss", "squared"),
        ("exact", "loss", "logistic"),
        ("sgd", "refit_period", 20),
    ],
)
def test_an_option_of_the_other_head_is_refused_by_name(head: str, name: str, value: object) -> None:
    message = f'{name} of NeuralEnsemblePP must be None with head="{head}"; got {value!r}'
    with pytest.raises(ParameterError, match=message):
        NeuralEnsemblePP(DIM, head=head, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("head", ["exact", "sgd"])
def test_an_index_with_a_mean_is_refused(head: str) -> None:
    message = "index of NeuralEnsemblePP must have mean zero; got 'one_hot'. Use EnsemblePlus."
    with pytest.raises(ParameterError, match=message):
        NeuralEnsemblePP(DIM, head=head, index="one_hot")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "bayes"}, "head of NeuralEnsemblePP must be one of 'exact', 'sgd'; got 'bayes'"),
        ({"acquisition": "max"}, "acquisition of NeuralEnsemblePP must be one of 'greedy', 'thompson', 'ucb'"),
        ({"exploration_scale": -1.0}, "exploration_scale of NeuralEnsemblePP must be a finite number >= 0"),
        ({"updates_per_step": -1}, "updates_per_step of NeuralEnsemblePP must be an int >= 0"),
        ({"update_period": 0}, "update_period of NeuralEnsemblePP must be an int >= 1"),
        ({"batch_size": 0}, "batch_size of NeuralEnsemblePP must be an int >= 1"),
        ({"min_data": 0}, "min_data of NeuralEnsemblePP must be an int >= 1"),
        ({"refit_period": 0}, "refit_period of NeuralEnsemblePP must be an int >= 1"),
        ({"prior_scale": 0.0}, "prior_scale of NeuralEnsemblePP must be a finite number > 0"),
        ({"learning_rate": 0.0}, "learning_rate of NeuralEnsemblePP must be a finite number > 0"),
        ({"weight_decay": -1.0}, "weight_decay of NeuralEnsemblePP must be a finite number >= 0"),
        ({"dtype": torch.float16}, "dtype of NeuralEnsemblePP must be torch.float32 or torch.float64"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        NeuralEnsemblePP(DIM, **options)


def test_scores_of_the_logistic_loss_are_probabilities() -> None:
    agent = taught(SGD(loss="logistic", learning_rate=0.1), 30)
    contexts = contexts_for(agent, 50)
    for acquisition in ("thompson", "ucb", "greedy"):
        agent.acquisition = acquisition
        scores = agent.act(contexts).scores
        assert scores is not None
        assert bool(((scores > 0) & (scores < 1)).all())
        assert float(scores.std()) > 0.01
    samples = agent.posterior_samples(contexts[:, :, 0], None, 9, make_generator(0, "draw"))
    assert bool(((samples > 0) & (samples < 1)).all())


def test_the_logistic_loss_learns_from_labels() -> None:
    agent = NeuralEnsemblePP(1, head="sgd", loss="logistic", index_dim=4, hidden_dims=(16,), learning_rate=0.02)
    side = torch.tensor([[-1.0, 1.0]])
    for _ in range(60):
        agent.update(Transition(side.unsqueeze(-1), (side > 0).float()))
    low, high = agent.scorer.mean(side.view(1, 1, 2, 1)).flatten().tolist()
    assert low < 0.2
    assert high > 0.8


def test_the_logistic_loss_refuses_standardised_labels() -> None:
    message = "standardise of NeuralEnsemblePP must be False with the logistic loss; got True"
    with pytest.raises(ParameterError, match=message):
        SGD(loss="logistic", standardise=True)
    with pytest.raises(ParameterError, match="reward_scale of NeuralEnsemblePP must be None with the logistic loss"):
        SGD(loss="logistic", reward_scale=2.0)
    assert SGD(loss="logistic", standardise=False).calibration.scale.tolist() == [[1.0]] * 2


def spoil(agent: NeuralAgent, replica: int) -> None:
    trainer: Any = agent.trainer
    for block in getattr(trainer, "blocks", None) or trainer.network.blocks:
        for view in block.split(block.flat).values():
            own = len(view) // agent.num_replicas
            view[replica * own : (replica + 1) * own] = torch.nan


@pytest.mark.parametrize("num_arms", [None, ARMS])
@pytest.mark.parametrize(
    "name",
    [
        "exact",
        "sgd",
        "logistic",
        "ensemble_plus",
        "epi_net",
        "neural_linear",
        "greedy",
        *ON_ONE_NETWORK,
    ],
)
def test_a_diverged_replica_is_stopped_acts_uniformly_and_the_others_do_not_notice(
    name: str, num_arms: int | None
) -> None:
    twins = [taught(EVERY[name](num_replicas=3, num_arms=num_arms), 5) for _ in range(2)]
    spoil(twins[1], 1)
    others = torch.tensor([0, 2])
    for step in range(8):
        for agent in twins:
            agent.update(datum(agent, 1, 400 + step))
        contexts = contexts_for(twins[0], 3, seed=500 + step)
        sound, spoilt = (agent.act(contexts) for agent in twins)
        assert sound.scores is not None
        assert spoilt.scores is not None
        assert torch.equal(sound.scores[others], spoilt.scores[others])
        assert torch.equal(sound.arm[others], spoilt.arm[others])  # type: ignore[index]
        assert not spoilt.scores[1].any()
        assert twins[0].stopped.tolist() == [-1, -1, -1]
        assert twins[1].stopped.tolist() == [-1, 11, -1]
    sound, spoilt = (agent.act(contexts_for(agent, 4000)) for agent in twins)
    assert torch.equal(sound.arm[others], spoilt.arm[others])  # type: ignore[index]
    counts = torch.bincount(spoilt.arm[1], minlength=ARMS)  # type: ignore[index]
    assert len(counts) == ARMS
    assert chisquare(counts.numpy()).pvalue > 1e-4
    restored = EVERY[name](num_replicas=3, num_arms=num_arms, seed=9)
    restored.load_state_dict(twins[1].state_dict())
    assert restored.stopped.tolist() == [-1, 11, -1]


@pytest.mark.parametrize(
    "name", ["exact", "sgd", "ensemble_plus", "epi_net", "neural_linear", "greedy", *ON_ONE_NETWORK]
)
def test_a_learning_rate_that_blows_everything_up_never_raises(name: str) -> None:
    agent = EVERY[name](learning_rate=1e30, updates_per_step=1, dtype=torch.float32)
    for step in range(12):
        agent.act(contexts_for(agent, 1))
        agent.update(datum(agent, 1, step))
    assert bool((agent.stopped > 0).all())


@pytest.mark.statistical
@pytest.mark.parametrize("num_arms", [None, ARMS])
@pytest.mark.parametrize(
    "name",
    [
        "exact",
        "sgd",
        "neural_linear",
    ],
)
def test_posterior_samples_have_the_closed_form_mean_and_covariance(name: str, num_arms: int | None) -> None:
    agent, n, points = taught(EVERY[name](num_arms=num_arms), 10), 20_000, 4
    x = normal(2, points, DIM, seed=60)
    arm = None if num_arms is None else torch.tensor([[0, 1, 1, 3], [2, 2, 0, 3]])
    before = copy.deepcopy(agent.state_dict())
    samples = agent.posterior_samples(x, arm, n, make_generator(1, "draw"))
    require_same_state(before, agent.state_dict(), "posterior samples must move nothing")
    assert samples.shape == (2, n, points)
    again = agent.posterior_samples(x, arm, n, make_generator(1, "draw"))
    assert torch.equal(samples, again)
    contexts = x if num_arms else x.unsqueeze(1)
    mean = agent.scorer.mean(contexts)
    mean = mean.squeeze(1) if arm is None else mean.gather(2, arm.unsqueeze(-1)).squeeze(-1)
    if agent.closed_form is not None:
        head = agent.closed_form
        phi = head.phi(x)
        spread = head.posterior.factor if head.posterior.index_dim else head.posterior.root
        if arm is not None:
            place = arm[..., None, None].expand(-1, -1, *spread.shape[2:])
            columns = torch.einsum("rpd,rpdm->rpm", phi, spread.gather(1, place))
            covariance = columns @ columns.mT
            if not head.posterior.index_dim:  # independent arms
                covariance = torch.where(arm.unsqueeze(-1) == arm.unsqueeze(-2), covariance, 0.0)
        else:
            columns = phi @ spread
            covariance = columns @ columns.mT
        covariance = covariance * head._units()[1].unsqueeze(-1).square()
    else:
        model: Any = agent.scorer
        members = model.output(x if num_arms else x.unsqueeze(2)).members
        members = members.squeeze(2) if arm is None else members.gather(2, arm[..., None, None].expand(-1, -1, 1, 4))
        members = members.view(2, points, 4)
        covariance = members @ members.mT * agent.calibration.scale.unsqueeze(-1).square()
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert bool((variance > 0).all())
    assert bool(((samples.mean(1) - mean).abs() < 4 * (variance / n).sqrt()).all())
    centred = samples - mean.unsqueeze(1)
    product = variance.unsqueeze(-1) * variance.unsqueeze(-2) + covariance.square()
    assert bool(((centred.mT @ centred / n - covariance).abs() < 4 * (product / n).sqrt()).all())
    deviation = (agent.scorer.bound(contexts, 1.0) - agent.scorer.mean(contexts)) if name != "exact" else None
    if deviation is not None:
        own = deviation.squeeze(1) if arm is None else deviation.gather(2, arm.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(own, variance.sqrt(), rtol=1e-9, atol=1e-9)


def test_an_agent_without_a_posterior_says_so() -> None:
    agent = EVERY["greedy"]()
    with pytest.raises(ParameterError, match="posterior_samples of NeuralGreedy must belong to an agent with a"):
        agent.posterior_samples(normal(2, 3, DIM), None, 5, make_generator(1, "draw"))


@pytest.mark.parametrize("num_arms", [None, ARMS])
@pytest.mark.parametrize("name", ["exact", "sgd", "logistic"])
def test_the_exploration_scale_multiplies_the_spread_around_the_mean(name: str, num_arms: int | None) -> None:
    one, half, none = (taught(EVERY[name](exploration_scale=s, num_arms=num_arms), 6) for s in (1.0, 0.5, 0.0))
    contexts, index = contexts_for(one, 5), one.draw_index(5)
    full, small, mean = (agent.act(contexts, index=index).scores for agent in (one, half, none))
    assert full is not None
    assert small is not None
    assert mean is not None
    if name == "logistic":
        full, small, mean = (torch.logit(each) for each in (full, small, mean))
    assert float((full - mean).abs().max()) > 0.01
    torch.testing.assert_close(small, (full + mean) / 2, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(none.scorer.mean(contexts), none.act(contexts).scores, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["exact", "sgd"])
def test_ucb_scores_are_the_mean_plus_the_scaled_sd(name: str) -> None:
    agent = taught(EVERY[name](acquisition="ucb", exploration_scale=2.0), 6)
    contexts = contexts_for(agent, 5)
    assert agent.draw_index(5) is None
    mean, sd = agent.scorer.mean(contexts), agent.scorer.bound(contexts, 1.0) - agent.scorer.mean(contexts)
    assert float(sd.min()) > 0
    torch.testing.assert_close(agent.act(contexts).scores, mean + 2 * sd, rtol=1e-9, atol=1e-9)


def test_training_waits_for_min_data_and_keeps_to_its_period() -> None:
    agent = EVERY["sgd"](min_data=5, update_period=3)
    trained = ["train/loss" in agent.update(datum(agent, 1, step)) for step in range(12)]
    assert trained == [step in (5, 8, 11) for step in range(12)]
