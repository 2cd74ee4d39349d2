"""What lies in a folder and below it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folders below and at last this one, each with the names of its files. What is not there holds nothing.

    Raises:
        OSError: one cannot be listed now; `os.walk` itself takes it for empty.
    """
    for parent, _, names in os.walk(folder, topdown=False, onerror=_refuse):
        yield Path(parent), names


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
