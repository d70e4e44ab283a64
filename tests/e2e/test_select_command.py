"""`ensemblepp select` as a subprocess: comparison, report, refusals, a pool of one's own, resume after kill -9."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ensemblepp.store import RunFolder, find_runs

SMALL = ["num_replicas=3", "env.num_responses=80", "env.feature_dim=4", "tensorboard=false", "progress=false"]


def _ensemblepp(*arguments: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ensemblepp", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=check, timeout=300)


def test_rules_are_compared_in_one_report(tmp_path: Path) -> None:
    done = _ensemblepp("select", "-m", "acquisition=passive,infomax", "horizon=30", *SMALL, cwd=tmp_path)
    assert done.stdout.count("eval/accuracy after 30 questions") == 2
    runs = find_runs([tmp_path / "runs"])
    assert sorted(run.manifest.agent for run in runs) == ["infomax", "passive"]
    assert set(runs[0].read_results()) == {"regret/cumulative", "eval/accuracy", "eval/best_of_regret"}
    report = _ensemblepp("report", "runs", cwd=tmp_path)
    assert "infomax" in report.stdout
    assert (tmp_path / "runs" / "report.html").stat().st_size > 10_000
    again = _ensemblepp("select", "acquisition=passive", "horizon=30", *SMALL, cwd=tmp_path)
    assert "already finished" in again.stdout


def test_a_pool_of_ones_own(tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "pool.npz", features=features, reward=features[:, 0])
    _ensemblepp("select", "env.pool=pool.npz", "horizon=10", "progress=false", cwd=tmp_path)
    (run,) = find_runs([tmp_path / "runs"])
    assert run.config["env"]["pool"] == "pool.npz"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["acquisition=best"], "acquisition of run_duels must be one of"),
        (["horizon=0"], "horizon of ensemblepp select must be an int >= 1; got 0"),
        (["horizn=10"], "Key 'horizn' not in 'SelectConfig'"),
        (["env=linear"], "Key 'model' not in 'SelectConfig'"),
        (["learner.prior_scale=0"], "prior_scale of PreferenceLearner must be a finite number > 0; got 0"),
        (["env.pool=nowhere.npz"], "nowhere.npz"),
        (["dtype=float16"], "dtype of ensemblepp select must be one of"),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = _ensemblepp("select", *arguments, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/select/*/results.csv"))


def test_a_run_killed_in_the_middle_continues_bit_for_bit(tmp_path: Path) -> None:
    arguments = ["select", "horizon=2500", "checkpoint_period=100", *SMALL]
    command = [sys.executable, "-m", "ensemblepp", *arguments, "output_dir=cut"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("cut/*/checkpoints/latest.ckpt")) and time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (folder,) = (tmp_path / "cut").iterdir()
    assert RunFolder.open(folder).status == "running"
    _ensemblepp(*arguments, "output_dir=cut", cwd=tmp_path)
    _ensemblepp(*arguments, "output_dir=whole", cwd=tmp_path)
    for name in ("results.csv", "regret.npz"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / folder.name / name).read_bytes()


def test_help_names_rules_and_options(tmp_path: Path) -> None:
    shown = _ensemblepp("select", "--help", cwd=tmp_path).stdout
    for word in ("infomax", "duels_fixed", "checkpoint_period", "prior_scale"):
        assert word in shown
