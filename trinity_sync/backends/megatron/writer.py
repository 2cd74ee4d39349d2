"""Saving a sharded state dict with `megatron.core.dist_checkpointing` in two halves: a snapshot now, the files later.

megatron-core's own asynchronous save forks a process per save and exchanges results over one queue that all saves of
the process share, so that concurrent saves (model, optimizer, extra) can take each other's; it also has to be finalised
by all ranks in the training thread. Here a save is

1. `Trees.plan` on the training thread of all ranks (collective): assigns the shards to writers; and `Trees.copy`, which
   copies these shards, at once or during the next step;
2. `PlannedWrite.write` on a background thread of each rank: its own files, no communication;
3. `finalise` on that thread (collective, in the save's meeting): the results come together and rank 0 writes the
   metadata, or every rank raises the error of any rank.

Nothing touches the disk before 2: a full or slow disk must not block the training thread of one rank, because the
others would wait in the next collective call.

The files are megatron-core's, so its own loaders and verl read them.
"""

from __future__ import annotations

import gc
import io
import json
import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NotRequired, TypeAlias, TypedDict, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.serialization import _CONTENT_METADATA_KEY
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms, _write_item
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from verl.utils.megatron.dist_checkpointing import load_dist_checkpointing

from trinity_sync.backends.meetings import RankMeeting
from trinity_sync.backends.megatron import optimizer_state
from trinity_sync.backends.megatron.optimizer_state import ShardedStateDict
from trinity_sync.models.files import ModelFiles
from trinity_sync.protocol.parts import FileTuple
from trinity_sync.weights.shard_file import DigestedFile
from trinity_sync.weights.staging import HostMemory, TensorCopy

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from numpy.typing import NDArray
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager


_FORMAT = ("torch_dist", 1)

_Written: TypeAlias = tuple[Path, int, str]
"""A file, its bytes and its xxh3_128 hex."""


class _ShareWriter(FileSystemWriterAsync):
    """One rank's share of one state dict, in one file."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan without creating the folder."""
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._file = f"{plan.storage_data.prefix}0.distcp"
        self.items = [(item, planner.resolve_data(item)) for item in plan.items]

    def write(self, *, durable: bool) -> tuple[list[WriteResult], list[_Written]]:
        if not self.items:
            return [], []
        path = Path(self.checkpoint_dir) / self._file
        path.parent.mkdir(parents=True, exist_ok=True)
        # Plain bytes first: megatron-core expects this order.
        ordered = sorted(self.items, key=lambda pair: pair[0].type != WriteItemType.BYTE_IO)
        with DigestedFile(path, durable=durable) as file:
            stream = cast("io.IOBase", file)
            results = [
                _write_item(_StorageWriterTransforms(), stream, data, item, self._file, SerializationFormat.TORCH_SAVE)
                for item, data in ordered
            ]
            written = path, *file.finish()
        self.items = []
        return results, [written]


class _Strategy(TorchDistSaveShardedStrategy):
    """megatron-core's strategy with our writer. Planning runs on the training thread, over the default group."""

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> AsyncRequest:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        self.share = _ShareWriter(checkpoint_dir, thread_count=1)
        (_, self.metadata, _), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(state, False),
            self.share,
            None,
            0,
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )
        return AsyncRequest(None, (), [])


class _Metadata(Metadata):
    """The metadata with the ranks' plans, which megatron-core adds."""

    all_local_plans: list[SavePlan]


class PlannedWrite:
    """A planned write of a state dict."""

    def __init__(self, folder: Path, share: _ShareWriter, metadata: _Metadata, common: bytes) -> None:
        self.folder = folder
        self.metadata = metadata
        self._share = share
        self._common = common

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [data.detach() for _, data in self._share.items if isinstance(data, torch.Tensor)]

    def use(self, copies: Iterator[torch.Tensor]) -> None:
        """Write these copies instead, one for each of `tensors`."""
        self._share.items = [
            (item, next(copies) if isinstance(data, torch.Tensor) else data) for item, data in self._share.items
        ]

    def write(self, *, durable: bool) -> tuple[list[WriteResult], list[_Written]]:
        return self._share.write(durable=durable)

    def close(self, results: Sequence[Sequence[WriteResult]]) -> list[Path]:
        """Rank 0: write the metadata from the results of all ranks, and return the files other than theirs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # megatron-core could skip planning with the ranks' plans in a later save. Nothing here uses them, and readers
        # would need classes of megatron-core.
        del self.metadata.all_local_plans
        self._share.finish(self.metadata, list(results))
        (self.folder / COMMON_STATE_FNAME).write_bytes(self._common)
        save_config(CheckpointingConfig(*_FORMAT), str(self.folder))
        return sorted(path for path in self.folder.iterdir() if path.suffix != ".distcp")


class Planner:
    """Plans the saves of one state dict with a fixed layout: the writers among the replicas are chosen and checked
    once.
    """

    def __init__(self) -> None:
        self._strategy = _Strategy(*_FORMAT)
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._shared = FullyParallelSaveStrategyWrapper(self._strategy, replicas, do_cache_distribution=True)
        self._checked = False

    def plan(self, state: ShardedStateDict, folder: Path, content: _Content) -> PlannedWrite:
        """Plan a save. Collective, on the training thread."""
        sharded, common = save_preprocess({**state, _CONTENT_METADATA_KEY: content}, not self._checked)
        self._shared.async_save(sharded, folder)
        self._checked = True
        data = io.BytesIO()
        torch.save(common, data)
        return PlannedWrite(folder, self._strategy.share, self._strategy.metadata, data.getvalue())


def finalise(
    pending: Sequence[PlannedWrite], copying: TensorCopy, meeting: RankMeeting, base: Path, *, durable: bool
) -> list[Path | FileTuple]:
    """Write the trees of one save and make them checkpoints. Collective, on a background thread of every rank.

    Args:
        copying: their copy; its errors fail the save on all ranks.
        meeting: the meeting of that save's ranks.

    Returns:
        The files of this rank: the large ones as entries, the small ones as paths.

    Raises:
        RunError: on all ranks, when one rank failed; names the rank and its error.
    """
    found: list[Path | FileTuple] = []

    def write() -> list[list[WriteResult]]:
        copying.wait_whole(meeting.timeout_s)
        results = []
        for one in pending:
            result, written = one.write(durable=durable)
            results.append(result)
            found.extend((path.relative_to(base).as_posix(), size, digest) for path, size, digest in written)
        return results

    def close() -> list[None]:
        for index, one in enumerate(pending):
            found.extend(one.close([result[index] for result in everyone]))
        return [None] * meeting.ranks

    everyone = meeting.gather("write its share", write)
    meeting.scatter("write the metadata", close)
    return found


class RngState(TypedDict):
    """The states of a rank's random generators: Python's, numpy's, torch's, megatron-core's, and the device's."""

    python: tuple[object, ...]
    numpy: dict[str, object] | tuple[str, NDArray[np.uint32], int, int, float]
    torch: torch.Tensor
    tracker: dict[str, torch.Tensor]
    cuda: NotRequired[torch.Tensor]


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
    """Restore all random generators of this rank from `rng_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# The trees of a Megatron checkpoint in verl's layout.
MODEL, OPTIMIZER, EXTRA = "model/dist_ckpt", "optimizer/dist_ckpt", "extra/dist_ckpt"
ALL = (MODEL, OPTIMIZER, EXTRA)

RNG_OF_RANK = "rng_state_of_rank"
"""A `ShardedObject`, one for each rank."""

_Content: TypeAlias = dict[str, object]
"""megatron-core's notes about the content of a tree, from which a load describes it again."""


class Trees:
    """Saves trees of an engine, one save after another. `manager`: verl's, with the model and its optimizer."""

    def __init__(self, manager: MegatronCheckpointManager) -> None:
        self._manager = manager
        self._planners = {name: Planner() for name in ALL}
        self._own_shards = optimizer_state.OwnShards()
        self._memory = HostMemory()
        # megatron-core collects garbage in every save. Freezing spares it the objects that exist by now.
        gc.freeze()

    def plan(self, folder: Path, names: Collection[str]) -> list[PlannedWrite]:
        """Plan a save of the named trees (see `ALL`) into the checkpoint's folder. Collective, training thread."""
        manager = self._manager
        content = manager._build_sharded_state_dict_metadata()
        trees: dict[str, ShardedStateDict] = {}
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

    def copy(self, pending: Sequence[PlannedWrite], *, in_background: bool) -> TensorCopy:
        """Copy the tensors of all trees of one save, in memory that is kept from save to save. The previous save must
        be done: its copies are overwritten.
        """
        tensors = [tensor for one in pending for tensor in one.tensors]
        targets = self._memory.places(tensors)
        copies = iter(targets)
        for one in pending:
            one.use(copies)
        pairs = zip(tensors, targets, strict=True)
        copying = TensorCopy(pairs, {tensor.device for tensor in tensors}, "the training state")
        copying.copy(in_background=in_background)
        return copying


def gathers_late(chunks: Collection[DistributedDataParallel]) -> bool:
    """Return whether only the next forward pass gathers the optimizer's results (`overlap_param_gather`)."""
    return any(getattr(chunk.ddp_config, "overlap_param_gather", False) for chunk in chunks)


def gather_parameters(chunks: Collection[DistributedDataParallel]) -> None:
    """Have the model hold the optimizer's latest results, where it `gathers_late`. Collective."""
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def has_buffers(chunks: Collection[DistributedDataParallel]) -> bool:
    """Return whether the model's state has persistent buffers, such as the bias of a mixture's router.

    They may change before the optimizer's step.
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


def load_optimizer(manager: MegatronCheckpointManager, folder: Path, content: _Content) -> ShardedStateDict | None:
    """Load the tree of the optimizer, and return the state of the schedule, if there is one, for `load_schedule`."""
    optimizer_state.materialise(manager.optimizer)
    # The load of the model has changed its description.
    model = manager._build_model_sharded_state_dict(content)
    wanted = manager._build_optimizer_state_dict(model, content, is_loading=True)
    loaded = load_dist_checkpointing(wanted, str(folder / OPTIMIZER))
    optimizer_state.load(manager.optimizer, loaded["optimizer"])
    schedule: ShardedStateDict | None = loaded.get("lr_scheduler")
    return schedule


def load_schedule(manager: MegatronCheckpointManager, state: ShardedStateDict) -> None:
    """Set the place in the schedule."""
    manager.lr_scheduler.num_steps = 0  # its load adds to the present count
    manager.lr_scheduler.load_state_dict(state)


def load_rng_of_rank(manager: MegatronCheckpointManager, folder: Path) -> None:
    """Restore the random generators of each rank; as many ranks as now saved theirs."""
    set_rng_state(load_dist_checkpointing(_extra(manager), str(folder / EXTRA))[RNG_OF_RANK])


def _extra(manager: MegatronCheckpointManager) -> ShardedStateDict:
    mine = ShardedObject(RNG_OF_RANK, rng_state(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
    return {**manager._build_extra_state_dict(), RNG_OF_RANK: mine}


def layout(manager: MegatronCheckpointManager) -> dict[str, int | str]:
    """Return the layout of an engine over the ranks, for a checkpoint's `ckpt_contents.json`."""
    content = manager._build_sharded_state_dict_metadata()
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "optimizer_format": content.get("distrib_optim_sharding_type", "none"),
    }


# The small files of rank 0, by which verl and its tools read the trees.


CONFIG, CONTENTS = "transformer_config.json", "ckpt_contents.json"
HUGGING_FACE = "model/huggingface"


def small_files(manager: MegatronCheckpointManager, files: ModelFiles) -> dict[str, bytes]:
    """Return Megatron's config and the model's own files, by path relative to the checkpoint."""
    with TemporaryDirectory() as folder:
        manager._save_transformer_config(folder)
        config = Path(folder, CONFIG).read_bytes()
    return {CONFIG: config, **{f"{HUGGING_FACE}/{path}": data for path, data in files.contents.items()}}


def contents_file(manager: MegatronCheckpointManager, step: int, *, has_trees: bool) -> dict[str, bytes]:
    """Return `ckpt_contents.json`: what verl notes about a save, and the layout of the engine."""
    with TemporaryDirectory() as folder:  # verl makes folders when it names them
        contents = manager._build_checkpoint_manifest(folder, step, has_trees)
    contents["layout"] = layout(manager)
    return {CONTENTS: (json.dumps(contents, indent=2, sort_keys=True) + "\n").encode()}
