from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ensemblepp.errors import ParameterError
from ensemblepp.report import Report, build_report
from ensemblepp.report_page import show_seeds
from ensemblepp.store import RunFolder, RunFolderError


def make_run(
    path: Path, finals, *, agent="A", environment="E", seed=0, horizon=4, config=None, cpu_seconds=2.0, kind="bandit"
) -> RunFolder:
    """Write a finished run whose replicas end at `finals`."""
    finals = np.asarray(finals, dtype=float)
    run = RunFolder.create(
        path,
        config or {"agent": {"name": agent}, "env": {"name": environment}, "seed": seed},
        agent=agent,
        environment=environment,
        seed=seed,
        num_replicas=len(finals),
        horizon=horizon,
        kind=kind,
        command=f"run --seed {seed}",
    )
    run.write_regret(np.arange(1, horizon + 1), finals[:, None] * np.arange(1, horizon + 1) / horizon)
    run.finish(cpu_seconds)
    return run


def report(*paths, **options) -> tuple[Report, str]:
    stream = io.StringIO()
    result = build_report(list(paths), console=Console(file=stream, width=200), **options)
    return result, stream.getvalue()


def test_replicas_of_one_configuration_are_pooled_over_seeds(tmp_path):
    make_run(tmp_path / "s0", [1.0, 2.0], seed=0)
    make_run(tmp_path / "s1", [3.0, 6.0], seed=1, cpu_seconds=4.0)
    result, text = report(tmp_path)
    ((row,),) = (section.rows for section in result.sections)
    assert (row.label, row.horizon, row.seeds, row.num_replicas) == ("A", 4, (0, 1), 4)
    assert row.final.estimate == 3.0
    # 6 CPU-seconds for 2 runs x 2 replicas x 4 steps.
    assert row.cpu_rate == pytest.approx(1000 * 6 / 16)
    assert not row.best
    assert row.difference is None
    assert "final regret: mean over replicas [95 % interval], reward units" in text
    assert "seeds 0-1" in result.page.read_text()
    assert result.problems == ()


def test_statistic_is_applied_and_named(tmp_path):
    make_run(tmp_path / "r", [0.0, 2.0, 4.0, 100.0])
    result, text = report(tmp_path, statistic="iqm")
    assert result.sections[0].rows[0].final.estimate == 3.0
    assert "interquartile mean" in text
    assert "interquartile mean" in result.page.read_text()


def test_files_are_written_in_the_first_path_or_in_output(tmp_path):
    make_run(tmp_path / "runs" / "r", [1.0, 2.0], environment="Linear Bandit/50")
    result, text = report(tmp_path / "runs")
    assert result.page == tmp_path / "runs" / "report.html"
    assert result.images == (tmp_path / "runs" / "regret_linear_bandit_50.png",)
    assert str(result.page) in text
    elsewhere, _ = report(tmp_path / "runs", output=tmp_path / "new" / "place")
    assert sorted(file.name for file in (tmp_path / "new" / "place").iterdir()) == [
        "regret_linear_bandit_50.png",
        "report.html",
    ]
    assert elsewhere.images[0].read_bytes().startswith(b"\x89PNG")


def test_best_row_comes_first_and_the_others_get_their_paired_difference(tmp_path):
    problem = np.array([10.0, 20.0, 30.0, 40.0])
    make_run(tmp_path / "a", problem + 1, agent="worse")
    make_run(tmp_path / "b", problem, agent="better")
    make_run(tmp_path / "c", problem + 5, agent="unpaired", seed=7)
    result, _ = report(tmp_path)
    better, worse, unpaired = result.sections[0].rows
    assert [row.label for row in (better, worse, unpaired)] == ["better", "worse", "unpaired"]
    assert (better.best, worse.best, unpaired.best) == (True, False, False)
    assert worse.difference is not None
    # The differences are all 1, whatever the spread over problems.
    assert (worse.difference.estimate, worse.difference.low, worse.difference.high) == (1.0, 1.0, 1.0)
    assert better.difference is None
    assert unpaired.difference is None


def test_pairs_are_matched_by_seed_not_by_position(tmp_path):
    for seed, problem in ((0, 10.0), (1, 50.0)):
        make_run(tmp_path / f"a{seed}", [problem, problem], agent="a", seed=seed)
    # Sorted by folder name, seed 1 comes first here.
    make_run(tmp_path / "b_first", [51.0, 51.0], agent="b", seed=1)
    make_run(tmp_path / "b_second", [11.0, 11.0], agent="b", seed=0)
    result, _ = report(tmp_path)
    difference = result.sections[0].rows[1].difference
    assert difference is not None
    assert (difference.low, difference.high, difference.count) == (1.0, 1.0, 4)


def test_one_replica_has_no_interval_and_says_so(tmp_path):
    make_run(tmp_path / "r", [5.0])
    result, text = report(tmp_path)
    assert re.search(r" 5 .*\n.*\(one value,.*\n.*no interval\)", text)
    page = result.page.read_text()
    assert "(one value, no interval)" in page
    assert "One replica has no spread" in page


def test_equal_replicas_have_zero_width(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"s{seed}", [5.0], seed=seed)
    _, text = report(tmp_path)
    assert "5 [5, 5]" in text


def test_nan_replica_is_counted_and_not_averaged_away(tmp_path):
    run = make_run(tmp_path / "r", [1.0, 3.0, 8.0])
    steps, regret = run.read_regret()
    regret[2, 2:] = np.nan
    run.write_regret(steps, regret)
    result, text = report(tmp_path)
    row = result.sections[0].rows[0]
    assert (row.final.estimate, row.final.count, row.final.missing, row.num_replicas) == (2.0, 2, 1, 3)
    assert re.search(r" 3 .*\n.* 1 missing", text)
    assert "1 missing" in result.page.read_text()


def test_curve_that_was_broken_on_the_way_is_missing_even_if_it_ends_well(tmp_path):
    run = make_run(tmp_path / "r", [1.0, 3.0])
    steps, regret = run.read_regret()
    regret[0, 1] = np.inf
    run.write_regret(steps, regret)
    assert report(tmp_path)[0].sections[0].rows[0].final.missing == 1


def test_run_of_nothing_but_nan_is_drawn_and_named(tmp_path):
    make_run(tmp_path / "bad", [np.nan, np.nan], agent="bad")
    make_run(tmp_path / "good", [1.0, 2.0], agent="good")
    result, text = report(tmp_path)
    assert [(row.label, row.best) for row in result.sections[0].rows] == [("good", True), ("bad", False)]
    assert "no finite value" in text


def test_failed_unfinished_and_broken_runs_are_named_with_their_seed(tmp_path):
    make_run(tmp_path / "s0", [1.0, 2.0], seed=0)
    make_run(tmp_path / "s1", [1.0, 2.0], seed=1).fail("RuntimeError: diverged [at step 3]")
    make_run(tmp_path / "s2", [1.0, 2.0], seed=2).resume()
    make_run(tmp_path / "s3", [1.0, 2.0], seed=3)
    (tmp_path / "s3" / "regret.npz").unlink()
    make_run(tmp_path / "s4", [1.0, 2.0], seed=4)
    (tmp_path / "s4" / "manifest.json").write_text('{"format_version": 1')
    make_run(tmp_path / "s5", [1.0, 2.0], seed=5, kind="value")
    short = make_run(tmp_path / "s6", [1.0, 2.0], seed=6)
    short.write_regret([1, 2], [[1.0, 2.0], [1.0, 2.0]])
    result, text = report(tmp_path)
    assert result.sections[0].rows[0].seeds == (0,)
    assert [(entry.name, entry.status, entry.seed) for entry in result.problems] == [
        ("s1", "failed", 1),
        ("s2", "unfinished", 2),
        ("s3", "unreadable", 3),
        ("s4", "unreadable", None),
        ("s5", "other kind", 5),
        ("s6", "unreadable", 6),
    ]
    assert "failed: s1 (seed 1): RuntimeError: diverged [at step 3]" in text
    page = result.page.read_text()
    assert "6 runs are left out" in page
    assert "diverged [at step 3]" in page
    assert "regret.npz ends at step 2 of 4" in page


def test_runs_without_one_finished_still_make_a_report(tmp_path):
    make_run(tmp_path / "r", [1.0]).fail("no")
    result, _ = report(tmp_path)
    assert result.sections == ()
    assert result.images == ()
    assert "1 run is left out" in result.page.read_text()


def test_repeated_run_adds_no_evidence(tmp_path):
    make_run(tmp_path / "a", [1.0, 2.0, 3.0])
    make_run(tmp_path / "b", [1.0, 2.0])
    make_run(tmp_path / "c", [1.0, 2.0, 3.0])
    result, _ = report(tmp_path)
    assert result.sections[0].rows[0].num_replicas == 3
    assert [(entry.name, entry.detail) for entry in result.problems] == [
        ("b", "same configuration and seed as a"),
        ("c", "same configuration and seed as a"),
    ]


def test_settings_that_differ_name_the_rows(tmp_path):
    for index_dim in (4, 8):
        for seed in (0, 1):
            agent = {"_target_": "x.Y", "index_dim": index_dim, "prior": {"scale": 1.0}}
            config = {"agent": agent, "env": {"num_arms": 5}, "seed": seed, "device": f"cuda:{seed}"}
            make_run(tmp_path / f"{index_dim}_{seed}", [float(index_dim), 9.0], seed=seed, config=config)
    make_run(tmp_path / "other", [1.0, 2.0], agent="B", config={"agent": {"_target_": "x.Z"}, "env": {"num_arms": 5}})
    result, _ = report(tmp_path)
    assert [(row.label, row.seeds) for row in result.sections[0].rows] == [
        ("B", (0,)),
        ("A, index_dim=4", (0, 1)),
        ("A, index_dim=8", (0, 1)),
    ]


def test_settings_of_one_name_are_told_apart_by_their_full_key(tmp_path):
    first = {"agent": {"prior": {"scale": 1.0}, "noise": {"scale": 0.5}}}
    second = {"agent": {"prior": {"scale": 2.0}, "noise": {}}}
    make_run(tmp_path / "a", [1.0, 2.0], config=first)
    make_run(tmp_path / "b", [3.0, 4.0], config=second)
    result, _ = report(tmp_path)
    assert [row.label for row in result.sections[0].rows] == [
        "A, noise=(not set), agent.noise.scale=0.5, agent.prior.scale=1",
        "A, noise={}, agent.noise.scale=(not set), agent.prior.scale=2",
    ]


def test_environments_that_differ_in_a_setting_are_never_compared(tmp_path):
    for arms in (10, 100):
        make_run(tmp_path / f"{arms}", [1.0, 2.0], config={"env": {"num_arms": arms}, "agent": {}})
    result, _ = report(tmp_path)
    assert [section.label for section in result.sections] == ["E, num_arms=10", "E, num_arms=100"]
    assert len({file.name for file in result.images}) == 2


def test_horizons_are_not_mixed(tmp_path):
    make_run(tmp_path / "short_a", [1.0, 2.0], agent="A", horizon=4)
    make_run(tmp_path / "short_b", [2.0, 3.0], agent="B", horizon=4)
    make_run(tmp_path / "long_b", [5.0, 6.0], agent="B", horizon=1200)
    result, text = report(tmp_path)
    assert [(row.label, row.horizon, row.best) for row in result.sections[0].rows] == [
        ("B", 1200, False),
        ("A", 4, True),
        ("B", 4, False),
    ]
    assert "1,200" in text


def test_runs_recorded_at_unlike_steps_pool_where_both_have_values(tmp_path):
    make_run(tmp_path / "a", [4.0, 4.0], seed=0)
    thinned = make_run(tmp_path / "b", [8.0, 8.0], seed=1)
    thinned.write_regret([2, 4], [[4.0, 8.0], [4.0, 8.0]])
    steps, values = report(tmp_path)[0].sections[0].rows[0].curve()
    np.testing.assert_array_equal(steps, [2, 4])
    np.testing.assert_array_equal(values, [[2.0, 4.0], [2.0, 4.0], [4.0, 8.0], [4.0, 8.0]])


def test_run_without_a_time_leaves_the_rate_open(tmp_path):
    make_run(tmp_path / "a", [1.0, 2.0], seed=0)
    make_run(tmp_path / "b", [1.0, 2.0], seed=1, cpu_seconds=0.0)
    assert report(tmp_path)[0].sections[0].rows[0].cpu_rate is None


class PageReader(HTMLParser):
    """Collects tags, addresses and text, and checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "srcset", "href", "action")]
        if tag not in ("meta", "img", "source", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_escapes_every_text_and_loads_nothing(tmp_path):
    evil = "<script>alert(1)</script>\"&' [bold] $x$"
    config = {"agent": {evil: 1}, "env": {}}
    make_run(tmp_path / "a", [1.0, 2.0], agent=evil, environment=evil, config=config)
    make_run(tmp_path / "b", [1.0, 2.0], agent=evil, environment=evil, config={"agent": {evil: evil}, "env": {}})
    make_run(tmp_path / "<img src=x onerror=y>", [1.0, 2.0], agent=evil, environment=evil, seed=5).fail(evil)
    result, text = report(tmp_path, title=evil)
    assert evil in text
    page = result.page.read_text(encoding="utf-8")
    reader = PageReader()
    reader.feed(page)
    assert reader.open == []
    assert "script" not in reader.tags
    assert "link" not in reader.tags
    assert all(address.startswith("data:image/png;base64,") for address in reader.addresses)
    assert len(reader.addresses) == 4
    assert reader.text.count("<script>alert(1)</script>") >= 6
    assert "<img src=x onerror=y>" in reader.text
    assert "url(" not in page
    assert re.search(r"https?:", page) is None
    assert [file.name for file in result.images] == ["regret_script_alert_1_script_bold_x.png"]


def test_page_says_how_it_was_made(tmp_path):
    make_run(tmp_path / "a", [1.0, 2.0])
    page = report(tmp_path)[0].page.read_text()
    assert "run --seed 0" in page
    assert "95 % bootstrap intervals over replicas" in page
    assert f"numpy {np.__version__}" in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert "fewer than 5 replicas" in page


def test_mixed_versions_are_pointed_out(tmp_path):
    make_run(tmp_path / "a", [1.0, 2.0])
    manifest = make_run(tmp_path / "b", [1.0, 2.0], seed=1).path / "manifest.json"
    assert "different versions" not in report(tmp_path)[0].page.read_text()
    manifest.write_text(manifest.read_text().replace(f'"numpy": "{np.__version__}"', '"numpy": "1.0"'))
    page = report(tmp_path)[0].page.read_text()
    assert "different versions" in page
    assert f"numpy 1.0 / {np.__version__}" in page


def test_same_runs_give_the_same_bytes(tmp_path):
    make_run(tmp_path / "runs" / "a", np.arange(6.0))
    files = []
    for name in ("one", "two"):
        report(tmp_path / "runs", output=tmp_path / name)
        files.append({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
    assert files[0] == files[1]


def test_labels_that_make_the_same_file_name_get_numbers(tmp_path):
    for environment in ("a b", "a_b", "???", "!!!"):
        make_run(tmp_path / str(len(list(tmp_path.iterdir()))), [1.0], environment=environment)
    names = {file.name for file in report(tmp_path)[0].images}
    assert names == {"regret_a_b.png", "regret_a_b_2.png", "regret_environment.png", "regret_environment_2.png"}


def test_figures_and_names_stay_whole_on_a_narrow_terminal(tmp_path):
    for agent in ("LinearThompsonSamplingWithLongName", "B"):
        for seed in (0, 1):
            make_run(
                tmp_path / f"{agent}{seed}",
                [21.91 + seed, 29.44, 25.0],
                agent=agent,
                seed=seed,
                horizon=100_000,
                cpu_seconds=9.7,
            )
    stream = io.StringIO()
    result = build_report(tmp_path, console=Console(file=stream, width=80))
    text = stream.getvalue()
    assert "…" not in text
    for row in result.sections[0].rows:
        assert row.cpu_rate is not None
        assert f"{row.cpu_rate:.3g}" in text
    assert str(result.sections[0].rows[0].final) in text
    names = "".join(line[:24].split("  ")[0].strip() for line in text.splitlines())
    assert "LinearThompsonSamplingWithLongName" in names


def test_seeds_are_shown_as_ranges():
    assert show_seeds([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert show_seeds([4]) == "4"


def test_empty_folder_is_a_clear_error(tmp_path):
    with pytest.raises(RunFolderError, match=r"no run found in .*: no folder there holds a manifest\.json"):
        report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_and_unknown_statistic_are_named(tmp_path):
    with pytest.raises(RunFolderError, match="nowhere is not a folder"):
        report(tmp_path / "nowhere")
    with pytest.raises(ParameterError, match="statistic of build_report must be one of 'iqm', 'mean', 'median'"):
        report(tmp_path, statistic="best")


def test_one_path_may_be_given_plainly(tmp_path, capsys):
    make_run(tmp_path / "a", [1.0, 2.0])
    build_report(tmp_path)
    assert "1.5 [1.0, 2.0]" in capsys.readouterr().out
