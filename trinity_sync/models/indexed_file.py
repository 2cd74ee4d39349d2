"""Reads the copy of a tensor that the index names, if several files of a model folder have one. transformers takes the
last.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import safe_open

INDEX = "model.safetensors.index.json"


class IndexedFile:
    """A safetensors file without the tensors that the index next to it finds in another file; used as `safe_open`."""

    def __init__(self, path: str | os.PathLike[str], framework: str, **settings: str) -> None:
        self._opened = safe_open(path, framework, **settings)
        self._name = Path(path).name
        try:
            files = index_of(Path(path).parent) or {}
        except (OSError, ValueError):  # a damaged leftover: the index of the loaded model was already read
            files = {}
        # a file that is not in the index is loaded by its own name
        self._files = files if self._name in files.values() else {}

    def __enter__(self) -> IndexedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def keys(self) -> list[str]:
        names = self._opened.keys()
        return [name for name in names if self._files.get(name, self._name) == self._name]


def index_of(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor by the folder's index; None: there is no index. Raises OSError, ValueError: it
    cannot be read.
    """
    try:
        found = (folder / INDEX).stat()
    except FileNotFoundError:
        return None
    return _read(folder / INDEX, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=2)  # each of a hundred files needs an index of megabytes
def _read(path: Path, changed_ns: int, size: int) -> dict[str, str]:
    body = json.loads(path.read_text(encoding="utf-8"))
    named = body.get("weight_map") if isinstance(body, dict) else None
    if not (isinstance(named, dict) and all(isinstance(at, str) and "/" not in at for at in named.values())):
        raise ValueError("it has no weight_map from names of tensors to names of files next to it")
    return named


def follow_indexes() -> None:
    """Have transformers, in this process, load the copies that indexes name."""
    from transformers import modeling_utils

    modeling_utils.safe_open = IndexedFile
