"""Replicas whose learning becomes non-finite: the others go on, and nobody averages the stopped ones away."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from ensemblepp.agents import LinearEnsemblePP
from ensemblepp.envs import LinearBandit
from ensemblepp.intervals import bootstrap_interval
from ensemblepp.report import build_report
from ensemblepp.runs import BanditRuns, LearningStopped, logged_steps, run_bandit
from ensemblepp.store import RunFolder, RunFolderError
from ensemblepp.types import Decision, Feedback, StateDict, Stoppable, Transition

NEVER = 10**9


class Diverging(LinearEnsemblePP):
    """Linear Ensemble++ whose replicas stop at given numbers of data; "train/loss" is told at every third update."""

    def __init__(self, *stops: int, **options: Any) -> None:
        super().__init__(4, num_replicas=len(stops), seed=5, **options)
        self._stops = torch.tensor(stops)
        self._seen = 0
        self._stopped = torch.full((len(stops),), -1)
        self.reads = 0

    @property
    def stopped(self) -> Tensor:
        self.reads += 1
        return self._stopped

    def scores(self, contexts: Tensor, index: Tensor | None) -> Tensor:
        return torch.where((self._stopped >= 0).view(-1, 1, 1), 0.0, super().scores(contexts, index))

    def update(self, transition: Transition) -> dict[str, Tensor]:
        metrics = super().update(transition)
        self._seen += transition.reward.shape[1]
        now = (self._stopped < 0) & (self._seen >= self._stops)
        self._stopped = torch.where(now, self._seen, self._stopped)
        return metrics | ({"train/loss": transition.reward.square()} if self._seen % 3 == 0 else {})

    def state_dict(self) -> StateDict:
        return super().state_dict() | {"stopped": self._stopped, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._stopped, self._seen = state["stopped"], state["seen"]


class Counting(LinearBandit):
    """A linear bandit that counts its steps and can break."""

    steps = 0
    breaks_at = NEVER

    def step(self, decision: Decision) -> Feedback:
        self.steps += 1
        if self.steps >= self.breaks_at:
            raise InterruptedError
        return super().step(decision)


def play(*stops: int, horizon: int = 40, **options: Any) -> BanditRuns:
    return run_bandit(Diverging(*stops), environment(len(stops)), horizon, **options)


def environment(replicas: int) -> Counting:
    return Counting(4, 20, num_replicas=replicas, seed=5)


def prepare(path: Path, replicas: int, horizon: int = 40) -> RunFolder:
    names: dict[str, Any] = {"agent": "diverging", "environment": "linear", "seed": 5}
    return RunFolder.create(path, {"a": 1}, num_replicas=replicas, horizon=horizon, **names)


def test_a_stopped_replica_is_nan_from_its_step_on_and_the_others_do_not_notice() -> None:
    assert isinstance(Diverging(1), Stoppable)
    assert not isinstance(LinearEnsemblePP(4), Stoppable)
    plain = play(NEVER, NEVER, NEVER)
    runs = play(NEVER, 7, NEVER)
    assert plain.stopped == {}
    assert runs.stopped == {1: 7}
    for name in ("cumulative_regret", "rewards"):
        values, whole = getattr(runs, name), getattr(plain, name)
        np.testing.assert_array_equal(values[[0, 2]], whole[[0, 2]])
        np.testing.assert_array_equal(values[1, :6], whole[1, :6])
        assert np.isnan(values[1, 6:]).all()
    steps = logged_steps(40)
    error = runs.metrics["train/prediction_error"]
    np.testing.assert_array_equal(np.isnan(error[1]), steps >= 7)
    assert np.isfinite(error[[0, 2]]).all()


def test_a_metric_is_nan_where_it_was_not_measured() -> None:
    loss = play(NEVER, 7).metrics["train/loss"]
    steps = logged_steps(40)
    np.testing.assert_array_equal(np.isfinite(loss[0]), steps % 3 == 0)
    np.testing.assert_array_equal(np.isfinite(loss[1]), (steps % 3 == 0) & (steps < 7))


def test_the_summary_speaks_for_those_that_finished_and_says_how_many() -> None:
    runs = play(NEVER, 7, NEVER, NEVER)
    regret = runs.summary()["regret/cumulative"]
    assert (regret.count, regret.missing) == (3, 1)
    assert regret.estimate == pytest.approx(runs.cumulative_regret[[0, 2, 3], -1].mean())
    alone = bootstrap_interval(runs.cumulative_regret[[0, 2, 3], -1])
    assert (regret.low, regret.high) == (alone.low, alone.high)
    assert str(regret).endswith("(1 missing)")
    assert runs.summary()["reward/mean"].missing == 1


def test_the_run_folder_keeps_the_others_and_names_the_stopped(tmp_path: Path) -> None:
    runs = play(NEVER, 7, NEVER, folder=prepare(tmp_path / "run", 3), tensorboard=True)
    run = RunFolder.open(tmp_path / "run")
    assert (run.status, run.manifest.error, run.manifest.stopped) == ("finished", None, {1: 7})
    assert json.loads((run.path / "manifest.json").read_text())["stopped"] == {"1": 7}
    assert run.read_summary()["stopped"] == {"1": 7}
    assert run.read_summary()["regret/cumulative"]["missing"] == 1
    np.testing.assert_array_equal(run.read_regret()[1], runs.cumulative_regret)
    results = run.read_results()
    np.testing.assert_array_equal(results["regret/cumulative"][1], runs.cumulative_regret[:, logged_steps(40) - 1])
    steps, loss = results["train/loss"]
    assert list(steps) == [step for step in logged_steps(40) if step % 3 == 0]
    assert np.isfinite(loss[[0, 2]]).all()
    np.testing.assert_array_equal(np.isnan(loss[1]), steps >= 7)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/stopped_replicas")][5:7] == [(6, 0), (7, 1)]
    running = [np.delete(runs.cumulative_regret, 1, axis=0), runs.cumulative_regret]
    for event in events.Scalars("regret/cumulative"):
        assert event.value == pytest.approx(running[event.step < 7][:, event.step - 1].mean(), rel=1e-5)
    assert {event.step % 3 for event in events.Scalars("train/loss")} == {0}


@pytest.mark.parametrize(
    ("stopped", "replicas", "rest"),
    [
        ({3: 512}, 16, "the other 15 replicas are kept"),
        ({0: 2, 3: 512}, 16, "the other 14 replicas are kept"),
        ({0: 512}, 2, "the other replica is kept"),
        ({0: 512}, 1, "no replica is left"),
    ],
)
def test_each_stopped_replica_gets_a_line(tmp_path: Path, stopped: dict[int, int], replicas: int, rest: str) -> None:
    folder = prepare(tmp_path / "run", replicas, horizon=1000)
    folder.note_stopped(stopped)
    lines = RunFolder.open(tmp_path / "run").manifest.describe_stopped()
    replica = max(stopped)
    assert len(lines) == len(stopped)
    assert lines[-1] == f"replica {replica} stopped at step 512: its training loss was not finite; {rest}"
    folder.resume()
    assert RunFolder.open(tmp_path / "run").manifest.describe_stopped() == []


def test_a_resumed_run_knows_who_stopped(tmp_path: Path) -> None:
    whole = play(NEVER, 7, 30)
    folder, breaking = prepare(tmp_path / "run", 3), environment(3)
    breaking.breaks_at = 25
    with pytest.raises(InterruptedError):
        run_bandit(Diverging(NEVER, 7, 30), breaking, 40, folder=folder, checkpoint_period=10)
    assert RunFolder.open(tmp_path / "run").status == "failed"
    resumed = play(NEVER, 7, 30, folder=folder, checkpoint_period=10)
    assert resumed.stopped == whole.stopped == {1: 7, 2: 30}
    np.testing.assert_array_equal(resumed.cumulative_regret, whole.cumulative_regret)
    assert set(resumed.metrics) == set(whole.metrics)
    for name, values in whole.metrics.items():
        np.testing.assert_array_equal(resumed.metrics[name], values)
    assert folder.manifest.stopped == {1: 7, 2: 30}


def test_a_run_without_a_replica_left_ends_early_with_what_came_before(tmp_path: Path) -> None:
    folder, problem = prepare(tmp_path / "run", 2), environment(2)
    told = "every replica of diverging stopped because .*: replica 0 at step 9, replica 1 at step 7"
    with pytest.raises(LearningStopped, match=told) as error:
        run_bandit(Diverging(9, 7), problem, 40, folder=folder)
    assert problem.steps == 9
    runs = error.value.runs
    whole = play(NEVER, NEVER)
    np.testing.assert_array_equal(runs.cumulative_regret[0, :8], whole.cumulative_regret[0, :8])
    np.testing.assert_array_equal(runs.cumulative_regret[1, :6], whole.cumulative_regret[1, :6])
    assert np.isnan(runs.cumulative_regret[0, 8:]).all()
    assert np.isnan(runs.cumulative_regret[1, 6:]).all()
    run = RunFolder.open(tmp_path / "run")
    assert (run.status, run.manifest.stopped) == ("failed", {0: 9, 1: 7})
    assert re.search(told, str(run.manifest.error))
    np.testing.assert_array_equal(run.read_regret()[1], runs.cumulative_regret)
    assert run.read_summary()["regret/cumulative"]["estimate"] is None
    # Once more: the checkpoint knows that nobody is left.
    run.resume()
    problem = environment(2)
    with pytest.raises(LearningStopped, match=told):
        run_bandit(Diverging(9, 7), problem, 40, folder=run)
    assert problem.steps == 0
    assert RunFolder.open(tmp_path / "run").status == "failed"


def test_runs_without_a_replica_left_are_saved_as_failed(tmp_path: Path) -> None:
    with pytest.raises(LearningStopped) as error:
        play(3, 3)
    saved = error.value.runs.save(tmp_path / "run")
    assert saved.status == "failed"
    assert math.isnan(error.value.runs.summary()["regret/cumulative"].estimate)


def test_who_stopped_is_asked_at_logged_steps_and_checkpoints_only() -> None:
    horizon = 3000
    agent = Diverging(NEVER, NEVER)
    run_bandit(agent, environment(2), horizon, checkpoint_period=7)
    points = set(logged_steps(horizon).tolist()) | set(range(7, horizon, 7))
    assert agent.reads <= len(points) + 2  # and once to see that there is something to ask, and at the end


def test_the_step_is_found_from_the_data_where_a_step_brings_several() -> None:
    class Slots(LinearBandit):
        """Every replica decides in three slots at a time."""

        def observe(self) -> tuple[Tensor, None]:
            contexts = super().observe()[0]
            assert isinstance(contexts, Tensor)
            return contexts.expand(-1, 3, -1, -1), None

        def step(self, decision: Decision) -> Feedback:
            return Feedback(decision.features.sum(-1), torch.ones(decision.features.shape[:2]))

    runs = run_bandit(Diverging(NEVER, 8), Slots(4, 20, num_replicas=2), 10)
    assert runs.stopped == {1: 3}  # data 7 to 9 came at step 3
    np.testing.assert_array_equal(np.isnan(runs.cumulative_regret[1]), np.arange(1, 11) >= 3)


def test_a_report_counts_and_names_the_stopped(tmp_path: Path) -> None:
    play(NEVER, 7, NEVER, folder=prepare(tmp_path / "some", 3))
    with pytest.raises(LearningStopped):
        play(5, 5, folder=prepare(tmp_path / "all", 2))
    stream = io.StringIO()
    report = build_report([tmp_path], console=Console(file=stream, width=200))
    ((row,),) = (section.rows for section in report.sections)
    assert (row.num_replicas, row.final.count, row.final.missing) == (3, 2, 1)
    (problem,) = report.problems
    assert (problem.name, problem.status) == ("all", "failed")
    assert "replica 0 at step 5, replica 1 at step 5" in problem.detail
    line = "replica 1 stopped at step 7: its training loss was not finite; the other 2 replicas are kept"
    assert f"stopped: some (seed 5): {line}" in stream.getvalue()
    page = report.page.read_text()
    assert "<h2>Replicas that stopped</h2>" in page
    assert line in page
    play(NEVER, NEVER, folder=prepare(tmp_path / "whole" / "run", 2))
    report = build_report([tmp_path / "whole"], console=Console(file=io.StringIO()))
    assert "Replicas that stopped" not in report.page.read_text()


@pytest.mark.parametrize("stopped", [{"x": 3}, {"2": 3}, {"-1": 3}, {"1": 0}, {"1": 41}, {"1": True}, {"1": "3"}])
def test_a_manifest_that_names_nonsense_is_refused(tmp_path: Path, stopped: dict[str, Any]) -> None:
    file = prepare(tmp_path / "run", 2).path / "manifest.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"stopped": stopped}))
    with pytest.raises(
        RunFolderError, match=r"manifest.json holds stopped = .*; it must name replicas and their steps"
    ):
        RunFolder.open(tmp_path / "run")


def test_a_manifest_from_before_replicas_could_stop_is_read(tmp_path: Path) -> None:
    file = prepare(tmp_path / "run", 2).path / "manifest.json"
    content = json.loads(file.read_text())
    del content["stopped"]
    file.write_text(json.dumps(content))
    assert RunFolder.open(tmp_path / "run").manifest.stopped == {}
