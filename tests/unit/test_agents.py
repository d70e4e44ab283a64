"""What each agent does beyond the promises that all agents share."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from ensemblepp.agents import (
    EpsilonGreedy,
    Greedy,
    LinearAgent,
    LinearEnsemblePP,
    LinearEnsembleSampling,
    LinearThompsonSampling,
    LinUCB,
    Uniform,
    default_index_dim,
)
from ensemblepp.envs import LinearBandit
from ensemblepp.errors import ParameterError
from ensemblepp.indices import IndexDistribution
from ensemblepp.seeding import make_generator
from ensemblepp.types import Transition, UnitSphere

SAMPLERS = [LinearEnsemblePP, LinearThompsonSampling, LinearEnsembleSampling]
ALL = [*SAMPLERS, LinUCB, Greedy, EpsilonGreedy, Uniform]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"))


def taught(agent: LinearAgent, count: int = 20, seed: int = 1) -> LinearAgent:
    size = (agent.num_replicas, count)
    arm = None
    if agent.num_arms is not None:
        arm = torch.randint(agent.num_arms, size, generator=make_generator(seed, "arm"))
    agent.update(Transition(normal(*size, agent.feature_dim, seed=seed), normal(*size, seed=seed + 1), arm))
    return agent


@pytest.mark.parametrize(("feature_dim", "members"), [(1, 16), (12, 16), (13, 17), (50, 65), (100, 130)])
def test_the_default_index_dim_is_16_or_1_3_times_the_features(feature_dim: int, members: int) -> None:
    assert default_index_dim(feature_dim) == members
    assert LinearEnsemblePP(feature_dim).index_dim == LinearEnsembleSampling(feature_dim).index_dim == members
    assert LinearEnsemblePP(feature_dim, index_dim=3).index_dim == 3
    assert LinearThompsonSampling(feature_dim).index_dim == 0


def test_a_small_ensemble_on_a_compact_action_set_is_warned_of() -> None:
    compact, finite = LinearBandit(20, action_set="compact"), LinearBandit(20, 5)
    message = "index_dim of LinearEnsemblePP should be >= 26 on a compact action set; got 25"
    with pytest.warns(UserWarning, match=message):
        LinearEnsemblePP(20, index_dim=25).check_environment(compact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LinearEnsemblePP(20, index_dim=25).check_environment(finite)
        LinearEnsemblePP(20, index_dim=26).check_environment(compact)
        LinearEnsemblePP(20).check_environment(compact)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_dim": 4}, "feature_dim of Greedy must equal the environment's 3; got 4"),
        ({"num_replicas": 3}, "num_replicas of Greedy must equal the environment's 2; got 3"),
        ({"num_arms": 5}, "num_arms of Greedy must equal the environment's None; got 5"),
    ],
)
def test_sizes_that_do_not_fit_the_environment_are_named(options: dict[str, Any], message: str) -> None:
    agent = Greedy(**({"feature_dim": 3, "num_replicas": 2} | options))
    with pytest.raises(ParameterError, match=message):
        agent.check_environment(LinearBandit(3, 5, num_replicas=2))


def test_lin_ucb_refuses_a_compact_action_set() -> None:
    message = "action_set of LinUCB must be \"finite\"; got 'compact'. Use LinearThompsonSampling there."
    with pytest.raises(ParameterError, match=message):
        LinUCB(3).check_environment(LinearBandit(3, action_set="compact"))
    with pytest.raises(ParameterError, match=message):
        LinUCB(3).act(UnitSphere(3))


def test_lin_ucb_scores_are_mean_plus_width() -> None:
    for num_arms in (None, 4):
        agent = taught(LinUCB(3, num_arms=num_arms, exploration_scale=2.0))
        contexts = normal(1, 2, 3) if num_arms else normal(1, 2, 4, 3)
        rows = contexts.unsqueeze(2).expand(-1, -1, 4, -1) if num_arms else contexts
        mean, root = agent.posterior.mean, agent.posterior.root
        mean, root = (mean[0], root[0]) if num_arms else (mean.expand(4, -1), root.expand(4, -1, -1))
        wanted = torch.einsum("rbkd,kd->rbk", rows, mean) + 2 * torch.einsum("rbkd,kde->rbke", rows, root).norm(dim=-1)
        torch.testing.assert_close(agent.act(contexts).scores, wanted)


def test_the_share_of_uniform_actions_is_epsilon() -> None:
    agent = EpsilonGreedy(1, epsilon=0.3, prior_mean=1.0)
    best_first = torch.tensor([2.0, 1.0, 0.0, -1.0]).view(1, 1, 4, 1).expand(1, 100_000, 4, 1)
    arm = agent.act(best_first).arm
    assert arm is not None
    counts = torch.bincount(arm.flatten(), minlength=4)
    wanted = torch.tensor([0.7 + 0.3 / 4, 0.3 / 4, 0.3 / 4, 0.3 / 4]) * 100_000
    assert chisquare(counts.numpy(), wanted.numpy()).pvalue > 1e-4
    mask = torch.tensor([False, True, True, False]).expand(1, 100_000, -1)
    arm = agent.act(best_first, mask).arm
    assert arm is not None
    counts = torch.bincount(arm.flatten(), minlength=4)
    assert counts[[0, 3]].tolist() == [0, 0]
    assert chisquare(counts[1:3].numpy(), [85_000, 15_000]).pvalue > 1e-4


def test_epsilon_zero_is_greedy_and_epsilon_one_uniform() -> None:
    contexts = normal(1, 500, 6, 3)
    greedy = taught(Greedy(3)).act(contexts)
    never, always = (taught(EpsilonGreedy(3, epsilon=epsilon)).act(contexts).arm for epsilon in (0.0, 1.0))
    assert greedy.arm is not None
    assert never is not None
    assert always is not None
    assert torch.equal(never, greedy.arm)
    assert float((always == greedy.arm).float().mean()) == pytest.approx(1 / 6, abs=4 * (5 / 36 / 500) ** 0.5)


@pytest.mark.parametrize("num_arms", [None, 6])
def test_exploration_scale_zero_is_greedy(num_arms: int | None) -> None:
    contexts = normal(2, 100, 3) if num_arms else normal(2, 100, 6, 3)
    options: dict[str, Any] = {"num_replicas": 2, "num_arms": num_arms}
    greedy = taught(Greedy(3, **options)).act(contexts)
    for make in (*SAMPLERS, LinUCB):
        decision = taught(make(3, exploration_scale=0.0, **options)).act(contexts)
        torch.testing.assert_close(decision.scores, greedy.scores)
        assert torch.equal(decision.arm, greedy.arm)  # type: ignore[arg-type]


def test_the_scale_multiplies_the_spread_around_the_mean() -> None:
    for make in SAMPLERS:
        one, half, none = (taught(make(3, exploration_scale=scale)) for scale in (1.0, 0.5, 0.0))
        index, contexts = one.draw_index(4), normal(1, 4, 5, 3)
        full, small, mean = (agent.act(contexts, index=index).scores for agent in (one, half, none))
        assert full is not None
        assert mean is not None
        torch.testing.assert_close(small, (full + mean) / 2)


def test_ensemble_sampling_acts_on_m_distinct_models_equally_often() -> None:
    agent = taught(LinearEnsembleSampling(3, index_dim=7))
    scores = agent.act(torch.eye(3).expand(1, 20_000, 3, 3)).scores
    assert scores is not None
    models, counts = torch.unique(scores.flatten(0, 1), dim=0, return_counts=True)
    assert len(models) == 7
    assert chisquare(counts.numpy()).pvalue > 1e-4
    members = agent.posterior.mean + 7**0.5 * agent.posterior.factor[0].T
    torch.testing.assert_close(models.sort(0).values, members.sort(0).values)


def test_exact_thompson_sampling_draws_arms_independently_and_the_ensemble_shares_its_index() -> None:
    context = torch.ones(1, 5000, 1)
    exact = LinearThompsonSampling(1, num_arms=2).act(context).scores
    assert exact is not None
    assert abs(float(torch.corrcoef(exact[0].T)[0, 1])) < 4 / 5000**0.5
    agent = LinearEnsemblePP(1, num_arms=2, index_dim=4)
    shared = agent.act(context).scores
    assert shared is not None
    first, second = agent.posterior.factor[0, :, 0]
    assert float(torch.corrcoef(shared[0].T)[0, 1]) == pytest.approx(float(first @ second), abs=4 / 5000**0.5)


def test_uniform_actions_are_uniform_on_arms_and_on_the_sphere() -> None:
    agent = taught(Uniform(3, num_replicas=1000))
    features = torch.cat([agent.act(UnitSphere(3)).features for _ in range(20)], dim=1).flatten(0, 1)
    torch.testing.assert_close(features.norm(dim=-1), torch.ones(20_000))
    assert float(features.mean(0).abs().max()) < 4 / (3 * 20_000) ** 0.5
    assert float((features.square().mean(0) - 1 / 3).abs().max()) < 4 * (4 / 45 / 20_000) ** 0.5


@pytest.mark.parametrize("make", [Greedy, EpsilonGreedy, partial(LinearEnsemblePP, exploration_scale=0.0)])
def test_a_zero_parameter_gives_a_random_direction_on_the_sphere(make: Any) -> None:
    features = make(3, num_replicas=5000).act(UnitSphere(3)).features
    torch.testing.assert_close(features.norm(dim=-1), torch.ones(5000, 1))
    assert float(features.mean(0).abs().max()) < 4 / (3 * 5000) ** 0.5


def test_the_sphere_maximiser_points_along_the_parameter() -> None:
    agent = taught(Greedy(3, num_replicas=2))
    wanted = torch.nn.functional.normalize(agent.posterior.mean, dim=-1)
    torch.testing.assert_close(agent.act(UnitSphere(3)).features[:, 0], wanted)
    for call in ((UnitSphere(4),), (UnitSphere(3), torch.ones(2, 1, 3, dtype=torch.bool))):
        with pytest.raises(ParameterError, match=r"contexts of Greedy must be a UnitSphere\(3\) without mask"):
            agent.act(*call)


@pytest.mark.parametrize("make", ALL)
def test_one_arm_one_feature_one_decision(make: Any) -> None:
    decision = make(1).act(torch.ones(1, 1, 1, 1))
    assert decision.arm.tolist() == [[0]]
    decision = make(1, num_arms=1).act(torch.ones(1, 1, 1))
    assert decision.arm.tolist() == [[0]]


@pytest.mark.parametrize("num_arms", [None, 3])
def test_unobserved_slots_change_nothing_whatever_they_hold(num_arms: int | None) -> None:
    agent, same = (taught(LinearEnsemblePP(2, num_replicas=2, num_arms=num_arms)) for _ in range(2))
    features, reward, z = normal(2, 3, 2), normal(2, 3), agent.draw_perturbation(3)
    arm = None if num_arms is None else torch.tensor([[0, 1, 2], [2, 2, 0]])
    observed = torch.tensor([[True, False, True], [False, True, True]])
    holes = torch.where(observed, reward, torch.nan)
    filled = torch.where(observed.unsqueeze(-1), features, torch.inf)
    error = agent.update(Transition(filled, holes, arm, z, observed))["train/prediction_error"]
    assert error[~observed].tolist() == [0.0, 0.0]
    same.update(Transition(features * observed.unsqueeze(-1), reward * observed, arm, z))
    torch.testing.assert_close(agent.posterior.state, same.posterior.state)


def test_features_of_masked_arms_may_be_anything() -> None:
    contexts, mask = normal(1, 1, 3, 2), torch.tensor([[[True, False, True]]])
    agent = taught(LinearEnsemblePP(2))
    index = agent.draw_index(1)
    spoilt = torch.where(mask.unsqueeze(-1), contexts, torch.nan)
    first, second = agent.act(contexts, mask, index=index).arm, agent.act(spoilt, mask, index=index).arm
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


@pytest.mark.parametrize("make", ALL)
def test_added_arms_are_explored_and_the_others_keep_their_meaning(make: Any) -> None:
    agent = taught(make(2, num_arms=2, num_replicas=3))
    before = agent.posterior.state.clone()
    agent.add_arms()
    agent.add_arms(2)
    assert agent.num_arms == 5
    assert torch.equal(agent.posterior.state[:, :2], before)
    only_new = torch.tensor([False, False, True, True, True]).expand(3, 200, -1)
    chosen = agent.act(torch.zeros(3, 200, 2), only_new).arm
    assert chosen is not None
    assert set(chosen.flatten().tolist()) == {2, 3, 4}
    with pytest.raises(ParameterError, match=r"num_arms of .* must be set to add arms.* Pass the new arm's features"):
        make(2).add_arms()


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("num_arms", [None, 2])
def test_discount_with_the_prior_kept_is_bounded(make: Any, num_arms: int | None) -> None:
    agent = taught(make(2, num_arms=num_arms))
    for _ in range(200):
        agent.discount(0.8, keep_prior=True)
    torch.testing.assert_close(agent.posterior.covariance, torch.eye(2).expand_as(agent.posterior.covariance))
    factor = taught(make(2, num_arms=num_arms)).posterior.covariance
    agent = taught(make(2, num_arms=num_arms))
    agent.discount(0.5)
    torch.testing.assert_close(agent.posterior.covariance, 2 * factor)
    with pytest.raises(ParameterError, match="factor of LinearPosterior must be a finite number > 0 and <= 1; got 2"):
        agent.discount(2.0, keep_prior=True)


def test_index_laws_by_name_or_object() -> None:
    agent = LinearEnsemblePP(2, index_dim=4, index=IndexDistribution("sparse", 4, 2), perturbation="cube")
    z = agent.draw_perturbation(5)
    assert z is not None
    assert z.abs().flatten().tolist() == [0.5] * 20
    with pytest.raises(ParameterError, match="index of LinearEnsemblePP must have index_dim = 4; got"):
        LinearEnsemblePP(2, index_dim=4, index=IndexDistribution("cube", 5))
    for law in ("one_hot", IndexDistribution("one_hot", 4)):
        with pytest.raises(ParameterError, match="index of LinearEnsemblePP must have mean zero; got 'one_hot'"):
            LinearEnsemblePP(2, index_dim=4, index=law)
    with pytest.raises(ParameterError, match="exploration_scale of LinearEnsemblePP must be a finite number >= 0"):
        LinearEnsemblePP(2, exploration_scale=-1.0)
    with pytest.raises(ParameterError, match="epsilon of EpsilonGreedy must be a finite number >= 0 and <= 1"):
        EpsilonGreedy(2, epsilon=1.5)
