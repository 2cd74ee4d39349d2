"""Retention on disk: what the policies say about a checkpoint folder, and doing it. For monitor and ``ckpt prune``."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.checkpoint import holds
from trinity_sync.checkpoint.layout import STAGING, TRASH_PREFIX
from trinity_sync.checkpoint.store import CheckpointInfo, purge, scan
from trinity_sync.protocol.parts import Kind
from trinity_sync.protocol.retention import CheckpointFacts, Policy, decide


@dataclass(frozen=True, slots=True)
class PruneRow:
    """One line of a plan: a committed checkpoint, whether it stays, and why.

    Args:
        bytes: what deleting it frees.
        warnings: for the user, with the newest checkpoint only.
    """

    step: int
    attempt: int
    kind: Kind
    bytes: int
    path: Path
    keep: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


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
    """What the policies decide for the checkpoints in a folder, oldest first. Deletes nothing.

    Args:
        now: Unix seconds.
        saving: steps that are being saved; those with a staging folder count too.
    """
    infos = {info.step: info for info in scan(root) if info.manifest is not None}
    pins, leases = holds.pinned(root), holds.leased(root, now=now)
    busy = set(saving) | _staged(root)
    facts = [_facts(info, pins, leases, busy) for info in infos.values()]
    rows = []
    for decision in decide(facts, policies, now, keep_state_dicts=keep_state_dicts):
        info = infos[decision.step]
        assert info.manifest is not None
        manifest = info.manifest
        rows.append(
            PruneRow(
                info.step,
                manifest.attempt,
                manifest.kind,
                manifest.bytes,
                info.path,
                decision.keep,
                decision.reasons,
                decision.warnings,
            )
        )
    return rows


def prune(root: Path, plan: Iterable[PruneRow], *, now: float, defer: bool = False) -> list[Pruned]:
    """Delete what a plan gives up; what was leased or pinned since stays.

    Args:
        defer: only put them out of sight; the caller removes the bytes with `store.purge`.
    """
    pruned = []
    for row in plan:
        if not row.keep and remove_checkpoint(root, row.path, row.step, row.attempt, now=now):
            pruned.append(Pruned(row.step, "; ".join(row.reasons), row.bytes))
    if not defer:
        purge(root)
    return pruned


def remove_checkpoint(root: Path, path: Path, step: int, attempt: int, *, now: float) -> bool:
    """Put a checkpoint out of sight with one rename; False where it is gone, or where somebody holds it after all."""
    trash = root / f"{TRASH_PREFIX}{path.name}-{secrets.token_hex(4)}"
    try:
        path.rename(trash)
    except FileNotFoundError:
        return False
    # Looked at after the rename: a reader writes its lease first and looks for the folder afterwards.
    if (step, attempt) in holds.leased(root, now=now) | holds.pinned(root):
        trash.rename(path)
        return False
    return True


def _facts(
    info: CheckpointInfo, pins: Collection[tuple[int, int]], leases: Collection[tuple[int, int]], busy: Collection[int]
) -> CheckpointFacts:
    assert info.manifest is not None
    key = (info.step, info.manifest.attempt)
    return CheckpointFacts(
        step=info.step,
        kind=info.manifest.kind,
        created=info.manifest.created,
        bytes=info.manifest.bytes,
        metrics=info.manifest.metrics,
        pinned=key in pins,
        leased=key in leases,
        saving=info.step in busy,
    )


def _staged(root: Path) -> set[int]:
    folder = root / STAGING
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return {int(name.partition("-")[0]) for name in names if name.partition("-")[0].isdecimal()}
