"""Processes that help to digest rows: the digests are the same, and nothing is left of them."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from xxhash import xxh3_128_digest

from tests.weights.helpers import cut, local_elements, random_tensor, reference_digest
from trinity_sync.weights import digests, tensor_rows
from trinity_sync.weights.digests import RowPlan
from trinity_sync.weights.slots import SlotArena
from trinity_sync.weights.staging import stage
from trinity_sync.weights.tensor_rows import RowProcesses


@pytest.fixture
def processes() -> Iterator[RowProcesses]:
    made = RowProcesses(2)
    yield made
    made.close()


def test_rows_digest_alike_here_and_there(
    processes: RowProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rows, rows that parts share, and rows too long for processes; also after a helper died."""
    monkeypatch.setattr(digests, "_PROCESS_BYTES", 0)
    rng = random.Random(3)
    shapes = {"w": (300, 33), "long": (2, 40_000), "b": (70,), "s": (), "none": (0, 4)}
    tensors = {name: random_tensor("BF16", shape, rng) for name, shape in shapes.items()}
    version = cut(tensors, "BF16", 3, 1 << 16, rng)
    sizes = {layout.part: layout.nbytes for layout in version.layouts}
    with SlotArena.create("run", 1, sizes, tmp_path, fallback=tmp_path) as arena:
        segments = [arena.map(0, part) for part in sizes]
        paths = [str(arena.path(0, part)) for part in sizes]
        plan = RowPlan(version.layouts)
        for again in range(4):
            if again:  # the slot is used again
                tensors["w"].view(torch.int16)[:] = again
            for layout, segment in zip(version.layouts, segments, strict=True):
                stage(layout, {s.name: local_elements(tensors[s.name], s) for s in layout.shards}, segment)
            found = plan.digest(segments, None, (processes, paths))
            assert found.version_digest() == reference_digest(tensors, "BF16")
            assert len(processes._processes) == (0 if again == 2 else 2)
            if again == 1:
                processes._processes[0].process.kill()
                processes._processes[0].process.wait(10)
        ended = list(processes._processes)
        processes.close()
        assert all(child.process.returncode is not None for child in ended)


def test_little_is_digested_without_help(processes: RowProcesses, tmp_path: Path) -> None:
    version = cut({"w": torch.randn(9, 5)}, "BF16", 1, 64, random.Random(0))
    (layout,) = version.layouts
    with SlotArena.create("run", 1, {layout.part: layout.nbytes}, tmp_path, fallback=tmp_path) as arena:
        segment = arena.map(0, layout.part)
        stage(layout, version.sources[0], segment)
        found = RowPlan([layout]).digest([segment], None, (processes, [str(arena.path(0, layout.part))]))
    assert found.version_digest() == reference_digest(version.tensors, "BF16")
    assert processes._processes == []


def test_answers_to_a_question_that_failed_are_not_taken_for_those_to_the_next(
    processes: RowProcesses, tmp_path: Path
) -> None:
    file = tmp_path / "segment"
    spans = [(str(file), 4096 * number, 4, 1024) for number in range(4)]

    def here(number: int) -> bytes:
        rows = file.read_bytes()[4096 * number :]
        return b"".join(xxh3_128_digest(rows[1024 * row : 1024 * (row + 1)]) for row in range(4))

    def fails(number: int) -> bytes:
        raise MemoryError

    draw = random.Random(4)
    file.write_bytes(draw.randbytes(4 * 4096))
    with pytest.raises(MemoryError):
        processes.digest(spans[::-1], fails)
    assert processes.digest(spans, here) == [here(number) for number in range(4)]


def test_a_helper_that_was_stopped_is_done_without(
    processes: RowProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "segment").write_bytes(bytes(4096))
    spans = [(str(tmp_path / "segment"), 0, 4, 1024)] * 3
    processes.digest(spans, lambda number: b"first")
    monkeypatch.setattr(tensor_rows, "_ANSWER_S", 0.2)  # not before the processes have started
    for child in processes._processes:
        child.process.send_signal(signal.SIGSTOP)
    assert processes.digest(spans, lambda number: b"here") == [b"here"] * 3


def test_helpers_end_with_who_started_them(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(4096))
    program = (
        "import sys, os, signal; from trinity_sync.weights.tensor_rows import RowProcesses\n"
        "made = RowProcesses(2); made.digest([(sys.argv[1], 0, 4, 1024)] * 3, lambda number: bytes(64))\n"
        "print(*[one.process.pid for one in made._processes], flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while alive := [int(pid) for pid in done.stdout.split() if is_running(int(pid))]:
        assert time.monotonic() < deadline, f"{alive} outlived their parent"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Not gone, nor a zombie that nobody has asked for yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
