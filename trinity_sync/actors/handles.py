"""Handles of actors whose methods can be called as Ray's, with `.remote`, and plainly as well."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import ray
from ray import ObjectRef
from ray.actor import ActorHandle, ActorMethod

from trinity_sync.actors.calls import ANSWER_S, Call

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", bound="Handle")


class Handle(Protocol):
    """A client with methods that are `asked`."""

    @property
    def timeout_s(self) -> float:
        """Limit of a wait that names none, seconds."""
        ...


class Asked(Generic[P, R]):
    """A method of one handle.

    Args:
        begin: makes the call.
        timeout_s: limit of a plain call that names none, seconds.
    """

    def __init__(self, begin: Callable[P, Call[R]], timeout_s: float) -> None:
        self._begin, self._timeout_s = begin, timeout_s

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call, and wait for the answer."""
        return self._begin(*args, **kwargs).result(_limit(kwargs, self._timeout_s))

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Call; return Ray's reference to the answer, for `ray.get` and `await`."""
        return self._begin(*args, **kwargs).reference


class asked(Generic[H, P, R]):  # noqa: N801 - a decorator
    """Make a method of a client of one that begins a call: called plainly it waits for the answer, within the handle's
    limit or that of its argument `timeout_s`; `.remote` returns the reference.
    """

    def __init__(self, begin: Callable[Concatenate[H, P], Call[R]]) -> None:
        self._begin = begin
        functools.update_wrapper(self, begin)  # type: ignore[arg-type]

    @overload
    def __get__(self, handle: None, owner: type) -> asked[H, P, R]: ...
    @overload
    def __get__(self, handle: H, owner: type) -> Asked[P, R]: ...
    def __get__(self, handle: H | None, owner: type) -> asked[H, P, R] | Asked[P, R]:
        if handle is None:
            return self
        return Asked(functools.partial(self._begin, handle), handle.timeout_s)


class Fetched(Generic[P, R]):
    """A method of one handle whose answer is made in the calling process.

    Args:
        fetch: makes it.
        put: puts it into Ray's object store.
    """

    def __init__(self, fetch: Callable[P, R], put: Callable[[R], Any]) -> None:
        self._fetch, self._put = fetch, put

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the answer."""
        return self._fetch(*args, **kwargs)

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Return Ray's reference to the answer, which is in the object store by then; errors are raised here."""
        return self._put(self._fetch(*args, **kwargs))


class fetched(Generic[P, R]):  # noqa: N801 - a decorator
    """Make a method of a client one whose answer is made in the calling process, from what the actor and the object
    store have; `.remote` puts it into the object store.
    """

    _put: Callable[[Any], Any] = staticmethod(ray.put)

    def __init__(self, fetch: Callable[Concatenate[Any, P], R]) -> None:
        self._fetch = fetch
        functools.update_wrapper(self, fetch)  # type: ignore[arg-type]

    def __get__(self, handle: object, owner: type) -> Fetched[P, R]:
        return Fetched(functools.partial(self._fetch, handle), self._put)


class fetched_each(fetched[P, R]):  # noqa: N801 - a decorator
    """As `fetched`, for answers that come one by one: each is put into the object store when it is taken."""

    _put = staticmethod(lambda items: (ray.put(item) for item in items))


class PlainMethod:
    """A method of a handle of Ray's that can be called plainly as well."""

    def __init__(self, method: ActorMethod, who: str, timeout_s: float) -> None:
        self._method, self._who, self._timeout_s = method, who, timeout_s

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call, and wait for the answer."""
        call: Call[Any] = Call(self._method.remote(*args, **kwargs), self._who, f"answer {self._method._method_name}")
        return call.result(_limit(kwargs, self._timeout_s))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)


def plainly(handle: ActorHandle, who: str, timeout_s: float) -> ActorHandle:
    """Let the methods of a handle be called plainly in this process; it stays Ray's. One that is sent to another
    process can be called with `.remote` only there.

    Args:
        who: what errors call the actor.
        timeout_s: limit of a plain call that names none, seconds.
    """
    for name in dir(handle):
        if not name.startswith("_"):
            vars(handle)[name] = PlainMethod(getattr(handle, name), who, timeout_s)
    return handle


def _limit(kwargs: Mapping[str, Any], timeout_s: float) -> float:
    """The actor ends its own waits at the limit that it was given, and says more of them than we could."""
    named = kwargs.get("timeout_s")
    return (timeout_s if named is None else float(named)) + ANSWER_S
