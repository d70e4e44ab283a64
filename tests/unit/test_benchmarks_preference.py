"""The preference benchmark: every row has its origin, tables follow from the curves, the parts do what they say."""

import math

import numpy as np
import pytest

pytest.importorskip("sklearn")

from benchmarks import common
from benchmarks.preference import analysis
from benchmarks.preference.play import play, queries_to
from benchmarks.preference.problem import FOLDER, Pool, build_pool, data_file
from benchmarks.preference.run import load_config, trials, wanted

CONFIG = load_config()


@pytest.fixture(scope="module")
def results():
    return common.read_json(FOLDER / "results.json")


def test_results_say_where_they_come_from(results):
    assert set(common.REQUIRED_FIELDS) <= results.keys()
    assert results["seed"] == CONFIG["seed"] != CONFIG["tuning"]["seed"]


def test_tables_follow_from_the_curves(results):
    assert results["bars"] == analysis.judge(CONFIG, results)
    readme = (FOLDER / "README.md").read_text()
    for block in analysis.blocks(CONFIG, results).values():
        assert block in readme


def test_every_rule_was_tried_and_the_chosen_one_is_reported(results):
    prior = results["chosen"]["prior_scale"]
    assert results["trials"].keys() >= trials(CONFIG, prior).keys()
    assert results["chosen"] == {
        "prior_scale": analysis.best_prior(CONFIG, results["trials"]),
        "rule": analysis.best_rule(CONFIG, results["trials"]),
    }
    assert wanted(CONFIG, "minilm", prior).keys() <= results["cells"].keys()
    for name, cell in results["cells"].items():
        assert cell["prior_scale"] == prior, name
        assert len(cell["accuracy"]) == CONFIG["num_replicas"]


def test_queries_by_hand():
    cell = {"evaluated": [5, 10, 15], "accuracy": [[0.5, 0.8, 0.9], [0.9, 0.5, 0.5], [0.1, 0.1, 0.1]]}
    assert queries_to(cell, 0.8, 100).tolist() == [10.0, 5.0, 100.0]


def test_ratios_by_hand():
    found = analysis.ratio_interval(np.full(5, 30.0), np.full(9, 60.0))
    assert (found.estimate, found.low, found.high) == (0.5, 0.5, 0.5)
    rng = np.random.default_rng(0)
    found = analysis.ratio_interval(rng.normal(50, 5, 400), rng.normal(100, 10, 400))
    error = math.sqrt(2 * 0.1**2 / 400) * 0.5  # the delta method
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def pool(seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(300, 2, 12))
    gap = (features[:, 0] - features[:, 1]) @ np.linspace(-1, 1, 12)
    swap = rng.random(300) > 1 / (1 + np.exp(-gap))
    features[swap] = features[swap][:, ::-1]
    return build_pool(features, [f"prompt {i}" for i in range(300)], 6, 5)


def test_the_judge_learns_from_one_half_and_answers_about_the_other():
    found = pool()
    assert found.features.shape == (300, 6)
    assert found.human_accuracy > 0.6
    assert (found.features**2).sum(-1).mean() == pytest.approx(1.0, rel=0.1)
    assert found.fitted_scale > 0
    assert np.array_equal(found.reward, pool().reward)


def test_a_small_cell_runs():
    config = CONFIG | {"horizon": 40, "eval_period": 10, "num_candidates": 4}
    options = {"candidates": "redrawn", "prior_scale": 2.0, "seed": 1, "num_replicas": 3}
    small = Pool(*(getattr(pool(), name) for name in ("features", "reward", "human_accuracy")))
    cell = play(config, small, "infomax", "2.0", **options)
    assert cell["evaluated"] == [10, 20, 30, 40]
    assert np.array(cell["accuracy"]).shape == (3, 4)
    assert abs(np.mean(cell["batch_accuracy"]) - np.mean([row[-1] for row in cell["accuracy"]])) < 0.02


def test_missing_data_are_named(monkeypatch):
    monkeypatch.delenv("ENSEMBLEPP_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="set ENSEMBLEPP_DATA"):
        data_file()
