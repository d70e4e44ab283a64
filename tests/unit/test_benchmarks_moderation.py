"""The moderation benchmark: every row has its origin, tables follow from the numbers, the references are right."""

import json

import numpy as np
import pytest

pytest.importorskip("sklearn")

from benchmarks import common, search
from benchmarks.moderation import analysis
from benchmarks.moderation.play import FOLDER, load_config, play_reference, shifted_regret
from ensemblepp.envs import ClassificationData, ModerationBandit

CONFIG = load_config()


@pytest.fixture(scope="module")
def results():
    return common.read_json(FOLDER / "results.json")


def test_results_say_where_they_come_from(results):
    assert set(common.REQUIRED_FIELDS) <= results.keys()
    assert results["seed"] == CONFIG["seed"] != CONFIG["tuning"]["seed"]


def test_tables_follow_from_the_regrets(results):
    assert results["bars"] == analysis.judge(CONFIG, results["cells"])
    readme = (FOLDER / "README.md").read_text()
    for block in analysis.blocks(CONFIG, results).values():
        assert block in readme


def test_every_method_was_searched_and_plays_what_it_found(results):
    for method, spec in CONFIG["methods"].items():
        if spec["grid"]:
            tried = analysis.trials_of(results, method)
            assert {json.dumps(each) for each in search.candidates(spec)} == tried.keys()
            for game in CONFIG["games"]:
                assert search.best(tried).items() <= results["cells"][f"{game}/{method}"]["options"].items()


def data(count=600):
    rng = np.random.default_rng(0)
    labels = (rng.random(count) < 0.7).astype(np.int64)
    features = (labels[:, None] * 2.0 + rng.normal(size=(count, 3))).astype(np.float32)
    return ClassificationData(features, labels, 2)


def test_references_by_hand():
    posts = data()
    environment = ModerationBandit(posts, intercept=False, num_replicas=2, seed=1)
    clean = 1 - environment.data.labels[environment._order[:, :500].numpy()]
    regret, _, shifted = play_reference("constant", environment, posts, 500)
    np.testing.assert_allclose(regret[:, -1], 0.5 * clean.sum(1))
    np.testing.assert_allclose(shifted, 0.5 * (posts.labels == 0).mean())
    informed, _, _ = play_reference("full_labels", environment, posts, 500)
    assert (informed[:, -1] < 0.5 * regret[:, -1]).all()


def test_regret_on_the_shifted_set_by_hand():
    posts = ClassificationData(np.zeros((4, 1), np.float32), np.array([0, 0, 1, 1]), 2)
    arm = np.array([[0, 1, 0, 1], [1, 1, 0, 0]])
    assert shifted_regret(arm, posts).tolist() == [(0.5 + 1.0) / 4, 0.0]
