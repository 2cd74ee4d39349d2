from __future__ import annotations

import random

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from trinity_sync.weights import tensor_rows
from trinity_sync.weights.tensor_rows import rows_digest


@pytest.mark.parametrize("length", tensor_rows.LENGTHS)
def test_rows_of_each_length_digest_as_xxhash_does(length: int) -> None:
    data = random.Random(length).randbytes(40 * length) + bytes(3 * length) + b"\xff" * 3 * length
    matrix = np.frombuffer(data, np.uint8).reshape(-1, length)
    assert tensor_rows.digests(matrix) == b"".join(map(xxh3_128_digest, matrix))


@pytest.mark.parametrize("length", [1, 16, 17, 32, 64, 128, 129, 240, 241])
@pytest.mark.parametrize("rows", [0, 1, 511, 512, 2048, 8192, 8193, 20_000])
def test_any_number_of_rows_of_any_length_digests_as_one_by_one(length: int, rows: int) -> None:
    matrix = np.frombuffer(random.Random(rows).randbytes(rows * length), np.uint8).reshape(rows, length)
    assert rows_digest(matrix) == b"".join(map(xxh3_128_digest, matrix))


def test_rows_need_not_begin_on_a_boundary_of_words() -> None:
    data = np.frombuffer(random.Random(0).randbytes(32 * 600 + 3), np.uint8)
    matrix = data[3:].reshape(600, 32)
    assert tensor_rows.digests(matrix) == b"".join(map(xxh3_128_digest, matrix))
