"""Trackers for tests, in a module that a process of their own can import."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError
from trinity_sync.tracking.mlflow import MlflowTracker
from trinity_sync.tracking.swanlab import SwanlabTracker
from trinity_sync.tracking.trackers import TrackedRun
from trinity_sync.tracking.trackio import TrackioTracker

STOPPED_S = 3600.0


class FileTracker:
    """Writes its calls, and the process that it is in, to ``calls`` of the run's folder; does as told at one of them.

    Args:
        at: name of a call.
        what: ``refuse``, ``fail``, ``die``, ``fork``, ``fail at length``, or ``stop``: not come back.
    """

    apart = True

    def __init__(self, at: str = "", what: str = "", timeout_s: float = 30.0) -> None:
        self._at, self._what, self.timeout_s = at, what, timeout_s

    def start(self, run: TrackedRun) -> None:
        self._file = run.folder / "calls"
        print("a word of the library")
        self._do("start", run.name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._do("log", step, dict(values))

    def end(self, status: str) -> None:
        self._do("end", status)

    def close(self) -> None:
        self._do("close")

    def _do(self, name: str, *rest: Any) -> None:
        with self._file.open("a") as file:
            file.write(" ".join(map(str, (os.getpid(), name, *rest))) + "\n")
        if name == self._at:
            if self._what == "refuse":
                raise ConfigError("no such project")
            if self._what == "fail":
                raise OSError("no network")
            if self._what == "die":
                os._exit(7)
            if self._what == "fork":
                print("the fork is", os.fork(), flush=True)
                return
            if self._what == "fail at length":
                raise OSError("x" * 20_000_000)
            time.sleep(STOPPED_S)


def calls(folder: Path) -> list[str]:
    """What a `FileTracker` was asked for."""
    return [line.partition(" ")[2] for line in (folder / "calls").read_text().splitlines()]


def process(folder: Path) -> int:
    """The process of a `FileTracker`."""
    return int((folder / "calls").read_text().split()[0])


class _WithoutNetwork:
    """Refuses connections to other machines, and fails at its end where one was tried."""

    def start(self, run: TrackedRun) -> None:
        self._tried: list[object] = []
        real = socket.socket.connect

        def connect(sock: socket.socket, address: Any) -> None:
            if sock.family != socket.AF_UNIX:
                self._tried.append(address)
                raise OSError(f"{address} is out of reach")
            real(sock, address)

        def look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
            self._tried.append(host)
            raise OSError(f"{host} is unknown")

        socket.socket.connect, socket.getaddrinfo = connect, look_up  # type: ignore[method-assign, assignment]
        super().start(run)  # type: ignore[misc]

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        if self._tried:
            raise AssertionError(f"went to the network: {self._tried}")


class LonelyMlflowTracker(_WithoutNetwork, MlflowTracker): ...


class LonelyTrackioTracker(_WithoutNetwork, TrackioTracker): ...


class LonelySwanlabTracker(_WithoutNetwork, SwanlabTracker): ...
