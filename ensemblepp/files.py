"""Atomic file writes: a reader sees the old file or the new one, never half of either."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a binary file that becomes `path` only when the block ends without an error.

    The bytes go to a temporary file in the same folder (a rename is atomic only inside one file system), are forced
    to disk, and then replace `path`. If the block raises, `path` is untouched and the temporary file is removed.

    Args:
        path: The file to write; its folder must exist.

    Yields:
        The open temporary file.
    """
    target = Path(path)
    # Not `tempfile`: its files are private (mode 0600), and run folders are often shared with colleagues.
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write `content` (text as UTF-8) to `path` atomically; see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _sync_folder(folder: Path) -> None:
    """Force the rename itself to disk, where the platform can open a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open a folder; its rename is journalled
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse to sync a folder; the file itself is already on disk
        pass
    finally:
        os.close(descriptor)
