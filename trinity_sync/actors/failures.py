"""What an actor's method raises is in the actor's own log, with its traceback; to the caller only the error travels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trinity_sync.host.logs import log_failure


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
