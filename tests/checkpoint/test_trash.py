"""Folders that are out of sight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trinity_sync.checkpoint.folder import deletion


def test_a_trash_folder_that_resists_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / f".trash-{name}").mkdir()
    remove = deletion.shutil.rmtree

    def resist(path: Path, **options: object) -> None:
        if path.name.endswith("a"):
            raise OSError("busy")
        remove(path, **options)

    monkeypatch.setattr(deletion.shutil, "rmtree", resist)
    problems = deletion.empty_trash(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".trash-a"]
    assert len(problems) == 1
    assert "busy" in problems[0]


@pytest.mark.parametrize(
    "free", [lambda root: deletion.empty_trash(root), lambda root: deletion.delete_trashed(root / ".trash-a")]
)
def test_a_link_in_the_trash_goes_and_what_it_leads_to_stays(free: Callable[[Path], object], tmp_path: Path) -> None:
    """As where an archived checkpoint was linked back."""
    (tmp_path / "archive").mkdir()
    (tmp_path / ".trash-a").symlink_to(tmp_path / "archive")
    assert not free(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]
