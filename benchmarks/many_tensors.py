"""What a tensor costs the data plane beyond its bytes: shards of a mixture-of-experts model as FSDP2 ranks hold it.

Each layer has fused experts, ``[experts, 2 * inner, hidden]`` and ``[experts, hidden, inner]``, cut along the experts;
every expert's three matrices travel under their own names, in the order in which they lie in memory, as backends give
them (``--by-expert``: expert by expert). Weights are random; no engine, no Ray::

    python benchmarks/many_tensors.py --json
    python benchmarks/many_tensors.py --layers 2 --inner 768 --hidden 2048    # real sizes, 2.4 GB
    python benchmarks/many_tensors.py --dense 200 --megabytes 512             # as a dense model

Times are the least of the repetitions, in seconds, of one process; what is done once a run is timed once.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from trinity_sync.weights.apply import Receiver
from trinity_sync.weights.digests import RowPlan, version_digest
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import Shard, check_complete, check_cover, row_slice, whole
from trinity_sync.weights.staging import stage

_BUCKET_BYTES = 4 << 20
Held = tuple[list[Shard], dict[str, torch.Tensor]]


def experts(arguments: argparse.Namespace) -> tuple[list[Held], dict[str, torch.Tensor]]:
    """Each rank's shards and sources, and an explorer's destinations: views of fused tensors on both sides."""
    ranks, count, inner, hidden = arguments.ranks, arguments.experts, arguments.inner, arguments.hidden
    dtype = torch.float32 if arguments.cast else torch.bfloat16
    held: list[Held] = [([], {}) for _ in range(ranks)]
    destinations: dict[str, torch.Tensor] = {}
    per_rank = -(-count // ranks)
    for layer in range(arguments.layers):
        up = torch.zeros(count, 2 * inner, hidden, dtype=torch.bfloat16)
        down = torch.zeros(count, hidden, inner, dtype=torch.bfloat16)
        for rank, (shards, sources) in enumerate(held):
            first, last = min(rank * per_rank, count), min((rank + 1) * per_rank, count)
            own_up = torch.randn(last - first, 2 * inner, hidden).to(dtype)
            own_down = torch.randn(last - first, hidden, inner).to(dtype)
            of_experts = []
            for expert in range(first, last):
                stem = f"model.layers.{layer}.mlp.experts.{expert}"
                here = expert - first
                of_experts.append(
                    [
                        (f"{stem}.gate_proj.weight", own_up[here, :inner], up[expert, :inner]),
                        (f"{stem}.up_proj.weight", own_up[here, inner:], up[expert, inner:]),
                        (f"{stem}.down_proj.weight", own_down[here], down[expert]),
                    ]
                )
            if not arguments.by_expert:
                of_experts = [[part for one in of_experts for part in one[:2]], [one[2] for one in of_experts]]
            for name, mine, theirs in chain.from_iterable(of_experts):
                shards.append(whole(name, "BF16", tuple(mine.shape)))
                sources[name], destinations[name] = mine, theirs
    return held, destinations


def dense(arguments: argparse.Namespace) -> tuple[list[Held], dict[str, torch.Tensor]]:
    """The same for square-ish matrices that are cut by rows."""
    held: list[Held] = [([], {}) for _ in range(arguments.ranks)]
    destinations: dict[str, torch.Tensor] = {}
    columns = 1024
    rows = max((arguments.megabytes << 20) // (2 * columns * arguments.dense), arguments.ranks)
    for number in range(arguments.dense):
        name = f"model.layers.{number}.weight"
        destinations[name] = torch.zeros(rows, columns, dtype=torch.bfloat16)
        for rank, (shards, sources) in enumerate(held):
            start, stop = rows * rank // arguments.ranks, rows * (rank + 1) // arguments.ranks
            shards.append(row_slice(name, "BF16", (rows, columns), start, stop))
            sources[name] = torch.randn(stop - start, columns).to(torch.float32 if arguments.cast else torch.bfloat16)
    return held, destinations


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each part of publish and load, what is done once among them, and microseconds a tensor."""
    once: dict[str, float] = {}

    def timed(what: str, run: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = run()
        once[what] = time.perf_counter() - started
        return result

    held, destinations = (dense if arguments.dense else experts)(arguments)
    parts = [shards for shards, _ in held]
    layouts = timed(
        "build", lambda: [PartLayout.build(f"rank-{n:05d}", shards, _BUCKET_BYTES) for n, shards in enumerate(parts)]
    )
    timed("layout_digest", lambda: [layout.digest for layout in layouts])
    timed("json", lambda: [PartLayout.from_json(layout.to_json()) for layout in layouts])
    timed("pickle", lambda: pickle.loads(pickle.dumps(layouts)))
    timed("check_cover", lambda: check_cover(parts))
    saved = {name: ("BF16", tuple(tensor.shape)) for name, tensor in destinations.items()}
    timed("check_complete", lambda: check_complete(parts, saved))
    receiver = Receiver(destinations)
    timed("receiver_check", lambda: receiver.check(layouts))
    rows_plan = timed("row_plan", lambda: RowPlan(layouts))
    segments = [bytearray(layout.nbytes) for layout in layouts]

    repeated: dict[str, list[float]] = {"stage": [], "digest": [], "digest_merge": [], "apply": [], "taken": []}

    def repeat(what: str, run: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = run()
        repeated[what].append(time.perf_counter() - started)
        return result

    def stage_all() -> None:
        for layout, (_, sources), segment in zip(layouts, held, segments, strict=True):
            stage(layout, sources, segment)

    def apply_all() -> None:
        receiver.begin()
        for layout, segment in zip(layouts, segments, strict=True):
            receiver.apply(layout, segment)

    def published_digest() -> str:
        return str(rows.version_digest(rows.tensor_digests()))

    for number in range(1 + arguments.repeat):
        repeat("stage", stage_all)
        rows = repeat("digest", lambda: rows_plan.digest(segments))
        published = repeat("digest_merge", published_digest)
        repeat("apply", apply_all)
        found = repeat("taken", lambda: version_digest(receiver.taken()))
        assert found == published, "the load does not hold what was published"
        if number == 0:  # plans are made
            once |= {f"first_{what}": seconds.pop() for what, seconds in repeated.items()}
    tensors = len(destinations)
    least = {what: min(seconds) for what, seconds in repeated.items()}
    return {
        "tensors": tensors,
        "ranks": arguments.ranks,
        "nbytes": sum(layout.nbytes for layout in layouts),
        "digest": published,
        "once_s": once,
        "least_s": least,
        "us_per_tensor": {what: seconds / tensors * 1e6 for what, seconds in least.items()},
    }


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 48), ("experts", 128), ("inner", 1), ("hidden", 128), ("ranks", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dense", type=int, default=0, metavar="TENSORS", help="so many tensors, cut by rows, instead")
    parser.add_argument("--megabytes", type=int, default=512, help="with --dense: all of them together")
    parser.add_argument("--by-expert", action="store_true", help="in the order of the experts")
    parser.add_argument("--cast", action="store_true", help="the trainer holds fp32")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    found = measure(arguments)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{found['tensors']} tensors, {found['nbytes'] / 1e6:.1f} MB, {found['ranks']} ranks")
    for what, seconds in found["once_s"].items():
        print(f"  once  {what:20} {seconds * 1e3:9.2f} ms")
    for what, seconds in found["least_s"].items():
        print(f"  each  {what:20} {seconds * 1e3:9.2f} ms {found['us_per_tensor'][what]:9.3f} us a tensor")


if __name__ == "__main__":
    main()
