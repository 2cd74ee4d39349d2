"""The two tracker files, which name the newest committed step. The monitor writes them, after a commit.

``latest_checkpointed_iteration.txt`` names the newest full checkpoint (verl reads it too);
``latest_state_dict_iteration.txt`` the newest weights, full or state-dict. A tracker that is empty or garbled is
reported and ignored, never waited for.

verl's trainer writes the first one itself, as soon as it has asked for a save; so what was committed is noted once more
in ``.committed``, which nobody else writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trinity_sync.host.durable import replace_file, sync_folder
from trinity_sync.protocol.parts import FULL, STATE_DICT, Kind

TRACKERS: dict[Kind, str] = {
    FULL: "latest_checkpointed_iteration.txt",
    STATE_DICT: "latest_state_dict_iteration.txt",
}

COMMITTED = ".committed"


@dataclass(frozen=True, slots=True)
class Tracker:
    """What a tracker file says.

    Args:
        step: the step it names; None where there is no file or it cannot be understood.
        problem: why it cannot be understood.
        unreadable: it may well name one, but cannot be read now.
    """

    step: int | None
    problem: str | None = None
    unreadable: bool = False


def tracker_path(root: Path, kind: Kind) -> Path:
    """Return the path of the tracker of this kind."""
    return root / TRACKERS[kind]


def read_tracker(root: Path, kind: Kind) -> Tracker:
    """Read a tracker. Raises nothing for its contents: a bad one is a `Tracker` with a problem."""
    return _read(tracker_path(root, kind))


def read_committed(root: Path) -> int | None:
    """Return the newest step that this program has committed in full, or begun with; 0: none so far.

    None: it has noted nothing, so all that is known is what the tracker says.
    """
    return _read(root / COMMITTED).step


def write_committed(root: Path, step: int) -> None:
    """Note the newest step that this program has committed in full, in one durable step."""
    replace_file(root / COMMITTED, str(step))


def newest_finished(root: Path, tracker: Tracker | None = None) -> int | None:
    """Return the newest step that is known to be finished, by verl or by this program; None: nobody says.

    Args:
        tracker: what the tracker of full checkpoints says, by who has read it already.
    """
    tracker = tracker or read_tracker(root, FULL)
    known = [step for step in (tracker.step, read_committed(root)) if step is not None]
    return max(known, default=None) if tracker.problem is None else None


def _read(path: Path) -> Tracker:
    try:
        text = path.read_bytes().decode("ascii").strip()
    except FileNotFoundError:
        return Tracker(None)
    except OSError as error:
        return Tracker(None, f"{path} cannot be read: {error}", unreadable=True)
    except UnicodeDecodeError as error:
        return Tracker(None, f"{path} cannot be read: {error}")
    if not text.isdecimal():
        return Tracker(None, f"{path} holds {text[:40]!r} instead of a step")
    return Tracker(int(text))


def write_tracker(root: Path, kind: Kind, step: int | None) -> None:
    """Let the tracker name a step, in one durable step; None removes it."""
    path = tracker_path(root, kind)
    if step is not None:
        replace_file(path, str(step))
    elif path.exists():
        path.unlink()
        sync_folder(root)
