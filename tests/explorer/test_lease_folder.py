"""An explorer that reads a version's files keeps them from being deleted."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.helpers import commit
from trinity_sync.checkpoint.folder import leases
from trinity_sync.checkpoint.folder.contents import step_dir
from trinity_sync.checkpoint.folder.deletion import prune, prune_plan
from trinity_sync.checkpoint.folder.leases import leased
from trinity_sync.errors import RunError
from trinity_sync.explorer.actor import _lease_folder
from trinity_sync.protocol.parts import STATE_DICT
from trinity_sync.protocol.versions import Version

SPEC: Any = SimpleNamespace(name="explorer-0", sync_timeout_s=60.0)


def delete_all_but_the_newest(root: Path) -> None:
    prune(root, prune_plan(root, [], now=0.0, keep_state_dicts=1), now=0.0)


def test_what_an_explorer_reads_stays_until_it_has_read_it(tmp_path: Path) -> None:
    for step in (1, 2):
        commit(tmp_path, step, kind=STATE_DICT)
    with _lease_folder(SPEC, step_dir(tmp_path, 1), Version(0, 1)):
        assert leased(tmp_path, now=0.0) == {(1, 0)}
        delete_all_but_the_newest(tmp_path)
        assert step_dir(tmp_path, 1).exists()
    delete_all_but_the_newest(tmp_path)
    assert not step_dir(tmp_path, 1).exists()
    with pytest.raises(RunError), _lease_folder(SPEC, step_dir(tmp_path, 1), Version(0, 1)):
        pass


def test_who_reads_slowly_holds_it_as_long_as_it_reads_and_who_hangs_does_not(tmp_path: Path) -> None:
    commit(tmp_path, 1, kind=STATE_DICT)
    now = [1000.0]
    with _lease_folder(SPEC, step_dir(tmp_path, 1), Version(0, 1), lambda: now[0]) as go_on:
        for _ in range(20):
            now[0] += 20.0
            assert leased(tmp_path, now=now[0]) == {(1, 0)}
            go_on()
        assert leased(tmp_path, now=now[0] + 59.0) == {(1, 0)}
        assert leased(tmp_path, now=now[0] + 61.0) == set()


def test_a_disk_without_room_for_a_longer_hold_does_not_end_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 1, kind=STATE_DICT)
    now = [1000.0]
    with _lease_folder(SPEC, step_dir(tmp_path, 1), Version(0, 1), lambda: now[0]) as go_on:

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(leases, "replace_file", full)
        now[0] += 20.0
        go_on()
