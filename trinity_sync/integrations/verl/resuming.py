"""Which checkpoint a program of verl's goes on from by itself: the newest that verifies, not the one begun last.

All of verl's trainers ask ``find_latest_ckpt_path`` when `resume_mode` is ``auto``; it believes the tracker, which the
trainers write before a checkpoint is whole. Nothing on the disk is changed here.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from trinity_sync.checkpoint.daemon.service import wait_until_ended
from trinity_sync.checkpoint.folder.contents import step_dir
from trinity_sync.checkpoint.folder.resume_point import check_all_seen, find
from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.integrations.verl.vendor import say

Find = Callable[..., "str | None"]

SKIP_MISSING = "TRINITY_SYNC_SKIP_MISSING"
"""Set to 1: go on though a checkpoint that was committed is gone, or cannot be read now."""

_TIMEOUT_S = 4 * 3600.0
"""How long the others wait for rank 0, which reads the whole checkpoint. Its death ends them by their launcher."""

_ENDS_S = 60.0
"""The monitor of an earlier start has so long to commit what that has written, seconds."""

_asked = itertools.count()


def instead_of(verls: Find) -> Find:
    """Return what stands in for verl's function, of which it keeps the arguments and the answer."""

    @functools.wraps(verls)
    def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
        if path is None or directory_format != "global_step_{}":
            return verls(path, directory_format)
        return _of_all_ranks(Path(path).absolute())

    return find_latest_ckpt_path


def newest(root: Path) -> Path | None:
    """Return the folder of the newest full checkpoint that verifies, or that verl itself has finished; None: there is
    none, and none was ever committed. Says a line for each one that is passed over.

    Raises:
        RunError: one that was committed is gone, or cannot be read now, unless `SKIP_MISSING` is set; says how to go on
            without it. Or the monitor of an earlier start does not come to its end.
    """
    if not root.is_dir():
        return None
    skip_missing = os.environ.get(SKIP_MISSING) == "1"
    try:
        wait_until_ended(root, timeout_s=_ENDS_S, on_wait=say)
        found = find(root, of_verl=True, skip_unreadable=skip_missing, say=say)
        if not skip_missing:
            check_all_seen(root, found, ())
    except TrinityError as error:
        raise RunError(
            f"{error}. Nothing was changed. Start again when it can be read; or set {SKIP_MISSING}=1 to take the "
            "newest that is there; or trainer.resume_mode=disable begins with the initial weights; or (SFT and V1 "
            "trainers) name the checkpoint: trainer.resume_mode=resume_path "
            f"trainer.resume_from_path={root}/global_step_N"
        ) from error
    if found is None:
        if skip_missing:
            say(f"starting from nothing: {root} has no checkpoint to go on from, and {SKIP_MISSING}=1")
        return None
    say(f"going on from {found.path}{'' if found.manifest is not None else ', which verl wrote: it is not verified'}")
    return step_dir(root, found.step)


def _of_all_ranks(root: Path) -> str | None:
    """Rank 0 of the default group looks and tells the others: all of them have to ask, as in verl's trainers."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        found = newest(root)
        return None if found is None else str(found)
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    key = f"trinity-sync/newest/{next(_asked)}"
    if dist.get_rank() == 0:
        return _told(store, key, root)
    try:
        store.wait([key], timedelta(seconds=_TIMEOUT_S))
    except (RuntimeError, ValueError) as error:  # torch says so of a time-out, too
        raise WaitTimeout("rank 0", f"say which checkpoint in {root} is the newest", _TIMEOUT_S) from error
    answer = json.loads(store.get(key))
    if answer["error"] is not None:
        raise RunError(answer["error"])
    path: str | None = answer["path"]
    return path


def _told(store: Any, key: str, root: Path) -> str | None:
    answer: dict[str, str | None] = {"path": None, "error": "rank 0 ended while it looked for a checkpoint"}
    try:
        found = newest(root)
        answer = {"path": None if found is None else str(found), "error": None}
    except TrinityError as error:
        answer["error"] = str(error)
        raise
    finally:
        store.set(key, json.dumps(answer))
    return answer["path"]
