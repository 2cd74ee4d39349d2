"""What a Megatron checkpoint in verl's layout consists of: trees of the model, of the optimizer, and of the rest.

What goes in is made by verl's checkpoint manager; how it is written and read is ours (see `writer`), for verl's way
cannot be finalised from outside its process and its loader hands the optimizer a description that the model's load has
used up. Beside verl's RNG state, which is one per model-parallel rank, each rank's own is saved.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from verl.utils.megatron.dist_checkpointing import load_dist_checkpointing

from trinity_sync.backends.megatron import optimizer_state
from trinity_sync.backends.megatron.random_states import rng_state, set_rng_state
from trinity_sync.backends.megatron.writer import Copies, Pending, Planner
from trinity_sync.weights.copying import Copying

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

MODEL, OPTIMIZER, EXTRA = "model/dist_ckpt", "optimizer/dist_ckpt", "extra/dist_ckpt"
ALL = (MODEL, OPTIMIZER, EXTRA)

RNG_OF_RANK = "rng_state_of_rank"
"""A `ShardedObject`, one for each rank."""

_Content: TypeAlias = dict[str, Any]
"""What megatron-core notes about the content of a tree, by which it is described again for a load."""


class Trees:
    """Saves trees of an engine, one save after another.

    Args:
        manager: verl's, with the model and what trains it.
    """

    def __init__(self, manager: MegatronCheckpointManager) -> None:
        self._manager = manager
        self._planners = {name: Planner() for name in ALL}
        self._own_shards = optimizer_state.OwnShards()
        self._copies = Copies()
        # megatron-core collects garbage in every save. What there is by now stays, and need not be looked at each time.
        gc.freeze()

    def plan(self, folder: Path, names: Collection[str]) -> list[Pending]:
        """Plan a save. Collective, on the training thread.

        Args:
            folder: the checkpoint's.
            names: of the trees, see `ALL`.
        """
        manager = self._manager
        content = manager._build_sharded_state_dict_metadata()
        trees: dict[str, dict[str, object]] = {}
        if MODEL in names or OPTIMIZER in names:
            model = manager._build_model_sharded_state_dict(content)
            if MODEL in names:
                trees[MODEL] = model
            if OPTIMIZER in names:
                optimizer_state.materialise(manager.optimizer)
                with self._own_shards.used_by(manager.optimizer):
                    trees[OPTIMIZER] = manager._build_optimizer_state_dict(model, content)
        if EXTRA in names:
            trees[EXTRA] = _extra(manager)
        return [self._planners[name].plan(state, folder / name, dict(content)) for name, state in trees.items()]

    def copy(self, pending: list[Pending], *, in_background: bool) -> Copying:
        """Copy what is to be written; see `writer.Copies.begin`."""
        return self._copies.begin(pending, in_background=in_background)


def gathers_late(chunks: Collection[DistributedDataParallel]) -> bool:
    """Whether what the optimizer writes is gathered by the next forward pass only (`overlap_param_gather`)."""
    return any(getattr(chunk.ddp_config, "overlap_param_gather", False) for chunk in chunks)


def gather_parameters(chunks: Collection[DistributedDataParallel]) -> None:
    """Have the model hold what the optimizer wrote last, where it `gathers_late`. Collective."""
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def has_buffers(chunks: Collection[DistributedDataParallel]) -> bool:
    """Whether a part of the model's state is no parameter, such as the bias of a mixture's router: that may change
    before the optimizer's step.
    """
    return any(
        buffer is not None and name not in module._non_persistent_buffers_set
        for chunk in chunks
        for module in chunk.modules()
        for name, buffer in module._buffers.items()
    )


# ---- loads, all collective


def load_model(manager: MegatronCheckpointManager, folder: Path, content: _Content) -> None:
    """Load the tree of the model."""
    loaded = load_dist_checkpointing(manager._build_model_sharded_state_dict(content), str(folder / MODEL))
    for index, chunk in enumerate(manager.model):
        chunk.load_state_dict(loaded["model" if len(manager.model) == 1 else f"model{index}"], strict=True)


def load_optimizer(manager: MegatronCheckpointManager, folder: Path, content: _Content) -> dict[str, Any] | None:
    """Load the tree of the optimizer.

    Returns:
        The state of the schedule, where there is one, for `load_schedule`.
    """
    optimizer_state.materialise(manager.optimizer)
    # The load of the model has changed the description that was made for it.
    model = manager._build_model_sharded_state_dict(content)
    wanted = manager._build_optimizer_state_dict(model, content, is_loading=True)
    loaded = load_dist_checkpointing(wanted, str(folder / OPTIMIZER))
    optimizer_state.load(manager.optimizer, loaded["optimizer"])
    schedule: dict[str, Any] | None = loaded.get("lr_scheduler")
    return schedule


def load_schedule(manager: MegatronCheckpointManager, state: dict[str, Any]) -> None:
    """Set the place in the schedule."""
    manager.lr_scheduler.num_steps = 0  # its load counts on from where it is
    manager.lr_scheduler.load_state_dict(state)


def load_rng_of_rank(manager: MegatronCheckpointManager, folder: Path) -> None:
    """Restore the random generators of each rank, where as many ranks saved theirs."""
    set_rng_state(load_dist_checkpointing(_extra(manager), str(folder / EXTRA))[RNG_OF_RANK])


def _extra(manager: MegatronCheckpointManager) -> dict[str, object]:
    mine = ShardedObject(RNG_OF_RANK, rng_state(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
    return {**manager._build_extra_state_dict(), RNG_OF_RANK: mine}


def layout(manager: MegatronCheckpointManager) -> dict[str, int | str]:
    """How an engine is laid out over the ranks, as it stands in a checkpoint's `ckpt_contents.json`."""
    content = manager._build_sharded_state_dict_metadata()
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "optimizer_format": content.get("distrib_optim_sharding_type", "none"),
    }
