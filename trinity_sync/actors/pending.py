"""What a call to another process is to who waits for it, however it gets there. Without Ray.

Two things carry calls: Ray, to its actors (`calls`), and a connection, to an actor in a local process (`local`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.logs import log_failure

T_co = TypeVar("T_co", covariant=True)
P = TypeVar("P", bound="Pending[Any]")

# Who is asked ends its own waits at the limit that it is given, and its word of what it waited for says more than ours:
# so much longer is waited for that.
ANSWER_S = 5.0


class MemberDied(RunError):  # noqa: N818 - it says what happened, as WaitTimeout does
    """A process that was waited for is gone.

    Args:
        who: the process's name, such as ``"trainer rank 1"``.
        what: what it was to do.
        why: why it is gone, as far as that is known.
    """

    def __init__(self, who: str, what: str, why: str = "") -> None:
        super().__init__(who, what, why)
        self.who, self.what, self.why = who, what, why

    def __str__(self) -> str:
        told = f"{self.who} died while it was to {self.what}"
        return f"{told} ({self.why})" if self.why else told


class Pending(ABC, Generic[T_co]):
    """A call to another process that is under way.

    Args:
        who: who was asked, such as ``"trainer rank 1"``.
        what: what it is to do, such as ``"train step 12"``.
    """

    def __init__(self, who: str, what: str) -> None:
        self.who, self.what = who, what

    @abstractmethod
    def result(self, timeout_s: float) -> T_co:
        """Wait for the answer.

        Raises:
            MemberDied: the process that was asked has ended.
            WaitTimeout: it did not answer in time.
            TrinityError: what it raised, with its name.
        """

    @abstractmethod
    async def answer(self, timeout_s: float) -> T_co:
        """As `result`, on an event loop."""

    @abstractmethod
    def is_answered(self) -> bool:
        """Tell whether it has ended well by now."""

    @abstractmethod
    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait until it has ended, well or not, or the time is over; tell whether it has.

        Raises:
            RunError: the wait itself was broken off.
        """

    @property
    @abstractmethod
    def owned(self) -> Sequence[object]:
        """What the process that is asked can tell the end of this one by, as another argument of a call to it; see
        `hosting.Host.outlived`.
        """


class CallTransport(ABC):
    """How calls get to an actor."""

    @abstractmethod
    def call(
        self, who: str, what: str, method: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Pending[Any]:
        """Begin a call.

        Args:
            who: what errors call the actor.
            what: what it is to do, for errors.
            method: name of the actor's method.
            args, kwargs: its arguments.
        """

    @abstractmethod
    def caller(self) -> tuple[str, str]:
        """Name the calling process, unlike all others that call the actor: (its node, itself)."""


def ended(calls: Collection[P], timeout_s: float = 0.0) -> list[P]:
    """Wait until all of the calls have ended, well or not, or the time is over; return those that have.

    Args:
        timeout_s: seconds; 0 does not wait.

    Raises:
        RunError: the wait itself was broken off.
    """
    deadline = time.monotonic() + timeout_s
    return [call for call in calls if call.has_ended(max(0.0, deadline - time.monotonic()))]


# Waiting inside an actor, on its event loop, until something holds. It is looked at whenever anything has changed, so
# nothing is polled.


class Changes:
    """Wakes all who wait. For one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def announce(self) -> None:
        """Say that something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def next(self, seconds: float) -> bool:
        """Wait for the next change, so many seconds at most; whether one came."""
        try:
            await asyncio.wait_for(self._changed.wait(), max(0.0, seconds))
        except TimeoutError:
            return False
        return True

    async def wait(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], tuple[str, str]],
        seconds: float,
        deadline: float | None = None,
    ) -> None:
        """Wait for a change after which `ready` is true.

        Args:
            ready: tells whether there is nothing to wait for any more.
            describe: gives who was waited for, and for what; asked where the error has to say so.
            seconds: limit of the wait.
            deadline: `time.monotonic` at which a wait ends that goes on with an earlier one of `seconds`.

        Raises:
            WaitTimeout: it did not come.
        """
        deadline = time.monotonic() + seconds if deadline is None else deadline
        while not ready():
            if not await self.next(deadline - time.monotonic()):
                raise WaitTimeout(*describe(), seconds)


# What the body of an actor has to know of what hosts it. Without Ray, whose own is `ray_host`.


class Host(Protocol):
    """What hosts an actor."""

    @property
    def restarted(self) -> bool:
        """Whether the actor's process was killed, and this one goes on in its place."""
        ...

    def call_id(self) -> str:
        """Return the id of the call that is being answered: the same one when it is repeated after a restart."""
        ...

    async def outlived(self, owned: Sequence[object]) -> bool:
        """Wait for the end of the process that made a call.

        Args:
            owned: `Pending.owned` of another call of that process, which is answered when nobody waits here any more.

        Returns:
            True: the process is gone. False: it has its answer.
        """
        ...


# Errors of an actor's methods: the log of the actor gets the traceback, and the caller only the error.


def failures_logged(cls: type) -> type:
    """Make a class for `ray.remote` of an actor's body: what its constructor or one of its public methods raises is
    logged, and carries where in the user's code it comes from.
    """
    names = [name for name in dir(cls) if not name.startswith("_") or name == "__init__"]
    methods = {name: inspect.getattr_static(cls, name) for name in names}
    logged = {name: _logged(method) for name, method in methods.items() if inspect.isfunction(method)}
    return type(
        cls.__name__,
        (cls,),
        {**logged, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__, "__module__": cls.__module__},
    )


def _logged(method: Callable[..., object]) -> Callable[..., object]:
    what = "start" if method.__name__ == "__init__" else method.__name__.replace("_", " ")

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def waited_for(*args: object, **kwargs: object) -> object:
            with _failure_logged(what):
                return await method(*args, **kwargs)

        return waited_for

    @functools.wraps(method)
    def called(*args: object, **kwargs: object) -> object:
        with _failure_logged(what):
            return method(*args, **kwargs)

    return called


@contextmanager
def _failure_logged(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log_failure(what, error)
        raise
