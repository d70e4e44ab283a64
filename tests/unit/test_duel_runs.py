"""The loop of preference learning: what it records, resuming, and that the rules do what they are for."""

import numpy as np
import pytest
import torch

from ensemblepp.duel_runs import DuelRuns, run_duels
from ensemblepp.envs import PreferenceDuels
from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.preferences import PreferenceLearner
from ensemblepp.store import RunFolder

R = 6


def parts(**options):
    game = PreferenceDuels(feature_dim=5, num_responses=60, num_candidates=4, reward_scale=2.0, num_replicas=R, seed=1)
    return PreferenceLearner(5, num_replicas=R, prior_scale=3.0, seed=1, **options), game


def test_what_is_recorded():
    runs = run_duels(*parts(), 25, eval_period=10, acquisition="uniform")
    assert runs.cumulative_regret.shape == (R, 25)
    assert runs.evaluated.tolist() == [10, 20, 25]
    assert {name: values.shape for name, values in runs.metrics.items()} == {
        "eval/accuracy": (R, 3),
        "eval/best_of_regret": (R, 3),
    }
    assert bool((np.diff(runs.cumulative_regret, axis=1) >= 0).all())
    assert runs.summary().keys() == {"regret/cumulative", "eval/accuracy", "eval/best_of_regret"}


def test_queries_to_a_level_by_hand():
    curve = np.array([[0.5, 0.7, 0.9], [0.5, 0.6, 0.6], [0.95, 0.4, 0.4]])
    runs = DuelRuns("uniform", "game", np.zeros((3, 30)), np.array([10, 20, 30]), {"eval/accuracy": curve})
    assert runs.queries_to(0.7).tolist() == [20.0, 30.0, 10.0]


def test_the_head_learns_and_thompson_shows_better_responses_than_chance():
    uniform = run_duels(*parts(), 150, acquisition="uniform")
    thompson = run_duels(*parts(), 150, acquisition="double_thompson")
    assert float(uniform.metrics["eval/accuracy"][:, -1].mean()) > 0.85
    assert thompson.cumulative_regret[:, -1].mean() < 0.6 * uniform.cumulative_regret[:, -1].mean()


def test_members_and_exact_posterior_are_both_played():
    member, exact = (run_duels(*parts(), 20, acquisition="thompson", exact=flag) for flag in (False, True))
    assert not np.array_equal(member.cumulative_regret, exact.cumulative_regret)
    run_duels(*parts(index_dim=0), 5, acquisition="double_thompson", exact=True)


def folder(path):
    return RunFolder.create(
        path, {"a": 1}, agent="x", environment="duels", seed=0, num_replicas=R, horizon=60, kind="select"
    )


def test_a_killed_run_continues_bit_for_bit(tmp_path):
    whole = run_duels(*parts(), 60, folder=folder(tmp_path / "whole"), checkpoint_period=20)
    learner, game = parts()
    step = game.step

    def fail(first, second):
        fail.count += 1
        if fail.count == 47:
            raise KeyboardInterrupt
        return step(first, second)

    fail.count = 0
    game.step = fail
    with pytest.raises(KeyboardInterrupt):
        run_duels(learner, game, 60, folder=folder(tmp_path / "cut"), checkpoint_period=20)
    assert RunFolder.open(tmp_path / "cut").status == "failed"
    again = run_duels(*parts(), 60, folder=folder(tmp_path / "cut"), checkpoint_period=20, progress=False)
    assert np.array_equal(whole.cumulative_regret, again.cumulative_regret)
    for name in ("results.csv", "regret.npz"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()
    assert RunFolder.open(tmp_path / "cut").status == "finished"
    with pytest.raises(CheckpointError, match="the saved run is"):
        run_duels(*parts(), 60, acquisition="greedy", folder=folder(tmp_path / "cut"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acquisition": "best"}, "acquisition of run_duels must be one of"),
        ({"exploration_scale": -1.0}, "exploration_scale of run_duels must"),
        ({"eval_period": 0}, "eval_period of run_duels must"),
        ({"horizon": 0}, "horizon of run_duels must"),
        ({"checkpoint_period": 0}, "checkpoint_period of run_duels must"),
    ],
)
def test_bad_options_are_named(options, message):
    learner, game = parts()
    with pytest.raises(ParameterError, match=message):
        run_duels(learner, game, **{"horizon": 5, **options})


def test_sizes_that_do_not_fit_are_named():
    _, game = parts()
    with pytest.raises(ParameterError, match="feature_dim of run_duels must be 5 as in the environment; got 4"):
        run_duels(PreferenceLearner(4, num_replicas=R), game, 5)
    with pytest.raises(ParameterError, match="num_replicas of run_duels must be 6 as in the environment; got 1"):
        run_duels(PreferenceLearner(5), game, 5)


def test_global_randomness_is_left_alone():
    state = torch.get_rng_state()
    run_duels(*parts(), 5)
    assert torch.equal(torch.get_rng_state(), state)
