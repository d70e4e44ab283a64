"""Every command and every Python block of the README runs as printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
SHELL = [line for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL) for line in block.splitlines()]


def _run(command: list[str], cwd: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", PYTHON)
def test_python_block_runs(block: str, tmp_path: Path) -> None:
    for name in re.findall(r'from_backbone\("(.+?)"', block):
        pytest.importorskip("transformers", reason="needs the extra [llm]")
        from tests.llm_cases import make_backbone, make_tokenizer

        # A tiny model under the printed name; a folder of that name comes before the hub.
        make_backbone(causal=True).save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
    assert _run([sys.executable, "-W", "error", "-c", block], tmp_path).strip()


def test_shell_commands_run_in_order(tmp_path: Path) -> None:
    commands = [line for line in SHELL if not line.startswith("make ")]
    assert len(commands) >= 3
    for line in commands:
        _run(shlex.split(line), tmp_path)
    assert (tmp_path / "runs" / "bandit" / "report.html").exists()


def test_make_demo_runs_on_a_short_horizon(repository: Path, tmp_path: Path) -> None:
    """Run the target itself; the full size differs only in these two numbers."""
    assert "make demo" in SHELL
    if not (repository / ".venv" / "bin" / "ensemblepp").exists():
        pytest.skip("make demo installs .venv, which this test leaves to make")
    output = tmp_path / "demo"
    printed = _run(["make", "demo", f"DEMO={output}", "DEMO_OPTIONS=horizon=10 num_replicas=2"], repository)
    assert "linear_ensemble_pp" in printed
    assert (output / "report.html").exists()
    assert len(list(output.glob("regret_*.png"))) == 2


def test_make_test_is_what_ci_runs(repository: Path) -> None:
    assert "make test" in SHELL
    script = (repository / ".ci" / "run").read_text().splitlines()
    assert [line.split()[-1] for line in script if line.startswith("make")] == ["test"]
