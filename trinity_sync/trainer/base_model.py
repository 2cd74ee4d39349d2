"""The base of a LoRA adapter, which is not sent: the model folder, from which the explorers read it, too.

Its digest tells it apart, and each rank sees for itself at start that what it holds of the base is what the folder has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from trinity_sync.actors.rank_client import Digested
from trinity_sync.backends.base import HeldBase
from trinity_sync.checkpoint.reading import Weights, WeightsError, open_weights
from trinity_sync.errors import ConfigError
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.saved_views import Saved
from trinity_sync.weights.shards import Shard, listed, matrix_view
from trinity_sync.weights.tensors import digest_entry, to_torch
from trinity_sync.weights.wire import WireFormat


class BaseModel:
    """The base as it lies in its folder.

    Args:
        folder: in Hugging Face format.
        saved: the tensors that it has to have, in the dtypes in which a version of it would travel.

    Raises:
        ConfigError: it cannot be read, or has others.
    """

    def __init__(self, folder: Path, saved: Mapping[str, Saved]) -> None:
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
        """Check that a rank's part of the base is the folder's, byte for byte in the dtypes of the wire.

        Reads the tensors of which the rank holds something, one at a time; with `digested` all of them, each once.

        Args:
            shards: what the rank holds.
            sources: the elements of each, by name, on any device.
            digested: compute the version digest of the folder's.

        Returns:
            The digest, hex; None where it was not asked for.

        Raises:
            ConfigError: the rank holds something else; names the tensors.
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
                f"model.path={self._folder}: what the trainer holds of the adapter's base is not what the folder has "
                f"in {listed(sorted(odd))}, so explorers, which read the folder, would work upon another base; was it "
                "changed while the run started, or does backend.master_dtype round more than sync.wire_dtype?"
            )
        return version_digest(entries) if digested else None

    def _read(self, name: str) -> torch.Tensor:
        try:
            return self._weights.read(name)
        except WeightsError as error:
            raise ConfigError(f"model.path={self._folder}: {error}") from error


def check_held(folder: Path, base: HeldBase, wire_dtype: str, *, told: bool) -> Digested | None:
    """Check a rank's part of the base against the folder. Not collective.

    Args:
        folder: see `BaseModel`.
        base: what the rank holds.
        wire_dtype: in which floating tensors travel, as safetensors names it.
        told: this rank is to compute the digest.

    Returns:
        The digest of the folder's, None where it was not to be computed.

    Raises:
        ConfigError: the folder cannot be read, or is of another model.
    """
    digest = BaseModel(folder, base.saved).check(base.shards, base.sources, digested=told)
    wire = WireFormat.seen(wire_dtype, {name: saved.dtype for name, saved in base.saved.items()})
    return None if digest is None else Digested(digest, wire)


def _opened(folder: Path) -> Weights:
    try:
        return open_weights(folder)
    except (WeightsError, OSError) as error:
        raise ConfigError(f"model.path={folder}: the base of an adapter is read from its folder: {error}") from error


def _has(tensor: torch.Tensor, shard: Shard, held: torch.Tensor) -> bool:
    """Whether the elements that a rank holds of a tensor are the tensor's."""
    matrix = tensor.reshape(matrix_view(shard.shape))
    rects = sorted(shard.rects)
    ours = [matrix[each.row : each.row + each.rows, each.col : each.col + each.cols].reshape(-1) for each in rects]
    if not ours:
        return held.numel() == 0
    dtype = to_torch(shard.dtype)
    return torch.equal(_bytes(torch.cat(ours).to(dtype)), _bytes(held.detach().cpu().reshape(-1).to(dtype)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
