"""What a version of an adapter has to consist of, and on which layers of a model an adapter can be trained.

Worked out from the architecture and peft's config alone, on a model without storage, as for whole models in `saved`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trinity_sync.backends.engine_types import EngineModel
from trinity_sync.backends.saved_tensors import meta_model, travelling
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.models.adapter_layers import AdapterLayers, adapter_layers
from trinity_sync.weights import lora
from trinity_sync.weights.lora import CONFIG_FILE, PREFIX, WEIGHTS_FILE, held_adapter, saved_name, target_text
from trinity_sync.weights.saved_views import Cut, Saved, by_held, cut, row_major
from trinity_sync.weights.shards import Shard, listed, matrix_view, shape_text
from trinity_sync.weights.staging import Computed, Sources
from trinity_sync.weights.tensors import from_torch

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel


def adapter_by(
    model_config: EngineModel, config: LoraConfig, wire_dtype: str, keep_fp32: Sequence[str] | None = None
) -> dict[str, Saved]:
    """Return the tensors that peft's `save_pretrained` would write, by name, in the dtypes in which they travel.

    Args:
        model_config: the model config of verl's engine.
        config: peft's, of the adapter.
        wire_dtype: the dtype in which floating tensors travel, as safetensors names it.
        keep_fp32: which of them travel in fp32 nevertheless, by parts of names (`found_in`); None: none.
    """
    saved = {
        saved_name(name): Saved.as_held(from_torch(tensor.dtype), tensor.shape, name)
        for name, tensor in _on_meta(meta_model(model_config), config).items()
    }
    # not strict: an entry may mean tensors of the base alone
    return travelling(saved, wire_dtype, keep_fp32 or (), strict=False)


@contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the base of a model with a LoRA adapter is at work alone.

    peft's own way also says of the adapter's parameters that they need no gradient, and then that they do. FSDP2 makes
    those that it computes with only once, and would go on with what it was told first.
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


def adapter_targets(model: PreTrainedModel, fields: Mapping[str, Any], strategy: str) -> AdapterLayers:
    """Return the layers of a model that get the adapter which is asked for, before an engine is built.

    Args:
        model: on the meta device.
        fields: `WorkerSpec.lora`.
        strategy: the backend's label.

    Raises:
        ConfigError: a target is not a layer that can have an adapter, peft refuses it for this model, or the adapter at
            `model.lora.path` is another model's; one line that names the key and the module.
    """
    from peft import LoraConfig

    path = fields["lora_adapter_path"]
    try:
        layers = adapter_layers(model, fields["target_modules"], saved=path is not None)
    except ConfigError as error:
        raise error if path is None else ConfigError(f"model.lora.path={path}, {CONFIG_FILE}: {error}") from error
    if strategy == "fsdp2" and any(name.rpartition(".")[2] == "lm_head" for name in layers.shapes):
        raise ConfigError(
            "model.lora.targets means lm_head, which verl wraps by itself with backend=fsdp2, as torch cannot with "
            "peft's layer: leave it out, or use backend=fsdp"
        )
    if path is None:
        _on_meta(model, LoraConfig(r=fields["lora_rank"], target_modules=list(layers.names)))
    else:
        wanted = _on_meta(model, LoraConfig.from_pretrained(path))
        check_shapes(Path(path), {saved_name(name): tuple(tensor.shape) for name, tensor in wanted.items()})
    return layers


def _on_meta(model: PreTrainedModel, config: LoraConfig) -> dict[str, torch.Tensor]:
    """The adapter's tensors, under the names that the model, which is on the meta device, then holds them by."""
    from peft import get_peft_model

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a base on the meta device is not
            with torch.device("meta"):
                get_peft_model(model, copy.deepcopy(config))
    except ValueError as error:
        raise ConfigError(
            f"model.lora.targets={target_text(config.target_modules or ())} cannot be had of this model: "
            f"{' '.join(str(error).split())}"
        ) from error
    return held_adapter(model)


def check_shapes(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a saved adapter has the tensors that a model wants, and no others; reads a file's header.

    Args:
        path: the adapter's folder.
        wanted: shapes by saved name.

    Raises:
        ConfigError: it has not; names a tensor.
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
        what = [f"has no {listed(missing)}"] if missing else []
        what += [f"has {listed(unknown)}, which this one does not take"] if unknown else []
        raise ConfigError(f"model.lora.path={path} is an adapter for another model: it {', and '.join(what)}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConfigError(
                f"model.lora.path={path} is an adapter for another model: {name.removeprefix(PREFIX)} is "
                f"{shape_text(found[name])} there, this model wants {shape_text(shape)}"
            )


# The sources of versions from what a rank holds of the model's tensors: the same views as long as these stay where
# they are. Models with experts save thousands of tensors that are parts of a few.


class HeldPart:
    """A range of one of the model's tensors, and what it is of the saved ones.

    Args:
        local: gives the range's elements as they are now, detached and contiguous.
        cuts: what is published of it.
        is_copy: `local` gives a new copy at each call.
    """

    def __init__(self, local: Callable[[], torch.Tensor], cuts: Sequence[Cut], *, is_copy: bool = False) -> None:
        self.cuts = cuts
        self._local = local
        self._stays = not is_copy and all(cut.is_view for cut in cuts)
        self._place: tuple[int, torch.dtype] | None = None

    def moved(self, *, keep: bool) -> dict[str, torch.Tensor]:
        """The sources by name that are not those of the last call any more.

        Args:
            keep: the caller holds on to what it got, so the storage is not another's meanwhile.
        """
        local = self._local()
        place = local.data_ptr(), local.dtype
        if keep and self._stays and place == self._place:
            return {}
        self._place = place
        return {cut.shard.name: cut.of(local) for cut in self.cuts}


class HeldSources:
    """All that a rank publishes.

    Args:
        parts: of the tensors that the rank holds.
        keep: the storage of what is held stays. Else nothing is held on to, so that it can be given back.
    """

    def __init__(self, parts: Iterable[HeldPart], *, keep: bool) -> None:
        self._parts = [part for part in parts if part.cuts]
        self._keep = keep
        self._last: dict[str, torch.Tensor] = {}

    def shards(self) -> list[Shard]:
        """In the order in which they lie in memory, as far as they lie together there."""
        return [cut.shard for part in self._parts for cut in part.cuts]

    def now(self) -> Mapping[str, torch.Tensor]:
        """The sources by name: the same objects as at the last call where nothing moved."""
        moved: dict[str, torch.Tensor] = {}
        for part in self._parts:
            moved |= part.moved(keep=self._keep)
        sources = {**self._last, **moved} if moved else self._last
        if self._keep:
            self._last = sources
        return sources


class SavedParts:
    """What the tensors of a model are saved as.

    Args:
        saved: of all tensors that are saved.
    """

    def __init__(self, saved: Mapping[str, Saved]) -> None:
        self._saved = saved
        self._names = by_held(saved)

    @property
    def held(self) -> Collection[str]:
        """Names of the model's tensors that something is saved of."""
        return self._names

    def of(self, held: str, shape: Sequence[int], start: int, stop: int) -> list[Cut]:
        """What a range of a tensor's elements is of the saved tensors.

        Args:
            held: the tensor's name.
            shape: of the whole tensor.
            start, stop: the elements.

        Raises:
            ConfigError: the tensor has another size than in the architecture, so some of it would be left out.
        """
        names = self._names.get(held, [])
        size = sum(prod(self._saved[name].shape) for name in names)
        if names and size != prod(shape):
            raise ConfigError(
                f"model.path: the engine holds {held} as {shape_text(shape)}, {prod(shape)} elements; what is saved of "
                f"it by the model's config has {size}"
            )
        found = (cut(name, self._saved[name], start, stop) for name in names)
        return [part for part in found if part is not None]

    def empty(self) -> dict[str, Saved]:
        """Tensors without elements, which no rank holds a part of."""
        return {name: saved for name, saved in self._saved.items() if 0 in saved.shape and saved.held is not None}


# Versions of a model with its adapter added (`sync.what=merged`): what `merge_and_unload` of peft gives, in rows.


class MergedSources:
    """What a rank publishes of the sums. Making one is collective.

    Args:
        base: what the rank holds of the base.
        saved: the tensors of all of the base.
        adapter: what the rank holds of the adapter, under the names that peft saves.
        adapter_saved: the tensors of all of the adapter.
        config: peft's.
        device: where the engine's parameters are now, the same on all ranks.

    Raises:
        ConfigError: the adapter is not added as products of matrices alone, or to weights that are saved in another
            form than they are held in.
    """

    def __init__(
        self,
        base: HeldSources,
        saved: Mapping[str, Saved],
        adapter: HeldSources,
        adapter_saved: Mapping[str, Saved],
        config: Any,
        device: Callable[[], torch.device],
    ) -> None:
        try:
            self._scale, self._pairs = lora.scaling(config.to_dict()), lora.pairs(adapter_saved)
        except RunError as error:
            raise ConfigError(f"sync.what=merged: {error}") from error
        odd = sorted(name for name in self._pairs if name not in saved or not _is_plain(saved[name]))
        if odd:
            raise ConfigError(
                f"sync.what=merged: the adapter is for {listed(odd)}, which the model saves in another form than it "
                "holds; choose sync.what=adapter"
            )
        self._transposed = bool(config.fan_in_fan_out)
        self._base = base
        self._factors = GatheredTensors(adapter, adapter_saved, device)
        self._starts = {shard.name: _span(shard)[0] for shard in base.shards()}

    def shards(self) -> Sequence[Shard]:
        """As of the base."""
        return self._base.shards()

    def now(self) -> Sources:
        """The sources by name, from the adapter as it is now; sums are computed when they are copied. Collective."""
        factors, sources = self._factors.now(), dict[str, torch.Tensor | Computed](self._base.now())
        for name in sources.keys() & self._pairs.keys():
            part = sources[name]
            assert isinstance(part, torch.Tensor), "what is held"
            a, b = (factors[factor].to(part.device) for factor in self._pairs[name])
            compute = partial(self._sum, part, a, b, self._starts[name])
            sources[name] = Computed(torch.float32, part.device, part.numel(), compute)
        return sources

    def _sum(self, part: torch.Tensor, a: torch.Tensor, b: torch.Tensor, start: int) -> torch.Tensor:
        """A part of a weight, which begins at its element `start`, with the adapter added."""
        change = lora.change(a, b, self._scale, transposed=self._transposed).reshape(-1)
        return part.float() + change[start : start + part.numel()].view(part.shape)


class GatheredTensors:
    """Tensors of which each rank holds ranges, whole on all ranks. Making one is collective.

    Args:
        held: what this rank holds; of one dtype.
        saved: all tensors.
        device: where to gather them now, on all ranks alike: one that holds nothing cannot tell by its own.
    """

    def __init__(self, held: HeldSources, saved: Mapping[str, Saved], device: Callable[[], torch.device]) -> None:
        self._held = held
        self._device = device
        self._shapes = {name: tensor.shape for name, tensor in saved.items()}
        mine = [(shard.name, *_span(shard)) for shard in held.shards()]
        self._spans: list[list[tuple[str, int, int]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(self._spans, mine)
        self._most = max(sum(stop - start for _, start, stop in spans) for spans in self._spans)

    def now(self) -> dict[str, torch.Tensor]:
        """Return copies in fp32, by name. Collective; waits no longer than the group's timeout."""
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
    """The elements of the flattened tensor that a shard is, which are in one range: first, and one past the last."""
    if not shard.rects:
        return 0, 0
    first = min(shard.rects)
    start = first.row * matrix_view(shard.shape)[1] + first.col
    return start, start + sum(rect.rows * rect.cols for rect in shard.rects)


def _is_plain(saved: Saved) -> bool:
    return saved.held is not None and saved.offset == 0 and saved.stride == row_major(saved.shape)
