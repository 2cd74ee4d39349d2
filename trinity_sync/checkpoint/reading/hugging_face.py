"""Hugging Face folders: safetensors files, one or several with an index; and the folder of a model's config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trinity_sync.checkpoint.reading.pieces import TensorInfo, WeightsError
from trinity_sync.models.indexed_file import INDEX, IndexedFile, index_of
from trinity_sync.weights import dtypes

WHOLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    info: TensorInfo

    def read(self) -> torch.Tensor:
        try:
            with safe_open(self.file, framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(self.name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.file}: {self.name} cannot be read: {error}") from error
        return tensor


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder has a model's weights as safetensors."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def open_hugging_face(folder: Path) -> dict[str, Stored]:
    """Open the tensors of a model, under the names they are stored by, of the files that transformers would load: one
    with the usual name goes before an index, and this before all others. Of a tensor that several files hold, the copy
    that the index names.

    Raises:
        WeightsError: a file is missing or damaged, or the index and the files contradict each other.
    """
    index = None
    if (folder / WHOLE).is_file():
        files = [folder / WHOLE]
    elif (index := _index(folder / INDEX)) is not None:
        files = sorted({folder / name for name in index.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, info in _infos(file).items():
            if name in tensors:
                raise WeightsError(f"{tensors[name].file} and {file} both hold {name}")
            tensors[name] = Stored(file, name, info)
    for name, file_name in (index or {}).items():
        if name not in tensors:
            raise WeightsError(f"{folder / INDEX} says that {name} is in {file_name}, but it is not")
    return tensors


def _index(path: Path) -> dict[str, str] | None:
    try:
        return index_of(path.parent)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _infos(file: Path) -> dict[str, TensorInfo]:
    try:
        with IndexedFile(file, framework="pt") as opened:
            infos = {}
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                piece = opened.get_slice(name)
                infos[name] = TensorInfo(piece.get_dtype(), tuple(piece.get_shape()))
    except FileNotFoundError:
        raise WeightsError(f"{file} is missing") from None
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is damaged or no safetensors file: {error}") from error
    unknown = {info.dtype for info in infos.values()} - set(dtypes.NAMES)
    if unknown:
        raise WeightsError(f"{file} holds tensors of dtype {sorted(unknown)[0]}, which are not read")
    return infos
