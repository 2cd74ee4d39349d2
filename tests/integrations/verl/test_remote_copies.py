"""verl's copies to a remote place: with a real monitor, and a copy that is as slow as the test wants."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.test_daemon import LIFETIME, LIMIT, begin, commit, save, wait_until_let_go
from trinity_sync.actors.local import LocalHandle
from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.checkpoint.daemon import connect
from trinity_sync.checkpoint.folder.contents import MANIFEST, step_dir
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.errors import RunError
from trinity_sync.integrations.verl import local_run, reading, remote_copies
from trinity_sync.integrations.verl.committed_saves import Commits, follow_with_copy
from trinity_sync.integrations.verl.local_run import Program


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """The checkpoint folder; no process is left there at the end."""
    yield tmp_path / "checkpoints"
    wait_until_let_go(tmp_path / "checkpoints")


@pytest.fixture
def engines(root: Path) -> Iterator[LocalHandle]:
    """What the engines of a program have opened."""
    config = MonitorConfig(timeout_s=LIMIT, fsync=False)
    handle = connect(root, program="one", may_start=True, timeout_s=LIMIT, lifetime=LIFETIME, config=config)
    yield handle
    handle.close()


class Remote:
    """A remote place. ``refuses``: as verl's copy, which answers False and raises nothing."""

    def __init__(self, place: Path) -> None:
        self.place, self.refuses = place, False
        self.ends: list[Any] = []

    def copy(self, src: str, dst: str, dirs_exist_ok: bool = False) -> bool:
        if not self.refuses:
            shutil.copytree(src, dst, dirs_exist_ok=dirs_exist_ok)
        return not self.refuses

    def finish(self) -> None:
        for end in self.ends:
            end.finish(None)


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path) -> Iterator[Remote]:
    """In a driver under Ray, which has no engine."""
    made, opened = Remote(tmp_path / "remote"), list[LocalHandle]()

    def connect_too(*args: Any, **kwargs: Any) -> LocalHandle:
        opened.append(connect(*args, **kwargs))
        return opened[-1]

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(local_run, "this_program", lambda: Program(word="one", address="127.0.0.1"))
    monkeypatch.setattr(local_run, "connect", connect_too)
    monkeypatch.setattr(remote_copies, "_of_folders", {})
    monkeypatch.setattr(remote_copies, "finish_at_exit", made.ends.append)
    monkeypatch.setattr(remote_copies, "_managers", set())
    yield made
    for handle in opened:
        handle.close()


def saved_by_trainer(root: Path, step: int) -> str:
    """What verl's trainer has written when it copies; returns the step's folder."""
    folder = step_dir(root, step)
    folder.mkdir(parents=True)
    (folder / "data_0.pt").write_text("the trainer's own")
    return str(folder)


def test_a_driver_copies_what_the_engines_have_written_when_it_is_committed(
    root: Path, remote: Remote, engines: LocalHandle
) -> None:
    copy: Callable[..., Any] = remote_copies.instead_of(remote.copy)
    folder = begin(engines, 1, "model", "beside")
    path = saved_by_trainer(root, 1)
    assert copy(src=path, dst=str(remote.place), dirs_exist_ok=True) is True
    assert not remote.place.exists()
    save(engines, folder, 1, "model")
    remote.finish()
    assert {file.name for file in remote.place.iterdir()} == {"model", "data_0.pt", MANIFEST}


@pytest.mark.all
def test_a_copy_of_a_driver_that_fails_is_told_at_the_next_one_and_at_the_end(
    root: Path, remote: Remote, engines: LocalHandle
) -> None:
    remote.refuses = True
    copy: Callable[..., Any] = remote_copies.instead_of(remote.copy)
    for step in (1, 2):
        save(engines, begin(engines, step, "model", "beside"), step, "model")
        path = saved_by_trainer(root, step)
        copy(src=path, dst=str(remote.place), dirs_exist_ok=True)
        with pytest.raises(RunError, match=f"global_step_{step} could not be copied to "):
            remote.finish()
    save(engines, begin(engines, 3, "model", "beside"), 3, "model")
    copy(src=saved_by_trainer(root, 3), dst=str(remote.place), dirs_exist_ok=True)
    wait_until_copied()
    with pytest.raises(RunError, match="global_step_3 could not be copied to "):
        copy(src=saved_by_trainer(root, 4), dst=str(remote.place), dirs_exist_ok=True)


def wait_until_copied() -> None:
    """Wait for the copies in the background, and leave what became of them to be told."""
    for thread in threading.enumerate():
        if thread.name.startswith("commit-"):
            thread.join(LIMIT)


def test_what_verl_has_saved_itself_is_copied_at_once(root: Path, remote: Remote) -> None:
    copy: Callable[..., Any] = remote_copies.instead_of(remote.copy)
    assert copy(src=saved_by_trainer(root, 1), dst=str(remote.place), dirs_exist_ok=True) is True
    assert {file.name for file in remote.place.iterdir()} == {"data_0.pt"}
    assert remote.ends == []


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


def test_what_an_engine_copies_after_the_commit_waits_for_no_other(
    root: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.utils import hdfs_io

    from trinity_sync.integrations.verl.megatron_manager import MegatronCheckpointManager

    asked, kept = list[str](), list[int | None]()
    monkeypatch.setattr(remote_copies, "_managers", [SimpleNamespace(follow=lambda path, then: asked.append(path))])
    monkeypatch.setattr(hdfs_io, "copy", remote_copies.instead_of(remote.copy))
    monkeypatch.setattr(hdfs_io, "makedirs", lambda path, exist_ok: None)
    rank: Any = SimpleNamespace(_root=root, register_checkpoint=lambda path, limit: kept.append(limit))
    path = saved_by_trainer(root, 1)
    MegatronCheckpointManager._follow_commit(rank, path, str(remote.place), 2)
    assert {file.name for file in remote.place.iterdir()} == {"data_0.pt"}
    assert (asked, kept) == ([], [2])
    shutil.rmtree(remote.place)
    remote.refuses = True
    with pytest.raises(RunError, match="global_step_1 could not be copied to "):
        MegatronCheckpointManager._follow_commit(rank, path, str(remote.place), 2)
