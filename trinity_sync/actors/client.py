"""The base of all clients, and their methods. A client's method is made from the method of the actor's class, so its
signature is written once and mypy checks each call.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from trinity_sync.actors.pending import CallChannel, PendingCall

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from trinity_sync.actors.calls import Call

B = TypeVar("B")
P = ParamSpec("P")
R = TypeVar("R")


class MethodNames:
    """Stands for an actor's class at run time, where mypy sees the class itself: the class's module needs libraries
    that callers do not load, and belongs to a higher layer. Each attribute is its own name.
    """

    def __getattr__(self, name: str) -> str:
        return name


class RemoteMethod(Generic[P, R]):
    """A client's method that begins a call of the actor's method.

    Args:
        method: the actor's method, of a `MethodNames` at run time.
        what: the actor's task, for errors: a format string of the call's arguments.
    """

    @overload
    def __init__(self, method: Callable[Concatenate[B, P], Coroutine[object, object, R]], what: str = ...) -> None: ...

    @overload
    def __init__(self, method: Callable[Concatenate[B, P], R], what: str = ...) -> None: ...

    def __init__(self, method: object, what: str | None = None) -> None:
        self.name = str(method)
        self.what = what or f"answer {method}"

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...

    @overload
    def __get__(self, client: RayClient, owner: type) -> Callable[P, Call[R]]: ...

    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, PendingCall[R]]: ...

    def __get__(self, client: Client | None, owner: type) -> object:
        return self if client is None else partial(self, client)

    def __call__(self, client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        try:
            what = self.what.format(*args, **kwargs)
        except LookupError:  # an argument that `what` names is left out
            what = self.name.replace("_", " ")
        call: Call[R] = client._call(what, self.name, *args, **kwargs)  # type: ignore[assignment]
        return call


class Client:
    """A client of an actor.

    Args:
        handle: Ray's handle of the actor, or another channel of calls.
        who: the actor's name in errors, such as ``"the checkpoint monitor"``.
    """

    def __init__(self, handle: ActorHandle | CallChannel, who: str) -> None:
        self.handle, self.who = handle, who
        self._channel = handle if isinstance(handle, CallChannel) else _ray(handle)

    def caller(self) -> tuple[str, str]:
        """Return (node, process): names of the calling process, unique among the actor's callers."""
        return self._channel.caller()

    def _call(self, what: str, method: str, *args: object, **kwargs: object) -> PendingCall[object]:
        return self._channel.call(self.who, what, method, args, kwargs)


class RayClient(Client):
    """A client of an actor that is always one of Ray's, so `calls.results` can wait for several calls, and their
    references can be passed on.
    """

    handle: ActorHandle


def _ray(handle: ActorHandle) -> CallChannel:
    from trinity_sync.actors.calls import RayChannel  # Ray is slow to import, and a local actor needs none

    return RayChannel(handle)
