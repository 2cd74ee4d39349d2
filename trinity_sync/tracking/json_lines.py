"""Logs of JSON objects, one a line, and JSON files. The recorder writes them; commands and reports read them.

Each line goes out in one write, so a crash can tear only the last line. Readers skip a torn last line, the next writer
removes it, and a resume cuts the lines of abandoned steps.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import json
import math
import os
import pickle
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar, overload

from trinity_sync.errors import RunError
from trinity_sync.host.durable import replace_file, write_all
from trinity_sync.tracking import units

T = TypeVar("T")
E = TypeVar("E")

Record: TypeAlias = Mapping[str, object]
"""One line: a JSON object."""

_CHUNK = 1 << 20


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
    return list(stream(path))


def stream(path: Path) -> Iterator[Record]:
    """Yield the objects that `read` returns, in little memory."""
    return (record for _, record in _lines(path))


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
    return [record for _, record in _parsed(path, tail, 0 if start == 0 else None)]


def by_time(*logs: Iterable[Record]) -> Iterator[Record]:
    """Merge the lines of several logs, each oldest first, by time."""
    return heapq.merge(*logs, key=lambda line: units.finite(line.get("time")) or 0.0)


def cut_after(path: Path, step: int, *, key: Callable[[Record], int | None]) -> int:
    """Drop the lines of steps after `step`, and a torn last line. Other lines stay, byte for byte. Returns the number
    of whole lines that were dropped.
    """
    if not path.exists():
        return 0
    dropped = 0

    def kept() -> Iterator[bytes]:
        nonlocal dropped
        for line, record in _lines(path):
            if (at := key(record)) is None or at <= step:
                yield line + b"\n"
            else:
                dropped += 1

    write_atomic(path, kept())
    return dropped


def metrics_step(record: Record) -> int | None:
    """Return the trainer step of a line of metrics.jsonl."""
    step = record.get("step")
    return step if isinstance(step, int) else None


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    before, text = 0, b""
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                text += chunk
                cut = text.rfind(b"\n", 0, max(0, text.rfind(b"\n"))) + 1  # the last line may be torn
                yield from _parsed(path, text[:cut], before, torn=False)
                before += text.count(b"\n", 0, cut)
                text = text[cut:]
    except FileNotFoundError:
        return
    except OSError as error:
        raise _read_error(path, error) from error
    yield from _parsed(path, text, before)


def _parsed(path: Path, text: bytes, before: int | None = 0, *, torn: bool = True) -> list[tuple[bytes, Record]]:
    """Parse lines of a log; `before`: number of lines before them, None: not known; `torn`: the last may be torn."""
    pieces = text.split(b"\n")
    # Split leaves an empty piece after a final newline, and a torn line where there is none.
    last = len(pieces) - 1 if pieces[-1] else len(pieces) - 2
    found = _parsed_at_once(pieces[: max(last + (not torn), 0)])
    for index, piece in enumerate(pieces[len(found) :], len(found)):
        if not piece.strip():
            continue
        record = _parse(piece)
        if record is not None:
            found.append((piece, record))
        elif index != last or not torn:
            line = f"line {last - index + 1} from its end" if before is None else f"line {before + index + 1}"
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


# Long runs in memory.


_MOST_TEXTS = 10_000
_LARGE = 2**63


class _Table:
    """The items of `PackedRecords` with the same type, keys and types of values. Values that all of them have are kept
    once. `large`: some integers have more than 64 bits.
    """

    def __init__(self, item: object, values: Mapping[str, object], *, large: bool) -> None:
        self.kind, self.length, self._large = type(item), 0, large
        self.integers = [] if large else [key for key, value in values.items() if type(value) is int]
        self._common, self._fixed = dict(values), list(values)
        self._numbers: dict[str, array[float] | array[int]] = {}
        self._texts: dict[str, list[object]] = {}
        self._others: dict[str, list[object]] = {}  # pickled
        for key, value in values.items():
            if type(value) is float or (value and not isinstance(value, str | int)):  # 0.0 == -0.0, [1] == [True]
                self._vary(key)

    def _vary(self, key: str) -> None:
        value = self._common[key]
        self._fixed.remove(key)
        if isinstance(value, str | bool):
            self._texts[key] = [value] * self.length
        elif isinstance(value, float):
            self._numbers[key] = array("d", [value]) * self.length
        elif isinstance(value, int) and not self._large:
            self._numbers[key] = array("q", [value] * self.length)
        else:
            self._others[key] = [pickle.dumps(value)] * self.length

    def append(self, values: Mapping[str, object], texts: dict[object, object]) -> None:
        for key in [key for key in self._fixed if values[key] != self._common[key]]:
            self._vary(key)
        for key, numbers in self._numbers.items():
            numbers.append(values[key])  # type: ignore[arg-type]
        for key, column in self._texts.items():
            column.append(texts.setdefault(values[key], values[key]))
        for key, column in self._others.items():
            other = pickle.dumps(values[key])
            column.append(texts.setdefault(other, other))
        self.length += 1

    def item(self, index: int) -> object:
        values = self._common.copy()
        for key, numbers in self._numbers.items():
            values[key] = numbers[index]
        for key, column in self._texts.items():
            values[key] = column[index]
        for key, column in self._others.items():
            values[key] = pickle.loads(column[index])  # type: ignore[arg-type]
        if self.kind is dict:
            return values
        made: object = object.__new__(self.kind)
        vars(made).update(values)
        return made

    def column(self, key: str) -> Callable[[int], object]:
        """Return a function that gives the value of a key by the index of the item."""
        if (others := self._others.get(key)) is not None:
            return lambda index: pickle.loads(others[index])  # type: ignore[arg-type]
        column = self._numbers.get(key, self._texts.get(key))
        value = self._common.get(key)
        return (lambda index: value) if column is None else column.__getitem__


class PackedRecords(Sequence[T]):
    """A long list of JSON objects, or of plain objects with such attributes, in a tenth of the memory: the values of a
    key are in one array. Items are made anew whenever they are asked for. Slices share the values.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._tables: list[_Table] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._places = array("Q")  # of each item: the number of its table, and its index there
        self._texts: dict[object, object] = {}  # so that neighbours with equal texts share them
        for item in items:
            self.append(item)

    def append(self, item: T) -> None:
        self._places.append(self._put(item))

    def of(self, kind: type[E]) -> PackedRecords[E]:
        """Return the items of a class."""
        wanted = {number for number, table in enumerate(self._tables) if issubclass(table.kind, kind)}
        return self._view(place for place in self._places if place >> 32 in wanted)  # type: ignore[return-value]

    def where(self, wanted: Callable[[T], bool]) -> PackedRecords[T]:
        """Return the items that satisfy `wanted`."""
        return self._view(place for place in self._places if wanted(self._made(place)))

    def _view(self, places: Iterable[int]) -> PackedRecords[T]:
        view = copy.copy(self)
        view._places = array("Q", places)
        return view

    def column(self, key: str) -> Iterator[object]:
        """Return the value of a key in each item; None where there is none."""
        columns = [table.column(key) for table in self._tables]
        return (columns[place >> 32](place & 0xFFFFFFFF) for place in self._places)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> PackedRecords[T]: ...

    def __getitem__(self, index: int | slice) -> T | PackedRecords[T]:
        return self._made(self._places[index]) if isinstance(index, int) else self._view(self._places[index])

    def __setitem__(self, index: int, item: T) -> None:
        self._places[index] = self._put(item)

    def __iter__(self) -> Iterator[T]:
        return map(self._made, self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _put(self, item: T, *, large: bool = False) -> int:
        values: Mapping[str, object] = item if isinstance(item, dict) else vars(item)
        number = self._numbers.setdefault((type(item), large, *values, *map(type, values.values())), len(self._tables))
        if number == len(self._tables):
            self._tables.append(_Table(item, values, large=large))
        if len(self._texts) > _MOST_TEXTS:
            self._texts.clear()
        table = self._tables[number]
        if not all(-_LARGE <= values[key] < _LARGE for key in table.integers):  # type: ignore[operator]
            return self._put(item, large=True)
        table.append(values, self._texts)
        return number << 32 | table.length - 1

    def _made(self, place: int) -> T:
        return self._tables[place >> 32].item(place & 0xFFFFFFFF)  # type: ignore[return-value]


def column(lines: Iterable[Record], key: str) -> Iterator[object]:
    """Return the value of a key in each line; None where there is none."""
    return lines.column(key) if isinstance(lines, PackedRecords) else (line.get(key) for line in lines)


# Whole files: run.json, summary.json, report.html and cut logs.


JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


def write_atomic(path: Path, data: bytes | Iterable[str | bytes]) -> None:
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
