"""What the tests of the data plane share: a plainly written reference for digests, and random ways to cut tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xxhash
from hypothesis import strategies as st

from trinity_sync.weights import shards
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import Rect, Shard, flat_range, row_slice, whole
from trinity_sync.weights.tensors import from_torch, to_torch, wire_name

SHAPES = [
    (),
    (1,),
    (7,),
    (130,),
    (0,),
    (1, 1),
    (5, 3),
    (4, 64),
    (33, 17),
    (2, 3, 4),
    (6, 1, 5),
    (0, 4),
    (3, 0),
    (2, 0, 3),
]
DTYPES = ["F32", "BF16", "F16", "F64", "I64", "I32", "U8", "BOOL", "F8_E4M3"]


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in row-major order."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def reference_digest(tensors: Mapping[str, torch.Tensor], wire: str | None) -> str:
    """The version digest, written down from its definition, one row and one tensor at a time."""
    text = ""
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.is_floating_point() and wire is not None:
            tensor = tensor.to(to_torch(wire))
        rows = [tensor] if tensor.dim() < 2 else [tensor[index] for index in range(tensor.shape[0])]
        row_digests = b"".join(xxhash.xxh3_128(raw(row)).digest() for row in rows)
        shape = "x".join(str(extent) for extent in tensor.shape)
        text += f"{name} {from_torch(tensor.dtype)} {shape} {xxhash.xxh3_128(row_digests).hexdigest()}\n"
    return xxhash.xxh3_128(text.encode("utf-8")).hexdigest()


def random_tensor(dtype: str, shape: tuple[int, ...], rng: random.Random) -> torch.Tensor:
    """Any bit pattern, NaNs among them; booleans are 0 or 1."""
    count = 1
    for extent in shape:
        count *= extent
    if dtype == "BOOL":
        return torch.tensor([rng.random() < 0.5 for _ in range(count)], dtype=torch.bool).reshape(shape)
    data = bytearray(rng.randbytes(count * shards.itemsize(dtype)))
    if not data:
        return torch.empty(shape, dtype=to_torch(dtype))
    return torch.frombuffer(data, dtype=torch.uint8).view(to_torch(dtype)).reshape(shape)


def without_nan(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with zeros for NaNs: which bits a NaN gets in a cast depends on strides and device."""
    flat = tensor.clone().reshape(-1)
    flat.view(torch.uint8).view(-1, tensor.element_size())[flat.to(torch.float64).isnan()] = 0
    return flat.reshape(tensor.shape)


def local_elements(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The elements of a whole tensor that a shard holds, 1-D, in the shard's local order."""
    matrix = tensor.reshape(shard.matrix)
    pieces = [matrix[r.row : r.row + r.rows, r.col : r.col + r.cols].reshape(-1) for r in shard.rects]
    return torch.cat(pieces) if pieces else tensor.reshape(-1)[:0]


@dataclass
class CutVersion:
    """Tensors, and how parts hold them: a layout per part and each part's local sources."""

    tensors: dict[str, torch.Tensor]
    wire: str | None
    layouts: list[PartLayout]
    sources: list[dict[str, torch.Tensor]]

    @property
    def on_wire(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.to(to_torch(wire_name(from_torch(tensor.dtype), self.wire)))
            for name, tensor in self.tensors.items()
        }


def cut(
    tensors: dict[str, torch.Tensor], wire: str | None, parts: int, bucket_bytes: int, rng: random.Random
) -> CutVersion:
    """Cut each tensor at random: one part holds it, by rows, by flat ranges, or into scattered rectangles."""
    held: list[list[Shard]] = [[] for _ in range(parts)]
    for name, tensor in tensors.items():
        kind = (name, wire_name(from_torch(tensor.dtype), wire), tuple(tensor.shape))
        for part, shard in rng.choice([_one_part, _row_slices, _flat_ranges, _scattered])(kind, parts, rng):
            held[part].append(shard)
    for part in held:
        rng.shuffle(part)
    layouts = [PartLayout.build(f"rank-{part:05d}", shards, bucket_bytes) for part, shards in enumerate(held)]
    sources = [{s.name: local_elements(tensors[s.name], s) for s in layout.shards} for layout in layouts]
    return CutVersion(tensors, wire, layouts, sources)


@st.composite
def cut_versions(draw: st.DrawFn) -> CutVersion:
    """Random tensors in random dtypes, cut at random into up to five parts."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    kinds = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=5))
    wire = draw(st.sampled_from(["BF16", "F16", "F32", None]))
    tensors = {f"layer.{i}.{dtype}": random_tensor(dtype, shape, rng) for i, (dtype, shape) in enumerate(kinds)}
    if wire is not None:
        tensors = {name: without_nan(t) if t.is_floating_point() else t for name, t in tensors.items()}
    return cut(tensors, wire, draw(st.integers(1, 5)), draw(st.sampled_from([64, 192, 1024, 1 << 20])), rng)


Kind = tuple[str, str, tuple[int, ...]]


def _one_part(kind: Kind, parts: int, rng: random.Random) -> list[tuple[int, Shard]]:
    return [(rng.randrange(parts), whole(*kind))]


def _row_slices(kind: Kind, parts: int, rng: random.Random) -> list[tuple[int, Shard]]:
    bounds = _bounds(kind[2][0] if kind[2] else 1, parts, rng)
    return [(part, row_slice(*kind, *bounds[part : part + 2])) for part in range(parts)]


def _flat_ranges(kind: Kind, parts: int, rng: random.Random) -> list[tuple[int, Shard]]:
    bounds = _bounds(torch.Size(kind[2]).numel(), parts, rng)
    return [(part, flat_range(*kind, *bounds[part : part + 2])) for part in range(parts)]


def _scattered(kind: Kind, parts: int, rng: random.Random) -> list[tuple[int, Shard]]:
    rows, cols = whole(*kind).matrix
    size = shards.itemsize(kind[1])
    held: list[list[Rect]] = [[] for _ in range(parts)]
    ends = [0] * parts
    for row, col, height, width in _split(0, 0, rows, cols, rng) if rows * cols else []:
        part = rng.randrange(parts)
        held[part].append(Rect(ends[part], row, col, height, width))
        ends[part] += height * width * size
    return [(part, Shard(*kind, tuple(rects))) for part, rects in enumerate(held) if rects or not rows * cols]


def _split(row: int, col: int, rows: int, cols: int, rng: random.Random) -> list[tuple[int, int, int, int]]:
    if rows * cols == 1 or rng.random() < 0.3:
        return [(row, col, rows, cols)]
    if cols == 1 or (rows > 1 and rng.random() < 0.5):
        at = rng.randrange(1, rows)
        pieces = _split(row, col, at, cols, rng) + _split(row + at, col, rows - at, cols, rng)
    else:
        at = rng.randrange(1, cols)
        pieces = _split(row, col, rows, at, rng) + _split(row, col + at, rows, cols - at, rng)
    rng.shuffle(pieces)
    return pieces


def _bounds(extent: int, parts: int, rng: random.Random) -> list[int]:
    return [0, *sorted(rng.randint(0, extent) for _ in range(parts - 1)), extent]
