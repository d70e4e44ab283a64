"""The committed result files of benchmarks/ say where they come from, and their figures follow from their numbers."""

import json
import statistics
from pathlib import Path

import pytest

from benchmarks import common, search
from benchmarks.linear_table import analysis
from benchmarks.linear_table import run as linear_table
from benchmarks.speed import latency, roofline, tables
from benchmarks.speed import run as speed

TABLE = common.read_json(linear_table.FOLDER / "results.json")
SPEED = common.read_json(speed.FOLDER / "results.json")
CONFIG = linear_table.load_config()


def _block(readme: Path, name: str) -> str:
    text = readme.read_text(encoding="utf-8")
    return text.partition(f"<!-- {name}:begin -->\n")[2].partition(f"\n<!-- {name}:end -->")[0]


@pytest.mark.parametrize(("content", "config"), [(TABLE, CONFIG), (SPEED, speed.load_config())], ids=["table", "speed"])
def test_results_say_where_they_come_from(content, config):
    assert set(common.REQUIRED_FIELDS) <= content.keys()
    assert content["command"].startswith(f"python benchmarks/{content['benchmark']}/run.py")
    assert content["seed"] == config["seed"]
    assert content["versions"].keys() >= {"python", "torch", "numpy", "ensemblepp"}
    assert content["machine"].keys() >= {"processor", "cores"}
    assert len(content["commit"]) == 40


@pytest.mark.parametrize("dtype", CONFIG["dtypes"])
def test_table_follows_from_the_regrets(dtype):
    sweep = TABLE["sweeps"][dtype]
    assert list(sweep["cells"]) == list(CONFIG["cells"])
    for name, cell in sweep["cells"].items():
        options = CONFIG["cells"][name]
        assert cell["options"] == options
        assert len(cell["final_regret"]) == options["num_replicas"]
        assert analysis.compare(cell["final_regret"], options["published"]).items() <= cell.items()
    assert analysis.judge(sweep["cells"], list(CONFIG["cells"]), CONFIG["rule"]) == sweep["verdict"]
    expected = f"{analysis.describe(sweep['verdict'], CONFIG['rule'])}\n\n{analysis.table(CONFIG, sweep['cells'])}"
    assert _block(linear_table.FOLDER / "README.md", dtype) == expected


def test_span_table_follows_from_the_results():
    assert _block(linear_table.FOLDER / "README.md", "span") == analysis.span_table(TABLE["span"])


def test_compare_by_hand():
    # Mean 12, sd 2, so s.e. 2 / sqrt(3); with 1.5 published the combined error is sqrt(4 / 3 + 2.25).
    result = analysis.compare([10.0, 12.0, 14.0], {"mean": 9.0, "standard_error": 1.5})
    assert result["mean"] == 12.0
    assert result["standard_error"] == pytest.approx(1.155, abs=1e-3)
    assert result["z"] == pytest.approx(3.0 / (4 / 3 + 2.25) ** 0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("scores", "reproduced"),
    [([0.0, 2.4], True), ([3.9, -2.4], True), ([2.6, -2.6], False), ([4.1, 0.0], False), ([1.0], False)],
)
def test_judge(scores, reproduced):
    cells = {f"cell_{i}": {"z": z} for i, z in enumerate(scores)}
    rule = {"limit": 4.0, "notable": 2.5, "allowed": 1}
    assert analysis.judge(cells, ["cell_0", "cell_1"], rule)["reproduced"] is reproduced


def test_one_small_cell_runs():
    config = CONFIG | {"horizon": 5, "cells": {"small": CONFIG["cells"]["sphere_10_m8"] | {"num_replicas": 3}}}
    cell = linear_table.run_cell(config, "small", "float64")
    assert len(cell["final_regret"]) == 3
    assert cell["mean"] > 0


def test_speed_tables_follow_from_the_results():
    assert list(SPEED["sections"]) == list(speed.SECTIONS)
    for name, block in speed.render(SPEED).items():
        assert _block(speed.FOLDER / "README.md", name) == block


def test_speed_verdicts_follow_from_the_times():
    for size in SPEED["sections"]["batching"]["sizes"].values():
        ratios = [a / b for a, b in zip(size["together_cpu_seconds"], size["apart_cpu_seconds"], strict=True)]
        assert size["ratio"] == pytest.approx(statistics.median(ratios), rel=1e-3)
        assert size["met"] is (size["ratio"] <= size["target"])
    roof = SPEED["sections"]["roofline"]
    for row in roof["rows"]:
        update = roofline.count_update(row["num_replicas"], row["feature_dim"], row["index_dim"])
        assert (row["update"]["flops"], row["update"]["bytes"]) == pytest.approx(update, rel=1e-4)
        bound = roofline.bound_seconds(*update, row["update"]["resident_bytes"], roof["peaks"]) * 1e6
        assert row["update"]["bound_us"] == pytest.approx(bound, rel=1e-3)


def test_roofline_counts_by_hand():
    # d = 2, M = 1: the block has 2 * (1 + 1 + 2) = 8 numbers.
    assert roofline.count_update(3, 2, 1) == (3 * (4 * 8 + 2 * 4), 3 * 4 * (3 * 8 + 4))
    assert roofline.count_act(3, 2, 1, 5) == (3 * 2 * (4 + 10), 3 * 4 * (4 + 10))


def test_latency_of_the_library_is_in_the_results():
    for run in SPEED["sections"]["latency"]["runs"]:
        ours = [row for row in run["contestants"] if row["library"] == "ensemblepp"]
        assert {row["model"] for row in ours} == {latency.SHARED, latency.PER_ARM}
        shared = next(row for row in ours if row["model"] == latency.SHARED)
        assert shared["calls"] >= 2000
        assert shared["decide"]["p50_ms"] <= shared["decide"]["p95_ms"] <= shared["decide"]["p99_ms"]
    assert "ensemblepp" in tables.latency(SPEED["sections"]["latency"])


def test_json_keeps_lists_on_one_line(tmp_path):
    content = {"numbers": [1.5, 2.0], "rows": [{"a": [1]}, {"a": []}], "text": "keep [ this ]"}
    common.write_json(tmp_path / "x.json", content)
    text = (tmp_path / "x.json").read_text()
    assert '"numbers": [1.5, 2.0]' in text
    assert json.loads(text) == content


def test_fill_readme_replaces_only_the_block(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- t:begin -->\nold\n<!-- t:end -->\nb\n")
    common.fill_readme(readme, {"t": "new"})
    assert readme.read_text() == "a\n<!-- t:begin -->\nnew\n<!-- t:end -->\nb\n"
    with pytest.raises(ValueError, match="lacks the markers"):
        common.fill_readme(readme, {"other": "new"})


def test_a_score_is_the_mean_share_of_uniform_plays_regret():
    def play(config, method, game, chosen, *, num_replicas, seed, horizon):
        assert (config, method, chosen, num_replicas, seed, horizon) == (two_games, "ours", {"scale": 2.0}, 2, 9, 50)
        return {"regret": {"50": {"easy": [1.0, 3.0], "hard": [30.0, 50.0]}[game]}}

    two_games = {
        "tuning": {
            "seed": 9,
            "num_replicas": 2,
            "horizon": 50,
            "games": ["easy", "hard"],
            "uniform_regret": {"easy": 20.0, "hard": 80.0},
        }
    }
    found = search.attempt(play, two_games, "ours", {"scale": 2.0})
    assert found == {"regret": {"easy": 2.0, "hard": 40.0}, "score": 0.3}
    assert search.best({'{"scale": 1.0}': {"score": 0.4}, '{"scale": 2.0}': found}) == {"scale": 2.0}
