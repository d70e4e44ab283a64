"""`ensemblepp value` as a subprocess: outputs, kill -9 and resume, a saved agent read back."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ensemblepp import checkpoint
from ensemblepp.store import RunFolder, find_runs

SMALL = ["env.size=5", "num_replicas=2", "tensorboard=false", "progress=false"]


def _ensemblepp(*arguments: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ensemblepp", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=check, timeout=300)


def _only_run(folder: Path) -> RunFolder:
    (run,) = find_runs([folder])
    return run


def _final_state(run: RunFolder) -> dict[str, object]:
    state = checkpoint.load(run.checkpoints / "latest.ckpt", kind="value run")
    del state["cpu_seconds"]
    return state


def _same(one: object, two: object) -> bool:
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    return one == two


def test_a_run_killed_by_the_system_resumes_to_the_same_parameters_and_returns(tmp_path: Path) -> None:
    command = ["value", *SMALL, "horizon=1200", "checkpoint_period=100", "log_period=50"]
    _ensemblepp(*command, "output_dir=whole", cwd=tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "ensemblepp", *command, "output_dir=killed"], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("killed/*/checkpoints/latest.ckpt")):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    killed = _only_run(tmp_path / "killed")
    assert killed.status == "running"
    assert not (killed.path / "summary.json").exists()
    resumed = _ensemblepp("value", f"resume={killed.path}", "tensorboard=false", "progress=false", cwd=tmp_path)
    assert "deep_sea / hyper_fqi" in resumed.stdout
    whole, killed = _only_run(tmp_path / "whole"), _only_run(tmp_path / "killed")
    assert killed.status == "finished"
    assert _same(_final_state(whole), _final_state(killed))
    for name in ("episodes.csv", "results.csv", "summary.json"):
        assert (whole.path / name).read_bytes() == (killed.path / name).read_bytes()


def test_a_finished_run_is_skipped_and_its_agent_evaluates_in_three_lines(tmp_path: Path) -> None:
    command = ("value", *SMALL, "horizon=600", "evaluation.stop_when_solved=true")
    done = _ensemblepp(*command, cwd=tmp_path)
    assert "solved: 2 of 2 learners" in done.stdout
    assert "already finished" in _ensemblepp(*command, cwd=tmp_path).stdout
    run = _only_run(tmp_path / "runs")
    summary = json.loads((run.path / "summary.json").read_text())
    assert len(summary["episodes_to_solve"]) == 2
    lines = (
        "from ensemblepp.value import evaluate, load_run\n"
        f"agent, environment = load_run({str(run.path)!r})\n"
        "print(evaluate(agent, environment.make_evaluation(100), 100, seed=1).returns.mean(1).tolist())\n"
    )
    printed = subprocess.run(
        [sys.executable, "-W", "error", "-c", lines],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    # The run ended at the evaluation that found the slowest learner solved.
    assert max(json.loads(printed.stdout)) == pytest.approx(0.99)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resume=nowhere"], "nowhere"),
        (["resume=nowhere", "env.size=5"], "env.size of ensemblepp value must be left out with resume"),
        (["agent=lin_ucb"], "agent of ensemblepp value must learn action values"),
        (["agent.index_dim=0"], "index_dim of HyperFQI must be an int >= 1; got 0"),
        (["evaluation.unit=days"], "unit of Evaluation must be one of"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = _ensemblepp("value", "tensorboard=false", "progress=false", *arguments, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
