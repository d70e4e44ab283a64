"""What sets the rivals on ensembles and point networks apart."""

import copy
from functools import partial

import pytest
import torch
from scipy.stats import chisquare

from ensemblepp import agents
from ensemblepp.agents import (
    EnsemblePlus,
    EpiNet,
    NeuralEpsilonGreedy,
)
from ensemblepp.errors import ParameterError
from ensemblepp.seeding import make_generator
from ensemblepp.testing_common import require_same_state
from tests.neural_cases import ARMS, DIM, EVERY, SMALL, contexts_for, normal, taught


@pytest.mark.statistical
@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.4, 1.0])
def test_epsilon_greedy_explores_at_its_rate(epsilon: float) -> None:
    agent = taught(NeuralEpsilonGreedy(DIM, epsilon=epsilon, **SMALL), 6)
    n = 20_000
    contexts = contexts_for(agent, 1).expand(-1, n // 2, -1, -1)
    decision = agent.act(contexts)
    assert decision.scores is not None
    assert decision.arm is not None
    best = decision.scores.argmax(-1)
    rate = epsilon * (1 - 1 / ARMS)
    off = float((decision.arm != best).double().mean())
    assert abs(off - rate) <= 4 * (rate * (1 - rate) / n) ** 0.5
    if epsilon:
        explored = decision.arm[0][decision.arm[0] != best[0]]
        counts = torch.bincount(explored, minlength=ARMS)
        counts = torch.cat([counts[: best[0, 0]], counts[best[0, 0] + 1 :]])
        assert chisquare(counts.numpy()).pvalue > 1e-4


def test_epsilon_greedy_explores_among_allowed_arms_only() -> None:
    agent = taught(NeuralEpsilonGreedy(DIM, epsilon=1.0, **SMALL), 6)
    mask = torch.tensor([True, False, True, False]).expand(2, 1000, -1)
    arm = agent.act(contexts_for(agent, 1000), mask).arm
    assert arm is not None
    assert set(arm.flatten().tolist()) == {0, 2}


@pytest.mark.parametrize("name", ["ensemble_plus", "epi_net"])
def test_posterior_samples_of_the_rivals_move_nothing(name: str) -> None:
    agent = taught(EVERY[name](), 6)
    before = copy.deepcopy(agent.state_dict())
    samples = agent.posterior_samples(normal(2, 3, DIM), None, 5, make_generator(1, "draw"))
    assert samples.shape == (2, 5, 3)
    assert float(samples.std(1).min()) > 0
    require_same_state(before, agent.state_dict(), "posterior samples must move nothing")


def test_ensemble_plus_follows_each_member_equally_often() -> None:
    agent = taught(EVERY["ensemble_plus"](), 6)
    n = 8000
    scores = agent.act(contexts_for(agent, 1).expand(-1, n, -1, -1)).scores
    assert scores is not None
    for r in range(2):
        models, counts = torch.unique(scores[r].round(decimals=9), dim=0, return_counts=True)
        assert len(models) == 4
        assert chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("num_arms", [None, 3])
def test_greedy_ensemble_plus_acts_on_the_average_of_its_members(num_arms: int | None) -> None:
    agent = taught(partial(EnsemblePlus, DIM, index_dim=4, num_arms=num_arms, acquisition="greedy", **SMALL)(), 6)
    contexts = contexts_for(agent, 1)
    members = agent.scorer.output(contexts).members
    torch.testing.assert_close(agent.act(contexts).scores, agent.calibration.restore(members.mean(-1)))
    assert agent.draw_index(1).unique().tolist() == [0.25]


def test_acquisitions_without_a_meaning_are_refused() -> None:
    for kind in (EnsemblePlus, EpiNet):
        with pytest.raises(ParameterError, match=f"acquisition of {kind.__name__} must be one of .*; got .ucb."):
            kind(DIM, acquisition="ucb")


NEURAL = [kind for kind in vars(agents).values() if isinstance(kind, type) and issubclass(kind, agents.NeuralAgent)]


@pytest.mark.parametrize("kind", [kind for kind in NEURAL if kind is not agents.NeuralAgent])
@pytest.mark.parametrize("option", ["acquisition", "updates_per_step", "batch_size", "min_data", "replay_capacity"])
def test_every_agent_names_an_option_that_it_cannot_take(kind: type, option: str) -> None:
    with pytest.raises(ParameterError, match=f"^{option} of {kind.__name__} must "):
        kind(DIM, **{option: "best" if option == "acquisition" else -1})
