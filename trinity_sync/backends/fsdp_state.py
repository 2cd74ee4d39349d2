"""The training state of verl's FSDP engine, saved and restored, in two formats.

``verl``: the files that verl itself would write, one set per rank, for the same number of ranks. ``dcp``: model and
optimizer through torch.distributed.checkpoint under the parameters' names, which any number of ranks, and FSDP as well
as FSDP2, can load; LR scheduler, RNG and the gradient scaler of fp16 per rank beside it.

Of a model with a LoRA adapter both hold the adapter alone, as verl does with ``save_lora_only``, and the optimizer's
states of it: the base is the model that the run began with, and is not written again.

Files are loaded without running what is pickled in them, see `safe_loading`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from verl.utils.fsdp_utils import (
    fsdp_version,
    load_fsdp_model_to_gpu,
    load_fsdp_optimizer,
    offload_fsdp_model_to_cpu,
    offload_fsdp_optimizer,
)

from trinity_sync.backends.base import DISTRIBUTED, Format
from trinity_sync.backends.engines import FsdpEngine
from trinity_sync.backends.optimizer_settings import settings_kept
from trinity_sync.backends.safe_loading import load_file, nothing_runs
from trinity_sync.backends.sharded import apart_from_buffers, optimizer_state, sharded
from trinity_sync.errors import RunError
from trinity_sync.weights.lora import CONFIG_FILE, is_adapter
from trinity_sync.weights.shards import listed

if TYPE_CHECKING:
    from peft import LoraConfig

_OPTIONS = StateDictOptions()
_SCALER = "scaler"
"""Beside what verl has in its file: how gradients in fp16 are scaled, and how long they have been."""


class FsdpState:
    """What a resume needs of one rank.

    Args:
        engine: verl's, initialised.
    """

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._of_adapter = peft_config(engine.module) is not None

    def files(self, form: Format) -> dict[str, object]:
        """File name -> live value, with `DISTRIBUTED` in place of a file for what `dcp_files.write` takes.
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
            model = self._trained(self._engine.module.state_dict())
            apart_from_buffers(self._engine.module, model)
            return {
                names["model"]: model,
                names["optim"]: optimizer_state(self._engine.optimizer),
                names["extra_state"]: extra,
            }

    def load(self, folder: Path) -> None:
        """Restore what was saved below `folder`, in either format. Of optimizer and learning rate that is the state
        and the place in the schedule; their settings stay as they are. Collective.

        Raises:
            RunError: a file is missing or holds what it should not.
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
                # What the model has beside the adapter goes back as it is, so that nothing is passed over in silence.
                engine.module.load_state_dict({**live, **saved})
                engine.optimizer.load_state_dict(load_file(folder / self._file("optim")))
        self._load_extra(folder)
        dist.barrier()

    def _trained(self, model: dict[str, Any]) -> dict[str, Any]:
        """Leave out what an adapter is trained on."""
        return {name: value for name, value in model.items() if is_adapter(name)} if self._of_adapter else model

    def _check_names(self, path: Path, saved: Mapping[str, object], wanted: Mapping[str, object]) -> None:
        """Check that what is saved is what the model wants, all of it.

        Args:
            path: for errors.
            saved: tensors by name, or what has their `size`.
            wanted: those of this model's state that are saved.
        """
        what = "the adapter" if self._of_adapter else "the model"
        missing, unknown = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
        if missing or unknown:
            found = [f"no {listed(missing)}"] if missing else []
            found += [f"{listed(unknown)}, which {what} has not"] if unknown else []
            kind = _kind(saved)
            raise RunError(f"{path} holds {kind}, and is not of {what} that is trained: it has {', and '.join(found)}")
        for name, value in wanted.items():
            ours, theirs = _shape(value), _shape(saved[name])
            if ours != theirs:
                raise RunError(f"{path} holds {name} as {theirs}, {what} that is trained has it as {ours}")

    # -- torch.distributed.checkpoint

    def _distributed(self) -> dict[str, Any]:
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
            # Of another number of ranks: the learning rate is the same on all, the RNG of a rank has no counterpart.
            others = sorted(folder.glob("extra_state_world_size_*_rank_0.pt"))
            if not others:
                raise RunError(f"{own} is missing, and so is that of any other number of ranks")
            extra = load_file(others[0])
        self._go_to(extra["lr_scheduler"])
        # A checkpoint of another dtype, or of another program, has none, and one on a CPU is empty.
        if self._engine.scaler is not None and (saved := extra.get(_SCALER)):
            self._engine.scaler.load_state_dict(saved)

    def _go_to(self, place: dict[str, Any]) -> None:
        """Go to the place in the schedule that is saved, with the learning rates of our own at it."""
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
        return f"{name}_world_size_{self._ranks}_rank_{self._rank}.pt"

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Engines that offload have to be on their device where FSDP1 gathers, and where states are loaded."""
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


def adapter_fields(config: LoraConfig) -> dict[str, object]:
    """Return what peft writes into an ``adapter_config.json``, with names in order.

    Args:
        config: peft's.
    """
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        fields: dict[str, object] = json.loads(Path(folder, CONFIG_FILE).read_text())
    if isinstance(targets := fields["target_modules"], list):
        targets.sort()
    return fields


def write_adapter_config(config: LoraConfig, folder: Path) -> list[Path]:
    """Write what peft and verl need to know of an adapter beside its files; the files' paths.

    Args:
        config: peft's.
        folder: the checkpoint's ``actor``.
    """
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
