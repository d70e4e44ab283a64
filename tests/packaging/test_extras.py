"""What runs without which extra: the library without transformers, language models without everything but those."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.llm


def run(code: str, *blocked: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter where `blocked` packages are not installed and no network answers."""
    before = f"""
import socket, sys
sys.modules.update(dict.fromkeys({blocked!r}))
def refuse(*args, **kwargs):
    raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = refuse
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", before + code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_the_library_does_not_import_transformers(tmp_path: Path) -> None:
    code = "import ensemblepp, ensemblepp.cli, ensemblepp.preferences, sys; print('transformers' in sys.modules)"
    assert run(code, cwd=tmp_path).stdout == "False\n"


@pytest.mark.parametrize("module", ["llm", "llm.trl"])
def test_a_missing_extra_is_named(tmp_path: Path, module: str) -> None:
    result = run(f"import ensemblepp.{module}", "transformers", cwd=tmp_path)
    assert result.returncode == 1
    wanted = "ImportError: ensemblepp.llm needs transformers; install it with: pip install 'ensemblepp[llm]'"
    assert result.stderr.splitlines()[-1] == wanted


SELECT = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers
core = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
core.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", model_max_length=16).save_pretrained("model")
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=3, **sizes)).save_pretrained("model")

from ensemblepp.llm import EnsembleRewardModel, ResponseSelector
selector = ResponseSelector(EnsembleRewardModel.from_backbone("model", index_dim=4))
selector.learn("a", chosen=" a", rejected=" b")
selector.model.save_pretrained("head")
selector.save("selector.ckpt")
model = EnsembleRewardModel.from_pretrained("head")
scores = ResponseSelector.load("selector.ckpt", model, selector.tokenizer).scores("a", [" a", " b"])
print(bool(scores[0] > scores[1]))
"""


def test_torch_and_transformers_are_enough_offline(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra [llm]")
    others = ("peft", "trl", "datasets", "accelerate", "sklearn", "pandas")
    result = run(SELECT, *others, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True\n"
