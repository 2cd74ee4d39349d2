"""The folder of versions: who holds one, who removes what, and what is none of ours."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.weight_sync.sync_members import Members, left_in, weights
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.locks import open_lock, try_lock
from trinity_sync.sync import checkpoint
from trinity_sync.sync.checkpoint import begin_version, lease_version, remove_unleased
from trinity_sync.weights.tensors import state_digest

LIMIT = 20.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "above" / "versions"


def test_a_version_is_a_draft_then_committed_and_gone_when_nobody_needs_it(root: Path) -> None:
    held = begin_version(root, LIMIT)
    assert held.path.name.startswith(".sending-")
    assert held.path.stat().st_mode & 0o777 == 0o700
    (held.path / "bucket").write_text("bytes")
    held.commit(20)
    folder = held.path
    assert folder.name.startswith("version_20-")
    assert held.path == folder
    assert (folder / "bucket").read_text() == "bytes"
    held.release(remove=True)
    held.release(remove=True)
    assert left_in(root) == []


def test_a_version_without_a_step_is_committed_and_removed_too(root: Path) -> None:
    held = begin_version(root, LIMIT)
    held.commit(None)
    assert held.path.name.startswith("version-")
    held.release(remove=False)
    assert len(left_in(root)) == 1
    remove_unleased(root, LIMIT)
    assert left_in(root) == []


def test_nothing_is_removed_that_somebody_holds(root: Path) -> None:
    draft, committed = begin_version(root, LIMIT), begin_version(root, LIMIT)
    receiver = lease_version(committed.path)
    committed.commit(1)
    folder = committed.path
    begin_version(root, LIMIT).release(remove=True)
    remove_unleased(root, LIMIT)
    assert left_in(root) == sorted([draft.path.name, folder.name])
    committed.release(remove=True)
    assert folder.exists()
    remove_unleased(root, LIMIT)
    assert folder.exists()
    receiver.release(remove=True)
    assert left_in(root) == [draft.path.name]
    draft.release(remove=False)
    begin_version(root, LIMIT).release(remove=True)
    assert left_in(root) == []


def test_the_last_who_leaves_a_failed_version_removes_it(root: Path) -> None:
    held = begin_version(root, LIMIT)
    receivers = [lease_version(held.path) for _ in range(3)]
    held.release(remove=True)
    for receiver in receivers:
        assert len(left_in(root)) == 1
        receiver.release(remove=True)
    assert left_in(root) == []


OTHERS = (
    "version-notes",
    "version_1-of-my-model",
    "versions-2024-05-06",
    "version_7-0123456789abcdef",  # named as ours, but without a lease
    ".sending-later",
    "bucket-00000.safetensors",
)


def test_what_is_not_ours_is_left_alone(root: Path) -> None:
    kept = {name: root / name / "precious.txt" for name in OTHERS}
    for path in kept.values():
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    elsewhere = root.parent / "elsewhere"
    begin_version(elsewhere, LIMIT).release(remove=False)  # a draft that nobody has
    (draft,) = elsewhere.glob(".sending-*")
    (root / ".sending-fedcba9876543210").symlink_to(draft)
    held = begin_version(root, LIMIT)
    held.commit(1)
    remove_unleased(root, LIMIT)
    held.release(remove=True)
    remove_unleased(root, LIMIT)
    assert {name for name, path in kept.items() if path.exists()} == set(OTHERS)
    assert draft.exists()


def test_what_cannot_be_had_is_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"no version can be written to .*/file/versions: .* \(.*/file"):
        begin_version(tmp_path / "file" / "versions", LIMIT)
    with pytest.raises(RunError, match=r"/versions/\.sending-12, which the sender has made, cannot be read here"):
        lease_version(root / ".sending-12")
    held = begin_version(root, LIMIT)
    shutil.rmtree(held.path)
    with pytest.raises(RunError, match=r"was deleted by another program"):
        held.commit(1)
    held.release(remove=True)


def test_a_folder_that_another_keeps_locked_is_waited_for_with_a_limit(root: Path) -> None:
    begin_version(root, LIMIT).release(remove=True)
    lock = open_lock(root / ".lock")
    assert try_lock(lock)
    try:
        for call in (begin_version, remove_unleased):
            with pytest.raises(
                WaitTimeout, match=rf"process {os.getpid()} did not release its lock on .* within 0.1 s"
            ):
                call(root, 0.1)
    finally:
        os.close(lock)
    assert left_in(root) == []


AT = ("mkdir", "_take_lease", "open_lock", "sync_folder", "rename")
KILLED = """
import os, signal, sys
from pathlib import Path
from trinity_sync.sync import checkpoint as folder

at, after, root = sys.argv[1], sys.argv[2] == "after", Path(sys.argv[3])
place = Path if at in ("mkdir", "rename") else folder
real = getattr(place, at)

def killed(*args, **kwargs):
    if not str(args[0]).startswith(str(root) + "/") and at != "sync_folder":
        return real(*args, **kwargs)
    if after:
        real(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)

held = None
if at in ("sync_folder", "rename"):
    held = folder.begin_version(root, 5.0)
setattr(place, at, killed)
held = held or folder.begin_version(root, 5.0)
held.commit(3)
"""


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("after", [pytest.param("before", marks=pytest.mark.all), "after"])
@pytest.mark.few(2)
def test_what_a_killed_sender_leaves_is_removed_by_the_next(at: str, after: str, root: Path) -> None:
    root.mkdir(parents=True)
    killed = subprocess.run([sys.executable, "-c", KILLED, at, after, str(root)], check=False, timeout=LIMIT)
    assert killed.returncode == -signal.SIGKILL
    held = begin_version(root, LIMIT)
    held.commit(4)
    folder = held.path
    remove_unleased(root, LIMIT)
    assert left_in(root) == [folder.name]
    held.release(remove=True)


@pytest.mark.parametrize("at", ["lock", "rename", "half"])
def test_a_removal_that_is_broken_off_is_ended_by_the_next(
    at: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = begin_version(root, LIMIT)
    held.commit(1)
    folder = held.path
    (folder / "bucket").write_text("bytes")
    held.release(remove=False)
    with monkeypatch.context() as broken:

        def interrupted(*args: Any, **kwargs: Any) -> None:
            if at == "half":  # the lease goes first
                (args[0] / "lease").unlink()
            raise KeyboardInterrupt

        if at == "lock":
            broken.setattr(checkpoint, "try_lock", interrupted)
        elif at == "rename":
            broken.setattr(Path, "rename", interrupted)
        else:
            broken.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove_unleased(root, LIMIT)
    remove_unleased(root, LIMIT)
    assert left_in(root) == []


def test_versions_of_an_earlier_attempt_go_when_the_next_is_read(make: Callable[..., Members]) -> None:
    members = make("checkpoint", receivers=1)
    for step in (1, 2):
        earlier = begin_version(members.folder, LIMIT)
        earlier.commit(step)
        earlier.release(remove=False)
    members.meet()
    assert len(left_in(members.folder)) == 3
    members.move(weights(3), 3)
    assert [name.split("-")[0] for name in left_in(members.folder)] == ["version_3"]


def test_two_programs_in_one_folder_keep_apart(make: Callable[..., Members]) -> None:
    """As the actor's and another role's, each with a newest version of its own."""
    programs = [make("checkpoint", receivers=1) for _ in range(2)]
    for step in (1, 2, 3):
        for number, members in enumerate(programs):
            members.meet()
            state = weights(10 * number + step)
            *_, found = members.move(state, step)
            assert state_digest(found, None) == state_digest(state, None)
    assert [name.split("-")[0] for name in left_in(programs[0].folder)] == ["version_3"] * 2


def test_what_was_received_does_not_change_with_the_file(make: Callable[..., Members]) -> None:
    members = make("checkpoint", receivers=1)
    members.meet()
    *_, found = members.move(weights(1), 1)
    for path in members.folder.glob("version_1-*/bucket-*"):
        with path.open("r+b") as file:
            size = path.stat().st_size
            file.seek(size // 2)
            file.write(bytes(size - size // 2))
    assert state_digest(found, None) == state_digest(weights(1), None)
