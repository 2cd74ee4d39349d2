"""Checks and leases of a checkpoint that a verl program is about to read or copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from verl.utils.fs import is_non_local

from trinity_sync.checkpoint.folder.contents import MANIFEST, step_dir, step_of
from trinity_sync.checkpoint.folder.leases import lease_checkpoint
from trinity_sync.errors import RunError, TrinityError

_LEASE_S = 300.0
"""Expiry of a renewed lease, seconds."""

_RENEW_S = 60.0


def check_files(local_path: str, names: Sequence[str]) -> None:
    """Check that this rank's files are there; a path that is not local is not checked. Raises RunError: a file is
    missing; says which, and what is there instead.
    """
    if is_non_local(local_path):
        return
    missing = [name for name in names if not (Path(local_path) / name).is_file()]
    if missing:
        others = sorted({path.name.split("_rank_")[0] for path in Path(local_path).glob("model_world_size_*.pt")})
        found = f"; it has {', '.join(others)}; load it with so many ranks" if others else ""
        raise RunError(f"{local_path} has no {', '.join(missing)}{found}")


def hold(root: Path | None, local_path: str, holder: str, seconds: float, stack: ExitStack) -> None:
    """Lease the checkpoint until `stack` is closed, so that it is not deleted meanwhile. `seconds`: expiry if this
    process dies.
    """
    step = step_at(root, local_path)
    if step is not None and root is not None and (step_dir(root, step) / MANIFEST).exists():
        stack.enter_context(lease_checkpoint(root, step, reader=holder, seconds=seconds))


@contextmanager
def held_throughout(root: Path | None, local_path: str, holder: str) -> Iterator[None]:
    """Lease the checkpoint inside the block, renewed in the background; the lease expires soon if this process dies.
    Raises RunError.
    """
    step = step_at(root, local_path)
    if root is None or step is None or not (step_dir(root, step) / MANIFEST).exists():
        yield
        return
    done, failed = threading.Event(), list[Exception]()
    with lease_checkpoint(root, step, reader=holder, seconds=_LEASE_S) as lease:

        def renew() -> None:
            while not done.wait(_RENEW_S):
                try:
                    lease.renew(_LEASE_S)
                    failed.clear()
                except (OSError, TrinityError) as error:
                    failed[:] = [error]

        renewing = threading.Thread(target=renew, name=f"lease-{step}", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            done.set()
            renewing.join()
    if failed:
        raise RunError(f"{local_path} could not be held for {holder}: {failed[0]}") from failed[0]


def step_at(root: Path | None, local_path: str) -> int | None:
    """Return the step of a place in the run's checkpoint folder; None for any other place."""
    if root is None:
        return None
    path = Path(local_path).absolute()
    for folder in (path, *path.parents):
        step = step_of(folder.name)
        if step is not None and folder == step_dir(root, step):
            return step if folder.is_dir() else None
    return None
