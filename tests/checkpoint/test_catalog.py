"""What a checkpoint folder holds, and what a path of a user means."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.helpers import commit
from trinity_sync.checkpoint.folder import catalog, resume_point
from trinity_sync.checkpoint.folder.contents import step_dir
from trinity_sync.errors import ConfigError
from trinity_sync.protocol.parts import FULL, STATE_DICT


def test_scan_lists_by_step_and_says_what_is_wrong(tmp_path: Path) -> None:
    commit(tmp_path, 100)
    commit(tmp_path, 20, kind=STATE_DICT)
    step_dir(tmp_path, 30).mkdir()
    (tmp_path / "notes").mkdir()
    found = catalog.scan(tmp_path)
    assert [(info.step, info.kind) for info in found] == [(20, STATE_DICT), (30, None), (100, FULL)]
    assert "no manifest.json" in found[1].problems[0]
    assert catalog.scan(tmp_path / "nowhere") == []


def test_the_newest_attempt_counts_what_was_abandoned(tmp_path: Path) -> None:
    assert catalog.newest_attempt(tmp_path / "checkpoints") is None
    commit(tmp_path, 10)
    assert catalog.newest_attempt(tmp_path) == 0
    for attempt in (3, 3):
        commit(tmp_path, 20, attempt=attempt)
        resume_point.set_start(tmp_path, 0, attempt + 1)
    assert catalog.scan(tmp_path) == []
    assert catalog.newest_attempt(tmp_path) == 3


def test_locate_understands_a_run_a_checkpoints_and_a_step_folder(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    commit(root, 20)
    assert catalog.locate(tmp_path) == (root, None)
    assert catalog.locate(root) == (root, None)
    assert catalog.locate(root / "global_step_20") == (root, 20)


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_locate_refuses_what_is_none_of_them(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="step folder"):
        catalog.locate(tmp_path / name)
