"""What explorers held is restored where it was laid out as the run lays out its versions, and else not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trinity_sync.errors import RunError
from trinity_sync.trainer.full_saves import EXPLORER, published_step
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shard_file import write_shard_file
from trinity_sync.weights.shards import Shard, row_slice


def layouts(*, rows: int = 4, dtype: str = "BF16", bucket_bytes: int = 64, ranks: int = 2) -> list[PartLayout]:
    """Of ranks that share the rows of one tensor."""

    def shard(rank: int) -> Shard:
        return row_slice("weight", dtype, (8, 3), 0 if rank == 0 else rows, rows if rank == 0 else 8)

    return [PartLayout.build(f"rank-{rank:05}", [shard(rank)], bucket_bytes) for rank in range(ranks)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / EXPLORER).mkdir()
    for layout in layouts():
        write_shard_file(
            tmp_path / EXPLORER / f"{layout.part}.safetensors", layout, bytearray(layout.nbytes), {}, fsync=False
        )
    (tmp_path / EXPLORER / "version.json").write_text(json.dumps({"step": 3}))
    return tmp_path


def test_the_step_is_told_where_the_layout_is_the_runs(folder: Path) -> None:
    assert published_step(folder, layouts()) == 3
    assert published_step(folder, layouts(bucket_bytes=128)) == 3, "buckets cut the same bytes"


@pytest.mark.parametrize(
    "others",
    [layouts(ranks=1), layouts(rows=2), layouts(dtype="F32")],
    ids=["fewer ranks", "other rows", "another dtype"],
)
def test_another_layout_is_not_restored(folder: Path, others: list[PartLayout]) -> None:
    assert published_step(folder, others) is None


def test_there_is_nothing_to_restore_where_explorers_held_the_checkpoints_own(tmp_path: Path) -> None:
    assert published_step(tmp_path, layouts()) is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"step": "x"}'])
def test_a_damaged_file_is_named(folder: Path, text: str) -> None:
    (folder / EXPLORER / "version.json").write_text(text)
    with pytest.raises(RunError, match=r"version\.json cannot be read: "):
        published_step(folder, layouts())
