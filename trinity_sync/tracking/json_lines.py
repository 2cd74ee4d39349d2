"""Logs of JSON objects, one a line, and JSON files. The recorder writes them; commands and reports read them.

Each line goes out in one write, so a crash can tear only the last line. Readers skip a torn last line, the next writer
removes it, and a resume cuts the lines of abandoned steps.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from trinity_sync.errors import RunError
from trinity_sync.host.durable import replace_file, write_all
from trinity_sync.tracking import units

Record: TypeAlias = Mapping[str, object]
"""One line: a JSON object."""


class JsonlWriter:
    """Appends objects to a file that only this process writes. Any thread may append. Raises RunError if the file
    cannot be opened, or is a link.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._handle: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            _mend_tail(self._handle)
        except OSError as error:
            raise _write_error(path, error) from error

    def append(self, record: Record) -> None:
        """Write one line; the operating system has it on return."""
        line = json.dumps(plain(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._lock:
            if self._handle is None:
                raise RunError(f"{self.path} is closed: nothing more can be recorded in it")
            start = os.lseek(self._handle, 0, os.SEEK_END)
            try:
                write_all(self._handle, line)
            except OSError as error:
                # A full disk may have taken half a line; the next one must not continue it.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._handle, start)
                raise _write_error(self.path, error) from error

    def close(self) -> None:
        """Make the lines durable and close the file; closing twice is fine."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is None:
                return
            try:
                os.fsync(handle)
            except OSError as error:
                raise _write_error(self.path, error) from error
            finally:
                os.close(handle)


def read(path: Path) -> list[Record]:
    """Read the objects of a log, oldest first; none if the file does not exist. A torn last line is skipped."""
    return [record for _, record in _lines(path)]


def read_last(path: Path, count: int) -> list[Record]:
    """Read the last `count` lines or a few more, without reading the others."""
    try:
        with path.open("rb") as file:
            start, lines = file.seek(0, os.SEEK_END), 0
            pieces: list[bytes] = []
            while start > 0 and lines <= count:
                step = min(start, 1 << 14)
                start -= step
                file.seek(start)
                pieces.append(file.read(step))
                lines += pieces[-1].count(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _read_error(path, error) from error
    tail = b"".join(reversed(pieces))
    if start > 0:  # the first piece may be half a line
        tail = tail.partition(b"\n")[2]
    return [record for _, record in _parsed(path, tail, at_start=start == 0)]


def by_time(*logs: Iterable[Record]) -> Iterator[Record]:
    """Merge the lines of several logs, each oldest first, by time."""
    return heapq.merge(*logs, key=lambda line: units.finite(line.get("time")) or 0.0)


def cut_after(path: Path, step: int, *, key: Callable[[Record], int | None]) -> int:
    """Drop the lines of steps after `step`, and a torn last line. Other lines stay, byte for byte. Returns the number
    of whole lines that were dropped.
    """
    if not path.exists():
        return 0
    lines = _lines(path)
    kept = [line for line, record in lines if (at := key(record)) is None or at <= step]
    write_atomic(path, b"".join(line + b"\n" for line in kept))
    return len(lines) - len(kept)


def metrics_step(record: Record) -> int | None:
    """Return the trainer step of a line of metrics.jsonl."""
    step = record.get("step")
    return step if isinstance(step, int) else None


def _lines(path: Path) -> list[tuple[bytes, Record]]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _read_error(path, error) from error
    return _parsed(path, text)


def _parsed(path: Path, text: bytes, *, at_start: bool = True) -> list[tuple[bytes, Record]]:
    pieces = text.split(b"\n")
    # Split leaves an empty piece after a final newline, and a torn line where there is none.
    last = len(pieces) - 1 if pieces[-1] else len(pieces) - 2
    found = _parsed_at_once(pieces[: max(last, 0)])
    for index, piece in enumerate(pieces[len(found) :], len(found)):
        if not piece.strip():
            continue
        record = _parse(piece)
        if record is not None:
            found.append((piece, record))
        elif index != last:
            line = f"line {index + 1}" if at_start else f"line {last - index + 1} from its end"
            raise RunError(f"{path}, {line} is not a JSON object; repair or remove that line")
    return found


def _parsed_at_once(pieces: Sequence[bytes]) -> list[tuple[bytes, Record]]:
    """Parse lines together, in less than half the time; return nothing if one of them is damaged."""
    if not all(piece[:1] == b"{" and piece[-1:] == b"}" for piece in pieces):
        return []
    try:
        parsed = json.loads(b"[" + b",0,".join(pieces) + b"]")
    except ValueError:
        return []
    # With every zero in its place, no line began or ended within a value.
    records, zeros = parsed[::2], parsed[1::2]
    whole = len(records) == len(pieces) and all(zero == 0 for zero in zeros)
    return list(zip(pieces, records, strict=True)) if whole else []


def _parse(line: bytes) -> Record | None:
    try:
        record: object = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _mend_tail(handle: int) -> None:
    """End the file after its last whole line: cut a torn one, complete one that lacks only its newline."""
    end = os.lseek(handle, 0, os.SEEK_END)
    tail, start = b"", end
    while start > 0 and b"\n" not in tail:
        step = min(start, 1 << 16)
        start -= step
        tail = os.pread(handle, step, start) + tail
    torn = tail[tail.rfind(b"\n") + 1 :]
    if not torn:
        return
    if _parse(torn) is not None:
        write_all(handle, b"\n")
    else:
        os.ftruncate(handle, end - len(torn))


def _read_error(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be read: {error.strerror or error}")


def _write_error(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be written: {error.strerror or error}; free space or check the disk")


# Whole files: run.json, summary.json, report.html and cut logs.


JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


def write_atomic(path: Path, data: bytes | Iterable[str]) -> None:
    """Replace `path` by `data`, given as bytes or as pieces of text. Readers see the old content or the new one."""
    try:
        replace_file(path, data)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error


def write_json(path: Path, value: object) -> None:
    """Replace `path` by the indented JSON of `value`."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(path, (text + "\n").encode())


def plain(value: object) -> JsonValue:
    """Return `value` as strict JSON can hold it.

    Numbers of numpy and torch become Python's, NaN and infinities become null, other types become text.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        # Lone surrogates (undecodable file names) have no UTF-8 form; they are escaped.
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return plain(value.item())
    return str(value)
