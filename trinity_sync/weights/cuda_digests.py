"""Digests of rows that lie on a GPU, computed there: 16 bytes a row cross the bus instead of the row.

XXH3's 128-bit hash of rows above 240 bytes, as in `native/digests.h`; Triton comes with torch's builds for CUDA. Each
program sums a few rows, whose 8 accumulators lie side by side.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

LONGEST = 256 << 10
"""Bytes of the longest row: the stripes of a row are summed one after another."""
_SHORTEST = 241
_CHUNK_BYTES = 32 << 20
"""Bytes that are cast at a time."""
_ROWS = 8
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5, _MIX = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 0x165667919E3779F9


@triton.jit
def _stripe(sums, at, key, lane):  # type: ignore[no-untyped-def]
    word = tl.load(at + lane).to(tl.uint64, bitcast=True)
    other = tl.load(at + (lane ^ 1)).to(tl.uint64, bitcast=True)
    value = word ^ key
    return sums + other + ((value << 32) >> 32) * (value >> 32)


@triton.jit
def _half(sums, key, start, mix):  # type: ignore[no-untyped-def]
    even, odd = tl.split(tl.reshape(sums ^ key, (sums.shape[0], 4, 2)))
    found = tl.sum((even * odd) ^ tl.umulhi(even, odd), axis=1) + start
    found = (found ^ (found >> 37)) * mix
    return found ^ (found >> 32)


@triton.jit
def _digest_rows(rows, table, digests, count, words, low, high, ROWS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Write the halves of each row's digest; `words`: 8 bytes each, of a row; `low`, `high`: by its length."""
    lane = tl.arange(0, 8)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    at = rows + tl.where(inside, row, 0).to(tl.int64)[:, None] * words
    keys = table + lane
    sums = tl.load(keys + 48 + tl.zeros((ROWS, 8), tl.int32)).to(tl.uint64, bitcast=True)
    prime = tl.load(table + 56).to(tl.uint64, bitcast=True)
    mix = tl.load(table + 57).to(tl.uint64, bitcast=True)
    scramble = tl.load(keys + 16).to(tl.uint64, bitcast=True)
    blocks = (words - 1) // 128
    for block in range(blocks):
        for n in range(16):
            sums = _stripe(sums, at + block * 128 + n * 8, tl.load(keys + n).to(tl.uint64, bitcast=True), lane)
        sums = (sums ^ (sums >> 47) ^ scramble) * prime
    rest = words - blocks * 128
    for n in range((rest - 1) // 8):
        sums = _stripe(sums, at + blocks * 128 + n * 8, tl.load(keys + n).to(tl.uint64, bitcast=True), lane)
    sums = _stripe(sums, at + words - 8, tl.load(keys + 24).to(tl.uint64, bitcast=True), lane)
    found_low = _half(sums, tl.load(keys + 32).to(tl.uint64, bitcast=True), low.to(tl.uint64), mix)
    found_high = _half(sums, tl.load(keys + 40).to(tl.uint64, bitcast=True), high.to(tl.uint64), mix)
    tl.store(digests + row * 2, found_high.to(tl.int64, bitcast=True), mask=inside)
    tl.store(digests + row * 2 + 1, found_low.to(tl.int64, bitcast=True), mask=inside)


def takes(row_bytes: int) -> bool:
    """Whether rows of this length are digested here."""
    return _SHORTEST <= row_bytes <= LONGEST and row_bytes % 8 == 0


def row_digests(matrix: torch.Tensor, dtype: torch.dtype) -> bytes:
    """Return 16 bytes for each row of a matrix, cast to `dtype` a part at a time; rows as `takes` has them."""
    return read([queue(matrix, dtype)])[0]


def queue(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Queue the digests of `row_digests` on the matrix's device; `read` waits for them."""
    step = max(_CHUNK_BYTES // (matrix[0].numel() * dtype.itemsize), 1)
    return torch.cat([_digests(chunk.to(dtype)) for chunk in matrix.reshape(len(matrix), -1).split(step)])


def read(queued: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the digests of each call of `queue` on one device, with one copy from it."""
    halves = torch.cat(list(queued)).cpu().split([len(one) for one in queued])
    return [one.numpy().byteswap().tobytes() for one in halves]  # the high half first, each big-endian


def _digests(matrix: torch.Tensor) -> torch.Tensor:
    count = len(matrix)
    data = matrix.contiguous().view(-1).view(torch.uint8)  # flat: the stride of a single row may be odd
    words = (data.clone() if data.storage_offset() % 8 else data).view(torch.int64).view(count, -1)
    length = words.shape[1]
    digests = torch.empty((count, 2), dtype=torch.int64, device=matrix.device)
    starts = (_signed(8 * length * _P64_1), _signed(~(8 * length * _P64_2)))
    with torch.cuda.device_of(matrix):
        _digest_rows[(triton.cdiv(count, _ROWS),)](
            words, _table(matrix.device), digests, count, length, *starts, ROWS=_ROWS, num_warps=2
        )
    return digests


def _signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@cache
def _table(device: torch.device) -> torch.Tensor:
    """Words: 0, the secret; 24, for a row's last stripe; 32 and 40, for the halves of the digest; 48, the first sums;
    56, two primes. As arguments of the kernel, numbers above 2^63 would have another type.
    """
    parts = [_SECRET, _SECRET[121:185], _SECRET[11:75], _SECRET[117:181]]
    first = [_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1]
    words = [word for part in parts for (word,) in struct.iter_unpack("<q", part)]
    return torch.tensor([*words, *map(_signed, [*first, _P32_1, _MIX])], dtype=torch.int64, device=device)
