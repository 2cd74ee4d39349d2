"""Public handles of actors: a plain call of a method waits for the answer, `.remote` returns Ray's reference to it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from ray import ObjectRef
from ray.actor import ActorHandle

from trinity_sync.actors.calls import ANSWER_S, Call
from trinity_sync.actors.client import Client
from trinity_sync.protocol.choices import plain

B = TypeVar("B")
H = TypeVar("H", bound="Handle")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Handle(Protocol):
    """A public handle, as its methods need it."""

    @property
    def client(self) -> Client: ...

    @property
    def timeout_s(self) -> float:
        """The limit of calls that name none, seconds."""
        ...


class Method(Generic[P, R, S]):
    """A method of one handle; R is the answer, and S the result of `.remote`."""

    def __init__(self, wait: Callable[P, R], remote: Callable[P, S]) -> None:
        self._wait, self.remote = wait, remote

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._wait(*args, **kwargs)


class HandleMethod(Generic[P, R, S]):
    """A method in the class of a handle; `bind` makes the `Method` of one handle."""

    def __init__(self, of: Callable[..., object], bind: Callable[[Any], Method[P, R, S]]) -> None:
        functools.update_wrapper(self, of)  # type: ignore[arg-type]
        self._bind = bind

    def __get__(self, handle: object, owner: type) -> Method[P, R, S]:
        return self._bind(handle)


def asked(begin: Callable[Concatenate[H, P], Call[R]]) -> HandleMethod[P, R, ObjectRef[R]]:
    """Make a handle's method of a function that begins a call. A plain call waits for `timeout_s`: the method's
    argument, else the handle's attribute.
    """

    def bind(handle: H) -> Method[P, R, ObjectRef[R]]:
        return Method(
            lambda *args, **kwargs: begin(handle, *args, **kwargs).result(
                _limit(begin, args, kwargs, handle.timeout_s)
            ),
            lambda *args, **kwargs: begin(handle, *args, **kwargs).reference,
        )

    return HandleMethod(begin, bind)


def forwarded(method: Callable[Concatenate[B, P], Coroutine[object, object, R]]) -> HandleMethod[P, R, ObjectRef[R]]:
    """Make a handle's method of the actor's. Members of enums are sent as their values."""

    @functools.wraps(method)
    def begin(handle: Handle, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        named = {name: plain(value) for name, value in kwargs.items()}
        call = handle.client._call(f"answer {method.__name__}", method.__name__, *map(plain, args), **named)
        return cast(Call[R], call)

    return asked(begin)


def fetched(fetch: Callable[Concatenate[H, P], R], put: Callable[[R], S]) -> HandleMethod[P, R, S]:
    """Make a handle's method of a function that builds the answer in the calling process. `.remote` does so too (and
    raises its errors), and puts the answer into the object store.
    """

    def bind(handle: H) -> Method[P, R, S]:
        return Method(
            lambda *args, **kwargs: fetch(handle, *args, **kwargs),
            lambda *args, **kwargs: put(fetch(handle, *args, **kwargs)),
        )

    return HandleMethod(fetch, bind)


def plainly(handle: ActorHandle, body: type, who: str, timeout_s: float) -> ActorHandle:
    """Add plain calls to the methods of Ray's handle, in this process only: a handle that is sent on has `.remote`
    alone.

    Args:
        body: the actor's class.
        who: the actor's name in errors.
        timeout_s: limit of calls that name none, seconds.
    """

    def method(name: str) -> Method[..., object, ObjectRef[object]]:
        remote = getattr(handle, name).remote

        def wait(*args: object, **kwargs: object) -> object:
            call: Call[object] = Call(remote(*args, **kwargs), who, f"answer {name}")
            return call.result(_limit(getattr(body, name), args, kwargs, timeout_s))

        return Method(wait, remote)

    vars(handle).update({name: method(name) for name in dir(handle) if not name.startswith("_")})
    return handle


def _limit(
    method: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], timeout_s: float
) -> float:
    """Return the caller's limit: that of the actor, whose error says more, and the time for its answer."""
    given = {**dict(zip(list(inspect.signature(method).parameters)[1:], args, strict=False)), **kwargs}
    named = given.get("timeout_s", given.get("timeout"))  # Trinity-RFT's word is the second
    return (timeout_s if named is None else float(cast(float, named))) + ANSWER_S
