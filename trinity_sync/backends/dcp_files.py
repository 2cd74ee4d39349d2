"""Writing with torch.distributed.checkpoint from copies, as a meeting of the ranks.

What is to be written where is planned from the live tensors, of which the plan needs no byte; the bytes come from their
copies. So no tensor is put together around a copy: a DTensor's would be moved to the device of its mesh, a second copy
of model and optimizer on the card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from trinity_sync.backends.meetings import Meeting


def write(
    value: dict[str, object], copied: Callable[[torch.Tensor], torch.Tensor], folder: Path, meeting: Meeting
) -> list[Path]:
    """Write a state dict of sharded tensors; the files that this rank wrote. Collective, on any thread.

    Args:
        value: nested containers of live tensors.
        copied: a plain tensor of this rank below `value` -> its copy in the CPU's memory.
        folder: is made.
        meeting: the meeting of the save's ranks.

    Raises:
        RunError: on all ranks, where one could not.
    """
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=False, overwrite=True)
    planner = _Planner(copied)
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


class _Planner(DefaultSavePlanner):
    """Takes the bytes from the copies."""

    def __init__(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._copied = copied

    def lookup_object(self, index: MetadataIndex) -> object:
        found = super().lookup_object(index)
        return self._copied(found) if isinstance(found, torch.Tensor) else found
