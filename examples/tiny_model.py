"""A random Llama with a character tokenizer, made in memory: enough to see that everything fits together."""

from __future__ import annotations

import string
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role[0] + ': ' + message.content + '\n' }}{% endfor %}"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: place for place, token in enumerate((*SPECIAL, *string.printable))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=256, chat_template=CHAT_TEMPLATE, **names
    )


def tiny_model(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(string.printable),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **settings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()
