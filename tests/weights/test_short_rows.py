from __future__ import annotations

import random

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from trinity_sync.weights.tensor_rows import rows_digest


@pytest.mark.parametrize("length", [1, 16, 17, 32, 64, 128, 129, 240, 241])
@pytest.mark.parametrize("rows", [0, 1, 511, 512, 2048, 8192, 8193, 20_000])
def test_any_number_of_rows_of_any_length_digests_as_one_by_one(length: int, rows: int) -> None:
    matrix = np.frombuffer(random.Random(rows).randbytes(rows * length), np.uint8).reshape(rows, length)
    assert rows_digest(matrix) == b"".join(map(xxh3_128_digest, matrix))
