from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ensemblepp.errors import ParameterError
from ensemblepp.manifest import source_commit
from ensemblepp.store import (
    RunFolder,
    RunFolderError,
    canonical_value,
    find_run_paths,
    find_runs,
    flatten_config,
)

CONFIG = {"agent": {"_target_": "a.B", "index_dim": 8, "sizes": [50, 50]}, "note": None, "scale": 1e-05, "text": "${x}"}


def create(path, config=CONFIG, **options):
    defaults = {"agent": "A", "environment": "E", "seed": 3, "num_replicas": 2, "horizon": 4, "command": "run it"}
    return RunFolder.create(path, config, **{**defaults, **options})


def edit_manifest(path: Path, **changes):
    content = json.loads((path / "manifest.json").read_text())
    content.update(changes)
    (path / "manifest.json").write_text(json.dumps({key: value for key, value in content.items() if value != "DROP"}))


def test_created_run_reads_back_as_it_was(tmp_path):
    run = create(tmp_path / "deep" / "run")
    again = RunFolder.open(tmp_path / "deep" / "run")
    assert again.config == CONFIG
    assert again.manifest == run.manifest
    assert (again.status, again.name, again.checkpoints) == (
        "running",
        "run",
        tmp_path / "deep" / "run" / "checkpoints",
    )
    assert not again.checkpoints.exists()
    versions = again.manifest.versions
    assert versions["numpy"] == np.__version__
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert again.manifest.started.endswith("+00:00")


def test_run_goes_from_running_to_failed_to_finished(tmp_path):
    run = create(tmp_path)
    run.fail(ValueError("no luck"), cpu_seconds=1.5)
    failed = RunFolder.open(tmp_path).manifest
    assert (failed.status, failed.error, failed.cpu_seconds) == ("failed", "ValueError: no luck", 1.5)
    assert failed.finished is not None
    run.resume()
    assert (run.status, run.manifest.error, run.manifest.finished) == ("running", None, None)
    run.finish(cpu_seconds=2.0)
    finished = RunFolder.open(tmp_path).manifest
    assert (finished.status, finished.error, finished.cpu_seconds) == ("finished", None, 3.5)


def test_same_configuration_opens_the_run_that_is_there(tmp_path):
    create(tmp_path).finish(1.0)
    again = create(tmp_path, {**CONFIG, "agent": {**CONFIG["agent"], "index_dim": 8.0}}, command="run it once more")
    assert again.status == "finished"
    assert again.manifest.command == "run it"


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({**CONFIG, "agent": {**CONFIG["agent"], "index_dim": 16}}, {}, "agent.index_dim is 8 there and 16 here"),
        ({**CONFIG, "agent": {**CONFIG["agent"], "sizes": [50, 9]}}, {}, "agent.sizes.1 is 50 there and 9 here"),
        ({**CONFIG, "zeal": 1}, {}, "zeal is no such key there and 1 here"),
        ({key: CONFIG[key] for key in CONFIG if key != "text"}, {}, r"text is '\$\{x\}' there and no such key here"),
        ({**CONFIG, "note": False}, {}, "note is None there and False here"),
        # Two differences: the first key in sorted order is named.
        ({**CONFIG, "scale": 2.0, "note": 1}, {}, "note is None there and 1 here"),
        (CONFIG, {"seed": 4}, "seed is 3 there and 4 here"),
        (CONFIG, {"agent": "Other"}, "agent is 'A' there and 'Other' here"),
    ],
)
def test_another_configuration_is_refused_by_its_first_differing_key(tmp_path, config, options, message):
    create(tmp_path)
    with pytest.raises(RunFolderError, match=message):
        create(tmp_path, config, **options)
    assert RunFolder.open(tmp_path).config == CONFIG


def test_files_of_others_may_be_in_the_folder(tmp_path):
    (tmp_path / "run.log").write_text("hello")
    (tmp_path / "config.yaml").write_text("left over from a start that was cut short")
    assert create(tmp_path).config == CONFIG
    assert (tmp_path / "run.log").read_text() == "hello"


def test_only_plain_values_make_a_configuration(tmp_path):
    with pytest.raises(ParameterError, match="config of RunFolder must hold plain values only"):
        create(tmp_path / "run", {"agent": object()})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("key", "value"), [("seed", -1), ("num_replicas", 0), ("horizon", True)])
def test_bad_sizes_are_refused_by_name(tmp_path, key, value):
    with pytest.raises(ParameterError, match=f"{key} of RunFolder must be an int"):
        create(tmp_path / "run", **{key: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, r"manifest.json has format_version 99; this version of ensemblepp reads 1"),
        ({"format_version": "DROP"}, "manifest.json has format_version None"),
        ({"format_version": True}, "manifest.json has format_version True"),
        ({"seed": "DROP"}, "manifest.json lacks the key 'seed'"),
        ({"seed": "3"}, "manifest.json holds seed = '3', which is not of the right type"),
        ({"seed": True}, "manifest.json holds seed = True"),
        ({"status": "done"}, "manifest.json holds status = 'done'; it must be one of running, finished, failed"),
        ({"cpu_seconds": math.nan}, "cpu_seconds out of range"),
        ({"horizon": 0}, "horizon or cpu_seconds out of range"),
    ],
)
def test_manifest_that_is_not_one_is_refused_by_key(tmp_path, change, message):
    create(tmp_path)
    edit_manifest(tmp_path, **change)
    with pytest.raises(RunFolderError, match=message):
        RunFolder.open(tmp_path)


def test_manifest_may_carry_keys_of_others(tmp_path):
    create(tmp_path)
    edit_manifest(tmp_path, cluster="blue")
    assert RunFolder.open(tmp_path).manifest.seed == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("manifest.json", None, "manifest.json is missing"),
        ("manifest.json", b'{"format_version": 1, "ki', "manifest.json is not valid JSON, the file may be cut short"),
        ("manifest.json", b"", "manifest.json is not valid JSON"),
        ("manifest.json", b"\xff\xfe", "manifest.json cannot be read"),
        ("manifest.json", b"[1, 2]", "manifest.json must hold a JSON object; got list"),
        ("manifest.json", b"[" * 200_000, "manifest.json is not valid JSON"),
        ("config.yaml", None, "config.yaml is missing"),
        ("config.yaml", b"a: [1, 2", "config.yaml is not valid YAML"),
        ("config.yaml", b"- 1", "config.yaml must hold a mapping; got list"),
        ("config.yaml", b"a: !!python/object/apply:os.getcwd []", "config.yaml is not valid YAML"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    create(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RunFolderError, match=message):
        RunFolder.open(tmp_path)


def test_results_are_long_format_with_every_digit(tmp_path):
    run = create(tmp_path)
    run.write_results([1, 4], {"regret/cumulative": [[0.1, 1 / 3], [math.nan, 2.0]], 'odd,"name': [[1, 2]]})
    assert (tmp_path / "results.csv").read_text() == (
        "replica,step,metric,value\n"
        "0,1,regret/cumulative,0.1\n"
        "0,4,regret/cumulative,0.3333333333333333\n"
        "1,1,regret/cumulative,nan\n"
        "1,4,regret/cumulative,2.0\n"
        '0,1,"odd,""name",1.0\n'
        '0,4,"odd,""name",2.0\n'
    )
    table = run.read_results()
    assert list(table) == ["regret/cumulative", 'odd,"name']
    np.testing.assert_array_equal(table["regret/cumulative"][0], [1, 4])
    np.testing.assert_array_equal(table["regret/cumulative"][1], [[0.1, 1 / 3], [math.nan, 2.0]])


def test_single_precision_results_read_back_exactly(tmp_path):
    run = create(tmp_path)
    values = np.random.default_rng(0).normal(size=(5, 50)).astype(np.float32)
    run.write_results(np.arange(50), {"m": values})
    np.testing.assert_array_equal(run.read_results()["m"][1].astype(np.float32), values)
    assert max(map(len, (tmp_path / "results.csv").read_text().splitlines())) < 30


def test_same_results_give_the_same_bytes(tmp_path):
    values = np.random.default_rng(0).normal(size=(2, 4))
    files = []
    for name in ("a", "b"):
        run = create(tmp_path / name)
        run.write_results(np.arange(4), {"m": values, "n": values})
        run.write_regret(np.arange(4), values)
        files.append([(tmp_path / name / file).read_bytes() for file in ("results.csv", "regret.npz", "config.yaml")])
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("replica,step,metric,value\n0,1,m,0.5\n0,2,m,0.5\n1,1,m,0.5\n", "lacks values of 'm'; the file may be cut"),
        ("replica,step,metric,value\n0,1,m,0.5\n0,2,m", "results.csv is broken at line 3"),
        ("replica,step,metric,value\n0,1,m,half\n", "results.csv is broken at line 2"),
        ("a,b\n", "results.csv must begin with the line replica,step,metric,value"),
        ("", "results.csv must begin with the line"),
    ],
)
def test_broken_results_are_named(tmp_path, content, message):
    run = create(tmp_path)
    (tmp_path / "results.csv").write_text(content)
    with pytest.raises(RunFolderError, match=message):
        run.read_results()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_regret_reads_back_in_its_dtype(tmp_path, dtype):
    run = create(tmp_path)
    regret = np.array([[1, 2, 3, math.nan], [0.1, 0.2, 0.3, 0.4]], dtype=dtype)
    run.write_regret([1, 2, 3, 4], regret)
    steps, values = run.read_regret()
    np.testing.assert_array_equal(steps, [1, 2, 3, 4])
    np.testing.assert_array_equal(values, regret)
    assert values.dtype == dtype


@pytest.mark.parametrize(
    ("steps", "values", "message"),
    [
        ([1, 2, 3], np.ones((2, 4)), r"cumulative_regret of RunFolder must be numbers of shape \(replicas, 3\)"),
        ([1, 2], np.ones((3, 2)), "cumulative_regret of RunFolder must have num_replicas = 2 rows; got 3"),
        ([2, 1], np.ones((2, 2)), "steps of RunFolder must be increasing whole numbers"),
        ([1.5, 2.5], np.ones((2, 2)), "steps of RunFolder must be increasing whole numbers"),
        ([1, 2], [["a", "b"], ["c", "d"]], "cumulative_regret of RunFolder must be numbers"),
    ],
)
def test_regret_of_another_shape_is_refused(tmp_path, steps, values, message):
    run = create(tmp_path)
    with pytest.raises(ParameterError, match=message):
        run.write_regret(steps, values)
    assert not (tmp_path / "regret.npz").exists()


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def test_reading_regret_never_unpickles(tmp_path):
    run = create(tmp_path)
    bomb = np.empty((2, 4), dtype=object)
    bomb[:] = Bomb()
    np.savez(tmp_path / "regret.npz", steps=np.arange(4), cumulative_regret=bomb)
    with pytest.raises(RunFolderError, match=r"regret\.npz cannot be read"):
        run.read_regret()
    (tmp_path / "regret.npz").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(RunFolderError, match=r"regret\.npz cannot be read"):
        run.read_regret()


def test_broken_regret_is_named(tmp_path):
    run = create(tmp_path)
    with pytest.raises(RunFolderError, match=r"regret\.npz is missing"):
        run.read_regret()
    run.write_regret(np.arange(4), np.ones((2, 4)))
    whole = (tmp_path / "regret.npz").read_bytes()
    for size in range(0, len(whole), 40):
        (tmp_path / "regret.npz").write_bytes(whole[:size])
        with pytest.raises(RunFolderError, match=r"regret\.npz cannot be read"):
            run.read_regret()
    np.savez(tmp_path / "regret.npz", steps=np.arange(4), cumulative_regret=np.ones((3, 4)))
    with pytest.raises(RunFolderError, match=r"regret.npz must hold regret of shape \(2, 4\); got \(3, 4\)"):
        run.read_regret()
    np.save(tmp_path / "array.npy", np.ones(3))
    (tmp_path / "array.npy").rename(tmp_path / "regret.npz")
    with pytest.raises(RunFolderError, match=r"regret\.npz cannot be read"):
        run.read_regret()


@dataclass
class Figure:
    estimate: float
    low: float | None


def test_summary_holds_plain_values_and_null_for_nan(tmp_path):
    run = create(tmp_path)
    run.write_summary(
        {"final": Figure(1.5, None), "values": np.array([1.0, math.nan]), "n": np.int64(3), "t": (math.inf, "x")}
    )
    assert run.read_summary() == {
        "final": {"estimate": 1.5, "low": None},
        "values": [1.0, None],
        "n": 3,
        "t": [None, "x"],
    }
    (tmp_path / "summary.json").write_text('{"final": ')
    with pytest.raises(RunFolderError, match=r"summary\.json is not valid JSON"):
        run.read_summary()


def test_failing_write_leaves_the_old_results(tmp_path, monkeypatch):
    run = create(tmp_path)
    run.write_regret(np.arange(4), np.ones((2, 4)))
    run.write_summary({"a": 1})
    old = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fill_the_disk(file, **arrays):
        file.write(b"PK half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", fill_the_disk)
    with pytest.raises(OSError, match="no space left"):
        run.write_regret(np.arange(4), np.zeros((2, 4)))
    with pytest.raises(TypeError):
        run.write_summary({"a": object()})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == old


def test_runs_are_found_once_sorted_and_not_below_a_run(tmp_path):
    for name in ("b", "a/deep", "c"):
        create(tmp_path / name)
    (tmp_path / "c" / "checkpoints").mkdir()
    (tmp_path / "c" / "checkpoints" / "manifest.json").write_text("{}")
    expected = [tmp_path / "a" / "deep", tmp_path / "b", tmp_path / "c"]
    assert find_run_paths([tmp_path]) == expected
    assert [run.path for run in find_runs([tmp_path, tmp_path / "b", tmp_path / "a" / ".." / "c"])] == expected
    assert find_runs([tmp_path / "b"])[0].path == tmp_path / "b"
    assert find_run_paths([]) == []


def test_search_names_a_path_that_is_no_folder(tmp_path):
    with pytest.raises(RunFolderError, match="nowhere is not a folder"):
        find_run_paths([tmp_path / "nowhere"])


def test_search_stops_at_a_broken_run(tmp_path):
    create(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").write_text("{")
    assert find_run_paths([tmp_path]) == [tmp_path / "a"]
    with pytest.raises(RunFolderError, match=r"a/manifest\.json is not valid JSON"):
        find_runs([tmp_path])


def test_configurations_are_flattened_to_dotted_keys():
    assert flatten_config({"a": {"b": [1, {"c": 2}], "d": {}}, "e": []}) == {
        "a.b.0": 1,
        "a.b.1.c": 2,
        "a.d": {},
        "e": [],
    }


def test_values_agree_when_they_mean_the_same():
    assert canonical_value(1) == canonical_value(1.0)
    assert canonical_value(math.nan) == canonical_value(math.nan)
    assert len({canonical_value(value) for value in (1, True, "1", None, "None", [], {}, 0.1)}) == 8


def test_commit_is_that_of_the_source_or_unknown(monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    source_commit.cache_clear()
    commit, modified = source_commit()
    assert commit is None or len(commit) in (40, 64)
    assert isinstance(modified, bool)

    def no_git(*arguments, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    source_commit.cache_clear()
    assert source_commit() == (None, False)
    source_commit.cache_clear()
