"""Of a tensor that several files of a model folder hold, the copy that the index names. transformers takes the last."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import safe_open

INDEX = "model.safetensors.index.json"


class IndexedFile:
    """A safetensors file without the tensors that the index next to it finds in another file; read as `safe_open`'s.

    Args:
        path: the file.
        settings: as for `safe_open`.
    """

    def __init__(self, path: str | os.PathLike[str], *settings: Any, **named: Any) -> None:
        self._opened = safe_open(path, *settings, **named)
        self._name = Path(path).name
        self._files = index_of(Path(path).parent) or {}
        # a file that the index does not know is not read by it
        self._by_index = self._name in self._files.values()

    def __enter__(self) -> IndexedFile:
        self._opened.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def keys(self) -> list[str]:
        """Return the names of the file's tensors, but for stray copies."""
        names: list[str] = list(self._opened.keys())
        return [name for name in names if not self._by_index or self._files.get(name, self._name) == self._name]


def index_of(folder: Path) -> dict[str, str] | None:
    """Read which file of a folder has each tensor; None: there is no index.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    path = folder / INDEX
    try:
        changed = path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
    return _read(path, changed)


def follow_indexes() -> None:
    """Have transformers, in this process, load the copies that indexes name."""
    from transformers import modeling_utils

    modeling_utils.safe_open = IndexedFile


@lru_cache(maxsize=2)
def _read(path: Path, changed: int) -> dict[str, str]:
    named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    if not isinstance(named, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in named.values()
    ):
        raise ValueError("it has no weight_map from names of tensors to names of files next to it")
    return named
