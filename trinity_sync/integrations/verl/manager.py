"""`FSDPCheckpointManager`: verl's checkpoint manager, with saves in the background and weights for the Synchronizer.

A drop-in for verl's class of the same name in a program of its own: the same files in the same folders, read by verl's
own loader and merger. What differs: the trainer waits for a copy of the state only; a folder becomes visible when all
ranks have written and never before; an old checkpoint goes after the new one is committed; what fails on one rank is
raised on all of them, at once or at the next call. See `saves` for the way of a save.
"""

from __future__ import annotations

import copy
import json
import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlCheckpointManager
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPConfig
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import (
    fsdp_version,
    load_fsdp_model_to_gpu,
    offload_fsdp_model_to_cpu,
)

from trinity_sync.backends.fsdp_state import apart_from_buffers, optimizer_state, sharded
from trinity_sync.backends.safe_loading import nothing_runs
from trinity_sync.checkpoint.coordinator import SaveFn
from trinity_sync.checkpoint.export import plan_files, write_file, write_index
from trinity_sync.checkpoint.reading import TensorInfo
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl import interfaces
from trinity_sync.integrations.verl.committed_saves import CommittedSaves
from trinity_sync.integrations.verl.engine_weights import Pairs
from trinity_sync.integrations.verl.interfaces import OpensMonitor
from trinity_sync.integrations.verl.model_files import model_files
from trinity_sync.integrations.verl.ranks import together, use_on_first_rank
from trinity_sync.integrations.verl.reading import check_files
from trinity_sync.models.files import CONFIG, ModelFiles
from trinity_sync.models.indexed_file import INDEX
from trinity_sync.protocol.parts import FULL, FileTuple
from trinity_sync.weights.shard_file import write_image
from trinity_sync.weights.snapshot import Snapshot, plan
from trinity_sync.weights.tensors import from_torch, saved_list

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trinity_sync.backends.engine_types import FsdpEngine
    from trinity_sync.integrations.verl.engine_weights import Pairs


class FSDPCheckpointManager(CommittedSaves, VerlCheckpointManager):
    """Usage, on every rank, where verl's own manager stood (see `use_in`)::

        manager = FSDPCheckpointManager(model=engine.module, optimizer=engine.optimizer, ..., ray_namespace="my-run")
        manager.save_state_dict(f"{root}/global_step_{step}/actor", step)       # for explorers
        manager.save_checkpoint(f"{root}/global_step_{step}/actor", step, max_ckpt_to_keep=3)
        manager.wait_on_save_thread()                                           # at the end

    All ranks make the same calls in the same order. The driver has started the actors (`open_run`).

    Args:
        *args: as for verl's class.
        **kwargs: as for verl's class.
        ray_namespace: the namespace of the run's actors; empty: Ray's own for this process.
        lazily: a save returns while the state is still being copied, and whoever changes it (the optimizer's step, a
            load, what moves it elsewhere) calls `wait_until_copied` before.
        opens: opens the monitor at the first save, without any actors; `ray_namespace` is not used then, and there is
            no Synchronizer.
        trust_remote_code: passed on when Hugging Face configs and models are made.
        timeout_s: limit of every wait, seconds.

    Raises:
        ConfigError: `save_contents` asks for an export of a model with an adapter.
        RunError: there is no checkpoint monitor in the namespace.
    """

    def __init__(
        self,
        *args: object,
        ray_namespace: str = "",
        opens: OpensMonitor | None = None,
        lazily: bool = False,
        trust_remote_code: bool = False,
        timeout_s: float = 1800.0,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, trust_remote_code=trust_remote_code, **kwargs)
        if self.should_save_hf_model:
            check_export(self)
        self._start_saves(FsdpCopies(self, timeout_s, lazily=lazily), opens or ray_namespace, timeout_s)

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
            max_ckpt_to_keep: how many full checkpoints stay, whoever wrote them; None or 0: no limit. A pinned or
                leased one stays beside them. Enforced after the commit.
            save_as_hf: the full model in Hugging Face format as well.
            hdfs_path: taken for verl's sake and not used, as in verl.

        Raises:
            ConfigError, RunError: on every rank; also for what an earlier save failed of.
        """
        if local_path is None:
            return
        wanted = [
            name
            for name, asked in (
                (interfaces.MODEL, self.should_save_model),
                (interfaces.METADATA, True),
                (interfaces.OPTIMIZER, self.should_save_optimizer),
                (interfaces.EXTRA, self.should_save_extra),
                (interfaces.EXPORT, self.should_save_hf_model or save_as_hf),
            )
            if asked
        ]
        self._save(local_path, global_step, FULL, wanted, max_ckpt_to_keep)
        if self.rank == 0:
            self._commits.follow(global_step, FULL, lambda _: self.register_checkpoint(local_path, max_ckpt_to_keep))

    # ---- weights in memory

    def upload_state_dict(self, global_step: int) -> None:
        """Hand the full state dict to the Synchronizer. Collective; a barrier at the end.

        Raises:
            RunError: on every rank, where rank 0 could not.
        """

        def publish(tensors: Pairs) -> None:
            if self._synchronizer is None:
                raise RunError("there is no Synchronizer in the namespace to upload to; open_run starts one")
            self._synchronizer.set_model_state_dict(tensors, global_step, attempt=self._attempt)

        use_on_first_rank(f"upload version {global_step}", full_tensors(self.model), publish)

    # ---- what differs from other engines

    @property
    def _backend(self) -> str:
        return "fsdp" if fsdp_version(self.model) == 1 else "fsdp2"

    def _check(self, todo: list[str]) -> None:
        if interfaces.MODEL in todo and self.model is None:
            raise ConfigError("save_contents has 'model', but the checkpoint manager was made without a model")
        if interfaces.OPTIMIZER in todo and self.optimizer is None:
            raise ConfigError("save_contents has 'optimizer', but the checkpoint manager was made without an optimizer")
        if interfaces.EXPORT in todo:
            check_export(self)
            class_of(self.model)

    def _check_files(self, local_path: str) -> None:
        wanted = {
            interfaces.MODEL: self.should_load_model,
            interfaces.OPTIMIZER: self.should_load_optimizer,
            interfaces.EXTRA: self.should_load_extra,
        }
        names = [interfaces.file(name, self.world_size, self.rank) for name, load in wanted.items() if load]
        check_files(local_path, names)

    def _load_as_verl(self, local_path: str, hdfs_path: str | None, del_local_after_load: bool) -> None:
        """Load with verl's own code, which would run what is pickled in the files."""
        with nothing_runs(local_path):
            VerlCheckpointManager.load_checkpoint(self, local_path, hdfs_path, del_local_after_load)


def use_in(engine: FsdpEngine, ray_namespace: str = "", **kwargs: Any) -> FSDPCheckpointManager:
    """Put our manager into an initialised verl FSDP engine, so that its own `save_checkpoint` and `load_checkpoint`
    go through it. On every rank.

    Args:
        engine: verl's `FSDPEngine`.
        ray_namespace: the namespace of the run's actors.
        kwargs: what else `FSDPCheckpointManager` takes.
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


# What a rank is to write of a save, copied from verl's checkpoint manager, and the functions that write it.


def check_export(manager: VerlCheckpointManager) -> None:
    """Check that a manager's model can be saved in Hugging Face format.

    Raises:
        ConfigError: it cannot.
    """
    if manager._has_lora():
        raise ConfigError(
            "hf_model in save_contents (save_as_hf) of a model with a LoRA adapter is not a model that anybody loads; "
            "leave it out, and export with verl's merger or, saved with save_lora_only, `trinity-sync ckpt export`"
        )


class FsdpCopies:
    """Copies of one save after another, in memory that is kept.

    Args:
        manager: verl's checkpoint manager, with the model and what trains it.
        timeout_s: limit of the wait for a copy, seconds.
        lazily: see `interfaces.Copies`.
    """

    def __init__(self, manager: VerlCheckpointManager, timeout_s: float, *, lazily: bool) -> None:
        self._manager = manager
        self._timeout_s = timeout_s
        self._lazily = lazily
        self._copy = StateCopy()
        if manager.rank == 0 and manager.model is not None:
            metadata(manager)  # before anything is trained

    def take(self, step: int, todo: list[str], folder: Path, staging: Path, *, durable: bool) -> dict[str, SaveFn]:
        """See `interfaces.Copies`."""
        rank = self._manager.rank
        together(f"copy the state of step {step}", lambda: self._take(step, todo))
        found: dict[str, SaveFn] = {
            name: self._copy.writer(self._file(name), folder, staging, durable=durable, timeout_s=self._timeout_s)
            for name in todo
            if name not in interfaces.OF_FIRST_RANK
        }
        if rank == 0 and interfaces.METADATA in todo:
            small = metadata(self._manager)
            if interfaces.EXPORT in todo:
                small = of_export(small, HUGGING_FACE, next(self._manager.model.parameters()).dtype)
            found[interfaces.METADATA] = lambda: ModelFiles(small).write(folder)
        if interfaces.EXPORT in todo:
            tensors = full_tensors(self._manager.model)
            export = use_on_first_rank(f"gather the model of step {step}", tensors, self._export)
            if export is not None:
                empty, weights = export
                found[interfaces.EXPORT] = lambda: write_export(empty, weights, folder / HUGGING_FACE)
        return found

    def give_up(self, name: str, error: BaseException) -> None:
        """See `interfaces.Copies`. Nobody waits: each rank writes its own files."""
        self._copy.let_go(self._file(name))

    def wait_until_copied(self) -> None:
        """See `interfaces.Copies`."""
        self._copy.wait_until_copied(self._timeout_s)

    def _take(self, step: int, todo: list[str]) -> None:
        live = {self._file(name): value for name, value in self._live(todo).items()}
        # Last: what comes after it shares the processor with it.
        self._copy.take(live, f"the state of step {step}", lazily=self._lazily)

    def _live(self, todo: list[str]) -> dict[str, object]:
        """What each rank writes of these contents, by name, as `torch.save` takes it. Collective."""
        manager = self._manager
        live: dict[str, object] = {}
        offload = torch.cuda.is_available()
        with sharded(manager.model, offload=offload) if manager.model is not None else nullcontext():
            if interfaces.MODEL in todo:
                # Collective in FSDP1, so it comes before everything that may fail on one rank.
                live[interfaces.MODEL] = self._chosen(apart_from_buffers(manager.model, manager.model.state_dict()))
            if interfaces.OPTIMIZER in todo:
                live[interfaces.OPTIMIZER] = optimizer_state(manager.optimizer)
        if interfaces.EXTRA in todo:
            scheduler = copy.deepcopy(manager.lr_scheduler.state_dict()) if manager.lr_scheduler is not None else None
            live[interfaces.EXTRA] = {"lr_scheduler": scheduler, "rng": manager.get_rng_state()}
        return live

    def _chosen(self, state: dict[str, object]) -> dict[str, object]:
        if not (self._manager.should_save_lora_only and self._manager._has_lora()):
            return state
        chosen = {name: value for name, value in state.items() if "lora_" in name or ".adapter_" in name}
        if not chosen:
            raise ConfigError("save_lora_only is set and the model has adapters, but none of its tensors is one")
        return chosen

    def _export(self, tensors: Pairs) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
        dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
        return empty_model(self._manager.model, dtype), state

    def _file(self, name: str) -> str:
        return interfaces.file(name, self._manager.world_size, self._manager.rank)


# What goes into a checkpoint folder beside the trainer's state: metadata for verl's merger, Hugging Face exports.


HUGGING_FACE = "huggingface"
_MAX_SHARD_BYTES = 5 * 10**9
_READ: WeakKeyDictionary[VerlCheckpointManager, tuple[ModelFiles, dict[str, bytes]]] = WeakKeyDictionary()
"""What `metadata` has read for a manager."""


def unwrapped(model: torch.nn.Module) -> PreTrainedModel:
    """Return the transformers model inside FSDP's wrapper."""
    return model._fsdp_wrapped_module if fsdp_version(model) == 1 else model


def metadata(manager: VerlCheckpointManager) -> dict[str, bytes]:
    """The files by which others read the shards, relative path -> contents: those of the model in ``huggingface/``;
    ``fsdp_config.json``; verl's note on LoRA. Read once for a manager: later changes of the model's folder do not
    matter.

    Args:
        manager: verl's checkpoint manager, ours or its own.

    Raises:
        ConfigError: a file of the model's folder cannot be read.
    """
    if manager not in _READ:
        inner = unwrapped(manager.model)
        with tempfile.TemporaryDirectory() as name:
            manager._save_lora_train_meta(name, inner)
            notes = {path.name: path.read_bytes() for path in Path(name).iterdir()}
        runtime = FSDPConfig(FSDP_version=fsdp_version(manager.model), world_size=manager.world_size)
        notes["fsdp_config.json"] = json.dumps(asdict(runtime), indent=4).encode()
        _READ[manager] = model_files(inner.config, manager.processing_class), notes
    files, notes = _READ[manager]
    return {**{f"{HUGGING_FACE}/{path}": data for path, data in files.contents.items()}, **notes}


def of_export(small: Mapping[str, bytes], folder: str, dtype: torch.dtype) -> dict[str, bytes]:
    """The small files of a checkpoint with a model in Hugging Face format, whose config says the dtype of its weights.

    Args:
        small: relative path -> contents.
        folder: of the model below the checkpoint's, with ``/``.
        dtype: of the weights.
    """
    name = f"{folder}/{CONFIG}"
    files = ModelFiles({CONFIG: small[name]}).with_dtype(str(dtype).removeprefix("torch."))
    return {**small, name: files.contents[CONFIG]}


# ---- full tensors


def full_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on the device) of the model's state dict, one gathered at a time. Collective: all ranks
    iterate to the end.
    """
    with _on_device(model), sharded(model, offload=False):
        state = model.state_dict()
    for name, value in state.items():
        if isinstance(value, DTensor):
            moved = value.to(get_device_id())
            assert isinstance(moved, DTensor)
            yield name, moved.full_tensor()
        elif type(value).__name__ == "ShardedTensor":
            raise RunError(
                f"{name} is sharded without a device mesh, as verl's engines have one; it cannot be gathered"
            )
        else:
            yield name, value


@contextmanager
def _on_device(model: torch.nn.Module) -> Iterator[None]:
    """FSDP1 gathers on the device, so parameters that were offloaded have to be there for the while."""
    here = next(model.parameters()).device.type
    moved = fsdp_version(model) == 1 and here == "cpu" and get_device_name() != "cpu"
    if moved:
        load_fsdp_model_to_gpu(model)
    try:
        yield
    finally:
        if moved:
            offload_fsdp_model_to_cpu(model)


# ---- Hugging Face export


def class_of(model: torch.nn.Module) -> type[PreTrainedModel]:
    """Return the transformers class of a model, whatever its config names: a critic's has a head of its own.

    Raises:
        ConfigError: it is no model of transformers.
    """
    for kind in type(unwrapped(model)).__mro__:
        if issubclass(kind, PreTrainedModel) and not issubclass(kind, FSDPModule):
            return kind
    raise ConfigError(
        f"{type(unwrapped(model)).__name__} is no model of transformers, so it cannot be exported to Hugging Face "
        "format; leave hf_model out of save_contents"
    )


def empty_model(model: torch.nn.Module, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model of the same class without storage.

    On the main thread: it sets torch's default dtype meanwhile.
    """
    config = copy.deepcopy(unwrapped(model).config)
    with torch.device("meta"):
        return class_of(model)._from_config(config, dtype=dtype)


def write_export(empty: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path) -> list[Path]:
    """Write a full model in Hugging Face format; `state` is its state dict on the CPU. Returns the files of weights.

    The other files in the folder (config, tokenizer) are `metadata`'s.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = revert_weight_conversion(empty, state)
    saved = {name: tensors[name] for name in saved_list(empty)}
    infos = {name: TensorInfo(from_torch(tensor.dtype), tuple(tensor.shape)) for name, tensor in saved.items()}
    files = plan_files(infos, _MAX_SHARD_BYTES)
    for file, names in files.items():
        write_file(folder, file, {name: infos[name] for name in names}, saved.__getitem__)
    if len(files) > 1:
        write_index(folder, files, infos)
    return sorted(folder / name for name in [*files, *([INDEX] if len(files) > 1 else [])])


# A rank's training state copied aside, so that it can be written while training goes on and changes it.


class StateCopy:
    """Copies of a state, one at a time, into memory that is kept: fresh pages would cost more than the copy. The live
    tensors are not: an engine that offloads makes others, and those of before are to be freed.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._snapshot: Snapshot | None = None

    def take(self, files: Mapping[str, object], what: str, *, lazily: bool = False) -> None:
        """Copy a state; the copy before must not be needed any more.

        Args:
            files: file name -> live value for `torch.save`.
            what: for errors, such as ``"the state of step 3"``.
            lazily: return at once and copy on; the state must not change before `wait_until_copied` returns.
        """
        planned = plan(files)
        if self._memory is None or len(self._memory) < planned.nbytes:
            self._snapshot, self._memory = None, mmap.mmap(-1, max(planned.nbytes, mmap.PAGESIZE))
        self._snapshot = Snapshot(planned, self._memory, what)
        self._snapshot.copy(in_background=lazily)

    def wait_until_copied(self, timeout_s: float) -> None:
        """Wait until what was taken last may change. An error of the copy is left to what writes it.

        Raises:
            WaitTimeout: the copy takes longer than `timeout_s`.
        """
        if self._snapshot is not None:
            self._snapshot.wait_until_copied(timeout_s)

    def let_go(self, name: str) -> None:
        """Keep none of a file's live tensors, as its writer does: the writer will not be called."""
        if self._snapshot is not None:
            self._snapshot.let_go(name)

    def writer(
        self, name: str, folder: Path, staging: Path, *, durable: bool, timeout_s: float
    ) -> Callable[[], list[FileTuple]]:
        """Return what writes one file of the copy into `folder`, as `torch.save` would, and returns its entry. To be
        called once.

        Args:
            staging: the step's staging folder, to which the entry is relative.
            durable: fsync.
            timeout_s: limit of the wait for the copy, seconds.
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
