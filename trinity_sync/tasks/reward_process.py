"""The program of a reward process, which `tasks.reward_processes` starts. It has one thread; the user's function may
hang, crash, fork or exit in it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from multiprocessing.connection import Connection

from trinity_sync.host.child_process import go_on_kept
from trinity_sync.host.interrupts import ENDING, SignalHandler
from trinity_sync.host.origin import ASK, Origin, end_text, keep_origin, tell_stack
from trinity_sync.tasks.base import Failure, RewardFunction, RewardResult, SummedResult, judged

Answer = RewardResult | Failure | None
"""Of a response; None: the function is imported."""


def serve(descriptor: int, stack: int, lifeline: int) -> None:
    """Answer one request after another, until the connection is closed."""
    for inherited in (descriptor, stack, lifeline):  # not to programs that the function starts
        os.set_inheritable(inherited, False)
    connection = Connection(descriptor)
    go_on_kept(lifeline, ASK, not_kept=[descriptor])
    counted = {signum: handler for signum in ENDING if callable(handler := signal.getsignal(signum))}
    tell_stack(stack)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whole lines: others write into the same file
            stream.reconfigure(line_buffering=True, write_through=False)
    process = os.getpid()
    with contextlib.suppress(EOFError, OSError):
        connection.send_bytes(b"")  # before the user's code runs
        number, pickled = connection.recv()
        with _ended_by_signals(counted):
            reward = _loaded(pickled)
        answer: Answer = reward if isinstance(reward, Failure) else None
        while os.getpid() == process:  # a fork of the function must not answer
            connection.send_bytes(encoded(number, answer))
            _flush()
            number, response = connection.recv()
            with _ended_by_signals(counted):
                answer = reward if isinstance(reward, Failure) else judged(reward, response)
    _flush()
    os._exit(0)  # also ends threads of the function


@contextlib.contextmanager
def _ended_by_signals(counted: Mapping[signal.Signals, SignalHandler]) -> Iterator[None]:
    """Let signals end this process in the block, and after it while a program of the function runs: the signals may end
    that program, too, and make a verdict wrong. Otherwise the process survives them, which saves importing the function
    again.
    """
    _exchange(counted, dict.fromkeys(counted, signal.SIG_DFL))
    yield
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none
        _exchange(dict.fromkeys(counted, signal.SIG_DFL), counted)


def _exchange(before: Mapping[signal.Signals, SignalHandler], after: Mapping[signal.Signals, SignalHandler]) -> None:
    for signum, handler in before.items():
        if signal.getsignal(signum) == handler:
            signal.signal(signum, after[signum])


def encoded(number: str, answer: Answer) -> bytes:
    """Serialise an answer. A response may have manipulated this process, so `decoded` executes nothing."""
    told = [*answer, answer.parts] if isinstance(answer, SummedResult) else answer
    return json.dumps([number, told], default=astuple).encode()


def decoded(data: bytes) -> tuple[str, Answer]:
    """Return number and answer."""
    match json.loads(data):
        case [str(number), None]:
            return number, None
        case [str(number), [float(reward), (float() | None) as exact]] if math.isfinite(reward + (exact or 0.0)):
            return number, RewardResult(reward, exact)
        case [str(number), [float(reward), None, dict() as parts]] if all(
            isinstance(value, float) and math.isfinite(value) for value in (reward, *parts.values())
        ):
            return number, SummedResult.of(reward, parts)
        case [str(number), [str(what), None]]:
            return number, Failure(what)
        case [str(number), [str(what), [str(place), str(traceback)]]]:
            return number, Failure(what, Origin(place, traceback))
    raise ValueError("not an answer")


def _loaded(pickled: bytes) -> RewardFunction | Failure:
    """Return the function, or a `Failure`."""
    try:
        reward: RewardFunction = pickle.loads(pickled)
        getattr(reward, "warm_up", lambda: None)()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return Failure(end_text(error), keep_origin(error))
    return reward


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
