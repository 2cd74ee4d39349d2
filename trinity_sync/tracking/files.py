"""Small files that are replaced whole or not at all. Used for run.json, summary.json, report.html and cut logs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from trinity_sync.errors import RunError
from trinity_sync.host.durable import replace_file

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


def write_atomic(path: Path, data: bytes | Iterable[str]) -> None:
    """Replace `path` by `data`: a reader, or a crash at any moment, sees the old bytes or the new ones. Pieces of text
    are written as they come.

    Raises:
        RunError: the disk refuses (full, read-only, gone); the old file is still there.
    """
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

    Numbers of numpy and torch become Python's, NaN and infinities null (JSON has no words for them), paths, errors and
    whatever else JSON does not know become text.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        # Lone surrogates (undecodable file names) have no UTF-8 form; keep them visible instead of failing the write.
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
