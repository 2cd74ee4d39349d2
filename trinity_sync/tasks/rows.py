"""Rows of a JSON Lines or Parquet file, in an order that depends on seed and step only; the base of file tasks."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from trinity_sync.errors import ConfigError
from trinity_sync.samples.keys import child, path
from trinity_sync.samples.record import Message, Purpose

if TYPE_CHECKING:
    import pyarrow
    from pyarrow import parquet

_KINDS = {str: "a text", int: "a number", float: "a number", bool: "true or false", dict: "an object", list: "a list"}

_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_PACKED = {b"\x28\xb5\x2f\xfd": "Zstandard", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "a zip archive"}
"""First bytes of files."""
_DEEPEST = 200
"""Most levels of nested lists and objects; Python's own tools fail at some 500."""
_DIGITS = 4300
"""Most digits of a whole number, Python's limit."""
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]')
_LONG_NUMBER = re.compile(rf'"(?:[^"\\]|\\.)*"|-?\d{{{_DIGITS + 1},}}')

_ONE_PER_LINE = "; where the file is one JSON document: jq -c '.[]' FILE writes one object per line"


class Row(NamedTuple):
    """One object of the file. `number`: its line (JSON Lines) or row (Parquet), from 1."""

    number: int
    values: Mapping[str, object]


class RowFile:
    """A file of objects, read and checked at once.

    Args:
        path: the file; Parquet by its name or contents, else JSON Lines in UTF-8, blank lines skipped. Either may be
            compressed by gzip.
        shuffle: give each pass over the file (epoch) its own random order; otherwise that of the file.
        columns: the columns of a Parquet file to read, if it has them; None: all.

    Attributes:
        unread: the errors of unreadable Parquet values, by row and column; row None: the whole column. Raised when the
            value is used.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is not an object; names file and line.
    """

    def __init__(self, path: str | Path, *, seed: int, shuffle: bool, columns: Collection[str] | None = None) -> None:
        self.path = Path(path).expanduser()
        self._seed = seed
        self._shuffle = shuffle
        self.unread: dict[tuple[int | None, str], str] = {}
        self._known: list[str] | None = None
        try:
            with self.path.open("rb") as file:
                self.rows = list(self._read(file, columns))
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{self.path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        if not self.rows:
            raise ConfigError(f"{self.path} is empty; it must have one object per {self._unit}")
        self._last_order: tuple[int, NDArray[np.int64]] = (-1, np.arange(0))

    @property
    def _unit(self) -> str:
        return "line" if self._known is None else "row"

    def _read(self, file: IO[bytes], columns: Collection[str] | None) -> Iterator[Row]:
        name = self.path.name.lower()
        if _begins(file, _GZIP):
            file, name = io.BytesIO(gzip.decompress(file.read())), name.removesuffix(".gz")
        for start, packed in _PACKED.items():
            if _begins(file, start):
                raise ConfigError(f"{self.path} is compressed as {packed}; unpack it, or compress it by gzip")
        if name.endswith(".parquet") or _begins(file, _PARQUET):
            return self._parquet(file, columns)
        return _json_lines(self.path, file)

    def _parquet(self, file: IO[bytes], columns: Collection[str] | None) -> Iterator[Row]:
        import pyarrow
        from pyarrow import parquet

        self._known = []
        try:
            table = parquet.ParquetFile(file)
            self._known = list(table.schema_arrow.names)
            count = table.metadata.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{self.path} cannot be read as Parquet: {_in_one_line(error)}") from error
        if repeated := next((name for name in self._known if self._known.count(name) > 1), None):
            raise ConfigError(f"{self.path}: the column {repeated!r} is there twice")
        names = [name for name in self._known if columns is None or name in columns]
        cells = {name: self._column(table, name) for name in names}
        readable = {name: values for name, values in cells.items() if (None, name) not in self.unread}
        for place in range(count):
            yield Row(place + 1, {name: values[place] for name, values in readable.items()})

    def _column(self, table: parquet.ParquetFile, name: str) -> list[object]:
        """Return the values of a column; None for an unreadable one, with its error in `unread`."""
        try:
            column = table.read(columns=[name]).column(name)
        except Exception as error:
            self.unread[None, name] = _in_one_line(error)
            return []
        try:
            return list(column.to_pylist(maps_as_pydicts="strict"))
        except Exception:  # one at a time, to name the wrong one
            return [self._cell(row, name, value) for row, value in enumerate(column, start=1)]

    def _cell(self, row: int, name: str, value: pyarrow.Scalar) -> object:
        try:
            return value.as_py(maps_as_pydicts="strict")
        except Exception as error:
            self.unread[row, name] = _in_one_line(error)
            return None

    def following(self, first: int, count: int) -> list[Row]:
        """Return rows by their number in the order of the data, one epoch after the other, from 0."""
        places = (divmod(position, len(self.rows)) for position in range(first, first + count))
        return [self.rows[self._order(epoch)[place]] for epoch, place in places]

    def leave_out(self, rows: Collection[int]) -> None:
        """Remove rows by their index in `rows`."""
        left_out = frozenset(rows)
        self.rows = [row for number, row in enumerate(self.rows) if number not in left_out]
        self._last_order = (-1, np.arange(0))

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._last_order[0] != epoch:
            order = np.arange(len(self.rows))
            if self._shuffle:
                order = np.argsort(child(path(self._seed, Purpose.ORDER, epoch), order), kind="stable")
            self._last_order = (epoch, order)
        return self._last_order[1]

    def where(self, row: Row) -> str:
        """Return the place of a row, as in ``train.jsonl:17``."""
        return f"{self.path}:{row.number}" if self._unit == "line" else f"{self.path}: row {row.number}"

    def value(self, row: Row, key: str) -> object:
        """Return a field of a row."""
        if self.optional(row, key) is not None:
            return row.values[key]
        if key in row.values:
            raise ConfigError(f"{self.where(row)}: the field {key!r} is null")
        there = ", ".join(map(repr, row.values if self._known is None else self._known)) or "none"
        raise ConfigError(f"{self.where(row)}: there is no field {key!r}; there is: {there}")

    def optional(self, row: Row, key: str) -> object:
        """Return a field of a row; None: it is missing or null. Objects have no null values: Parquet adds those for
        keys of other rows.
        """
        for number in (row.number, None):
            if (reason := self.unread.get((number, key))) is not None:
                raise ConfigError(f"{self.where(row)}: the column {key!r} cannot be read: {reason}")
        found = row.values.get(key)
        return found if self._known is None else _without_nulls(found)

    def text(self, row: Row, key: str) -> str:
        """Return a field that must be a non-empty text."""
        value = self.value(row, key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where(row)}: the field {key!r} is {_kind(value)}; it must be a text")
        if not value:
            raise ConfigError(f"{self.where(row)}: the field {key!r} is an empty text")
        return value

    def text_or_messages(self, row: Row, key: str) -> str | tuple[Message, ...]:
        """Return a field that must be a text or a list of chat messages: objects with `role` and `content`."""
        self.value(row, key)
        value = self.optional(row, key)
        if not isinstance(value, list):
            if isinstance(value, str):
                return self.text(row, key)
            raise ConfigError(
                f"{self.where(row)}: the field {key!r} is {_kind(value)}; it must be a text or a list of chat messages"
            )
        if not value:
            raise ConfigError(f"{self.where(row)}: the field {key!r} is an empty list")
        for number, message in enumerate(value, start=1):
            if not (
                isinstance(message, dict)
                and isinstance(message.get("role"), str)
                and isinstance(message.get("content"), str)
            ):
                raise ConfigError(
                    f"{self.where(row)}: message {number} of the field {key!r} must be an object with the texts "
                    f"'role' and 'content'"
                )
        return tuple(chat_message(message) for message in value)


def chat_message(message: Message) -> Message:
    """Return a chat message without null values. Tool calls without a text get an empty one: few chat templates take
    null or no content.
    """
    found = {key: value for key, value in message.items() if value is not None}
    return found | {"content": found.get("content", "")} if found.get("tool_calls") else found


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _begins(file: IO[bytes], start: bytes) -> bool:
    found = file.read(len(start))
    file.seek(0)
    return found == start


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _kind(value: object) -> str:
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def _json_lines(path: Path, file: IO[bytes]) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        text = ""
        try:
            # utf-8-sig: some editors write a byte order mark before the first line
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            _check_depth(text)
            value = json.loads(text, object_pairs_hook=_object)
        except UnicodeDecodeError as error:
            column = len(line[: error.start].decode(errors="replace")) + 1
            raise ConfigError(f"{path}:{number}: not UTF-8 at column {column}") from error
        except json.JSONDecodeError as error:
            advice = _ONE_PER_LINE if text.strip() in ("[", "{") else ""
            raise ConfigError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}{advice}") from error
        except ValueError as error:
            long = next((one.start() + 1 for one in _LONG_NUMBER.finditer(text) if one[0][0] != '"'), None)
            if long is None:
                raise ConfigError(f"{path}:{number}: {error}") from error
            raise ConfigError(f"{path}:{number}: a number of more than {_DIGITS} digits at column {long}") from error
        if not isinstance(value, dict):
            advice = _ONE_PER_LINE if isinstance(value, list) else ""
            raise ConfigError(f"{path}:{number}: {_kind(value)}; each line must be a JSON object{advice}")
        yield Row(number, value)


def _check_depth(text: str) -> None:
    """Raise `ValueError` if lists and objects are nested too deeply."""
    if text.count("[") + text.count("{") <= _DEEPEST:
        return
    depth = 0
    for one in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(one[0], 0)
        if depth > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} lists and objects within one another at column {one.start() + 1}")


def _object(pairs: list[tuple[str, object]]) -> Mapping[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the field {repeated!r} is there twice")
    return found


class Example(Protocol):
    """A pair or conversation: an example of supervised training."""

    @property
    def where(self) -> str:
        """Place in the file, as in ``train.jsonl:17``."""
        ...


E = TypeVar("E", bound=Example)


class FileExamples(Generic[E]):
    """The `SupervisedTask` of a file with one example per row. `example`: makes the example of a row; called for all at
    once.
    """

    def __init__(self, file: RowFile, example: Callable[[Row], E]) -> None:
        self._file = file
        self._examples = {row.number: example(row) for row in file.rows}

    def pairs(self, step: int, count: int) -> list[E]:
        """Return the examples of a trainer step (from 1)."""
        return self.pairs_from((step - 1) * count, count)

    def pairs_from(self, first: int, count: int) -> list[E]:
        """Return examples by their number in the order of the data, from 0."""
        return [self._examples[row.number] for row in self._file.following(first, count)]

    def all_rows(self) -> list[tuple[str, E]]:
        """Return each example of the file, with its place."""
        return [(example.where, example) for example in self.validation_rows(None)]

    def validation_rows(self, count: int | None) -> list[E]:
        """Return the first examples of the file, all for None."""
        return [self._examples[row.number] for row in self._file.rows[:count]]

    def leave_out(self, rows: Collection[int]) -> None:
        """Remove examples by their index in `all_rows`."""
        self._file.leave_out(rows)
