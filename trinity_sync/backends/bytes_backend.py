"""The weights of `workload=bytes`: a model's tensors, cut in rows as FSDP2 would, that change a little each step.

A value depends only on the seed, the step, the tensor and its place in it: any number of ranks has the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut
from xxhash import xxh3_64_intdigest

from trinity_sync.backends.adapters import HeldPart, HeldSources, SavedParts
from trinity_sync.backends.base import Deadline, Format
from trinity_sync.backends.meetings import RankMeeting
from trinity_sync.backends.safe_loading import StateDict, load_file
from trinity_sync.backends.saved_tensors import on_the_wire, travelling
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.models.files import CONFIG, ModelFiles
from trinity_sync.models.shapes import adapter_list, empty_model, lora_of
from trinity_sync.protocol.parts import rank_file
from trinity_sync.weights.saved_views import SavedTensor, row_major
from trinity_sync.weights.shards import Shard, listed

_BLOCK = 1 << 20
"""Number of random values; the rest of a tensor, and other tensors, are variations of them."""
_MANTISSA = 7
"""Bits of a bf16 value's mantissa."""


class BytesBackend:
    """A rank's weights, and its view of them.

    Args:
        folder: of the model, as `BytesOption.make_model` writes it.
        changed: share of the bf16 values that a step changes.
        master_dtype: ``bf16`` or ``fp32``.
        optimizer: keep and save two averages as well.

    Raises:
        ConfigError: the saved form of a tensor is not a view of the model's.
    """

    deadline: Deadline = "optimizer_step"

    def __init__(
        self,
        folder: Path,
        wire_dtype: str,
        *,
        keep_fp32: Sequence[str] | None = None,
        rank: int,
        ranks: int,
        seed: int,
        changed: float,
        master_dtype: str,
        optimizer: bool,
        device: str,
    ) -> None:
        model = empty_model(folder, None, "meta")
        self._files = ModelFiles({CONFIG: (folder / CONFIG).read_bytes()})
        self._rank, self._ranks = rank, ranks
        self._seed, self._changed, self._device = seed, changed, device
        self._callbacks: list[Callable[[], None]] = []
        self._step = torch.zeros(1, dtype=torch.int64)
        lora = lora_of(folder)
        self._saved = (
            travelling(adapter_list(model, **lora), wire_dtype, keep_fp32 or (), strict=keep_fp32 is not None)
            if lora
            else on_the_wire(model, wire_dtype, keep_fp32)
        )
        made = sorted(name for name, tensor in self._saved.items() if tensor.held is None)
        if made:
            raise ConfigError(
                f"model.shapes: transformers saves {listed(made)} in another form (several "
                "combined, or copied); choose another model"
            )
        parts = SavedParts(self._saved)
        wanted = set(parts.held)
        if lora:
            self._shapes = {tensor.held: tensor.shape for tensor in self._saved.values() if tensor.held is not None}
        else:
            tensors = (*model.named_parameters(), *model.named_buffers())
            self._shapes = {
                name: tuple(tensor.shape) for name, tensor in tensors if name in wanted and tensor.is_floating_point()
            }
        self._rows = {name: _rows_of(shape, rank, ranks) for name, shape in self._shapes.items()}
        dtype = torch.float32 if master_dtype == "fp32" else torch.bfloat16
        noise = _noise(seed, device)
        self._held = {}
        for name, (first, last) in self._rows.items():
            local = torch.empty((last - first, *self._shapes[name][1:]), dtype=dtype, device=device)
            _fill(local.view(-1), first * prod(self._shapes[name][1:]), _key(seed, name), noise)
            self._held[name] = local
        self._averages = {
            f"{kind}.{name}": torch.full_like(local, 1e-8, dtype=torch.float32)
            for name, local in self._held.items()
            for kind in (("exp_avg", "exp_avg_sq") if optimizer else ())
        }
        self._sources = HeldSources(
            [
                HeldPart(local.detach, parts.of(name, shape, first * prod(shape[1:]), last * prod(shape[1:])))
                for name, local in self._held.items()
                for shape, (first, last) in ((self._shapes[name], self._rows[name]),)
            ],
            keep=True,
        )

    def shards(self) -> Sequence[Shard]:
        return self._sources.shards()

    def saved(self) -> Mapping[str, SavedTensor]:
        return self._saved

    def sources(self) -> Mapping[str, torch.Tensor]:
        return self._sources.now()

    def update(self, step: int) -> float:
        """Change the weights as `step` does, and return the share of changed values."""
        for callback in self._callbacks:
            callback()
        count, bit = round(self._changed * _BLOCK), _bit(step)
        places = np.sort(np.random.default_rng([self._seed, step]).permutation(_BLOCK)[:count])
        on_device = torch.from_numpy(places)
        changed = total = 0
        for name, local in self._held.items():
            flat = local.view(-1)
            if len(flat) == 0:
                continue
            start = self._rows[name][0] * prod(self._shapes[name][1:])
            changed += _flip(flat, start, _key(step, name), places, on_device.to(flat.device), bit)
            total += len(flat)
        self._step.fill_(step)
        return changed / max(total, 1)

    def state(self, form: Format) -> Mapping[str, object]:
        files: StateDict = {
            self._file("model"): {name: self._sharded(name, local) for name, local in self._held.items()},
            self._file("extra_state"): {"step": self._step.clone()},
        }
        if self._averages:
            files[self._file("optim")] = dict(self._averages)
        return files

    @cached_property
    def _mesh(self) -> DeviceMesh:
        """The mesh of all ranks, on the device of their weights. Collective the first time."""
        return DeviceMesh(self._device, list(range(self._ranks)))

    def _sharded(self, name: str, local: torch.Tensor) -> DTensor:
        shape = torch.Size(self._shapes[name])
        tensor = DTensor.from_local(
            local, self._mesh, [Cut(0)], run_check=False, shape=shape, stride=row_major(self._shapes[name])
        )
        assert isinstance(tensor, DTensor)
        return tensor

    def write_distributed(
        self, value: object, copied: Callable[[torch.Tensor], torch.Tensor], folder: Path, meeting: RankMeeting
    ) -> list[Path]:
        raise RunError("backend=bytes writes the format verl only")

    def before_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def write_metadata(self, folder: Path) -> list[Path]:
        sharding = folder / "fsdp_config.json"
        files = self._files.write(folder / "huggingface")
        sharding.write_text(json.dumps({"FSDP_version": 2, "world_size": self._ranks}))
        return [*files, sharding]

    def load(self, folder: Path) -> None:
        path, averages = folder / self._file("model"), folder / self._file("optim")
        model = load_file(path, mmap=True)
        found = {name: tuple(tensor.shape) for name, tensor in model.items()}
        if odd := {name for name, _ in found.items() ^ self._shapes.items()}:
            raise ConfigError(
                f"{path} is of another model, as {listed(sorted(odd), 3)} show; resume with the model.shapes, "
                "model.layers and model.lora with which it was saved"
            )
        if averages.exists() != bool(self._averages):
            raise ConfigError(f"{folder} was saved with workload.optimizer={str(averages.exists()).lower()}; set that")
        for name, local in self._held.items():
            local.copy_(model[name].to_local())
        if self._averages:
            saved = load_file(averages, mmap=True)
            for name, local in self._averages.items():
                local.copy_(saved[name])
        dist.barrier()

    def _file(self, name: str) -> str:
        return rank_file(name, self._ranks, self._rank)


def _rows_of(shape: Sequence[int], rank: int, ranks: int) -> tuple[int, int]:
    """Return rows [first, last) of a rank, as torch.chunk cuts them."""
    rows = shape[0] if shape else 1
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def _key(number: int, name: str) -> int:
    return int(xxh3_64_intdigest(f"{number} {name}".encode()))


def _noise(seed: int, device: str) -> torch.Tensor:
    drawn = np.random.default_rng(seed).standard_normal(_BLOCK, dtype=np.float32) * np.float32(0.02)
    return torch.from_numpy(drawn).to(torch.bfloat16).view(torch.int16).to(device)


def _blocks(numel: int, start: int, key: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield elements [first, last) of a range that begins at element `start` of its tensor, each with their place in a
    block and the block's number.
    """
    at = 0
    while at < numel:
        number, place = divmod(start + at + key % _BLOCK, _BLOCK)
        length = min(_BLOCK - place, numel - at)
        yield at, at + length, place, number
        at += length


def _fill(flat: torch.Tensor, start: int, key: int, noise: torch.Tensor) -> None:
    for first, last, place, number in _blocks(len(flat), start, key):
        low = (key ^ number * 0x9E3779B1) >> 7 & 0x7F  # other mantissas in each block
        flat[first:last] = (noise[place : place + last - first] ^ low).view(torch.bfloat16)


def _bit(step: int) -> int:
    """Return the bit of bf16's mantissa that a step changes, from the last place on.

    As in a Gray code, a value that every step changes returns to its first value after 128 steps, and not after two.
    """
    return min((step & -step).bit_length() - 1, _MANTISSA - 1)


def _flip(
    flat: torch.Tensor, start: int, key: int, places: NDArray[np.int64], on_device: torch.Tensor, bit: int
) -> int:
    """Change a bit of the bf16 values at some places of each block, and return their number."""
    wide = flat.element_size() == 4
    patterns, one = flat.view(torch.int32 if wide else torch.int16), 1 << (bit + 16 if wide else bit)
    count = 0
    for first, last, place, _ in _blocks(len(flat), start, key):
        begin, end = np.searchsorted(places, (place, place + last - first))
        if begin < end:
            index = on_device[begin:end] - (place - first)
            patterns[index] = patterns[index] ^ one
            count += int(end - begin)
    return count
