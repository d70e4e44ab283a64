"""Texts to vectors: any transformers backbone, batched by length, pooled by mask, cached when it is frozen."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ensemblepp.errors import ParameterError, check_choice, check_int
from ensemblepp.llm.feature_cache import FeatureCache, fingerprint
from ensemblepp.llm.pooling import POOLINGS, pool, positions

_OWNER = "FeatureExtractor"


def hidden_states(backbone: nn.Module, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Return the last hidden states (batch, tokens, dim), independent of the side of the padding."""
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask}
    if takes_positions(backbone):
        inputs["position_ids"] = positions(mask)
    hidden: Tensor = backbone(**inputs).last_hidden_state
    return hidden


def takes_positions(backbone: nn.Module) -> bool:
    """Return whether position ids can be told to a backbone as a count of real tokens from zero.

    Without them most models number slots, so that padding on the left would move a text. Models in RoBERTa's manner
    count real tokens by themselves, with an offset; their position embedding has a padding index.
    """
    own = (
        isinstance(module, nn.Embedding) and module.padding_idx is not None
        for name, module in backbone.named_modules()
        if name.endswith("position_embeddings")
    )
    return "position_ids" in inspect.signature(backbone.forward).parameters and not any(own)


class FeatureExtractor:
    """Frozen features phi(text) of a transformers backbone, (texts, dim) in float32.

    Args:
        backbone: A transformers model without head, or one whose `base_model` is.
        tokenizer: Its tokenizer.
        pooling: "last" (decoders) or "mean" (sentence encoders).
        batch_size: Texts per forward pass; texts are batched by length.
        max_length: Tokens kept per text, the last ones, so that a long prompt never cuts the response; None: the
            tokenizer's own limit.
        normalise: Scale every vector to norm 1.
        cache: An SQLite file that keeps features by content of weights and text; None: nothing is kept.

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
        cache: str | Path | None = None,
    ) -> None:
        self.backbone = backbone.base_model if hasattr(backbone, "lm_head") else backbone
        self.tokenizer = tokenizer
        self.pooling = check_choice("pooling", _OWNER, pooling, POOLINGS)
        self.batch_size = check_int("batch_size", _OWNER, batch_size)
        self.max_length = usable_length(tokenizer, self.backbone, max_length)
        self.normalise = bool(normalise)
        self._cache = None
        if cache is not None:
            weights = fingerprint(self.backbone)
            space = f"{weights} {self.pooling} {self.max_length} {self.normalise} {tokenizer_identity(tokenizer)}"
            self._cache = FeatureCache(cache, space)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> FeatureExtractor:
        """Load backbone and tokenizer from a folder or hub name; options as in the constructor."""
        from transformers import AutoModel, AutoTokenizer

        return cls(AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path), **options)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return phi of every text, in the order given.

        Raises:
            ParameterError: No text, one that is no string, or one without a token.
        """
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise ParameterError("texts", _OWNER, "be a non-empty list of strings", repr(texts)[:80])
        known: dict[str, Tensor] = {}
        distinct = list(dict.fromkeys(texts))
        if self._cache is not None:
            found = zip(distinct, self._cache.get(distinct), strict=True)
            known = {text: vector for text, vector in found if vector is not None}
        for batch in self._batches([text for text in distinct if text not in known]):
            features = self._encode(batch)
            if self._cache is not None:
                self._cache.put(batch, features)
            known |= dict(zip(batch, features.cpu(), strict=True))
        return torch.stack([known[text] for text in texts])

    def _batches(self, texts: list[str]) -> Iterable[list[str]]:
        """Yield batches of texts of similar length, the longest first, so that too large a batch fails at once."""
        ordered = sorted(texts, key=len, reverse=True)
        for start in range(0, len(ordered), self.batch_size):
            yield ordered[start : start + self.batch_size]

    @torch.no_grad()
    def _encode(self, texts: list[str]) -> Tensor:
        device = next(self.backbone.parameters()).device
        ids, mask = tokenize(self.tokenizer, texts, self.max_length)
        was_training = self.backbone.training
        self.backbone.eval()
        try:
            hidden = hidden_states(self.backbone, ids.to(device), mask.to(device))
        finally:
            self.backbone.train(was_training)
        features = pool(hidden, mask.to(device), self.pooling).float()
        return nn.functional.normalize(features, dim=-1) if self.normalise else features


def usable_length(tokenizer: Any, backbone: Any, max_length: int | None) -> int:
    """Return how many tokens a text may have: what is asked for, within what tokenizer and backbone can take."""
    limits = [tokenizer.model_max_length, getattr(backbone.config, "max_position_embeddings", None)]
    if max_length is not None:
        limits.append(check_int("max_length", _OWNER, max_length))
    return int(min(limit for limit in limits if limit is not None))


def tokenizer_identity(tokenizer: Any) -> str:
    """Return what tells one tokenizer from another."""
    return f"{type(tokenizer).__name__} {len(tokenizer)}"


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
