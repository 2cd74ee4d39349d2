"""What a tensor costs the data plane beyond its bytes: Qwen3-30B-A3B's 18,867 names with sizes that cost nothing.

    python benchmarks/model_tensors.py [--repeats 5] [--layers 48]

In one process: `workload=bytes`' ranks (experts held together, saved one by one), staging, digests, a load. Beside them
one tensor of as many rows and bytes, whose time is taken off. Times are the processor's, of one thread, so that other
programs count for little. Called by `benchmarks/models.py` as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trinity_sync.backends.bytes_backend import BytesBackend
from trinity_sync.models.shapes import SIZES, cut, empty_model, read_shapes
from trinity_sync.weights.apply import Receiver
from trinity_sync.weights.digests import RowPlan, bucket_digests, version_digest
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import Shard, check_complete, check_cover, whole
from trinity_sync.weights.staging import stage
from trinity_sync.weights.tensors import saved_tensors

BUCKET_BYTES = 16 << 20  # conf/base/sync.yaml
TINY = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 16,
}
"""In the place of the published sizes: 512 bytes an expert's matrix."""

Times = dict[str, float]


def of_model(layers: int, folder: Path) -> tuple[BytesBackend, dict[str, torch.Tensor]]:
    """A rank's backend and an explorer's destinations."""
    fields = cut({**read_shapes("qwen3-30b-a3b"), **TINY}, layers)[1]
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / SIZES).write_text(json.dumps({"lora": None}))
    made: dict[str, Any] = {"changed": 0.1, "master_dtype": "bf16", "optimizer": False, "device": "cpu"}
    backend = BytesBackend(folder, "BF16", rank=0, ranks=1, seed=0, **made)
    return backend, saved_tensors(empty_model(folder, torch.bfloat16, "cpu"))


def once(shards: Sequence[Shard], destinations: Mapping[str, torch.Tensor]) -> Times:
    """Seconds of what a run does once, when it starts."""
    found: Times = {}

    def timed(what: str, run: Callable[[], Any]) -> Any:
        started = time.thread_time()
        result = run()
        found[what] = time.thread_time() - started
        return result

    layout = timed("build", lambda: PartLayout.build("rank-00000", shards, BUCKET_BYTES))
    timed("layout_digest", lambda: layout.digest)
    timed("to_and_from_json", lambda: PartLayout.from_json(layout.to_json()))
    timed("check_cover", lambda: check_cover([list(shards)]))
    saved = {name: ("BF16", tuple(tensor.shape)) for name, tensor in destinations.items()}
    timed("check_complete", lambda: check_complete([list(shards)], saved))
    timed("row_plan", lambda: RowPlan([layout]))
    receiver = timed("receiver", lambda: Receiver(destinations))
    timed("receiver_check", lambda: receiver.check([layout]))
    receiver.begin()
    timed("first_load", lambda: receiver.apply(layout, bytearray(layout.nbytes)))
    return found


class Plane:
    """Layout, slot and receiver of a model, ready for versions."""

    def __init__(
        self,
        shards: Sequence[Shard],
        sources: Callable[[], Mapping[str, torch.Tensor]],
        destinations: Mapping[str, torch.Tensor],
    ) -> None:
        self._sources = sources
        self.layout = PartLayout.build("rank-00000", shards, BUCKET_BYTES)
        self._segment = bytearray(self.layout.nbytes)
        self._rows = RowPlan([self.layout])
        self._receiver = Receiver(destinations)
        self._receiver.check([self.layout])

    def version(self) -> Times:
        """Publish and load once; processor seconds of each part."""
        started = time.thread_time()
        stage(self.layout, self._sources(), self._segment)
        staged = time.thread_time()
        digests = bucket_digests(self._segment, self.layout)
        published = self._rows.digest([self._segment]).version_digest()
        digested = time.thread_time()
        self._receiver.begin()
        self._receiver.apply(self.layout, self._segment, digests)
        held = version_digest(self._receiver.taken())
        loaded = time.thread_time()
        if held != published:
            raise AssertionError("the load does not hold what was published")
        return {"staging": staged - started, "digesting": digested - staged, "loading": loaded - digested}


def measure(layers: int = 48, repeats: int = 5) -> dict[str, Any]:
    """Microseconds a tensor of each part beyond the same rows in one tensor; medians of interleaved repeats."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        backend, destinations = of_model(layers, Path(name))
    many = Plane(backend.shards(), backend.sources, destinations)
    nbytes = sum(tensor.nbytes for tensor in destinations.values())
    shape = nbytes // 32, 16
    source, target = torch.ones(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
    alone = Plane([whole("all", "BF16", shape)], lambda: {"all": source}, {"all": target})
    of_many, of_one = [], []
    for _ in range(repeats + 1):  # the first makes plans
        of_many.append(many.version())
        of_one.append(alone.version())
    tensors = len(destinations)
    parts = {}
    for what in of_many[0]:
        beyond = [one[what] - same[what] for one, same in zip(of_many[1:], of_one[1:], strict=True)]
        parts[what] = statistics.median(beyond) / tensors * 1e6
    return {
        "tensors": tensors,
        "bytes": nbytes,
        "us_a_tensor": parts,
        "once_s": once(backend.shards(), destinations),
    }


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.layers, arguments.repeats), indent=2))


if __name__ == "__main__":
    main()
