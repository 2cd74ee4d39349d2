"""From which checkpoint a run goes on: from no older one than was committed, unless the user says so.

What was committed is known from the run's own record and from the tracker. A checkpoint that is damaged is passed over,
since looking again would find the same; one that cannot be read now, or is not where it was, may be there tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from trinity_sync.checkpoint import store
from trinity_sync.checkpoint.layout import NewerFormatError, UnreadableError
from trinity_sync.checkpoint.store import CheckpointInfo
from trinity_sync.checkpoint.trackers import read_tracker
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL


class UnseenError(RunError):
    """What was committed cannot be seen; the message says what, and where it was looked for."""


def find(
    root: Path, *, skip_unreadable: bool = False, say: Callable[[str], None] = lambda text: None
) -> CheckpointInfo | None:
    """The newest full checkpoint that verifies; None: there is none.

    Args:
        root: the checkpoint folder; nobody writes in it meanwhile.
        skip_unreadable: go on from an older one where a newer one cannot be read now.
        say: gets a sentence for each one that is passed over.

    Raises:
        UnseenError: a newer one cannot be read now.
        NewerFormatError: a newer one was written by a later version of this program.
    """
    try:
        return store.newest_good(root, on_skip=say, skip_unreadable=skip_unreadable)
    except UnreadableError as error:
        raise UnseenError(str(error)) from error


def look(root: Path) -> None:
    """As `find`, but of manifests alone and without a word: fit for a first look, before anything is written.

    Raises:
        UnseenError, NewerFormatError: as `find`.
    """
    try:
        infos = store.scan(root)
    except UnreadableError as error:
        raise UnseenError(str(error)) from error
    newest = max((info.step for info in infos if info.kind == FULL), default=0)
    for info in reversed(infos):
        if info.step > newest and info.state == "newer":
            raise NewerFormatError(info.problems[0])
        if info.step > newest and info.state == "unreadable":
            raise UnseenError(info.problems[0])


def check_all_seen(
    root: Path, found: CheckpointInfo | None, recorded: Collection[int], *, also: str = "", skip_missing: bool = False
) -> None:
    """Compare what was found with what is known to have been committed.

    Args:
        recorded: steps of full checkpoints that the run's record says were committed, and not deleted since.
        also: where else was looked.
        skip_missing: go on from `found` though newer ones are gone.

    Raises:
        UnseenError: nothing was found, or something newer is not there any more.
    """
    named = read_tracker(root, FULL).step
    known = sorted({*recorded, *([named] if named is not None else [])})
    places = f"checkpoint.dir={root}" + (f" and {also}" if also else "")
    if known and found is None:
        raise UnseenError(f"{_steps(known)} committed, but no checkpoint that verifies was found in {places}")
    there = {info.step for info in store.scan(root)}
    gone = [step for step in known if found is not None and step > found.step and step not in there]
    if gone and found is not None and not skip_missing:
        raise UnseenError(
            f"{_steps(gone)} committed, but the newest checkpoint found in {places} is that of step {found.step}"
        )


def _steps(steps: Collection[int]) -> str:
    newest = sorted(steps)[-5:]
    text = ", ".join(map(str, newest)) if len(newest) == len(steps) else f"..., {', '.join(map(str, newest))}"
    return f"step {text} was" if len(steps) == 1 else f"steps {text} were"
