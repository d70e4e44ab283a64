"""Every example runs offline as printed, on a tiny random model and on a real one of 260,000 parameters."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra [llm]")

from tests.llm_cases import make_backbone, make_tokenizer

pytestmark = pytest.mark.llm


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random_model")
    make_backbone(causal=True).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(params=["random", "stories"])
def model(request: pytest.FixtureRequest, random_model: Path) -> Path:
    if request.param == "random":
        return random_model
    data: Path = request.getfixturevalue("data_dir")
    return data / "models" / "stories260k_hf"


def run(repository: Path, name: str, *options: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(repository / "examples" / name), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_are_short(repository: Path) -> None:
    for path in (repository / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) < 80, path.name


def test_the_selector_learns_the_judges_order(repository: Path, model: Path) -> None:
    printed = run(repository, "select_responses.py", "--model", str(model))
    counts = [tuple(map(int, found)) for found in re.findall(r"(\d+) of (\d+) pairs", printed)]
    assert len(counts) == 10
    (_, pairs), (last, _) = counts[0], counts[-1]
    assert pairs > 20
    assert last > 0.8 * pairs
    assert "best answer to 'Once upon a time'" in printed


def test_a_policy_trains_on_the_learned_reward(repository: Path, model: Path) -> None:
    pytest.importorskip("trl", reason="needs the extra [trl]")
    printed = run(repository, "train_with_grpo.py", "--model", str(model))
    found = re.search(r"mean sampled reward of every step: \[(.*)\]", printed)
    assert found is not None
    assert len([float(value) for value in found[1].split(",")]) == 2
    asked = re.search(r"the judge was asked (\d+) questions", printed)
    assert asked is not None
    assert 1 <= int(asked[1]) <= 4  # two prompts in each of two steps
