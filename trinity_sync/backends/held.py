"""The sources of versions from what a rank holds of the model's tensors: the same views as long as these stay where
they are. Models with experts save thousands of tensors that are parts of a few.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod

import torch

from trinity_sync.errors import ConfigError
from trinity_sync.weights.saved_views import Cut, Saved, by_held, cut
from trinity_sync.weights.shards import Shard, shape_text


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
