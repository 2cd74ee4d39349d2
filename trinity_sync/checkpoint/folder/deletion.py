"""Deletes checkpoints: retention, the safe removal of one checkpoint, and the trash. For the monitor and ``ckpt
prune``.

A checkpoint is first renamed to ``.condemned-...``. It becomes trash only if it is still the intended checkpoint, and
neither pinned nor leased; otherwise it is put back. If the program dies in between, `undo_deletions` finds the
condemned folder and its claim, and puts it back; retention decides again.
"""

from __future__ import annotations

import errno
import json
import secrets
import shutil
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trinity_sync.checkpoint.folder import catalog, contents, leases
from trinity_sync.checkpoint.folder.catalog import CheckpointInfo, committed_manifest, scan
from trinity_sync.checkpoint.folder.contents import Manifest, UnreadableError
from trinity_sync.errors import RunError, take_back
from trinity_sync.host.durable import replace_file, sync_folder
from trinity_sync.host.locks import check_no_link
from trinity_sync.protocol.parts import FULL, KINDS, STATE_DICT, Kind, covers
from trinity_sync.protocol.retention import CheckpointFacts, Policy, decide

if TYPE_CHECKING:
    from trinity_sync.actors.monitor_client import PrunedStep


def trash_checkpoint(root: Path, manifest: Manifest, *, now: float) -> bool:
    """Move a checkpoint to the trash; `empty_trash` frees its bytes. Return False if it stays: it is pinned or leased,
    or its place has another checkpoint by now, or one of verl's, or a resume has set a tracker to it. Times are Unix
    seconds.
    """
    target = contents.step_dir(root, manifest.step)
    with leases.claimed(root, manifest, now=now) as free:
        if not free:
            return False
        condemned = root / f"{contents.CONDEMNED_PREFIX}{secrets.token_hex(4)}-{target.name}"
        try:
            target.rename(condemned)
        except FileNotFoundError:
            return False
        try:
            # Our claim may have expired while this program was stopped, and a reader may have leased it.
            used = leases.blockers(root, manifest, now=now) or manifest.step in _named(root)
            if used or not _is(condemned, manifest) or of_verl(condemned, manifest):
                _put_back(root, condemned)
                return False
            note_deletion(root, manifest)
            move_to_trash(root, condemned, name=target.name)
        except FileNotFoundError:
            return False  # a monitor that has just started put it back
        except BaseException as error:
            take_back(error, partial(_put_back, root, condemned))
            raise
    return True


def of_verl(folder: Path, manifest: Manifest) -> bool:
    """Return whether verl has saved a full checkpoint, or begun to, over these weights."""
    return manifest.kind == STATE_DICT and catalog.wrote_over(folder, manifest.paths)


def _put_back(root: Path, condemned: Path) -> None:
    """Put a condemned checkpoint back; as ``abandoned-*`` if its place is taken by now."""
    name = condemned.name.removeprefix(contents.CONDEMNED_PREFIX).partition("-")[2]
    step = contents.step_of(name)
    try:
        condemned.rename(root / name)
    except FileNotFoundError:
        return  # another program has put it back
    except OSError as error:
        if step is None or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        with suppress(FileNotFoundError):
            manifest = committed_manifest(condemned)
            condemned.rename(contents.abandoned_dir(root, step, manifest.attempt if manifest is not None else None))


def undo_deletions(root: Path, *, now: float) -> None:
    """Put back what dead programs have condemned. A live program then looks again, or finds it put back."""
    leases.clean_claims(root, now=now)
    for path in root.glob(f"{contents.CONDEMNED_PREFIX}*"):
        _put_back(root, path)


def _is(folder: Path, manifest: Manifest) -> bool:
    found = committed_manifest(folder)
    return found is not None and found.own_digest == manifest.own_digest


# Notes of deletions in ``.pruned``. They are files, since not every program that deletes can reach the run's record.


# Number of notes per kind. A resume asks only for newer steps than the one that it found.
_MOST_NOTES = 1000
_SUFFIX: dict[Kind, str] = {FULL: "", STATE_DICT: ".weights"}


class Deletion(NamedTuple):
    """The note of a deleted checkpoint: kind, version digest, size in bytes, and the base of an adapter."""

    kind: Kind
    digest: str | None
    nbytes: int
    base: contents.Base | None


def note_deletion(root: Path, manifest: Manifest) -> None:
    """Note a deletion. If the disk refuses, the deletion goes on: it may be full."""
    with suppress(OSError):
        check_no_link(root / contents.PRUNED).mkdir(exist_ok=True)
        path = _note_path(root, manifest.step, manifest.attempt, manifest.kind)
        base = {} if manifest.base is None else {"base": manifest.base.to_json()}
        noted = {"digest": manifest.digest, "bytes": manifest.bytes, **base}
        try:
            replace_file(path, json.dumps(noted), durable=False)
        except OSError:
            path.touch(exist_ok=False)  # the name alone helps, and a full disk has room for it
    for step, attempt in _notes(root, manifest.kind)[:-_MOST_NOTES]:
        _unlink(root, step, attempt, manifest.kind)


def noted_deletions(root: Path) -> set[tuple[int, int]]:
    """Return (step, attempt) of the newest full checkpoints that were deleted on purpose and not committed again."""
    return set(_notes(root, FULL))


def read_deletion(root: Path, step: int, attempt: int, kind: Kind) -> Deletion | None:
    """Read the note of a deleted checkpoint of at least this kind; None: there is none."""
    for of in KINDS:
        if covers(of, kind):
            with suppress(OSError, ValueError, KeyError, TypeError):
                noted = json.loads(_note_path(root, step, attempt, of).read_text(encoding="utf-8"))
                base = contents.Base.from_json(noted["base"]) if "base" in noted else None
                return Deletion(of, noted["digest"], int(noted["bytes"]), base)
    return None


def unlink_note(root: Path, step: int, attempt: int) -> None:
    """Remove the note of a checkpoint that is committed again."""
    for kind in KINDS:
        _unlink(root, step, attempt, kind)


def unlink_notes(root: Path, attempt: int) -> None:
    """Remove the notes of this attempt and of later ones, which are of an earlier run, when the attempt begins."""
    for kind in KINDS:
        for step, of in _notes(root, kind):
            if of >= attempt:
                _unlink(root, step, of, kind)


def _note_path(root: Path, step: int, attempt: int, kind: Kind) -> Path:
    return root / contents.PRUNED / f"{step}-{attempt}{_SUFFIX[kind]}"


def _unlink(root: Path, step: int, attempt: int, kind: Kind) -> None:
    with suppress(OSError):
        check_no_link(root / contents.PRUNED)
        _note_path(root, step, attempt, kind).unlink()


def _notes(root: Path, kind: Kind) -> list[tuple[int, int]]:
    try:
        paths = [path for path in (root / contents.PRUNED).iterdir() if path.suffix == _SUFFIX[kind]]
    except OSError:
        return []
    return sorted(key for path in paths if (key := contents.key_of(path.stem)) is not None)


# Trash: one rename (``.trash-...``) makes a folder invisible, and its files are deleted afterwards.


def delete_folder(root: Path, path: Path) -> None:
    """Delete a folder that nothing else uses."""
    delete_trashed(move_to_trash(root, path))


def move_to_trash(root: Path, path: Path, *, name: str | None = None) -> Path:
    """Move a folder to the trash; return its new path. `name` replaces the folder's name there."""
    trash = root / f"{contents.TRASH_PREFIX}{name or path.name}-{secrets.token_hex(4)}"
    path.rename(trash)
    return trash


def delete_trashed(trash: Path | None) -> None:
    """Free the bytes of one trashed folder; files that cannot be deleted are left to `empty_trash`."""
    if trash is not None:
        with suppress(OSError):
            _free(trash)


def empty_trash(root: Path) -> list[str]:
    """Free the bytes of the trash; return problems. A folder that cannot be deleted does not stop the others."""
    problems: list[str] = []
    trash = list(root.glob(f"{contents.TRASH_PREFIX}*"))
    if trash:
        sync_folder(root)  # or a power cut could bring back the name of a checkpoint without its files
    for path in trash:
        try:
            _free(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{path} could not be removed: {error}")
    return problems


def _free(trash: Path) -> None:
    if trash.is_symlink():  # to an archived checkpoint, which is not deleted
        trash.unlink()
    else:
        shutil.rmtree(trash)


# Retention: what the policies keep of a checkpoint folder, and deleting the rest.


@dataclass(frozen=True, slots=True)
class PruneRow:
    """One line of a plan: a committed checkpoint, whether it stays, and why. `warnings` are with the newest checkpoint
    only.
    """

    manifest: Manifest
    path: Path
    bytes: int  # that its deletion frees
    keep: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def kind(self) -> Kind:
        return self.manifest.kind


def prune_plan(
    root: Path,
    policies: Collection[Policy],
    *,
    now: float,
    keep_state_dicts: int = 2,
    saving: Iterable[int] = (),
    known: contents.KnownManifests | None = None,
) -> list[PruneRow]:
    """Decide which checkpoints of a folder stay: one row per checkpoint, oldest first. Deletes nothing. Raises
    UnreadableError. Times are Unix seconds.

    `known`: as for `read_manifest`, which reads every manifest nevertheless. Names of folders, trackers, pins and
    leases are read anew as well, so no plan depends on an earlier state of the folder. `trash_checkpoint` looks again
    at each checkpoint that is to be deleted, without `known`.
    """
    # Twice: before the folders for the steps that verl has finished, and after them for those that must stay.
    before = _trackers(root)
    full = before[FULL]
    found = scan(root, full, known)
    trackers = [*before.values(), *_trackers(root).values()]
    if full.problem is not None and any(info.state == "verl" for info in found):
        raise UnreadableError(f"{full.problem}, so it is not known which of verl's checkpoints are finished")
    infos = {info.step: (info.path, info.manifest) for info in found if info.manifest is not None and _is_ours(info)}
    frees = {info.step: info.bytes - catalog.shared_bytes(info) for info in found if info.step in infos}
    pins, leased = leases.pinned(root), leases.leased(root, now=now)
    busy = set(saving) | _staged(root)
    # After a commit its tracker follows in a moment, or later if the disk refuses.
    named = {tracker.step for tracker in trackers}
    facts = [
        facts_of(one, pins, frees[step], leased=(step, one.attempt) in leased, saving=step in busy, named=step in named)
        for step, (_, one) in infos.items()
    ]
    history = catalog.history_bytes(root) if any(policy.budget is not None for policy in policies) else 0
    return [
        PruneRow(infos[of.step][1], infos[of.step][0], frees[of.step], of.keep, of.reasons, of.warnings)
        for of in decide(facts, policies, now, keep_state_dicts=keep_state_dicts, history=history)
    ]


def facts_of(
    manifest: Manifest, pins: Collection[tuple[int, int]], nbytes: int | None = None, **states: bool
) -> CheckpointFacts:
    """Return a checkpoint as the policies see it; `nbytes`: what its deletion frees, None: all of it; `states`: leased,
    being saved, or named by a tracker.
    """
    return CheckpointFacts(
        step=manifest.step,
        kind=manifest.kind,
        created=manifest.created,
        bytes=manifest.bytes if nbytes is None else nbytes,
        metrics=manifest.metrics,
        pinned=(manifest.step, manifest.attempt) in pins,
        **states,
    )


def _named(root: Path) -> set[int | None]:
    """Return the steps that the trackers name."""
    return {tracker.step for tracker in _trackers(root).values()}


def _trackers(root: Path) -> dict[Kind, contents.TrackerFile]:
    trackers = {kind: contents.read_tracker(root, kind) for kind in KINDS}
    for tracker in trackers.values():
        if tracker.unreadable:
            raise UnreadableError(str(tracker.problem))
    return trackers


def prune(
    root: Path, plan: Iterable[PruneRow], *, now: float, defer: bool = False
) -> tuple[list[PrunedStep], list[str]]:
    """Delete the checkpoints that a plan does not keep, unless they are leased or pinned by now. An error with one does
    not stop the others. Returns the deleted checkpoints, and problems. Times are Unix seconds.
    """
    pruned: list[PrunedStep] = []
    problems = []
    started = time.monotonic()
    for row in plan:
        if row.keep:
            continue
        try:
            if trash_checkpoint(root, row.manifest, now=now + time.monotonic() - started):
                pruned.append({"step": row.step, "reason": "; ".join(row.reasons), "freed_bytes": row.bytes})
        except (OSError, RunError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            problems.append(f"step {row.step} could not be deleted: {reason or error}")
    if not defer:
        problems += empty_trash(root)
    return pruned, problems


def _is_ours(info: CheckpointInfo) -> bool:
    """Return whether retention may decide on a folder: not if verl has saved over it, or may have begun to."""
    try:
        return info.manifest is not None and not of_verl(info.path, info.manifest)
    except OSError:
        return False


def _staged(root: Path) -> set[int]:
    folder = root / contents.STAGING
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return {int(name.partition("-")[0]) for name in names if name.partition("-")[0].isdecimal()}
