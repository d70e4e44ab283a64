"""Features of a frozen backbone on disk, by content: what was read once is never computed again."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ensemblepp.errors import CheckpointError

_CREATE = "CREATE TABLE IF NOT EXISTS features (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
_ABOUT_THE_FILE = frozenset({"_name_or_path", "transformers_version", "architectures"})


def fingerprint(module: nn.Module) -> str:
    """Return a hash of configuration, parameters and buffers: what computes the same has the same fingerprint."""
    digest = hashlib.blake2b(digest_size=16)
    config = getattr(module, "config", None)
    settings = {} if config is None else config.to_dict()
    kept = {name: value for name, value in settings.items() if name not in _ABOUT_THE_FILE}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class FeatureCache:
    """A dictionary on disk from (space, text) to a float32 vector; several processes may share it.

    Args:
        path: An SQLite file; it is made if needed.
        space: What else the vectors depend on, for instance fingerprint and pooling; other spaces never mix.

    Raises:
        CheckpointError: The file is no such cache.
    """

    def __init__(self, path: str | Path, space: str) -> None:
        self.path, self._space = Path(path), space.encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with closing(self._connect()) as connection, connection:
                connection.execute(_CREATE)
        except sqlite3.DatabaseError as error:
            raise CheckpointError(f"{self.path} is not a feature cache: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=60)

    def _key(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode(), key=hashlib.blake2b(self._space).digest(), digest_size=20).digest()

    def get(self, texts: Sequence[str]) -> list[Tensor | None]:
        """Return the stored vector of every text, or None."""
        with closing(self._connect()) as connection:
            query = "SELECT value FROM features WHERE key = ?"
            rows = [connection.execute(query, (self._key(text),)).fetchone() for text in texts]
        return [None if row is None else torch.from_numpy(np.frombuffer(row[0], dtype="<f4").copy()) for row in rows]

    def put(self, texts: Sequence[str], features: Tensor) -> None:
        """Store one vector per text."""
        values = features.detach().cpu().numpy().astype("<f4")
        rows = [(self._key(text), value.tobytes()) for text, value in zip(texts, values, strict=True)]
        with closing(self._connect()) as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO features VALUES (?, ?)", rows)
