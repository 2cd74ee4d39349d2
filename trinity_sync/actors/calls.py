"""Calls to actors: every wait has a name, a limit and a clear word for what went wrong.

A dead actor is noticed at once, because a call to it that was under way fails when its process does.
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
from typing import Any, TypeVar

import ray
from ray import ObjectRef
from ray._private import utils
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from trinity_sync.actors.pending import ANSWER_S, CallTransport, MemberDied, Pending, ended
from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.host.hardware import look_there
from trinity_sync.host.interrupts import REST_S, leave_to_driver, left
from trinity_sync.host.origin import told
from trinity_sync.host.process import DRIVER, end_with_driver
from trinity_sync.host.threads import in_background
from trinity_sync.protocol.rounds import RoundMember

__all__ = ["ANSWER_S", "Call", "MemberDied", "RayTransport", "ended", "results", "this_process"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def this_process(name: str) -> RoundMember:
    """Name the calling process; the same member whenever it is asked for, as long as it stays in Ray."""
    return RoundMember(name, _life(os.getpid(), ray.get_runtime_context().get_worker_id()))


@functools.cache
def _life(pid: int, worker: str) -> str:
    """Draw the word of one process: a fork, which inherits the drawn ones, has another number, and one that has left
    Ray, which is dead to actors, another worker.
    """
    return RoundMember.new(str(pid)).life


class Call(Pending[T_co]):
    """A call to one of Ray's actors that is under way.

    Args:
        reference: Ray's reference to the answer.
        who: who was asked, such as ``"trainer rank 1"``.
        what: what it is to do, such as ``"train step 12"``.
    """

    def __init__(self, reference: ObjectRef[T_co], who: str, what: str) -> None:
        super().__init__(who, what)
        self.reference = reference

    @property
    def owned(self) -> Sequence[ObjectRef[T_co]]:
        """The reference, in a list, so that Ray does not wait for it in the receiver's place."""
        return [self.reference]

    def result(self, timeout_s: float) -> T_co:
        """Wait for the answer; errors as for `results`."""
        return results([self], timeout_s)[0]

    async def answer(self, timeout_s: float) -> T_co:
        """As `result`, on an event loop."""

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
        """Tell whether it has ended well by now."""
        try:
            ray.get(self.reference, timeout=0)
        except Exception:
            return False
        return True

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait until it has ended, well or not, or the time is over; tell whether it has.

        Raises:
            RunError: Ray itself broke the wait off.
        """
        try:
            done, _ = ray.wait([self.reference], timeout=timeout_s)
        except RayError as error:
            raise _broken_off([self], error) from error
        return bool(done)


class RayTransport(CallTransport):
    """To an actor of Ray's.

    Args:
        handle: Ray's handle of the actor.
    """

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    def call(self, who: str, what: str, method: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Call[Any]:
        """Begin a call; see `Transport`."""
        return Call(getattr(self._handle, method).remote(*args, **kwargs), who, what)

    def caller(self) -> tuple[str, str]:
        """Name this process: Ray's ids of its node and its worker."""
        context = ray.get_runtime_context()
        return str(context.get_node_id()), str(context.get_worker_id())


def results(
    calls: Sequence[Call[T]],
    timeout_s: float,
    what: str | None = None,
    *,
    on_answer: Callable[[Call[T]], object] | None = None,
    reserve_s: float = REST_S,
) -> list[T]:
    """Wait for the answers of calls that run side by side.

    The first failure ends the wait, for the others may be waiting for the one that failed. A death, or an error
    of ours, is reported before what a peer saw of it, and an error that nobody foresaw also names the members that are
    still silent, so the message names the cause.

    Args:
        calls: the calls, at most one to each member.
        timeout_s: limit for all of them together, seconds.
        what: what they do together, where that is not what each of them does.
        on_answer: told of each call when it has ended well.
        reserve_s: of the time after a signal to the driver, what is for the rest. A member that stands still does not
            keep the run from its end.

    Returns:
        The answers, in the order of the calls.

    Raises:
        MemberDied: a member's process ended.
        WaitTimeout: somebody was not done in time; names who.
        TrinityError: what a member raised, with its name; or Ray itself broke the wait off.
    """
    timeout_s = left(timeout_s, reserve_s)
    by_reference = {call.reference: call for call in calls}
    pending = list(by_reference)
    deadline = time.monotonic() + timeout_s
    failed: tuple[Call[T], Exception] | None = None
    try:
        while pending and failed is None:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                late = [by_reference[reference] for reference in pending]
                raise WaitTimeout(_names(late), what or late[0].what, timeout_s)
            failed = _failure(by_reference[done[0]])
            if failed is None and on_answer is not None:
                on_answer(by_reference[done[0]])
        if failed is None:
            # they are there, but Ray may have moved them to its disk
            answers: list[T] = ray.get(
                [call.reference for call in calls], timeout=max(ANSWER_S, deadline - time.monotonic())
            )
            return answers
    except GetTimeoutError:
        raise WaitTimeout(_names(calls), what or calls[0].what, timeout_s) from None
    except RayError as error:
        raise _expected(error) or _broken_off(calls, error, what) from error
    raise _cause(*failed, [by_reference[reference] for reference in pending], what)


def _failure(call: Call[T]) -> tuple[Call[T], Exception] | None:
    try:
        ray.get(call.reference, timeout=0)
    except GetTimeoutError as error:
        # of this look, or what the member itself ran into
        return (call, error) if isinstance(error, RayTaskError) else None
    except Exception as error:
        return call, error
    return None


def _broken_off(calls: Collection[Call[T]], error: RayError, what: str | None = None) -> RunError:
    """A wait was broken off by Ray itself, as it does where its raylet is dead, not by what one of them answered."""
    what = what or next(iter(calls)).what
    return RunError(f"{_names(calls)} could not {what}: {type(error).__name__}: {error}")


# How long to look for what is behind an error that a peer reported, a death or an error of ours: the peer sees the
# closed connection a moment before we are told.
_GRACE_S = 3.0


def _cause(call: Call[T], error: Exception, pending: list[Call[T]], what: str | None) -> Exception:
    if not isinstance(error, DEATHS) and not _expected(error):
        deadline = time.monotonic() + _GRACE_S
        while pending and time.monotonic() < deadline:
            rest = max(0.0, deadline - time.monotonic())
            try:
                done, _ = ray.wait([other.reference for other in pending], num_returns=1, timeout=rest)
            except RayError:  # there is no more to be learnt
                break
            ended = [other for other in pending if other.reference in done]
            pending = [other for other in pending if other.reference not in done]
            found = _failure(ended[0]) if ended else None
            if found is not None and (isinstance(found[1], DEATHS) or _expected(found[1])):
                call, error = found
                break
    what = what or call.what
    if isinstance(error, RayActorError) and error.actor_init_failed:
        # Ray flattens what the constructor raised into text whose last line is the exception.
        return RunError(f"{call.who} could not start: {str(error).strip().splitlines()[-1]}")
    if isinstance(error, DEATHS):
        died = MemberDied(call.who, what, why_gone(error))
        died.__cause__ = error
        return died
    expected = _expected(error)
    if expected is not None:
        return expected
    cause = error.cause if isinstance(error, RayTaskError) else error
    # Who still says nothing may be what the error is about: a hung peer is seen as a timeout by those it keeps waiting.
    note = f" (no answer from {_names(pending)})" if pending else ""
    wrapped = RunError(f"{call.who} could not {what}: {told(cause)}{note}")
    wrapped.__cause__ = error
    return wrapped


def _names(calls: Iterable[Call[T]]) -> str:
    return ", ".join(sorted(call.who for call in calls))


def _expected(error: Exception) -> TrinityError | None:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return cause if isinstance(cause, TrinityError) else None


# Whether an error of Ray's tells of a process that is gone, and why it is.


DEATHS = (RayActorError, OutOfMemoryError)
"""What a call to an actor fails of whose process is gone; the second where Ray ended it for want of memory."""

_MOST = 300
"""Characters of a reason."""

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
"""What is left of parentheses that an id stood in."""
_PID = re.compile(r"^\tpid: (\d+)$", re.MULTILINE)

_notes: list[Path] = []


@contextmanager
def ends_noted_in(log: Path) -> Iterator[None]:
    """For the length of the block, `why_gone` also says how the system ended a process, which Ray does not know.

    Args:
        log: of `host.fork_server`, which begins all of Ray's workers: ``PID how`` in a line.
    """
    _notes.append(log)
    try:
        yield
    finally:
        _notes.remove(log)


def why_gone(error: Exception) -> str:
    """Say in one line why a process is gone, in Ray's words without ids and advice, and how it ended where that was
    noted; empty where nobody tells.

    Args:
        error: one of `DEATHS`.
    """
    text = " ".join(_EMPTIED.sub("", _AROUND.sub("", str(error))).split()).strip(" .,:")
    text = text if len(text) <= _MOST else f"{text[:_MOST].rstrip()} ..."
    pid = _PID.search(str(error))
    how = _noted(pid[1]) if pid is not None else None
    return "; ".join(part for part in (text, how and f"its process {how}") if part)


def _noted(pid: str) -> str | None:
    """How a process ended; waits a moment for it to be noted, for Ray may see the closed connection before."""
    deadline = time.monotonic() + _NOTED_S
    while (how := _read(pid)) is None and _notes and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return how


def _read(pid: str) -> str | None:
    for log in reversed(_notes):
        try:
            lines = log.read_text(errors="replace").splitlines()
        except OSError:  # it goes with the folder that it is in
            continue
        for line in reversed(lines):
            if line.startswith(f"{pid} "):
                return line.removeprefix(f"{pid} ")
    return None


# What an actor of Ray's has to know of Ray.


_ORPHAN_S = 20.0
"""A process that is left by its raylet has so long to end by itself, seconds."""


def end_with_raylet() -> None:
    """Kill this process, one of Ray's workers, some time after its raylet is gone. Ray only asks it to end, and a task
    that does not return hears nothing of it. Nothing in a Ray of a run's own, whose workers end with the driver, and
    may be forks, see `host.process.end_with_driver`.
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
    """Ray, as the `hosting.Host` of the actor in this process, which ends with its raylet."""

    def __init__(self) -> None:
        end_with_raylet()

    @property
    def restarted(self) -> bool:
        """Whether Ray has started the actor again."""
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)

    def call_id(self) -> str:
        """Return Ray's id of the current task."""
        return str(ray.get_runtime_context().get_task_id())

    async def outlived(self, owned: Sequence[object]) -> bool:
        """Wait for a reference, which fails with the process that it belongs to."""
        try:
            await owned[0]  # type: ignore[misc]
        except RayError:
            return True
        return False


def prepare_worker() -> None:
    """Prepare one of Ray's workers for this run: it ends with the driver or with its raylet, finds the user's modules,
    and leaves signals that end a run to the driver (Ray's own handler would end the worker). Ray calls it in the main
    thread, before all else.
    """
    end_with_driver()
    look_there()
    end_with_raylet()
    leave_to_driver()
    utils.set_sigterm_handler = lambda handler: None
