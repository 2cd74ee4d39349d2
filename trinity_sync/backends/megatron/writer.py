"""Saving a sharded state dict with `megatron.core.dist_checkpointing` in two halves: a snapshot now, the files later.

megatron-core's own asynchronous save forks a process per save and exchanges results over one queue that all saves of
the process share, so three saves at a time (model, optimizer, extra) can take each other's; it also has to be finalised
by all ranks in the training thread. Here a save is

1. `Planner.plan` on the training thread of all ranks (collective): who writes which shard; and `Copies`, which copies
   these shards, then or beside the next step;
2. `Pending.write` on a background thread of each rank: its own files, no communication;
3. `finalise` on that thread (collective, in the save's meeting): the results come together and rank 0 writes the
   metadata, or every rank raises what went wrong on whichever rank.

Nothing touches the disk before 2: a disk that is full or slow must not stop the training thread of one rank, for which
the others would wait in the next collective call.

The files are megatron-core's, so its own loaders and verl read them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from trinity_sync.backends.meetings import Meeting
from trinity_sync.weights.copying import Copying, HostMemory
from trinity_sync.weights.digested_file import DigestedFile

_FORMAT = ("torch_dist", 1)

_Written: TypeAlias = tuple[Path, int, str]
"""A file, its bytes and its xxh3_128 hex."""


class _Share(FileSystemWriterAsync):
    """One rank's share of one state dict, in one file."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Without making the folder."""
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._file = f"{plan.storage_data.prefix}0.distcp"
        self.items = [(item, planner.resolve_data(item)) for item in plan.items]

    def write(self, *, durable: bool) -> tuple[list[WriteResult], list[_Written]]:
        """The results for the metadata and the files written."""
        if not self.items:
            return [], []
        path = Path(self.checkpoint_dir) / self._file
        path.parent.mkdir(parents=True, exist_ok=True)
        # Plain bytes first: megatron-core reads them so.
        ordered = sorted(self.items, key=lambda pair: pair[0].type != WriteItemType.BYTE_IO)
        with DigestedFile(path, durable=durable) as file:
            stream: Any = file
            results = [
                _write_item(_StorageWriterTransforms(), stream, data, item, self._file, SerializationFormat.TORCH_SAVE)
                for item, data in ordered
            ]
            written = path, *file.finish()
        self.items = []
        return results, [written]


class _Strategy(TorchDistSaveShardedStrategy):
    """megatron-core's strategy with our writer. Planning runs on the training thread, over the default group."""

    def async_save(self, sharded_state_dict: dict[str, object], checkpoint_dir: Path) -> AsyncRequest:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        self.share = _Share(checkpoint_dir, thread_count=1)
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


class Pending:
    """A state dict that is planned, and not yet written."""

    def __init__(self, folder: Path, share: _Share, metadata: Any, common: bytes) -> None:
        self.folder = folder
        self.metadata = metadata
        self._share = share
        self._common = common

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What this rank writes, while training may change it."""
        return [data.detach() for _, data in self._share.items if isinstance(data, torch.Tensor)]

    def use(self, copies: Iterator[torch.Tensor]) -> None:
        """Write these instead, one for each of `tensors`."""
        self._share.items = [
            (item, next(copies) if isinstance(data, torch.Tensor) else data) for item, data in self._share.items
        ]

    def write(self, *, durable: bool) -> tuple[list[WriteResult], list[_Written]]:
        """Write this rank's file. No communication."""
        return self._share.write(durable=durable)

    def close(self, results: Sequence[Sequence[WriteResult]]) -> list[Path]:
        """Rank 0: write the metadata from the results of all ranks; the files that are there besides theirs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # The ranks' plans would let a later save with the same layout skip its planning. They need classes of
        # megatron-core to be read, and nothing here uses them.
        del self.metadata.all_local_plans
        self._share.finish(self.metadata, list(results))
        (self.folder / COMMON_STATE_FNAME).write_bytes(self._common)
        save_config(CheckpointingConfig(*_FORMAT), str(self.folder))
        return sorted(path for path in self.folder.iterdir() if path.suffix != ".distcp")


class Planner:
    """Plans the saves of one state dict, whose layout stays the same: who of the replicas writes what is decided once,
    and checked once.
    """

    def __init__(self) -> None:
        self._strategy = _Strategy(*_FORMAT)
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._shared = FullyParallelSaveStrategyWrapper(self._strategy, replicas, do_cache_distribution=True)
        self._checked = False

    def plan(self, state: dict[str, object], folder: Path, content: dict[str, object]) -> Pending:
        """Plan a save. Collective, on the training thread.

        Args:
            state: sharded state dict; is used up.
            folder: where it is going to be.
            content: what megatron-core notes about the content, for the load.
        """
        sharded, common = save_preprocess({**state, _CONTENT_METADATA_KEY: content}, not self._checked)
        self._shared.async_save(sharded, folder)
        self._checked = True
        data = io.BytesIO()
        torch.save(common, data)
        return Pending(folder, self._strategy.share, self._strategy.metadata, data.getvalue())


class Copies:
    """Copies of what a rank writes, in host memory that is kept from save to save."""

    def __init__(self) -> None:
        self._memory = HostMemory()

    def begin(self, pending: Sequence[Pending], *, in_background: bool) -> Copying:
        """Copy what several state dicts of one save are to write. What the save before wrote is overwritten: it has to
        be done.
        """
        tensors = [tensor for one in pending for tensor in one.tensors]
        targets = self._memory.places(tensors)
        copies = iter(targets)
        for one in pending:
            one.use(copies)
        pairs = zip(tensors, targets, strict=True)
        copying = Copying(pairs, {tensor.device for tensor in tensors}, "the training state")
        copying.copy(in_background=in_background)
        return copying


def finalise(
    pending: Sequence[Pending], meeting: Meeting, wait_copied: Callable[[], None], *, durable: bool
) -> tuple[list[_Written], list[Path]]:
    """Write all of them and make them checkpoints. Collective, on a thread of its own.

    Args:
        pending: the state dicts of one save.
        meeting: the meeting of that save's ranks.
        wait_copied: returns when what is pending is copied; what it raises fails the save on all ranks.
        durable: have the large files on the disk.

    Returns:
        The large files that this rank has written, and the small ones.

    Raises:
        RunError: on all ranks, where one could not write; says which, and why.
    """
    large: list[_Written] = []
    small: list[Path] = []

    def write() -> list[list[WriteResult]]:
        wait_copied()
        results = []
        for one in pending:
            found, written = one.write(durable=durable)
            results.append(found)
            large.extend(written)
        return results

    def close() -> list[None]:
        for index, one in enumerate(pending):
            small.extend(one.close([found[index] for found in everyone]))
        return [None] * meeting.ranks

    everyone = meeting.gather("write its share", write)
    meeting.scatter("write the metadata", close)
    return large, small
