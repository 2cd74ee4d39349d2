"""What a CRC-32 in our `.pt` files would cost, so that `unzip -t` accepts them: the file of a rank's training state
written from memory, as a save does it in the background, without and with one.

    python benchmarks/checkpoint_crc.py --json [--megabytes 512] [--rounds 7] [--folder DIR]

`without` is a save as it is: each byte is copied, digested (xxh3_128) and written to the disk with fsync. `with` has
the thread that writes compute zlib's CRC-32 of the same bytes too; `beside` has another thread do so while the bytes
are on their way to the disk. The three take turns in each round, in an order that changes. Seconds, and processor
seconds of all threads of the process, medians over the rounds; the cost is the median over the rounds of what it takes
more than `without` in the same round. `crc_gb_per_s` and `digest_gb_per_s` are those of the two functions alone, by the
processor's clock.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128

from trinity_sync.weights import shard_file
from trinity_sync.weights.shard_file import write_image
from trinity_sync.weights.snapshot import Snapshot, plan

_LIMIT_S = 600.0


class _WithCrc:
    """A digest that computes the CRC as well, of each piece of a file as it is written.

    Args:
        beside: computes it meanwhile; None: the thread that writes does.
    """

    def __init__(self, beside: ThreadPoolExecutor | None = None) -> None:
        self._digest, self._crc, self._beside = xxh3_128(), 0, beside
        self._pending: Future[int] | None = None

    def update(self, data: memoryview) -> None:
        self._digest.update(data)
        if self._beside is None:
            self._crc = zlib.crc32(data, self._crc)
        else:
            self._pending = self._beside.submit(zlib.crc32, data, self._crc)

    def wait(self) -> None:
        """The piece is written, and its buffer about to be used for the next."""
        if self._pending is not None:
            self._crc, self._pending = self._pending.result(), None

    def hexdigest(self) -> str:
        return str(self._digest.hexdigest())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (the only form)")
    parser.add_argument("--megabytes", type=int, default=512, help="of the state (default 512)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, ThreadPoolExecutor(1) as pool:
        rounds = _rounds(Path(folder), options.megabytes << 20, options.rounds, pool)
    report = {
        "command": f"python benchmarks/checkpoint_crc.py --json --megabytes {options.megabytes} "
        f"--rounds {options.rounds}",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "zlib": zlib.ZLIB_RUNTIME_VERSION,
        "results": {
            f"{way}/{name}": statistics.median(one[way][number] for one in rounds)
            for way in rounds[0]
            for number, name in enumerate(("write_s", "processor_s"))
        },
        "cost": {
            f"{way}/{name}": statistics.median(one[way][number] / one["without"][number] - 1 for one in rounds)
            for way in ("with", "beside")
            for number, name in enumerate(("write_s", "processor_s"))
        },
        "crc_gb_per_s": _speed(zlib.crc32),
        "digest_gb_per_s": _speed(lambda data: xxh3_128(data).digest()),
    }
    print(json.dumps(report, indent=2))


def _rounds(folder: Path, nbytes: int, count: int, pool: ThreadPoolExecutor) -> list[dict[str, tuple[float, float]]]:
    state = {f"layer.{number}": torch.randn(nbytes // 16 // 4) for number in range(16)}
    planned = plan({"state.pt": state})
    segment = mmap.mmap(-1, planned.nbytes)
    snapshot = Snapshot(planned, segment, "the state")
    snapshot.copy(in_background=False)
    ways: dict[str, Callable[[], Any]] = {"without": xxh3_128, "with": _WithCrc, "beside": lambda: _WithCrc(pool)}
    found = []
    for number in range(count + 1):
        one = {}
        for way in [*ways][number % 3 :] + [*ways][: number % 3]:
            (image,) = snapshot.file_images(folder, _LIMIT_S)
            one[way] = _timed(ways[way], lambda: write_image(Path(image.path), image.extents, segment, durable=True))  # noqa: B023
            Path(image.path).unlink()
        if number:  # the first round pays for first use
            found.append(one)
    return found


def _timed(make: Callable[[], Any], write: Callable[[], object]) -> tuple[float, float]:
    """Seconds and processor seconds of a write whose digest is made so."""
    real, digest = shard_file.write_all, make()

    def write_all(descriptor: int, data: memoryview) -> None:
        real(descriptor, data)
        if isinstance(digest, _WithCrc):
            digest.wait()

    before = shard_file.xxh3_128
    shard_file.xxh3_128, shard_file.write_all = (lambda: digest), write_all  # type: ignore[misc, assignment]
    began, used = time.perf_counter(), time.process_time()
    try:
        write()
        return time.perf_counter() - began, time.process_time() - used
    finally:
        shard_file.xxh3_128, shard_file.write_all = before, real  # type: ignore[misc]


def _speed(of: Callable[[Any], object]) -> float:
    data = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
    seconds = []
    for _ in range(5):
        began = time.process_time()
        of(data)
        seconds.append(time.process_time() - began)
    return data.nbytes / 1e9 / min(seconds)


if __name__ == "__main__":
    main()
