"""Work beside the calling thread."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


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


@contextlib.contextmanager
def deaths_told(tell: Callable[[str, BaseException], object]) -> Iterator[None]:
    """Within the block, say it where an exception ends a thread of this process; its traceback goes to the log.

    Args:
        tell: gets the thread and the exception, in that thread.
    """

    def told(death: threading.ExceptHookArgs) -> None:
        if death.exc_value is None or isinstance(death.exc_value, SystemExit):
            return
        who = f"thread {death.thread.name if death.thread else '?'}"
        logger.error("%s has ended", who, exc_info=death.exc_value)
        with contextlib.suppress(Exception):  # as a full disk; it is logged
            tell(who, death.exc_value)

    before, threading.excepthook = threading.excepthook, told
    try:
        yield
    finally:
        threading.excepthook = before
