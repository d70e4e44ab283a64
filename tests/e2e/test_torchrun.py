"""`ensemblepp` under torchrun: rank 0 alone runs and writes; the other ranks end well."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ensemblepp.cli import main
from ensemblepp.store import find_runs

ENSEMBLEPP = (sys.executable, "-m", "ensemblepp")
# --standalone takes a free port, so that several test runs may share a machine.
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ensemblepp")
SMALL = ("bandit", "num_replicas=4", "horizon=60", "checkpoint_period=20", "progress=false")
IDLE = "has nothing to do; rank 0 runs alone"


def _run(
    command: Sequence[str], cwd: Path, *, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    # One thread everywhere, as torchrun has it: a sum may depend on the number of threads that share it.
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    variables |= {"OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=check, timeout=300)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_two_ranks_make_the_run_of_one_process(tmp_path: Path) -> None:
    _run([*ENSEMBLEPP, *SMALL, "output_dir=alone"], tmp_path)
    done = _run([*TORCHRUN, *SMALL, "output_dir=ranks"], tmp_path)
    assert done.stdout.count("regret after 60 steps") == 1
    assert done.stderr.count("nothing to do") == 1
    assert f"rank 1 (RANK in the environment) {IDLE}" in done.stderr
    (alone,), (run,) = find_runs([tmp_path / "alone"]), find_runs([tmp_path / "ranks"])
    assert run.status == "finished"
    assert {path.name for path in (tmp_path / "ranks").iterdir()} == {run.path.name}
    for name in ("results.csv", "summary.json"):
        assert (run.path / name).read_bytes() == (alone.path / name).read_bytes()
    # One writer: the files of a lone run and no second event file, checkpoint or leftover.
    assert len(list(run.path.rglob("events.out.tfevents.*"))) == 1
    assert len(_files(run.path)) == len(_files(alone.path))
    assert {path.name for path in tmp_path.iterdir()} == {"alone", "ranks"}


@pytest.mark.slow
def test_two_ranks_write_one_report(tmp_path: Path) -> None:
    _run([*ENSEMBLEPP, *SMALL], tmp_path)
    done = _run([*TORCHRUN, "report", "runs"], tmp_path)
    assert (tmp_path / "runs" / "report.html").is_file()
    assert done.stdout.count("linear_ensemble_pp") == 1
    assert done.stderr.count(IDLE) == 1


@pytest.mark.parametrize("command", [SMALL, ("report", ".")])
def test_another_rank_writes_nothing(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = _run([*ENSEMBLEPP, *command], tmp_path, RANK="3", WORLD_SIZE="4", LOCAL_RANK="1")
    assert done.stdout == ""
    assert done.stderr == f"ensemblepp: rank 3 (RANK in the environment) {IDLE}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", ["0", "00", "", None])
def test_rank_0_and_no_rank_do_the_work(
    rank: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["ensemblepp", "--help"])
    main()
    assert "usage: ensemblepp COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("rank", ["one", "-1", "1.5", "0x1", " ", "²"])
def test_a_malformed_rank_is_refused(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["ensemblepp", "--help"])
    with pytest.raises(SystemExit) as refusal:
        main()
    assert refusal.value.code == 2
    told = capsys.readouterr()
    rule = "must be an int >= 0, as torchrun sets it"
    assert told.err == f"ensemblepp: RANK in the environment {rule}; got {rank!r}. Outside torchrun, unset it\n"
    assert told.out == ""
