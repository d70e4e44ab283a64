"""The DeepSea benchmark's files say where they come from, and its tables follow from the stored episodes."""

import math
from typing import Any

import pytest

from benchmarks import common
from benchmarks.deep_sea import analysis, cost
from benchmarks.deep_sea.play import FOLDER, load_config, overrides, play, preset

CONFIG = load_config()


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return common.read_json(FOLDER / "results.json")


def test_results_say_where_they_come_from(results: dict[str, Any]) -> None:
    assert set(common.REQUIRED_FIELDS) <= results.keys()
    assert results["seed"] == CONFIG["seed"]
    for name, cell in results["cells"].items():
        method, size = name.split("/")
        assert cell["command"] == " ".join(["ensemblepp value", *overrides(CONFIG, method, int(size))])
        assert len(cell["episodes_to_solve"]) == CONFIG["methods"][method].get("num_replicas", CONFIG["num_replicas"])


def test_tables_follow_from_the_episodes(results: dict[str, Any]) -> None:
    assert results["bars"] == analysis.judge(CONFIG, results["cells"])
    assert results["growth"] == analysis.growth(CONFIG, results["cells"])
    readme = (FOLDER / "README.md").read_text()
    assert analysis.table(CONFIG, results["cells"]) in readme
    assert analysis.bars_table(CONFIG, results["bars"]) in readme
    assert analysis.growth_table(CONFIG, results["growth"]) in readme
    assert cost.rate_table(results["cost"]) in readme


def test_unsolved_learners_count_at_the_budget_and_miss_the_bar() -> None:
    cell = {"budget": 100, "episodes_to_solve": [10, None, 40]}
    assert analysis.counts(cell).tolist() == [10, 100, 40]
    config = {"methods": {"a": {"cells": {20: 100}, "bars": {20: 60}}}}
    (verdict,) = analysis.judge(config, {"a/20": cell})
    assert verdict == {"method": "a", "size": 20, "bar": 60, "mean": 50.0, "unsolved": 1, "met": False}


def test_growth_of_a_power_law_is_its_exponent() -> None:
    config = {"methods": {"a": {"cells": {10: 1, 20: 1, 40: 1}}}}
    cells = {f"a/{size}": {"budget": 1, "episodes_to_solve": [3 * size**1.5] * 4} for size in (10, 20, 40)}
    assert analysis.growth(config, cells)["a"] == {"sizes": [10, 20, 40], "exponent": 1.5, "interval": [1.5, 1.5]}


def test_flops_are_counted_by_hand() -> None:
    # 64 x 64, then 64 x 2 (1 + 4) columns; two forward passes and a backward pass of twice one.
    assert cost.flops(4) == 4 * 128 * 2 * (64 * 64 + 64 * 10)


def test_one_small_cell_runs_and_continues() -> None:
    config = CONFIG | {"num_replicas": 2, "methods": {"a": {"overrides": ["experiment=deep_sea"], "cells": {3: 40}}}}
    cell = play(config, "a", 3)
    assert cell["budget"] == 40
    assert all(each is None or each % 5 == 0 for each in cell["episodes_to_solve"])
    assert cell["index_dim"] == preset("hyper_fqi")["index_dim"]
    assert math.isfinite(cell["cpu_seconds"])
