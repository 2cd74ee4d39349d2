"""An explorer that reads a version's files keeps them from being deleted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.helpers import commit
from trinity_sync.checkpoint.holds import leased
from trinity_sync.checkpoint.layout import step_dir
from trinity_sync.checkpoint.prune import prune, prune_plan
from trinity_sync.errors import RunError
from trinity_sync.explorer.actor import _hold
from trinity_sync.protocol.parts import STATE_DICT
from trinity_sync.protocol.versions import Version

SPEC: Any = SimpleNamespace(name="explorer-0", timeout_s=60.0)


def delete_all_but_the_newest(root: Path) -> None:
    prune(root, prune_plan(root, [], now=0.0, keep_state_dicts=1), now=0.0)


def test_what_an_explorer_reads_stays_until_it_has_read_it(tmp_path: Path) -> None:
    for step in (1, 2):
        commit(tmp_path, step, kind=STATE_DICT)
    with _hold(SPEC, step_dir(tmp_path, 1), Version(0, 1)):
        assert leased(tmp_path, now=0.0) == {(1, 0)}
        delete_all_but_the_newest(tmp_path)
        assert step_dir(tmp_path, 1).exists()
    delete_all_but_the_newest(tmp_path)
    assert not step_dir(tmp_path, 1).exists()
    with pytest.raises(RunError):
        _hold(SPEC, step_dir(tmp_path, 1), Version(0, 1))
