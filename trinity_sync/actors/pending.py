"""Calls to other processes, over any channel: Ray (`calls`) or a connection to a local process (`local`). Also the
parts of an actor's body that depend on its host. Ray is not imported here.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from trinity_sync.errors import ProcessLoss, RunError, WaitTimeout
from trinity_sync.host.logs import log_failure

T_co = TypeVar("T_co", covariant=True)
P = TypeVar("P", bound="PendingCall[object]")

ANSWER_S = 5.0
"""Extra time of the caller's wait, seconds: an actor's own timeout error says more, and has to arrive first."""


class DeathError(ProcessLoss):
    """A process died before it answered.

    Args:
        who: the process's name, such as ``"trainer rank 1"``.
        what: its task.
        why: the reason, where it is known.
        of_memory: Ray has ended it because its node was out of memory.
    """

    def __init__(self, who: str, what: str, why: str = "", of_memory: bool = False) -> None:
        super().__init__(who, what, why, of_memory)
        self.who, self.what, self.why, self.of_memory = who, what, why, of_memory

    def __str__(self) -> str:
        told = f"{self.who} died before it could {self.what}"
        return f"{told} ({self.why})" if self.why else told


class NoAnswerError(RunError):
    """A member failed with an error of a library, while others have not answered: one of them may hang.

    Args:
        told: the message.
        seconds: from the call to the failure.
    """

    def __init__(self, told: str, seconds: float) -> None:
        super().__init__(told, seconds)
        self.seconds = seconds

    def __str__(self) -> str:
        return str(self.args[0])


class PendingCall(ABC, Generic[T_co]):
    """A call to another process that may not have ended.

    Args:
        who: the process's name, such as ``"trainer rank 1"``.
        what: its task, such as ``"train step 12"``.
    """

    def __init__(self, who: str, what: str) -> None:
        self.who, self.what = who, what

    @abstractmethod
    def result(self, timeout_s: float) -> T_co:
        """Wait for the answer.

        Raises:
            DeathError: the process has ended.
        """

    @abstractmethod
    async def answer(self, timeout_s: float) -> T_co:
        """As `result`, on an event loop."""

    @abstractmethod
    def is_answered(self) -> bool:
        """Return whether it has succeeded by now."""

    @abstractmethod
    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait until it has succeeded or failed; return False at the timeout."""

    @property
    @abstractmethod
    def owned(self) -> Sequence[object]:
        """Argument for another call, by which the actor notices the end of this process; see `Host.outlived`."""


class CallChannel(ABC):
    """The way of calls to an actor."""

    @abstractmethod
    def call(
        self, who: str, what: str, method: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> PendingCall[object]:
        """Begin a call of a method; `who` and `what` are the actor and its task in errors."""

    @abstractmethod
    def caller(self) -> tuple[str, str]:
        """Return (node, process): names of the calling process, unique among the actor's callers."""


def ended(calls: Collection[P], timeout_s: float = 0.0) -> list[P]:
    """Wait until all calls have succeeded or failed; return those that have at the timeout (seconds)."""
    deadline = time.monotonic() + timeout_s
    return [call for call in calls if call.has_ended(max(0.0, deadline - time.monotonic()))]


# Waits inside an actor, on its event loop.


class Changes:
    """Wakes each coroutine once its condition is true, so that none has to poll. For one event loop."""

    def __init__(self) -> None:
        self._waits: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._looking = False

    def announce(self) -> None:
        """Look at the conditions once the running code yields, as more of them may change until then."""
        if self._waits and not self._looking:
            self._looking = True
            next(iter(self._waits)).get_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        for woken, ready in self._waits.items():
            if not woken.done() and _holds(ready):
                woken.set_result(None)

    async def next(self, seconds: float, ready: Callable[[], bool] = lambda: True) -> bool:
        """Wait for the next change, or for the next one after which `ready` is true; return False at the timeout."""
        woken = asyncio.get_running_loop().create_future()
        self._waits[woken] = ready
        try:
            await asyncio.wait_for(woken, max(0.0, seconds))
        except TimeoutError:
            return False
        finally:
            del self._waits[woken]
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
            seconds: limit of the wait.
            deadline: `time.monotonic` of the end, for a wait that continues an earlier one of `seconds`.
        """
        deadline = time.monotonic() + seconds if deadline is None else deadline
        while not ready():
            if not await self.next(deadline - time.monotonic(), ready):
                raise WaitTimeout(*describe(), seconds)


def _holds(ready: Callable[[], bool]) -> bool:
    try:
        return ready()
    except Exception:
        return True  # its own coroutine looks again, and raises the error


class Host(Protocol):
    """The host of an actor: Ray (`calls.RayHost`) or a local process (`local.LocalHost`)."""

    @property
    def restarted(self) -> bool:
        """Whether this process continues for one that was killed."""
        ...

    def call_id(self) -> str:
        """Return the id of the current call; a call that is repeated after a restart keeps its id."""
        ...

    async def outlived(self, owned: Sequence[object]) -> bool:
        """Wait for the end of the calling process; return False if the other call was answered first."""
        ...


# Errors of an actor's methods: the log of the actor gets the traceback, and the caller only the error.


def failures_logged(cls: type) -> type:
    """Return the class of an actor's body with errors of its constructor and public methods logged, and their place in
    the user's code attached.
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
