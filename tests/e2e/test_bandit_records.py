"""`ensemblepp bandit` where learning diverges, and where the posterior is judged."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ensemblepp.store import find_runs

SMALL = ["horizon=60", "num_replicas=4", "tensorboard=false", "progress=false"]

# Installed nowhere: a command run with `python -m` finds modules in its working folder.
DIVERGING = """
import torch
from ensemblepp.agents import LinearEnsemblePP

class Diverging(LinearEnsemblePP):
    def __init__(self, feature_dim, *, stops, **options):
        super().__init__(feature_dim, **options)
        self.stops = torch.tensor([stops.get(replica, 10**9) for replica in range(self.num_replicas)])
        self.stopped, self.seen = torch.full_like(self.stops, -1), 0

    def scores(self, contexts, index):
        return torch.where((self.stopped >= 0).view(-1, 1, 1), 0.0, super().scores(contexts, index))

    def update(self, transition):
        self.seen += 1
        self.stopped = torch.where((self.stopped < 0) & (self.stops == self.seen), self.seen, self.stopped)
        return super().update(transition)

    def state_dict(self):
        return super().state_dict() | {"stopped": self.stopped, "seen": self.seen}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.stopped, self.seen = state["stopped"], state["seen"]
"""
LINE = "replica 1 stopped at step 7: its training loss was not finite; the other 3 replicas are kept"


def _ensemblepp(*arguments: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ensemblepp", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=check, timeout=300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "diverging.py").write_text(DIVERGING)
    return tmp_path


def test_a_stopped_replica_is_named_the_others_are_kept_and_the_command_fails(folder: Path) -> None:
    diverging = ["agent._target_=diverging.Diverging", "+agent.stops={1:7}"]
    done = _ensemblepp("bandit", *diverging, *SMALL, cwd=folder, check=False)
    assert done.returncode == 1
    assert LINE in done.stdout
    assert "(1 missing)" in done.stdout
    assert "3 of 4 replicas finished" in done.stderr
    assert "Traceback" not in done.stderr
    (run,) = find_runs([folder / "runs"])
    assert (run.status, run.manifest.stopped) == ("finished", {1: 7})
    _, regret = run.read_regret()
    assert np.isfinite(regret[[0, 2, 3]]).all()
    np.testing.assert_array_equal(np.isnan(regret[1]), np.arange(1, 61) >= 7)
    # The same command again skips the run, and says the same about it.
    again = _ensemblepp("bandit", *diverging, *SMALL, cwd=folder, check=False)
    assert again.returncode == 1
    assert "already finished" in again.stdout
    assert LINE in again.stdout
    report = _ensemblepp("report", "runs", cwd=folder)
    assert "1 missing" in report.stdout
    assert "stopped: " in report.stdout
    assert LINE in " ".join(report.stdout.split())


def test_in_a_multirun_the_others_still_run(folder: Path) -> None:
    stops = "+agent.stops={1:7},{0:3,1:3,2:3,3:3},{}"
    done = _ensemblepp("bandit", "-m", "agent._target_=diverging.Diverging", stops, *SMALL, cwd=folder, check=False)
    assert done.returncode == 1
    assert LINE in done.stdout
    assert "replica 0 stopped at step 3: its training loss was not finite; no replica is left" in done.stdout
    assert "Traceback" not in done.stderr
    runs = find_runs([folder / "runs"])
    outcomes = sorted((run.status, len(run.manifest.stopped)) for run in runs)
    assert outcomes == [("failed", 4), ("finished", 0), ("finished", 1)]
    assert "The results are in runs" in done.stderr
    (failed,) = (run for run in runs if run.status == "failed")
    assert "replica 0 at step 3, replica 1 at step 3" in str(failed.manifest.error)


def test_diagnostics_are_recorded(tmp_path: Path) -> None:
    agents = "agent=linear_thompson_sampling,linear_ensemble_pp"
    _ensemblepp("bandit", "-m", agents, "diagnostics=50", *SMALL, cwd=tmp_path)
    runs = {run.manifest.agent: run for run in find_runs([tmp_path / "runs"])}
    for run in runs.values():
        results = run.read_results()
        for name in ("joint_log_loss", "marginal_log_loss", "coverage_90", "kl_exact"):
            steps, values = results[f"eval/{name}"]
            assert 5 < len(steps) <= 20
            assert steps[-1] == 60
            assert np.isfinite(values).all()
        assert results["eval/kl_exact"][1].min() > 0
        assert run.config["diagnostics"] == 50
    exact = runs["linear_thompson_sampling"].read_results()
    assert exact["eval/kl_exact"][1].max() < 0.05  # about 1 / 1000 for samples of the exact posterior itself
    assert (exact["eval/marginal_log_loss"][1][:, -1] < exact["eval/marginal_log_loss"][1][:, 0]).all()
    # Judging is no setting of the agent: with and without it a run is one row, and the same run.
    _ensemblepp("bandit", "agent=linear_ensemble_pp", *SMALL, cwd=tmp_path)
    (plain,) = (run for run in find_runs([tmp_path / "runs"]) if run.config["diagnostics"] == 0)
    np.testing.assert_array_equal(plain.read_regret()[1], runs["linear_ensemble_pp"].read_regret()[1])
    assert not any(name.startswith("eval/") for name in plain.read_results())
    assert "repeated: " in _ensemblepp("report", "runs", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["diagnostics=-1"], "diagnostics of ensemblepp bandit must be an int >= 0; got -1"),
        (["diagnostics=5", "agent=greedy"], "agent of posterior_samples must sample from its posterior; got Greedy"),
    ],
)
def test_diagnostics_that_cannot_be_made_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = _ensemblepp("bandit", *arguments, *SMALL, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_without_a_replica_left_ends_with_an_error_that_names_them(folder: Path) -> None:
    diverging = ["agent._target_=diverging.Diverging", "+agent.stops={0:3,1:5}", *SMALL, "num_replicas=2"]
    told = "every replica of linear_ensemble_pp stopped because its training loss was not finite: replica 0 at step 3, "
    for _ in range(2):  # the second time from its checkpoint
        done = _ensemblepp("bandit", *diverging, cwd=folder, check=False)
        assert done.returncode == 1
        assert told + "replica 1 at step 5. The results are in runs" in done.stderr
        assert "Traceback" not in done.stderr
        (run,) = find_runs([folder / "runs"])
        assert run.status == "failed"
        assert np.isfinite(run.read_regret()[1][1, :4]).all()
