"""Work in a thread of its own: what comes of it reaches who waits for it."""

from __future__ import annotations

import sys
import threading

import pytest

from trinity_sync.host.threads import deaths_told, in_background


def test_the_result_comes_from_a_thread_that_keeps_no_process_alive() -> None:
    thread = in_background(threading.current_thread, "work").result(10)
    assert (thread.name, thread.daemon) == ("work", True)


def test_what_is_raised_comes_as_it_is() -> None:
    error = KeyboardInterrupt("even this")

    def fail() -> None:
        raise error

    with pytest.raises(KeyboardInterrupt) as raised:
        in_background(fail, "work").result(10)
    assert raised.value is error


def test_a_thread_that_dies_is_told_of_and_one_that_ends_is_not(caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, BaseException]] = []
    error = ValueError("no such event")

    def fail() -> None:
        raise error

    def tell(who: str, why: BaseException) -> None:
        told.append((who, why))
        raise OSError("the disk is full")

    before = threading.excepthook
    with deaths_told(tell):
        for body in (fail, sys.exit, int):
            thread = threading.Thread(target=body, name=body.__name__)
            thread.start()
            thread.join(10)
    assert told == [("thread fail", error)]
    assert "no such event" in caplog.text
    assert threading.excepthook is before
