"""What is told of a copying process that does not do as it should, and of a parent that is not as usual."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.mirror_places import LIMIT_S, OWNER, asked, fail, linger, quick, stand_still
from trinity_sync.checkpoint.folder.contents import ManifestError, NewerFormatError, NoManifestError, UnreadableError
from trinity_sync.checkpoint.mirror import run_mirror
from trinity_sync.checkpoint.mirror import run_mirror as module
from trinity_sync.checkpoint.mirror.copies import DamagedError, ForeignError, Mirror
from trinity_sync.checkpoint.mirror.run_mirror import MirrorError, try_again
from trinity_sync.errors import RunError
from trinity_sync.host.child_process import start_child
from trinity_sync.host.threads import in_background

#: More than fits into a connection that nobody reads.
BIG: dict[str, Any] = {"options": {"padding": "x" * 3_000_000}}

_FIND_ITS_END = "import os, re, sys, time; end = int(re.search(r'serve.(\\d+)', sys.argv[1])[1]); "


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``child("os.close(end)")``: let the copying process do that instead."""

    def make(program: str) -> None:
        script = tmp_path / "python"
        command = shlex.join([sys.executable, "-S", "-c", _FIND_ITS_END + program])
        script.write_text(f'#!/bin/sh\nexec {command} "$4"\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return make


@pytest.mark.parametrize(
    ("program", "settings", "told"),
    [
        (r"os.write(end, b'\0\0\0\x20half of it'); time.sleep(60)", {"timeout_s": 0.5}, r"nothing moved for 0\.5 s"),
        (r"os.write(end, b'\0\0\0\x20half of it'); sys.exit(3)", {}, "the copying process ended with 3"),
        ("time.sleep(60)", {"timeout_s": 0.5}, r"nothing moved for 0\.5 s"),
        ("time.sleep(60)", {**BIG, "timeout_s": 0.5}, r"has not taken its work within 0\.5 s"),
        ("sys.exit(3)", {}, "the copying process ended with 3"),
        ("sys.exit(3)", BIG, "the copying process ended with 3"),
        ("os.close(end); time.sleep(60)", {}, "has hung up and not ended within 1 s"),
    ],
    ids=["half-message", "half-message-and-end", "hangs", "does-not-read", "dies", "dies-unread", "hangs-up"],
)
@pytest.mark.few(2)
def test_a_process_that_does_not_answer_fails_its_try(
    child: Callable[[str], None],
    there: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    settings: dict[str, Any],
    told: str,
) -> None:
    child(program)
    monkeypatch.setattr(module, "_END_S", 1 if "within 1 s" in told else int(LIMIT_S))
    with pytest.raises(MirrorError, match=told) as caught:
        asked(str(there), quick(**settings), Mirror.claim)
    assert not caught.value.final


def test_work_that_names_many_commits_has_the_time_of_the_start(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "start_child", partial(start_child, message_s=0.01))
    asked(str(there), quick(options={}), partial(Mirror.check, known={(BIG["options"]["padding"], 0, None, 1)}))


def test_an_interpreter_that_is_not_there_fails_the_try(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(MirrorError, match=r"the copying process could not be started: .*none") as caught:
        asked(str(there), quick(), Mirror.claim)
    assert not caught.value.final


def group_and_session(mirror: Mirror) -> tuple[int, int]:
    return os.getpgid(0), os.getsid(0)


def test_it_is_spared_the_interrupts_of_the_run_and_stays_in_its_session(there: Path) -> None:
    group, session = asked(str(there), quick(options={}), group_and_session)
    assert group != os.getpgid(0)
    assert session == os.getsid(0)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no class that yields")
def test_a_copy_yields_to_training_and_a_fetch_for_which_a_run_waits_does_not(tmp_path: Path) -> None:
    class Observed:
        def claim(self, *_: object, **__: object) -> None:
            pass

        def upload(self, *_: object, **__: object) -> int:
            return os.sched_getscheduler(0)

        def download(self, *_: object, **__: object) -> int:
            return os.sched_getscheduler(0)

    observed: Any = Observed()
    copy = in_background(lambda: run_mirror._copy(observed, tmp_path, 7, None, None, None), "copy")
    assert copy.result(LIMIT_S) == (os.SCHED_IDLE, None)
    fetch = in_background(lambda: run_mirror._fetch(observed, tmp_path, (0, 0), {}), "fetch")
    assert fetch.result(LIMIT_S) == os.sched_getscheduler(0)


def test_a_default_limit_for_sockets_does_not_reach_the_connection(there: Path) -> None:
    socket.setdefaulttimeout(5.0)
    try:
        assert asked(str(there), quick(options={}), Mirror.claim) is None
    finally:
        socket.setdefaulttimeout(None)


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]], ids=str)
@pytest.mark.few(2)
def test_a_program_without_its_standard_descriptors_has_copies_too(
    there: Path, tmp_path: Path, closed: list[int]
) -> None:
    answer = tmp_path / "answer"
    program = (
        "from pathlib import Path\n"
        "from tests.checkpoint.mirror_places import OWNER, asked, descriptors\n"
        "from trinity_sync.checkpoint.mirror.run_mirror import MirrorSettings, call\n"
        "from trinity_sync.checkpoint.folder.owner import Owner\n"
        f"found = call({str(there)!r}, MirrorSettings(timeout_s=20), {OWNER!r}, descriptors)\n"
        f"Path({str(answer)!r}).write_text(' '.join(found))\n"
    )
    without = " ".join(f"{number}>&-" for number in closed)
    command = f"exec {shlex.join([sys.executable, '-c', program])} {without}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(["/bin/sh", "-c", command], capture_output=True, timeout=LIMIT_S, check=False, env=environment)
    assert answer.exists(), "the copy failed"
    output = "/dev/null" if 2 in closed else "pipe"
    assert answer.read_text() == f"/dev/null {output} {output}", "an end of the connection is among them"


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (UnreadableError("not now"), False),
        (OSError("not now"), False),
        (ManifestError("damaged"), True),
        (NoManifestError("none"), True),
        (NewerFormatError("newer"), True),
        (DamagedError("damaged"), True),
        (ForeignError("another run"), True),
        (ImportError("no client"), True),
    ],
)
@pytest.mark.few(4)
def test_what_may_pass_is_tried_again_and_what_stays_is_not(there: Path, error: Exception, final: bool) -> None:
    with pytest.raises(MirrorError, match=str(error)) as caught:
        asked(str(there), quick(options={}), partial(fail, error=error))
    assert caught.value.final == final


# ---- the child's end


def test_a_copying_process_ends_with_its_parent(there: Path, tmp_path: Path) -> None:
    child, connection = start_child(module.__name__, tmp_path / "log")
    with child:
        connection.send((str(there), None, {}, OWNER, linger))
        assert connection.poll(LIMIT_S)
        assert connection.recv() == ("say", "begun")
        connection.close()  # as the end of the parent does
        assert child.wait(LIMIT_S) == 1


@pytest.mark.all
def test_a_copying_process_that_only_says_how_far_it_is_moves_nothing(there: Path) -> None:
    with pytest.raises(MirrorError, match=r"nothing moved for 2 s"):
        asked(str(there), quick(options={}, timeout_s=2.0), stand_still)


def say_words(mirror: Mirror) -> None:
    """Work at a mirror whose library has something to say."""
    os.write(2, b"words")


def test_a_copying_process_leaves_its_own_words_in_the_log(there: Path, tmp_path: Path) -> None:
    asked(str(there), quick(options={}), say_words, log=tmp_path / "logs" / "mirror.log")
    assert (tmp_path / "logs" / "mirror.log").read_text() == "words"


def test_a_stop_ends_the_copying_process_at_once(there: Path) -> None:
    stop = threading.Event()
    with pytest.raises(MirrorError, match="the run ended meanwhile") as caught:
        asked(str(there), quick(options={}), linger, say=lambda text: stop.set(), stop=stop)
    assert caught.value.final


def test_moving_bytes_are_told_and_small_change_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    beat = module._BEAT_BYTES
    figures = iter([0, beat, beat + 1, beat + 2, 2 * beat + 2, 2 * beat + 3, None, 0])
    monkeypatch.setattr(module, "_moved", lambda: next(figures))
    monkeypatch.setattr(module, "_BEAT_S", 0.0)
    said: list[str] = []
    with pytest.raises(StopIteration):
        module._beat(lambda: said.append("moving"))
    assert len(said) == 4, "where it is not known it counts as moving"


def test_what_moves_is_what_is_read_and_written() -> None:
    before = module._moved()
    with open(os.devnull, "wb", buffering=0) as file:
        file.write(bytes(1 << 20))
    after = module._moved()
    assert before is not None
    assert after is not None
    assert (1 << 20) <= after - before < (2 << 20)


def test_a_copy_that_moves_bytes_is_not_broken_off(there: Path) -> None:
    assert asked(str(there), quick(options={}, timeout_s=2.0), busy) == "done"


def busy(mirror: Mirror) -> str:
    """Work at a mirror that moves bytes for longer than the limit."""
    deadline = time.monotonic() + 5.0
    with open(os.devnull, "wb", buffering=0) as file:
        while time.monotonic() < deadline:
            file.write(bytes(1 << 20))
            time.sleep(0.05)
    return "done"


# ---- tries


def failing(times: int, *, final: bool = False) -> Callable[[], str]:
    """Work that fails so often."""
    left = [times]

    def work() -> str:
        if left[0]:
            left[0] -= 1
            raise MirrorError("no", final=final)
        return "done"

    return work


def test_tries_are_told_and_their_pauses_double_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BACKOFF_S", 0.03)
    said: list[str] = []
    assert try_again(quick(tries=4, backoff_s=0.01), failing(3), said.append) == "done"
    assert said == [
        "try 1 of 4 failed: no; the next is in 0.01 s",
        "try 2 of 4 failed: no; the next is in 0.02 s",
        "try 3 of 4 failed: no; the next is in 0.03 s",
    ]


@pytest.mark.parametrize(
    ("final", "said"), [(False, ["try 1 of 2 failed", "given up after 2 tries: no"]), (True, ["given up: no"])]
)
def test_tries_end_with_the_last_or_with_what_another_would_not_help(final: bool, said: list[str]) -> None:
    told: list[str] = []
    with pytest.raises(MirrorError):
        try_again(quick(tries=2, backoff_s=0.01), failing(9, final=final), told.append)
    assert [text.partition(": no; ")[0] for text in told] == said


def test_a_stop_ends_the_pause_between_tries() -> None:
    stop = threading.Event()
    ticks: list[None] = []

    def told(text: str) -> None:
        if text.startswith("try 1"):
            threading.Timer(0.1, stop.set).start()

    began = time.monotonic()
    with pytest.raises(MirrorError, match="no"):
        try_again(quick(tries=9, backoff_s=50.0), failing(9), told, stop, lambda: ticks.append(None))
    assert time.monotonic() - began < 25.0


def test_the_pause_between_tries_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEAT_S", 0.01)
    ticks: list[None] = []
    try_again(quick(tries=2, backoff_s=0.1), failing(1), lambda text: None, tick=lambda: ticks.append(None))
    assert len(ticks) > 2


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RunError("why"), "why"),
        (RunError(""), "RunError"),
        (OSError("why"), "OSError: why"),
        (OSError(), "OSError"),
        (OSError("two\n  lines"), "OSError: two lines"),
    ],
)
def test_an_error_of_a_client_is_one_line_with_its_class(error: Exception, text: str) -> None:
    assert module.described(error) == text
