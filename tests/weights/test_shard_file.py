from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from trinity_sync.weights.digests import bucket_digests
from trinity_sync.weights.layout import LayoutError, PartLayout
from trinity_sync.weights.shard_file import ShardFile, ShardFileError, open_shard_file, write_shard_file
from trinity_sync.weights.shards import flat_range, row_slice, whole
from trinity_sync.weights.staging import stage

SHARDS = [
    row_slice("model.a", "BF16", (8, 5), 2, 5),
    flat_range("model.b", "F32", (6, 7), 3, 30),
    whole("ids", "I64", (3,)),
    whole("none", "F16", (0, 4)),
    whole("last", "BOOL", ()),
]


def example(path: Path) -> tuple[PartLayout, dict[str, torch.Tensor], bytes]:
    layout = PartLayout.build("rank-00003", SHARDS, 64)
    sources = {
        "model.a": torch.randn(15).bfloat16(),
        "model.b": torch.randn(27),
        "ids": torch.tensor([1, 2, 3]),
        "none": torch.empty(0, dtype=torch.float16),
        "last": torch.tensor(True),
    }
    segment = bytearray(layout.nbytes + 100)
    stage(layout, sources, segment)
    write_shard_file(path, layout, segment, {"step": "7"}, fsync=True)
    return layout, sources, bytes(segment[: layout.nbytes])


def test_any_safetensors_reader_finds_the_local_elements_under_the_tensors_names(tmp_path: Path) -> None:
    layout, sources, _ = example(tmp_path / "part")
    with safe_open(tmp_path / "part", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    padding = {name: found.pop(name) for name in list(found) if name.startswith("__padding__.")}
    assert sorted(found) == sorted(sources)
    assert all(torch.equal(found[name], source.reshape(-1)) for name, source in sources.items())
    assert not any(bool(tensor.any()) for tensor in padding.values())
    assert (metadata["step"], PartLayout.from_json(json.loads(metadata["trinity_layout"]))) == ("7", layout)


def test_what_is_read_is_the_segment_from_any_byte_on(tmp_path: Path) -> None:
    layout, _, segment = example(tmp_path / "part")
    with ShardFile(tmp_path / "part") as file:
        assert file.layout == layout
        for start, stop in [(0, len(segment)), (64, 128), (5, 6), (len(segment), len(segment))]:
            found = bytearray(stop - start)
            file.read(start, found)
            assert bytes(found) == segment[start:stop]
    with pytest.raises(ValueError, match="closed file"):
        file.read(0, bytearray(1))


def test_a_file_that_is_cut_or_deleted_while_it_is_read_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, _, segment = example(tmp_path / "part")
    with ShardFile(tmp_path / "part") as file:
        (tmp_path / "part").unlink()  # on a local disk what is open stays
        found = bytearray(layout.nbytes)
        file.read(0, found)
        assert bytes(found) == segment
    example(tmp_path / "part")
    with ShardFile(tmp_path / "part") as file:
        os.truncate(tmp_path / "part", 4)
        with pytest.raises(ShardFileError, match="part is torn: it has no byte"):
            file.read(0, found)

        # There is no NFS here: what its client says of a file that another client deleted.
        def stale(*_: object) -> int:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        monkeypatch.setattr(os, "preadv", stale)
        with pytest.raises(ShardFileError, match="part cannot be read now: Stale file handle"):
            file.read(0, found)


def test_the_mapped_bytes_are_the_segment_and_aligned_in_the_file(tmp_path: Path) -> None:
    layout, _, segment = example(tmp_path / "part")
    found, view = open_shard_file(tmp_path / "part")
    assert found == layout
    assert bytes(view) == segment
    assert view.readonly
    assert bucket_digests(view, found) == bucket_digests(segment, layout)
    assert ((tmp_path / "part").stat().st_size - len(view)) % 64 == 0


def test_length_and_digest_are_those_of_the_whole_file(tmp_path: Path) -> None:
    layout = PartLayout.build("p", [whole("w", "U8", (9_000_001,))], 1 << 20)
    data = torch.arange(9_000_001).to(torch.uint8).numpy().tobytes()
    result = write_shard_file(tmp_path / "part", layout, data, {}, fsync=False)
    content = (tmp_path / "part").read_bytes()
    assert result == (len(content), xxhash.xxh3_128(content).hexdigest())
    assert content.endswith(data)


def test_a_part_that_holds_nothing_has_a_file_all_the_same(tmp_path: Path) -> None:
    layout = PartLayout.build("p", [], 64)
    write_shard_file(tmp_path / "part", layout, b"", {}, fsync=False)
    found, view = open_shard_file(tmp_path / "part")
    assert (found, len(view)) == (layout, 0)
    with safe_open(tmp_path / "part", framework="pt") as file:
        assert list(file.keys()) == []


def test_a_file_cut_anywhere_or_too_long_is_torn(tmp_path: Path) -> None:
    example(tmp_path / "part")
    content = (tmp_path / "part").read_bytes()
    for length in (0, 5, 8, 100, len(content) - 1):
        (tmp_path / "torn").write_bytes(content[:length])
        with pytest.raises(ShardFileError, match=r"torn is torn"):
            open_shard_file(tmp_path / "torn")
    (tmp_path / "torn").write_bytes(content + b"\0")
    with pytest.raises(ShardFileError, match=r"torn is torn: it has \d+ bytes, its header says \d+"):
        open_shard_file(tmp_path / "torn")


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    header = b'{"__metadata__":{"format":"pt"}}'
    (tmp_path / "plain").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ShardFileError, match="plain is not a shard file: its metadata holds no valid trinity_layout"):
        open_shard_file(tmp_path / "plain")
    (tmp_path / "text").write_bytes(b"\x10" + bytes(7) + b"sixteen letters!" * 2)
    with pytest.raises(ShardFileError, match="text is not a shard file"):
        open_shard_file(tmp_path / "text")
    with pytest.raises(ShardFileError, match="gone is missing"):
        open_shard_file(tmp_path / "gone")


def test_nothing_is_left_behind_by_a_write_that_fails(tmp_path: Path) -> None:
    layout = PartLayout.build("p", [whole("w", "U8", (100,))], 64)
    with pytest.raises(LayoutError, match="needs 100 bytes"):
        write_shard_file(tmp_path / "short", layout, bytes(99), {}, fsync=False)
    with pytest.raises(ValueError, match="must not hold the key 'trinity_layout'"):
        write_shard_file(tmp_path / "key", layout, bytes(100), {"trinity_layout": ""}, fsync=False)
    with pytest.raises(FileNotFoundError):
        write_shard_file(tmp_path / "no" / "folder", layout, bytes(100), {}, fsync=False)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_writing_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    layout = PartLayout.build("p", [whole("w", "U8", (100,))], 64)
    with pytest.raises(OSError, match="No space left"):
        write_shard_file(tmp_path / "part", layout, bytes(100), {}, fsync=True)
    assert list(tmp_path.iterdir()) == []
