"""Backbones that count positions in different ways: padding on either side never moves a text."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra [llm]")

from transformers import AutoConfig, AutoModel

from ensemblepp.llm.features import hidden_states
from ensemblepp.llm.pooling import pool

pytestmark = pytest.mark.llm

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 1,
    "max_position_embeddings": 64,
}
ARCHITECTURES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},  # learned absolute positions
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},  # the same with an offset
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 32},  # bidirectional
    "mpnet": {},  # counts real tokens by itself, relative positions besides
    "mistral": {"num_key_value_heads": 2, "sliding_window": 4},  # a window over slots
    "bloom": {"n_layer": 2, "n_head": 4},  # slopes instead of positions
    "gpt_neox": {},  # a head that is not called lm_head
}
ROW = [5, 6, 7, 8, 9, 10]
SIDES = {"left": ([1] * 4 + ROW, [0] * 4 + [1] * 6), "right": (ROW + [1] * 4, [1] * 6 + [0] * 4)}


def build(name: str):
    model = AutoModel.from_config(AutoConfig.for_model(name, **(SIZES | ARCHITECTURES[name]))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_padding_never_moves_a_text(name: str) -> None:
    model = build(name)
    alone = hidden_states(model, torch.tensor([ROW]), torch.ones(1, 6, dtype=torch.long))
    swapped = hidden_states(model, torch.tensor([[6, 5, *ROW[2:]]]), torch.ones(1, 6, dtype=torch.long))
    assert not torch.allclose(alone[:, -1], swapped[:, -1], atol=1e-3)  # the order of tokens does matter
    for ids, mask in (map(torch.tensor, ([ids], [mask])) for ids, mask in SIDES.values()):
        hidden = hidden_states(model, ids, mask)
        for pooling in ("last", "mean"):
            wanted = pool(alone, torch.ones(1, 6), pooling)
            torch.testing.assert_close(pool(hidden, mask, pooling), wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_without_told_positions_padding_on_the_left_would_move_a_text() -> None:
    model = build("gpt2")
    ids, mask = (torch.tensor([part]) for part in SIDES["left"])
    untold = model(input_ids=ids, attention_mask=mask).last_hidden_state[:, -1]
    assert not torch.allclose(untold, hidden_states(model, ids, mask)[:, -1], atol=1e-3)
