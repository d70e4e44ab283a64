from __future__ import annotations

import os
import stat

import pytest

from ensemblepp.files import atomic_file, write_atomic


def test_new_content_replaces_the_old(tmp_path):
    file = tmp_path / "a.txt"
    write_atomic(file, "älter")
    write_atomic(file, b"newer")
    assert file.read_bytes() == b"newer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_write_that_raises_midway_leaves_the_old_file_and_nothing_else(tmp_path, error):
    file = tmp_path / "a.txt"
    write_atomic(file, "old")

    def interrupted():
        with atomic_file(file) as handle:
            handle.write(b"half of the new conte")
            handle.flush()
            raise error

    with pytest.raises(error):
        interrupted()
    assert file.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_failing_rename_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    write_atomic(file, "old")

    def refuse(source, target):
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk gone"):
        write_atomic(file, "new")
    assert file.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_content_reaches_the_disk_before_the_rename(tmp_path, monkeypatch):
    events = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("fsync"), sync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (events.append("replace"), replace(*names))[1])
    write_atomic(tmp_path / "a.txt", "x")
    assert events[:2] == ["fsync", "replace"]


@pytest.mark.skipif(os.name != "posix", reason="file modes are a POSIX notion")
def test_files_get_the_usual_mode_not_a_private_one(tmp_path):
    (tmp_path / "plain").write_text("x")
    write_atomic(tmp_path / "atomic", "x")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "atomic")}
    assert len(modes) == 1


def test_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "none" / "a.txt", "x")
