"""Work in a thread of its own: what comes of it reaches who waits for it."""

from __future__ import annotations

import threading

import pytest

from trinity_sync.host.threads import in_background


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
