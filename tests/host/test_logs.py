"""The log of a process: who logs does not wait for the disk, and a file does not grow for ever."""

from __future__ import annotations

import io
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trinity_sync.errors import RunError
from trinity_sync.host import logs
from trinity_sync.host.logs import LogFile, log_failure


@contextmanager
def logging_to(file: LogFile) -> Iterator[logging.Logger]:
    logger = logging.Logger("test")
    logger.addHandler(file)
    try:
        yield logger
    finally:
        file.close()


def test_a_file_is_made_with_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "driver.log"
    with logging_to(LogFile(path)) as logger:
        assert not path.parent.exists()
        logger.info("a line")
    assert path.read_text() == "a line\n"


def test_lines_follow_in_order_and_none_is_lost_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    with logging_to(LogFile(path)) as logger:
        for number in range(1000):
            logger.info("%d", number)
    assert path.read_text().split() == [str(number) for number in range(1000)]


def test_a_warning_is_in_the_file_when_it_was_logged(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    with logging_to(LogFile(path)) as logger:
        for number in range(100):
            logger.warning("%d", number)
            assert path.read_text().endswith(f"{number}\n")


def test_a_file_makes_room_once_it_is_long(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    with logging_to(LogFile(path, most_bytes=100)) as logger:
        for number in range(100):
            logger.info("%019d", number)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["driver.log", "driver.log.1"]
    kept = [int(line) for line in (Path(f"{path}.1").read_text() + path.read_text()).split()]
    assert kept == list(range(100 - len(kept), 100))
    assert 5 <= len(kept) <= 10


def test_nobody_waits_for_a_disk_that_hangs_and_what_it_misses_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, goes_on, reached = tmp_path / "driver.log", threading.Event(), threading.Event()
    write_all = logs.write_all

    def hangs(descriptor: int, data: bytes) -> None:
        reached.set()
        assert goes_on.wait(60)
        write_all(descriptor, data)

    monkeypatch.setattr(logs, "write_all", hangs)
    monkeypatch.setattr(logs, "_MOST_WAITING", 10)
    with logging_to(LogFile(path)) as logger:
        logger.info("first")
        assert reached.wait(60)
        began = time.perf_counter()
        for number in range(50):
            logger.info("%d", number)
        assert time.perf_counter() - began < 1
        goes_on.set()
        logger.handlers[0].flush()
        logger.info("last")
    told = path.read_text().splitlines()
    assert told[0] == "first"
    assert "(40 lines are missing here: the disk did not take them)" in told
    assert told[-1] == "last"


def test_a_disk_that_hangs_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, goes_on, write_all = tmp_path / "driver.log", threading.Event(), logs.write_all

    def hangs(descriptor: int, data: bytes) -> None:
        assert goes_on.wait(60)
        write_all(descriptor, data)

    monkeypatch.setattr(logs, "write_all", hangs)
    with logging_to(LogFile(path)) as logger:
        began = time.perf_counter()
        for number in range(20):
            logger.warning("%d", number)
        assert time.perf_counter() - began < 5
        goes_on.set()
        deadline = time.monotonic() + 60
        while not (path.exists() and path.read_text().endswith("19\n")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        logger.warning("and is waited for again")
        assert path.read_text().endswith("again\n")


def test_lines_that_a_full_disk_refused_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write_all = tmp_path / "driver.log", logs.write_all

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with logging_to(LogFile(path)) as logger:
        monkeypatch.setattr(logs, "write_all", full)
        logger.warning("one")
        logger.warning("two")
        monkeypatch.setattr(logs, "write_all", write_all)
        logger.warning("three")
        logger.warning("four")
    assert path.read_text() == "(2 lines are missing here: the disk did not take them)\nthree\nfour\n"


def test_a_fork_logs_too(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    with logging_to(LogFile(path)) as logger:
        logger.warning("parent")
        child = os.fork()
        if not child:
            logger.warning("child")
            os._exit(0)
        os.waitpid(child, 0)
    assert path.read_text() == "parent\nchild\n"


@pytest.mark.filterwarnings("error")  # as of a thread that has died
def test_a_disk_that_refuses_fails_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with logging_to(LogFile(tmp_path / "file" / "driver.log")) as logger:
        logger.warning("a line")
    assert capsys.readouterr() == ("", "")


OWN_LOG = """\
import logging, os, sys
from trinity_sync.host import logs
logs.MOST_BYTES = logs.LogFile.__init__.__kwdefaults__["most_bytes"] = 2000
logs._LOOK_S = 0.01
logging.basicConfig(level=logging.INFO)  # as verl does when it is imported
logs.own_log(sys.argv[1], "explorer-0")
logs.flush_logs()  # so that the thread that writes lines puts none into the middle of what is printed
print("a print")
os.system("echo of a child")
logging.getLogger("theirs").info("a library's line")
logs.flush_logs()
{then}
"""


def own_log(folder: Path, then: str = "") -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-c", OWN_LOG.format(then=then), str(folder)]
    return subprocess.run(code, capture_output=True, text=True, timeout=60)


def test_a_process_has_all_that_it_says_in_its_own_log(tmp_path: Path) -> None:
    ended = own_log(tmp_path / "logs", then="1 / 0")
    assert (ended.stdout, ended.stderr) == ("", "")
    text = (tmp_path / "logs/explorer-0.log").read_text()
    for line in ("\na print\n", "\nof a child\n", " INFO theirs: a library's line\n", "\nZeroDivisionError: division"):
        assert line in f"\n{text}"
    assert text.count("a library's line") == 1


def test_a_process_without_the_folder_keeps_its_output_and_logs_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = own_log(tmp_path / "file")
    assert ended.returncode == 0
    assert ended.stdout == "a print\nof a child\n"
    assert " INFO theirs: a library's line\n" in ended.stderr


FLOOD = """
import pathlib, time
old = pathlib.Path(sys.argv[1], "explorer-0.log.1")
logs.flush_logs()
print("x" * 3000)
deadline = time.monotonic() + 30
new = old.with_suffix("")
while not (old.exists() and new.exists() and new.stat().st_size) and time.monotonic() < deadline:
    print("before")  # until what is printed goes there, too
    time.sleep(0.01)
print("after")
"""


def test_what_a_process_prints_makes_room_too(tmp_path: Path) -> None:
    assert own_log(tmp_path, then=FLOOD).returncode == 0
    assert "xxx" in (tmp_path / "explorer-0.log.1").read_text()
    assert (tmp_path / "explorer-0.log").read_text().endswith("after\n")


CHILD_FLOODS = """
import pathlib, subprocess, time
log = pathlib.Path(sys.argv[1], "explorer-0.log")
flood = subprocess.Popen([sys.executable, "-c", "while True: print('x' * 99)"], start_new_session=True)
room, deadline = 0, time.monotonic() + 30
while room < 3 and time.monotonic() < deadline:
    before = log.stat().st_size
    time.sleep(0.01)
    room += log.stat().st_size < before
flood.kill()
sys.exit(room < 3)
"""


def test_a_child_that_holds_the_file_open_cannot_grow_it(tmp_path: Path) -> None:
    ended = own_log(tmp_path, then=CHILD_FLOODS)
    assert ended.returncode == 0, ended.stderr
    kept = {path.name: path for path in tmp_path.iterdir()}
    assert sorted(kept) == ["explorer-0.log", "explorer-0.log.1"]
    assert kept["explorer-0.log.1"].stat().st_size <= 2000


def test_a_file_that_is_long_is_cut_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"a" * 30 + b"b" * 70)
    logs.make_room(path, 101)
    assert not Path(f"{path}.1").exists()
    logs.make_room(path, 80)
    assert (path.read_bytes(), Path(f"{path}.1").read_bytes()) == (b"", b"a" * 10 + b"b" * 70)
    logs.make_room(tmp_path / "none", 0)
    assert not (tmp_path / "none").exists()


def test_what_one_process_has_kept_another_one_does_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, stat = tmp_path / "a.log", Path.stat
    path.write_bytes(b"a" * 100)

    def look(self: Path) -> os.stat_result:
        found = stat(self)
        monkeypatch.undo()
        logs.make_room(path, 80)  # the other one, which comes first
        return found

    monkeypatch.setattr(Path, "stat", look)
    logs.make_room(path, 80)
    assert (path.read_bytes(), Path(f"{path}.1").read_bytes()) == (b"", b"a" * 80)


def test_two_processes_that_move_an_end_at_the_same_time_lose_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"a" * 100)

    class Late(io.FileIO):
        def seek(self, offset: int, whence: int = 0, /) -> int:
            found = super().seek(offset, whence)
            logs.make_room(path, 80)  # the other one, which is done before this one reads
            path.write_bytes(b"b" * 50)
            return found

    def opened(self: Path, mode: str) -> io.FileIO:
        monkeypatch.undo()
        return Late(self, mode)

    monkeypatch.setattr(Path, "open", opened)
    logs.make_room(path, 80)
    kept = Path(f"{path}.1").read_bytes()
    assert (path.read_bytes(), len(kept), kept[-10:]) == (b"b" * 50, 80, b"a" * 10)


def test_without_room_for_the_end_of_a_file_nothing_is_lost(tmp_path: Path) -> None:
    path, before = tmp_path / "a.log", tmp_path / "a.log.1"
    path.write_bytes(b"a" * 100)
    before.write_bytes(b"b" * 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, hard))
    try:
        logs.make_room(path, 80)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (path.read_bytes(), before.read_bytes()) == (b"a" * 100, b"b" * 20)
    logs.make_room(path, 80)
    assert (path.read_bytes(), before.read_bytes()) == (b"", b"a" * 80)


def test_a_line_is_cut_where_it_is_long(tmp_path: Path) -> None:
    with logging_to(LogFile(tmp_path / "a.log")) as logger:
        logger.warning("x" * 3_000_000)
    assert (tmp_path / "a.log").stat().st_size < 1_100_000


def test_a_failure_is_logged_once_with_what_says_enough(caplog: pytest.LogCaptureFixture) -> None:
    foreseen = RunError("explorer-0 holds no version")
    log_failure("generate", foreseen)
    log_failure("produce", foreseen)
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("generate failed: explorer-0 holds no version", None)
    caplog.clear()
    unforeseen = ZeroDivisionError("of ours")
    log_failure("generate", unforeseen)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is unforeseen


def test_a_failure_that_was_logged_elsewhere_is_logged_here_too(caplog: pytest.LogCaptureFixture) -> None:
    error = RunError("no")
    log_failure("save", error)
    setattr(error, logs._LOGGED_BY, os.getpid() + 1)
    log_failure("write", error)
    assert [record.getMessage() for record in caplog.records] == ["save failed: no", "write failed: no"]


def test_a_failure_from_a_host_where_the_process_has_the_same_number_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = RunError("no")
    setattr(error, logs._LOGGED_BY, os.getpid())
    log_failure("save", error)
    assert [record.getMessage() for record in caplog.records] == ["save failed: no"]
    caplog.clear()
    monkey = pytest.MonkeyPatch()
    with monkey.context() as there:
        there.setattr(logs, "_HERE", "another host")
        log_failure("write", error)
    assert [record.getMessage() for record in caplog.records] == ["write failed: no"]


_LOGS_AT_ITS_END = """
import logging, sys
from trinity_sync.host.logs import LogFile

logger = logging.getLogger("at its end")
logger.addHandler(LogFile(sys.argv[1]))

class Late:
    def __del__(self):
        assert sys.is_finalizing()
        logger.error("too late")

late = Late()
late.itself = late  # found by the last collection only, as tasks of asyncio are
logger.warning("in time")
"""


def test_what_is_logged_while_the_interpreter_ends_does_not_keep_the_process(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    done = subprocess.run([sys.executable, "-c", _LOGS_AT_ITS_END, path], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_text() == "in time\n"
