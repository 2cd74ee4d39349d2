"""The checkpoint monitor in a process of its own, without Ray. Ranks are forks of this process, where they die."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actors.test_local import forked
from trinity_sync.actors.local import LocalHandle
from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.checkpoint import CheckpointCoordinator, daemon
from trinity_sync.checkpoint.daemon import Lifetime, connect
from trinity_sync.checkpoint.folder import resume_point
from trinity_sync.checkpoint.folder.contents import (
    STAGING,
    read_committed,
    read_manifest,
    read_tracker,
    step_dir,
    write_tracker,
)
from trinity_sync.checkpoint.folder.lock import has_no_monitor, locked
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.host import child_process
from trinity_sync.host.locks import open_lock, try_lock
from trinity_sync.integrations.verl.at_exit import SIGNAL_S
from trinity_sync.protocol.parts import FULL

LIMIT = 20.0
LIFETIME = Lifetime(first_s=10.0, grace_s=0.1, return_s=0.5)

Connect = Callable[..., LocalHandle]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def join(root: Path) -> Iterator[Connect]:
    """Connect to the monitor of ``program``, rank 0 by default. No process is left at the end."""
    made: list[LocalHandle] = []

    def join(program: str = "one", *, may_start: bool = True, **options: Any) -> LocalHandle:
        settings = {"timeout_s": LIMIT, "lifetime": LIFETIME, "config": MonitorConfig(timeout_s=LIMIT, fsync=False)}
        handle = connect(root, program=program, may_start=may_start, **{**settings, **options})
        made.append(handle)
        return handle

    yield join
    for handle in made:
        handle.close()
    wait_until_let_go(root)


def wait_until_let_go(root: Path) -> None:
    """Wait for the end of whoever holds the folder's lock; that is the last thing that a monitor lets go of."""
    deadline = time.monotonic() + LIMIT
    while root.is_dir():
        descriptor = open_lock(root / ".lock")
        try:
            if try_lock(descriptor):
                return
        finally:
            os.close(descriptor)
        assert time.monotonic() < deadline, "the folder is still locked"
        time.sleep(0.02)


def monitor_pid(root: Path) -> int:
    found = daemon.find(root)
    assert found is not None
    return found.pid


def kill_monitor(root: Path) -> int:
    pid = monitor_pid(root)
    os.kill(pid, signal.SIGKILL)
    return pid


def begin(handle: LocalHandle, step: int, *parts: str) -> Path:
    return Path(MonitorClient(handle).begin(step, None, "full", parts).result(LIMIT))


def save(handle: LocalHandle, folder: Path, step: int, part: str) -> None:
    def write() -> list[Path]:
        (folder / part).write_text(part)
        return [folder / part]

    CheckpointCoordinator(handle, timeout_s=LIMIT).save_sync(write, step, part=part)


def commit(handle: LocalHandle, step: int) -> None:
    save(handle, begin(handle, step, "model"), step, "model")
    MonitorClient(handle).wait_committed(step, None, LIMIT, kind="full").result(LIMIT)


def of_monitor(root: Path) -> set[str]:
    """What is there of a monitor, beside the locks, which stay as files."""
    return {path.name for path in root.iterdir() if path.name in (".monitor.json", ".monitor.log", STAGING)}


def test_ranks_save_through_one_monitor_which_leaves_nothing_behind(root: Path, join: Connect) -> None:
    first, second = join(), join(may_start=False)
    facts = [MonitorClient(handle).describe().result(LIMIT) for handle in (first, second)]
    assert facts[0] == facts[1]
    assert (facts[0]["root"], facts[0]["attempt"]) == (str(root), 0)
    assert facts[0]["pid"] == monitor_pid(root) != os.getpid()
    folder = begin(first, 3, "model", "optimizer")
    save(first, folder, 3, "model")
    save(second, folder, 3, "optimizer")
    committed = MonitorClient(second).wait_committed(3, None, LIMIT, kind="full").result(LIMIT)
    assert committed["path"] == str(step_dir(root, 3))
    assert read_manifest(step_dir(root, 3)).paths == {"model", "optimizer"}
    first.close()
    save(second, begin(second, 4, "model"), 4, "model")  # one of them is enough
    second.close()
    wait_until_let_go(root)
    assert of_monitor(root) == set()
    assert read_manifest(step_dir(root, 4)).step == 4


def test_what_is_whole_is_committed_after_the_last_rank_and_what_is_not_goes(root: Path, join: Connect) -> None:
    handle = join()
    folder = begin(handle, 1, "model")
    (folder / "model").write_bytes(b"0" * 1_000_000)
    half = begin(handle, 2, "model", "optimizer")
    save(handle, half, 2, "model")
    save(handle, folder, 1, "model")
    handle.close()  # at once, without a wait for the commit
    wait_until_let_go(root)
    assert read_manifest(step_dir(root, 1)).step == 1
    assert not step_dir(root, 2).exists()
    assert of_monitor(root) == {".monitor.log"}  # there is something to read in it
    log = (root / ".monitor.log").read_text()
    assert "step 2" in log
    assert "all processes of the program have ended; missing: part 'optimizer'" in log


BESIDE = ("actor/beside", "critic/beside")


def test_what_verls_tracker_names_is_whole_at_the_end_for_every_engine(root: Path, join: Connect) -> None:
    handle = join()
    save(handle, begin(handle, 1, "model", *BESIDE), 1, "model")
    step_dir(root, 1).mkdir()
    (step_dir(root, 1) / "data.pt").write_text("written by the trainer")
    write_tracker(root, FULL, 1)
    save(handle, begin(handle, 2, "model", *BESIDE), 2, "model")  # the trainer has not come to its own files
    handle.close()
    wait_until_let_go(root)
    assert read_manifest(step_dir(root, 1)).paths == {"model", "data.pt"}
    assert not step_dir(root, 2).exists()
    assert "missing: part 'actor/beside', part 'critic/beside'" in (root / ".monitor.log").read_text()


def test_a_slow_commit_leaves_the_word_that_the_trainer_has_written_the_next_step(root: Path, join: Connect) -> None:
    handle = join()
    for step in (1, 2):
        save(handle, begin(handle, step, "model", *BESIDE), step, "model")
        step_dir(root, step).mkdir()
        (step_dir(root, step) / "data.pt").write_text("written by the trainer")
        write_tracker(root, FULL, step)
    client = MonitorClient(handle)
    client.notify_beside(1, attempt=0).result(LIMIT)
    client.wait_committed(1, None, LIMIT, kind="full").result(LIMIT)
    assert (read_tracker(root, FULL).step, read_committed(root)) == (2, 1)
    handle.close()
    wait_until_let_go(root)
    assert read_manifest(step_dir(root, 2)).paths == {"model", "data.pt"}
    assert read_committed(root) == 2


@pytest.mark.parametrize("left", ["all of it", "half of it", "nothing"])
def test_a_file_of_another_rank_of_the_trainer_is_in_when_it_is_whole(root: Path, join: Connect, left: str) -> None:
    """verl's rank 0 writes the tracker before the others have come to theirs."""
    handle = join()
    save(handle, begin(handle, 1, "model", "beside", "beside-data_1.pt"), 1, "model")
    step_dir(root, 1).mkdir()
    torch.save({"position": list(range(1000))}, step_dir(root, 1) / "data_1.pt")
    data = (step_dir(root, 1) / "data_1.pt").read_bytes()
    (step_dir(root, 1) / "data_1.pt").write_bytes(data[: len(data) // 2] if left == "half of it" else data)
    if left == "nothing":
        (step_dir(root, 1) / "data_1.pt").unlink()
    write_tracker(root, FULL, 1)
    handle.close()
    wait_until_let_go(root)
    if left == "all of it":
        assert read_manifest(step_dir(root, 1)).paths == {"model", "data_1.pt"}
    else:
        assert not (step_dir(root, 1) / "manifest.json").exists()
        assert "missing: part 'beside-data_1.pt'" in (root / ".monitor.log").read_text()


def test_a_word_that_the_trainer_has_written_is_enough_for_every_engine(root: Path, join: Connect) -> None:
    handle = join()
    client = MonitorClient(handle)
    save(handle, begin(handle, 1, "model", *BESIDE), 1, "model")
    assert client.status(1).result(LIMIT)["state"] == "open"
    client.notify_beside(1, attempt=0).result(LIMIT)
    assert client.wait_committed(1, None, LIMIT, kind="full").result(LIMIT)["step"] == 1
    client.notify_beside(1, attempt=0).result(LIMIT)  # said again
    client.notify_beside(7, attempt=0).result(LIMIT)  # nobody saves it
    assert client.status(7).result(LIMIT)["state"] == "unknown"


def test_a_rank_that_is_killed_while_it_writes_fails_its_step_and_no_other(root: Path, join: Connect) -> None:
    handle = join()
    folder = begin(handle, 1, "model")

    def write() -> None:
        own = join(may_start=False)
        writing = threading.Event()
        coordinator = CheckpointCoordinator(own, timeout_s=LIMIT, job_id="rank-1")
        coordinator.save_async("model", lambda: (writing.set(), time.sleep(LIMIT)), 1, part="model")
        assert writing.wait(LIMIT)

    with forked(write):
        waiting = MonitorClient(handle).wait_committed(1, None, LIMIT, kind="full")
        assert folder.is_dir()
    with pytest.raises(RunError, match=r"part 'model' failed: the writer rank-1 .* was lost: its process died"):
        waiting.result(LIMIT)
    commit(handle, 2)


def test_a_monitor_that_is_killed_is_started_again_and_the_save_goes_on(
    root: Path, join: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    handle, other = join(), join(may_start=False)
    folder = begin(handle, 3, "model", "optimizer")
    save(handle, folder, 3, "model")
    waiting = MonitorClient(other).wait_committed(3, None, LIMIT, kind="full")
    assert not waiting.has_ended()
    before = kill_monitor(root)
    save(other, folder, 3, "optimizer")
    assert waiting.result(LIMIT)["step"] == 3
    assert monitor_pid(root) != before
    assert [record for record in caplog.records if "connecting again" in record.getMessage()]
    assert MonitorClient(handle).describe().result(LIMIT)["attempt"] == 0
    commit(handle, 4)


def test_a_monitor_that_is_told_to_end_commits_what_is_whole(root: Path, join: Connect) -> None:
    """As a batch system does that ends a job: the ranks get the same signal."""
    handle = join()
    folder = begin(handle, 1, "model")
    os.kill(monitor_pid(root), signal.SIGTERM)
    save(handle, folder, 1, "model")
    handle.close()
    wait_until_let_go(root)
    assert read_manifest(step_dir(root, 1)).step == 1
    assert "ended by SIGTERM" in (root / ".monitor.log").read_text()


def finish_saves(handle: LocalHandle, timeout_s: float = LIMIT, trainer_s: float = math.inf) -> None:
    MonitorClient(handle).finish_saves(timeout_s, trainer_s).result(LIMIT)


def test_saves_under_way_are_finished_as_soon_as_the_tracker_of_the_trainer_names_them(
    root: Path, join: Connect
) -> None:
    handle = join()
    finish_saves(handle, 0.0)  # there are none
    folder = begin(handle, 1, "model", *BESIDE)
    step_dir(root, 1).mkdir()
    threading.Timer(0.3, lambda: save(handle, folder, 1, "model")).start()
    threading.Timer(0.6, lambda: write_tracker(root, FULL, 1)).start()
    finish_saves(handle)
    assert read_manifest(step_dir(root, 1)).step == 1
    assert read_committed(root) == 1


@pytest.mark.all
def test_the_files_of_a_trainer_that_has_ended_are_not_awaited_for_long(root: Path, join: Connect) -> None:
    handle = join()
    folder = begin(handle, 1, "model", *BESIDE)
    threading.Timer(0.6, lambda: save(handle, folder, 1, "model")).start()
    began = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"step 1 .*: part 'actor/beside', part 'critic/beside'.* within 0.3 s"):
        finish_saves(handle, trainer_s=0.3)
    assert time.monotonic() - began > 0.6, "the parts of the engines have the whole limit"


def test_saves_under_way_that_cannot_be_finished_are_named(root: Path, join: Connect) -> None:
    handle = join()
    commit(handle, 1)
    write_tracker(root, FULL, 1)  # of the step before
    save(handle, begin(handle, 2, "model", *BESIDE), 2, "model")
    with pytest.raises(WaitTimeout, match=r"step 2 .*: part 'actor/beside', part 'critic/beside'.* within 0.3 s"):
        finish_saves(handle, 0.3)
    threading.Timer(0.3, lambda: MonitorClient(handle).fail_step(2, "planted", attempt=None).result(LIMIT)).start()
    with pytest.raises(RunError, match=r"the checkpoint of step 2 failed: .*planted"):
        finish_saves(handle)


def test_a_monitor_whose_disk_hangs_at_the_end_ends_all_the_same(root: Path, join: Connect) -> None:
    handle = join(lifetime=replace(LIFETIME, end_s=0.5))
    commit(handle, 1)
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    os.mkfifo(tracker)  # of which nobody writes the other end
    handle.close()
    wait_until_let_go(root)
    assert "the checkpoint monitor did not end within 0.5 s" in (root / ".monitor.log").read_text()


def test_the_monitor_outlives_the_program_by_less_than_30_seconds() -> None:
    default = Lifetime()
    assert max(default.first_s, default.grace_s, default.return_s) + default.end_s < 30.0
    assert SIGNAL_S < daemon._TERM_S < daemon._KILL_S < 30.0


def test_two_who_may_start_it_at_once_have_one(root: Path, join: Connect) -> None:
    handles: list[LocalHandle] = []
    starting = [threading.Thread(target=lambda: handles.append(join())) for _ in range(3)]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join(LIMIT)
    assert len({MonitorClient(handle).describe().result(LIMIT)["pid"] for handle in handles}) == 1
    assert len(handles) == 3


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.few(1)
def test_one_that_is_killed_while_it_starts_is_started_again_a_few_times(
    join: Connect, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    starts = []
    start = child_process.start_detached

    def killed_at_first(module: str, given: bytes, **options: Any) -> bytes:
        starts.append(module)
        return start("tests.checkpoint.killed" if len(starts) <= times else module, given, **options)

    monkeypatch.setattr(daemon, "start_detached", killed_at_first)
    if times < 3:
        MonitorClient(join()).describe().result(LIMIT)
    else:
        with pytest.raises(RunError, match="the checkpoint monitor could not start: it was killed"):
            join()
    assert len(starts) == 3


def test_what_it_says_before_it_can_report_is_told() -> None:
    with pytest.raises(
        RunError, match="no_such_module could not start: ModuleNotFoundError: No module named 'no_such'"
    ):
        child_process.start_detached("no_such", b"", who="no_such_module", timeout_s=LIMIT)


@pytest.mark.all
def test_two_who_may_start_it_have_one_after_its_death_too(root: Path, join: Connect) -> None:
    handles = [join(), join()]
    commit(handles[0], 1)
    before = kill_monitor(root)
    pids = {MonitorClient(handle).describe().result(LIMIT)["pid"] for handle in handles}
    assert len(pids) == 1
    assert before not in pids


def test_another_program_is_refused_while_one_lives(root: Path, join: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "LOOK_S", 0.3)
    handle = join("one")
    MonitorClient(handle).describe().result(LIMIT)
    with pytest.raises(ConfigError, match=r"is in use by the checkpoint monitor of another program \(pid \d+ on .*\)"):
        join("another")
    with pytest.raises(WaitTimeout, match=r"rank 0 did not have .* of this program listen for .*another program"):
        join("another", may_start=False, timeout_s=0.3)
    commit(handle, 1)


def test_a_program_waits_for_one_that_is_ending_and_begins_a_new_attempt(root: Path, join: Connect) -> None:
    before = join("one", lifetime=Lifetime(grace_s=0.5))
    commit(before, 1)
    before.close()  # its monitor lives on for half a second
    handle = join("another")
    assert MonitorClient(handle).describe().result(LIMIT)["attempt"] == 1


def test_a_run_of_another_kind_in_the_folder_is_told(
    root: Path, join: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "LOOK_S", 0.3)
    monkeypatch.setattr(daemon, "_START_AGAIN_S", 0.1)
    with locked(root, root), pytest.raises(ConfigError, match=rf"is in use by the run in {root} \(pid {os.getpid()} "):
        join()


def test_a_monitor_keeps_other_runs_out(root: Path, join: Connect) -> None:
    MonitorClient(join()).describe().result(LIMIT)
    with (
        pytest.raises(ConfigError, match=rf"is in use by the run in {root} \(pid {monitor_pid(root)} on"),
        locked(root, root, timeout_s=0.1),
    ):
        pass
    assert not has_no_monitor(root, 0.0)


def test_a_program_that_comes_back_goes_on_with_its_attempt(root: Path, join: Connect) -> None:
    """Where its ranks were gone for a while, what it has saved since its start is not set aside."""
    handle = join(resume_step=0)
    commit(handle, 1)
    handle.close()
    wait_until_let_go(root)
    handle = join(resume_step=0)
    assert MonitorClient(handle).describe().result(LIMIT)["attempt"] == 0
    assert step_dir(root, 1).is_dir()
    handle.close()
    wait_until_let_go(root)
    handle = join("another", resume_step=0)
    assert MonitorClient(handle).describe().result(LIMIT)["attempt"] == 1
    assert not step_dir(root, 1).exists()


def test_an_attempt_does_not_go_on_in_a_folder_that_another_program_has_taken(root: Path, join: Connect) -> None:
    handle = join("one")
    commit(handle, 1)
    waiting = MonitorClient(handle).wait_committed(2, None, LIMIT, kind="full")
    assert not waiting.has_ended()
    # A machine that was cut off: its monitor is gone, and another program was there before anybody noticed.
    (root / ".lock").write_text(f"the run in {root} (pid 1 on elsewhere)\nanother\nattempt 1")
    kill_monitor(root)
    with pytest.raises(RunError, match=r"another run has taken .* over; attempt 0 cannot continue there"):
        waiting.result(LIMIT)


def test_what_cannot_be_gone_on_from_is_told_and_nothing_stays_running(root: Path, join: Connect) -> None:
    with pytest.raises(RunError, match="global_step_7 is not a committed full checkpoint"):
        join(resume_step=7)
    assert daemon.find(root) is None
    wait_until_let_go(root)
    assert resume_point.put_in_order(root, None).attempt == 0


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        connect(tmp_path / "file", program="one", may_start=True, timeout_s=LIMIT)


def test_an_address_of_another_machine_is_told(join: Connect) -> None:
    with pytest.raises(RunError, match=r"the checkpoint monitor cannot listen at 203\.0\.113\.77"):
        join(address="203.0.113.77")


def test_a_rank_waits_for_rank_0_as_long_as_it_may(join: Connect) -> None:
    with pytest.raises(WaitTimeout, match=r"^rank 0 did not have .*no monitor has written its address.* within 0\.3 s"):
        join(may_start=False, timeout_s=0.3)


@pytest.mark.all
def test_a_stale_file_is_not_trusted(root: Path, join: Connect) -> None:
    """Its process is gone, and somebody else has the port: who listens there has to know the secret."""
    root.mkdir()
    server = socket.create_server(("127.0.0.1", 0))

    def rude() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"220 mail.example.org ready to take whatever you have to send\r\n")
                connection.recv(4096)
                connection.sendall(b"500 that was no mail, and no command that anybody here knows\r\n")

    answering = threading.Thread(target=rude)
    answering.start()
    stale = daemon.publish(root, "one", "127.0.0.1", server.getsockname()[1], b"s" * 32)
    try:
        with pytest.raises(WaitTimeout, match=r"it does not answer .*does not know the secret"):
            join(may_start=False, timeout_s=2.0)
        handle = join()
        assert MonitorClient(handle).describe().result(LIMIT)["pid"] != stale.pid
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        answering.join(LIMIT)


@pytest.mark.all
def test_a_copy_of_the_file_in_another_folder_is_not_trusted(root: Path, join: Connect, tmp_path: Path) -> None:
    handle = join()
    MonitorClient(handle).describe().result(LIMIT)
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / ".monitor.json").write_bytes((root / ".monitor.json").read_bytes())
    (copied / ".monitor.json").chmod(0o600)
    with pytest.raises(WaitTimeout, match=rf"belongs to {root}\)"):
        connect(copied, program="one", may_start=False, timeout_s=0.3)
    own = connect(copied, program="another", may_start=True, timeout_s=LIMIT, lifetime=LIFETIME)
    assert MonitorClient(own).describe().result(LIMIT)["root"] == str(copied)
    own.close()
    wait_until_let_go(copied)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_may_have_read_or_written_is_refused(root: Path, join: Connect, mode: int) -> None:
    root.mkdir()
    daemon.publish(root, "one", "127.0.0.1", 1, b"s" * 32)
    (root / ".monitor.json").chmod(mode)
    with pytest.raises(ConfigError, match=rf"cannot be trusted: others may read or write it \(mode {mode:o}\)"):
        join()


def test_a_file_of_another_user_or_a_link_is_refused(
    root: Path, join: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root.mkdir()
    daemon.publish(root, "one", "127.0.0.1", 1, b"s" * 32)
    assert (root / ".monitor.json").stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(ConfigError, match="it belongs to user"):
            join(may_start=False)
    (root / ".monitor.json").rename(tmp_path / "there")
    (root / ".monitor.json").symlink_to(tmp_path / "there")
    with pytest.raises(ConfigError, match="not a regular file"):
        join()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"program": 1, "port": "2"})])
def test_a_file_that_says_nothing_is_written_over(root: Path, text: str) -> None:
    root.mkdir()
    (root / ".monitor.json").write_text(text)
    (root / ".monitor.json").chmod(0o600)
    assert daemon.find(root) is None
    said = daemon.publish(root, "one", "127.0.0.1", 1, b"s" * 32)
    assert daemon.find(root) == said


def test_a_program_has_to_be_a_word(root: Path) -> None:
    for program in ("", "two\nlines"):
        with pytest.raises(ConfigError, match="has to be a word"):
            connect(root, program=program, may_start=False, timeout_s=1.0)


_STARTER = """
import os, socket, sys
from trinity_sync.checkpoint.daemon import connect
from trinity_sync.checkpoint.daemon import Lifetime
from trinity_sync.actors.monitor_client import MonitorClient
kept = socket.create_server(("127.0.0.1", 0)); kept.set_inheritable(True)
handle = connect(sys.argv[1], program="one", may_start=True, timeout_s=20.0, lifetime=Lifetime(grace_s=20.0))
pid = MonitorClient(handle).describe().result(20.0)["pid"]
print(pid, os.getsid(0), os.readlink(f"/proc/self/fd/{kept.fileno()}"))
"""


def _opened(process: Path) -> Iterator[str]:
    for link in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            yield str(link.readlink())


def test_it_outlives_who_started_it_and_has_nothing_of_theirs(root: Path, join: Connect) -> None:
    """`communicate` would wait for whoever holds the pipe; nobody's child is ended with its parent."""
    starter = subprocess.Popen([sys.executable, "-c", _STARTER, str(root)], stdout=subprocess.PIPE)
    printed, _ = starter.communicate(timeout=LIMIT)
    pid, session, kept = (int(word) if word.isdecimal() else word for word in printed.decode().split())
    process = Path(f"/proc/{pid}")
    parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    assert parent not in (starter.pid, os.getpid())
    assert os.getsid(pid) not in (session, pid)
    opened = set(_opened(process))
    assert not {name for name in opened if name.startswith("pipe:")}
    assert kept not in opened, "a socket of its starter's is open in it"
    assert {str(root / ".lock"), str(root / ".monitor.lock"), str(root / ".monitor.log")} <= opened
    for line in (process / "status").read_text().splitlines():
        if line.startswith("SigIgn"):
            ignored = int(line.split()[1], 16)
    assert all(ignored >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGHUP))
    loaded = (process / "maps").read_text()
    assert "libtorch" not in loaded  # torch's libgomp may be: vLLM has its program's children preload it
    assert "ray" not in Path(f"/proc/{pid}/cmdline").read_text()
    assert str(process.joinpath("cwd").readlink()) == "/"
    os.kill(pid, signal.SIGTERM)
    wait_until_let_go(root)
