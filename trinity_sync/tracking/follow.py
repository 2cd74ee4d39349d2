"""A run as another process sees it: how it stands, by its lock and record, and the lines that come in, as they come.

What was read is not read again, so that it costs nothing to look often, at long runs too.
"""

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
"""``starting`` is also a run that resumes or is about to let go of its folder; one ``killed`` could not say how it
ended; of one ``unreadable`` among others the record cannot be read.
"""

_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How a run stands at this moment.

    Attributes:
        stand: in a word.
        record: the content of run.json, None before there is one.
        owner: the process that works in the folder.
    """

    stand: Stand
    record: RunJson | None
    owner: LockOwner | None

    @property
    def over(self) -> bool:
        """Whether nothing more is to come of it."""
        return self.stand in ("killed", "completed", "failed", "interrupted", "unreadable")

    @property
    def error(self) -> str | None:
        """Why it ended, in a paragraph."""
        return None if self.record is None else self.record.get("error")


def standing(folder: Path) -> Standing:
    """Find out how a run stands.

    Raises:
        ConfigError: there is a run.json that cannot be read.
    """
    owner = lock_owner(folder)
    record = read_record(folder / "run.json") if (folder / "run.json").exists() else None
    status = record.get("status") if record is not None else None
    if owner is None and status == "running":
        owner = lock_owner(folder)  # it may have begun in between
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
    """A log that was followed is another one now, as after a resume: read it from the beginning."""


class Tail:
    """Reads what has been added to a log of JSON objects since the last time.

    Args:
        path: the log, which may be missing yet.

    Attributes:
        damaged: whole lines that are no JSON objects; they are passed over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._read = 0
        self._file: tuple[int, int] | None = None

    def read(self) -> Iterator[Record]:
        """Return the whole lines that are new. One that is still being written comes the next time.

        Raises:
            ReplacedError: the log was cut or replaced.
            RunError: it cannot be read.
        """
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
    """The lines of a run, as they come in.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics, self._events = Tail(folder / "metrics.jsonl"), Tail(folder / "events.jsonl")

    def lines(self) -> Iterator[LogLine]:
        """Return the lines of steps and events that are new, by time; raises as `Tail.read`."""
        return merged_lines(self._events.read(), self._metrics.read())

    @property
    def notes(self) -> list[str]:
        """What was passed over, one sentence each."""
        return [
            f"{units.plural(tail.damaged, 'line')} of {tail.path} left out: no JSON objects"
            for tail in (self._metrics, self._events)
            if tail.damaged
        ]
