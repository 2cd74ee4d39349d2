"""Work beside the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(function: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a thread of its own, which does not keep the process alive.

    Args:
        function: what to run.
        name: the thread's.

    Returns:
        What comes of it: the function's result, or what it raised.
    """
    future: Future[T] = Future()

    def body() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return future
