from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from trinity_sync.errors import RunError
from trinity_sync.tracking import json_lines


def test_a_file_is_replaced_and_no_draft_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    json_lines.write_json(path, {"a": 1})
    json_lines.write_json(path, {"a": float("nan"), "b": (1, 2)})
    assert json.loads(path.read_text()) == {"a": None, "b": [1, 2]}
    assert [child.name for child in tmp_path.iterdir()] == ["run.json"]


def test_a_disk_that_refuses_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    json_lines.write_atomic(path, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"run\.json cannot be written: No space left"):
        json_lines.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [child.name for child in tmp_path.iterdir()] == ["run.json"]


def test_a_file_system_that_cannot_flush_a_folder_takes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some network file systems cannot, none of which can be mounted here."""
    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    json_lines.write_json(tmp_path / "run.json", {"a": 1})
    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1}


def test_text_that_has_no_utf8_form_is_written_visibly(tmp_path: Path) -> None:
    json_lines.write_json(tmp_path / "a.json", {"path": "bad\udcff"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"path": "bad\\udcff"}
