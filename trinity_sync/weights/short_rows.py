"""xxh3_128 of many short rows of one length at a time, in numpy.

One call of xxhash for each row costs several times what it computes where rows are as short as those of an adapter's
factors. Inputs of 9 to 128 bytes are hashed by a few multiplications of 64 bits each (``XXH3_len_9to16_128b`` and
``XXH3_len_17to128_128b`` of the reference implementation); here each step is done for all rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

LENGTHS = range(9, 129)
"""Bytes of a row."""
_ROWS = 4096
"""At a time: what is worked out of them stays in the cache."""
_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    "<u8",
)
_PRIME_1, _PRIME_2, _PRIME_4 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x85EBCA77C2B2AE63  # XXH_PRIME64_*
_PRIME_32 = np.uint64(0x85EBCA77)  # XXH_PRIME32_2
_MIXER = np.uint64(0x165667919E3779F9)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def worth_while(length: int) -> int:
    """Of how many rows on this takes less time than a call of xxhash for each."""
    return 512 * _steps(length)


def digests(matrix: NDArray[np.uint8]) -> bytes:
    """The concatenated digests of the rows of a contiguous uint8 matrix; the length of a row is one of `LENGTHS`."""
    found = np.empty((len(matrix), 2), ">u8")
    digest = _digest_shortest if matrix.shape[1] <= 16 else _digest_longer
    for first in range(0, len(matrix), _ROWS):
        digest(matrix[first : first + _ROWS], found[first : first + _ROWS])
    return found.tobytes()


def _steps(length: int) -> int:
    """How many times 32 bytes of a row, 16 from each side, are mixed in."""
    return (length + 31) // 32


def _digest_shortest(matrix: NDArray[np.uint8], found: NDArray[np.uint64]) -> None:
    """Of 9 to 16 bytes."""
    length = matrix.shape[1]
    first, last = _word(matrix, 0), _word(matrix, length - 8)
    mixed = first ^ last ^ (_SECRET[4] ^ _SECRET[5])
    low = mixed * _wrapped(_PRIME_1)
    high = _upper(mixed, np.full_like(mixed, _wrapped(_PRIME_1)))
    low += _wrapped((length - 1) << 54)
    flipped = last ^ (_SECRET[6] ^ _SECRET[7])
    high += flipped
    high += (flipped & _LOW) * (_PRIME_32 - np.uint64(1))
    low ^= high.byteswap()
    found[:, 1] = _avalanche(low * _wrapped(_PRIME_2))
    high *= _wrapped(_PRIME_2)
    high += _upper(low, np.full_like(low, _wrapped(_PRIME_2)))
    found[:, 0] = _avalanche(high)


def _digest_longer(matrix: NDArray[np.uint8], found: NDArray[np.uint64]) -> None:
    """Of more than 16 bytes."""
    rows, length = matrix.shape
    low, high = np.full(rows, _wrapped(length * _PRIME_1)), np.zeros(rows, np.uint64)
    for step in reversed(range(_steps(length))):  # from the middle of the row outwards
        front, back = 16 * step, length - 16 * (step + 1)
        first, second, third, fourth = (_word(matrix, at) for at in (front, front + 8, back, back + 8))
        secret = _SECRET[4 * step :]
        low += _folded(first ^ secret[0], second ^ secret[1])
        low ^= third + fourth
        high += _folded(third ^ secret[2], fourth ^ secret[3])
        high ^= first + second
    found[:, 1] = _avalanche(low + high)
    low *= _wrapped(_PRIME_1)
    high *= _wrapped(_PRIME_4)
    low += high
    low += _wrapped(length * _PRIME_2)
    found[:, 0] = np.negative(_avalanche(low))


def _word(matrix: NDArray[np.uint8], at: int) -> Words:
    """The 8 bytes of each row from one on."""
    rows, length = matrix.shape
    return np.ndarray((rows,), "<u8", matrix, at, (length,))


def _wrapped(number: int) -> np.uint64:
    return np.uint64(number & 0xFFFFFFFFFFFFFFFF)


def _folded(a: Words, b: Words) -> Words:
    """Both halves of the products of 128 bits, combined by exclusive or."""
    found = _upper(a, b)
    found ^= a * b
    return found


def _upper(a: Words, b: Words) -> Words:
    """The upper halves of the products of 128 bits."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    carry = a_low * b_low
    carry >>= _HALF
    middle = a_high * b_low
    middle += carry
    a_low *= b_high
    a_low += middle & _LOW
    middle >>= _HALF
    a_low >>= _HALF
    a_high *= b_high
    a_high += middle
    a_high += a_low
    return a_high


def _avalanche(words: Words) -> Words:
    words ^= words >> np.uint64(37)
    words *= _MIXER
    words ^= words >> _HALF
    return words
