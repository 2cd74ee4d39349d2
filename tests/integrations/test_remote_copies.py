"""verl's copies to a remote place: with a real monitor, and a copy that is as slow as the test wants."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.test_daemon import LIFETIME, LIMIT, commit, wait_until_let_go
from trinity_sync.actors.local.handle import LocalHandle
from trinity_sync.actors.monitor import MonitorClient
from trinity_sync.checkpoint.daemon.connecting import connect
from trinity_sync.checkpoint.layout import MANIFEST, step_dir
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.integrations.verl import reading
from trinity_sync.integrations.verl.commits import Commits, follow_with_copy


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def engines(root: Path) -> Iterator[LocalHandle]:
    """What the engines of a program have opened."""
    config = MonitorConfig(timeout_s=LIMIT, fsync=False)
    handle = connect(root, program="one", may_start=True, timeout_s=LIMIT, lifetime=LIFETIME, config=config)
    yield handle
    handle.close()
    wait_until_let_go(root)


def test_what_is_being_copied_is_not_deleted_however_long_it_takes(
    root: Path, engines: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_LEASE_S", 0.5)
    monkeypatch.setattr(reading, "_RENEW_S", 0.05)
    client, begun, may_end = MonitorClient(engines), threading.Event(), threading.Event()
    commits = Commits(client, 0, LIMIT)

    def slow() -> None:
        begun.set()
        assert may_end.wait(LIMIT)
        shutil.copytree(step_dir(root, 1), tmp_path / "remote")

    commit(engines, 1)
    follow_with_copy(commits, root, 1, slow)
    assert begun.wait(LIMIT)
    commit(engines, 2)
    commit(engines, 3)
    assert not may_end.wait(1.0)  # longer than a lease that nobody renews
    client.prune(1).result(LIMIT)
    assert {path.name for path in root.glob("global_step_*")} == {"global_step_1", "global_step_3"}
    may_end.set()
    commits.wait()
    assert (tmp_path / "remote" / MANIFEST).exists()
    client.prune(1).result(LIMIT)
    assert not step_dir(root, 1).exists()
