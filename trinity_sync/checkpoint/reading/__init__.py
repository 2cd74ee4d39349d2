"""Reads the weights of any checkpoint, tensor by tensor, without a training engine. Needs torch; only opens files.

`open_weights` recognises the format by the files in the folder. A tensor is assembled when it is read, so memory stays
near the size of one tensor. Export and diff call it, and so may other programs::

    weights = open_weights(Path("checkpoints/global_step_20"))
    for name in weights:
        tensor = weights.read(name)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from trinity_sync.checkpoint.folder.contents import Manifest, NoManifestError, read_manifest
from trinity_sync.checkpoint.folder.leases import find_adapter_config, find_config, weights_folder
from trinity_sync.checkpoint.reading import verl_shards
from trinity_sync.checkpoint.reading.distributed import megatron_folder, open_distributed, open_megatron
from trinity_sync.checkpoint.reading.tensor_pieces import TensorInfo, TensorReader, WeightsError
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.tensors import digest_entry
from trinity_sync.weights.wire import WireFormat

__all__ = ["TensorInfo", "Weights", "WeightsError", "open_weights"]

_MODEL_PREFIX = "model."
"""Prefix of the model's tensors in a checkpoint of torch.distributed.checkpoint."""


class RestoredVersion(NamedTuple):
    """A version of a run's history."""

    base: Path  # the weights-only checkpoint from which it was made
    manifest: Manifest
    files: list[Path]  # of its parts


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors that ``save_pretrained`` would write, under the names that it would use; for an adapter, peft's
    names. Iterates over the names.

    Attributes:
        folder: the opened folder.
        format: how the weights are stored, for people.
        config: folder with the model's config and tokenizer; None: not found. The names are then those that are stored,
            and tied tensors may appear twice.
        manifest: the checkpoint's manifest; None: there is none.
        adapter: these are a LoRA adapter, without its base.
        adapter_config: the adapter's ``adapter_config.json``; None: not found.
    """

    folder: Path
    format: str
    config: Path | None
    manifest: Manifest | None
    _sources: Mapping[str, TensorReader]
    adapter: bool = False
    adapter_config: Mapping[str, object] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of a tensor, without reading it. KeyError for an unknown name."""
        return self._sources[name].info

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor to the CPU, in its stored dtype. Do not write to it: it may be a mapped file.

        Raises:
            KeyError: an unknown name.
            WeightsError: a file is damaged.
        """
        return self._sources[name].read()

    def digest(self, wire: WireFormat | str | None) -> str:
        """Return the version digest (hex) of the weights; reads all of them.

        Args:
            wire: the dtypes to which tensors are cast, or one dtype for all floating ones; None: not cast.
        """
        return version_digest([digest_entry(name, self.read(name), wire) for name in self])

    def without(self, names: Collection[str]) -> Weights:
        """Return these weights without some names, which may be unknown."""
        return replace(self, _sources={name: source for name, source in self._sources.items() if name not in names})

    def merged_into(self, base: Weights) -> Weights:
        """Return the base with this adapter added, computed in float32 when a tensor is read.

        Raises:
            WeightsError: they do not belong together, or the adapter's scale is not known.
        """
        if self.adapter_config is None:
            raise WeightsError(
                f"no adapter_config.json was found in or next to {self.folder}, so its scale is not known"
            )
        if base.adapter:
            raise WeightsError(f"{base.folder} is a LoRA adapter, and no base of one")
        sources = verl_shards.merge(self._sources, self.adapter_config, base._sources, base.config)
        return Weights(self.folder, f"{self.format}, merged into {base.folder}", base.config, None, sources)


def open_weights(folder: Path, config: Path | None = None, version: RestoredVersion | None = None) -> Weights:
    """Open the weights in a folder.

    Args:
        folder: a step folder (with ``actor/``), such an ``actor`` folder, or a Hugging Face folder.
        config: folder with the model's ``config.json``, if it is not next to the weights.
        version: opened in place of the weights in the folder, which is its base.

    Raises:
        WeightsError: there are no weights of a known format; a file is missing or damaged, or files contradict each
            other. A file whose bytes were changed in place is found by its digest only: see `catalog.verify`.
        ManifestError: the folder's manifest is damaged.
    """
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not a folder")
    try:
        manifest = read_manifest(folder) if version is None else version.manifest
    except NoManifestError:
        manifest = None
    place = weights_folder(folder)
    if manifest is not None:
        _check_sizes(folder, manifest)
    given, config = config, config or find_config(folder)
    sources: Mapping[str, TensorReader]
    saved = False  # the names are not those of `save_pretrained`
    if files := verl_shards.shard_files(place):
        name, sources = f"verl's files of {len(files)} ranks", verl_shards.open_shards(files)
    elif (place / "dcp").is_dir():
        name, sources = "torch.distributed.checkpoint", open_distributed(place / "dcp", _MODEL_PREFIX)
    elif dist_ckpt := megatron_folder(place):
        if config is None:
            raise WeightsError(f"{dist_ckpt} holds a Megatron model, which cannot be read without its config.json")
        name, sources = "Megatron's distributed checkpoint", open_megatron(dist_ckpt, config)
    elif files := verl_shards.part_files(place) if version is None else version.files:
        name, sources, saved = f"weights of {len(files)} parts", verl_shards.open_parts(files), True
    elif found := next((path for path in (place, place / "huggingface") if verl_shards.is_hugging_face(path)), None):
        name, sources, saved = "Hugging Face", verl_shards.open_hugging_face(found), True
        config = config or found
    else:
        raise WeightsError(_nothing(place))
    adapter = verl_shards.adapter_form(sources, place)
    if adapter is not None:
        return Weights(folder, f"LoRA adapter, {name}", given, manifest, adapter, True, _config_of(folder, manifest))
    if config is not None and not saved:
        sources = verl_shards.saved_form(sources, config)
    return Weights(folder, name, config, manifest, sources)


def _config_of(folder: Path, manifest: Manifest | None) -> Mapping[str, object] | None:
    """Return an adapter's config from the manifest, or from a file in or near the folder."""
    if manifest is not None and manifest.base is not None and manifest.base.adapter is not None:
        return manifest.base.adapter
    path = find_adapter_config(folder)
    return None if path is None else verl_shards.read_adapter_config(path)


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that the model's files have the sizes in the manifest."""
    for entry in manifest.files:
        if not entry.path.startswith(("actor/model_", "actor/weights_", "actor/dcp/", "actor/model/dist_ckpt/")):
            continue
        path = folder / entry.path
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise WeightsError(f"{path} is missing, which the manifest lists")
        if size != entry.bytes:
            raise WeightsError(f"{path} is torn: it has {size} bytes, the manifest says {entry.bytes}")


def _nothing(place: Path) -> str:
    """Return the error for a folder without weights."""
    binary = next(iter(sorted(place.glob("pytorch_model*.bin"))), None)
    if binary is not None:
        return f"{binary} is a pickle; of Hugging Face folders only those with safetensors are read"
    return (
        f"{place} holds no weights of a format that is read: verl's model_world_size_*_rank_*.pt, this program's "
        "weights_*.safetensors, dcp/.metadata, model/dist_ckpt/.metadata, or a Hugging Face model's safetensors"
    )
