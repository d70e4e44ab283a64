"""The neural benchmarks' files say where they come from, and their tables follow from the stored numbers."""

import json

import pytest

from benchmarks import common, search
from benchmarks.neural import analysis
from benchmarks.neural.play import FOLDER, load_config, play
from benchmarks.neural_speed import run as speed

CONFIG = load_config()


@pytest.fixture(scope="module")
def results():
    return common.read_json(FOLDER / "results.json")


def test_results_say_where_they_come_from(results):
    for content in (results, common.read_json(FOLDER / "tuning.json"), common.read_json(speed.FOLDER / "results.json")):
        assert set(common.REQUIRED_FIELDS) <= content.keys()
    assert results["seed"] == CONFIG["seed"] != CONFIG["tuning"]["seed"]


def test_bars_follow_from_the_regrets(results):
    assert results["bars"] == analysis.judge(CONFIG, results["cells"])
    readme = (FOLDER / "README.md").read_text()
    assert analysis.bars_table(CONFIG, results["bars"]) in readme
    for game in CONFIG["games"]:
        assert analysis.game_table(CONFIG, results["cells"], game) in readme


def test_every_method_got_the_same_search_and_plays_what_it_found():
    trials = common.read_json(FOLDER / "tuning.json")["trials"]
    results = common.read_json(FOLDER / "results.json")
    for method, spec in CONFIG["methods"].items():
        if spec["grid"]:
            tried = [json.loads(key) for key in trials[method]]
            assert len(tried) == 3
            assert all(each in tried for each in search.candidates(spec))
            played = [cell["options"] for name, cell in results["cells"].items() if name.endswith(f"/{method}")]
            assert len(played) >= 3
            assert all(search.best(trials[method]).items() <= options.items() for options in played)


def test_a_bar_is_met_at_one_standard_error_by_hand():
    config = {"bars": [{"method": "a", "game": "g", "step": 3, "bar": 10}]}
    for regret, met in (([9.0, 11.0, 13.0], True), ([11.0, 13.0, 15.0], False)):  # standard error 2 / sqrt(3) = 1.15
        verdict = analysis.judge(config, {"g/a": {"regret": {"3": regret}}})[0]
        assert verdict["met"] is met
        assert verdict["standard_error"] == 1.2


def test_one_small_cell_runs():
    cell = play(CONFIG, "exact_ucb", "wheel", {"prior_scale": 2.0}, num_replicas=2, seed=1, horizon=5)
    assert cell["steps"] == [5]
    assert len(cell["regret"]["5"]) == 2


def test_flops_by_hand():
    # One layer chain 2 -> 3 -> 3 -> 1 + 4 outputs, batch 10: products of 6, 9 and 15 multiplications.
    assert speed.update_flops(dim=2, width=3, members=4, batch=10) == 2 * 10 * (2 * (6 + 9 + 15) + 9 + 3)
    assert speed.update_flops() == pytest.approx(6.73e6, rel=0.02)


def test_speed_tables_follow_from_the_results():
    readme = (speed.FOLDER / "README.md").read_text()
    for name, section in common.read_json(speed.FOLDER / "results.json")["sections"].items():
        assert speed.SECTIONS[name][1](section) in readme
