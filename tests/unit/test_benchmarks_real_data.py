"""The real-data benchmark: every row has its origin, tables follow from the numbers, and the parts run."""

import json

import numpy as np
import pytest
import torch
import yaml

from benchmarks import common, search
from benchmarks.real_data import analysis
from benchmarks.real_data.full_labels import FIRST_BATCH, play_full_labels
from benchmarks.real_data.play import FOLDER, load_config, play, state_bytes
from ensemblepp.envs import ClassificationBandit

CONFIG = load_config()


@pytest.fixture(scope="module")
def results():
    return common.read_json(FOLDER / "results.json")


@pytest.fixture(scope="module")
def trials():
    return common.read_json(FOLDER / "tuning.json")["trials"]


def test_results_say_where_they_come_from(results):
    assert set(common.REQUIRED_FIELDS) <= results.keys()
    assert results["seed"] == CONFIG["seed"] != CONFIG["tuning"]["seed"]


def test_tables_follow_from_the_regrets(results):
    assert results["bars"] == analysis.judge(CONFIG, results["cells"])
    readme = (FOLDER / "README.md").read_text()
    for block in analysis.blocks(CONFIG, results["cells"], results["bars"]).values():
        assert block in readme


def test_every_method_got_the_same_search_and_plays_what_it_found(results, trials):
    for method, spec in CONFIG["methods"].items():
        if spec["grid"]:
            assert {json.dumps(each) for each in search.candidates(spec)} == trials[method].keys()
            assert len(trials[method]) <= 8
            played = [cell["options"] for name, cell in results["cells"].items() if name.endswith(f"/{method}")]
            assert all(search.best(trials[method]).items() <= options.items() for options in played)
        if "greedy_of" in spec:
            found = search.best(trials[spec["greedy_of"]])
            played = [cell["options"] for name, cell in results["cells"].items() if name.endswith(f"/{method}")]
            assert all(found.items() <= options.items() for options in played)


def test_the_preset_is_one_configuration_for_all_sets(results, trials):
    options = [cell["options"] for name, cell in results["cells"].items() if name.endswith("/preset")]
    assert options
    chosen = CONFIG["methods"]["preset"]["options"] | search.best(trials["preset"])
    assert all(each == chosen for each in options)


def test_bytes_of_a_state_by_hand():
    assert state_bytes({"a": torch.zeros(3), "b": {"c": torch.zeros(2, dtype=torch.int64)}, "d": 7}) == 28


def test_full_labels_first_guess_and_then_know_an_easy_set():
    pytest.importorskip("sklearn")
    environment = ClassificationBandit("digits", num_replicas=2, seed=1)
    regret, seconds = play_full_labels(environment, 400, seed=0)
    assert regret[:, FIRST_BATCH - 1] == pytest.approx(0.9 * FIRST_BATCH)
    later = np.diff(regret[:, FIRST_BATCH - 1 :], axis=1)
    assert set(np.unique(later.round(6))) <= {0.0, 1.0}
    assert later.mean() < 0.4 < 0.9
    assert seconds > 0


def test_vowpal_wabbit_meets_the_same_rows_and_learns():
    pytest.importorskip("vowpalwabbit")
    config = CONFIG | {"games": {"digits": {"environment": "ClassificationBandit", "options": {"dataset": "digits"}}}}
    cell = play(config, "vowpal_epsilon", "digits", {}, num_shuffles=2, seed=1, horizon=600)
    early, late = (np.array(cell["regret"][step]) for step in ("60", "600"))
    assert (late - early < 540 * 0.6).all()  # uniform play: 0.9


def test_one_small_cell_runs_the_preset():
    config = CONFIG | {"games": {"digits": {"environment": "ClassificationBandit", "options": {"dataset": "digits"}}}}
    cell = play(config, "preset", "digits", {}, num_shuffles=2, seed=1, horizon=20)
    assert cell["regret"].keys() == {"2", "20"}
    assert cell["kib_per_learner"] > 1000


def test_the_shipped_preset_is_the_measured_one(trials):
    path = FOLDER.parents[1] / "configs" / "experiment" / "classification.yaml"
    shipped = yaml.safe_load(path.read_text())["agent"]
    chosen = search.best(trials["preset"])
    assert shipped == CONFIG["methods"]["preset"]["options"] | chosen
