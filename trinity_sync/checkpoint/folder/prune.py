"""Retention on disk: what the policies say about a checkpoint folder, and doing it. For monitor and ``ckpt prune``."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.checkpoint.folder import leases
from trinity_sync.checkpoint.folder.catalog import CheckpointInfo, scan
from trinity_sync.checkpoint.folder.contents import STAGING, Manifest, TrackerFile, UnreadableError, read_tracker
from trinity_sync.checkpoint.folder.deletion import empty_trash, of_verl, trash_checkpoint
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL, KINDS, Kind
from trinity_sync.protocol.retention import CheckpointFacts, Policy, decide


@dataclass(frozen=True, slots=True)
class PruneRow:
    """One line of a plan: a committed checkpoint, whether it stays, and why.

    Args:
        reasons: the policies, or what else keeps it; for one that goes, why it does.
        warnings: sentences for the user; they come with the newest checkpoint only.
    """

    manifest: Manifest
    path: Path
    keep: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Its step."""
        return self.manifest.step

    @property
    def kind(self) -> Kind:
        """``full`` or ``state_dict``."""
        return self.manifest.kind

    @property
    def bytes(self) -> int:
        """What deleting it frees."""
        return self.manifest.bytes


@dataclass(frozen=True, slots=True)
class Pruned:
    """A checkpoint that was deleted, as the event ``prune`` tells it."""

    step: int
    reason: str
    freed_bytes: int


def prune_plan(
    root: Path,
    policies: Collection[Policy],
    *,
    now: float,
    keep_state_dicts: int = 2,
    saving: Iterable[int] = (),
) -> list[PruneRow]:
    """Decide what the policies keep of the checkpoints in a folder. Deletes nothing.

    Args:
        policies: the retention policies.
        now: Unix seconds.
        keep_state_dicts: how many of the newest weights-only checkpoints stay.
        saving: steps that are being saved; those with a staging folder count too.

    Returns:
        One row per checkpoint, oldest first.

    Raises:
        UnreadableError: the folder or a tracker cannot be read now, or the tracker that verl writes, too, holds no step
            where verl has saved; so nobody knows what has to stay.
    """
    # Before the folders, for what verl has finished, and after them, for what must not go: they move meanwhile.
    before = _trackers(root)
    full = before[FULL]
    found = scan(root, full)
    trackers = [*before.values(), *_trackers(root).values()]
    if full.problem is not None and any(info.state == "verl" for info in found):
        raise UnreadableError(f"{full.problem}, so nobody knows which of verl's checkpoints are finished")
    infos = {info.step: (info.path, info.manifest) for info in found if info.manifest is not None and _is_ours(info)}
    pins, leased = leases.pinned(root), leases.leased(root, now=now)
    busy = set(saving) | _staged(root)
    # A tracker stays behind a commit for a moment, or for longer where the disk refuses to take it.
    named = {tracker.step for tracker in trackers}
    facts = [
        facts_of(manifest, pins, leased=(step, manifest.attempt) in leased, saving=step in busy, named=step in named)
        for step, (_, manifest) in infos.items()
    ]
    return [
        PruneRow(infos[of.step][1], infos[of.step][0], of.keep, of.reasons, of.warnings)
        for of in decide(facts, policies, now, keep_state_dicts=keep_state_dicts)
    ]


def facts_of(manifest: Manifest, pins: Collection[tuple[int, int]], **states: bool) -> CheckpointFacts:
    """Return what the policies need to know of a checkpoint; `states`: it is leased, being saved or named."""
    return CheckpointFacts(
        step=manifest.step,
        kind=manifest.kind,
        created=manifest.created,
        bytes=manifest.bytes,
        metrics=manifest.metrics,
        pinned=(manifest.step, manifest.attempt) in pins,
        **states,
    )


def _trackers(root: Path) -> dict[Kind, TrackerFile]:
    trackers = {kind: read_tracker(root, kind) for kind in KINDS}
    for tracker in trackers.values():
        if tracker.unreadable:
            raise UnreadableError(str(tracker.problem))
    return trackers


def prune(root: Path, plan: Iterable[PruneRow], *, now: float, defer: bool = False) -> tuple[list[Pruned], list[str]]:
    """Delete what a plan gives up; what was leased or pinned since stays. One that resists does not stop the others.

    Args:
        plan: what `prune_plan` returned.
        now: Unix seconds.
        defer: only put them out of sight; the caller frees the bytes with `trash.empty_trash`.

    Returns:
        What was deleted, and what went wrong.
    """
    pruned, problems = [], []
    started = time.monotonic()
    for row in plan:
        if row.keep:
            continue
        try:
            if trash_checkpoint(root, row.manifest, now=now + time.monotonic() - started):
                pruned.append(Pruned(row.step, "; ".join(row.reasons), row.bytes))
        except (OSError, RunError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            problems.append(f"step {row.step} could not be deleted: {reason or error}")
    if not defer:
        problems += empty_trash(root)
    return pruned, problems


def _is_ours(info: CheckpointInfo) -> bool:
    """Return whether retention is to decide on a folder: not on what verl has begun to save over, or may have."""
    try:
        return info.manifest is not None and not of_verl(info.path, info.manifest)
    except OSError:
        return False


def _staged(root: Path) -> set[int]:
    folder = root / STAGING
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return {int(name.partition("-")[0]) for name in names if name.partition("-")[0].isdecimal()}
