"""What this process and those that it starts have written to its standard error, where that is a file."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ERROR = re.compile(r"\b(?:[A-Za-z_]+\.)*[A-Z]\w*(?:Error|Exception): .+")
_MOST = 1 << 20
"""Bytes that are looked at."""


class OwnOutput:
    """What is written from now on."""

    def __init__(self) -> None:
        self._file = Path("/proc/self/fd/2")
        self._begin = self._size()

    def last_error(self, but: str) -> str | None:
        """The last line that is an exception's, without what stands before its name; None: there is none.

        Args:
            but: of exceptions whose text begins with this, as they only tell of others.
        """
        found = None
        for line in self._written().splitlines():
            match = _ERROR.search(line)
            if match is not None and but not in match[0]:
                found = match[0]
        return found

    def _size(self) -> int | None:
        try:
            return os.fstat(2).st_size if self._file.resolve().is_file() else None
        except OSError:
            return None

    def _written(self) -> str:
        if self._begin is None:
            return ""
        try:
            with self._file.resolve().open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._begin if self._begin <= end else 0, end - _MOST))  # else it has made room
                return file.read().decode(errors="replace")
        except OSError:
            return ""
