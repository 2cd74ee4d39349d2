"""Files that are digested while they are written: past the page cache where they are to be durable."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from trinity_sync.host.durable import digest_file
from trinity_sync.weights import shard_file as module
from trinity_sync.weights.shard_file import DigestedFile

PIECE = module.PIECE_BYTES
LENGTHS = [0, 1, 4095, 4096, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 4097]


def contents(length: int) -> bytes:
    return (os.urandom(997) * (length // 997 + 1))[:length]


def write(path: Path, data: bytes, *, durable: bool, cut: int | None = None) -> tuple[int, str]:
    cut = cut or max(len(data), 1)
    with DigestedFile(path, durable=durable) as file:
        for start in range(0, len(data), cut):
            assert file.tell() == start
            assert file.write(data[start : start + cut]) == len(data[start : start + cut])
        return file.finish()


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_written_is_what_is_there_and_what_is_digested(tmp_path: Path, length: int, durable: bool) -> None:
    data, path = contents(length), tmp_path / "file"
    path.write_bytes(b"longer than what takes its place" * 1000)
    found = write(path, data, durable=durable)
    assert path.read_bytes() == data
    assert found == (length, xxh3_128_hexdigest(data)) == digest_file(path)


@pytest.mark.parametrize("cut", [7000, 65536, 3 << 20, PIECE + 5])
def test_it_does_not_matter_how_the_bytes_come(tmp_path: Path, cut: int) -> None:
    data = contents(2 * PIECE + 12345)
    assert write(tmp_path / "file", data, durable=True, cut=cut) == (len(data), xxh3_128_hexdigest(data))
    assert (tmp_path / "file").read_bytes() == data


class Disk:
    """What is asked of `os.write`, and how."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[int, memoryview, bool], int | None]) -> None:
        self.direct: list[int] = []
        self.cached: list[int] = []
        self.real = os.write

        def observed(descriptor: int, data: memoryview) -> int:
            direct = bool(module.fcntl.fcntl(descriptor, module.fcntl.F_GETFL) & os.O_DIRECT)
            told = answer(descriptor, data, direct)
            written = self.real(descriptor, data) if told is None else told
            (self.direct if direct else self.cached).append(written)
            return written

        monkeypatch.setattr(os, "write", observed)


def knows_direct_writes(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("durable", "past_the_cache"), [(True, 2 * PIECE), (False, 0)])
def test_what_is_to_be_durable_goes_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, past_the_cache: int
) -> None:
    if not knows_direct_writes(tmp_path):
        pytest.skip("this file system knows no direct writes")
    disk = Disk(monkeypatch, lambda *_: None)
    write(tmp_path / "file", contents(2 * PIECE + 100), durable=durable)
    assert sum(disk.direct) == past_the_cache
    assert sum(disk.direct) + sum(disk.cached) == 2 * PIECE + 100


def test_a_file_system_that_cannot_open_for_direct_writes_gets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    data = contents(PIECE + 10)
    monkeypatch.setattr(os, "open", refusing)
    assert write(tmp_path / "file", data, durable=True) == (len(data), xxh3_128_hexdigest(data))
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("first", [0, 4096, PIECE // 2])
def test_a_disk_that_refuses_a_direct_write_half_way_gets_the_rest_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    calls = []

    def refusing(descriptor: int, data: memoryview, direct: bool) -> int | None:
        if not direct:
            return None
        calls.append(len(data))
        if len(calls) == 1 and first:
            return disk.real(descriptor, data[:first])
        raise OSError(errno.EINVAL, "Invalid argument")

    data = contents(3 * PIECE + 10)
    disk = Disk(monkeypatch, refusing)
    assert write(tmp_path / "file", data, durable=True) == (len(data), xxh3_128_hexdigest(data))
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("when", [["write"], ["fsync"], ["close"], ["write", "close"]])
def test_of_a_file_that_could_not_be_written_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: list[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        for call in when:
            patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path / "file", contents(PIECE + 10), durable=True)
    assert list(tmp_path.iterdir()) == []


def test_a_mapped_segment_is_written_as_it_is(tmp_path: Path) -> None:
    with mmap.mmap(-1, PIECE + mmap.PAGESIZE) as segment:
        segment[:] = data = contents(len(segment))
        assert write_view(tmp_path / "file", segment) == (len(data), xxh3_128_hexdigest(data))
    assert (tmp_path / "file").read_bytes() == data


def write_view(path: Path, segment: mmap.mmap) -> tuple[int, str]:
    with DigestedFile(path, durable=True) as file, memoryview(segment) as view:
        file.write(view)
        return file.finish()
