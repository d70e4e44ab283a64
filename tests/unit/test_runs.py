"""The bandit loop: what it records, where it stores it, and how it resumes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ensemblepp.agents import LinearEnsemblePP, LinearThompsonSampling, Uniform
from ensemblepp.envs import ClassificationBandit, LinearBandit
from ensemblepp.errors import ParameterError
from ensemblepp.runs import MAX_LOGGED_STEPS, logged_steps, run_bandit
from ensemblepp.store import RunFolder
from ensemblepp.types import Decision, Feedback, Transition


def _problem(**options: object) -> tuple[LinearEnsemblePP, LinearBandit]:
    shared = {"num_replicas": 3, "seed": 5, **options}
    return LinearEnsemblePP(4, **shared), LinearBandit(4, 20, **shared)  # type: ignore[arg-type]


def _folder(path: Path, horizon: int) -> RunFolder:
    return RunFolder.create(
        path, {"a": 1}, agent="agent", environment="problem", seed=5, num_replicas=3, horizon=horizon
    )


class _Recorder(LinearBandit):
    """A linear bandit that remembers what it paid."""

    def __init__(self) -> None:
        super().__init__(4, 20, num_replicas=3, seed=5)
        self.paid: list[Feedback] = []

    def step(self, decision: Decision) -> Feedback:
        self.paid.append(super().step(decision))
        return self.paid[-1]


def test_cumulative_regret_is_the_running_sum_of_what_the_environment_reports() -> None:
    environment = _Recorder()
    runs = run_bandit(_problem()[0], environment, horizon=40)
    regret = torch.stack([feedback.regret[:, 0] for feedback in environment.paid], dim=1).double()
    np.testing.assert_allclose(runs.cumulative_regret, regret.cumsum(1), rtol=1e-12)
    reward = torch.stack([feedback.reward[:, 0] for feedback in environment.paid], dim=1)
    np.testing.assert_array_equal(runs.rewards, reward.double())
    assert runs.summary()["regret/cumulative"].estimate == pytest.approx(runs.cumulative_regret[:, -1].mean())


@pytest.mark.parametrize(("horizon", "count"), [(1, 1), (2, 2), (500, None), (10_000, None), (10**7, None)])
def test_logged_steps_are_few_increasing_and_hold_the_last(horizon: int, count: int | None) -> None:
    steps = logged_steps(horizon)
    assert steps[0] == 1
    assert steps[-1] == horizon
    assert (np.diff(steps) > 0).all()
    assert len(steps) <= MAX_LOGGED_STEPS
    assert count is None or len(steps) == count


def test_a_run_folder_holds_what_the_run_returned(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "run", 1500)
    runs = run_bandit(*_problem(), horizon=1500, folder=folder, tensorboard=True)
    opened = RunFolder.open(tmp_path / "run")
    assert opened.status == "finished"
    steps, regret = opened.read_regret()
    np.testing.assert_array_equal(steps, np.arange(1, 1501))
    np.testing.assert_array_equal(regret, runs.cumulative_regret)
    results = opened.read_results()
    assert set(results) == {"regret/cumulative", "reward/mean", "train/prediction_error"}
    points, values = results["reward/mean"]
    assert len(points) <= MAX_LOGGED_STEPS
    np.testing.assert_allclose(values[:, -1], runs.rewards.mean(axis=1))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["regret/cumulative"]["estimate"] == pytest.approx(runs.cumulative_regret[:, -1].mean())

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert {"regret/cumulative", "regret/instant", "rollout/ep_rew_mean"} <= set(events.Tags()["scalars"])
    last = events.Scalars("regret/cumulative")[-1]
    assert (last.step, last.value) == (1500, pytest.approx(runs.cumulative_regret[:, -1].mean(), rel=1e-5))


@pytest.mark.parametrize("stop", [100, 137])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, stop: int) -> None:
    whole = run_bandit(*_problem(), horizon=200)

    class Stop(Exception):
        pass

    class Breaking(LinearBandit):
        count = 0

        def step(self, decision: Decision) -> Feedback:
            self.count += 1
            if self.count > stop:
                raise Stop
            return super().step(decision)

    folder = _folder(tmp_path / "run", 200)
    with pytest.raises(Stop):
        run_bandit(_problem()[0], Breaking(4, 20, num_replicas=3, seed=5), 200, folder=folder, checkpoint_period=50)
    assert RunFolder.open(tmp_path / "run").status == "failed"
    folder = _folder(tmp_path / "run", 200)
    resumed = run_bandit(*_problem(), horizon=200, folder=folder, checkpoint_period=50)
    np.testing.assert_array_equal(resumed.cumulative_regret, whole.cumulative_regret)
    np.testing.assert_array_equal(resumed.rewards, whole.rewards)
    np.testing.assert_array_equal(resumed.metrics["train/prediction_error"], whole.metrics["train/prediction_error"])
    assert folder.status == "finished"


def test_sizes_that_do_not_fit_are_refused_before_anything_runs(tmp_path: Path) -> None:
    agent = LinearEnsemblePP(5, num_replicas=3)
    with pytest.raises(ParameterError, match="feature_dim of LinearEnsemblePP must equal the environment's 4; got 5"):
        run_bandit(agent, _problem()[1], horizon=10)
    with pytest.raises(ParameterError, match="num_arms of LinearEnsemblePP must equal the environment's 10; got None"):
        run_bandit(LinearEnsemblePP(65), ClassificationBandit("digits"), horizon=10)
    with pytest.raises(ParameterError, match="horizon of run_bandit must be an int >= 1; got 0"):
        run_bandit(*_problem(), horizon=0)
    with pytest.raises(ParameterError, match="tensorboard of run_bandit must come with a run folder"):
        run_bandit(*_problem(), horizon=10, tensorboard=True)


def test_a_small_ensemble_on_a_compact_action_set_is_warned_about() -> None:
    environment = LinearBandit(20, action_set="compact")
    with pytest.warns(UserWarning, match="index_dim of LinearEnsemblePP should be >= 26 on a compact action set"):
        run_bandit(LinearEnsemblePP(20, index_dim=8), environment, horizon=2)
    run_bandit(LinearEnsemblePP(20), environment, horizon=2)  # warnings are errors: the default is quiet


def test_runs_save_and_plot_without_a_prepared_folder(tmp_path: Path) -> None:
    runs = run_bandit(*_problem(), horizon=30)
    runs.plot(tmp_path / "regret.png")
    assert (tmp_path / "regret.png").stat().st_size > 10_000
    saved = runs.save(tmp_path / "run")
    np.testing.assert_array_equal(saved.read_regret()[1], runs.cumulative_regret)
    assert saved.manifest.agent == "LinearEnsemblePP"


def test_learning_beats_chance_on_digits() -> None:
    regret = {}
    for agent in (LinearThompsonSampling, LinearEnsemblePP, Uniform):
        environment = ClassificationBandit("digits", num_replicas=4, seed=1)
        learner = agent(environment.feature_dim, num_arms=10, num_replicas=4, prior_covariance=0.015, noise_scale=0.3)
        regret[agent] = run_bandit(learner, environment, 500).cumulative_regret[:, -1]
    # A uniform choice among ten arms is right one time in ten.
    assert abs(regret[Uniform].mean() - 450) < 4 * np.sqrt(500 * 0.09 / 4)
    assert regret[LinearThompsonSampling].max() < 400
    assert regret[LinearEnsemblePP].max() < 400


def test_a_slot_without_a_reward_changes_nothing() -> None:
    agent, environment = _problem()
    contexts, _ = environment.observe()
    decision = agent.act(contexts)
    before = agent.posterior.state.clone()
    observed = torch.tensor([[True], [False], [True]])
    reward = torch.tensor([[1.0], [torch.nan], [2.0]])
    agent.update(Transition(decision.features, reward, decision.arm, observed=observed))
    assert torch.equal(agent.posterior.state[1], before[1])
    assert not torch.equal(agent.posterior.state[0], before[0])
