"""Ctrl-C and SIGTERM end a run, whatever the interpreter does at that moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from trinity_sync.host import interrupts
from trinity_sync.host.interrupts import finishing_steps, interruptible


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_and_handlers_are_as_before(signum: int) -> None:
    before = signal.getsignal(signum)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signum)
    assert signal.getsignal(signum) is before
    interrupts.check()


def test_the_first_sigterm_may_ask_for_a_last_save() -> None:
    stop = threading.Event()
    with interruptible(), finishing_steps(stop):
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_where_no_step_is_under_way_there_is_nothing_to_save_and_sigterm_interrupts() -> None:
    stop = threading.Event()
    with interruptible():
        with finishing_steps(stop):
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert not stop.is_set()


def test_nothing_is_to_be_saved_where_nobody_asked_for_it() -> None:
    with interruptible(), finishing_steps(None), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_a_sigterm_may_be_meant_to_save_nothing() -> None:
    stop = threading.Event()
    with interruptible(sigterm_saves=False), finishing_steps(stop), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert not stop.is_set()


@pytest.fixture
def queue() -> Iterator[list[int]]:
    """The signals that came to a handler of SIGUSR2, such as submitit's."""
    told: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda signum, frame: told.append(signum))
    yield told
    signal.signal(signal.SIGUSR2, before)


def test_the_signal_of_a_queue_saves_and_comes_to_its_handler_when_all_is_over(queue: list[int]) -> None:
    stop = threading.Event()
    with interruptible(sigterm_saves=False), finishing_steps(stop):
        signal.raise_signal(signal.SIGUSR2)
        assert stop.is_set()
        assert queue == []
    assert queue == [signal.SIGUSR2]


def test_the_signal_of_a_queue_interrupts_where_there_is_nothing_to_save(queue: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGUSR2)
    assert queue == [signal.SIGUSR2]


def test_a_signal_that_nobody_handles_is_left_alone(queue: list[int]) -> None:
    with interruptible():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_destructor_swallowed_is_raised_again() -> None:
    class Swallows:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with interruptible():
        Swallows()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_elsewhere_than_in_the_main_thread_nothing_changes() -> None:
    def body() -> None:
        with interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join(30)
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_an_interrupt_is_answered_at_once_and_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(interrupts, "time", clock)
    with interruptible():
        for now in (100.0, 101.5):  # noqa: B007
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert interrupts.interrupted()
    assert capfd.readouterr().err == "stopping ...\n"
    assert not interrupts.interrupted()


def test_an_interrupt_right_after_another_does_not_meet_the_way_to_the_end() -> None:
    with interruptible():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.interrupted()


def test_what_ends_something_is_not_interrupted_and_the_interrupt_is_not_lost() -> None:
    ended = []
    with interruptible():
        with interrupts.shielded():
            signal.raise_signal(signal.SIGINT)
            ended.append(True)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert ended


def test_what_fails_after_an_interrupt_is_an_interrupt() -> None:
    with interruptible():
        with pytest.raises(ValueError, match="before"), interrupts.failing_of_it():
            raise ValueError("before")
        with interrupts.shielded():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as found, interrupts.failing_of_it():
            raise ValueError("after")
    assert str(found.value.__cause__) == "after"
