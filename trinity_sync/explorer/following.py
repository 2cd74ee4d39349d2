"""Versions that are taken while an explorer generates, for engines that can (`RolloutEngine.takes_beside`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from trinity_sync.actors.explorer import LoadFailed, LoadReport
from trinity_sync.errors import WaitTimeout
from trinity_sync.protocol.versions import Version

_LOOK_S = 0.5
"""How long a wait for a newer version lasts, and so how long its thread outlives what it was for."""


class Follower:
    """Takes each version that is published while its body runs.

    A version that cannot be taken ends the generation that is under way, and what the body raises is `LoadFailed`.

    Args:
        newer: waits so many seconds for a newer version than the one that is held, and returns it; None: none will
            come any more. Raises `WaitTimeout` where none came.
        load: takes the newest version.
        give_up: has the generation that is under way raise, and what is begun after it.

    Attributes:
        loads: what was taken: seconds after the body began, and what `load` returned.
    """

    def __init__(
        self, newer: Callable[[float], Version | None], load: Callable[[], LoadReport], give_up: Callable[[], None]
    ) -> None:
        self._newer, self._load, self._give_up = newer, load, give_up
        self._loading = threading.Lock()
        self._over = False
        self._error: LoadFailed | None = None
        self.loads: list[tuple[float, LoadReport]] = []

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        threading.Thread(target=self._follow, name="follow versions", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._loading:  # a load that is under way is finished
            self._over = True
        if self._error is not None:
            raise self._error

    @contextmanager
    def still(self) -> Iterator[None]:
        """Let no load begin meanwhile, and wait for the one that is under way.

        Raises:
            LoadFailed: one failed.
        """
        with self._loading:
            if self._error is not None:
                raise self._error
            yield

    def _follow(self) -> None:
        try:
            while not self._over:
                try:
                    newest = self._newer(_LOOK_S)
                except WaitTimeout:
                    continue
                if newest is None:
                    return
                self._take()
        except Exception as error:
            self._fail(error)

    def _take(self) -> None:
        with self._loading:
            if self._over:
                return
            after = time.perf_counter() - self._began
            self.loads.append((after, self._load()))

    def _fail(self, error: Exception) -> None:
        with self._loading:
            if self._over:
                return
            self._error = error if isinstance(error, LoadFailed) else LoadFailed(str(error))
            self._error.__cause__ = error.__cause__
        self._give_up()
