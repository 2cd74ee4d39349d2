"""The parts of `trinity-sync doctor --gpu`: checks that the data plane moves each byte right on a GPU, and the speed of
each step beside a raw copy of as many bytes. Every step is compared with the same step on the CPU.

One process without Ray, and a child that is rank 1 of the NCCL group. The tests run every part on a CPU, with stand-ins
for streams.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.distributed import TCPStore, is_nccl_available

from trinity_sync import __version__
from trinity_sync.errors import ConfigError, RunError, TrinityError, WaitTimeout, in_one_line
from trinity_sync.host.child_process import start_child
from trinity_sync.host.durable import replace_file
from trinity_sync.host.hardware import available_memory
from trinity_sync.host.package_source import installed_version
from trinity_sync.host.threads import in_background
from trinity_sync.launch.machine import Finding
from trinity_sync.sync.broadcast_group import BroadcastGroup, enter, serve_store
from trinity_sync.weights.apply import Receiver
from trinity_sync.weights.digests import bucket_digests, digest_rows, version_digest
from trinity_sync.weights.layout import PartLayout, Segment
from trinity_sync.weights.shards import whole
from trinity_sync.weights.slots import DEFAULT_ROOT, SlotArena, map_segment
from trinity_sync.weights.snapshot import Snapshot, plan
from trinity_sync.weights.staging import enqueued, pin_segment, stage, unpin_segment
from trinity_sync.weights.tensors import byte_tensor, from_torch, row_digests, to_torch

LIMIT_S = 600.0
"""Limit of the command, seconds."""
_PART_S = 60.0
"""A part begins only if as much time is left, seconds."""
_GROUP_S, _WAIT_S, _ROUNDS_S = 45.0, 30.0, 30.0
_ROUNDS = 5
_BUCKET_BYTES = 16 << 20  # conf/base/sync.yaml
_MOST_BYTES = 8 * 10**9
_MOST_EXTRA_BYTES = 160 << 20
_BROADCAST_BYTES = 256 << 20
_LATE_CYCLES, _LATE_VALUES = 10**9, 16 << 20  # of the GPU's clock: half a second; fp32
_ROW_BYTES = (16, 240, 248, 256, 1024, 1032, 2056, 6008, 256 << 10, (256 << 10) + 8)
_ROW_COUNTS = (1, 11, 100)
_RAW, _VERIFIED = "raw: locked memory to device", "load: page-locked slot, verify=full"
DEVICE, TRANSPORT = "cuda", "nccl"  # tests set cpu and gloo
FILE = Path("trinity-sync-gpu.json")


class DifferenceError(RunError):
    """A step on the GPU does not do what it does on the CPU."""


class OmissionError(RunError):
    """A check cannot be made on this machine."""


@dataclass(frozen=True)
class GpuResult:
    """The result of a part."""

    result: Literal["passed", "failed", "left out"]
    told: str


@dataclass(frozen=True)
class GpuRate:
    """The speed of a step: the median of repetitions that take turns with those of the other steps."""

    seconds: float
    gb_s: float
    bytes: int
    repetitions: int


@dataclass
class GpuReport:
    """The content of the file that `doctor --gpu` writes."""

    versions: Mapping[str, str | None]
    machine: Sequence[Finding]
    begun: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    seconds: float = 0.0
    parts: dict[str, GpuResult] = field(default_factory=dict)
    speeds: dict[str, GpuRate] = field(default_factory=dict)

    def save(self, file: Path) -> None:
        replace_file(file, json.dumps(asdict(self), indent=1) + "\n")

    def measure(self, steps: Mapping[str, tuple[int, Callable[[], object]]]) -> None:
        """Measure steps (bytes, work) in turns, after a first turn that is not counted."""
        times: dict[str, list[float]] = defaultdict(list)
        until = time.monotonic() + _ROUNDS_S
        for number in range(_ROUNDS + 1):
            for name, (_, work) in steps.items():
                _finish()
                started = time.perf_counter()
                work()
                _finish()
                if number:
                    times[name].append(time.perf_counter() - started)
            if number and time.monotonic() > until:
                break
        for name, (nbytes, _) in steps.items():
            seconds = statistics.median(times[name])
            self.speeds[name] = GpuRate(round(seconds, 5), round(nbytes / seconds / 1e9, 2), nbytes, len(times[name]))


Work = Callable[[GpuReport], str]
"""A part: returns what it compared or measured. OmissionError: it cannot be done here; any other error: it failed."""


def check_gpu() -> None:
    """Raise ConfigError: torch finds no GPU."""
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda or torch.version.hip else " (it is built without GPUs)"
        raise ConfigError(
            f"--gpu: torch {torch.__version__} finds no GPU here{built}; run the command on a machine with a GPU, its "
            "driver and torch's build for it, and look whether CUDA_VISIBLE_DEVICES hides it"
        )


def versions() -> dict[str, str | None]:
    """Return the versions on which results depend, and the GPUs; None: unknown."""
    driver = ""
    with suppress(OSError):
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    found = re.search(r"Module(?: for \S+)?\s+([\d.]+)", driver)
    return {
        "trinity_sync": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "driver": found[1] if found else None,
        "triton": installed_version("triton"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_nccl_available() else None,
        "gpus": ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())),
    }


def run_parts(
    file: Path, report: GpuReport, parts: Mapping[str, Work], clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[str, GpuResult]]:
    """Run parts one after another and yield their results, which the file has by then. Raises ConfigError: the file
    cannot be written.
    """
    started = clock()
    report.parts = dict.fromkeys(parts, GpuResult("left out", "the command ended before"))
    try:
        report.save(file)
        for name, work in parts.items():
            over = clock() - started
            if over > LIMIT_S - _PART_S:
                report.parts[name] = GpuResult("left out", f"no time: {over:.0f} s of {LIMIT_S:.0f} are over")
            else:
                report.parts[name] = _result(work, report)
            report.seconds = round(clock() - started, 1)
            report.save(file)
            yield name, report.parts[name]
    except OSError as error:
        raise ConfigError(f"--json: {file} cannot be written: {error.strerror}; name another file") from error


def _result(work: Work, report: GpuReport) -> GpuResult:
    try:
        return GpuResult("passed", work(report))
    except OmissionError as error:
        return GpuResult("left out", str(error))
    except Exception as error:
        kind = "" if isinstance(error, TrinityError) else f"{type(error).__name__}: "
        return GpuResult("failed", kind + in_one_line(error))
    finally:
        with suppress(RuntimeError):  # after some errors a GPU does nothing more
            torch.cuda.empty_cache()


# -- the checks


def _page_locks(report: GpuReport) -> str:
    segment = mmap.mmap(-1, 64 << 20)
    with _slot(_layout({"w": (16 << 20,)}, "F32")) as (*_, refused):
        if refused := refused or ("" if pin_segment(segment) else "not for the copy of a state"):
            raise DifferenceError(f"memory is not page-locked, so copies take several times as long: {refused}")
        unpin_segment(segment)
    return "a slot for writing and for reading, and the memory of a state"


def _staging(report: GpuReport) -> str:
    sources = _odd_tensors()
    for source, wire in ((torch.float32, "BF16"), (torch.bfloat16, "BF16"), (torch.float32, "F32")):
        here = {name: tensor.to(source) for name, tensor in sources.items()}
        layout = _layout({name: tuple(tensor.shape) for name, tensor in here.items()}, wire)
        expected = bytearray(layout.nbytes)
        stage(layout, here, expected)
        there = {name: tensor.to(DEVICE) for name, tensor in here.items()}
        with _slot(layout) as (slot, *_):
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            stage(layout, there, slot)
            extra = torch.cuda.max_memory_allocated() - held
            wrong = np.flatnonzero(np.frombuffer(slot, np.uint8) != np.frombuffer(expected, np.uint8))
        if len(wrong):
            what = f"{from_torch(source)} staged as {wire}"
            raise DifferenceError(f"{what}: {len(wrong)} bytes differ from the CPU's, the first is {wrong[0]}")
        if extra > _MOST_EXTRA_BYTES:
            raise DifferenceError(f"staging took {extra} more bytes of the GPU, at most {_MOST_EXTRA_BYTES} are right")
    return f"fp32 as bf16, bf16, fp32: {len(sources)} tensors each, byte by byte"


def _digests(report: GpuReport) -> str:
    try:
        from trinity_sync.weights import cuda_digests
    except ImportError as error:
        raise OmissionError(f"rows are digested by the CPU here: {error}") from error
    count = 0
    for row_bytes in _ROW_BYTES:
        for rows in _ROW_COUNTS:
            data = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=_seeded())
            normal = torch.randn(rows, row_bytes // 2, generator=_seeded())
            for dtype in ("BF16", "F16", "F32", "I64", "U8", "cast"):
                matrix, wire = (normal, "BF16") if dtype == "cast" else (data.view(to_torch(dtype)), dtype)
                there = matrix.to(DEVICE)
                # the function that loads call would turn to the CPU after an error
                taken = cuda_digests.takes(row_bytes)
                found = cuda_digests.row_digests(there, to_torch(wire)) if taken else row_digests(there, wire)
                if found != row_digests(matrix, wire):
                    raise DifferenceError(f"{rows} rows of {row_bytes} bytes, {dtype}: another digest than on the CPU")
                count += 1
    return f"{count} matrices"


def _load(report: GpuReport) -> str:
    sources = _odd_tensors()
    layout = _layout({name: tuple(tensor.shape) for name, tensor in sources.items()}, "BF16")
    held = {name: torch.zeros(tensor.shape, device=DEVICE) for name, tensor in sources.items()}
    receiver = Receiver({name: one if name == "odd" else one.bfloat16() for name, one in held.items()})
    receiver.check([layout])
    with _slot(layout) as (slot, read, *_):
        stage(layout, sources, slot)
        published, digests = digest_rows([(layout, slot)]).version_digest(), bucket_digests(slot, layout)
        _load_once(receiver, layout, read, digests)
        _verify(receiver, published)
        slot[0] ^= 1
        _load_once(receiver, layout, read)
        if version_digest(receiver.taken()) == published:
            raise DifferenceError("a byte was changed in the slot, and the model has the same digest")
    return f"{layout.nbytes / 1e6:.0f} MB; a changed byte changes the digest"


def _load_once(receiver: Receiver, layout: PartLayout, slot: Segment, digests: Sequence[bytes] | None = None) -> None:
    receiver.begin()
    receiver.apply(layout, slot, digests)


def _verify(receiver: Receiver, published: str) -> None:
    if version_digest(receiver.taken()) != published:
        raise DifferenceError("the model on the GPU has another digest than the version")


def _late_version(report: GpuReport) -> str:
    layout = _layout({"w": (_LATE_VALUES,)}, "F32")
    with _slot(layout) as (slot, *_):

        def begin(source: torch.Tensor) -> Future[torch.Tensor]:
            work = partial(stage, layout, {"w": source}, slot, enqueued())
            return in_background(lambda: work() or byte_tensor(memoryview(slot)).view(torch.float32), "stage")

        return _copies_late(begin)


def _late_state(report: GpuReport) -> str:
    segment = mmap.mmap(-1, _LATE_VALUES * 4)

    def begin(source: torch.Tensor) -> Future[torch.Tensor]:
        snapshot = Snapshot(plan({"optimizer.pt": {"w": source}}), segment, "the state")
        snapshot.copy(in_background=True)
        return in_background(partial(snapshot.copied, source, _WAIT_S), "wait")

    pin_segment(segment)
    try:
        return _copies_late(begin)
    finally:
        unpin_segment(segment)


def _copies_late(begin: Callable[[torch.Tensor], Future[torch.Tensor]]) -> str:
    """Begin a copy while the training's stream has yet to write the source; it must have the values of afterwards."""
    source, training = torch.zeros(_LATE_VALUES, device=DEVICE), torch.cuda.Stream()
    for value in (1.0, 2.0):  # the first time loads kernels, for which the GPU may wait
        _finish()
        with torch.cuda.stream(training):
            torch.cuda._sleep(_LATE_CYCLES)
            source.fill_(value)
            copy = begin(source)
        is_late = not training.query()
        try:
            wrong = int((copy.result(_WAIT_S) != value).sum())
        except TimeoutError:
            raise WaitTimeout("the copy", "end", _WAIT_S) from None
        if wrong:
            raise DifferenceError(f"the copy did not wait: {wrong} of {len(source)} values are those of before")
    if not is_late:
        raise OmissionError("the GPU had written before the copy began, which shows nothing")
    return "values of after the write"


def _group_of_one(report: GpuReport) -> str:
    for failed in (False, True):
        group = enter(serve_store("127.0.0.1", _GROUP_S), 0, 1, TRANSPORT, _GROUP_S)
        payload = _payload(group, _BROADCAST_BYTES)
        group.broadcast(payload)
        if not torch.equal(payload, _payload(group, _BROADCAST_BYTES)):
            raise DifferenceError("a broadcast changed the bytes of its sender")
        group.close(failed=failed)
    return "entered, used and left; and broken off"


def _group_of_two(report: GpuReport) -> str:
    if TRANSPORT == "nccl" and torch.cuda.device_count() < 2:
        raise OmissionError("there is one GPU, and NCCL admits one rank on each")
    store = serve_store("127.0.0.1", _GROUP_S)
    with start_child(__name__, None) as child:
        child.pipe.send((store.port, TRANSPORT, _BROADCAST_BYTES))
        group = enter(store, 0, 2, TRANSPORT, _GROUP_S)
        try:
            payload = _payload(group, _BROADCAST_BYTES)
            report.measure({"broadcast: to another GPU": (payload.nbytes, lambda: group.broadcast(payload))})
            group.broadcast(payload.zero_())  # the end, for the other rank
            if not child.pipe.poll(_WAIT_S):
                raise WaitTimeout("rank 1", "compare what it received", _WAIT_S)
            wrong = child.pipe.recv()
        except BaseException as error:
            group.close(failed=True)
            if isinstance(error, EOFError):
                raise RunError("rank 1 has died; its error is on the terminal") from error
            raise
        group.close()
    if wrong:
        raise DifferenceError(f"rank 1 received {wrong} broadcasts wrong")
    return f"{_BROADCAST_BYTES / 1e6:.0f} MB at a time, compared on the other GPU"


def serve(descriptor: int) -> None:
    """Run as the child, rank 1: receive until a broadcast is zeros, and send how many others were wrong."""
    with Connection(descriptor) as connection:
        port, transport, nbytes = connection.recv()
        if transport == "nccl":
            torch.cuda.set_device(1)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_GROUP_S))
        group = enter(store, 1, 2, transport, _GROUP_S)
        payload, wrong = _payload(group, nbytes), 0
        while True:
            received = torch.full_like(payload, -1)
            group.broadcast(received)
            if not received.any():
                break
            wrong += not torch.equal(received, payload)
        connection.send(wrong)
        group.close()


def _payload(group: BroadcastGroup, nbytes: int) -> torch.Tensor:
    return torch.arange(1, nbytes // 4 + 1, dtype=torch.int32, device=group.device)


# -- the speeds


def _speeds(report: GpuReport) -> str:
    nbytes, bound = _size()
    shapes = _shapes(nbytes)
    layout = _layout(shapes, "BF16")
    size = layout.nbytes
    master = {name: torch.randn(shape, device=DEVICE) * 0.02 for name, shape in shapes.items()}
    half = {name: tensor.bfloat16() for name, tensor in master.items()}
    model = {name: torch.zeros_like(tensor) for name, tensor in half.items()}
    raw = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    receiver = Receiver(model)
    receiver.check([layout])
    state = plan({"optimizer.pt": master})
    segment = mmap.mmap(-1, state.nbytes)
    pin_segment(segment)

    def verified_load() -> None:
        _load_once(receiver, layout, read)
        _verify(receiver, published)

    def digest() -> None:
        receiver.begin()
        _verify(receiver, published)

    def snapshot() -> None:
        copy = Snapshot(state, segment, "the state")
        copy.copy(in_background=True)
        copy.copied(master["embed"], _WAIT_S)  # also raises errors of the copy

    try:
        with _slot(layout) as (slot, read, plain, _):
            locked, pageable = byte_tensor(memoryview(slot)), byte_tensor(memoryview(plain))
            stage(layout, master, slot)
            published = digest_rows([(layout, slot)]).version_digest()
            works: dict[str, Callable[[], object]] = {
                "raw: device to locked memory": lambda: locked.copy_(raw, non_blocking=True),
                "stage: fp32 cast on the device": lambda: stage(layout, master, slot),
                "stage: bf16": lambda: stage(layout, half, slot),
                _RAW: lambda: raw.copy_(locked, non_blocking=True),
                "raw: pageable memory to device": lambda: raw.copy_(pageable),
                "load: page-locked slot": lambda: _load_once(receiver, layout, read),
                "digests of rows: the model on the device": digest,
                _VERIFIED: verified_load,
                "digests of rows: the slot, one thread": lambda: digest_rows([(layout, slot)]),
            }
            steps = {name: (size, work) for name, work in works.items()}
            report.measure({**steps, "snapshot: begun and copied": (state.nbytes, snapshot)})
    finally:
        unpin_segment(segment)
    times = report.speeds[_VERIFIED].seconds / report.speeds[_RAW].seconds
    return f"{size / 1e9:.2f} GB ({bound}); a load with verify=full takes {times:.2f} page-locked copies"


def _size() -> tuple[int, str]:
    """Return the bytes of the version to measure with, and their bound: it is held as fp32 once and as bf16 three times
    on the GPU, once in shared memory, and as a state in twice as much memory.
    """
    bounds = {
        "the most that is measured": _MOST_BYTES,
        "by the free memory of the GPU": torch.cuda.mem_get_info()[0] // 6,
        "by the free memory": (available_memory() or _MOST_BYTES) // 4,
        f"by the free room in {DEFAULT_ROOT}": shutil.disk_usage(DEFAULT_ROOT).free * 4 // 5,
    }
    return min((nbytes, bound) for bound, nbytes in bounds.items())


def _shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Return tensors of so many bytes in bf16 or little less: a Qwen3-8B's above 4 GB, else a Qwen3-0.6B's."""
    cols = 4096 if nbytes > 4 * 10**9 else 1024
    heads = max(cols, 2048)
    found: dict[str, tuple[int, ...]] = {"embed": (min(151936, nbytes // 8 // cols), cols)}
    left = nbytes - 2 * found["embed"][0] * cols
    for layer in range(1000):
        for name, shape in {
            "q": (heads, cols), "k": (1024, cols), "v": (1024, cols), "o": (cols, heads),
            "gate": (3 * cols, cols), "up": (3 * cols, cols), "down": (cols, 3 * cols), "norm": (cols,),
        }.items():  # fmt: skip
            left -= 2 * torch.Size(shape).numel()
            if left < 0:
                return found
            found[f"{layer}.{name}"] = shape
    return found


# -- helpers


def _odd_tensors() -> dict[str, torch.Tensor]:
    """Return fp32 tensors on the CPU: all exponents, larger than a chunk, turned, flat, of odd lengths; no NaN."""
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (18_000_000,), dtype=torch.int64, generator=_seeded())
    values = torch.nan_to_num(bits.to(torch.int32).view(torch.float32), 0.0, torch.inf, -torch.inf)
    return {
        "large": values[:17_500_000].view(3500, 5000),
        "turned": values[:480_000].view(1000, 480).t(),
        "experts": values[-96_000:].view(10, 60, 160),
        "odd": values[3:1004],
        "narrow": values[-4000:].view(500, 8),
    }


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _layout(shapes: Mapping[str, tuple[int, ...]], wire: str) -> PartLayout:
    shards = [whole(name, wire, shape) for name, shape in shapes.items()]
    return PartLayout.build("rank-00000", shards, _BUCKET_BYTES)


@contextmanager
def _slot(layout: PartLayout) -> Iterator[tuple[mmap.mmap, mmap.mmap, mmap.mmap, str]]:
    """Yield three maps of a slot: page-locked for writing, page-locked for reading, and neither; and which of the first
    two the driver refused to page-lock.
    """
    size = layout.nbytes
    with (
        tempfile.TemporaryDirectory() as folder,
        SlotArena.create(f"gpu-{os.getpid()}", 1, {layout.part: size}, fallback=Path(folder)) as arena,
    ):
        path = arena.path(0, layout.part)
        written, read, plain = map_segment(path, size, writable=True), map_segment(path, size), map_segment(path, size)
        try:
            refused = [what for what, map in (("writing", written), ("reading", read)) if not pin_segment(map)]
            yield written, read, plain, "; ".join([f"not for {' and '.join(refused)}", *arena.notes]) if refused else ""
        finally:
            unpin_segment(written)
            unpin_segment(read)


def _finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


PARTS: Mapping[str, Work] = {
    "the driver page-locks memory": _page_locks,
    "staging gives the CPU's bytes": _staging,
    "digests on the GPU are the CPU's": _digests,
    "a load has the published digest": _load,
    "a lazy copy of a version waits for the training's stream": _late_version,
    "a lazy copy of a state waits for the training's stream": _late_state,
    "speeds": _speeds,
    "an NCCL group of one rank": _group_of_one,
    "an NCCL group of two ranks": _group_of_two,
}
