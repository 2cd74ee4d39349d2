"""Full checkpoints of the Megatron engine, in verl's folders (`model/`, `optimizer/`, `extra/`, `ckpt_contents.json`).

What goes in is made by verl's checkpoint manager; how it is written and read is ours (see `writer`), for verl's way
cannot be finalised from outside its process and its loader hands the optimizer a description that the model's load has
used up. Beside verl's RNG state, which is one per model-parallel rank, each rank's own is saved.
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from verl.utils.megatron.dist_checkpointing import load_dist_checkpointing

from trinity_sync.backends.engines import MegatronEngine
from trinity_sync.backends.meetings import Meeting
from trinity_sync.backends.megatron import optimizer_state
from trinity_sync.backends.megatron.resume import saved_layout
from trinity_sync.backends.megatron.writer import Copies, Pending, Planner, finalise
from trinity_sync.backends.optimizer_settings import settings_kept
from trinity_sync.backends.safe_loading import nothing_runs
from trinity_sync.protocol.parts import FileTuple
from trinity_sync.weights.copying import Copying

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MODEL, _OPTIMIZER, _EXTRA = "model/dist_ckpt", "optimizer/dist_ckpt", "extra/dist_ckpt"
_CONTENTS = "ckpt_contents.json"
_RANK_RNG = "rng_state_of_rank"


class RngState(TypedDict):
    """The states of a rank's random generators: Python's, numpy's, torch's, megatron-core's, and the device's."""

    python: tuple[object, ...]
    numpy: dict[str, object] | tuple[str, NDArray[np.uint32], int, int, float]
    torch: torch.Tensor
    tracker: dict[str, torch.Tensor]
    cuda: NotRequired[torch.Tensor]


class Checkpoints:
    """Saves and loads the training state of an engine. All methods are collective.

    Args:
        engine: verl's, initialised.
    """

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine
        self._manager = engine.checkpoint_mananager  # verl spells it so
        self._manager.use_dist_checkpointing = True
        self._planners = {name: Planner() for name in (_MODEL, _OPTIMIZER, _EXTRA)}
        self._own_shards = optimizer_state.OwnShards()
        self._copies = Copies()
        # megatron-core collects garbage in every save. What there is by now stays, and need not be looked at each time.
        gc.freeze()

    def begin(
        self, folder: Path, meeting: Meeting, *, in_background: bool, durable: bool
    ) -> tuple[Copying, Callable[[], list[Path | FileTuple]]]:
        """Copy the state between two steps, or beginning between them.

        Args:
            folder: the checkpoint's.
            meeting: the meeting of the save's ranks.
            in_background: the state does not change before the copy is waited for.
            durable: see `SelfWritingBackend.begin_save`.

        Returns:
            The copy, and what writes it: to be called on a background thread of every rank; returns this rank's files.
            It has to be done before the next `begin`, which uses the memory again.
        """
        engine, manager = self._engine, self._manager
        optimizer_state.materialise(engine.optimizer)
        content = manager._build_sharded_state_dict_metadata()
        model = manager._build_model_sharded_state_dict(content)
        with self._own_shards.used_by(engine.optimizer):
            optimizer = manager._build_optimizer_state_dict(model, content)
        trees = {_MODEL: model, _OPTIMIZER: optimizer, _EXTRA: self._extra()}
        pending = [self._planners[name].plan(state, folder / name, dict(content)) for name, state in trees.items()]
        copying = self._copies.begin(pending, in_background=in_background)
        return copying, lambda: self._write(folder, pending, copying, meeting, durable)

    def _write(
        self, folder: Path, pending: list[Pending], copying: Copying, meeting: Meeting, durable: bool
    ) -> list[Path | FileTuple]:
        large, small = finalise(pending, meeting, lambda: copying.wait_whole(meeting.timeout_s), durable=durable)
        if dist.get_rank() == 0:
            small += self._write_metadata(folder)
        known = [(path.relative_to(folder).as_posix(), size, digest) for path, size, digest in large]
        return [*known, *small]

    def _write_metadata(self, folder: Path) -> list[Path]:
        self._manager._save_hf_config_and_tokenizer(str(folder))
        self._manager._save_transformer_config(str(folder))
        contents = self._manager._build_checkpoint_manifest(str(folder), 0, saved_any_dist_ckpt=True)
        contents["layout"] = layout(self._engine)
        (folder / _CONTENTS).write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n")
        made = [path for path in (folder / "model" / "huggingface").rglob("*") if path.is_file()]
        return [*sorted(made), folder / "transformer_config.json", folder / _CONTENTS]

    def _extra(self) -> dict[str, object]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = ShardedObject(_RANK_RNG, rng_state(), (ranks,), (rank,), replica_id=0)
        return {**self._manager._build_extra_state_dict(), _RANK_RNG: mine}

    def load(self, folder: Path, *, restore_rng: bool = True) -> None:
        """Restore model, optimizer and the place in the schedule, whose settings stay as they are; with `restore_rng`,
        in the layout of the save, the random generators too.

        Any layout of the same model can load an optimizer that was saved as ``fully_reshardable``.

        Raises:
            RunError: a file holds what it may not; nothing that is pickled in one runs.
        """
        with nothing_runs(folder):
            self._load(folder, restore_rng)

    def _load(self, folder: Path, restore_rng: bool) -> None:
        engine, manager = self._engine, self._manager
        content = dist_checkpointing.load_content_metadata(checkpoint_dir=str(folder / _MODEL))
        loaded = load_dist_checkpointing(manager._build_model_sharded_state_dict(content), str(folder / _MODEL))
        for index, chunk in enumerate(engine.module):
            chunk.load_state_dict(loaded["model" if len(engine.module) == 1 else f"model{index}"], strict=True)

        optimizer_state.materialise(engine.optimizer)
        # The load above has changed the first description of the model.
        model = manager._build_model_sharded_state_dict(content)
        wanted = manager._build_optimizer_state_dict(model, content, is_loading=True)
        loaded = load_dist_checkpointing(wanted, str(folder / _OPTIMIZER))
        with settings_kept(engine.optimizer):
            optimizer_state.load(engine.optimizer, loaded["optimizer"])
        scheduler = engine.lr_scheduler
        scheduler.num_steps = 0
        scheduler.load_state_dict(loaded["lr_scheduler"])

        if restore_rng and _ranks(saved_layout(folder)) == _ranks(layout(engine)):
            loaded = load_dist_checkpointing(self._extra(), str(folder / _EXTRA))
            set_rng_state(loaded[_RANK_RNG])


def layout(engine: MegatronEngine) -> dict[str, int | str]:
    """How an engine is laid out over the ranks, as it stands in a checkpoint's `ckpt_contents.json`."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "optimizer_format": (
            "fully_reshardable" if engine.engine_config.dist_ckpt_optim_fully_reshardable else "dp_reshardable"
        ),
    }


def _ranks(of: Mapping[str, int | str] | None) -> dict[str, int | str]:
    return {name: of[name] for name in ("tp", "pp", "dp", "ep")} if of else {}


def rng_state() -> RngState:
    """Return the states of all random generators of this rank."""
    state: RngState = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: RngState) -> None:
    """Set all random generators of this rank to what `rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
