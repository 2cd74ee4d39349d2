"""One start of a chain's run: its process, and what can be seen of it while it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.runs import ROOT
from tests.kills import processes
from tests.kills.plan import Instant
from tests.kills.processes import Member

POLL_S = 0.002

# Steps cost next to nothing. Limits are short, so that somebody who hangs is told from somebody who is slow in time.
# A run ends where it would go on by itself: a chain resumes it, and looks at its files in between.
SMALL = [
    "trainer.max_restarts=0",
    "live=line",
    "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=4",
    "checkpoint.interval=2",
    "checkpoint.timeout_s=25",
    "sync.timeout_s=25",
    "sync.lease_s=8",
    "explorer.timeout_s=25",
    "backend.timeout_s=25",
    "cluster.start_timeout_s=600",
]


class Tail:
    """The lines of a log as they come."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() and not whole else 0
        self._rest = b""

    def new(self) -> list[str]:
        """The whole lines since the last call."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return []
        if size <= self._read:  # smaller: a resume has cut what it is going to do again
            self._read, self._rest = size, self._rest if size == self._read else b""
            return []
        with open(self._path, "rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


class Launch:
    """A run that has been started. Use as a context manager: at its end no process of it is left.

    Attributes:
        output: file of what it prints.

    Args:
        mark: see `processes.own_mark`.
        stop: ends every wait.
        environment: variables of the run.
        before: a program that starts it, with its arguments, such as `nohup`.
    """

    def __init__(
        self,
        command: list[str],
        *,
        mark: str,
        output: Path,
        run: Path,
        checkpoints: Path,
        stop: threading.Event,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        self.output, self._checkpoints, self._mark, self._stop = output, checkpoints, mark, stop
        self.started = time.monotonic()
        self._events, self._metrics = Tail(run / "events.jsonl"), Tail(run / "metrics.jsonl")
        before = before or ("env", "--default-signal=HUP")  # the campaign itself may be under nohup
        with open(output, "wb") as file:
            self._process = subprocess.Popen(
                [*before, sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=output.parent,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                    "COLUMNS": "200",
                    **(environment or {}),
                    processes.MARK: mark,
                },
                start_new_session=True,
            )
        self._printed = Tail(output, whole=True)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        processes.end_all(self._mark)
        self._process.wait()

    @property
    def pid(self) -> int:
        """Of the driver."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    @property
    def is_starting(self) -> bool:
        """Whether it has not begun its loop."""
        return "sending the first version" not in self.text

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(errors="replace")

    def members(self) -> list[Member]:
        """Its processes."""
        return processes.members(self._mark, self._process.pid)

    def strike(self, member: Member, signum: int) -> bool:
        """Send a signal; False where the process is gone."""
        if member.pid == self._process.pid and self.code is not None:
            return False
        return processes.send(member, self._mark, signum)

    def strike_all(self, signum: int) -> None:
        """Send a signal to every process that lives now, as a process manager does."""
        for member in self.members():
            self.strike(member, signum)

    def kill_all(self) -> None:
        """As a machine that goes down."""
        for member in self.members():
            self.strike(member, signal.SIGSTOP)
        for member in self.members():
            self.strike(member, signal.SIGKILL)

    def wait_gone(self, limit_s: float) -> list[Member]:
        """Wait for the end of all processes; those that are left."""
        left = processes.wait_gone(self._mark, self._process.pid, limit_s)
        return [member for member in left if member.pid != self._process.pid or self.code is None]

    def wait_end(self, limit_s: float) -> bool:
        """Wait for the driver's end."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_for(self, instant: Instant, limit_s: float) -> bool:
        """Wait until an instant has come; False where the run ends before, or nothing of the kind happens."""
        deadline = time.monotonic() + limit_s
        if instant.after == "start":
            deadline = self.started + instant.delay
            while time.monotonic() < deadline and self.code is None and not self._stop.is_set():
                time.sleep(POLL_S)
            return self.code is None
        seen, known = 0, self._folders(instant.after)
        self._events.new()
        while seen < instant.count:
            if self.code is not None or time.monotonic() > deadline or self._stop.is_set():
                return False
            time.sleep(POLL_S)
            if instant.after == "restoring":
                lines = self._printed.new()
                seen += sum("restoring step" in line for line in lines)
                if seen == 0 and any("sending the first version" in line for line in lines):
                    return False  # there was nothing to be restored
            elif instant.after in ("begin", "visible"):
                now = self._folders(instant.after)
                seen, known = seen + len(now - known), known | now
            else:
                seen += sum(event["event"] == instant.after for event in self.new_events())
        time.sleep(instant.delay)  # the instant is what is tried
        return self.code is None

    def wait_steps(self, count: int, limit_s: float) -> bool:
        """Wait until it has trained so many more steps; also true where it came to its good end meanwhile."""
        deadline = time.monotonic() + limit_s
        self.new_steps()
        while count > 0:
            if self.code is not None or time.monotonic() > deadline or self._stop.is_set():
                return self.code == 0
            time.sleep(0.02)
            count -= self.new_steps()
        return True

    def new_events(self) -> list[dict[str, Any]]:
        """Those since the last call."""
        found = []
        for line in self._events.new():
            with contextlib.suppress(ValueError):  # a line that was torn, and cut
                found.append(json.loads(line))
        return found

    def new_steps(self) -> int:
        """How many steps were trained since the last call."""
        return len(self._metrics.new())

    def _folders(self, after: str) -> set[str]:
        folder = self._checkpoints / ".staging" if after == "begin" else self._checkpoints
        pattern = "*" if after == "begin" else "global_step_*"
        try:
            return {entry.name for entry in folder.glob(pattern)}
        except OSError:
            return set()
