"""Digests of rows by processes beside this one: an interpreter hashes short rows one at a time, however many threads it
has, because xxhash keeps the interpreter lock for less than 64 KiB.

Such a process runs `serve`. It imports no torch, so it is soon up and small; it maps segments by their path, answers
one request after another, and ends when its input does, that is, with its parent.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import subprocess
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trinity_sync.weights.tensor_rows import rows_digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PROGRAM = f"""
import sys
sys.path[0] = {str(Path(__file__).parents[2])!r}
from trinity_sync.weights.row_process import serve
serve()
"""
_ANSWER_S = 60.0
"""For a process to answer; one that was stopped is done without."""
Span = tuple[str, int, int, int]
"""File of a segment, byte at which rows start, how many, and bytes per row."""


class RowProcesses:
    """Processes that digest rows of segments. They are started at the first use, and end with `close` or with this one.

    Args:
        count: how many; the caller of `digest` works beside them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []

    def digest(self, spans: Sequence[Span], here: Callable[[int], bytes]) -> list[bytes]:
        """For each span the 16-byte digests of its rows, one after another.

        Args:
            spans: where the rows are.
            here: digests one of them, by its number, in this process, which has its share too.
        """
        with self._lock:
            while len(self._processes) < self._count:
                command = [sys.executable, "-c", _PROGRAM]
                self._processes.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                )
            own, *shares = _shares(spans, 1 + len(self._processes))
            asked = list(self._processes)
            for process, share in zip(asked, shares, strict=True):
                _ask(process, spans[share.start : share.stop])
            try:
                found = [here(number) for number in own]
                for process, share in zip(asked, shares, strict=True):
                    answer = _answer(process)
                    if answer is None:  # it died or was stopped, or could not map the segment: do without
                        self._end()
                    found += [here(number) for number in share] if answer is None else answer
            except BaseException:
                self._end()  # an answer that nobody takes would be taken for that to the next question
                raise
            return found

    def close(self) -> None:
        """End the processes. They are started again where `digest` is called again."""
        for process in list(self._processes):  # whoever waits for one that hangs holds the lock
            process.kill()
        with self._lock:
            self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            with suppress(OSError, ValueError):  # what is still in a pipe that nobody reads
                process.communicate()
            process.wait()
        self._processes.clear()


def _shares(spans: Sequence[Span], count: int) -> list[range]:
    """Cut a list into runs of about the same number of bytes."""
    ends = list(accumulate(rows * width for _, _, rows, width in spans))
    total = ends[-1] if ends else 0
    cuts = [0, *(bisect_left(ends, total * share / count) for share in range(1, count)), len(spans)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _ask(process: subprocess.Popen[bytes], spans: Sequence[Span]) -> None:
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # it died: there will be no answer
        process.stdin.write(pickle.dumps(list(spans)))
        process.stdin.flush()


def _answer(process: subprocess.Popen[bytes]) -> list[bytes] | None:
    assert process.stdout is not None
    try:
        if not select.select([process.stdout], [], [], _ANSWER_S)[0]:
            return None
        found: list[bytes] = pickle.load(process.stdout)
    except (OSError, ValueError, EOFError, pickle.UnpicklingError):
        return None
    return found


def _digest(spans: Sequence[Span], maps: dict[str, NDArray[np.uint8]]) -> list[bytes]:
    found = []
    for path, start, rows, width in spans:
        if path not in maps:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                maps[path] = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
            finally:
                os.close(descriptor)
        matrix: NDArray[np.uint8] = maps[path][start : start + rows * width].reshape(rows, width)
        found.append(rows_digest(matrix))
    return found


def serve() -> None:
    """Answer requests on the standard input until it ends."""
    maps: dict[str, NDArray[np.uint8]] = {}
    while True:
        try:
            spans = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_digest(spans, maps), sys.stdout.buffer)
        sys.stdout.buffer.flush()
