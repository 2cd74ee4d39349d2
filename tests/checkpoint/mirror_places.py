"""Places for mirrors in tests that need more than a folder: a real SFTP server that can be killed, and waiting."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trinity_sync.checkpoint.folder.owner import MARK, Owner
from trinity_sync.checkpoint.mirror.copies import Mirror, Storage
from trinity_sync.checkpoint.mirror.run_mirror import MirrorSettings, call
from trinity_sync.tracking.events import Event, event_fields, event_name

LIMIT_S = 60.0
OURS, THEIRS = "a" * 32, "b" * 32
OWNER = Owner(run=OURS, folder="/runs/ours", host="here", session="1")
OTHER = Owner(run=THEIRS, folder="/runs/theirs", host="there", session="2")

#: No keys or agent of whoever runs the tests.
SFTP_OPTIONS: dict[str, Any] = {"client_keys": [], "agent_path": None, "config": []}


def quick(**changes: Any) -> MirrorSettings:
    """Settings that fail fast."""
    return MirrorSettings(**{"tries": 2, "backoff_s": 0.05, "timeout_s": 30.0, "options": SFTP_OPTIONS, **changes})


def asked(place: str, settings: MirrorSettings, work: Any, **more: Any) -> Any:
    """Have work done at a place as a run."""
    return call(place, settings, OWNER, work, **more)


def marked(place: str, owner: Owner = OWNER) -> str:
    """A place with the mark of a run, if it has none."""
    if Storage(place).read(MARK) is None:
        Storage(place).write(MARK, owner.to_text())
    return place


def loaded(mirror: Mirror) -> set[str]:
    """Work at a mirror that only says which modules its process has imported, with those that every copy needs."""
    importlib.import_module("trinity_sync.checkpoint.mirror.run_mirror")
    return {name for name, module in sys.modules.items() if module is not None}


def descriptors(mirror: Mirror) -> list[str]:
    """Work at a mirror that only says what its process has for standard input, output and error."""
    return [str(Path(f"/proc/self/fd/{number}").readlink()).partition(":")[0] for number in range(3)]


def linger(mirror: Mirror) -> None:
    """Work at a mirror that says that it has begun, and then takes long."""
    mirror._say("begun")
    time.sleep(10 * LIMIT_S)


def stand_still(mirror: Mirror) -> None:
    """Work at a mirror that says again and again how far it is, which is always the same."""
    while True:
        mirror._progress(1, 10)
        time.sleep(0.1)


def fail(mirror: Mirror, error: Exception) -> None:
    """Work at a mirror that fails."""
    raise error


class SftpServer:
    """A server of a folder, in a process that can be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port = folder, 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"sftp://tester@127.0.0.1:{self.port}/run"

    def start(self, hold_after: int | None = None) -> None:
        """Start it; with `hold_after` it stops answering after so many bytes, see `wait_until_holding`."""
        script = Path(__file__).with_name("sftp_server.py")
        command = [sys.executable, str(script), str(self.folder), str(self.port)]
        command += [] if hold_after is None else [str(hold_after)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(self._line("listening").split()[1])

    def wait_until_holding(self) -> None:
        self._line("holding")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _line(self, text: str) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        timer = threading.Timer(LIMIT_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        assert line.startswith(text), f"the server said {line!r} instead of {text}"
        return line


class Events:
    """Collects what an upload queue reports; a test waits for one of them instead of sleeping."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.all: list[tuple[str, dict[str, Any]]] = []
        self.idle = threading.Event()

    def report(self, event: Event) -> None:
        with self._changed:
            self.all.append((event_name(event), event_fields(event)))
            self._changed.notify_all()

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """The events of this name, once there are so many."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: len(self.of(name)) >= count, LIMIT_S)
            assert arrived, f"{count} x {name} did not come; there are {self.all}"
            return self.of(name)

    def of(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.all if event == name]
