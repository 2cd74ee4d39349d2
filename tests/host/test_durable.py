"""Files that are replaced whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trinity_sync.host.durable import replace_file


def test_two_who_replace_a_file_at_a_time_both_replace_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, path = os.fsync, tmp_path / "file"

    def then_another(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        replace_file(path, "of the other")
        assert path.read_text() == "of the other"
        real(descriptor)

    monkeypatch.setattr(os, "fsync", then_another)
    replace_file(path, "of the first, which ends last")
    assert path.read_text() == "of the first, which ends last"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
