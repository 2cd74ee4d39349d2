"""Rows of a JSON Lines or Parquet file, in an order that is a function of seed and step. Under the file tasks."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trinity_sync.errors import ConfigError
from trinity_sync.samples.keys import Purpose, child, path
from trinity_sync.samples.record import Message

_KINDS = {str: "a text", int: "a number", float: "a number", bool: "true or false", dict: "an object", list: "a list"}

_ONE_PER_LINE = "; where the file is one JSON document: jq -c '.[]' FILE writes one object per line"


class Row(NamedTuple):
    """One object of the file.

    Attributes:
        number: its line (JSON Lines) or row (Parquet), from 1.
        values: its fields.
    """

    number: int
    values: Mapping[str, object]


class RowFile:
    """A file of objects, read and checked as a whole.

    Args:
        path: the file; Parquet where it ends in ``.parquet``, else JSON Lines in UTF-8, blank lines skipped.
        seed: what the order of the rows is drawn from.
        shuffle: whether each pass over the file (epoch) has a random order of its own; else that of the file.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is not an object; names file and line.
    """

    def __init__(self, path: str | Path, *, seed: int, shuffle: bool) -> None:
        self.path = Path(path).expanduser()
        self._seed = seed
        self._shuffle = shuffle
        try:
            self.rows = list(_parquet(self.path) if self.path.suffix == ".parquet" else _json_lines(self.path))
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if not self.rows:
            raise ConfigError(f"{self.path} is empty; it must have one object per {self._unit}")
        self._last_order: tuple[int, NDArray[np.int64]] = (-1, np.arange(0))

    @property
    def _unit(self) -> str:
        return "row" if self.path.suffix == ".parquet" else "line"

    def of_step(self, step: int, count: int) -> list[Row]:
        """Return the rows of a step: number ``(step - 1) * count`` and the following, of one epoch after the other.

        Args:
            step: the trainer step, from 1.
            count: rows per step; may exceed the file.
        """
        return self.following((step - 1) * count, count)

    def following(self, first: int, count: int) -> list[Row]:
        """Return rows by their number in the order of the data: one epoch after the other, from 0."""
        places = (divmod(position, len(self.rows)) for position in range(first, first + count))
        return [self.rows[self._order(epoch)[place]] for epoch, place in places]

    def leave_out(self, rows: Collection[int]) -> None:
        """Go on without these rows, numbered from 0 as they stand in `rows`."""
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
        """Name the place of a row, as in ``train.jsonl:17``."""
        return f"{self.path}:{row.number}" if self._unit == "line" else f"{self.path}: row {row.number}"

    def value(self, row: Row, key: str) -> object:
        """Return a field of a row.

        Raises:
            ConfigError: it is missing or null.
        """
        if key not in row.values:
            there = ", ".join(map(repr, row.values)) or "none"
            raise ConfigError(f"{self.where(row)}: there is no field {key!r}; there is: {there}")
        if row.values[key] is None:
            raise ConfigError(f"{self.where(row)}: the field {key!r} is null")
        return row.values[key]

    def text(self, row: Row, key: str) -> str:
        """Return a field that must be a text which is not empty.

        Raises:
            ConfigError: it is not.
        """
        value = self.value(row, key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where(row)}: the field {key!r} is {_kind(value)}; it must be a text")
        if not value:
            raise ConfigError(f"{self.where(row)}: the field {key!r} is an empty text")
        return value

    def text_or_messages(self, row: Row, key: str) -> str | tuple[Message, ...]:
        """Return a field that must be a text, or a list of chat messages: objects with the texts `role` and `content`.

        Raises:
            ConfigError: it is neither.
        """
        value = self.value(row, key)
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
        return tuple(value)


def _kind(value: object) -> str:
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                # a byte order mark, which some editors write, may stand before the first line
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                value = json.loads(text, object_pairs_hook=_object)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path}:{number}: not UTF-8 (byte {error.start} of the line)") from error
            except json.JSONDecodeError as error:
                advice = _ONE_PER_LINE if text.strip() in ("[", "{") else ""
                raise ConfigError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}{advice}") from error
            except _RepeatedError as error:
                raise ConfigError(f"{path}:{number}: the field {error.key!r} is there twice") from error
            if not isinstance(value, dict):
                advice = _ONE_PER_LINE if isinstance(value, list) else ""
                raise ConfigError(f"{path}:{number}: {_kind(value)}; each line must be a JSON object{advice}")
            yield Row(number, value)


class _RepeatedError(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedError(next(key for key in keys if keys.count(key) > 1))
    return found


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with path.open("rb") as file:
            table = parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a Parquet file: {error}") from error
    for number, values in enumerate(table.to_pylist(), start=1):
        yield Row(number, values)
