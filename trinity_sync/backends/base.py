"""What the trainer's worker asks of a training engine. One file per backend implements it; see `FsdpBackend`.

Who calls what, in this order, on every rank:

1. verl's worker makes the engine and initialises it (collective), then `BackendOption.view` gives this view of it.
2. `shards()` once: the layout never changes while a run lives. The driver compares all ranks' with `saved()` of one.
3. `sources()` for each version: the live local tensors in the shards' order.
4. `state()` for each full checkpoint: everything a resume needs, in the files that verl itself would write. Its tensors
   may be live too.

What is live changes at `deadline`, so whoever copies later must have copied by then; `before_change` calls back just
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch

from trinity_sync.backends.meetings import RankMeeting
from trinity_sync.protocol.parts import FileTuple
from trinity_sync.weights.saved_views import Saved
from trinity_sync.weights.shards import Shard
from trinity_sync.weights.staging import Copying, Sources

Deadline = Literal["optimizer_step", "offload", "now"]

Format = Literal["verl", "dcp"]

DISTRIBUTED = "dcp"
"""Folder of the ``dcp`` format below the checkpoint's ``actor``; see `Backend.write_distributed`."""


class HeldBase(NamedTuple):
    """What an adapter is trained on, as a rank holds it.

    Attributes:
        saved: the tensors of all of it, as `Backend.saved` of a run without an adapter has them.
        shards: what this rank holds of it; replicas hold nothing.
        sources: the elements of each shard, live, by name.
    """

    saved: Mapping[str, Saved]
    shards: Sequence[Shard]
    sources: Mapping[str, torch.Tensor]


class Backend(Protocol):
    """One rank's view of its training engine. All tensors are in Hugging Face coordinates."""

    deadline: Deadline

    def shards(self) -> Sequence[Shard]:
        """What this rank contributes to a version, in wire dtype. Replicas contribute nothing, so ranks cover each
        tensor once.
        """
        ...

    def saved(self) -> Mapping[str, Saved]:
        """The tensors that a version has to consist of, from the model's architecture and not from `shards`."""
        ...

    def sources(self) -> Sources:
        """Live local tensors by name, one per shard, elements in the shard's local order; or what computes them from
        such. Collective where the engine offloads, and where a version is the sum of base and adapter.
        """
        ...

    def state(self, form: Format) -> Mapping[str, object]:
        """File name -> object for `torch.save`; under `DISTRIBUTED`, what is for `write_distributed`. Its tensors do
        not change before `deadline`; everything else in it is a copy. Collective: all ranks call it.
        """
        ...

    def write_distributed(
        self, value: object, copied: Callable[[torch.Tensor], torch.Tensor], folder: Path, meeting: RankMeeting
    ) -> list[Path]:
        """Write what `state` gave under `DISTRIBUTED` into `folder`; the files that this rank wrote. Collective; called
        in a thread beside training.

        Args:
            copied: a plain tensor of this rank below `value` -> its copy in the CPU's memory.
            meeting: the meeting of the save's ranks.

        Raises:
            RunError: on all ranks, where one could not.
        """
        ...

    def before_change(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, on the training thread, each time before what `state` gave changes. Nothing is called
        where the deadline is ``now``: there it may change at any time.
        """
        ...

    def write_metadata(self, folder: Path) -> list[Path]:
        """Rank 0: config, tokenizer and the engine's own JSON beside the shards, so that verl's tools read the
        folder.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restore what was saved: ``verl`` on the same number of ranks, ``dcp`` on any. Collective."""
        ...


class SelfWritingBackend(Protocol):
    """A backend whose checkpoint format is more than one object per file: it writes its files itself."""

    deadline: Deadline

    def begin_save(
        self, folder: Path, meeting: RankMeeting, *, lazily: bool = False, durable: bool = False
    ) -> tuple[Copying, Callable[[], list[Path | FileTuple]]]:
        """Copy the training state for `folder`. Collective; writes nothing yet.

        Args:
            folder: the checkpoint's folder; is made by what is returned.
            meeting: the meeting of the save's ranks.
            lazily: where the deadline allows it, the copy may still be under way on return, and has to be waited for
                before the state changes.
            durable: have the large files on the disk when they are written.

        Returns:
            The copy, and what writes it and returns this rank's files, or raises RunError on all ranks; collective
            too, and called on a background thread of every rank while training goes on. A file as (path relative to
            `folder`, bytes, xxh3_128 hex) is on the disk if it is to be.
        """
        ...

    def before_change(self, callback: Callable[[], None]) -> None:
        """As `Backend.before_change`."""
        ...
