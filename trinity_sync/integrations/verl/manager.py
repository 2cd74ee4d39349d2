"""`FSDPCheckpointManager`: verl's checkpoint manager for FSDP, with background saves and weights for the Synchronizer.

A drop-in for verl's class of the same name: the same files in the same folders, read by verl's own loader and merger.
What differs: the trainer waits only until its state is copied; a checkpoint becomes visible when all ranks have written
it; an old checkpoint is deleted after the new one is committed; an error on one rank is raised on all of them, at once
or at the next call. See `committed_saves` for the steps of a save.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlCheckpointManager
from verl.utils.fsdp_utils import fsdp_version

from trinity_sync.backends.fsdp_state import live_state, sharded
from trinity_sync.backends.safe_loading import StateDict, nothing_runs
from trinity_sync.checkpoint.coordinator import SaveFn
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl import model_files
from trinity_sync.integrations.verl.committed_saves import (
    EXPORT,
    EXTRA,
    METADATA,
    MODEL,
    OF_FIRST_RANK,
    OPTIMIZER,
    CommittedSaves,
    SaveOptions,
)
from trinity_sync.integrations.verl.ranks import Pairs, together, use_on_first_rank
from trinity_sync.integrations.verl.reading import check_files
from trinity_sync.models.files import ModelFiles
from trinity_sync.protocol.parts import FULL, FileTuple, rank_file
from trinity_sync.weights.shard_file import write_image
from trinity_sync.weights.snapshot import Snapshot, plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trinity_sync.backends.base import FsdpEngine


class FSDPCheckpointManager(CommittedSaves, VerlCheckpointManager):
    """Usage, on every rank, where verl's own manager stood (see `use_in`)::

        manager = FSDPCheckpointManager(model=engine.module, optimizer=engine.optimizer, ..., ray_namespace="my-run")
        manager.save_state_dict(f"{root}/global_step_{step}/actor", step)       # for explorers
        manager.save_checkpoint(f"{root}/global_step_{step}/actor", step, max_ckpt_to_keep=3)
        manager.wait_on_save_thread()                                           # at the end

    All ranks make the same calls in the same order. The driver has started the actors (`open_run`).

    Args:
        *args: as for verl's class.
        **kwargs: as for verl's class, such as `trust_remote_code`.
        ray_namespace: the namespace of the run's actors; empty: Ray's own for this process.
        lazily: a save returns while the state is still being copied. Call `wait_until_copied` before the state changes
            or moves: before the optimizer's step, a load, an offload.
        opens: opens the monitor at the first save, without actors; `ray_namespace` and the Synchronizer are not used
            then.
        timeout_s: limit of every wait, seconds.

    Raises:
        ConfigError: `save_contents` asks for an export of a model with an adapter.
        RunError: there is no checkpoint monitor in the namespace.
    """

    # ---- saving

    def save_checkpoint(
        self,
        local_path: str | None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        save_as_hf: bool = False,
        *,
        hdfs_path: str | None = None,
    ) -> None:
        """Save what `save_contents` asks for. Collective; returns when the state is copied.

        Args:
            local_path: where the files are after the commit: the step's folder in the checkpoint folder or a place in
                it, such as ``ROOT/global_step_20/actor``. None: nothing is done.
            max_ckpt_to_keep: how many full checkpoints stay, of all runs; None or 0: no limit. Pinned and leased ones
                stay too. Enforced after the commit.
            save_as_hf: save the full model in Hugging Face format as well.
            hdfs_path: unused, as in verl.

        Raises:
            ConfigError, RunError: on every rank; also when an earlier save failed.
        """
        if local_path is None:
            return
        wanted = [
            name
            for name, is_wanted in (
                (MODEL, self.should_save_model),
                (METADATA, True),
                (OPTIMIZER, self.should_save_optimizer),
                (EXTRA, self.should_save_extra),
                (EXPORT, self.should_save_hf_model or save_as_hf),
            )
            if is_wanted
        ]
        self._save(local_path, global_step, FULL, wanted, max_ckpt_to_keep)
        if self.rank == 0:
            self._commits.follow(global_step, FULL, lambda _: self.register_checkpoint(local_path, max_ckpt_to_keep))

    # ---- weights in memory

    def upload_state_dict(self, global_step: int) -> None:
        """Hand the full state dict to the Synchronizer. Collective; a barrier at the end.

        Raises:
            RunError: on every rank, when rank 0 failed.
        """

        def publish(tensors: Pairs) -> None:
            if self._synchronizer is None:
                raise RunError("there is no Synchronizer in the namespace to upload to; open_run starts one")
            self._synchronizer.set_model_state_dict(tensors, global_step, attempt=self._attempt)

        use_on_first_rank(f"upload version {global_step}", model_files.full_tensors(self.model), publish)

    # ---- what differs from other engines

    def _make_copies(self, timeout_s: float, *, lazily: bool) -> FsdpCopies:
        if self.should_save_hf_model:
            model_files.check_export(self)
        return FsdpCopies(self, timeout_s, lazily=lazily)

    @property
    def _backend(self) -> str:
        return "fsdp" if fsdp_version(self.model) == 1 else "fsdp2"

    def _check(self, todo: list[str]) -> None:
        if MODEL in todo and self.model is None:
            raise ConfigError("save_contents has 'model', but the checkpoint manager was made without a model")
        if OPTIMIZER in todo and self.optimizer is None:
            raise ConfigError("save_contents has 'optimizer', but the checkpoint manager was made without an optimizer")
        if EXPORT in todo:
            model_files.check_export(self)
            model_files.class_of(self.model)

    def _check_files(self, local_path: str) -> None:
        wanted = {
            MODEL: self.should_load_model,
            OPTIMIZER: self.should_load_optimizer,
            EXTRA: self.should_load_extra,
        }
        check_files(local_path, [rank_file(name, self.world_size, self.rank) for name, load in wanted.items() if load])

    def _load_as_verl(self, local_path: str, hdfs_path: str | None, del_local_after_load: bool) -> None:
        with nothing_runs(local_path):  # verl's loader would run what is pickled in the files
            VerlCheckpointManager.load_checkpoint(self, local_path, hdfs_path, del_local_after_load)


def use_in(engine: FsdpEngine, ray_namespace: str = "", **kwargs: Unpack[SaveOptions]) -> FSDPCheckpointManager:
    """Put our manager into an initialised verl FSDP engine, so that the engine's `save_checkpoint` and
    `load_checkpoint` use it. On every rank.

    Args:
        engine: verl's `FSDPEngine`.
        ray_namespace: the namespace of the run's actors.
        kwargs: more arguments of `FSDPCheckpointManager`.
    """
    manager = FSDPCheckpointManager(
        model=engine.module,
        optimizer=engine.optimizer,
        lr_scheduler=engine.lr_scheduler,
        processing_class=engine.model_config.get_processor(),
        checkpoint_config=engine.checkpoint_config,
        trust_remote_code=engine.model_config.trust_remote_code,
        ray_namespace=ray_namespace,
        **kwargs,
    )
    engine.checkpoint_manager = manager
    return manager


class FsdpCopies:
    """The state of verl's checkpoint manager, copied for one save after another; see `SaveCopies`. `timeout_s`: limit
    of the wait for a copy, seconds.
    """

    def __init__(self, manager: VerlCheckpointManager, timeout_s: float, *, lazily: bool) -> None:
        self._manager = manager
        self._timeout_s = timeout_s
        self._lazily = lazily
        self._copy = StateCopy()
        if manager.rank == 0 and manager.model is not None:
            model_files.metadata(manager)  # before anything is trained

    def take(self, step: int, todo: list[str], folder: Path, staging: Path, *, durable: bool) -> dict[str, SaveFn]:
        together(f"copy the state of step {step}", lambda: self._take(step, todo))
        found: dict[str, SaveFn] = {
            name: self._copy.writer(self._file(name), folder, staging, durable=durable, timeout_s=self._timeout_s)
            for name in todo
            if name not in OF_FIRST_RANK
        }
        if self._manager.rank == 0 and METADATA in todo:
            small = model_files.metadata(self._manager)
            if EXPORT in todo:
                small = model_files.of_export(
                    small, model_files.HUGGING_FACE, next(self._manager.model.parameters()).dtype
                )
            found[METADATA] = lambda: ModelFiles(small).write(folder)
        if EXPORT in todo:
            tensors = model_files.full_tensors(self._manager.model)
            export = use_on_first_rank(f"gather the model of step {step}", tensors, self._export)
            if export is not None:
                empty, weights = export
                found[EXPORT] = lambda: model_files.write_export(empty, weights, folder / model_files.HUGGING_FACE)
        return found

    def give_up(self, name: str, error: BaseException) -> None:
        self._copy.let_go(self._file(name))  # no rank waits: each writes its own files

    def wait_until_copied(self) -> None:
        self._copy.wait_until_copied(self._timeout_s)

    def _take(self, step: int, todo: list[str]) -> None:
        live = {self._file(name): value for name, value in self._live(todo).items()}
        # Last, as it competes for the processor with the code after it.
        self._copy.take(live, f"the state of step {step}", lazily=self._lazily)

    def _live(self, todo: list[str]) -> StateDict:
        """This rank's contents by name, for `torch.save`. Collective."""
        manager = self._manager
        wanted = manager.model if MODEL in todo else None, manager.optimizer if OPTIMIZER in todo else None
        offload = torch.cuda.is_available()
        with sharded(manager.model, offload=offload) if manager.model is not None else nullcontext():
            model, optimizer = live_state(*wanted)
        live: StateDict = {}
        if MODEL in todo:
            live[MODEL] = self._chosen(model)
        if OPTIMIZER in todo:
            live[OPTIMIZER] = optimizer
        if EXTRA in todo:
            scheduler = copy.deepcopy(manager.lr_scheduler.state_dict()) if manager.lr_scheduler is not None else None
            live[EXTRA] = {"lr_scheduler": scheduler, "rng": manager.get_rng_state()}
        return live

    def _chosen(self, state: StateDict) -> StateDict:
        if not (self._manager.should_save_lora_only and self._manager._has_lora()):
            return state
        chosen = {name: value for name, value in state.items() if "lora_" in name or ".adapter_" in name}
        if not chosen:
            raise ConfigError("save_lora_only is set and the model has adapters, but none of its tensors is one")
        return chosen

    def _export(self, tensors: Pairs) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
        dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
        return model_files.empty_model(self._manager.model, dtype), state

    def _file(self, name: str) -> str:
        return rank_file(name, self._manager.world_size, self._manager.rank)


class StateCopy:
    """Copies of a rank's state, one at a time, for files that are written while training goes on.

    The memory is kept from copy to copy, as fresh pages would cost more than the copy. The live tensors are not kept:
    an engine that offloads replaces them, and the old ones have to be freed.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._snapshot: Snapshot | None = None

    def take(self, files: Mapping[str, object], what: str, *, lazily: bool = False) -> None:
        """Copy a state, over the copy before. `what`: for errors, such as ``"the state of step 3"``."""
        planned = plan(files)
        if self._memory is None or len(self._memory) < planned.nbytes:
            self._snapshot, self._memory = None, mmap.mmap(-1, max(planned.nbytes, mmap.PAGESIZE))
        self._snapshot = Snapshot(planned, self._memory, what)
        self._snapshot.copy(in_background=lazily)

    def wait_until_copied(self, timeout_s: float) -> None:
        """Block until the state may change. Errors of the copy are raised by its writers. Raises WaitTimeout."""
        if self._snapshot is not None:
            self._snapshot.wait_until_copied(timeout_s)

    def let_go(self, name: str) -> None:
        """Release a file's live tensors; its writer will not be called."""
        if self._snapshot is not None:
            self._snapshot.let_go(name)

    def writer(
        self, name: str, folder: Path, staging: Path, *, durable: bool, timeout_s: float
    ) -> Callable[[], list[FileTuple]]:
        """Return a function, to be called once, that writes one file of the copy into `folder`, as `torch.save` would,
        and returns its entry. `timeout_s`: limit of the wait for the copy, seconds.
        """
        snapshot, memory = self._snapshot, self._memory
        assert snapshot is not None
        assert memory is not None

        def write() -> list[FileTuple]:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (image,) = snapshot.file_images(folder, timeout_s, {name})
            finally:
                snapshot.let_go(name)
            path = Path(image.path)
            size, digest = write_image(path, image.extents, memory, durable=durable)
            return [(path.relative_to(staging).as_posix(), size, digest)]

        return write
