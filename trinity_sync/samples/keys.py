"""Random numbers that depend on their place of use only, not on earlier draws. For tasks and explorers.

They are a tree of 64-bit keys. Child n of a key is output n of SplitMix64 with that key as its seed:
``child(key, n) = mix(key + (n + 1) * GAMMA)``, modulo 2**64. SplitMix64 is from Steele, Lea and Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014; the constants of `mix` are Stafford's variant 13.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trinity_sync.samples.record import Purpose

GAMMA = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""The rounds of `mix`: shift right and xor, then multiply. A last shift by `LAST_SHIFT` and xor follows."""
LAST_SHIFT = 31

_MASK = (1 << 64) - 1


def child(key: ArrayLike, number: ArrayLike) -> NDArray[np.uint64]:
    """Compute children of keys in the tree. `key`: unsigned 64-bit keys. `number`: the number of the child of each key,
    at least 0; broadcast against `key`. Returns uint64 keys of the broadcast shape, at least one-dimensional.
    """
    state = np.atleast_1d(np.asarray(key, np.uint64))
    value: NDArray[np.uint64] = state + (np.atleast_1d(np.asarray(number, np.uint64)) + np.uint64(1)) * np.uint64(GAMMA)
    for shift, factor in MIX:
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    value = value ^ (value >> np.uint64(LAST_SHIFT))
    return value


def path(seed: int, purpose: Purpose, *numbers: ArrayLike) -> NDArray[np.uint64]:
    """Compute the keys at the ends of paths through the tree, from a root that the seed gives. `numbers`: the further
    steps of the path, each an integer or an array of integers, broadcast against each other. Returns uint64 keys of the
    broadcast shape, at least one-dimensional.
    """
    key = child(np.uint64(seed & _MASK), int(purpose))
    for number in numbers:
        key = child(key, number)
    return key
