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


Load = tuple[float, LoadReport]
"""Seconds after the beginning, and what is told of it."""


class Follower:
    """Takes each version that is published while its body runs.

    The first version that cannot be taken is the last that is tried. Where it has cost the weights, the generation that
    is under way ends, and what the body raises is `LoadFailed`.

    Args:
        newer: waits so many seconds for a newer version than the one that is held, and returns it; None: none will
            come any more. Raises `WaitTimeout` where none came.
        load: takes the newest version.
        holds: whether a version is held, whole.
        give_up: has the generation that is under way raise, and what is begun after it.

    Attributes:
        loads: what was taken.
        failed: why a version could not be taken, where the one before is held still.
    """

    def __init__(
        self,
        newer: Callable[[float], Version | None],
        load: Callable[[], LoadReport],
        holds: Callable[[], bool],
        give_up: Callable[[], None],
    ) -> None:
        self._newer, self._load, self._holds, self._give_up = newer, load, holds, give_up
        self._loading = threading.Lock()
        self._over = False
        self._error: LoadFailed | None = None
        self.loads: list[Load] = []
        self.failed: str | None = None

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
            LoadFailed: one has cost the weights.
        """
        with self._loading:
            if self._error is not None:
                raise self._error
            yield

    def _follow(self) -> None:
        while not self._over:
            try:
                newest = self._newer(_LOOK_S)
            except WaitTimeout:
                continue
            except Exception as error:
                with self._loading:
                    self._failed(error)
                return
            if newest is None or not self._take():
                return

    def _take(self) -> bool:
        with self._loading:
            if self._over:
                return False
            after = time.perf_counter() - self._began
            try:
                self.loads.append((after, self._load()))
            except Exception as error:
                self._failed(error)
                return False
        return True

    def _failed(self, error: Exception) -> None:
        """Note a failure, before anybody else can look."""
        if self._over or self._holds():
            self.failed = str(error)
            return
        self._error = error if isinstance(error, LoadFailed) else LoadFailed(str(error))
        self._error.__cause__ = error.__cause__
        self._give_up()
