"""Segments that workers map."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync.sync.arrivals import SharedSegment, engine_memory
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import whole
from trinity_sync.weights.slots import DEFAULT_ROOT


def laid_out(rows: int) -> PartLayout:
    return PartLayout.build("together", [whole("matrix", "BF16", (rows, 8))], 64)


def test_a_segment_stays_while_its_layout_does_and_goes_with_another_one_and_at_the_end() -> None:
    segment = SharedSegment()
    first = segment.laid_out(laid_out(4)).path(0, "together")
    assert first.stat().st_size == laid_out(4).nbytes
    assert segment.laid_out(laid_out(4)).path(0, "together") == first
    second = segment.laid_out(laid_out(5)).path(0, "together")
    assert not first.exists()
    assert second.stat().st_size == laid_out(5).nbytes
    segment.close()
    assert not second.exists()
    segment.close()


def test_a_want_of_shared_memory_is_reported_once_a_layout_and_not_for_each_file_of_a_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.statvfs

    def statvfs(path: str | Path) -> os.statvfs_result:
        found = list(real(path))
        if str(path) == str(DEFAULT_ROOT):
            found[4] = 0  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", statvfs)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine_memory("server-1", "file", 100).close()
        assert not caplog.records
        segment = SharedSegment()
        for _ in range(2):
            segment.laid_out(laid_out(4))
        segment.close()
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        f"{DEFAULT_ROOT} cannot hold the 1 slots"
    ]


PROGRAM = """
import sys
from tests.vllm.test_segment import SharedSegment, laid_out
segment = SharedSegment()
print(segment.laid_out(laid_out(4)).path(0, "together"), flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(120)
def test_the_segment_of_a_program_that_was_killed_goes_with_the_next_one_that_is_made() -> None:
    arguments = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        left = Path(program.stdout.readline().strip())
        assert left.exists()
        program.send_signal(signal.SIGKILL)
    assert left.exists()
    segment = SharedSegment()
    segment.laid_out(laid_out(4))
    assert not left.exists()
    segment.close()
