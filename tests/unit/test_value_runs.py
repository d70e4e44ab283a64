"""The value loop: what it logs, when it evaluates, what it calls solved, and how a run continues."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ensemblepp.agents import DQN, HyperFQI
from ensemblepp.envs import DeepSea
from ensemblepp.errors import DivergenceError, ParameterError
from ensemblepp.store import RunFolder
from ensemblepp.value_evaluation import Evaluation, evaluate
from ensemblepp.value_records import EpisodeLog
from ensemblepp.value_runs import run_value
from ensemblepp.value_types import ValueStep


def agent(environment: Any, **options: Any) -> HyperFQI:
    defaults = {"index_dim": 4, "hidden_dims": [16, 16], "batch_size": 16, "random_steps": 5, "updates_per_step": 2}
    return HyperFQI(
        (),
        2,
        num_states=environment.num_states,
        num_replicas=environment.num_replicas,
        seed=1,
        **(defaults | options),
    )


def folder(path: Path, horizon: int) -> RunFolder:
    return RunFolder.create(
        path, {"a": 1}, agent="x", environment="y", seed=0, num_replicas=2, horizon=horizon, kind="value"
    )


class Script:
    """An environment of two replicas that answers from a list of (reward, terminated, truncated, valid) rows."""

    num_replicas, num_actions, num_states, can_restore = 2, 2, 3, False
    observation_shape: tuple[int, ...] = ()
    observation_dtype = torch.int64

    def __init__(self, rows: list[list[tuple[float, int, int, int]]]) -> None:
        self._rows, self._at = rows, 0

    def reset(self, seed: int | None = None) -> Tensor:
        return torch.zeros(2, dtype=torch.int64)

    def step(self, action: Tensor) -> ValueStep:
        columns = torch.tensor(self._rows[self._at], dtype=torch.float64).T
        self._at += 1
        state = torch.ones(2, dtype=torch.int64)
        return ValueStep(state, 2 * state, columns[0].float(), *(flags.bool() for flags in columns[1:]))

    def make_evaluation(self, copies: int) -> Any:
        raise AssertionError("nothing evaluates here")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("it cannot restore")


def test_returns_and_lengths_are_those_of_each_replicas_own_episodes() -> None:
    rows = [
        [(1.0, 0, 0, 1), (5.0, 1, 0, 1)],
        [(2.0, 0, 1, 1), (9.0, 0, 0, 0)],  # replica 1 only reset: its row counts for nothing
        [(4.0, 0, 0, 1), (1.0, 0, 0, 1)],
        [(8.0, 1, 1, 1), (2.0, 1, 0, 1)],
    ]
    environment = Script(rows)
    learner = agent(environment)
    runs = run_value(learner, environment, 4, log_period=2)
    episodes = {name: column.tolist() for name, column in runs.episodes.items()}
    assert episodes == {
        "replica": [1, 0, 0, 1],
        "step": [1, 2, 4, 4],
        "return": [5.0, 3.0, 12.0, 3.0],
        "length": [1, 2, 2, 2],
    }
    assert learner.replay.counts.tolist() == [4, 3]
    assert runs.steps.tolist() == [2, 4]
    assert runs.metrics["rollout/ep_rew_mean"].tolist() == [[3.0, 7.5], [5.0, 4.0]]
    assert runs.metrics["rollout/ep_len_mean"].tolist() == [[2.0, 2.0], [1.0, 1.5]]


def test_the_mean_is_that_of_the_last_hundred_episodes() -> None:
    log = EpisodeLog(1, "cpu")
    yes, state = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    for number in range(150):
        log.add(ValueStep(state, state, torch.tensor([float(number)]), yes, ~yes, yes), number + 1)
    assert log.means()["rollout/ep_rew_mean"].tolist() == [np.arange(50, 150).mean()]
    assert log.counts == [150]


def test_evaluation_is_greedy_under_each_index_and_counts_whole_episodes() -> None:
    environment = DeepSea(4, num_replicas=2, seed=3)
    learner = agent(environment)
    played = evaluate(learner, environment.make_evaluation(6), 12, seed=5)
    assert played.returns.shape == (2, 12)
    assert (played.lengths == 4).all()
    # Play one of the episodes again by hand, with the same index.
    twin = agent(environment)
    index = twin.draw_evaluation_index(12)
    state, total = 0, 0.0
    alone = DeepSea(4)
    alone.action_map = environment.action_map[1:2]
    for _ in range(4):
        values = twin._values(torch.full((2, 12), state), index)
        step = alone.step(values[1, 7].argmax().view(1))
        state, total = int(step.observation), total + float(step.reward)
    assert float(played.returns[1, 7]) == pytest.approx(total)
    with pytest.raises(ParameterError, match="multiple of the 6 copies"):
        evaluate(learner, environment.make_evaluation(6), 7, seed=0)
    with pytest.raises(ParameterError, match="multiple of the agent's 2 replicas"):
        evaluate(learner, DeepSea(4, num_replicas=3), 1, seed=0)


def test_a_small_problem_is_solved_and_the_run_stops_there(tmp_path: Path) -> None:
    environment = DeepSea(5, num_replicas=2, seed=0)
    judge = Evaluation(5, episodes=20, solve_return=0.985, stop_when_solved=True)
    runs = run_value(
        agent(environment), environment, 2000, evaluation=judge, folder=folder(tmp_path / "run", 2000), log_period=25
    )
    assert None not in runs.episodes_to_solve
    assert runs.num_steps == max(runs.steps_to_solve) < 2000  # type: ignore[type-var]
    assert all(episodes % 5 == 0 for episodes in runs.episodes_to_solve)  # type: ignore[operator]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["episodes_to_solve"] == runs.episodes_to_solve
    assert summary["steps_to_solve"] == [5 * episodes for episodes in runs.episodes_to_solve]  # type: ignore[operator]
    measured = runs.metrics["eval/mean_reward"]
    first = np.array(runs.steps_to_solve)
    for replica in range(2):
        solved = measured[replica] >= 0.985
        assert runs.steps[solved][0] == first[replica]
    rows = list(csv.DictReader((tmp_path / "run" / "episodes.csv").read_text().splitlines()))
    assert [float(row["return"]) for row in rows] == runs.episodes["return"].tolist()
    assert [int(row["episode"]) for row in rows if row["replica"] == "1"] == list(range(1, len(rows) // 2 + 1))


def test_unsolved_learners_are_null(tmp_path: Path) -> None:
    environment = DeepSea(8, num_replicas=2, seed=0)
    judge = Evaluation(2, unit="episodes", episodes=3, solve_return=0.985)
    run_value(agent(environment), environment, 24, evaluation=judge, folder=folder(tmp_path / "run", 24))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["episodes_to_solve"] == [None, None]
    assert summary["num_episodes"] == [3, 3]


@pytest.mark.parametrize("unit", ["steps", "episodes"])
def test_evaluations_come_when_they_are_due(unit: str) -> None:
    environment = DeepSea(3, num_replicas=2)
    period = {"steps": 4, "episodes": 2}[unit]
    runs = run_value(agent(environment), environment, 14, evaluation=Evaluation(period, unit=unit, episodes=2))
    measured = runs.steps[~np.isnan(runs.metrics["eval/mean_reward"][0])]
    assert measured.tolist() == {"steps": [4, 8, 12], "episodes": [6, 12]}[unit]


def state_of(run: RunFolder) -> bytes:
    return (run.checkpoints / "latest.ckpt").read_bytes()


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_run_that_is_cut_off_anywhere_continues_bit_for_bit(tmp_path: Path, stochastic: bool) -> None:
    class Cut(Exception):
        pass

    def attempt(path: Path, stop: int | None) -> Any:
        environment = DeepSea(4, num_replicas=2, seed=2, stochastic=stochastic)
        learner = agent(environment, index_resampling="discount", n_step=2, noise_scale=0.1)
        if stop is not None:
            observe = learner.observe

            def cut(transition: Any) -> Any:
                if learner.num_steps == stop:
                    raise Cut
                return observe(transition)

            learner.observe = cut  # type: ignore[method-assign]
        run = folder(path, 90)
        run.resume()
        judge = Evaluation(3, episodes=4, solve_return=0.985)
        return learner, run_value(
            learner, environment, 90, evaluation=judge, folder=run, checkpoint_period=20, log_period=7
        )

    whole, runs = attempt(tmp_path / "whole", None)
    for stop in (10, 33, 60):
        with pytest.raises(Cut):
            attempt(tmp_path / "cut", stop)
        assert RunFolder.open(tmp_path / "cut").status == "failed"
    resumed, again = attempt(tmp_path / "cut", None)
    for one, two in zip(whole.network.blocks, resumed.network.blocks, strict=True):
        assert torch.equal(one.flat, two.flat)
    for name in runs.episodes:
        assert np.array_equal(runs.episodes[name], again.episodes[name])
    for name in runs.metrics:
        assert np.array_equal(runs.metrics[name], again.metrics[name], equal_nan=True)
    assert runs.episodes_to_solve == again.episodes_to_solve
    for name in ("episodes.csv", "results.csv", "summary.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def test_an_environment_that_cannot_restore_says_so(tmp_path: Path) -> None:
    rows = [[(1.0, 0, 0, 1), (1.0, 0, 0, 1)]] * 3 + [[(1.0, 1, 0, 1), (1.0, 1, 0, 1)]]
    run = folder(tmp_path, 4)
    with pytest.raises(IndexError):
        run_value(agent(Script(rows)), Script(rows[:2]), 4, folder=run, checkpoint_period=2)
    with pytest.warns(UserWarning, match="Script cannot restore its state: the run resumes at step 2"):
        runs = run_value(agent(Script(rows)), Script(rows[2:]), 4, folder=run)
    assert runs.num_steps == 4
    # The steps before the cut belong to an episode that nobody can finish.
    assert runs.episodes["return"].tolist() == [2.0, 2.0]
    assert runs.episodes["length"].tolist() == [2, 2]


def test_tensorboard_has_the_tags_of_stable_baselines(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    environment = DeepSea(3, num_replicas=2)
    run = folder(tmp_path, 30)
    judge = Evaluation(3, episodes=2)
    runs = run_value(agent(environment), environment, 30, evaluation=judge, folder=run, tensorboard=True, log_period=10)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"rollout/ep_rew_mean", "rollout/ep_len_mean", "train/loss", "time/fps", "eval/mean_reward"} <= tags
    logged = events.Scalars("rollout/ep_rew_mean")
    assert [event.step for event in logged] == [10, 20, 30]
    expected = runs.metrics["rollout/ep_rew_mean"][:, np.isin(runs.steps, [10, 20, 30])].mean(0)
    assert [event.value for event in logged] == pytest.approx(expected.tolist())


def test_divergence_ends_the_run_and_is_written_down(tmp_path: Path) -> None:
    environment = Script([[(1e30, 0, 0, 1), (0.0, 0, 0, 1)]] * 40)
    learner = DQN((), 2, num_states=3, num_replicas=2, random_steps=0, batch_size=4)
    with pytest.raises(DivergenceError, match="became non-finite at step"):
        run_value(learner, environment, 40, folder=folder(tmp_path, 40))
    manifest = RunFolder.open(tmp_path).manifest
    assert manifest.status == "failed"
    assert "became non-finite at step" in (manifest.error or "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, "period of Evaluation"),
        ({"period": 1, "unit": "days"}, "unit of Evaluation"),
        ({"period": 1, "episodes": 10, "copies": 3}, "copies of Evaluation must divide episodes = 10"),
        ({"period": 1, "stop_when_solved": True}, "stop_when_solved of Evaluation must come with a solve_return"),
    ],
)
def test_bad_evaluation_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Evaluation(**options)


def test_bad_run_options_are_named_before_anything_runs() -> None:
    environment = DeepSea(3, num_replicas=2)
    with pytest.raises(ParameterError, match="horizon of run_value"):
        run_value(agent(environment), environment, 0)
    with pytest.raises(ParameterError, match="tensorboard of run_value must come with a run folder"):
        run_value(agent(environment), environment, 5, tensorboard=True)
    with pytest.raises(ParameterError, match="num_states of HyperFQI must equal"):
        run_value(agent(environment), DeepSea(4, num_replicas=2), 5)
