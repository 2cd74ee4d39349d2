"""Whether an error of Ray's tells of a process that is gone, and why it is."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray.exceptions import OutOfMemoryError, RayActorError

DEATHS = (RayActorError, OutOfMemoryError)
"""What a call to an actor fails of whose process is gone; the second where Ray ended it for want of memory."""

_MOST = 300
"""Characters of a reason."""

_NOTED_S, _LOOK_S = 1.0, 0.02

_AROUND = re.compile(
    r"""
    ^\t\w+:.*$                                                  # the actor's class, id, pid ...
    | ^The\ actor\ (?:died|experienced)\ .*before\ finishing\ this\ task\.$
    | ^The\ actor\ (?:is\ dead|died)\ because\ (?:its\ worker\ process\ has\ died\..*?\ Worker\ exit\ detail:\ )?
    | \s*Some\ common\ causes\ include.*$
    | ,?\s*\b(?:(?:\w+\ )?[Ii][Dd]:\ )?[0-9a-f]{24,}\b         # ids
    """,
    re.VERBOSE | re.MULTILINE,
)
_EMPTIED = re.compile(r" \(\)|(?<=\(),\s*")
"""What is left of parentheses that an id stood in."""
_PID = re.compile(r"^\tpid: (\d+)$", re.MULTILINE)

_notes: list[Path] = []


@contextmanager
def ends_noted_in(log: Path) -> Iterator[None]:
    """For the length of the block, `why_gone` also says how the system ended a process, which Ray does not know.

    Args:
        log: of `host.fork_server`, which begins all of Ray's workers: ``PID how`` in a line.
    """
    _notes.append(log)
    try:
        yield
    finally:
        _notes.remove(log)


def why_gone(error: Exception) -> str:
    """Say in one line why a process is gone, in Ray's words without ids and advice, and how it ended where that was
    noted; empty where nobody tells.

    Args:
        error: one of `DEATHS`.
    """
    text = " ".join(_EMPTIED.sub("", _AROUND.sub("", str(error))).split()).strip(" .,:")
    text = text if len(text) <= _MOST else f"{text[:_MOST].rstrip()} ..."
    pid = _PID.search(str(error))
    how = _noted(pid[1]) if pid is not None else None
    return "; ".join(part for part in (text, how and f"its process {how}") if part)


def _noted(pid: str) -> str | None:
    """How a process ended; waits a moment for it to be noted, for Ray may see the closed connection before."""
    deadline = time.monotonic() + _NOTED_S
    while (how := _read(pid)) is None and _notes and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return how


def _read(pid: str) -> str | None:
    for log in reversed(_notes):
        try:
            lines = log.read_text(errors="replace").splitlines()
        except OSError:  # it goes with the folder that it is in
            continue
        for line in reversed(lines):
            if line.startswith(f"{pid} "):
                return line.removeprefix(f"{pid} ")
    return None
