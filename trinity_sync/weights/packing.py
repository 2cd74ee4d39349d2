"""Packs whole tensors into a few large buckets, each a part of its own.

A state dict travels so through Ray's object store or over a process group, where one message per tensor would cost more
than the bytes. A tensor is in one bucket, in wire dtype, so a reader gets views of the bucket and copies nothing. The
places follow from the list of (name, dtype, shape) and the bucket length alone (`layouts`), so a receiver needs no
more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

import torch

from trinity_sync.errors import RunError
from trinity_sync.weights.layout import ALIGNMENT, PartLayout, Segment, aligned
from trinity_sync.weights.shards import Described, Shard, whole
from trinity_sync.weights.staging import views
from trinity_sync.weights.tensors import byte_tensor, from_torch, to_torch, torch_dtype, wire_name

BUCKET_BYTES = 64 << 20


class _OpenBucket:
    """The bucket that is being filled."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.number = 0
        self.entries: list[tuple[Shard, int]] = []
        self.end = 0

    def add(self, shard: Shard) -> PartLayout | None:
        """Place a shard after the others. If there is no room, begin the next bucket and return the layout of the full
        one.

        An empty bucket takes a shard that is larger than a bucket.
        """
        start, nbytes = aligned(self.end), shard.nbytes
        full = None
        if self.entries and start + nbytes > self._most:
            full = self.layout()
            self.number, self.entries, start = self.number + 1, [], 0
        self.entries.append((shard, start))
        self.end = start + nbytes
        return full

    def layout(self) -> PartLayout:
        most = max(aligned(self.end), ALIGNMENT)
        return PartLayout(f"bucket {self.number}", tuple(self.entries), self.end, most)


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    wire_dtype: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[PartLayout, torch.Tensor]]:
    """Copy tensors one by one into buckets, cast on the way; a tensor may be released when the next one is requested.

    Args:
        tensors: (name, whole tensor) on any device.
        wire_dtype: the dtype of floating tensors on the wire, as safetensors names it; None: their own.
        device: of the buckets.

    Yields:
        Layout and bytes (uint8, ``layout.nbytes``) of each bucket; the next one overwrites them. A repeated name is a
        RunError, a dtype that does not travel a ValueError.
    """
    room = torch.empty(0, dtype=torch.uint8, device=device)

    def make_room(nbytes: int) -> torch.Tensor:
        nonlocal room
        if room.numel() < nbytes:
            room = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return room

    shards = ((_shard(name, tensor, wire_dtype), tensor) for name, tensor in tensors)
    return pack_shards(shards, make_room, bucket_bytes=bucket_bytes)


def pack_shards(
    shards: Iterable[tuple[Shard, torch.Tensor]],
    make_room: Callable[[int], torch.Tensor],
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[PartLayout, torch.Tensor]]:
    """As `pack`, for shards with their elements in the order of the local bytes, in memory that the caller provides.

    `make_room` returns the memory (uint8) of the next bucket, at least as many bytes as requested. It is called once a
    bucket, after the caller is done with the one before.
    """
    room: torch.Tensor | None = None
    bucket = _OpenBucket(bucket_bytes)
    seen: set[str] = set()
    for shard, tensor in shards:
        if shard.name in seen:
            raise RunError(f"the state dict has {shard.name} twice")
        seen.add(shard.name)
        end = bucket.end
        if (full := bucket.add(shard)) is not None:
            yield full, _filled(room, full)
            room, end = None, 0
        (_, start), stop = bucket.entries[-1], bucket.end
        if room is None:  # only the first bytes of a bucket can need more than its usual length
            room = make_room(max(bucket_bytes, stop))
        if start > end:  # the gap is part of the digest, so bytes of an earlier bucket must not stay there
            room[end:start] = 0
        room[start:stop].view(to_torch(shard.dtype)).view(tensor.shape).copy_(tensor.detach())
    if bucket.entries:
        layout = bucket.layout()
        yield layout, _filled(room, layout)


def _filled(room: torch.Tensor | None, layout: PartLayout) -> torch.Tensor:
    assert room is not None, "a bucket with shards has room"
    return room[: layout.nbytes]


def unpack(bucket: PartLayout, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of each tensor in a bucket, as views of its bytes."""
    for shard, tensor in zip(bucket.shards, views(bucket, data), strict=True):
        yield shard.name, tensor.view(shard.shape)


def layouts(described: Iterable[Described], bucket_bytes: int) -> Iterator[PartLayout]:
    """Yield the layouts of the buckets that `pack` makes of tensors of this description."""
    bucket = _OpenBucket(bucket_bytes)
    for name, dtype, shape in described:
        shard = whole(name, from_torch(torch_dtype(dtype)), shape)
        if (full := bucket.add(shard)) is not None:
            yield full
    if bucket.entries:
        yield bucket.layout()


def describe(
    tensors: Iterable[tuple[str, torch.Tensor]], wire_dtype: str | None = None
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Describe tensors for a receiver, floating ones in the wire dtype."""
    return described(_shard(name, tensor, wire_dtype) for name, tensor in tensors)


def described(shards: Iterable[Shard]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Describe the tensors of these whole shards."""
    return [(shard.name, str(to_torch(shard.dtype)), shard.shape) for shard in shards]


def _shard(name: str, tensor: torch.Tensor, wire_dtype: str | None) -> Shard:
    return whole(name, wire_name(from_torch(tensor.dtype), wire_dtype), tensor.shape)


TOGETHER = "together"
"""Name of the part in which tensors that are spread over parts are assembled."""

_BUCKET_BYTES = 4 << 20


class WholeTensors:
    """The place of each whole tensor of a version, computed once for the layouts.

    A tensor is in the part that holds all of it in its dtype, or else in a further segment where it is assembled.
    `layouts`: of all parts; together they hold every tensor once (`check_cover`). `dtypes`: Hugging Face name -> the
    dtype of the whole tensor, to which the published one can be cast. `together`: the layout of the further segment. It
    does not depend on the order of the layouts.
    """

    def __init__(self, layouts: Sequence[PartLayout], dtypes: Mapping[str, torch.dtype]) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[int, int]] = {}  # the number of the segment, and the first byte in it
        for number, layout in enumerate(layouts):
            for shard, offset in layout.entries:
                shapes[shard.name] = shard.shape
                if shard.is_whole and to_torch(shard.dtype) == dtypes[shard.name]:
                    self._places[shard.name] = number, offset
        spread = sorted(shapes.keys() - self._places.keys())
        shards = [whole(name, from_torch(dtypes[name]), shapes[name]) for name in spread]
        self.together = PartLayout.build(TOGETHER, shards, _BUCKET_BYTES)
        for shard, offset in self.together.entries:
            self._places[shard.name] = len(layouts), offset
        self._layouts = [*layouts, self.together]
        self._kinds = {name: (dtypes[name], shape) for name, shape in shapes.items()}

    def views(self, segments: Sequence[Segment]) -> dict[str, torch.Tensor]:
        """Return the tensors by name: contiguous views, writable if their segment is. They keep the segments mapped.

        `segments`: in the order of the layouts, the further one last. A `LayoutError` if one is too small.
        """
        data = [byte_tensor(layout.view(one)) for layout, one in zip(self._layouts, segments, strict=True)]
        found = {}
        for name, (number, offset) in self._places.items():
            dtype, shape = self._kinds[name]
            nbytes = prod(shape) * dtype.itemsize
            found[name] = data[number][offset : offset + nbytes].view(dtype).view(shape)
        return found
