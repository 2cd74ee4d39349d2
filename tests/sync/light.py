"""Actors of these tests that need no torch, in a module that does not load it: their processes start in a second."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.sync import Synchronizer, SynchronizerConfig
from trinity_sync.sync.node_agent import AgentConfig, NodeAgent


class Member:
    """Answers, fails, hangs or dies, as it is told; several things at a time."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self._hangs = threading.Event()

    def answer(self, value: Any) -> Any:
        return value

    def fail(self, error: Exception) -> None:
        raise error

    def hang(self) -> None:
        released = self._released
        self._hangs.set()
        released.wait()

    def wait_for_hang(self) -> None:
        """Return once a call of `hang` has begun since the last of these calls; a release before would miss it."""
        self._hangs.wait()
        self._hangs.clear()

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

    def __init__(self, config: AgentConfig, synchronizer: Any, lead: AgentClient | None, node: str) -> None:
        super().__init__(config, synchronizer, lead)
        self._node = node


class Module:
    """A process that the synchronizer serves: a trainer that publishes, or an explorer that joins."""

    def __init__(self, synchronizer: Synchronizer | None) -> None:
        self._synchronizer = synchronizer

    def pid(self) -> int:
        return os.getpid()

    def join(self, namespace: str) -> None:
        self._synchronizer = Synchronizer.get_actor(namespace=namespace)

    def make(self, namespace: str) -> None:
        self._synchronizer = Synchronizer.get_actor(SynchronizerConfig(timeout_s=60.0, detached=True), namespace)

    def publish(self, step: int) -> None:
        from tests.sync.helpers import random_weights

        assert self._synchronizer is not None
        self._synchronizer.set_model_state_dict(random_weights(step), step)

    def join_group(self, explorer: str, after: int = 0) -> int:
        """The id of the group."""
        assert self._synchronizer is not None
        return self._synchronizer.join_weight_sync_group(explorer, after=after).id

    def ready(self, explorer: str) -> int:
        assert self._synchronizer is not None
        return self._synchronizer.ready_to_nccl_sync(explorer)

    def is_running(self) -> None:
        assert self._synchronizer is not None
        self._synchronizer.set_explorer_status("running")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
