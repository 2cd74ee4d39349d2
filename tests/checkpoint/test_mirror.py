"""Copying a checkpoint to a second place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.helpers import commit
from trinity_sync.checkpoint import mirror, store
from trinity_sync.checkpoint.layout import step_dir
from trinity_sync.checkpoint.trackers import read_tracker
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_copy_verifies_and_is_named_by_the_tracker_there(tmp_path: Path, scheme: str) -> None:
    commit(tmp_path / "here", 20, {"actor/model.pt": "w"})
    mirror.copy_checkpoint(step_dir(tmp_path / "here", 20), f"{scheme}{tmp_path / 'there'}")
    assert store.verify(step_dir(tmp_path / "there", 20)).ok
    assert read_tracker(tmp_path / "there", FULL).step == 20


def test_the_tracker_there_does_not_go_back(tmp_path: Path) -> None:
    for step in (20, 10):
        commit(tmp_path / "here", step)
        mirror.copy_checkpoint(step_dir(tmp_path / "here", step), str(tmp_path / "there"))
    assert read_tracker(tmp_path / "there", FULL).step == 20


def test_a_copy_that_does_not_verify_is_no_checkpoint_there(tmp_path: Path) -> None:
    commit(tmp_path / "here", 20, {"model.pt": "w"})
    (step_dir(tmp_path / "here", 20) / "model.pt").write_text("x")
    with pytest.raises(RunError, match="does not verify"):
        mirror.copy_checkpoint(step_dir(tmp_path / "here", 20), str(tmp_path / "there"))
    assert [info.manifest for info in store.scan(tmp_path / "there")] == [None]
    assert read_tracker(tmp_path / "there", FULL).step is None


def test_a_remote_file_system_gets_the_same_files(tmp_path: Path) -> None:
    commit(tmp_path / "here", 20, {"actor/model.pt": "w"})
    mirror._copy_remote(step_dir(tmp_path / "here", 20), f"file://{tmp_path / 'there'}")
    assert store.verify(step_dir(tmp_path / "there", 20)).ok
    assert read_tracker(tmp_path / "there", FULL).step == 20
