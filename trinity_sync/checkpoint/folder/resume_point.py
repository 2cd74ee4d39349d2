"""Finds the checkpoint from which a run resumes, and sets the folder back to it.

A run never resumes silently from an older checkpoint than was committed, as its record and the folder's files
(`contents`) say. A damaged checkpoint is skipped, as it stays damaged. One that is unreadable or missing now may be
there tomorrow, so the resume is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.checkpoint.folder import catalog, contents, recovery
from trinity_sync.checkpoint.folder.catalog import CheckpointInfo, check_ours, newest_good, scan
from trinity_sync.checkpoint.folder.contents import Manifest, NewerFormatError, UnreadableError, step_dir, tracker_path
from trinity_sync.checkpoint.folder.deletion import unlink_notes
from trinity_sync.checkpoint.folder.recovery import recover
from trinity_sync.errors import RunError
from trinity_sync.host.durable import sync_folder
from trinity_sync.protocol.parts import FULL, STATE_DICT

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """The start of a verl program."""

    attempt: int  # 0 for a fresh folder, one more for each later start on it
    step: int  # 0: the initial weights
    verified: bool  # False: verl itself wrote the checkpoint, so its files have no digests


class UnseenError(RunError):
    """A committed checkpoint cannot be seen; the message names it and the place."""


def find(
    root: Path,
    *,
    skip_unreadable: bool = False,
    of_verl: bool = False,
    roles: Collection[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> CheckpointInfo | None:
    """Find the newest full checkpoint that verifies; None: there is none. Raises UnseenError, NewerFormatError.
    `roles`: places, such as ``actor``, that a checkpoint of verl's has to have.
    """
    try:
        return newest_good(root, on_skip=say, skip_unreadable=skip_unreadable, of_verl=of_verl, roles=roles)
    except UnreadableError as error:
        raise UnseenError(str(error)) from error


def look(root: Path) -> None:
    """Check as `find` does, by manifests alone and silently, before anything is written. Raises UnseenError,
    NewerFormatError: as `find`.
    """
    try:
        infos = catalog.scan(root)
    except UnreadableError as error:
        raise UnseenError(str(error)) from error
    newest = max((info.step for info in infos if info.kind == FULL), default=0)
    for info in reversed(infos):
        if info.step > newest and info.state == "newer":
            raise NewerFormatError(info.problems[0])
        if info.step > newest and info.state == "unreadable":
            raise UnseenError(info.problems[0])


def check_all_seen(
    root: Path,
    found: CheckpointInfo | None,
    recorded: Collection[int],
    *,
    places: str | None = None,
    skip_missing: bool = False,
) -> None:
    """Check that no committed checkpoint newer than `found` is missing. Raises UnseenError if nothing was found, or a
    newer checkpoint is missing.
    """
    noted = contents.read_committed(root)
    named = noted if noted is not None else contents.read_tracker(root, FULL).step
    committed = sorted({*recorded, *([named] if named else [])})
    if committed and found is None:
        raise UnseenError(
            f"{_steps(committed)} committed, but no checkpoint that verifies was found in {places or root}"
        )
    present = {info.step for info in catalog.scan(root)}
    missing = [step for step in committed if found is not None and step > found.step and step not in present]
    if missing and found is not None and not skip_missing:
        raise UnseenError(
            f"{_steps(missing)} committed, but the newest checkpoint found in {places or root} is that of step "
            f"{found.step}"
        )


def put_in_order(root: Path, resume_step: int | None, roles: Collection[str] = ()) -> StartPoint:
    """Prepare a checkpoint folder for a verl program: a fresh one, or one with checkpoints of verl or of this program.
    Raises RunError.
    """
    recovery.finish_replacements(root)
    before = catalog.newest_attempt(root)
    attempt = 0 if before is None else before + 1
    found = _newest(root, roles) if resume_step is None else _named(root, resume_step, roles)
    step = found.step if found is not None else 0
    set_start(root, step, attempt, of_verl=True)
    verified = found is None or found.manifest is not None
    if not verified:
        logger.warning("the run resumes from %s; verl wrote it, so it is not verified", step_dir(root, step))
    return StartPoint(attempt=attempt, step=step, verified=verified)


def _newest(root: Path, roles: Collection[str]) -> CheckpointInfo | None:
    try:
        found = find(root, of_verl=True, roles=roles, say=logger.warning)
        check_all_seen(root, found, ())
    except UnseenError as error:
        raise UnseenError(
            f"{error}. Nothing was changed. Start again when it can be read, or: resume_step=N resumes from an older "
            "step, resume_step=0 begins with the initial weights"
        ) from error
    if found is not None and found.manifest is None and contents.newest_finished(root) is None:
        raise RunError(
            f"{found.path} was written by verl, but no {tracker_path(root, FULL)} says whether it was finished; "
            f"resume_step={found.step} resumes from it"
        )
    absent = _absent(found.manifest, roles) if found is not None and found.manifest is not None else None
    if found is not None and absent is not None:
        raise RunError(
            f"{found.path} was saved by a run of other roles: it holds nothing of {absent}; resume_step={found.step} "
            "resumes from it, resume_step=N from an older one"
        )
    named, step = contents.read_tracker(root, FULL).step or 0, found.step if found is not None else 0
    if named > step:
        logger.warning("%s names step %d; the newest to resume from is step %d", tracker_path(root, FULL), named, step)
    return found


def _absent(manifest: Manifest, roles: Collection[str]) -> str | None:
    """Return the first role without a file in a full checkpoint; None if all have one."""
    return next((role for role in roles if not any(path.startswith(f"{role}/") for path in manifest.paths)), None)


def _named(root: Path, step: int, roles: Collection[str]) -> CheckpointInfo | None:
    if step == 0:
        return None
    info = next((info for info in catalog.scan(root) if info.step == step), None)
    absent = catalog.missing(info.path, roles) if info is not None and info.state == "verl" else None
    if absent is not None:
        raise RunError(f"{step_dir(root, step)} was written by verl, but its {absent} is missing: it is not whole")
    if info is None or (info.kind != FULL and info.state != "verl"):
        raise RunError(f"{step_dir(root, step)} is not a committed full checkpoint, so no run can resume from it")
    return info


def _steps(steps: Collection[int]) -> str:
    newest = sorted(steps)[-5:]
    text = ", ".join(map(str, newest)) if len(newest) == len(steps) else f"..., {', '.join(map(str, newest))}"
    return f"step {text} was" if len(steps) == 1 else f"steps {text} were"


# Setting a checkpoint folder back to the step of a resume.


def check_start(root: Path, step: int, *, of_verl: bool = False) -> None:
    """Check that all later steps than that of the resume, which it sets aside, are this program's own. Raises
    RunError.
    """
    others = ("newer", "foreign", "verl") if of_verl else ("newer", "foreign")
    check_ours([info for info in scan(root) if info.step > step], others)


def set_start(root: Path, step: int, attempt: int, *, of_verl: bool = False) -> list[Path]:
    """Set a checkpoint folder back for a resume: later folders become ``abandoned-*``, trackers name `step`. Raises
    RunError: as `check_start`; nothing has been changed then. Returns the new paths of the abandoned folders.
    """
    check_start(root, step, of_verl=of_verl)
    recover(root, clock=time.time)
    unlink_notes(root, attempt)
    infos = scan(root)
    # The step of the resume may be verl's own.
    full = [info.step for info in infos if info.kind == FULL or (info.step == step and info.state == "verl")]
    # Trackers first: after a crash in between they name an existing checkpoint.
    if root.is_dir():
        contents.write_committed(root, max((of for of in full if of <= step), default=0))
    for kind, steps in ((STATE_DICT, [info.step for info in infos if info.manifest is not None] + full), (FULL, full)):
        contents.write_tracker(root, kind, max((of for of in steps if of <= step), default=None))
    abandoned = []
    for info in infos:
        if info.step > step:
            before = info.attempt if info.attempt is not None or attempt == 0 else attempt - 1
            path = contents.abandoned_dir(root, info.step, before)
            info.path.rename(path)
            abandoned.append(path)
    if abandoned:
        sync_folder(root)
    return abandoned
