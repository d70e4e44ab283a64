"""Checkpoints: round trips, damage, strangers and interruptions."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ensemblepp import checkpoint
from ensemblepp.errors import CheckpointError
from ensemblepp.seeding import Streams

STATE: dict[str, Any] = {
    "step": 3,
    "names": ["a", "b"],
    "none": None,
    "scale": 0.1,
    "posterior": {"block": torch.arange(6.0).view(2, 3).T, "inner": {"flags": torch.tensor([True, False])}},
    "empty": {},
    "streams": {"act": torch.arange(5, dtype=torch.uint8)},
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "nothing": torch.zeros(0, 4, dtype=torch.int64),
}


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return bool(first == second)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "new" / "folder" / "state.ckpt"
    checkpoint.save(path, STATE, kind="test")
    return path


def test_a_nested_state_comes_back_as_it_was(path: Path) -> None:
    assert equal(STATE, checkpoint.load(path, kind="test"))
    checkpoint.save(path, {}, kind="test")
    assert checkpoint.load(path, kind="test") == {}


def test_generators_continue(tmp_path: Path) -> None:
    streams, other = Streams(0, "act"), Streams(1, "act")
    checkpoint.save(tmp_path / "s", streams.state_dict(), kind="streams")
    other.load_state_dict(checkpoint.load(tmp_path / "s", kind="streams"))
    assert torch.equal(torch.rand(5, generator=streams["act"]), torch.rand(5, generator=other["act"]))


def test_saving_leaves_the_live_tensors_alone(path: Path) -> None:
    loaded = checkpoint.load(path, kind="test")
    loaded["posterior"]["block"] += 1
    assert equal(STATE, checkpoint.load(path, kind="test"))


def test_another_kind_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds a 'test', not a 'bandit'"):
        checkpoint.load(path, kind="bandit")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*absent"):
        checkpoint.load(tmp_path / "absent", kind="test")
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path, kind="test")


def test_an_unknown_format_version_is_refused(path: Path) -> None:
    manifest = {"format_version": checkpoint.FORMAT_VERSION + 1, "kind": "test", "values": {}}
    path.write_bytes(safetensors.torch.save({}, {"manifest": json.dumps(manifest)}))
    with pytest.raises(CheckpointError, match="has format version 2; this version reads 1"):
        checkpoint.load(path, kind="test")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match="is not a readable checkpoint"):
        checkpoint.load(path, kind="test")


def test_a_damaged_header_is_refused(path: Path) -> None:
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    for position in range(0, 8 + size, 7):
        damaged = bytearray(content)
        damaged[position] ^= 0x80  # no longer ASCII, or another length
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            checkpoint.load(path, kind="test")


def test_a_flipped_bit_is_found_wherever_it_is(path: Path) -> None:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    for position in range(0, len(content), 3):
        for bit in (0, 6):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            if position >= 8 + size:
                with pytest.raises(CheckpointError, match="is damaged: its content does not match its checksum"):
                    checkpoint.load(path, kind="test")
                continue
            try:  # a flip in the padding of the header may leave the content as it was
                loaded = checkpoint.load(path, kind="test")
            except CheckpointError:
                continue
            assert equal(STATE, loaded)


def test_a_strangers_file_is_refused(path: Path) -> None:
    for content in (b"", b"{}", bytes(range(256)) * 2, safetensors.torch.save({"a": torch.zeros(1)})):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a readable checkpoint"):
            checkpoint.load(path, kind="test")
    for manifest in ("[]", "null", '{"format_version": 1}', "not json"):
        path.write_bytes(safetensors.torch.save({}, {"manifest": manifest}))
        with pytest.raises(CheckpointError, match="is not a readable checkpoint"):
            checkpoint.load(path, kind="test")


class Explosive:
    """Would run code when unpickled."""

    ran = False

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (setattr, (Explosive, "ran", True))


def test_a_pickle_is_never_opened(path: Path) -> None:
    torch.save(Explosive(), path)
    with pytest.raises(CheckpointError):
        checkpoint.load(path, kind="test")
    assert not Explosive.ran


def test_an_interrupted_save_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpoint.save(path, {"step": 4}, kind="test")
        assert equal(STATE, checkpoint.load(path, kind="test"))
        assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_what_cannot_be_saved_is_refused_before_the_file_changes(path: Path) -> None:
    for state in ({"a": {1, 2}}, {"a/b": 1}, {1: 2}, {"a": Explosive()}):
        with pytest.raises(TypeError):
            checkpoint.save(path, state, kind="test")  # type: ignore[arg-type]
    assert equal(STATE, checkpoint.load(path, kind="test"))
