"""The tensors of an adapter's versions, the layers that can have an adapter, and the sources of versions on a rank.

The tensors follow from the architecture and peft's config alone, on a model without storage, as in `saved_tensors`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trinity_sync.backends.base import EngineModel
from trinity_sync.backends.saved_tensors import meta_model, travelling
from trinity_sync.config.lora_settings import Adapter
from trinity_sync.errors import ConfigError, RunError, in_one_line
from trinity_sync.models.adapter_layers import AdapterLayers, adapter_layers
from trinity_sync.weights import lora
from trinity_sync.weights.lora import CONFIG_FILE, PREFIX, WEIGHTS_FILE, held_adapter, saved_name, target_text
from trinity_sync.weights.saved_views import Cut, SavedTensor, by_held, cut, row_major
from trinity_sync.weights.shards import Shard, listed, matrix_view, shape_text
from trinity_sync.weights.staging import ComputedTensor, Sources
from trinity_sync.weights.tensors import from_torch

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel


def adapter_by(
    model_config: EngineModel, config: LoraConfig, wire_dtype: str, keep_fp32: Sequence[str] | None = None
) -> dict[str, SavedTensor]:
    """Return the tensors that peft's `save_pretrained` would write, by name, in wire dtypes.

    `keep_fp32`: those that travel in fp32 instead, by name patterns (`found_in`).
    """
    saved = {
        saved_name(name): SavedTensor.as_held(from_torch(tensor.dtype), tensor.shape, name)
        for name, tensor in _on_meta(meta_model(model_config), config).items()
    }
    # not strict: an entry may match only tensors of the base
    return travelling(saved, wire_dtype, keep_fp32 or (), strict=False)


@contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """Compute with the base of a model with a LoRA adapter alone during the block.

    peft's own way also switches `requires_grad` of the adapter's parameters off and on. FSDP2 creates its unsharded
    parameters only once, and would keep the first setting.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in model.modules() if isinstance(part, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_targets(model: PreTrainedModel, adapter: Adapter, strategy: str) -> AdapterLayers:
    """Return the layers that get the requested adapter, before an engine is built. `model`: on the meta device."""
    from peft import LoraConfig

    try:
        layers = adapter_layers(model, adapter.of_peft, saved=adapter.path is not None)
    except ConfigError as error:
        if adapter.path is None:
            raise
        raise ConfigError(f"model.lora.path={adapter.path}, {CONFIG_FILE}: {error}") from error
    if strategy == "fsdp2" and any(name.rpartition(".")[2] == "lm_head" for name in layers.shapes):
        raise ConfigError(
            "model.lora.targets includes lm_head, which verl wraps by itself with backend=fsdp2, and torch cannot do "
            "so with peft's layer: leave it out, or use backend=fsdp"
        )
    if adapter.path is None:
        _on_meta(model, LoraConfig(r=adapter.rank, target_modules=list(layers.names)))
    else:
        wanted = _on_meta(model, LoraConfig.from_pretrained(adapter.path))
        check_shapes(Path(adapter.path), {saved_name(name): tuple(tensor.shape) for name, tensor in wanted.items()})
    return layers


def _on_meta(model: PreTrainedModel, config: LoraConfig) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors, by their names in the model, which is on the meta device."""
    from peft import get_peft_model

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the base on the meta device
            with torch.device("meta"):
                get_peft_model(model, copy.deepcopy(config))
    except ValueError as error:
        raise ConfigError(
            f"model.lora.targets={target_text(config.target_modules or ())} does not fit this model: "
            f"{in_one_line(error)}"
        ) from error
    return held_adapter(model)


def check_shapes(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a saved adapter has the tensors that a model needs (shapes by saved name), and no others.

    Only the header of the file in the folder `path` is read.
    """
    from safetensors import SafetensorError, safe_open

    file = path / WEIGHTS_FILE
    try:
        with safe_open(file, "pt") as opened:
            found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.lora.path={path}: {file} cannot be read: {error}") from error
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        found_text = [f"has no {listed(missing)}"] if missing else []
        found_text += [f"has {listed(unknown)}, which this one does not take"] if unknown else []
        raise ConfigError(f"model.lora.path={path} is an adapter for another model: it {', and '.join(found_text)}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConfigError(
                f"model.lora.path={path} is an adapter for another model: {name.removeprefix(PREFIX)} is "
                f"{shape_text(found[name])} there, this model wants {shape_text(shape)}"
            )


# The sources of versions: views of a rank's tensors, reused while these stay in place. Models with experts save
# thousands of tensors that are parts of a few.


class HeldPart:
    """A range of one of the model's tensors, and the published parts (`cuts`) of the saved tensors in it.

    `local` returns the range's present elements, detached and contiguous; with `is_copy` a new copy at each call.
    """

    def __init__(self, local: Callable[[], torch.Tensor], cuts: Sequence[Cut], *, is_copy: bool = False) -> None:
        self.cuts = cuts
        self._local = local
        self._stays = not is_copy and all(cut.is_view for cut in cuts)
        self._place: tuple[int, torch.dtype] | None = None

    def moved(self, *, keep: bool) -> dict[str, torch.Tensor]:
        """Return the sources by name that differ from those of the last call.

        `keep`: the caller keeps the tensors, so that their storage cannot be reused for others meanwhile.
        """
        local = self._local()
        place = local.data_ptr(), local.dtype
        if keep and self._stays and place == self._place:
            return {}
        self._place = place
        return {cut.shard.name: cut.of(local) for cut in self.cuts}


class HeldSources:
    """The sources of a rank. `parts`: of the rank's tensors. `keep`: their storage stays. Else no reference is kept, so
    that the storage can be released.
    """

    def __init__(self, parts: Iterable[HeldPart], *, keep: bool) -> None:
        self._parts = [part for part in parts if part.cuts]
        self._keep = keep
        self._last: dict[str, torch.Tensor] = {}

    def shards(self) -> list[Shard]:
        """Return the shards in the order of the memory, as far as they are adjacent there."""
        return [cut.shard for part in self._parts for cut in part.cuts]

    def now(self) -> Mapping[str, torch.Tensor]:
        """Return the sources by name: the same objects as at the last call where nothing moved."""
        moved: dict[str, torch.Tensor] = {}
        for part in self._parts:
            moved |= part.moved(keep=self._keep)
        sources = {**self._last, **moved} if moved else self._last
        if self._keep:
            self._last = sources
        return sources


class SavedParts:
    """The saved tensors of a model, by the model's tensors."""

    def __init__(self, saved: Mapping[str, SavedTensor]) -> None:
        self._saved = saved
        self._names = by_held(saved)

    @property
    def held(self) -> Collection[str]:
        return self._names

    def of(self, held: str, shape: Sequence[int], start: int, stop: int) -> list[Cut]:
        """Return the parts of the saved tensors in a range of a model tensor's elements."""
        names = self._names.get(held, [])
        size = sum(prod(self._saved[name].shape) for name in names)
        if names and size != prod(shape):
            raise ConfigError(
                f"model.path: the engine holds {held} as {shape_text(shape)}, {prod(shape)} elements; its saved form "
                f"by the model's config has {size}"
            )
        found = (cut(name, self._saved[name], start, stop) for name in names)
        return [part for part in found if part is not None]

    def empty(self) -> dict[str, SavedTensor]:
        return {name: saved for name, saved in self._saved.items() if 0 in saved.shape and saved.held is not None}


class MergedSources:
    """A rank's sources of the sums of base and adapter (`sync.what=merged`), in rows, as `merge_and_unload` of peft.

    The constructor is collective. `device` returns the present device of the engine's parameters, the same on all
    ranks.

    Raises ConfigError if the adapter is more than products of matrices, or the saved form of a weight differs from the
    model's.
    """

    def __init__(
        self,
        base: HeldSources,
        saved: Mapping[str, SavedTensor],
        adapter: HeldSources,
        adapter_saved: Mapping[str, SavedTensor],
        config: LoraConfig,
        device: Callable[[], torch.device],
    ) -> None:
        try:
            self._scale, self._pairs = lora.scaling(config.to_dict()), lora.pairs(adapter_saved)
        except RunError as error:
            raise ConfigError(f"sync.what=merged: {error}") from error
        odd = sorted(name for name in self._pairs if name not in saved or not _is_plain(saved[name]))
        if odd:
            raise ConfigError(
                f"sync.what=merged: the adapter is for {listed(odd)}, which the model saves in another form; "
                "choose sync.what=adapter"
            )
        self._transposed = bool(config.fan_in_fan_out)
        self._base = base
        self._factors = GatheredTensors(adapter, adapter_saved, device)
        self._starts = {shard.name: _span(shard)[0] for shard in base.shards()}

    def shards(self) -> Sequence[Shard]:
        return self._base.shards()

    def now(self) -> Sources:
        """Return the sources by name; sums are computed, with the present adapter, when they are copied. Collective."""
        factors, sources = self._factors.now(), dict[str, torch.Tensor | ComputedTensor](self._base.now())
        for name in sources.keys() & self._pairs.keys():
            part = sources[name]
            assert isinstance(part, torch.Tensor), "sources of the base are tensors"
            a, b = (factors[factor].to(part.device) for factor in self._pairs[name])
            compute = partial(self._sum, part, a, b, self._starts[name])
            sources[name] = ComputedTensor(torch.float32, part.device, part.numel(), compute)
        return sources

    def _sum(self, part: torch.Tensor, a: torch.Tensor, b: torch.Tensor, start: int) -> torch.Tensor:
        """Add the adapter to a part of a weight that begins at the weight's element `start`."""
        change = lora.change(a, b, self._scale, transposed=self._transposed).reshape(-1)
        return part.float() + change[start : start + part.numel()].view(part.shape)


class GatheredTensors:
    """Gathers tensors of one dtype whose ranges are spread over the ranks. The constructor is collective.

    `device` returns the device of the gathered tensors, the same on all ranks; a rank without a range cannot derive it.
    """

    def __init__(self, held: HeldSources, saved: Mapping[str, SavedTensor], device: Callable[[], torch.device]) -> None:
        self._held = held
        self._device = device
        self._shapes = {name: tensor.shape for name, tensor in saved.items()}
        mine = [(shard.name, *_span(shard)) for shard in held.shards()]
        self._spans: list[list[tuple[str, int, int]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(self._spans, mine)
        self._most = max(sum(stop - start for _, start, stop in spans) for spans in self._spans)

    def now(self) -> dict[str, torch.Tensor]:
        """Return whole copies in fp32, by name. Collective, with the group's timeout."""
        local, device = self._held.now(), self._device()
        mine = [local[name].reshape(-1).float() for name, _, _ in self._spans[dist.get_rank()]]
        flat = torch.zeros(self._most, device=device)
        if mine:
            joined = torch.cat(mine)
            flat[: joined.numel()].copy_(joined)
        gathered = [torch.empty_like(flat) for _ in self._spans]
        dist.all_gather(gathered, flat)
        whole = {name: torch.zeros(prod(shape), device=device) for name, shape in self._shapes.items()}
        for part, spans in zip(gathered, self._spans, strict=True):
            at = 0
            for name, start, stop in spans:
                whole[name][start:stop] = part[at : at + stop - start]
                at += stop - start
        return {name: tensor.reshape(self._shapes[name]) for name, tensor in whole.items()}


def _span(shard: Shard) -> tuple[int, int]:
    """Return the range of the flattened tensor's elements that a shard is: first, and one past the last."""
    if not shard.rects:
        return 0, 0
    first = min(shard.rects)
    start = first.row * matrix_view(shard.shape)[1] + first.col
    return start, start + sum(rect.rows * rect.cols for rect in shard.rects)


def _is_plain(saved: SavedTensor) -> bool:
    return saved.held is not None and saved.offset == 0 and saved.stride == row_major(saved.shape)
