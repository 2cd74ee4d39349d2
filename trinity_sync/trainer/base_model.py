"""The base of a LoRA adapter, which is not sent: the model folder, from which the explorers read it, too.

Its digest tells it apart, and each rank sees for itself at start that what it holds of the base is what the folder has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from trinity_sync.backends.base import HeldBase
from trinity_sync.checkpoint.reading import Weights, WeightsError, open_weights
from trinity_sync.errors import ConfigError
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.saved_views import Saved
from trinity_sync.weights.shards import Shard, listed, matrix_view
from trinity_sync.weights.tensors import digest_entry, to_torch


class BaseModel:
    """The base as it lies in its folder.

    Args:
        model_path: the folder, or a hub id whose files have been fetched.
        saved: the tensors that it has to have, in the dtypes in which a version of it would travel.

    Raises:
        ConfigError: it cannot be read, or has others.
    """

    def __init__(self, model_path: str, saved: Mapping[str, Saved]) -> None:
        self._path = model_path
        self._saved = saved
        self._weights = _opened(model_path)
        for name, tensor in saved.items():
            found = self._weights.info(name).shape if name in self._weights else None
            if found != tensor.shape:
                has = f"has it as {list(found)}" if found is not None else "has no tensor of that name"
                raise ConfigError(
                    f"model.path={model_path}: the base of the adapter has {name} of {list(tensor.shape)}, the folder "
                    f"{has}; save the model with save_pretrained of this transformers, and name that folder"
                )

    def digest(self) -> str:
        """Compute the version digest (hex); reads all of it, a tensor at a time."""
        entries = []
        for name, tensor in self._saved.items():
            entries.append(digest_entry(name, self._read(name), tensor.dtype))
        return version_digest(entries)

    def check(self, shards: Sequence[Shard], sources: Mapping[str, torch.Tensor]) -> None:
        """Check that a rank's part of the base is the folder's, byte for byte in the dtypes of the wire.

        Args:
            shards: what the rank holds.
            sources: the elements of each, by name, on any device.

        Raises:
            ConfigError: it is not; names the tensors.
        """
        odd = [shard.name for shard in shards if not self._has(shard, sources[shard.name])]
        if odd:
            raise ConfigError(
                f"model.path={self._path}: what the trainer holds of the adapter's base is not what the folder has in "
                f"{listed(sorted(odd))}, so explorers, which read the folder, would work upon another base; was it "
                "changed while the run started, or does backend.master_dtype round more than sync.wire_dtype?"
            )

    def _has(self, shard: Shard, held: torch.Tensor) -> bool:
        matrix = self._read(shard.name).reshape(matrix_view(shard.shape))
        rects = sorted(shard.rects)
        ours = [matrix[each.row : each.row + each.rows, each.col : each.col + each.cols].reshape(-1) for each in rects]
        if not ours:
            return held.numel() == 0
        dtype = to_torch(shard.dtype)
        found = torch.cat(ours).to(dtype)
        return torch.equal(_bytes(found), _bytes(held.detach().cpu().reshape(-1).to(dtype)))

    def _read(self, name: str) -> torch.Tensor:
        try:
            return self._weights.read(name)
        except WeightsError as error:
            raise ConfigError(f"model.path={self._path}: {error}") from error


def base_digest(model_path: str, base: HeldBase, *, told: bool) -> str | None:
    """Check a rank's part of the base against the folder. Not collective.

    Args:
        model_path: see `BaseModel`.
        base: what the rank holds.
        told: this rank is to compute the digest.

    Returns:
        The digest of the folder's, None where it was not to be computed.

    Raises:
        ConfigError: the folder cannot be read, or is of another model.
    """
    model = BaseModel(model_path, base.saved)
    model.check(base.shards, base.sources)
    return model.digest() if told else None


def _opened(model_path: str) -> Weights:
    folder = Path(model_path)
    try:
        if not folder.is_dir():
            from transformers.utils import cached_file

            folder = Path(str(cached_file(model_path, "config.json"))).parent
        return open_weights(folder)
    except (WeightsError, OSError) as error:
        raise ConfigError(
            f"model.path={model_path}: the base of an adapter is read from its folder: {error}"
        ) from error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
