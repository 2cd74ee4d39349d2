"""Check of a LoRA adapter's base, which is not sent: explorers read it from the model's folder, as the trainer does.

At start each rank compares its part of the base with the folder, whose digest identifies the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from trinity_sync.actors.rank_client import WeightsDigest
from trinity_sync.backends.base import HeldBase
from trinity_sync.checkpoint.reading import Weights, WeightsError, open_weights
from trinity_sync.errors import ConfigError
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.saved_views import SavedTensor
from trinity_sync.weights.shards import Shard, listed, matrix_view
from trinity_sync.weights.tensors import digest_entry, to_torch
from trinity_sync.weights.wire import WireFormat


class BaseModel:
    """The base as its folder has it. `saved`: the tensors it must have, in the dtypes in which a version of it would
    travel. Raises ConfigError if it cannot be read, or lacks one of them.
    """

    def __init__(self, folder: Path, saved: Mapping[str, SavedTensor]) -> None:
        self._folder = folder
        self._saved = saved
        self._weights = _opened(folder)
        for name, tensor in saved.items():
            found = self._weights.info(name).shape if name in self._weights else None
            if found != tensor.shape:
                has = f"has it as {list(found)}" if found is not None else "has no tensor of that name"
                raise ConfigError(
                    f"model.path={folder}: the base of the adapter has {name} of {list(tensor.shape)}, the folder "
                    f"{has}; save the model with save_pretrained of this transformers, and name that folder"
                )

    def check(
        self, shards: Sequence[Shard], sources: Mapping[str, torch.Tensor], *, digested: bool = False
    ) -> str | None:
        """Check that a rank's part of the base equals the folder's, byte for byte in the dtypes of the wire. Reads one
        tensor at a time. `sources`: the elements of each shard, by name, on any device. Returns the digest, hex; None
        without `digested`.
        """
        held = {shard.name: shard for shard in shards}
        odd, entries = [], []
        for name, saved in self._saved.items():
            if name not in held and not digested:
                continue
            tensor = self._read(name)
            if name in held and not _has(tensor, held[name], sources[name]):
                odd.append(name)
            if digested:
                entries.append(digest_entry(name, tensor, saved.dtype))
        if odd:
            raise ConfigError(
                f"model.path={self._folder}: the trainer's base of the adapter differs from the folder's in "
                f"{listed(sorted(odd))}, so explorers, which read the folder, would have another base; was the folder "
                "changed while the run started, or does backend.master_dtype round more than sync.wire_dtype?"
            )
        return version_digest(entries) if digested else None

    def _read(self, name: str) -> torch.Tensor:
        try:
            return self._weights.read(name)
        except WeightsError as error:
            raise ConfigError(f"model.path={self._folder}: {error}") from error


def check_held(folder: Path, base: HeldBase, wire_dtype: str, *, digested: bool) -> WeightsDigest | None:
    """Check a rank's part of the base against the folder. Not collective. `wire_dtype`: dtype of floating tensors in
    versions, as safetensors names it.
    """
    digest = BaseModel(folder, base.saved).check(base.shards, base.sources, digested=digested)
    wire = WireFormat.seen(wire_dtype, {name: saved.dtype for name, saved in base.saved.items()})
    return None if digest is None else WeightsDigest(digest, wire)


def _opened(folder: Path) -> Weights:
    try:
        return open_weights(folder)
    except (WeightsError, OSError) as error:
        raise ConfigError(f"model.path={folder}: the base of an adapter is read from its folder: {error}") from error


def _has(tensor: torch.Tensor, shard: Shard, held: torch.Tensor) -> bool:
    """Tell whether a rank's elements of a tensor equal the tensor's."""
    matrix = tensor.reshape(matrix_view(shard.shape))
    rects = sorted(shard.rects)
    ours = [matrix[each.row : each.row + each.rows, each.col : each.col + each.cols].reshape(-1) for each in rects]
    if not ours:
        return held.numel() == 0
    dtype = to_torch(shard.dtype)
    return torch.equal(_bytes(torch.cat(ours).to(dtype)), _bytes(held.detach().cpu().reshape(-1).to(dtype)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
