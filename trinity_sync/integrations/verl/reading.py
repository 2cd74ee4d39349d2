"""A checkpoint that is about to be read: which step it is, whether this rank's files are there, and that it stays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from verl.utils.fs import is_non_local

from trinity_sync.checkpoint.layout import MANIFEST, step_dir, step_of
from trinity_sync.checkpoint.leases import lease_checkpoint
from trinity_sync.errors import RunError


def check_files(local_path: str, names: Sequence[str]) -> None:
    """Check that this rank's files are there; nothing of a path that is not local.

    Raises:
        RunError: one is missing; says which, and what is there instead.
    """
    if is_non_local(local_path):
        return
    missing = [name for name in names if not (Path(local_path) / name).is_file()]
    if missing:
        others = sorted({path.name.split("_rank_")[0] for path in Path(local_path).glob("model_world_size_*.pt")})
        found = f"; what is there is {', '.join(others)}, which a group of so many ranks loads" if others else ""
        raise RunError(f"{local_path} has no {', '.join(missing)}{found}")


def hold(root: Path | None, local_path: str, holder: str, seconds: float, held: ExitStack) -> None:
    """Lease the checkpoint until `held` is closed, so that nobody deletes it meanwhile.

    Args:
        root: the checkpoint folder of the run, None where it has none.
        local_path: a place in the step's folder. What verl itself wrote has no manifest, and nobody deletes it.
        holder: who reads it, for others to see.
        seconds: how long it stays if this process dies.
        held: is given the lease.
    """
    step = step_at(root, local_path)
    if step is not None and root is not None and (step_dir(root, step) / MANIFEST).exists():
        held.enter_context(lease_checkpoint(root, step, reader=holder, seconds=seconds))


def step_at(root: Path | None, local_path: str) -> int | None:
    """The step of a checkpoint in the run's folder; None for any other place."""
    if root is None:
        return None
    path = Path(local_path).absolute()
    for folder in (path, *path.parents):
        step = step_of(folder.name)
        if step is not None and folder == step_dir(root, step):
            return step if folder.is_dir() else None
    return None
