"""The log of a process: a file in the run's folder with its steps, its output, and the traceback of a failure.

A separate thread writes the lines, so no caller waits for a slow disk, and a log that cannot be written fails nothing.
A file above its limit is shortened: its end is moved to ``NAME.log.1``, over the one before, and the file continues
empty. It is not renamed, because child processes have it open.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import platform
import queue
import re
import secrets
import sys
import threading
import time
from pathlib import Path

from trinity_sync.errors import TrinityError
from trinity_sync.host.durable import write_all
from trinity_sync.host.masking import without_hidden
from trinity_sync.host.origin import error_line, keep_origin
from trinity_sync.host.terminal import printable

story = logging.getLogger("trinity_sync")
"""For the user: one line for each event, in plain words, with step, version, bytes and seconds."""

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

MOST_BYTES = 20_000_000
"""Limit of a file's length. There are at most two of each."""

_MOST_LINE = 1_000_000
"""Limit of a line's characters; the rest is left out."""
_MOST_WAITING = 10_000
"""Limit of the lines that wait for a slow disk; later ones are dropped and counted."""
_FLUSH_S = 1.0
_LOGGED_BY = "_trinity_sync_logged_by"
_HERE = secrets.token_hex(4)
"""Tells this process from one with the same pid on another host, or in another container. A fork has another pid."""
_LOOK_S = 0.2
"""Interval of the checks of files that other processes write into, too."""
_PIECE = 1 << 20
_kept_short: dict[Path, int] = {}
_keeper: threading.Thread | None = None


class LogFile(logging.Handler):
    """A log file. Callers wait up to a second for warnings and errors to be written: the process may be about to end.

    Args:
        path: of the file. Created, with its folder, at the first line.
        takes_output: redirect the process's output there too, including that of native libraries.
        most_bytes: limit of its length.

    Raises:
        OSError: with `takes_output`, the file cannot be written.
    """

    def __init__(self, path: str | Path, *, takes_output: bool = False, most_bytes: int = MOST_BYTES) -> None:
        super().__init__()
        self._path = Path(path)
        self._takes_output = takes_output
        self._most_bytes = most_bytes
        self._file: int | None = None
        self._waiting: queue.SimpleQueue[str | threading.Event | None] = queue.SimpleQueue()
        self._dropped = 0
        self._hangs: threading.Event | None = None
        self._writer: threading.Thread | None = None
        if takes_output:
            self._open()
            keep_short(self._path, most_bytes)

    def handle(self, record: logging.LogRecord) -> bool:
        handled = bool(super().handle(record))
        if handled and record.levelno >= logging.WARNING:
            self.flush()
        return handled

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = printable(without_hidden(self.format(record)), keep="\n\t")[:_MOST_LINE]
        except Exception:
            self.handleError(record)
            return
        if self._waiting.qsize() >= _MOST_WAITING:
            self._dropped += 1
            return
        self._waiting.put(line)
        self._begin()

    def flush(self) -> None:
        """Wait up to a second until all lines so far are written; for a disk that hangs, only once."""
        writer = self._writer
        if self._hangs is not None and not self._hangs.is_set():
            return
        if writer is not None and writer.is_alive() and writer is not threading.current_thread():
            written = threading.Event()
            self._waiting.put(written)
            self._hangs = None if written.wait(_FLUSH_S) else written

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._waiting.put(None)
            writer.join(_FLUSH_S)
        super().close()

    def _begin(self) -> None:
        if sys.is_finalizing():
            return  # a thread cannot start any more, and waiting for its start would never end
        if self._writer is None or not self._writer.is_alive():  # a fork has none
            self._writer = threading.Thread(target=self._write, name=f"log {self._path.name}", daemon=True)
            self._writer.start()

    def _write(self) -> None:
        while True:
            line = self._waiting.get()
            if line is None:
                break
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                self._put(line)
            except OSError:
                self._dropped += 1
        if self._file is not None and not self._takes_output:
            os.close(self._file)
            self._file = None

    def _put(self, line: str) -> None:
        if self._file is None:
            self._open()
        assert self._file is not None, "it was opened"
        if not self._takes_output:
            make_room(self._path, self._most_bytes)
        dropped = self._dropped
        if dropped:
            line = f"({dropped} lines are missing here: the disk did not take them)\n{line}"
        write_all(self._file, f"{line}\n".encode(errors="replace"))
        self._dropped -= dropped

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if self._takes_output:
            os.dup2(self._file, 1)
            os.dup2(self._file, 2)


def keep_short(path: Path, most_bytes: int = MOST_BYTES) -> None:
    """Shorten a file above its limit, also while other processes append to it, until this process ends."""
    global _keeper
    _kept_short[path] = most_bytes
    if _keeper is None or not _keeper.is_alive():  # a fork has none
        _keeper = threading.Thread(target=_keep_short, name="long logs", daemon=True)
        _keeper.start()


def make_room(path: Path, most_bytes: int = MOST_BYTES) -> None:
    """Move the end of a file above its limit to ``PATH.1``, and empty it. Nothing is raised.

    Lines that other processes append meanwhile may be lost.
    """
    kept = Path(f"{path}.1")
    with contextlib.suppress(OSError):
        if path.stat().st_size < most_bytes:
            return
        kept.touch()
        with path.open("r+b") as file, kept.open("r+b") as before:
            os.posix_fallocate(before.fileno(), 0, most_bytes)  # a full disk fails here, before anything is overwritten
            file.seek(-most_bytes, os.SEEK_END)  # fails if another process has shortened it meanwhile
            left = most_bytes
            while left > 0 and (piece := file.read(min(left, _PIECE))):
                left -= before.write(piece)
            if left == 0:  # else another process has shortened it meanwhile
                before.truncate()
                file.truncate(0)


def _keep_short() -> None:
    while True:
        time.sleep(_LOOK_S)
        for path, most_bytes in list(_kept_short.items()):
            make_room(path, most_bytes)


def own_log(folder: str | Path | None, name: str) -> None:
    """Have this process log to ``<folder>/<name>.log``, with its output; do nothing for a folder of None.

    If the folder cannot be written (a node without the shared file system), the process keeps its output, and logs
    there.
    """
    if folder is None:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    handler: logging.Handler
    try:
        handler = LogFile(Path(folder) / f"{name}.log", takes_output=True)
    except OSError:
        handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    for other in [found for found in root.handlers if type(found) is logging.StreamHandler]:
        root.removeHandler(other)  # of a library, whose lines would appear twice
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    # A native crash (a NCCL abort, an out-of-memory kill's SIGTERM) leaves its stack in the log instead of nothing.
    faulthandler.enable(file=sys.stderr)
    story.info("%s: pid %d on %s", name, os.getpid(), platform.node())


def flush_logs() -> None:
    """Write all lines so far, if the disk takes them within a second."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def log_failure(what: str, error: BaseException) -> None:
    """Log a failure once, with a traceback unless a foreseen error says it all.

    For an error of the user's code, the traceback starts there; the error carries it to other processes. `what`: the
    failed work, such as ``generate``.
    """
    here = f"{_HERE}-{os.getpid()}"
    if getattr(error, _LOGGED_BY, None) == here:
        return
    with contextlib.suppress(Exception):  # a foreign class may refuse attributes
        setattr(error, _LOGGED_BY, here)
    found, foreseen = keep_origin(error), isinstance(error, TrinityError)
    text = str(error) if foreseen else error_line(error)
    if found is not None:
        story.error("%s failed: %s\n%s", what, text, found.traceback)
    elif foreseen and error.__cause__ is None:
        story.error("%s failed: %s", what, text)
    else:
        story.error("%s failed: %s", what, text, exc_info=error)


_ERROR = re.compile(r"\b(?:[A-Za-z_]+\.)*[A-Z]\w*(?:Error|Exception): .+")
_MOST = 1 << 20
"""Limit of the bytes that are searched."""


class OwnOutput:
    """The standard error, from now on, of this process and its children, if it is a file."""

    def __init__(self) -> None:
        self._file = Path("/proc/self/fd/2")
        self._begin = self._size()

    def last_error(self, but: str) -> str | None:
        """Return the last line with an exception, from the exception's name on, or None.

        `but`: skip exceptions that contain this text, because they only report others.
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
                file.seek(max(self._begin if self._begin <= end else 0, end - _MOST))  # 0: it was shortened
                return file.read().decode(errors="replace")
        except OSError:
            return ""
