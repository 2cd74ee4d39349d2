"""What fails in our part of a verl program has the type that callers of verl expect: `RuntimeError`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trinity_sync.backends.safe_loading import load_file
from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.ranks import together
from trinity_sync.integrations.verl.reading import check_files


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_refusal_of_verls_within_a_collective_load_is_still_a_runtime_error() -> None:
    def refuse() -> None:
        raise RuntimeError("Detected deprecated Megatron checkpoint layout")

    with pytest.raises(RuntimeError, match="deprecated Megatron checkpoint layout"):
        together("load global_step_2", refuse)


def test_a_checkpoint_without_this_ranks_files_is_a_runtime_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"has no model_world_size_2_rank_1\.pt"):
        check_files(str(tmp_path), ["model_world_size_2_rank_1.pt"])


def test_a_file_that_cannot_be_loaded_is_told_once(tmp_path: Path) -> None:
    torch.save({"a": print}, tmp_path / "file.pt")
    with pytest.raises(RunError) as told:
        load_file(tmp_path / "file.pt")
    assert str(told.value).count("cannot be loaded") == 1
