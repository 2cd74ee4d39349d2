"""The data plane on one GPU: is each byte right, and how far is each step from the raw copy over the bus?

    python benchmarks/gpu.py --json [--params 596e6] [--rounds 5] [--output benchmarks/results/gpu.json]

One process, without Ray: tensors of a Qwen3-0.6B's sizes on the device, a slot in shared memory, a model on the device
that takes the version. Every step is checked by digests against the same step on the CPU. Times are medians of the
rounds, in which the steps and the raw copies follow each other; ``of raw`` is a step's speed divided by that of the raw
copy of as many bytes in its direction.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trinity_sync.sync.broadcast_group import enter, serve_store
from trinity_sync.weights.apply import Receiver
from trinity_sync.weights.digests import bucket_digests, digest_rows, version_digest
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import whole
from trinity_sync.weights.slots import SlotArena, map_segment
from trinity_sync.weights.snapshot import Snapshot, plan
from trinity_sync.weights.staging import pin_segment, stage, unpin_segment

BUCKET_BYTES = 16 << 20  # conf/base/sync.yaml


class Trial:
    """Checks by name, and seconds by the name of a step."""

    def __init__(self) -> None:
        self.checks: dict[str, bool] = {}
        self.facts: dict[str, object] = {}
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def check(self, name: str, holds: bool) -> None:
        """Note a check; one that failed once stays so."""
        self.checks[name] = self.checks.get(name, True) and bool(holds)

    def time(self, name: str, step: Callable[[], Any]) -> Any:
        """Run a step between two synchronisations of the device."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        found = step()
        torch.cuda.synchronize()
        self.seconds[name].append(time.perf_counter() - started)
        return found


def shapes(params: float) -> dict[str, tuple[int, ...]]:
    """Tensors of a Qwen3 of 1,024 columns, as many layers as the parameters need."""
    found: dict[str, tuple[int, ...]] = {"embed": (151936, 1024)}
    layer = 0
    while sum(torch.Size(shape).numel() for shape in found.values()) < params:
        for name, shape in {
            "q": (2048, 1024), "k": (1024, 1024), "v": (1024, 1024), "o": (1024, 2048),
            "gate": (3072, 1024), "up": (3072, 1024), "down": (1024, 3072), "norm": (1024,),
        }.items():  # fmt: skip
            found[f"{layer}.{name}"] = shape
        layer += 1
    return found


def transfers(trial: Trial, params: float, rounds: int, folder: Path) -> int:
    """Stage, digest and load versions; return the bytes of one."""
    kinds = shapes(params)
    layout = PartLayout.build("rank-00000", [whole(name, "BF16", shape) for name, shape in kinds.items()], BUCKET_BYTES)
    master = {name: torch.randn(shape, device="cuda") * 0.02 for name, shape in kinds.items()}
    model = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in kinds.items()}
    other = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in kinds.items()}
    receiver, pageable = Receiver(model), Receiver(other)
    receiver.check([layout])
    pageable.check([layout])
    size = layout.nbytes
    device, host = torch.empty(size, dtype=torch.uint8, device="cuda"), torch.empty(size, dtype=torch.uint8)
    locked = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    with SlotArena.create("gpu", 1, {"rank-00000": size}, fallback=folder) as arena:
        path = arena.path(0, "rank-00000")
        slot, read, plain = (
            map_segment(path, size, writable=True), map_segment(path, size), map_segment(path, size)
        )  # fmt: skip
        trial.check("a slot is page-locked for writing", pin_segment(slot))
        trial.facts["a read-only map can be page-locked"] = pin_segment(read)
        if not trial.facts["a read-only map can be page-locked"]:
            read = map_segment(path, size, writable=True)
            trial.check("a second map of a slot is page-locked", pin_segment(read))
        expected = mmap.mmap(-1, size)
        for _ in range(rounds):
            for tensor in master.values():
                tensor.add_(torch.randn_like(tensor), alpha=1e-5)
            trial.time("raw: device to locked memory", lambda: locked.copy_(device, non_blocking=True))
            trial.time("raw: device to pageable memory", lambda: host.copy_(device))
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            trial.time("stage: fp32 cast on the device", lambda: stage(layout, master, slot))
            trial.check(
                "staging takes at most 160 MiB of the device", torch.cuda.max_memory_allocated() - held < 160 << 20
            )
            stage(layout, {name: tensor.cpu() for name, tensor in master.items()}, expected)
            trial.check("the device's cast gives the CPU's bytes", slot[:] == expected[:])
            half = {name: tensor.bfloat16() for name, tensor in master.items()}
            trial.time("stage: bf16", partial(stage, layout, half, slot))
            trial.check("a copy gives the same bytes", slot[:] == expected[:])
            digests = trial.time("digests of buckets, one thread", lambda: bucket_digests(slot, layout))
            rows = trial.time("digests of rows", lambda: digest_rows([(layout, slot)]))
            trial.time("raw: locked memory to device", lambda: device.copy_(locked, non_blocking=True))
            trial.time("raw: pageable memory to device", lambda: device.copy_(host))

            def load(into: Receiver, segment: mmap.mmap, found: Any) -> None:
                into.begin()
                into.apply(layout, segment, found)

            trial.time("load: page-locked slot", lambda: load(receiver, read, None))
            trial.time("load: page-locked slot, digests of buckets", partial(load, receiver, read, digests))
            trial.time("load: pageable slot", lambda: load(pageable, plain, None))
            taken = trial.time("load: read back and digested by rows", receiver.taken)
            trial.check(
                "the model on the device has the published digest", version_digest(taken) == rows.version_digest()
            )
            trial.check(
                "both loads give the same bits",
                all(torch.equal(model[n].view(torch.int16), other[n].view(torch.int16)) for n in kinds),
            )
        unpin_segment(slot)
        unpin_segment(read)
    return size


def state(trial: Trial, rounds: int) -> int:
    """Snapshot a state in the background while the training's stream goes on after it; return its bytes."""
    values = {"optimizer.pt": {f"{n}": torch.randn(32 << 20, device="cuda") for n in range(16)}}
    planned = plan(values)
    segment = mmap.mmap(-1, planned.nbytes)
    trial.check("a state's segment is page-locked", pin_segment(segment))
    for _ in range(rounds):
        want = {name: tensor.cpu() for name, tensor in values["optimizer.pt"].items()}
        for tensor in values["optimizer.pt"].values():  # enqueued, not done, when the copy begins
            tensor.add_(1)

        def copy() -> Snapshot:
            snapshot = Snapshot(planned, segment, "the state")
            snapshot.copy(in_background=True)
            return snapshot

        snapshot = trial.time("snapshot: begun and copied", lambda: _waited(copy()))
        same = all(
            torch.equal(snapshot.copied(tensor, 60), want[name] + 1) for name, tensor in values["optimizer.pt"].items()
        )
        trial.check("the state's copy has the values of the time of the call", same)
    unpin_segment(segment)
    return planned.nbytes


def _waited(snapshot: Snapshot) -> Snapshot:
    snapshot.wait_until_copied(60)
    return snapshot


def group(trial: Trial) -> None:
    """Enter an NCCL group of one rank, broadcast, leave it; and one that is broken off."""
    for name in ("left", "broken off"):
        store = serve_store("127.0.0.1", 20)
        made = enter(store, 0, 1, "nccl", 20)
        tensor = torch.arange(1 << 20, device="cuda")
        made.broadcast(tensor)
        trial.check(f"a broadcast of one rank over NCCL, {name}", int(tensor.sum()) == (1 << 20) * ((1 << 20) - 1) // 2)
        made.close(failed=name == "broken off")


def main() -> None:
    """Run everything, print the figures, exit with 1 if a check failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--params", type=float, default=596e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    trial = Trial()
    with tempfile.TemporaryDirectory() as folder:
        nbytes = transfers(trial, args.params, args.rounds, Path(folder))
    state_bytes = state(trial, args.rounds)
    group(trial)
    properties = torch.cuda.get_device_properties(0)
    found = {
        "device": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "bytes": nbytes,
        "state_bytes": state_bytes,
        "facts": trial.facts,
        "checks": trial.checks,
        "steps": {
            name: {
                "seconds": round(statistics.median(times), 5),
                "gb_s": round((state_bytes if "snapshot" in name else nbytes) / statistics.median(times) / 1e9, 2),
            }
            for name, times in trial.seconds.items()
        },
    }
    text = json.dumps(found, indent=2)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)
    if not all(trial.checks.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
