"""Lossless deltas: bytes per changed element beside other codes and bounds of entropy, and the speed of C and numpy.

    python benchmarks/delta.py --json [--elements 4e6] [--only size speed rows history traces auto]
                               [--shares 0.0013 0.007] [--output benchmarks/results/delta.json]

Data: ``white``, normal weights of one scale, each step an independent update; ``adam``, weights whose scale differs by
rows, updates of a warm Adam, which go on in one direction for some steps. Both keep fp32 weights and compare their bf16
bits. The learning rate is the one at which one step changes the wanted share of the elements. ``traces``: versions of
GRPO runs of `launch.py` at the learning rates of `RATES`, from a model that GRPO has trained before; each
tensor is coded by itself, and the bytes are added.

``history``: `adam` versions of one shard, of each the delta from the version before, of every 4th one that from 4
versions earlier, and of every 16th one that from the base, as `keep_versions` has them. ``bytes`` is what all of them
and the base take, in versions, and ``bytes of 1,000`` what 1,000 versions with two bases take.
``restores`` is the processor time of the last one, from the base, beside that of the base alone: read, checked,
written.

``auto``: runs of `launch.py workload=bytes` on one node with `sync.encoding=full` and ``auto`` in turn, medians over
the versions of all rounds but the first two of each run.

Speeds are in processor time, the least of the repetitions, as bytes of the shard a second; ``copies`` divides them by
the speed of a copy that was measured in turn with them. ``decode`` is the gap code alone, ``apply`` a whole call with
the digest of the result; the digest of the base is known to both sides.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from trinity_sync.protocol.parts import delta_file
from trinity_sync.weights import delta, delta_gaps, native
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.part_delta import (
    FROM_BASE_EVERY,
    SPANS,
    PartEncoder,
    Point,
    Step,
    VersionIndex,
    apply_steps,
    find_route,
)
from trinity_sync.weights.shard_file import open_shard_file
from trinity_sync.weights.shards import whole

if TYPE_CHECKING:
    from trinity_sync.weights.delta_gaps import Elements

PARTS = ("size", "speed", "rows", "history", "traces", "auto")
SHARES = (0.0013, 0.007, 0.01, 0.024, 0.065)
STEPS = (1, 4, 16)
WIDTHS = (32, 1536, 2048, 8192)
_ZSTD = pyarrow.Codec("zstd", compression_level=1)
_FORM = delta_gaps.FORMS["BF16"]


def bits(weights: NDArray[np.float32]) -> Elements:
    """The bf16 bits, rounded to the nearest even ones."""
    words = weights.view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


def updates(kind: str, count: int, seed: int) -> Iterator[NDArray[np.float32]]:
    """The update of each step at a learning rate of 1."""
    rng = np.random.default_rng(seed)
    moment = 0.23 * rng.standard_normal(count, np.float32)  # of a warm Adam: 0.1 / 1.9 of the gradients' variance
    while True:
        yield moment
        noise = rng.standard_normal(count, np.float32)
        moment = np.float32(0.9) * moment + np.float32(0.1) * noise if kind == "adam" else np.float32(0.23) * noise


def initial(kind: str, count: int) -> NDArray[np.float32]:
    """The weights of version 0."""
    rng = np.random.default_rng(0)
    weights = 0.02 * rng.standard_normal(count, np.float32)
    if kind == "adam":  # rows of 2048 of other scales
        weights *= np.repeat(np.exp(0.5 * rng.standard_normal(-(-count // 2048))), 2048)[:count].astype(np.float32)
    return weights


def rate_of(kind: str, weights: NDArray[np.float32], share: float) -> np.float32:
    """The learning rate at which the first step changes this share of the elements."""
    few = weights[:400_000]
    update, low, high = next(updates(kind, few.size, 1)), 1e-9, 1e-3
    for _ in range(18):
        middle = (low * high) ** 0.5
        below = (bits(few) != bits(few - np.float32(middle) * update)).mean() < share
        low, high = (middle, high) if below else (low, middle)
    return np.float32(low)


def versions(kind: str, count: int, share: float) -> Iterator[tuple[int, Elements, Elements]]:
    """The first version with the one after each number of steps."""
    weights = initial(kind, count)
    rate, old = rate_of(kind, weights, share), bits(weights)
    for step, update in enumerate(updates(kind, count, 1), 1):
        weights -= rate * update
        if step in STEPS:
            yield step, old, bits(weights)
        if step == max(STEPS):
            return


def sizes(old: Elements, new: Elements) -> dict[str, float]:
    """Bytes per changed element of each code."""
    places = np.flatnonzero(old != new)
    gaps = np.minimum(np.diff(places, prepend=-1), 65535).astype(np.uint16)
    found = {
        "int32 + bf16": 6.0 * places.size,
        "u16 + zstd": float(sum(_ZSTD.compress(one.tobytes()).size for one in (gaps, new[places]))),
        **{codec: float(sum(map(len, delta.encode(old, new, "BF16", codec)))) for codec in ("gap8z", "class_gap")},
        "bound": bound(old, new, np.zeros(old.size, np.int64)),
        "bound given the exponent": bound(old, new, (old >> 7 & 255).astype(np.int64)),
    }
    return {name: nbytes / places.size for name, nbytes in found.items()}


def bound(old: Elements, new: Elements, classes: NDArray[np.int64]) -> float:
    """Bytes of an ideal code of the places and of the steps, whose frequencies are known for each class."""
    form = _FORM.of(0, 1)
    changed = old != new
    steps = (delta_gaps.ordered(new, form) - delta_gaps.ordered(old, form)).view(np.int16)
    total = 0.0
    for one in np.unique(classes[changed]):
        members = classes == one
        count, changes = int(members.sum()), int(changed[members].sum())
        total += count * _entropy(np.array([changes, count - changes]))
        total += changes * _entropy(np.unique(steps[members & changed], return_counts=True)[1])
    return total / 8


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def size_table(count: int) -> list[dict[str, Any]]:
    """The sizes for all data, shares and steps."""
    found = []
    for kind in ("white", "adam"):
        for share in SHARES:
            for steps, old, new in versions(kind, count, share):
                changed = float((old != new).mean())
                one = {"data": kind, "steps": steps, "changed": changed, "bytes per change": sizes(old, new)}
                found.append(one)
                print(json.dumps(one), file=sys.stderr)
    return found


KEPT = 511
"""Versions after a base, as of `keep_versions.base_every`."""
_TILE = 1_000_000
"""Elements of a history's data, which a larger shard repeats, each time in a piece of its own. Of such a shard only the
deltas that lead to the last version are made, and their bytes are not counted.
"""


def history_table(count: int, shares: Sequence[float]) -> list[dict[str, Any]]:
    """Bytes and times of histories of `KEPT` versions."""
    found = []
    for share in shares:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
            for codec, index in keep_versions(Path(folder), count, share, pool).items():
                one: dict[str, Any] = {"changed": share, "codec": codec, "versions": KEPT + 1}
                if count <= _TILE:
                    sizes = [sum(nbytes for _, nbytes in index[step]) / (2 * count) for step in range(1, KEPT + 1)]
                    one |= {"bytes": 1 + sum(sizes), "bytes of 1,000": 2 + sum(sizes) + sum(sizes[: 998 - KEPT])}
                ways = {"base": [], "last": route_to(index, KEPT)}
                times: dict[str, list[float]] = {name: [] for name in ways}
                for _ in range(7):
                    for name, steps in ways.items():
                        times[name].append(restore(Path(folder, codec), count, steps, pool))
                for name, steps in ways.items():
                    one |= {f"{name} steps": len(steps), f"{name} s": statistics.median(times[name])}
                found.append({**one, "restores": one["last s"] / one["base s"]})
                print(json.dumps(found[-1]), file=sys.stderr)
    return found


def shard_layout(count: int) -> PartLayout:
    """The layout of a part with one tensor, in pieces of 2 MB."""
    return PartLayout("rank-00000", ((whole("w", "BF16", (count,)), 0),), 2 * count, 2 * _TILE)


Index = dict[int, list[tuple[Point, int]]]
"""By step: where the deltas to it begin, and their bytes."""


def keep_versions(folder: Path, count: int, share: float, pool: ThreadPoolExecutor) -> dict[str, Index]:
    """Write a base and the deltas of later versions, in a folder for each codec; return what there is."""
    weights, layout = initial("adam", min(count, _TILE)), shard_layout(count)
    encoders = {codec: PartEncoder(layout, codec, (min(SPANS),)) for codec in ("class_gap", "gap8z")}
    rate, old = rate_of("adam", weights, share), np.resize(bits(weights), count)
    base, found = memoryview(old.tobytes()), {codec: Index() for codec in encoders}

    def read(start: int, into: memoryview) -> None:
        into[:] = base[start : start + len(into)]

    begin = 0 if count <= _TILE else KEPT // FROM_BASE_EVERY * FROM_BASE_EVERY - min(SPANS)
    for step, update in zip(range(1, KEPT + 1), updates("adam", weights.size, 1), strict=False):
        weights -= rate * update
        if step < begin:
            continue
        new = np.resize(bits(weights), count)
        if step == begin:
            old = new
            continue
        segments = memoryview(old.tobytes()), memoryview(new.tobytes())
        for codec, encoder in encoders.items():
            made = encoder.encode((0, step - 1), (0, step), segments, pool)
            if step % FROM_BASE_EVERY == 0:
                made.append(encoder.encode_from((0, 0), read, segments[1], pool))
            for one in made:
                data = b"".join(one.parts)
                path = folder / codec / str(step) / delta_file(layout.part, one.start)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                found[codec].setdefault(step, []).append((one.start, len(data)))
        old = new
    for codec in encoders:
        folder.joinpath(codec, "base").write_bytes(base)
    return found


def route_to(index: Index, step: int) -> list[Step]:
    """The deltas of the fewest bytes that lead to a version from the base."""
    route = find_route((0, step), (0, 0), 0, lambda at: VersionIndex(None, index.get(at[1], [])), math.inf)
    assert route is not None
    return route.steps((0, step))


def restore(folder: Path, count: int, steps: list[Step], pool: ThreadPoolExecutor) -> float:
    """The processor seconds to read and check a base, to apply deltas, and to write the result."""
    layout, began = shard_layout(count), time.process_time()
    segment = bytearray(folder.joinpath("base").read_bytes())
    xxh3_128_digest(segment)
    for _ in apply_steps(
        layout, segment, steps, lambda part, step: folder / str(step[1][1]) / delta_file(part, step[0]), pool
    ):
        pass
    folder.joinpath("made").write_bytes(segment)
    return time.process_time() - began


RATES = ("1e-7", "1e-6", "1e-5")
WARM = 4
"""The version with which later ones are compared: Adam's moments have values by then."""
MODEL = ("hidden_size=256", "intermediate_size=1024", "num_hidden_layers=6", "head_dim=64")


def trace_table() -> list[dict[str, Any]]:
    """The sizes for versions of real runs."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        base, model = Path(folder, "base"), Path(folder, "model")
        trinity_sync("run", f"hydra.run.dir={base}", "trainer.steps=100", *(f"model.architecture.{x}" for x in MODEL))
        trinity_sync("ckpt", "export", str(base), "--output", str(model))
        for rate in RATES:
            run = Path(folder, rate)
            given = (f"model.path={model}", f"trainer.lr={rate}", f"trainer.steps={WARM + max(STEPS)}")
            trinity_sync("run", f"hydra.run.dir={run}", "sync=checkpoint", "retention=[keep_all]", *given)
            old = version_tensors(run, WARM)
            for steps in STEPS:
                new = version_tensors(run, WARM + steps)
                changed = {name: int((old[name] != new[name]).sum()) for name in old}
                changes, elements = sum(changed.values()), sum(one.size for one in old.values())
                totals = dict[str, float]()
                for name, count in changed.items():
                    for code, each in sizes(old[name], new[name]).items() if count else ():
                        totals[code] = totals.get(code, 0) + each * count
                one = {"data": f"GRPO at {rate}", "steps": steps, "changed": changes / elements, "elements": elements}
                found.append({**one, "bytes per change": {code: total / changes for code, total in totals.items()}})
                print(json.dumps(found[-1]), file=sys.stderr)
    return found


ROUNDS, PUBLISHED = 3, 8


def auto_table() -> list[dict[str, Any]]:
    """The seconds of publish and load on one node, by mode, with full versions and with `sync.encoding=auto`."""
    found = []
    sizes = ("workload=bytes", "model.shapes=qwen3-0.6b", "model.layers=4", "backend.ranks=1", "checkpoint.interval=0")
    for mode in ("memory", "checkpoint", "nccl"):
        seconds: dict[str, list[float]] = {}
        for _, encoding in itertools.product(range(ROUNDS), ("full", "auto")):
            with tempfile.TemporaryDirectory() as folder:
                given = (f"sync={mode}", f"sync.encoding={encoding}", f"trainer.steps={PUBLISHED}", *sizes)
                trinity_sync("run", f"hydra.run.dir={folder}/run", *given)
                for line in Path(folder, "run", "events.jsonl").read_text().splitlines():
                    event = json.loads(line)
                    if event["event"] in ("publish", "load") and event["version"] > 1:
                        seconds.setdefault(f"{event['event']} {encoding}", []).append(event["total_s"])
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        both = {one: medians[f"publish {one}"] + medians[f"load {one}"] for one in ("full", "auto")}
        found.append({"mode": mode, **medians, "auto of full": both["auto"] / both["full"]})
        print(json.dumps(found[-1]), file=sys.stderr)
    return found


def trinity_sync(*arguments: str) -> None:
    """Run a command of `trinity-sync`."""
    subprocess.run([sys.executable, "-m", "trinity_sync.cli", *arguments], check=True, stdout=subprocess.DEVNULL)


def version_tensors(run: Path, step: int) -> dict[str, Elements]:
    """The bits of a version's tensors in bf16 that have elements, by part and name."""
    found = {}
    for path in sorted(run.glob(f"checkpoints/global_step_{step}/actor/weights_*.safetensors")):
        layout, data = open_shard_file(path)
        for name, dtype, _, start, stop in layout.table:
            if dtype == "BF16":
                found[f"{layout.part} {name}"] = np.frombuffer(data[start:stop], np.uint16)
    return found


def least(calls: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """The least processor seconds of each call; the calls are made in turn."""
    found = dict.fromkeys(calls, 1e9)
    for _ in range(repetitions):
        for name, call in calls.items():
            began = time.thread_time()
            call()
            found[name] = min(found[name], time.thread_time() - began)
    return found


def speed_table(count: int) -> list[dict[str, Any]]:
    """The speeds of each codec, in C and in numpy."""
    compiled = native.library()
    found = []
    for share in (0.0013, 0.007, 0.024, 0.065):
        _, old, new = next(versions("white", count, share))
        for way in ("c", "numpy") if compiled is not None else ("numpy",):
            native.library = (lambda: compiled) if way == "c" else lambda: None
            seconds = least(speed_calls(old, new), 7 if way == "c" else 3)
            speeds = {name: old.nbytes / 1e9 / one for name, one in seconds.items()}
            copies = {name: speed / speeds["copy"] for name, speed in speeds.items()}
            found.append({"changed": float((old != new).mean()), "way": way, "GB/s": speeds, "copies": copies})
            print(json.dumps(found[-1]), file=sys.stderr)
    native.library = lambda: compiled
    return found


def speed_calls(old: Elements, new: Elements) -> dict[str, Callable[[], object]]:
    """A copy, and for each codec its work with digests that are known and with those of `apply`."""
    base, result, out = delta.digest(old), delta.digest(new), np.empty_like(old)
    calls: dict[str, Callable[[], object]] = {"copy": partial(np.copyto, out, new)}
    for codec in ("gap8z", "class_gap", "sparse"):
        encode = partial(delta.encode, old, new, "BF16", codec, base_digest=base, result_digest=result)
        sent = b"".join(encode())
        calls[f"{codec} encode"] = encode
        calls[f"{codec} apply"] = partial(delta.apply, old, sent, "BF16", out, base_digest=base)
        if codec != "sparse":
            form = _FORM.of(delta_gaps.top_exponent(old, _FORM), native.CLASSES if codec == "class_gap" else 1)
            streams = delta_gaps.encode(old, new, form)
            calls[f"{codec} decode"] = partial(delta_gaps.decode, old, out, form, streams)
    calls["digest"] = partial(delta.digest, old)
    return calls


def row_table() -> list[dict[str, Any]]:
    """Nanoseconds a row, of 1 MiB that is in the cache and of 32 MiB that is not."""
    compiled = native.library()
    found = []
    for total in (1 << 20, 32 << 20):
        for width in WIDTHS:
            rows = np.random.default_rng(0).integers(0, 256, (total // width, width), np.uint8)
            calls: dict[str, Callable[[], object]] = {
                "copy": partial(np.copyto, np.empty_like(rows), rows),
                "xxhash": partial(by_xxhash, rows),
            }
            if compiled is not None:
                calls["c"] = partial(compiled.row_digests, rows)
                calls["c, no vectors"] = partial(compiled.row_digests, rows, 0)
            ns = {name: seconds / len(rows) * 1e9 for name, seconds in least(calls, 9).items()}
            found.append({"row bytes": width, "MiB": total >> 20, "ns": ns})
    return found


def by_xxhash(rows: NDArray[np.uint8]) -> bytes:
    """The digests of rows, a call for each."""
    return b"".join(map(xxh3_128_digest, rows))


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (the only output format)")
    parser.add_argument("--elements", type=float, default=4e6, help="of a shard (default 4e6)")
    parser.add_argument("--shares", type=float, nargs="+", default=(0.0013, 0.007), help="of changes, in the history")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    count = int(options.elements)
    report: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/delta.py", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "elements": count,
        "native": native.state(),
    }
    if "size" in options.only:
        report["size"] = size_table(count)
    if "speed" in options.only:
        report["speed"] = speed_table(count)
    if "rows" in options.only:
        report["rows"] = row_table()
    if "history" in options.only:
        report["history"] = history_table(count, options.shares)
    if "traces" in options.only:
        report["traces"] = trace_table()
    if "auto" in options.only:
        report["auto"] = auto_table()
    text = json.dumps(report, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
