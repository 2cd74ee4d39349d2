"""Whether the weights of a model folder are there and whole, by the headers of its files: no tensor is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_sync.config.problems import Problem

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LENGTH_BYTES = 8
_EMBEDDING = "embed_tokens.weight"


class _DamagedError(Exception):
    """A file is not what its name says; the message says why."""


def weights_problems(folder: Path, fields: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with the weights of a folder in Hugging Face format.

    Args:
        folder: of the model.
        fields: of its config.json.
    """
    try:
        files = _files(folder)
        if files is None:
            yield Problem(
                "model.path",
                f"is {folder}, which has no weights: neither {_WHOLE} nor {_INDEX}; name a folder with both weights "
                "and config.json",
            )
            return
        shapes: dict[str, Sequence[int]] = {}
        for file in files:
            shapes |= _shapes(file)
    except _DamagedError as error:
        yield Problem("model.path", f"is {folder}, whose {error}")
        return
    yield from _vocabulary_problems(folder, fields, shapes)


def _files(folder: Path) -> list[Path] | None:
    """The safetensors files of a model; None: it has no weights; none where it has them in another format."""
    whole, index = folder / _WHOLE, folder / _INDEX
    if whole.is_file():  # it goes before an index, as at transformers
        return [whole]
    if not index.is_file():
        return [] if any((folder / name).is_file() for name in _OTHERS) else None
    try:
        body = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _DamagedError(f"{_INDEX} cannot be read: {error}") from error
    named = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise _DamagedError(f"{_INDEX} has no weight_map, an object that names the file of each tensor")
    files = sorted(set(named.values()))
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise _DamagedError(
            f"{_INDEX} names {missing[0]}, which is not there ({len(missing)} of {len(files)} files are missing); "
            "fetch the whole model"
        )
    return [folder / name for name in files]


def _shapes(file: Path) -> dict[str, Sequence[int]]:
    """The shapes of the tensors in a safetensors file."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if not 0 < length <= size - _LENGTH_BYTES:
                raise _DamagedError(f"{file.name} is no safetensors file, or was cut: it has {size} bytes")
            header = json.loads(opened.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        wanted = _LENGTH_BYTES + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if size != wanted:
            raise _DamagedError(f"{file.name} has {size} bytes, but by its header {wanted}; fetch it again")
        return {name: entry["shape"] for name, entry in tensors.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _DamagedError(f"{file.name} cannot be read: {type(error).__name__}: {error}") from error


def _vocabulary_problems(
    folder: Path, fields: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> Iterator[Problem]:
    """That config.json gives the vocabulary that the embedding has."""
    text = fields.get("text_config")
    said = (text if isinstance(text, Mapping) else fields).get("vocab_size")
    rows = {shape[0] for name, shape in shapes.items() if name.endswith(_EMBEDDING) and len(shape) == 2}
    if said is None or not rows or fields.get("quantization_config") is not None:
        return
    if said not in rows:
        yield Problem(
            "model.path",
            f"is {folder}, whose config.json has vocab_size {said!r}, but its embedding has {max(rows)} rows; correct "
            "config.json",
        )
