"""Folders that several users of a machine share: what another one puts there is neither followed, waited for nor
removed. Processes of other users are real ones, so these tests need root.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.helpers import commit
from trinity_sync.checkpoint.folder import leases, lock
from trinity_sync.checkpoint.folder.contents import Manifest, read_manifest, step_dir
from trinity_sync.launch import local_ray
from trinity_sync.protocol.parts import STATE_DICT
from trinity_sync.tracking.run_record import RunFolder, lock_owner
from trinity_sync.weights import slots
from trinity_sync.weights.slots import SlotArena, remove_stale

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

OTHER, THIRD = 4242, 4343
LIMIT_S = 20.0
PARTS = {"rank-00000": 5000}


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like `/tmp` and `/dev/shm`, outside of what pytest keeps to one user."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """What the victim of a link would lose."""
    folder = tmp_path / "precious"
    (folder / "thesis").mkdir(parents=True)
    (folder / "thesis" / "chapter").write_text("text")
    return folder


def kept(folder: Path) -> bool:
    """Whether nothing was added to it, removed or changed."""
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*"))] == [
        "thesis",
        "thesis/chapter",
    ] and (folder / "thesis" / "chapter").read_text() == "text"


def in_a_process(function: Callable[[], Any], user: int = 0) -> Any:
    """What the function returns, or the text of what it raises, in a process of a user; a hanging one is killed."""
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()

    def body() -> None:
        if user:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        try:
            answer.put(function())
        except Exception as error:
            answer.put(f"{type(error).__name__}: {error}")

    process = context.Process(target=body)
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
        return "it hangs"
    return answer.get() if not answer.empty() else f"it ended with {process.exitcode}"


def arena(root: Path, fallback: Path) -> tuple[str, list[str]]:
    """Where an arena is made, and its notes."""
    with SlotArena.create("run", 1, PARTS, root, fallback=fallback) as made:
        return str(made.folder), made.notes


def names(user: int = 0) -> list[str]:
    """Of the folder for slots: today's, and the one of old that all users shared."""
    return [f"trinity-sync-{user}", "trinity-sync"]


@contextmanager
def locked_by_another_process(path: Path) -> Iterator[int]:
    """Its process id."""
    program = (
        "import fcntl, os, sys; f = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(f, fcntl.LOCK_EX)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.kill()


# slots


def test_a_link_in_the_place_of_the_slots_is_not_followed(shared: Path, precious: Path, tmp_path: Path) -> None:
    for name in names():
        (shared / name).symlink_to(precious)
        os.lchown(shared / name, OTHER, OTHER)
    assert remove_stale(shared) == []
    folder, notes = in_a_process(lambda: arena(shared, tmp_path / "disk"))
    assert kept(precious)
    assert folder.startswith(f"{tmp_path}/disk/")
    assert f"{shared}/trinity-sync-0 is a link, not a folder of user 0" in notes[0]
    assert "sync.shm_dir" in notes[0]


def test_a_folder_of_another_user_in_the_place_of_the_slots_is_left_alone(shared: Path) -> None:
    for name in names(THIRD):
        (shared / name / "run-of-theirs").mkdir(parents=True)
        (shared / name).chmod(0o700)
        os.chown(shared / name, OTHER, OTHER)
    disk = shared / "disk"
    disk.mkdir()
    os.chown(disk, THIRD, THIRD)
    assert in_a_process(lambda: remove_stale(shared), THIRD) == []
    folder, notes = in_a_process(lambda: arena(shared, disk), THIRD)
    assert folder.startswith(f"{disk}/")
    assert f"trinity-sync-{THIRD} is a folder of user {OTHER}, not a folder of user {THIRD}" in notes[0]
    assert all((shared / name / "run-of-theirs").exists() for name in names(THIRD))


def test_a_user_whose_folder_another_one_opened_wide_uses_their_own(shared: Path) -> None:
    """Everybody may write to what was planted, so that root would find it at hand, too."""
    for name in names():
        (shared / name).mkdir()
        (shared / name).chmod(0o1777)
        os.chown(shared / name, OTHER, OTHER)
    folder, _ = in_a_process(lambda: arena(shared, shared / "disk"))
    assert folder.startswith(f"{shared}/disk/")


def test_users_side_by_side_leave_each_other_alone_and_see_nothing_of_each_other(shared: Path) -> None:
    with SlotArena.create("run", 1, PARTS, shared, fallback=shared) as mine:
        mine.map(0, "rank-00000")[:4] = b"mine"
        assert mine.folder.parent.stat().st_mode & 0o7777 == 0o700

        def theirs() -> Any:
            with SlotArena.create("run", 1, PARTS, shared, fallback=shared) as other:
                try:
                    seen = mine.path(0, "rank-00000").read_bytes()
                except PermissionError:
                    seen = None
                return other.notes, other.folder.parent != mine.folder.parent, remove_stale(shared), seen

        assert in_a_process(theirs, OTHER) == ([], True, [], None)
        assert mine.path(0, "rank-00000").exists()
    assert [path for path in shared.iterdir() if path.name.startswith("trinity-sync")] == []


def test_slots_that_a_killed_process_of_the_user_left_are_still_removed(shared: Path) -> None:
    def leave() -> None:
        SlotArena.create("left", 1, PARTS, shared, fallback=shared)
        os._exit(9)

    assert in_a_process(leave, OTHER) == "it ended with 9"
    assert remove_stale(shared) == []
    removed = in_a_process(lambda: remove_stale(shared), OTHER)
    assert [path.name for path in removed] == ["left"]


def test_the_wait_for_a_lock_on_the_slots_ends_and_names_its_holder(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_LOCK_S", 0.2, raising=False)
    with SlotArena.create("one", 1, PARTS, shared, fallback=tmp_path) as one:
        home = one.folder.parent
        with locked_by_another_process(home) as holder:
            told = in_a_process(lambda: arena(shared, tmp_path))
            assert told == f"WaitTimeout: process {holder} did not release its lock on {home} within 0.2 s"
            assert in_a_process(lambda: remove_stale(shared)) == told
            one.close()  # does without
            assert not one.folder.exists()


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_lock_of_the_slots_that_is_none_is_of_no_use_to_its_folder(shared: Path, precious: Path, kind: str) -> None:
    home = Path(in_a_process(lambda: arena(shared, shared))[0]).parent
    for name in ("run", "old"):
        (home / name).mkdir(parents=True)
        home.chmod(0o700)
        plant(home / name / "owner.lock", kind, precious)
    assert in_a_process(lambda: arena(shared, shared)) == (str(home / "run"), [])
    assert in_a_process(lambda: remove_stale(shared)) == [home / "old"]
    assert kept(precious)


def plant(path: Path, kind: str, precious: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(precious / "thesis" / "chapter")


# Ray's session


def session(root: Path) -> tuple[str, int, int]:
    """Name, owner and mode of the folder for a session of Ray's."""
    with local_ray._own_folder(str(root)) as folder:
        found = folder.stat()
        return folder.name, found.st_uid, found.st_mode & 0o7777


def test_rays_session_is_the_users_own(shared: Path) -> None:
    name, owner, mode = in_a_process(lambda: session(shared), OTHER)
    assert name.startswith(f"trinity-ray-{OTHER}-")
    assert (owner, mode) == (OTHER, 0o700)
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.parametrize("owner", [0, OTHER])
def test_a_lock_of_a_session_that_is_none_is_neither_waited_for_nor_followed(
    shared: Path, precious: Path, kind: str, owner: int
) -> None:
    for name in ("trinity-ray-0-planted", "trinity-ray-planted"):
        (shared / name).mkdir()
        os.chown(shared / name, owner, owner)
        plant(shared / name / "owner.lock", kind, precious)
    assert in_a_process(lambda: session(shared))[0].startswith("trinity-ray-0-")
    assert kept(precious)
    assert len(list(shared.iterdir())) == 2


def test_a_link_that_looks_like_a_session_is_not_followed(shared: Path, precious: Path) -> None:
    for name in ("trinity-ray-0-planted", "trinity-ray-planted"):
        (shared / name).symlink_to(precious)
    assert in_a_process(lambda: session(shared))[0].startswith("trinity-ray-0-")
    assert kept(precious)


def test_a_session_that_another_user_left_is_left_alone(shared: Path) -> None:
    for name in ("trinity-ray-0-theirs", "trinity-ray-theirs"):
        (shared / name).mkdir()
        (shared / name / "owner.lock").touch()
        os.chown(shared / name, OTHER, OTHER)
    in_a_process(lambda: session(shared))
    assert len(list(shared.iterdir())) == 2


# folders of checkpoints and of runs


def hold(root: Path) -> str:
    with lock.locked(root, root, timeout_s=0.2):
        return "held"


@pytest.mark.parametrize("name", [".lock", ".monitor.lock"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.few(2)
def test_a_lock_of_a_checkpoint_folder_that_is_none_is_named(
    shared: Path, precious: Path, kind: str, name: str
) -> None:
    plant(shared / name, kind, precious)
    told = in_a_process(lambda: hold(shared))
    assert told.startswith("ConfigError: ")
    assert f"{shared / name} is not a regular file" in told
    assert kept(precious)
    if name == ".lock":
        assert in_a_process(lambda: lock.writer_of(shared)) is None
    else:
        assert "is not a regular file" in in_a_process(lambda: lock.lock_as_writer(shared))


def test_a_monitor_does_not_wait_for_ever_for_its_lock(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_LOCK_S", 0.2, raising=False)
    path = shared / ".monitor.lock"
    path.touch()
    with locked_by_another_process(path) as holder:
        told = in_a_process(lambda: lock.lock_as_writer(shared))
        assert told == f"WaitTimeout: process {holder} did not release its lock on {path} within 0.2 s"
        assert f"process {holder}" in in_a_process(lambda: hold(shared))


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_lock_of_a_run_folder_that_is_none_is_named(shared: Path, precious: Path, kind: str) -> None:
    plant(shared / ".lock", kind, precious)
    assert in_a_process(lambda: lock_owner(shared)) is None
    told = in_a_process(lambda: RunFolder.open(shared, resume=False))
    assert f"{shared / '.lock'} is not a regular file" in told
    assert kept(precious)


# leases of several users on one checkpoint


def read(root: Path, seconds: float = 60.0, now: float = 1000.0) -> int:
    """The step of a checkpoint that is held; a user's usual umask lets others look only."""
    os.umask(0o022)
    return leases.lease_checkpoint(root, 1, reader="reader", seconds=seconds, clock=lambda: now).step


def save(root: Path, *names: str, attempt: int = 0) -> str:
    os.umask(0o022)
    kind: Any = {} if len(names) > 1 else {"kind": STATE_DICT}
    return commit(root, 1, {name: f"{name} {attempt}" for name in names}, attempt=attempt, **kind).kind


def take(root: Path, how: str) -> None:
    os.umask(0o077)
    if how == "run":
        hold(root)
    elif how == "monitor":
        lock.lock_as_writer(root).close()
    else:
        read(root)


def test_leases_that_a_reader_keeps_to_themselves_do_not_cost_a_step(shared: Path) -> None:
    assert in_a_process(lambda: save(shared, "w"), OTHER) == "state_dict"
    shutil.rmtree(shared / ".leases", ignore_errors=True)
    (shared / ".leases").mkdir(mode=0o755)
    os.chown(shared / ".leases", THIRD, THIRD)
    assert in_a_process(lambda: save(shared, "w", "o"), OTHER) == "full"
    told = in_a_process(lambda: save(shared, "w", "o", attempt=1), OTHER)
    assert told.startswith("PermissionError: ")
    assert str(shared / ".leases") in told
    assert read_manifest(step_dir(shared, 1)).attempt == 0


@pytest.mark.parametrize("first", ["run", "monitor", "reader"])
@pytest.mark.few(1)
def test_who_may_write_in_a_checkpoint_folder_may_hold_and_claim_there_whoever_came_first(
    shared: Path, first: str
) -> None:
    assert in_a_process(lambda: save(shared, "w", "o"), OTHER) == "full"
    shutil.rmtree(shared / ".leases", ignore_errors=True)
    assert in_a_process(lambda: take(shared, first), THIRD if first == "reader" else OTHER) is None
    assert (shared / ".leases").stat().st_mode & 0o7777 == 0o1777
    for lease in (shared / ".leases").iterdir():
        lease.unlink()
    assert in_a_process(lambda: save(shared, "w", "o", attempt=1), OTHER) == "full"
    assert in_a_process(lambda: read(shared), THIRD) == 1


def test_a_checkpoint_folder_of_ones_own_has_leases_of_ones_own(shared: Path) -> None:
    shared.chmod(0o770)
    os.chown(shared, OTHER, THIRD)
    assert in_a_process(lambda: take(shared, "run"), OTHER) is None
    found = (shared / ".leases").stat()
    assert (found.st_gid, found.st_mode & 0o777) == (OTHER, 0o700)
    (shared / ".leases").rmdir()
    leases.make_leases_folder(shared)
    found = (shared / ".leases").stat()
    assert (found.st_gid, found.st_mode & 0o777 & 0o770) == (THIRD, 0o770)


def test_a_link_in_the_place_of_the_leases_opens_nothing(shared: Path, precious: Path) -> None:
    precious.chmod(0o700)
    (shared / ".leases").symlink_to(precious)
    assert in_a_process(lambda: hold(shared)) == "held"
    assert precious.stat().st_mode & 0o777 == 0o700


def test_what_another_user_left_and_cannot_be_removed_holds_nothing_when_it_has_ended(shared: Path) -> None:
    def leave() -> None:
        read(shared, seconds=5.0)
        for attempt in (0, 1):
            left.append(leases.claim(shared, Manifest(step=1, attempt=attempt, kind="full"), now=1000.0))
            left[-1].__enter__()
        os.kill(os.getpid(), signal.SIGKILL)

    def look() -> list[object]:
        leases.clean_claims(shared, now=2000.0)
        return [leases.leased(shared, now=2000.0), read(shared, now=2000.0), save(shared, "w", attempt=0)]

    left: list[Any] = []
    assert in_a_process(lambda: save(shared, "w"), OTHER) == "state_dict"
    shutil.rmtree(shared / ".leases", ignore_errors=True)
    assert in_a_process(leave, THIRD) == f"it ended with -{signal.SIGKILL:d}"
    assert len(list((shared / ".leases").iterdir())) == 3
    assert in_a_process(look, OTHER) == [set(), 1, "state_dict"]
