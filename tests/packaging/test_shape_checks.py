"""The test run checks annotated shapes and types; these tests fail if that check is off."""

import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch

from ensemblepp.types import UnitSphere


def test_a_wrong_dtype_is_caught() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        UnitSphere(3).argmax(torch.zeros(2, 3, dtype=torch.int64))


def test_the_check_can_be_switched_off(without_shape_checks: None) -> None:
    with pytest.raises(RuntimeError):
        UnitSphere(3).argmax(torch.zeros(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("room", ["agents", "envs"])
def test_the_check_reaches_the_rooms_on_top(repository: Path, tmp_path: Path, room: str) -> None:
    """Through the same links: a copy of the layout with one wrong function in the room."""
    package = tmp_path / "ensemblepp"
    package.mkdir()
    (tmp_path / room).mkdir()
    (package / room).symlink_to(Path("..") / room)
    (package / "__init__.py").touch()
    (tmp_path / room / "__init__.py").touch()
    (tmp_path / room / "wrong.py").write_text(
        "from __future__ import annotations\n"
        "from jaxtyping import Float\n"
        "from torch import Tensor\n"
        'def add(a: Float[Tensor, "replicas batch"], b: Float[Tensor, "replicas batch"]) -> Tensor:\n'
        "    return a.sum() + b.sum()\n"
    )
    (tmp_path / "test_wrong.py").write_text(
        "import jaxtyping, pytest, torch\n"
        f"from ensemblepp.{room}.wrong import add\n"
        "def test_wrong():\n"
        "    with pytest.raises(jaxtyping.TypeCheckError):\n"
        "        add(torch.zeros(2, 3), torch.zeros(2, 4))\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(repository / "pyproject.toml"), "--rootdir", "."]
    command += ["-p", "no:cacheprovider", "-o", "pythonpath=" + str(tmp_path), "test_wrong.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "1 passed" in result.stdout, result.stdout + result.stderr
