"""Actors of these tests that need no torch, in a module that does not load it: their processes start in a second."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from trinity_sync.sync.agent import AgentConfig, NodeAgent


class Member:
    """Answers, fails, hangs or dies, as it is told; several things at a time."""

    def __init__(self) -> None:
        self._released = threading.Event()

    def answer(self, value: Any) -> Any:
        return value

    def fail(self, error: Exception) -> None:
        raise error

    def hang(self) -> None:
        self._released.wait()

    def release(self) -> None:
        """End all `hang` calls."""
        released, self._released = self._released, threading.Event()
        released.set()

    def die_when(self, path: Path) -> None:
        while not path.exists():
            time.sleep(0.01)
        os._exit(1)


class Stillborn:
    def __init__(self, error: Exception) -> None:
        raise error

    def answer(self) -> None:
        pass


class PretendNodeAgent(NodeAgent):
    """An agent that takes itself for one on another node than it is on."""

    def __init__(self, config: AgentConfig, synchronizer: Any, lead: Any, node: str) -> None:
        super().__init__(config, synchronizer, lead)
        self._node = node
