"""Versions of a model with its adapter added (`sync.what=merged`): what `merge_and_unload` of peft gives, in rows.

A rank holds rows of the base and rows of the adapter's factors. The factors are small, and are gathered whole; each
product is computed whole, so that what a weight comes to does not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from trinity_sync.backends.held import HeldSources
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.weights import lora
from trinity_sync.weights.computed import Computed, Sources
from trinity_sync.weights.saved_views import Saved, row_major
from trinity_sync.weights.shards import Shard, listed, matrix_view


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
