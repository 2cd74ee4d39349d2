"""The training state of verl's FSDP engine, saved and restored, in two formats.

``verl``: the files that verl itself would write, one set per rank, for the same number of ranks. ``dcp``: model and
optimizer through torch.distributed.checkpoint under the parameters' names, which any number of ranks, and FSDP as well
as FSDP2, can load; LR scheduler, RNG and the gradient scaler of fp16 in files per rank.

For a model with a LoRA adapter both contain the adapter alone, as verl does with ``save_lora_only``, and its optimizer
states: the base is the run's first model, and is not written again.

Files are loaded without running their pickles, see `safe_loading`.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from verl.utils.fsdp_utils import (
    fsdp_version,
    get_fsdp_state_ctx,
    load_fsdp_model_to_gpu,
    load_fsdp_optimizer,
    offload_fsdp_model_to_cpu,
    offload_fsdp_optimizer,
)

from trinity_sync.backends.base import DISTRIBUTED, Format, FsdpEngine
from trinity_sync.backends.meetings import RankMeeting
from trinity_sync.backends.safe_loading import StateDict, load_file, nothing_runs
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import rank_file
from trinity_sync.weights.lora import CONFIG_FILE, is_adapter
from trinity_sync.weights.shards import listed

if TYPE_CHECKING:
    from peft import LoraConfig


_OPTIONS = StateDictOptions()
_SCALER = "scaler"
"""Our addition to verl's file: the state of the gradient scaler of fp16."""


class FsdpState:
    """One rank's state for a resume, of an initialised engine of verl."""

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._of_adapter = peft_config(engine.module) is not None

    def files(self, form: Format) -> StateDict:
        """Return file name -> live value, with `DISTRIBUTED` in place of a file for the argument of `write`.
        Collective.
        """
        extra = {
            "lr_scheduler": copy.deepcopy(self._engine.lr_scheduler.state_dict()),
            "rng": self._engine.checkpoint_manager.get_rng_state(),
        }
        if self._engine.scaler is not None:
            extra[_SCALER] = self._engine.scaler.state_dict()
        names = {name: self._file(name) for name in ("model", "optim", "extra_state")}
        with self._on_device(), sharded(self._engine.module, offload=torch.cuda.is_available()):
            if form == "dcp":
                state = self._distributed()
                apart_from_buffers(self._engine.module, state["model"])
                return {DISTRIBUTED: state, names["extra_state"]: extra}
            model, optimizer = live_state(self._engine.module, self._engine.optimizer)
            return {names["model"]: self._trained(model), names["optim"]: optimizer, names["extra_state"]: extra}

    def load(self, folder: Path) -> None:
        """Restore the state below `folder`, in either format, except the settings of optimizer and learning rate.
        Collective.
        """
        engine = self._engine
        with (
            self._on_device(),
            sharded(engine.module, offload=torch.cuda.is_available()),
            settings_kept(engine.optimizer),
        ):
            if (folder / DISTRIBUTED).is_dir():
                self._load_distributed(folder / DISTRIBUTED)
            else:
                path = folder / self._file("model")
                saved, live = load_file(path), engine.module.state_dict()
                self._check_names(path, saved, self._trained(live))
                # The model's own tensors are loaded unchanged, so that a strict load finds every name.
                engine.module.load_state_dict({**live, **saved})
                engine.optimizer.load_state_dict(load_file(folder / self._file("optim")))
        self._load_extra(folder)
        dist.barrier()

    def _trained(self, model: StateDict) -> StateDict:
        return {name: value for name, value in model.items() if is_adapter(name)} if self._of_adapter else model

    def _check_names(self, path: Path, saved: Mapping[str, object], wanted: Mapping[str, object]) -> None:
        """Check that the saved tensors (by name, with a `size`) are those of this model's saved state."""
        what = "the adapter" if self._of_adapter else "the model"
        missing, unknown = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
        if missing or unknown:
            found = [f"no {listed(missing)}"] if missing else []
            found += [f"{listed(unknown)}, which {what} does not have"] if unknown else []
            kind = _kind(saved)
            raise RunError(
                f"{path} holds {kind}, which does not fit {what} that is trained: it has {', and '.join(found)}"
            )
        for name, value in wanted.items():
            ours, theirs = _shape(value), _shape(saved[name])
            if ours != theirs:
                raise RunError(f"{path} has {name} with shape {theirs}, but {what} has {ours}")

    # -- torch.distributed.checkpoint

    def _distributed(self) -> StateDict:
        return {
            "model": self._trained(get_model_state_dict(self._engine.module, options=_OPTIONS)),
            "optim": get_optimizer_state_dict(self._engine.module, self._engine.optimizer, options=_OPTIONS),
        }

    def _load_distributed(self, folder: Path) -> None:
        state = self._distributed()
        reader = dcp.FileSystemReader(folder)
        with nothing_runs(folder):
            stored = reader.read_metadata().state_dict_metadata
            prefix = "model."
            saved = {name.removeprefix(prefix): entry for name, entry in stored.items() if name.startswith(prefix)}
            self._check_names(folder, saved, state["model"])
            dcp.load(state, storage_reader=reader)
        model = state["model"]
        if self._of_adapter:
            model = {**get_model_state_dict(self._engine.module, options=_OPTIONS), **model}
        set_model_state_dict(self._engine.module, model, options=_OPTIONS)
        set_optimizer_state_dict(self._engine.module, self._engine.optimizer, state["optim"], options=_OPTIONS)

    # -- LR scheduler, RNG and gradient scaler

    def _load_extra(self, folder: Path) -> None:
        own = folder / self._file("extra_state")
        if own.exists():
            extra = load_file(own)
            self._engine.checkpoint_manager.load_rng_state(extra["rng"])
        else:
            # Another number of ranks: the learning rate is the same on all, but a rank's RNG has no counterpart.
            others = sorted(folder.glob("extra_state_world_size_*_rank_0.pt"))
            if not others:
                raise RunError(f"{own} is missing, and so is that of any other number of ranks")
            extra = load_file(others[0])
        self._go_to(extra["lr_scheduler"])
        # A checkpoint of another dtype or program has none, and one of a CPU is empty.
        if self._engine.scaler is not None and (saved := extra.get(_SCALER)):
            self._engine.scaler.load_state_dict(saved)

    def _go_to(self, place: StateDict) -> None:
        scheduler = self._engine.lr_scheduler
        scheduler.load_state_dict({**place, "base_lrs": scheduler.base_lrs})
        rates = [
            base * of_step(scheduler.last_epoch)
            for base, of_step in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        scheduler._last_lr = list(rates)
        for group, rate in zip(self._engine.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    # -- helpers

    def _file(self, name: str) -> str:
        return rank_file(name, self._ranks, self._rank)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Move an engine that offloads to its device, where FSDP1 gathers, and where states are loaded."""
        engine = self._engine
        model, optimizer = engine.is_param_offload_enabled, engine.is_optimizer_offload_enabled
        moves = torch.cuda.is_available() and fsdp_version(engine.module) == 1
        if model and moves:
            load_fsdp_model_to_gpu(engine.module)
        if optimizer and moves:
            load_fsdp_optimizer(engine.optimizer, torch.cuda.current_device())
        try:
            yield
        finally:
            if model and moves:
                offload_fsdp_model_to_cpu(engine.module)
            if optimizer and torch.cuda.is_available():
                offload_fsdp_optimizer(engine.optimizer)


def peft_config(module: torch.nn.Module) -> LoraConfig | None:
    """Return peft's config of the adapter that an engine's model trains; None: it trains the model itself."""
    configs = getattr(getattr(module, "_fsdp_wrapped_module", module), "peft_config", None)
    if configs is None:
        return None
    config: LoraConfig = configs["default"]
    return config


def adapter_fields(config: LoraConfig) -> Mapping[str, object]:
    """Return the fields that peft writes into an ``adapter_config.json``, with names in order."""
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        fields: Mapping[str, object] = json.loads(Path(folder, CONFIG_FILE).read_text())
    if isinstance(targets := fields["target_modules"], list):
        targets.sort()
    return fields


def write_adapter_config(config: LoraConfig, folder: Path) -> list[Path]:
    """Write the config files of an adapter for peft and verl into the checkpoint's ``actor``; return the paths."""
    own, note = folder / CONFIG_FILE, folder / "lora_train_meta.json"
    own.write_text(json.dumps(adapter_fields(config), indent=2, sort_keys=True))
    task = getattr(config.task_type, "value", config.task_type) or "CAUSAL_LM"
    note.write_text(json.dumps({"r": config.r, "lora_alpha": config.lora_alpha, "task_type": str(task)}, indent=4))
    return [own, note]


def _kind(names: Collection[str]) -> str:
    adapters = sum(map(is_adapter, names))
    return (
        "a LoRA adapter" if adapters == len(names) else "a whole model" if not adapters else "a model with an adapter"
    )


def _shape(value: object) -> list[int]:
    size = getattr(value, "size", ())
    return list(size() if callable(size) else size)


def write(
    value: StateDict, copied: Callable[[torch.Tensor], torch.Tensor], folder: Path, meeting: RankMeeting
) -> list[Path]:
    """Write a state dict of sharded tensors with torch.distributed.checkpoint, and return this rank's files.

    Collective, on any thread.

    Raises RunError: on all ranks, if one fails.
    """
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=False, overwrite=True)
    planner = _CopyPlanner(copied)
    first = meeting.rank == 0
    metadata: Metadata | None = None

    def plan() -> SavePlan:
        planner.set_up_planner(value, writer.storage_meta(), first)
        writer.set_up_storage_writer(first, rank=meeting.rank)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all() -> Sequence[SavePlan]:
        nonlocal metadata
        shared_out, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(shared_out)

    def close() -> Sequence[None]:
        assert metadata is not None
        writer.finish(metadata, results)
        return [None] * meeting.ranks

    plans = meeting.gather("plan its share", plan)
    mine = meeting.scatter("plan the whole", plan_all)
    results = meeting.gather("write its share", lambda: writer.write_data(planner.finish_plan(mine), planner).wait())
    meeting.scatter("write the metadata", close)
    written = sorted(folder.glob(f"__{meeting.rank}_*"))
    return [*written, folder / ".metadata"] if first else written


class _CopyPlanner(DefaultSavePlanner):
    """Takes the bytes from the copies."""

    def __init__(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._copied = copied

    def lookup_object(self, index: MetadataIndex) -> object:
        found = super().lookup_object(index)
        return self._copied(found) if isinstance(found, torch.Tensor) else found


_STATE = frozenset({"params", "step"})
"""Keys of a group that belong to the training state. Some optimizers count the steps of a group, not of a parameter."""


class HasGroups(Protocol):
    """Any optimizer."""

    param_groups: list[StateDict]


@contextmanager
def settings_kept(optimizer: HasGroups) -> Iterator[None]:
    """Keep the settings of the optimizer's groups (learning rate, betas, weight decay and all others) while the block
    loads a state: the configuration has them, and the checkpoint may be of another run.

    The groups are as many, and in the same order, before and after.
    """
    kept = [{name: value for name, value in group.items() if name not in _STATE} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, kept, strict=True):
        group.update(settings)


@contextmanager
def sharded(model: torch.nn.Module, *, offload: bool) -> Iterator[None]:
    """Have the state dicts of a model and of its optimizer contain this rank's shards during the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the deprecation of FSDP1's state-dict API on every use
        with get_fsdp_state_ctx(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=offload),
            ShardedOptimStateDictConfig(offload_to_cpu=offload),
        ):
            yield


def live_state(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> tuple[StateDict, StateDict]:
    """Return the state dicts of a model and of its optimizer, empty for None; inside `sharded`. Collective in FSDP1.

    Parameters and optimizer states are the live tensors, which change at the optimizer's step. Buffers are copies, as
    a forward pass may change them, and so are the containers.
    """
    state: StateDict = {} if model is None else apart_from_buffers(model, model.state_dict())
    return state, {} if optimizer is None else _optimizer_state(optimizer)


def apart_from_buffers(model: torch.nn.Module, state: StateDict) -> StateDict:
    """Replace the buffers in a state dict of the model by copies, and return it."""
    live = {buffer.untyped_storage()._cdata for buffer in model.buffers()}
    for name, value in state.items():
        if type(value) is torch.Tensor and value.untyped_storage()._cdata in live:
            state[name] = value.clone()
    return state


def _optimizer_state(optimizer: torch.optim.Optimizer) -> StateDict:
    state = optimizer.state_dict()
    copies = {key: dict(value) if isinstance(value, dict) else value for key, value in state["state"].items()}
    return {**state, "state": copies}
