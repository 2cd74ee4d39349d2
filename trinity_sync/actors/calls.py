"""Calls to Ray's actors. Each wait has a timeout, and its error names the actor, the task and the cause. A running call
fails as soon as the actor's process ends, so deaths are noticed at once.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import ray
from ray import ObjectRef
from ray._private import utils
from ray.actor import ActorHandle
from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from trinity_sync.actors.pending import ANSWER_S, CallChannel, DeathError, NoAnswerError, PendingCall, ended
from trinity_sync.errors import ProcessLoss, RunError, TrinityError, WaitTimeout
from trinity_sync.host.hardware import look_there
from trinity_sync.host.interrupts import REST_S, leave_to_driver, left
from trinity_sync.host.origin import error_text
from trinity_sync.host.process import DRIVER, end_with_driver
from trinity_sync.host.threads import in_background
from trinity_sync.protocol.rounds import RoundMember

__all__ = ["ANSWER_S", "Call", "DeathError", "RayChannel", "ended", "results", "this_process"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@contextmanager
def connected() -> Iterator[None]:
    """Within the block, raise ProcessLoss where Ray's raylet on this node is gone: Ray's library says OSError."""
    try:
        yield
    except OSError as error:
        if not _of_raylet(error):
            raise
        raise ProcessLoss(f"pid {os.getpid()} does not reach Ray's raylet on its node any more: {error}") from error


def _of_raylet(error: Exception) -> bool:
    """Whether an error of Ray's library is that of a lost raylet, and not one of an actor or of a timeout."""
    return isinstance(error, OSError) and not isinstance(error, RayError | TimeoutError)


def put(value: T) -> ObjectRef[T]:
    """As Ray's `put`. Raises ProcessLoss as `connected`; but Ray may end this process where its raylet has died."""
    with connected():
        return ray.put(value)


def this_process(name: str) -> RoundMember:
    """Return the calling process as a member; always the same one until the process leaves Ray."""
    return RoundMember(name, _life(os.getpid(), ray.get_runtime_context().get_worker_id()))


@functools.cache
def _life(pid: int, worker: str) -> str:
    """Draw the random word of one process. The cache keys differ in a fork (pid), and after the process has left Ray
    and joined it again (worker), since actors take it for dead then.
    """
    return RoundMember.new(str(pid)).life


class Call(PendingCall[T_co]):
    """A call to one of Ray's actors; see `PendingCall`.

    Args:
        reference: Ray's reference to the answer.
    """

    def __init__(self, reference: ObjectRef[T_co], who: str, what: str) -> None:
        super().__init__(who, what)
        self.reference = reference
        self.began = time.monotonic()

    @property
    def owned(self) -> Sequence[ObjectRef[T_co]]:
        """The reference, in a list, since Ray would wait for a bare one before it delivers the call."""
        return [self.reference]

    def result(self, timeout_s: float) -> T_co:
        return results([self], timeout_s)[0]

    async def answer(self, timeout_s: float) -> T_co:
        async def wait() -> T_co:
            answer: T_co = await self.reference
            return answer

        try:
            return await asyncio.wait_for(wait(), timeout_s)
        except RayError as error:  # first: an actor's own TimeoutError comes as both
            found = _cause(self, error, [], None)
            raise found from found.__cause__
        except TimeoutError:
            raise WaitTimeout(self.who, self.what, timeout_s) from None

    def is_answered(self) -> bool:
        try:
            ray.get(self.reference, timeout=0)
        except Exception:
            return False
        return True

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        try:
            with connected():
                done, _ = ray.wait([self.reference], timeout=timeout_s)
        except RayError as error:
            raise _broken_off([self], error) from error
        return bool(done)


class RayChannel(CallChannel):
    """Calls to one of Ray's actors."""

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    def call(
        self, who: str, what: str, method: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Call[object]:
        return Call(getattr(self._handle, method).remote(*args, **kwargs), who, what)

    def caller(self) -> tuple[str, str]:
        """Return Ray's ids of this process's node and worker."""
        context = ray.get_runtime_context()
        return str(context.get_node_id()), str(context.get_worker_id())


def results(
    calls: Sequence[Call[T]],
    timeout_s: float,
    what: str | None = None,
    *,
    on_answer: Callable[[Call[T]], object] | None = None,
) -> list[T]:
    """Wait for the answers of concurrent calls, and return them in the order of the calls.

    The first failure ends the wait, since the other members may depend on the one that failed. The error names the
    cause: a death or a `TrinityError` is preferred to its effect on a peer, and any other error also names the members
    that have not answered.

    Args:
        timeout_s: limit for all of them together, seconds; less after a signal to the driver, so that a hung member
            cannot block the end of the run.

    Raises:
        DeathError: a member's process ended.
    """
    timeout_s = left(timeout_s, REST_S)
    by_reference = {call.reference: call for call in calls}
    pending = list(by_reference)
    deadline = time.monotonic() + timeout_s
    failed: tuple[Call[T], Exception] | None = None
    try:
        while pending and failed is None:
            with connected():
                done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                late = [by_reference[reference] for reference in pending]
                raise WaitTimeout(_names(late), what or late[0].what, timeout_s)
            if pending:  # all that have answered by now, since each wait looks at all the others again
                with connected():
                    more, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
                done += more
            now = set(done)
            answered = [call for call in calls if call.reference in now]
            failed = _failure(*answered)
            if failed is not None:
                first = answered.index(failed[0])
                pending += [call.reference for call in answered[first + 1 :]]
                del answered[first:]
            if on_answer is not None:
                for call in answered:
                    on_answer(call)
        if failed is None:
            # the answers exist, but Ray may have spilled them to disk
            with connected():
                answers: list[T] = ray.get(
                    [call.reference for call in calls], timeout=max(ANSWER_S, deadline - time.monotonic())
                )
            return answers
    except GetTimeoutError:
        raise WaitTimeout(_names(calls), what or calls[0].what, timeout_s) from None
    except RayError as error:
        raise _expected(error) or _broken_off(calls, error, what) from error
    raise _cause(*failed, [by_reference[reference] for reference in pending], what)


def _failure(*calls: Call[T]) -> tuple[Call[T], Exception] | None:
    """Return the first of some ended calls that has failed, with its error; None: none has."""
    try:
        ray.get([call.reference for call in calls], timeout=0)
    except Exception as error:
        if _of_raylet(error):
            with connected():
                raise
        if len(calls) > 1:
            return next((found for call in calls if (found := _failure(call)) is not None), None)
        # the member's own timeout, or only that of this poll
        own = not isinstance(error, GetTimeoutError) or isinstance(error, RayTaskError)
        return (calls[0], error) if own else None
    return None


def _broken_off(calls: Collection[Call[T]], error: RayError, what: str | None = None) -> RunError:
    """Return the error of a wait that Ray itself ended, such as after the death of the raylet."""
    what = what or next(iter(calls)).what
    return _kind(error)(f"{_names(calls)} could not {what}: {type(error).__name__}: {error}")


def _kind(error: BaseException) -> type[RunError]:
    return ProcessLoss if isinstance(error, LOSSES) else RunError


_GRACE_S = 3.0
"""Wait for the cause of a peer's error: the peer notices a closed connection before Ray reports the death."""


def _cause(call: Call[T], error: Exception, pending: list[Call[T]], what: str | None) -> Exception:
    seconds = time.monotonic() - call.began
    if not isinstance(error, DEATHS) and not _expected(error):
        deadline = time.monotonic() + _GRACE_S
        while pending and time.monotonic() < deadline:
            rest = max(0.0, deadline - time.monotonic())
            try:
                done, _ = ray.wait([other.reference for other in pending], num_returns=1, timeout=rest)
                ended = [other for other in pending if other.reference in done]
                pending = [other for other in pending if other.reference not in done]
                found = _failure(ended[0]) if ended else None
            except (RayError, OSError, ProcessLoss):  # the raylet is lost, and the first error is still the cause
                break
            if found is not None and (isinstance(found[1], DEATHS) or _expected(found[1])):
                call, error = found
                break
    what = what or call.what
    if isinstance(error, RayActorError) and error.actor_init_failed:
        # Ray gives the constructor's error as text, whose last line is the exception
        return RunError(f"{call.who} could not start: {str(error).strip().splitlines()[-1]}")
    if isinstance(error, DEATHS):
        died = DeathError(call.who, what, why_gone(error), isinstance(error, OutOfMemoryError))
        died.__cause__ = error
        return died
    expected = _expected(error)
    if expected is not None:
        return expected
    cause = error.cause if isinstance(error, RayTaskError) else error
    # a member without an answer may be the cause: its peers report a timeout
    note = f" (no answer from {_names(pending)})" if pending else ""
    told = f"{call.who} could not {what}: {error_text(cause)}{note}"
    wrapped = NoAnswerError(told, seconds) if pending and not isinstance(cause, LOSSES) else _kind(cause)(told)
    wrapped.__cause__ = error
    return wrapped


def _names(calls: Iterable[Call[T]]) -> str:
    return ", ".join(sorted(call.who for call in calls))


def _expected(error: Exception) -> TrinityError | None:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return cause if isinstance(cause, TrinityError) else None


# The reason of a process's death.


DEATHS = (RayActorError, OutOfMemoryError)
"""Errors of a call to a dead actor; the second means out of memory."""

LOSSES = (ObjectLostError, NodeDiedError, LocalRayletDiedError, WorkerCrashedError)
"""Errors of an answer that is lost with a process, such as the raylet of the actor's node."""

_MOST = 300
"""Longest reason, characters."""

_NOTED_S, _LOOK_S = 1.0, 0.02

_AROUND = re.compile(
    r"""
    ^\t\w+:.*$                                                  # the actor's class, id, pid ...
    | ^The\ actor\ (?:died|experienced)\ .*before\ finishing\ this\ task\.$
    | ^The\ actor\ (?:is\ dead|died)\ because\ (?:its\ worker\ process\ has\ died\..*?\ Worker\ exit\ detail:\ )?
    | \s*Some\ common\ causes\ include.*$
    | ,?\s*\b(?:(?:\w+\ )?[Ii][Dd]:\ )?[0-9a-f]{24,}\b         # ids
    """,
    re.VERBOSE | re.MULTILINE,
)
_EMPTIED = re.compile(r" \(\)|(?<=\(),\s*")
"""Remains of parentheses around an id."""
_PID = re.compile(r"^\tpid: (\d+)$", re.MULTILINE)

_notes: list[Path] = []


@contextmanager
def ends_noted_in(log: Path) -> Iterator[None]:
    """Let `why_gone` read in the block how the system ended a process, which Ray does not know.

    Args:
        log: of `host.fork_server`, the parent of all of Ray's workers: a line ``PID how`` for each that ended.
    """
    _notes.append(log)
    try:
        yield
    finally:
        _notes.remove(log)


def why_gone(error: Exception) -> str:
    """Return the reason of a death (one of `DEATHS`) in one line: Ray's words without ids and advice, and the logged
    end of the process. Empty where neither is known.
    """
    text = " ".join(_EMPTIED.sub("", _AROUND.sub("", str(error))).split()).strip(" .,:")
    text = text if len(text) <= _MOST else f"{text[:_MOST].rstrip()} ..."
    pid = _PID.search(str(error))
    how = _noted(pid[1]) if pid is not None else None
    return "; ".join(part for part in (text, how and f"its process {how}") if part)


def _noted(pid: str) -> str | None:
    """Return how a process ended. Ray may notice the closed connection before the log has the line."""
    deadline = time.monotonic() + _NOTED_S
    while (how := _read(pid)) is None and _notes and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return how


def _read(pid: str) -> str | None:
    for log in reversed(_notes):
        try:
            lines = log.read_text(errors="replace").splitlines()
        except OSError:  # the folder is deleted at the end of the run
            continue
        for line in reversed(lines):
            if line.startswith(f"{pid} "):
                return line.removeprefix(f"{pid} ")
    return None


# The process of one of Ray's actors.


_ORPHAN_S = 20.0
"""Time for a process to end by itself after its raylet has died, seconds."""


def end_with_raylet() -> None:
    """Kill this process, one of Ray's workers, some time after its raylet has died: Ray's own request to end is not
    read while a task runs. Does nothing in a run's own Ray, whose workers end with the driver (`end_with_driver`).
    """
    if DRIVER in os.environ:
        return
    raylet = os.getppid()

    def watch() -> None:
        while os.getppid() == raylet:
            time.sleep(1.0)
        time.sleep(_ORPHAN_S)
        os.kill(os.getpid(), signal.SIGKILL)

    in_background(watch, "raylet")


class RayHost:
    """Ray as the `Host` of the actor in this process, which ends with its raylet."""

    def __init__(self) -> None:
        end_with_raylet()

    @property
    def restarted(self) -> bool:
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)

    def call_id(self) -> str:
        return str(ray.get_runtime_context().get_task_id())

    async def outlived(self, owned: Sequence[object]) -> bool:
        try:
            await owned[0]  # type: ignore[misc]
        except RayError:
            return True
        return False


def prepare_worker() -> None:
    """Prepare one of Ray's workers for this run: it ends with the driver or with its raylet, finds the user's modules,
    and ignores signals that end a run, which are the driver's (Ray's own handler would end the worker). Ray calls it
    first, in the main thread.
    """
    end_with_driver()
    look_there()
    end_with_raylet()
    leave_to_driver()
    utils.set_sigterm_handler = lambda handler: None
