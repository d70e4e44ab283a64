"""Texts to vectors: any transformers backbone, batched by length, pooled by mask, remembered while it is frozen."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ensemblepp.errors import ParameterError, check_choice, check_int
from ensemblepp.llm.feature_cache import FeatureCache, fingerprint
from ensemblepp.llm.pooling import POOLINGS, pool, positions

_OWNER = "FeatureExtractor"


def find_trunk(backbone: Any) -> Any:
    """Return the part of a transformers model, with or without head and adapters, that ends in hidden states.

    Raises:
        ParameterError: Not a transformers model.
    """
    plain = backbone.get_base_model() if hasattr(backbone, "get_base_model") else backbone
    if not isinstance(plain, nn.Module) or not hasattr(plain, "base_model") or not hasattr(plain, "config"):
        raise ParameterError("backbone", "a language model", "be a transformers model", type(backbone).__name__)
    return plain.base_model


def hidden_states(backbone: Any, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Return the last hidden states (batch, tokens, dim), independent of the side of the padding."""
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask}
    if takes_positions(backbone):
        inputs["position_ids"] = positions(mask)
    hidden: Tensor = backbone(**inputs).last_hidden_state
    return hidden


def takes_positions(backbone: Any) -> bool:
    """Return whether position ids can be told to a backbone as a count of real tokens from zero.

    Without them most models number slots, so that padding on the left would move a text. Models in RoBERTa's manner
    count real tokens by themselves, with an offset; their position embedding has a padding index.
    """
    return "position_ids" in inspect.signature(backbone.forward).parameters and counted_positions(backbone) is None


def counted_positions(backbone: nn.Module) -> nn.Embedding | None:
    """Return the position embedding of a backbone that counts real tokens by itself, from behind its padding index."""
    for name, module in backbone.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module
    return None


class FeatureExtractor:
    """Frozen features phi(text) of a transformers backbone, (texts, dim) in float32 on the CPU.

    Args:
        backbone: A transformers model; a causal language model gives its trunk. It is used, not copied or changed.
        tokenizer: Its tokenizer.
        pooling: "last" (decoders) or "mean" (sentence encoders).
        batch_size: Texts per forward pass; texts are batched by length.
        max_length: Tokens kept per text, the last ones, so that a long prompt never cuts the response; None: what
            tokenizer and backbone can take.
        normalise: Scale every vector to norm 1.
        memory: Texts whose features are kept in memory, the most recent ones, so that learning from an answer about
            responses that were just compared takes no forward pass.
        cache: An SQLite file that keeps features by content of weights and text; None: nothing is kept on disk.

    Both memories hold for weights as they are: when the backbone was trained meanwhile, features are computed anew.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    def __init__(
        self,
        backbone: Any,
        tokenizer: Any,
        *,
        pooling: str = "last",
        batch_size: int = 16,
        max_length: int | None = None,
        normalise: bool = False,
        memory: int = 1024,
        cache: str | Path | None = None,
    ) -> None:
        self.backbone = find_trunk(backbone)
        self.tokenizer = tokenizer
        self.pooling = check_choice("pooling", _OWNER, pooling, POOLINGS)
        self.batch_size = check_int("batch_size", _OWNER, batch_size)
        self.max_length = usable_length(tokenizer, self.backbone, max_length)
        self.normalise = bool(normalise)
        self._memory = check_int("memory", _OWNER, memory, minimum=0)
        self._path = cache
        self._reset()

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> FeatureExtractor:
        """Load backbone and tokenizer from a folder or hub name; options as in the constructor."""
        from transformers import AutoModel, AutoTokenizer

        return cls(AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path), **options)

    def _reset(self) -> None:
        """Forget features and take the weights as they are now."""
        self._weights = weights_version(self.backbone)
        self._recent: dict[str, Tensor] = {}
        self._cache = None
        if self._path is not None:
            parts = (self.pooling, self.max_length, self.normalise, tokenizer_identity(self.tokenizer))
            self._cache = FeatureCache(self._path, " ".join(map(str, (fingerprint(self.backbone), *parts))))

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return phi of every text, in the order given.

        Raises:
            ParameterError: No text, one that is no string, or one without a token.
        """
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise ParameterError("texts", _OWNER, "be a non-empty list of strings", repr(texts)[:80])
        if self._weights != weights_version(self.backbone):
            self._reset()
        distinct = list(dict.fromkeys(texts))
        known = {text: self._recent[text] for text in distinct if text in self._recent}
        if self._cache is not None:
            asked = [text for text in distinct if text not in known]
            found = zip(asked, self._cache.get(asked), strict=True)
            known |= {text: vector for text, vector in found if vector is not None}
        for batch in self._batches([text for text in distinct if text not in known]):
            features = self._encode(batch)
            if self._cache is not None:
                self._cache.put(batch, features)
            known |= dict(zip(batch, features, strict=True))
        latest = [(text, vector) for text, vector in self._recent.items() if text not in known] + list(known.items())
        self._recent = dict(latest[max(0, len(latest) - self._memory) :])
        return torch.stack([known[text] for text in texts])

    def _batches(self, texts: list[str]) -> Iterator[list[str]]:
        """Yield batches of texts of similar length, the longest first, so that too large a batch fails at once."""
        ordered = sorted(texts, key=len, reverse=True)
        for start in range(0, len(ordered), self.batch_size):
            yield ordered[start : start + self.batch_size]

    @torch.no_grad()
    def _encode(self, texts: list[str]) -> Tensor:
        device = next(self.backbone.parameters()).device
        ids, mask = (part.to(device) for part in tokenize(self.tokenizer, texts, self.max_length))
        was_training = self.backbone.training
        self.backbone.eval()
        try:
            features = pool(hidden_states(self.backbone, ids, mask), mask, self.pooling).float().cpu()
        finally:
            self.backbone.train(was_training)
        return nn.functional.normalize(features, dim=-1) if self.normalise else features


def weights_version(module: nn.Module) -> int:
    """Return what changes when a weight is trained, loaded or replaced."""
    tensors = chain(module.parameters(), module.buffers())
    return hash(tuple((id(tensor), tensor._version, tensor.dtype) for tensor in tensors))


def usable_length(tokenizer: Any, backbone: Any, max_length: int | None) -> int:
    """Return how many tokens a text may have: what is asked for, within what tokenizer and backbone can take."""
    limits = [tokenizer.model_max_length, getattr(backbone.config.get_text_config(), "max_position_embeddings", None)]
    counted = counted_positions(backbone)
    if counted is not None:
        limits.append(counted.num_embeddings - int(counted.padding_idx or 0) - 1)
    if max_length is not None:
        limits.append(check_int("max_length", _OWNER, max_length))
    return int(min(limit for limit in limits if limit is not None))


def tokenizer_identity(tokenizer: Any) -> str:
    """Return a hash of what a tokenizer does to texts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = repr(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.blake2b(f"{type(tokenizer).__name__} {rules}".encode(), digest_size=16).hexdigest()


def tokenize(tokenizer: Any, texts: Sequence[str], max_length: int) -> tuple[Tensor, Tensor]:
    """Return token ids and mask (batch, tokens); a text that is too long keeps its end.

    Raises:
        ParameterError: A text without a single token.
    """
    rows = tokenizer(list(texts), add_special_tokens=True, verbose=False)["input_ids"]
    empty = [i for i, row in enumerate(rows) if not row]
    if empty:
        raise ParameterError("texts", _OWNER, "have at least one token each", repr(texts[empty[0]]))
    rows = [row if len(row) <= max_length else shorten(row, max_length, tokenizer) for row in rows]
    width = max(len(row) for row in rows)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def shorten(row: list[int], max_length: int, tokenizer: Any) -> list[int]:
    """Return the last tokens of a text, after its special first token if it has one."""
    special = row[:1] if row[0] in tokenizer.all_special_ids and max_length > 1 else []
    return special + row[len(row) - max_length + len(special) :]
