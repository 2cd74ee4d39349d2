"""Loads checkpoints through libraries that would run the pickles in a file, without running them.

torch.distributed.checkpoint, megatron-core and verl unpickle parts of a checkpoint with all that Python can name.
`nothing_runs` restricts every unpickling of them to an allow-list.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata

from trinity_sync.errors import RunError
from trinity_sync.weights.tensors import loading_fault

StateDict: TypeAlias = dict[str, Any]
"""The state of an object of torch, which alone knows its types."""

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_LOADING = threading.RLock()
"""The switches are global for the process."""

# The types of numpy's RNG state, under the names of numpy 1 and 2; torch's own list has the rest. They stay on the
# list: megatron-core adds them too, so a removal would affect it.
_RECONSTRUCT = cast("Callable[..., object]", np.ndarray(0).__reduce__()[0])
_NUMPY: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    *((_RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
]
torch.serialization.add_safe_globals(_NUMPY)

_METADATA: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    ),
    # the ranks' plans, which megatron-core keeps for later saves
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}


@contextmanager
def nothing_runs(folder: str | Path) -> Iterator[None]:
    """Make ``torch.load`` weights-only during the block, and restrict metadata of torch.distributed.checkpoint to
    torch's own classes.
    """
    with _LOADING:
        before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
        os.environ[_FORCE] = "1"
        read_metadata = FileSystemReader.read_metadata
        FileSystemReader.read_metadata = _checked(read_metadata)  # type: ignore[method-assign]
        try:
            yield
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise RunError(f"{folder} cannot be loaded: {type(first).__name__}: {loading_fault(first)}") from error
        except pickle.UnpicklingError as error:
            raise RunError(f"{folder} cannot be loaded: {loading_fault(error)}") from error
        finally:
            FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign]
            del os.environ[_FORCE]
            os.environ.update({name: value for name, value in before.items() if value is not None})


def load_file(path: Path, *, mmap: bool = False) -> StateDict:
    """Load a rank's file of ``torch.save`` onto the CPU, without running its pickle; `mmap`: read tensors on use."""
    if not path.exists():
        raise RunError(f"{path} is missing: the checkpoint was saved by another number of ranks, or is incomplete")
    with nothing_runs(path):
        try:
            found: StateDict = torch.load(path, weights_only=True, map_location="cpu", mmap=mmap)
        except (OSError, RuntimeError, EOFError) as error:
            raise RunError(f"{path} cannot be loaded: {loading_fault(error)}") from error
    return found


def _checked(read_metadata: Callable[..., Metadata]) -> Callable[..., Metadata]:
    def checked(self: FileSystemReader, *args: object, **kwargs: object) -> Metadata:
        rank = kwargs.get("rank")
        path = Path(self.path) / (".metadata" if rank is None else f"__{rank}.metadata")
        try:
            with path.open("rb") as file:
                _StateUnpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error
        return read_metadata(self, *args, **kwargs)

    return checked


class _StateUnpickler(pickle.Unpickler):
    """Allows the classes of torch's checkpoint metadata, and the few plain ones in it."""

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's metadata")
        found: Callable[..., object] = super().find_class(module, name)
        return found
