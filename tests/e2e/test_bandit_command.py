"""`ensemblepp bandit` and `ensemblepp report` as subprocesses: outputs, refusals, resume after kill -9."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ensemblepp.store import RunFolder, find_runs

SMALL = ["num_replicas=4", "tensorboard=false", "progress=false"]


def _ensemblepp(*arguments: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ensemblepp", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=check, timeout=300)


def test_runs_are_compared_in_one_report(tmp_path: Path) -> None:
    agents = "agent=linear_ensemble_pp,uniform"
    done = _ensemblepp("bandit", "-m", agents, "env=linear,digits", "horizon=60", *SMALL, cwd=tmp_path)
    assert "regret after 60 steps" in done.stdout
    assert len(find_runs([tmp_path / "runs"])) == 4
    report = _ensemblepp("report", "runs", cwd=tmp_path)
    for word in ("linear_ensemble_pp", "uniform", "digits"):
        assert word in report.stdout
    assert (tmp_path / "runs" / "report.html").stat().st_size > 10_000
    assert list((tmp_path / "runs").glob("regret_*.png"))


def test_the_same_command_again_skips_what_is_finished(tmp_path: Path) -> None:
    command = ("bandit", "horizon=20", *SMALL)
    _ensemblepp(*command, cwd=tmp_path)
    again = _ensemblepp(*command, cwd=tmp_path)
    assert "already finished" in again.stdout
    (run,) = find_runs([tmp_path / "runs"])
    started = run.manifest.finished
    _ensemblepp(*command, "overwrite=true", cwd=tmp_path)
    (run,) = find_runs([tmp_path / "runs"])
    assert started is not None
    assert run.status == "finished"
    # Another seed is another run, in a folder of its own.
    _ensemblepp(*command, "seed=1", cwd=tmp_path)
    assert len(find_runs([tmp_path / "runs"])) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["horizon=abc"], "Value 'abc' of type 'str' could not be converted to Integer"),
        (["horizon=0"], "horizon of ensemblepp bandit must be an int >= 1; got 0"),
        (["horizn=10"], "Key 'horizn' not in 'BanditConfig'"),
        (["env=atlantis"], "Could not find 'env/atlantis'"),
        (["agent.index_dim=0"], "index_dim of LinearEnsemblePP must be an int >= 1; got 0"),
        (["+agent.colour=1"], "unexpected keyword argument 'colour'"),
        (["dtype=float16"], "dtype of ensemblepp bandit must be one of 'float32', 'float64'; got 'float16'"),
        (["env=linear_sphere", "agent=lin_ucb"], "action_set of LinUCB must be \"finite\"; got 'compact'"),
        (["num_replicas=-1"], "num_replicas"),
    ],
)
def test_bad_options_are_refused_by_name_before_anything_runs(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = _ensemblepp("bandit", *arguments, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_one_failing_run_does_not_stop_the_others(tmp_path: Path) -> None:
    done = _ensemblepp("bandit", "-m", "agent.index_dim=4,0,6", "horizon=20", *SMALL, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "index_dim of LinearEnsemblePP must be an int >= 1; got 0" in done.stderr
    assert [run.status for run in find_runs([tmp_path / "runs"])] == ["finished", "finished"]


def test_a_killed_run_continues_and_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    options = ["horizon=6000", "checkpoint_period=100", *SMALL]
    whole = ["bandit", *options, "output_dir=whole"]
    _ensemblepp(*whole, cwd=tmp_path)
    killed = [sys.executable, "-m", "ensemblepp", "bandit", *options, "output_dir=killed"]
    process = subprocess.Popen(killed, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("killed/*/checkpoints/latest.ckpt")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (interrupted,) = find_runs([tmp_path / "killed"])
    assert interrupted.status == "running"
    assert not (interrupted.path / "regret.npz").exists()
    subprocess.run(killed, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    (first,), (second,) = find_runs([tmp_path / "whole"]), find_runs([tmp_path / "killed"])
    assert second.status == "finished"
    np.testing.assert_array_equal(first.read_regret()[1], second.read_regret()[1])
    for name in ("results.csv", "summary.json"):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()


def test_help_explains_each_command(tmp_path: Path) -> None:
    usage = _ensemblepp("--help", cwd=tmp_path).stdout
    for command in ("bandit", "report"):
        assert command in usage
        text = _ensemblepp(command, "--help", cwd=tmp_path).stdout
        assert f"usage: ensemblepp {command}" in text
        assert "Options and their values now:" in text
    assert "linear_ensemble_pp" in _ensemblepp("bandit", "--help", cwd=tmp_path).stdout
    unknown = _ensemblepp("bandits", cwd=tmp_path, check=False)
    assert unknown.returncode == 2
    assert "unknown command 'bandits'; known: bandit, report" in unknown.stderr


def test_the_resolved_configuration_is_stored(tmp_path: Path) -> None:
    _ensemblepp("bandit", "env=linear_large", "env.num_arms=30", "horizon=5", *SMALL, cwd=tmp_path)
    (run,) = find_runs([tmp_path / "runs"])
    assert run.config["env"]["feature_dim"] == 50
    assert run.config["agent"]["prior_covariance"] == 10.0
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["seed"] == 0
    assert "env.num_arms=30" in manifest["command"]
    assert RunFolder.open(run.path).manifest.num_replicas == 4
