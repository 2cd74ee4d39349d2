"""The two tracker files, which name the newest committed step. Only the monitor writes them, after a commit.

``latest_checkpointed_iteration.txt`` names the newest full checkpoint (verl reads it too);
``latest_state_dict_iteration.txt`` the newest weights, full or state-dict. A tracker that is empty or garbled is
reported and ignored, never waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trinity_sync.checkpoint.layout import sync_folder, write_atomic
from trinity_sync.protocol.parts import FULL, STATE_DICT, Kind

TRACKERS: dict[Kind, str] = {
    FULL: "latest_checkpointed_iteration.txt",
    STATE_DICT: "latest_state_dict_iteration.txt",
}


@dataclass(frozen=True, slots=True)
class Tracker:
    """What a tracker file says.

    Args:
        step: the step it names; None where there is no file or it cannot be understood.
        problem: why it cannot be understood.
    """

    step: int | None
    problem: str | None = None


def tracker_path(root: Path, kind: Kind) -> Path:
    """Where the tracker of this kind is."""
    return root / TRACKERS[kind]


def read_tracker(root: Path, kind: Kind) -> Tracker:
    """Read a tracker. Raises nothing for its contents: a bad one is a `Tracker` with a problem."""
    path = tracker_path(root, kind)
    try:
        text = path.read_bytes().decode("ascii").strip()
    except FileNotFoundError:
        return Tracker(None)
    except (OSError, UnicodeDecodeError) as error:
        return Tracker(None, f"{path} cannot be read: {error}")
    if not text.isdecimal():
        return Tracker(None, f"{path} holds {text[:40]!r} instead of a step")
    return Tracker(int(text))


def write_tracker(root: Path, kind: Kind, step: int | None) -> None:
    """Let the tracker name a step, in one durable step; None removes it."""
    path = tracker_path(root, kind)
    if step is not None:
        write_atomic(path, str(step))
    elif path.exists():
        path.unlink()
        sync_folder(root)
