"""What a rank is to write of a save, copied from verl's checkpoint manager, and the functions that write it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlCheckpointManager

from trinity_sync.backends.sharded import apart_from_buffers, optimizer_state, sharded
from trinity_sync.checkpoint.coordinator import SaveFn
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl import contents, files
from trinity_sync.integrations.verl.ranks import together, use_on_first_rank
from trinity_sync.integrations.verl.state import StateCopy
from trinity_sync.integrations.verl.weights import Pairs
from trinity_sync.models.files import ModelFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


class Copies:
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
            files.metadata(manager)  # before anything is trained

    def take(self, step: int, todo: list[str], folder: Path, staging: Path, *, durable: bool) -> dict[str, SaveFn]:
        """See `interfaces.Copies`."""
        rank = self._manager.rank
        together(f"copy the state of step {step}", lambda: self._take(step, todo))
        found: dict[str, SaveFn] = {
            name: self._copy.writer(self._file(name), folder, staging, durable=durable, timeout_s=self._timeout_s)
            for name in todo
            if name not in contents.OF_FIRST_RANK
        }
        if rank == 0 and contents.METADATA in todo:
            small = files.metadata(self._manager)
            if contents.EXPORT in todo:
                small = files.of_export(small, files.HUGGING_FACE, next(self._manager.model.parameters()).dtype)
            found[contents.METADATA] = lambda: ModelFiles(small).write(folder)
        if contents.EXPORT in todo:
            tensors = files.full_tensors(self._manager.model)
            export = use_on_first_rank(f"gather the model of step {step}", tensors, self._export)
            if export is not None:
                empty, weights = export
                found[contents.EXPORT] = lambda: files.write_export(empty, weights, folder / files.HUGGING_FACE)
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
            if contents.MODEL in todo:
                # Collective in FSDP1, so it comes before everything that may fail on one rank.
                live[contents.MODEL] = self._chosen(apart_from_buffers(manager.model, manager.model.state_dict()))
            if contents.OPTIMIZER in todo:
                live[contents.OPTIMIZER] = optimizer_state(manager.optimizer)
        if contents.EXTRA in todo:
            scheduler = copy.deepcopy(manager.lr_scheduler.state_dict()) if manager.lr_scheduler is not None else None
            live[contents.EXTRA] = {"lr_scheduler": scheduler, "rng": manager.get_rng_state()}
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
        return files.empty_model(self._manager.model, dtype), state

    def _file(self, name: str) -> str:
        return contents.file(name, self._manager.world_size, self._manager.rank)
