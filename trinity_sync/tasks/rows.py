"""Rows of JSON Lines or Parquet files, in an order that depends on seed and step only; the base of file tasks."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from trinity_sync.errors import ConfigError, in_one_line
from trinity_sync.host.references import matched_files
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


FilePaths: TypeAlias = str | Path | Sequence[str | Path]
_Columns: TypeAlias = Collection[str] | None
_Keys: TypeAlias = Mapping[str, str | None]
_Numbered: TypeAlias = tuple[int, Mapping[str, object]]


class Row(NamedTuple):
    """One object of a file. `number`: its line (JSON Lines) or row (Parquet), from 1."""

    file: DataFile
    number: int
    values: Mapping[str, object]

    @property
    def where(self) -> str:
        """Its place, as in ``train.jsonl:17``."""
        return f"{self.file.path}:{self.number}" if self.file.known is None else f"{self.file.path}: row {self.number}"


class DataFile:
    """A file of objects: Parquet by its name or contents, else JSON Lines in UTF-8, blank lines skipped. Either may be
    compressed by gzip. `known`: the columns of a Parquet file. `unread`: the errors of its unreadable values, by
    row and column; row None: the whole column.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: list[str] | None = None
        self.unread: dict[tuple[int | None, str], str] = {}

    def read(self, columns: _Columns) -> list[Row]:
        """Read the rows; `columns`: those of a Parquet file to read, None: all. Raises ConfigError."""
        try:
            with self.path.open("rb") as file:
                rows = [Row(self, number, values) for number, values in self._objects(file, columns)]
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{self.path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        if not rows:
            unit = "line" if self.known is None else "row"
            raise ConfigError(f"{self.path} is empty; it must have one object per {unit}")
        return rows

    def _objects(self, file: IO[bytes], columns: _Columns) -> Iterator[_Numbered]:
        name = self.path.name.lower()
        if _begins(file, _GZIP):
            file, name = io.BytesIO(gzip.decompress(file.read())), name.removesuffix(".gz")
        for start, packed in _PACKED.items():
            if _begins(file, start):
                raise ConfigError(f"{self.path} is compressed as {packed}; unpack it, or compress it by gzip")
        if name.endswith(".parquet") or _begins(file, _PARQUET):
            return self._parquet(file, columns)
        return _json_lines(self.path, file)

    def _parquet(self, file: IO[bytes], columns: _Columns) -> Iterator[_Numbered]:
        import pyarrow
        from pyarrow import parquet

        self.known = []
        try:
            table = parquet.ParquetFile(file)
            self.known = list(table.schema_arrow.names)
            count = table.metadata.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{self.path} cannot be read as Parquet: {in_one_line(error)}") from error
        if repeated := next((name for name in self.known if self.known.count(name) > 1), None):
            raise ConfigError(f"{self.path}: the column {repeated!r} is there twice")
        names = [name for name in self.known if columns is None or name in columns]
        cells = {name: self._column(table, name) for name in names}
        readable = {name: values for name, values in cells.items() if (None, name) not in self.unread}
        for place in range(count):
            yield place + 1, {name: values[place] for name, values in readable.items()}

    def _column(self, table: parquet.ParquetFile, name: str) -> list[object]:
        """Return the values of a column; None for an unreadable one, with its error in `unread`."""
        try:
            column = table.read(columns=[name]).column(name)
        except Exception as error:
            self.unread[None, name] = in_one_line(error)
            return []
        try:
            return list(column.to_pylist(maps_as_pydicts="strict"))
        except Exception:  # one at a time, to name the wrong one
            return [self._cell(row, name, value) for row, value in enumerate(column, start=1)]

    def _cell(self, row: int, name: str, value: pyarrow.Scalar) -> object:
        try:
            return value.as_py(maps_as_pydicts="strict")
        except Exception as error:
            self.unread[row, name] = in_one_line(error)
            return None


class FileRows:
    """The rows of files of objects, one file after the other, read and checked at once. Raises ConfigError, with file
    and line.

    Args:
        path: of a file, a pattern such as ``data/*.jsonl``, or a list of these; see `matched_files` and `DataFile`.
        shuffle: give each pass over the rows (epoch) its own random order; otherwise that of the files.
        columns: the columns of Parquet files to read, if they have them; None: all.
        keys: the names of fields by the settings that give them (``{"task.prompt_key": "question"}``), for errors.
    """

    def __init__(
        self, path: FilePaths, *, seed: int, shuffle: bool, columns: _Columns = None, keys: _Keys | None = None
    ) -> None:
        self._seed = seed
        self._shuffle = shuffle
        self._setting = {name: setting for setting, name in (keys or {}).items()}
        try:
            self._files = [DataFile(Path(file).expanduser()) for file in matched_files(path)]
        except ConfigError as error:
            raise ConfigError(f"the path of the rows {error}") from error
        self.rows = [row for file in self._files for row in file.read(columns)]
        self._last_order: tuple[int, NDArray[np.int64]] = (-1, np.arange(0))

    @property
    def unread(self) -> list[str]:
        """The first error of each column of Parquet with values that cannot be read; raised where one is used."""
        found: dict[tuple[DataFile, str], str] = {}
        for file in self._files:
            for (row, column), reason in file.unread.items():
                place = file.path if row is None else f"{file.path}: row {row}"
                text = f"{place}: the column {column!r} cannot be read, and rewards do not get it: {reason}"
                found.setdefault((file, column), text)
        return [*found.values()]

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

    def value(self, row: Row, key: str) -> object:
        """Return a field of a row."""
        if self.optional(row, key) is not None:
            return row.values[key]
        setting = self._setting.get(key)
        needless = f"; {setting}=null where the reward needs none" if setting == "task.answer_key" else ""
        if key in row.values:
            raise ConfigError(f"{row.where}: the field {key!r} is null{needless}")
        there = ", ".join(map(repr, row.values if row.file.known is None else row.file.known)) or "nothing"
        if setting is None:
            raise ConfigError(f"{row.where}: there is no field {key!r}; there is: {there}")
        raise ConfigError(f"{setting}={key!r}: {row.where} has no such field; it has: {there}{needless}")

    def optional(self, row: Row, key: str) -> object:
        """Return a field of a row; None: it is missing or null. Objects have no null values: Parquet adds those for
        keys of other rows.
        """
        for number in (row.number, None):
            if (reason := row.file.unread.get((number, key))) is not None:
                raise ConfigError(f"{row.where}: the column {key!r} cannot be read: {reason}")
        found = row.values.get(key)
        return found if row.file.known is None else _without_nulls(found)

    def text(self, row: Row, key: str) -> str:
        """Return a field that must be a non-empty text."""
        value = self.value(row, key)
        if not isinstance(value, str):
            raise ConfigError(f"{row.where}: the field {key!r} is {_kind(value)}; it must be a text")
        if not value:
            raise ConfigError(f"{row.where}: the field {key!r} is an empty text")
        return value

    def text_or_messages(self, row: Row, key: str) -> str | tuple[Message, ...]:
        """Return a field that must be a text or a list of chat messages: objects with `role` and `content`."""
        self.value(row, key)
        value = self.optional(row, key)
        if not isinstance(value, list):
            if isinstance(value, str):
                return self.text(row, key)
            raise ConfigError(
                f"{row.where}: the field {key!r} is {_kind(value)}; it must be a text or a list of chat messages"
            )
        if not value:
            raise ConfigError(f"{row.where}: the field {key!r} is an empty list")
        return tuple(chat_messages(row, key, value))


def chat_messages(row: Row, key: str, messages: Sequence[object], *, calls: bool = False) -> Iterator[Message]:
    """Return the chat messages of a field without null values. `calls`: they may call tools instead of having a text,
    and get an empty one: few chat templates take null or no content.
    """
    for number, message in enumerate(messages, start=1):
        found = message if isinstance(message, dict) else {}
        says = isinstance(found.get("content"), str) or (calls and found.get("tool_calls"))
        if not isinstance(found.get("role"), str) or not says:
            raise ConfigError(
                f"{row.where}: message {number} of the field {key!r} must be an object with the texts 'role' and "
                "'content'"
            )
        kept = {name: value for name, value in found.items() if value is not None}
        yield kept | {"content": kept.get("content", "")} if kept.get("tool_calls") else kept


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _begins(file: IO[bytes], start: bytes) -> bool:
    found = file.read(len(start))
    file.seek(0)
    return found == start


def _kind(value: object) -> str:
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def _json_lines(path: Path, file: IO[bytes]) -> Iterator[_Numbered]:
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
        yield number, value


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


E = TypeVar("E")


class FileExamples(Generic[E]):
    """The `SupervisedTask` of files with one example per row. `example`: makes the example of a row; called for all at
    once.
    """

    def __init__(self, rows: FileRows, example: Callable[[Row], E]) -> None:
        self._rows = rows
        self._examples = {row.where: example(row) for row in rows.rows}

    def pairs(self, step: int, count: int) -> list[E]:
        """Return the examples of a trainer step (from 1)."""
        return self.pairs_from((step - 1) * count, count)

    def pairs_from(self, first: int, count: int) -> list[E]:
        """Return examples by their number in the order of the data, from 0."""
        return [self._examples[row.where] for row in self._rows.following(first, count)]

    def all_rows(self) -> list[tuple[str, E]]:
        """Return each example of the file, with its place."""
        return [(row.where, self._examples[row.where]) for row in self._rows.rows]

    def validation_rows(self, count: int | None) -> list[E]:
        """Return the first examples of the file, all for None."""
        return [self._examples[row.where] for row in self._rows.rows[:count]]

    def leave_out(self, rows: Collection[int]) -> None:
        """Remove examples by their index in `all_rows`."""
        self._rows.leave_out(rows)
