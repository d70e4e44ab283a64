"""The policy benchmark: its toy enumerates what it says, and tables and figures follow from its numbers."""

from typing import Any

import pytest
import torch

from benchmarks import common
from benchmarks.policy import analysis
from benchmarks.policy.memory import measure
from benchmarks.policy.run import FOLDER, cell_names, load_config
from benchmarks.policy.toy import Game, train

CONFIG = load_config()
SMALL = {**CONFIG["game"], "updates": 4, "period": 2}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return common.read_json(FOLDER / "results.json")


def test_results_say_where_they_come_from_and_hold_every_cell(results: dict[str, Any]) -> None:
    assert set(common.REQUIRED_FIELDS) <= results.keys()
    assert results["seed"] == CONFIG["seed"] != CONFIG["tuning"]["seed"]
    assert list(results["cells"]) == ["/".join(map(str, names)) for names in cell_names(CONFIG)]


def test_tables_follow_from_the_numbers(results: dict[str, Any]) -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for mismatch in CONFIG["mismatches"]:
        assert analysis.mismatch_table(CONFIG, results["cells"], mismatch) in readme
    assert analysis.correction_table(CONFIG, results["cells"]) in readme
    assert analysis.baseline_table(CONFIG, results["cells"]) in readme
    assert analysis.memory_table(results["memory"]) in readme


def test_both_forms_of_the_memory_benchmark_computed_the_same(results: dict[str, Any]) -> None:
    for task in analysis.TASKS:
        ours, naive = (results["memory"][f"{task}/{form}"] for form in analysis.FORMS)
        for field in ours.keys() & {"value", "gradient_norm"}:
            assert ours[field] == pytest.approx(naive[field], rel=1e-3)
        assert ours["peak_before_mib"] < 1


def test_no_second_copy_of_the_vocabulary_in_single_precision(results: dict[str, Any]) -> None:
    sizes, memory = CONFIG["memory"], results["memory"]
    logits = sizes["batch"] * sizes["time"] * sizes["vocab"] * 2 / 2**20  # MiB in bfloat16
    assert memory["energy/blocks"]["extra_peak_mib"] < 0.2 * logits
    # The gradient is as large as the logits; a copy in float32 would add twice as much again.
    assert memory["centered/blocks"]["extra_peak_mib"] < 1.4 * logits
    assert min(memory[f"{task}/naive"]["extra_peak_mib"] for task in analysis.TASKS) > 5 * logits


@pytest.mark.parametrize("task", analysis.TASKS)
def test_the_memory_benchmark_measures_a_fresh_process(task: str) -> None:
    sizes = {"batch": 2, "time": 3, "vocab": 50, "head": 4}
    ours, naive = (measure(task, form, sizes, seed=1) for form in analysis.FORMS)
    assert ours["value"] == pytest.approx(naive["value"], rel=1e-3)
    assert ours["cpu_seconds"] > 0


def test_the_toy_enumerates_every_response_once() -> None:
    game = Game(SMALL, num_replicas=2, seed=3)
    assert len(game.tree.tokens.unique(dim=0)) == 4**5
    weights = torch.randn(2, 32, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(game.sequence_logprob(weights).exp().sum(1), torch.ones(2, dtype=torch.float64))
    assert torch.equal(game.tree.prefix.unique(), torch.arange(game.tree.num_prefixes))
    same_prefix = (game.tree.tokens[:, :2] == game.tree.tokens[17, :2]).all(1)
    assert torch.equal(game.tree.prefix[:, 2] == game.tree.prefix[17, 2], same_prefix)
    assert (game.sequence_kl(weights, weights).abs() < 1e-12).all()


def test_without_mismatch_every_correction_is_the_same_update_and_runs_repeat() -> None:
    def run(method: str, mismatch: str) -> torch.Tensor:
        spec, gap = CONFIG["methods"][method], CONFIG["mismatches"][mismatch]
        return torch.tensor(train(SMALL, spec, gap, rate=3.0, num_replicas=3, seed=5)["returns"], dtype=torch.float64)

    plain = run("none", "none")
    for method in CONFIG["methods"]:
        if not method.endswith("otb"):
            torch.testing.assert_close(run(method, "none"), plain, rtol=0, atol=1e-9)
    assert torch.equal(run("trm", "both"), run("trm", "both"))
    assert not torch.equal(run("seq_tis", "both"), run("none", "both"))
