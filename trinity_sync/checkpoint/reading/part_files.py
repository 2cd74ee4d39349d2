"""Weights-only checkpoints of this program: ``weights_rank-*.safetensors``, each with its layout in the header."""

from __future__ import annotations

from pathlib import Path

import torch

from trinity_sync.checkpoint.reading.pieces import Assembled, Piece, TensorInfo, WeightsError, assembled
from trinity_sync.weights.shard_file import ShardFileError, open_shard_file
from trinity_sync.weights.shards import Rect, matrix_view
from trinity_sync.weights.tensors import byte_tensor, to_torch


def part_files(folder: Path) -> list[Path]:
    """List the files of the parts in a folder, by name; empty where it has none."""
    return sorted(folder.glob("weights_*.safetensors"))


def open_parts(files: list[Path]) -> dict[str, Assembled]:
    """Open the tensors that the parts together make up, under their Hugging Face names.

    Raises:
        WeightsError: a file is damaged, or the parts contradict each other or leave something out.
    """
    infos: dict[str, tuple[TensorInfo, Path]] = {}
    pieces: dict[str, list[Piece]] = {}
    for file in files:
        try:
            layout, data = open_shard_file(file)
        except ShardFileError as error:
            raise WeightsError(str(error)) from error
        for shard, offset in layout.entries:
            info = TensorInfo(shard.dtype, shard.shape)
            known, first = infos.setdefault(shard.name, (info, file))
            if known != info:
                raise WeightsError(f"{shard.name} is {known} in {first}, but {info} in {file}")
            local = data[offset : offset + shard.nbytes]
            pieces.setdefault(shard.name, []).extend(_piece(file, info, rect, local) for rect in shard.rects)
    return {
        name: assembled(name, info, pieces[name], grid=matrix_view(info.shape)) for name, (info, _) in infos.items()
    }


def _piece(file: Path, info: TensorInfo, rect: Rect, local: memoryview) -> Piece:
    dtype = to_torch(info.dtype)

    def load() -> torch.Tensor:
        nbytes = rect.rows * rect.cols * dtype.itemsize
        return byte_tensor(local[rect.offset : rect.offset + nbytes]).view(dtype)

    return Piece(file, (rect.row, rect.col), (rect.rows, rect.cols), load)
