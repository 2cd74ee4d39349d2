"""The start of a program of verl's: the checkpoint that it resumes from, and the line that says where checkpoints go.

`plugin` puts these functions in place of verl's. All of verl's trainers call ``find_latest_ckpt_path`` when
`resume_mode` is ``auto``. verl's function trusts the tracker, which its trainers write before a checkpoint is whole;
ours returns the newest checkpoint that verifies, which may be a state in memory that is brought to the folder. Nothing
else on disk is changed here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from trinity_sync.checkpoint.daemon import wait_until_ended
from trinity_sync.checkpoint.folder.contents import step_dir
from trinity_sync.checkpoint.folder.resume_point import check_all_seen, find
from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.integrations.verl import memory_saves
from trinity_sync.integrations.verl.vendor import RETENTION, say

if TYPE_CHECKING:
    from trinity_sync.backends.meetings import Store

Find = Callable[..., "str | None"]
Method = Callable[..., object]

SKIP_MISSING = "TRINITY_SYNC_SKIP_MISSING"
"""Set to 1 to start although a committed checkpoint is gone or unreadable."""

_TIMEOUT_S = 4 * 3600.0
"""Timeout of the other ranks while rank 0 reads the whole checkpoint, seconds. If rank 0 dies, the launcher ends them.
"""

_ENDS_S = 60.0
"""Timeout for the monitor of an earlier start to commit what is written, seconds."""

_asked = itertools.count()


def instead_of(verls: Find) -> Find:
    """Return a replacement for verl's function, with the same arguments and result."""

    @functools.wraps(verls)
    def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
        if path is None or directory_format != "global_step_{}":
            return verls(path, directory_format)
        return _of_all_ranks(Path(path).absolute())

    return find_latest_ckpt_path


def newest(root: Path) -> Path | None:
    """Return the folder of the newest full checkpoint that verifies, or that verl itself finished; None: none was ever
    committed. Prints a line for each checkpoint that is skipped. Raises RunError.
    """
    if not root.is_dir():
        return None
    skip_missing = os.environ.get(SKIP_MISSING) == "1"
    try:
        wait_until_ended(root, timeout_s=_ENDS_S, on_wait=say)
        found = find(root, of_verl=True, skip_unreadable=skip_missing, say=say)
        if memory_saves.bring(root, found):
            found = find(root, of_verl=True, skip_unreadable=skip_missing)
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
            say(f"starting from nothing: {root} has no checkpoint to resume from, and {SKIP_MISSING}=1")
        return None
    say(f"resuming from {found.path}{'' if found.manifest is not None else '; verl wrote it, so it is not verified'}")
    return step_dir(root, found.step)


def _of_all_ranks(root: Path) -> str | None:
    """Look on rank 0 of the default group; the other ranks get its answer. Collective, as in verl's trainers."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        found = newest(root)
        return None if found is None else str(found)
    from torch.distributed.distributed_c10d import _get_default_store

    store = cast("Store", _get_default_store())
    key = f"trinity-sync/newest/{next(_asked)}"
    if dist.get_rank() == 0:
        return _told(store, key, root)
    try:
        store.wait([key], timedelta(seconds=_TIMEOUT_S))
    except (RuntimeError, ValueError) as error:  # torch raises these for a timeout
        raise WaitTimeout("rank 0", f"say which checkpoint in {root} is the newest", _TIMEOUT_S) from error
    answer = json.loads(store.get(key))
    if answer["error"] is not None:
        raise RunError(answer["error"])
    path: str | None = answer["path"]
    return path


def _told(store: Store, key: str, root: Path) -> str | None:
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


# The line that a program prints at its start. verl's trainers know the folder and the limit; its engines do not.


def announce(folder: str, limits: Iterable[object]) -> None:
    """Print the line. Called once for a trainer: by rank 0, or under Ray by verl's driver. `folder`: verl's
    ``trainer.default_local_dir``.
    """
    smallest = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
    kept = [] if smallest is None else [f"the newest {smallest}"]
    kept += os.environ.get(RETENTION, "").split()
    say(f"on: checkpoints are committed to {Path(folder).absolute()}; kept: {', '.join(kept) or 'all'}")


def register(module: ModuleType) -> None:
    """Let the trainers of one of verl's modules print the line."""
    for name, method, announced in (
        ("CheckpointHandler", "__init__", functools.partial(_of_handler, module)),
        ("PPOTrainer", "_load_checkpoint", _of_trainer),
        ("RayPPOTrainer", "_load_checkpoint", _of_trainer),
    ):
        owner = vars(module).get(name)
        if owner is not None and owner.__module__ == module.__name__:
            setattr(owner, method, announced(getattr(owner, method)))


def _of_handler(module: ModuleType, init: Method) -> Method:
    """For SFT, with torchrun and under Ray. An engine that keeps verl's manager has printed a line of its own."""

    @functools.wraps(init)
    def announced(self: Any, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        is_ours = self.mode != module.OrchestrationMode.SPMD or getattr(self.engine, "_saves", None) is not None
        if self.rank == 0 and is_ours:
            announce(self.default_local_dir, [self.max_ckpt_to_keep])

    return announced


def _of_trainer(load: Method) -> Method:
    """For PPO."""

    @functools.wraps(load)
    def announced(self: Any, *args: object, **kwargs: object) -> object:
        with contextlib.suppress(AttributeError):  # a changed trainer: the line is not worth ending the program
            trainer = self.config.trainer
            keys = ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep")[: 2 if self.use_critic else 1]
            only_newest = getattr(trainer, "remove_previous_ckpt_in_save", False)
            announce(trainer.default_local_dir, [1] if only_newest else [getattr(trainer, key, None) for key in keys])
        return load(self, *args, **kwargs)

    return announced
