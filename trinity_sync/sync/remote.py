"""Waiting for actors: every wait has a name, a limit and a clear word for what went wrong.

Called wherever the driver or an actor waits for another actor. A dead actor is noticed at once, because a call to it
that was under way fails when its process does.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.protocol.members import Member


class MemberDied(RunError):  # noqa: N818 - it says what happened, as WaitTimeout does
    """A process that was waited for is gone.

    Args:
        who: its name, such as ``"trainer rank 1"``.
        what: what it was to do.
    """

    def __init__(self, who: str, what: str) -> None:
        super().__init__(who, what)
        self.who, self.what = who, what

    def __str__(self) -> str:
        return f"{self.who} died while it was to {self.what}"


def this_process(name: str) -> Member:
    """The calling process under a name; the same whenever it is asked for."""
    return Member(name, _life(os.getpid()))


@functools.cache
def _life(pid: int) -> str:
    """Of one process: what a fork inherits of it has another number."""
    return Member.new(str(pid)).life


def resolve(calls: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
    """The results of calls that run side by side, by member name.

    The first failure ends the wait, for the others may be waiting for the one that failed. A death, or an error
    of ours, is reported before what a peer saw of it, and an error that nobody foresaw also names the members that are
    still silent, so the message names the cause.

    Args:
        calls: member name -> Ray object reference.
        what: what the members are to do, such as ``"train step 12"``.
        timeout_s: limit for all of them together, seconds.

    Raises:
        MemberDied: a member's process ended.
        WaitTimeout: somebody was not done in time; names who.
        TrinityError: what a member raised, with its name.
    """
    names = {reference: name for name, reference in calls.items()}
    pending = list(names)
    deadline = time.monotonic() + timeout_s
    failed: tuple[str, Exception] | None = None
    while pending and failed is None:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise WaitTimeout(", ".join(sorted(names[reference] for reference in pending)), what, timeout_s)
        failed = _failure(done[0], names)
    if failed is None:
        return dict(zip(names.values(), ray.get(list(names)), strict=True))
    raise _cause(failed, pending, names, what)


def resolve_one(reference: Any, who: str, what: str, timeout_s: float) -> Any:
    """The result of one call; errors as in `resolve`."""
    return resolve({who: reference}, what, timeout_s)[who]


def is_answered(reference: Any) -> bool:
    """Whether a call has ended well by now."""
    try:
        ray.get(reference, timeout=0)
    except Exception:
        return False
    return True


def _failure(reference: Any, names: Mapping[Any, str]) -> tuple[str, Exception] | None:
    try:
        ray.get(reference, timeout=0)
    except GetTimeoutError:
        return None
    except Exception as error:
        return names[reference], error
    return None


# How long to look for what is behind an error that a peer reported, a death or an error of ours: the peer sees the
# closed connection a moment before we are told.
_GRACE_S = 3.0


def _cause(failed: tuple[str, Exception], pending: list[Any], names: Mapping[Any, str], what: str) -> Exception:
    name, error = failed
    if not isinstance(error, RayActorError) and not _expected(error):
        deadline = time.monotonic() + _GRACE_S
        while pending and time.monotonic() < deadline:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            other = _failure(done[0], names) if done else None
            if other is not None and (isinstance(other[1], RayActorError) or _expected(other[1])):
                name, error = other
                break
    if isinstance(error, RayActorError):
        if error.actor_init_failed:
            # Ray flattens what the constructor raised into text whose last line is the exception.
            return RunError(f"{name} could not start: {str(error).strip().splitlines()[-1]}")
        return MemberDied(name, what)
    expected = _expected(error)
    if expected is not None:
        return expected
    cause = error.cause if isinstance(error, RayTaskError) else error
    # Who still says nothing may be what the error is about: a hung peer is seen as a timeout by those it keeps waiting.
    silent = ", ".join(sorted(names[reference] for reference in pending))
    note = f" (no answer from {silent})" if silent else ""
    wrapped = RunError(f"{name} could not {what}: {type(cause).__name__}: {cause}{note}")
    wrapped.__cause__ = error
    return wrapped


def _expected(error: Exception) -> TrinityError | None:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return cause if isinstance(cause, TrinityError) else None
