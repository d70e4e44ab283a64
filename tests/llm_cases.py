"""A tiny random language model and a word tokenizer, built in code: what the tests of `ensemblepp.llm` share."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra [llm]")

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast

from ensemblepp.llm.reward_model import EnsembleRewardModel

WORDS = [*"abcdefg", *".:", "hello", "world", "good", "bad", "yes", "no", "the", "end", "user", "assistant", "ok"]
CHAT = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} . {% endfor %}"
RESPONSES = ["good good yes", "bad", "a b c d e f g", "hello world ."]


def make_tokenizer(*, pad_is_eos: bool = False, chat: bool = True, padding_side: str = "right"):
    """Return a tokenizer of `WORDS` that begins every text with <s>."""
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<pad>", "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>" if pad_is_eos else "<pad>",
        padding_side=padding_side,
        model_max_length=64,
    )
    if chat:
        tokenizer.chat_template = CHAT
    return tokenizer


def make_backbone(*, causal: bool = False, pad_token_id: int = 2, seed: int = 0):
    """Return a two-layer Llama with random weights that owe nothing to global random state."""
    config = LlamaConfig(
        vocab_size=4 + len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=pad_token_id,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = (LlamaForCausalLM if causal else LlamaModel)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.fill_(1.0 if "norm" in name else 0.0)
    return model


def make_model(**options) -> EnsembleRewardModel:
    """Return a reward model on the tiny backbone."""
    return EnsembleRewardModel.from_backbone(make_backbone(), **{"index_dim": 6, "seed": 1, **options}).eval()


def encode(texts: list[str], side: str = "right", tokenizer=None):
    """Return token ids and mask of texts, padded on one side."""
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    rows = [tokenizer(text)["input_ids"] for text in texts]
    width = max(map(len, rows))
    pads = [[tokenizer.pad_token_id] * (width - len(row)) for row in rows]
    left = side == "left"
    ids = [pad + row if left else row + pad for row, pad in zip(rows, pads, strict=True)]
    mask = [
        [0] * len(pad) + [1] * len(row) if left else [1] * len(row) + [0] * len(pad)
        for row, pad in zip(rows, pads, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask)
