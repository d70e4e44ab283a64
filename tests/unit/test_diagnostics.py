"""Figures about a posterior against closed forms, and what a run records of them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import digamma
from scipy.stats import multivariate_normal, norm
from torch import Tensor

from ensemblepp.agents import (
    Greedy,
    LinearAgent,
    LinearEnsemblePP,
    LinearEnsembleSampling,
    LinearThompsonSampling,
    LinUCB,
)
from ensemblepp.diagnostics import PosteriorDiagnostics, calibration_against, joint_log_loss, predictive_coverage
from ensemblepp.envs import ClassificationBandit, LinearBandit
from ensemblepp.errors import ParameterError
from ensemblepp.host_sync import forbid_host_sync
from ensemblepp.indices import IndexDistribution
from ensemblepp.linear import LinearPosterior
from ensemblepp.runs import logged_steps, run_bandit
from ensemblepp.seeding import make_generator
from ensemblepp.store import RunFolder
from ensemblepp.types import Decision, Feedback, Predictive, TestPoints, Transition


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=dtype)


class Judged(LinearBandit):
    """A linear bandit with test points of its own."""

    def draw_test_points(self, count: int) -> TestPoints:
        generator = make_generator(11, "test points")
        features = torch.randn(self.num_replicas, count, self.feature_dim, generator=generator, dtype=self.dtype)
        mean = torch.einsum("rnd,rd->rn", features, self.parameter)
        noise = torch.randn(mean.shape, generator=generator, dtype=self.dtype)
        return TestPoints(features, None, mean, mean + self.noise_scale * noise)


def problem(**options: Any) -> tuple[LinearEnsemblePP, Judged]:
    shared = {"num_replicas": 3, "seed": 5, **options}
    return LinearEnsemblePP(4, prior_covariance=10.0, **shared), Judged(4, 20, **shared)


def judge(environment: Judged, count: int = 12, exact: bool = True, **options: Any) -> PosteriorDiagnostics:
    prior = LinearPosterior(environment.feature_dim, num_replicas=environment.num_replicas, prior_covariance=10.0)
    return PosteriorDiagnostics.from_environment(environment, count, 1.0, exact=prior if exact else None, **options)


# The figures


def test_joint_log_loss_of_a_gaussian_posterior_is_its_log_density() -> None:
    replicas, points, size, num_samples, eta = 2, 6, 3, 100_000, 0.7
    mean, root = normal(replicas, points), 0.8 * normal(replicas, points, points, seed=1)
    reward = mean + normal(replicas, points, seed=2)
    samples = mean.unsqueeze(1) + normal(replicas, num_samples, points, seed=3) @ root.mT
    loss = joint_log_loss(samples, reward, eta, size)
    for r in range(replicas):
        exact, variance = 0.0, 0.0
        for g in range(points // size):
            group = slice(g * size, (g + 1) * size)
            covariance = (root[r] @ root[r].T)[group, group] + eta**2 * torch.eye(size)
            exact -= multivariate_normal.logpdf(reward[r, group], mean[r, group], covariance) / (points // size)
            # The loss is a logarithm of a mean: its standard error is the relative one of that mean.
            density = norm.pdf(reward[r, group], samples[r, :, group], eta).prod(-1)
            variance += (density.std() / density.mean()) ** 2 / num_samples / (points // size) ** 2
        assert abs(float(loss[r]) - exact) < 4 * math.sqrt(variance)
        assert 4 * math.sqrt(variance) < 0.1  # or the line above would say little


def test_joint_log_loss_of_two_samples_by_hand() -> None:
    samples = torch.tensor([[[0.0, 1.0], [2.0, 3.0]]], dtype=torch.float64)
    reward = torch.tensor([[0.0, 3.0]], dtype=torch.float64)
    p = norm.pdf
    marginal = -(math.log((p(0) + p(2)) / 2) + math.log((p(2) + p(0)) / 2)) / 2
    joint = -math.log((p(0) * p(2) + p(2) * p(0)) / 2)
    assert float(joint_log_loss(samples, reward, 1.0, 1)) == pytest.approx(marginal)
    assert float(joint_log_loss(samples, reward, 1.0, 2)) == pytest.approx(joint)


def test_joint_log_loss_sees_dependence_that_the_marginal_one_cannot() -> None:
    step = torch.tensor([-1.0, 1.0]).view(1, 2, 1)
    together = step * torch.tensor([1.0, 1.0])
    opposed = step * torch.tensor([1.0, -1.0])
    reward = torch.ones(1, 2)
    assert torch.equal(joint_log_loss(together, reward, 0.5, 1), joint_log_loss(opposed, reward, 0.5, 1))
    assert joint_log_loss(together, reward, 0.5, 2) < joint_log_loss(opposed, reward, 0.5, 2) - 1


def test_joint_log_loss_is_stable_far_from_all_samples() -> None:
    loss = joint_log_loss(torch.zeros(1, 5, 2), torch.full((1, 2), 1e4), 1.0, 2)
    assert float(loss) == pytest.approx(1e8, rel=1e-6)


def test_points_that_fill_no_group_are_left_out_and_noise_may_differ_by_replica() -> None:
    samples, reward = normal(2, 4, 5), normal(2, 5, seed=1)
    whole = joint_log_loss(samples[..., :4], reward[:, :4], 0.5, 2)
    assert torch.equal(joint_log_loss(samples, reward, 0.5, 2), whole)
    each = joint_log_loss(samples, reward, torch.tensor([0.5, 2.0]), 2)
    assert float(each[0]) == pytest.approx(float(whole[0]))
    assert float(each[1]) == pytest.approx(float(joint_log_loss(samples, reward, 2.0, 2)[1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"joint_size": 6}, "joint_size of joint_log_loss must be at most the number of points, 5; got 6"),
        ({"joint_size": 0}, "joint_size of joint_log_loss must be an int >= 1; got 0"),
        ({"noise_scale": 0.0}, "noise_scale of joint_log_loss must be a finite number > 0; got 0.0"),
        ({"noise_scale": torch.tensor([1.0, -1.0])}, "noise_scale of joint_log_loss must be positive; got -1.0"),
        ({"noise_scale": torch.ones(3)}, r"noise_scale of joint_log_loss must have shape \(replicas\) = \(2\)"),
        ({"samples": torch.zeros(2, 0, 5)}, "samples of joint_log_loss must hold a sample and a point at least"),
    ],
)
def test_joint_log_loss_refuses_by_name(changes: dict[str, Any], message: str) -> None:
    options = {"samples": torch.zeros(2, 4, 5), "reward": torch.zeros(2, 5), "noise_scale": 1.0, "joint_size": 1}
    with pytest.raises(ParameterError, match=message):
        joint_log_loss(**options | changes)


def test_coverage_of_a_mixture_by_its_distribution_function() -> None:
    reward = torch.tensor([[1.64, 1.65, -1.64, -1.65]], dtype=torch.float64)
    assert float(predictive_coverage(torch.zeros(1, 3, 4, dtype=torch.float64), reward, 1.0)) == 0.5
    # Half of the mass far left, half far right: the central 90 % reaches both, and the tails beyond are outside.
    samples = torch.tensor([-10.0, 10.0], dtype=torch.float64).view(1, 2, 1).expand(1, 2, 3)
    ends = 10 + norm.ppf(0.9)  # 1/2 + 0.9 / 2 = 0.95
    reward = torch.tensor([[0.0, ends - 1e-6, ends + 1e-6]], dtype=torch.float64)
    assert float(predictive_coverage(samples, reward, 1.0)) == pytest.approx(2 / 3)
    assert float(predictive_coverage(samples, reward, 1.0, level=0.99)) == 1.0
    with pytest.raises(ParameterError, match="level of predictive_coverage must be below 1; got 1"):
        predictive_coverage(samples, reward, 1.0, level=1.0)


@pytest.mark.statistical
def test_a_calibrated_posterior_covers_what_it_says() -> None:
    replicas, eta = 4000, 0.5
    samples = normal(replicas, 2000, 1)
    reward = normal(replicas, 1, seed=1) + eta * normal(replicas, 1, seed=2)
    share = float(predictive_coverage(samples, reward, eta).mean())
    assert abs(share - 0.9) < 4 * math.sqrt(0.09 / replicas)


def test_calibration_against_the_exact_posterior_in_closed_form() -> None:
    mean, exact_mean = normal(2, 7), normal(2, 7, seed=1)
    sd, exact_sd = normal(2, 7, seed=2).exp(), normal(2, 7, seed=3).exp()
    figures = calibration_against(mean, sd, exact_mean, exact_sd)
    exact, agent = torch.distributions.Normal(exact_mean, exact_sd), torch.distributions.Normal(mean, sd)
    kl = torch.distributions.kl_divergence(exact, agent).mean(-1)
    torch.testing.assert_close(figures["kl"], kl)
    torch.testing.assert_close(figures["sd_log_ratio"], (sd.log() - exact_sd.log()).mean(-1))
    torch.testing.assert_close(figures["mean_error"], ((mean - exact_mean) / exact_sd).square().mean(-1).sqrt())
    for value in calibration_against(exact_mean, exact_sd, exact_mean, exact_sd).values():
        torch.testing.assert_close(value, torch.zeros(2, dtype=torch.float64))
    assert calibration_against(mean, 0 * sd, exact_mean, exact_sd)["kl"].isposinf().all()
    with pytest.raises(ParameterError, match="exact_sd of calibration_against must be positive; got 0"):
        calibration_against(mean, sd, exact_mean, 0 * exact_sd)


# Posterior samples of linear agents


def taught(agent: LinearAgent) -> LinearAgent:
    size = (agent.num_replicas, 15)
    arm = None
    if agent.num_arms is not None:
        arm = torch.randint(agent.num_arms, size, generator=make_generator(4, "arm"))
    agent.update(Transition(normal(*size, agent.feature_dim, seed=5), normal(*size, seed=6), arm))
    return agent


@pytest.mark.parametrize("num_arms", [None, 3])
def test_one_index_makes_one_joint_sample_over_all_points(num_arms: int | None) -> None:
    agent = taught(LinearEnsemblePP(4, index_dim=6, num_arms=num_arms, num_replicas=2, dtype=torch.float64))
    points, arm = normal(2, 7, 4, seed=8), torch.randint(3, (2, 7), generator=make_generator(9, "arm"))
    samples = agent.posterior_samples(points, arm, 5, make_generator(1, "eval"))
    index = IndexDistribution("gaussian", 6).reference(2, 5, generator=make_generator(1, "eval"), dtype=torch.float64)
    parameter = agent.posterior.sample(index)
    for r in range(2):
        for s in range(5):
            for n in range(7):
                theta = parameter[r, s] if num_arms is None else parameter[r, s, arm[r, n]]
                assert float(samples[r, s, n]) == pytest.approx(float(points[r, n] @ theta))


@pytest.mark.statistical
@pytest.mark.parametrize("num_arms", [None, 2])
def test_exact_samples_have_the_posterior_s_mean_and_covariance(num_arms: int | None) -> None:
    agent = taught(LinearThompsonSampling(3, num_arms=num_arms, exploration_scale=0.1, dtype=torch.float64))
    points, arm = normal(1, 4, 3, seed=8), torch.tensor([[0, 1, 0, 1]])
    num_samples = 200_000
    samples = agent.posterior_samples(points, arm, num_samples, make_generator(1, "eval"))[0]
    mean, covariance = agent.posterior.mean[0], agent.posterior.covariance[0]
    if num_arms is None:
        expected, spread = points[0] @ mean, points[0] @ covariance @ points[0].T
    else:
        expected = (points[0] * mean[arm[0]]).sum(-1)
        blocks = torch.einsum("nd,nde,me->nm", points[0], covariance[arm[0]], points[0])
        spread = torch.where(arm[0][:, None] == arm[0], blocks, 0.0)
    sd = spread.diagonal().sqrt()
    assert ((samples.mean(0) - expected).abs() < 4.5 * sd / math.sqrt(num_samples)).all()
    assert ((samples.T.cov() - spread).abs() < 4.5 * sd[:, None] * sd * math.sqrt(2 / num_samples)).all()


def test_ensemble_sampling_predicts_with_one_of_its_models_whatever_it_explores() -> None:
    agent = taught(LinearEnsembleSampling(3, index_dim=4, exploration_scale=0.1, dtype=torch.float64))
    points = normal(1, 2, 3, seed=8)
    samples = agent.posterior_samples(points, None, 50, make_generator(1, "eval"))[0]
    models = agent.posterior.mean[0, :, None] + 2.0 * agent.posterior.factor[0]
    predictions = (points[0] @ models).T
    distance = torch.cdist(samples, predictions)
    assert distance.amin(1).max() < 1e-6
    assert distance.argmin(1).unique().numel() == 4


@pytest.mark.parametrize("agent", [LinearEnsemblePP(3), LinearThompsonSampling(3), LinearEnsembleSampling(3)])
def test_predicting_leaves_the_agent_as_it_is(agent: LinearAgent) -> None:
    before = agent.state_dict()
    assert isinstance(agent, Predictive)
    agent.posterior_samples(torch.zeros(1, 2, 3), None, 4, make_generator(1, "eval"))
    torch.testing.assert_close(agent.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Greedy, LinUCB])
def test_agents_that_never_sample_refuse(kind: Any) -> None:
    with pytest.raises(
        ParameterError, match=f"agent of posterior_samples must sample .*; got {kind.__name__}. Use Lin"
    ):
        kind(3).posterior_samples(torch.zeros(1, 2, 3), None, 4, make_generator(1, "eval"))


@pytest.mark.parametrize(
    ("points", "arm", "num_samples", "message"),
    [
        (torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.int64), 3, "features of LinearEnsemblePP must have shape"),
        (torch.zeros(1, 2, 3), None, 3, "arm of LinearEnsemblePP must be a tensor"),
        (torch.zeros(1, 2, 3), torch.tensor([[0, 2]]), 3, r"arm of LinearEnsemblePP must be in \[0, 2\); got 2"),
        (torch.zeros(1, 2, 3), torch.tensor([[0, 1]]), 0, "num_samples of LinearEnsemblePP must be an int >= 1; got 0"),
    ],
)
def test_points_that_do_not_fit_are_refused(points: Tensor, arm: Any, num_samples: int, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        LinearEnsemblePP(3, num_arms=2).posterior_samples(points, arm, num_samples, make_generator(1, "eval"))


# Diagnostics of a run


@pytest.mark.statistical
@pytest.mark.parametrize("num_arms", [None, 3])
def test_the_exact_agent_is_as_far_from_exact_as_its_samples_are_few(num_arms: int | None) -> None:
    replicas, count, num_samples = 400, 4, 50
    shared: dict[str, Any] = {"num_replicas": replicas, "num_arms": num_arms, "dtype": torch.float64}
    agent, exact = LinearThompsonSampling(3, **shared), LinearPosterior(3, **shared)
    small = LinearEnsemblePP(3, index_dim=2, **shared)
    arm = None if num_arms is None else torch.randint(3, (replicas, count), generator=make_generator(0, "arm"))
    reward = normal(replicas, count, seed=2)
    points = TestPoints(normal(replicas, count, 3, seed=1), arm, reward, reward)
    diagnostics = PosteriorDiagnostics(points, 1.0, num_samples=num_samples, exact=exact)
    for step in range(6):
        played = None if arm is None else arm[:, :1]
        transition = Transition(normal(replicas, 1, 3, seed=10 + step), normal(replicas, 1, seed=20 + step), played)
        diagnostics.observe(transition)
        for learner in (agent, small):
            learner.update(transition)
    kl = diagnostics.evaluate(agent, 6)["eval/kl_exact"]
    # For m and s of n Gaussian samples: E log(s / sigma) and E (1 + error^2) / (2 (s / sigma)^2), error^2 ~ 1 / n.
    n = num_samples
    expected = (digamma((n - 1) / 2) - math.log((n - 1) / 2)) / 2 + (1 + 1 / n) * (n - 1) / (n - 3) / 2 - 0.5
    assert expected == pytest.approx(1 / n, rel=0.2)
    assert abs(float(kl.mean()) - expected) < 4 * float(kl.std()) / math.sqrt(replicas)
    assert diagnostics.evaluate(small, 6)["eval/kl_exact"].mean() > 5 * expected


def test_diagnostics_change_nothing_but_what_is_recorded() -> None:
    plain = run_bandit(*problem(), horizon=300)
    agent, environment = problem()
    judged = run_bandit(agent, environment, horizon=300, diagnostics=judge(environment))
    np.testing.assert_array_equal(judged.cumulative_regret, plain.cumulative_regret)
    np.testing.assert_array_equal(judged.rewards, plain.rewards)
    names = {"eval/joint_log_loss", "eval/marginal_log_loss", "eval/coverage_90", "eval/kl_exact"}
    assert set(judged.metrics) - set(plain.metrics) == names
    for name in names:
        measured = np.isfinite(judged.metrics[name])
        assert (measured == measured[0]).all()
        assert 10 < measured[0].sum() <= 20
        assert measured[0, -1]
    loss = judged.metrics["eval/marginal_log_loss"]
    seen = loss[:, np.isfinite(loss[0])]
    assert seen[:, -1].mean() < seen[:, 0].mean()  # learning pays


def test_figures_of_a_run_are_those_of_the_agent_it_ends_with() -> None:
    agent, environment = problem()
    diagnostics = judge(environment, num_samples=200, joint_size=5)
    runs = run_bandit(agent, environment, horizon=50, diagnostics=diagnostics)
    points, generator = diagnostics.points, make_generator(0, "posterior diagnostics at step 50")
    samples = agent.posterior_samples(points.features, None, 200, generator)
    loss = joint_log_loss(samples, points.reward, 1.0, 5)
    np.testing.assert_allclose(runs.metrics["eval/joint_log_loss"][:, -1], loss, rtol=1e-6)
    assert diagnostics.exact is not None
    torch.testing.assert_close(diagnostics.exact.mean, agent.posterior.mean)


def test_judging_never_waits_for_the_device() -> None:
    agent, environment = problem()
    diagnostics = judge(environment)
    contexts, _ = environment.observe()
    decision = agent.act(contexts)
    transition = Transition(decision.features, torch.ones(3, 1), decision.arm)
    with forbid_host_sync():
        diagnostics.observe(transition)
        diagnostics.evaluate(agent, 1)


def test_results_hold_only_the_steps_where_a_metric_was_measured(tmp_path: Path) -> None:
    agent, environment = problem()
    path = tmp_path / "run"
    names = {"agent": "a", "environment": "e", "seed": 5, "num_replicas": 3, "horizon": 100}
    folder = RunFolder.create(path, {}, **names)  # type: ignore[arg-type]
    diagnostics = judge(environment, exact=False, num_evaluations=4)
    run_bandit(agent, environment, 100, folder=folder, tensorboard=True, diagnostics=diagnostics)
    results = RunFolder.open(path).read_results()
    assert "eval/kl_exact" not in results
    steps, values = results["eval/joint_log_loss"]
    assert set(steps) == diagnostics.choose_steps(logged_steps(100))
    assert np.isfinite(values).all()
    assert len(results["regret/cumulative"][0]) == len(logged_steps(100))
    assert "nan" not in (path / "results.csv").read_text()
    assert "stopped" not in json.loads((path / "summary.json").read_text())

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard")).Reload().Scalars("eval/joint_log_loss")
    assert [event.step for event in events] == list(steps)
    np.testing.assert_allclose([event.value for event in events], values.mean(0), rtol=1e-5)


def test_a_resumed_run_measures_what_the_uninterrupted_one_does(tmp_path: Path) -> None:
    agent, environment = problem()
    whole = run_bandit(agent, environment, 80, diagnostics=judge(environment))

    class Stop(Exception):
        pass

    class Breaking(Judged):
        count = 0

        def step(self, decision: Decision) -> Feedback:
            self.count += 1
            if self.count > 50:
                raise Stop
            return super().step(decision)

    names: dict[str, Any] = {"agent": "a", "environment": "e", "seed": 5, "num_replicas": 3, "horizon": 80}
    folder = RunFolder.create(tmp_path / "run", {}, **names)
    broken = Breaking(4, 20, num_replicas=3, seed=5)
    with pytest.raises(Stop):
        run_bandit(problem()[0], broken, 80, folder=folder, checkpoint_period=20, diagnostics=judge(broken))
    agent, environment = problem()
    with pytest.raises(ParameterError, match="diagnostics of run_bandit must be given exactly where the saved run had"):
        run_bandit(agent, environment, 80, folder=folder)
    with pytest.raises(ParameterError, match="exact of PosteriorDiagnostics must be given exactly where the saved run"):
        run_bandit(agent, environment, 80, folder=folder, diagnostics=judge(environment, exact=False))
    with pytest.raises(ParameterError, match=r"points.features of PosteriorDiagnostics must have shape"):
        run_bandit(agent, environment, 80, folder=folder, diagnostics=judge(environment, count=3))
    resumed = run_bandit(agent, environment, 80, folder=folder, checkpoint_period=20, diagnostics=judge(environment))
    assert set(resumed.metrics) == set(whole.metrics)
    for name, values in whole.metrics.items():
        np.testing.assert_array_equal(resumed.metrics[name], values)


@pytest.mark.parametrize(("horizon", "count"), [(1, 20), (7, 20), (300, 1), (300, 20), (10_000, 20), (10_000, 10**6)])
def test_evaluations_are_few_logged_and_hold_the_last(horizon: int, count: int) -> None:
    environment = problem()[1]
    steps = logged_steps(horizon)
    chosen = judge(environment, num_evaluations=count).choose_steps(steps)
    assert chosen <= set(steps.tolist())
    assert horizon in chosen
    assert min(count, len(steps) - 1, 10) <= len(chosen) <= count


def test_what_cannot_be_judged_is_refused_before_anything_runs() -> None:
    _, environment = problem()
    diagnostics = judge(environment)
    with pytest.raises(ParameterError, match="agent of posterior_samples must sample from its posterior; got Greedy"):
        run_bandit(Greedy(4, num_replicas=3), environment, 10, diagnostics=diagnostics)

    class Mute:
        pass

    with pytest.raises(ParameterError, match="agent of PosteriorDiagnostics must have posterior_samples; got Mute"):
        diagnostics.check_agent(Mute())
    with pytest.raises(
        ParameterError, match="environment of PosteriorDiagnostics must have draw_test_points; got Mute"
    ):
        PosteriorDiagnostics.from_environment(Mute(), 5, 1.0)
    with pytest.raises(ParameterError, match="count of PosteriorDiagnostics must be an int >= 1; got 0"):
        judge(environment, count=0)
    points = environment.draw_test_points(5)
    with pytest.raises(ParameterError, match=r"exact.num_replicas of PosteriorDiagnostics must be 3; got 2"):
        PosteriorDiagnostics(points, 1.0, exact=LinearPosterior(4, num_replicas=2))
    with pytest.raises(ParameterError, match=r"exact.num_arms of PosteriorDiagnostics must be set exactly where"):
        PosteriorDiagnostics(points, 1.0, exact=LinearPosterior(4, num_replicas=3, num_arms=2))
    with pytest.raises(ParameterError, match="num_samples of PosteriorDiagnostics must be an int >= 2; got 1"):
        PosteriorDiagnostics(points, 1.0, num_samples=1)


def test_an_arm_s_own_posterior_is_judged_at_that_arm() -> None:
    class JudgedDigits(ClassificationBandit):
        def draw_test_points(self, count: int) -> TestPoints:
            features = normal(self.num_replicas, count, self.feature_dim, dtype=torch.float32)
            arm = torch.randint(10, (self.num_replicas, count), generator=make_generator(1, "arm"))
            reward = torch.zeros(self.num_replicas, count)
            return TestPoints(features, arm, reward, reward)

    environment = JudgedDigits("digits", num_replicas=2)
    options: dict[str, Any] = {"num_arms": 10, "num_replicas": 2, "noise_scale": 0.3, "prior_covariance": 0.015}
    exact = LinearPosterior(environment.feature_dim, **options)
    diagnostics = PosteriorDiagnostics.from_environment(environment, 6, 0.3, exact=exact, num_samples=400)
    agent = LinearThompsonSampling(environment.feature_dim, **options)
    runs = run_bandit(agent, environment, 40, diagnostics=diagnostics)
    # About 1 / num_samples = 0.0025 for an exact agent.
    assert runs.metrics["eval/kl_exact"][:, -1].max() < 0.05
