"""What the trainer's worker asks of a training engine. One file per backend implements it; see `FsdpBackend`.

Who calls what, in this order, on every rank:

1. `build_engine(spec)` makes verl's engine; verl's worker initialises it (collective).
2. `shards()` once: the layout never changes while a run lives.
3. `sources()` for each version: the live local tensors in the shards' order. They change at `deadline`, so whoever
   copies later must have copied by then.
4. `state()` for each full checkpoint: a copy of everything a resume needs, in the files that verl itself would write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from trinity_sync.weights.shards import Shard

Deadline = Literal["optimizer_step", "offload", "now"]


class Backend(Protocol):
    """One rank's view of its training engine. All tensors are in Hugging Face coordinates."""

    deadline: Deadline

    def shards(self) -> Sequence[Shard]:
        """What this rank contributes to a version, in wire dtype. Replicas contribute nothing, so ranks cover each
        tensor once.
        """
        ...

    def sources(self) -> Mapping[str, torch.Tensor]:
        """Live local tensors by name, one per shard, elements in the shard's local order. Collective where the engine
        offloads.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """File name -> object for `torch.save`: copies, safe to write while training goes on. Collective: all ranks
        call it.
        """
        ...

    def write_metadata(self, folder: Path) -> list[Path]:
        """Rank 0: config, tokenizer and the engine's own JSON beside the shards, so that verl's tools read the
        folder.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restore what `state` saved, on the same number of ranks. Collective."""
        ...


@runtime_checkable
class WritesItself(Protocol):
    """A backend whose checkpoint format is more than one object per file: it writes its files itself."""

    def begin_save(self, folder: Path) -> Callable[[], list[Path]]:
        """Copy the training state for `folder`. Collective.

        Returns:
            What writes the copy and returns this rank's files; collective too, and called on a background thread of
            every rank while training goes on.
        """
        ...
