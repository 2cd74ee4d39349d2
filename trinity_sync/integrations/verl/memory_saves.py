"""States in memory of a verl program (`MEMORY_INTERVAL`): saves of verl's own trainer into a folder in shared memory.

The trainer saves more often than its `save_freq` asks for, and the saves between those go to the folder, which has a
monitor of its own. So verl's own code saves all that a resume needs. The next start of the program on the same
checkpoint folder brings a newer state there, before verl looks for a checkpoint.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from trinity_sync.checkpoint.folder.catalog import CheckpointInfo
from trinity_sync.checkpoint.folder.contents import write_tracker
from trinity_sync.checkpoint.folder.lock import locked
from trinity_sync.checkpoint.folder.owner import Owner, adopt, read_mark
from trinity_sync.checkpoint.memory_states import MemoryStates, states_folder, states_path
from trinity_sync.errors import ConfigError, WaitTimeout
from trinity_sync.host.process import replaced
from trinity_sync.integrations.verl.vendor import MEMORY_INTERVAL, SHM_DIR, say
from trinity_sync.protocol.parts import FULL
from trinity_sync.weights.slots import DEFAULT_ROOT, remove_stale

Method = Callable[..., object]
Trainer: TypeAlias = Any  # verl's have no types


def memory_interval() -> int:
    """Return the steps between states in memory; 0: none are kept. Raises ConfigError."""
    text = os.environ.get(MEMORY_INTERVAL, "0")
    if not text.isdecimal():
        raise ConfigError(f"{MEMORY_INTERVAL}={text} has to be a whole number of steps; 0: no states in memory")
    return int(text)


def shm_dir() -> Path:
    """Return the place of states in memory. Raises ConfigError."""
    place = Path(os.environ.get(SHM_DIR, DEFAULT_ROOT)).absolute()
    if not place.is_dir():
        raise ConfigError(f"{SHM_DIR}={place} has to be a folder in memory")
    return place


def bring(root: Path, newest: CheckpointInfo | None) -> bool:
    """Make the state that a dead program has left in memory a checkpoint, if it is newer than the newest one. Raises
    ConfigError, RunError: another program uses the folder.
    """
    mark = read_mark(root) if memory_interval() else None
    if mark is None:
        return False
    try:
        with locked(root, root), states_folder(root, shm_dir()) as kept:
            step = MemoryStates(kept, mark, MEMORY_INTERVAL).bring(root, newest)
            if step is not None:
                write_tracker(root, FULL, step)
                kept.stays = False
    except (OSError, WaitTimeout) as error:
        say(f"states in memory cannot be looked for ({MEMORY_INTERVAL}): {error}")
        return False
    return step is not None


@dataclass(frozen=True, kw_only=True)
class SaveSchedule:
    """The saves of a program: which go to disk, and which to memory."""

    save_freq: int  # verl's
    interval: int
    last: int  # the last step

    @property
    def every(self) -> int:
        """Steps between saves of any kind."""
        return math.gcd(self.save_freq, self.interval)

    def is_on_disk(self, step: int) -> bool:
        return step >= self.last or step % self.save_freq == 0

    def is_in_memory(self, step: int) -> bool:
        return not self.is_on_disk(step) and step % self.interval == 0


def register(module: ModuleType) -> None:
    """Let the trainers of one of verl's modules keep states in memory."""
    for name, method, keeping in (
        ("SFTTrainer", "fit", _of_sft),
        ("PPOTrainer", "fit", _of_ppo),
        ("RayPPOTrainer", "init_workers", _not_of),
        ("CheckpointHandler", "__init__", _of_handler),
    ):
        owner = vars(module).get(name)
        if owner is not None and owner.__module__ == module.__name__:
            setattr(owner, method, keeping(getattr(owner, method)))


def _of_handler(init: Method) -> Method:
    """Find the trainer of a program that is started by ``-m``, which no hook on verl's modules sees."""

    @functools.wraps(init)
    def found(self: object, *args: object, **kwargs: object) -> None:
        trainer = vars(sys.modules["__main__"]).get("SFTTrainer")
        if trainer is not None and trainer.__module__ == "__main__" and not hasattr(trainer.fit, "__wrapped__"):
            trainer.fit = _of_sft(trainer.fit)
        init(self, *args, **kwargs)

    return found


def _of_sft(fit: Method) -> Method:
    @functools.wraps(fit)
    def kept(self: Trainer) -> object:
        if not memory_interval():
            return fit(self)
        handler = self.ckpt_handler
        spmd = handler.mode.name == "SPMD"
        if spmd and getattr(handler.engine, "_saves", None) is None:
            say(f"{MEMORY_INTERVAL} is not used: verl saves the checkpoints of this engine itself")
            return fit(self)
        _check_nodes(self.config.trainer.nnodes)
        schedule = _schedule(self.save_freq, self.total_training_steps)
        save = handler.save_checkpoint
        if spmd:
            import torch.distributed as dist

            dist.barrier()  # the checkpoint folder is made now: another rank may still look whether there is one

        def save_checkpoint(step: int) -> None:
            if schedule.is_on_disk(step):
                save(step)
            elif schedule.is_in_memory(step):
                with replaced(handler, default_local_dir=str(memory), default_hdfs_dir=None, max_ckpt_to_keep=1):
                    save(step)

        with (
            _program_states(handler.default_local_dir, owns=handler.rank == 0) as memory,
            replaced(self, save_freq=schedule.every),
            replaced(handler, save_checkpoint=save_checkpoint),
        ):
            return fit(self)

    return kept


def _of_ppo(fit: Method) -> Method:
    """For the V1 trainer."""

    @functools.wraps(fit)
    def kept(self: Trainer, *args: object, **kwargs: object) -> object:
        if not memory_interval():
            return fit(self, *args, **kwargs)
        from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

        _check_nodes(self.config.trainer.nnodes)
        trainer = self.config.trainer
        schedule = _schedule(trainer.save_freq, self.total_training_steps)
        save = self._save_checkpoint

        def save_checkpoint() -> None:
            if schedule.is_on_disk(self.global_steps):
                save()
            elif schedule.is_in_memory(self.global_steps):
                limits = {"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": 1}
                with (
                    replaced(trainer, default_local_dir=str(memory), default_hdfs_dir=None, **limits),
                    replaced(self, checkpoint_callback=CheckpointCallback(self.config)),
                ):
                    save()

        with (
            _program_states(trainer.default_local_dir, owns=True) as memory,
            replaced(trainer, save_freq=schedule.every),
            replaced(self, _save_checkpoint=save_checkpoint),
        ):
            return fit(self, *args, **kwargs)

    return kept


def _not_of(init_workers: Method) -> Method:
    @functools.wraps(init_workers)
    def said(self: object, *args: object, **kwargs: object) -> object:
        if memory_interval():
            say(f"{MEMORY_INTERVAL} is not used: this trainer keeps no states in memory; those of SFT and V1 do")
        return init_workers(self, *args, **kwargs)

    return said


def _schedule(save_freq: object, last: int) -> SaveSchedule:
    if not isinstance(save_freq, int) or save_freq <= 0:
        raise ConfigError(f"{MEMORY_INTERVAL} needs checkpoints on disk, but trainer.save_freq={save_freq}")
    return SaveSchedule(save_freq=save_freq, interval=memory_interval(), last=last)


def _check_nodes(nodes: int) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    nodes = max(nodes, world // int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    if nodes > 1:
        raise ConfigError(
            f"{MEMORY_INTERVAL}: states in memory are for programs on one machine, this one has {nodes} nodes; unset it"
        )


@contextmanager
def _program_states(checkpoints: str, *, owns: bool) -> Iterator[Path]:
    """Make the folder of the states, which outlives a program that dies or fails. `owns`: in this process; others of
    the program only name it.
    """
    root = Path(checkpoints).absolute()
    if not owns:
        yield states_path(root, shm_dir())
        return
    with states_folder(root, shm_dir()) as kept:
        remove_stale(shm_dir())
        states = MemoryStates(kept, Owner.new(adopt(root), root), MEMORY_INTERVAL)
        with states.attempt(0):
            pass  # the monitor of the states locks their folder
        kept.stays = True  # also after an error
        yield states.root
        kept.stays = False
