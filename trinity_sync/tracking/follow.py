"""Follows a run from another process: its status by lock and run.json, and its new lines. Each line is read once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trinity_sync.errors import RunError
from trinity_sync.tracking import units
from trinity_sync.tracking.events import LogLine, merged_lines
from trinity_sync.tracking.json_lines import Record
from trinity_sync.tracking.run_record import LockOwner, RunJson, lock_owner, read_record

Stand = Literal["not begun", "starting", "running", "killed", "completed", "failed", "interrupted", "unreadable"]
"""``starting`` includes the end of a run; ``killed``: run.json says running, but no process has the lock."""

_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The status of a run; `record` is None before there is a run.json, `owner` is the process that runs."""

    stand: Stand
    record: RunJson | None
    owner: LockOwner | None

    @property
    def over(self) -> bool:
        """Whether the run writes no more."""
        return self.stand in ("killed", "completed", "failed", "interrupted", "unreadable")

    @property
    def error(self) -> str | None:
        """The reason of a failure, one paragraph."""
        return None if self.record is None else self.record.get("error")


def standing(folder: Path) -> Standing:
    """Return the status of a run."""
    owner = lock_owner(folder)
    record = read_record(folder / "run.json") if (folder / "run.json").exists() else None
    status = record.get("status") if record is not None else None
    if owner is None and status == "running":
        owner = lock_owner(folder)  # it may have begun between the two reads
    stand: Stand
    match status:
        case "running":
            stand = "running" if owner else "killed"
        case "completed" | "failed" | "interrupted" if owner is None:
            stand = status
        case _:
            stand = "starting" if owner else "not begun"
    return Standing(stand=stand, record=record, owner=owner)


class ReplacedError(Exception):
    """The followed log was cut or replaced, as by a resume: read it from the beginning."""


class Tail:
    """Reads new lines of a log, which may be missing yet; `damaged` counts lines that are not JSON objects."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._read = 0
        self._file: tuple[int, int] | None = None

    def read(self) -> Iterator[Record]:
        """Return the new whole lines. Raises ReplacedError if the log was cut or replaced."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                this = (found.st_dev, found.st_ino)
                if self._file not in (None, this) or found.st_size < self._read:
                    raise ReplacedError(str(self.path))
                self._file = this
                file.seek(self._read)
                rest = b""
                while chunk := file.read(_CHUNK):
                    *lines, rest = (rest + chunk).split(b"\n")
                    self._read += sum(len(line) + 1 for line in lines)
                    yield from self._objects(lines)
        except FileNotFoundError:
            if self._file is not None:
                raise ReplacedError(str(self.path)) from None
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _objects(self, lines: list[bytes]) -> Iterator[Record]:
        for line in lines:
            if not line.strip():
                continue
            try:
                record: object = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield record
            else:
                self.damaged += 1


class FollowedRun:
    """Reads the new lines of a run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics, self._events = Tail(folder / "metrics.jsonl"), Tail(folder / "events.jsonl")

    def lines(self) -> Iterator[LogLine]:
        """Return the new events and metrics by time; raises as `Tail.read`."""
        return merged_lines(self._events.read(), self._metrics.read())

    @property
    def notes(self) -> list[str]:
        """One sentence for each log with damaged lines."""
        return [
            f"{units.plural(tail.damaged, 'line')} of {tail.path} left out: no JSON objects"
            for tail in (self._metrics, self._events)
            if tail.damaged
        ]
