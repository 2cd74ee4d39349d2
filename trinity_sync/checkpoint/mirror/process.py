"""Work at the mirror in a process of its own, which says over a `Connection` what comes of it.

One process per try, so that a client that hangs or a connection that is broken is gone with it, and nothing of the
library that speaks to the place is felt by the monitor. It also says that bytes move, and ends when its parent does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, TypeVar, cast

import tenacity

from trinity_sync.checkpoint.layout import ManifestError, UnreadableError
from trinity_sync.checkpoint.mirror.copies import DamagedError, ForeignError, Mirror
from trinity_sync.checkpoint.mirror.storage import Storage
from trinity_sync.checkpoint.owner import Owner
from trinity_sync.errors import RunError
from trinity_sync.host.child_process import Channel, start_child
from trinity_sync.host.masking import without_secrets
from trinity_sync.host.origin import shortened

T = TypeVar("T")

#: How often the child says that bytes are moving, and what is more than its own small change.
_BEAT_S = 1.0
_BEAT_BYTES = 1 << 16
#: For Python to start and take the work, which names all commits of the run; shorter than the lease of a copy.
_START_S = 60.0
#: For the process to end after its last message.
_END_S = 10
_MAX_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True)
class MirrorSettings:
    """How a mirror is kept (`checkpoint.mirror_*`).

    Args:
        options: options of the fsspec class of the place.
        keep: ``same``: the retention policies hold there too; ``all``: nothing is deleted there.
        tries: number of times that one piece of work is tried.
        backoff_s: wait after the first failure; doubles with each one, up to a minute.
        timeout_s: a try that moves no bytes for so long is broken off.
        named: the user has just named the place for this run, see `Mirror.check`.
        marked: the place has the mark of the run already.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    keep: Literal["same", "all"] = "same"
    tries: int = 8
    backoff_s: float = 2.0
    timeout_s: float = 300.0
    named: bool = False
    marked: bool = False


class MirrorError(RunError):
    """A try failed.

    Args:
        final: another one would fail as well: what is to be copied is gone or damaged, or the place is another run's.
    """

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


def call(
    place: str,
    settings: MirrorSettings,
    owner: Owner,
    work: Callable[[Mirror], T],
    *,
    say: Callable[[str], object] = lambda text: None,
    progress: Callable[[int, int], object] = lambda done, total: None,
    tick: Callable[[], object] = lambda: None,
    stop: threading.Event | None = None,
    log: Path | None = None,
) -> T:
    """Have work done in a process of its own, once.

    Args:
        place: a path, or a URL that fsspec knows.
        owner: the run that copies there.
        work: what to do there, such as ``partial(Mirror.upload, root=root, step=20)``; it is pickled.
        say, progress: get what the mirror says on the way, see `Mirror`.
        tick: called before all, and about once a second.
        stop: set: the child is killed.
        log: the child's own words are appended to it; None: they go to this process's standard error.

    Returns:
        What the work returned.

    Raises:
        MirrorError: it failed, moved nothing for `MirrorSettings.timeout_s`, or was stopped.
    """
    tick()
    try:
        child, channel = start_child(__name__, log)
    except OSError as error:
        raise MirrorError(f"the copying process could not be started: {error}") from error
    with contextlib.closing(channel), child:
        try:
            _send(channel, (place, dict(settings.options), owner, work), min(_START_S, settings.timeout_s))
            heard = time.monotonic()
            while stop is None or not stop.is_set():
                tick()
                if channel.poll(_BEAT_S):
                    heard = time.monotonic()
                    match _receive(channel, child):
                        case "done", result:
                            return cast(T, result)
                        case "failed", str(text), bool(final):
                            raise MirrorError(without_secrets(text, place, settings.options), final=final)
                        case "say", str(text):
                            say(text)
                        case "progress", int(done), int(total):
                            progress(done, total)
                elif time.monotonic() - heard > settings.timeout_s:
                    raise MirrorError(f"nothing moved for {settings.timeout_s:g} s")
            raise MirrorError("the run ended meanwhile", final=True)
        finally:
            child.kill()


def _send(channel: Channel, message: tuple[object, ...], limit_s: float) -> None:
    try:
        channel.send(message, limit_s)
    except TimeoutError:
        raise MirrorError(f"the copying process has not taken its work within {limit_s:g} s") from None
    except OSError:
        pass  # it died at once; `_receive` finds its end


def _receive(channel: Channel, child: subprocess.Popen[bytes]) -> tuple[object, ...]:
    with contextlib.suppress(EOFError):
        message: tuple[object, ...] = channel.recv()
        return message
    try:
        status = child.wait(_END_S)
    except subprocess.TimeoutExpired:
        raise MirrorError(f"the copying process has hung up and not ended within {_END_S} s") from None
    raise MirrorError(f"the copying process ended with {status}")


def try_again(
    settings: MirrorSettings,
    work: Callable[[], T],
    on_failure: Callable[[str], object],
    stop: threading.Event | None = None,
    tick: Callable[[], object] = lambda: None,
) -> T:
    """Repeat work that fails with a `MirrorError` that is not final, waiting longer each time.

    Args:
        on_failure: called after each failure with a sentence.
        stop: set: no pause is begun or waited out.
        tick: called about once a second while the next try is waited for.

    Raises:
        MirrorError: the last failure.
    """

    def told(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        error, pause = state.outcome.exception(), state.next_action.sleep
        on_failure(f"try {state.attempt_number} of {settings.tries} failed: {error}; the next is in {pause:g} s")

    stop = stop or threading.Event()

    def sleep(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not stop.wait(min(left, _BEAT_S)):
            tick()

    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(settings.tries) | tenacity.stop_when_event_set(stop),
        wait=tenacity.wait_exponential(multiplier=settings.backoff_s, max=max(_MAX_BACKOFF_S, settings.backoff_s)),
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, MirrorError) and not error.final),
        sleep=sleep,
        before_sleep=told,
        reraise=True,
    )
    try:
        return retrying(work)
    except MirrorError as error:
        tries = retrying.statistics["attempt_number"]
        on_failure(f"given up{f' after {tries} tries' if tries > 1 else ''}: {error}")
        raise


# ---- the child


def serve(descriptor: int) -> None:
    """Run as the child: do what the parent asks for, and end with it.

    Args:
        descriptor: file descriptor of the connection to the parent.
    """
    os.set_inheritable(descriptor, False)
    connection, lock = Connection(descriptor), threading.Lock()

    def send(*message: object) -> None:
        with lock:
            connection.send(message)

    asked = connection.recv_bytes()
    threading.Thread(target=_end_with_parent, args=[connection], daemon=True).start()
    threading.Thread(target=_beat, args=[partial(send, "moving")], daemon=True).start()
    try:
        place, options, owner, work = pickle.loads(asked)
        mirror = Mirror(partial(Storage, place, options), owner, partial(send, "say"), partial(send, "progress"))
        send("done", work(mirror))
    except Exception as error:
        lasting = ImportError | ManifestError | DamagedError | ForeignError
        final = isinstance(error, lasting) and not isinstance(error, UnreadableError)
        send("failed", described(error), final)
    # Clients leave threads and connections behind, for which nobody has to wait.
    os._exit(0)


def described(error: Exception) -> str:
    """An error of a client in one line, with its class, which often says more than its words."""
    text = shortened(" ".join(str(error).split()))
    return text if isinstance(error, RunError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def _end_with_parent(connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    os._exit(1)


def _beat(say_so: Callable[[], object]) -> None:
    """Say so whenever bytes have moved: all of them are read from files here, or written to some."""
    before = _moved()
    while True:
        time.sleep(_BEAT_S)
        now = _moved()
        if now is None or before is None or now - before > _BEAT_BYTES:
            say_so()
            before = now


def _moved() -> int | None:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    figures = dict(line.split(": ") for line in lines)
    return int(figures["rchar"]) + int(figures["wchar"])
