"""Versions for a vLLM server without our plug-in: each is written to a safetensors file in shared memory, which the
server reloads and which is deleted then. The file is mapped as tensors, so versions are checked as in any other load.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from trinity_sync.actors.explorer_client import EngineDied
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.checkpoint.export import by_width, header, nbytes
from trinity_sync.checkpoint.reading import TensorInfo
from trinity_sync.errors import RunError
from trinity_sync.integrations.vllm.arrivals import Shapes
from trinity_sync.integrations.vllm.server import HttpControl
from trinity_sync.protocol.versions import Lease
from trinity_sync.sync.base import ExplorerSide, SyncMode
from trinity_sync.sync.weight_loader import InPlace, LoadResult, lost_lease
from trinity_sync.weights.slots import DEFAULT_ROOT, SlotArena, remove_stale
from trinity_sync.weights.tensors import byte_tensor, to_torch

_FILE = "model.safetensors"


class FileTarget:
    """A server as a `WeightTarget` that takes versions from files.

    After an error in the reload the server stays paused. vLLM may not recover from one, and has to be restarted then.

    Args:
        control: of the server, which is on this node and runs as the same user.
        tensors: the tensors of a version, with their dtypes in the file.
        verify: `sync.verify`; with ``full`` the digest is that of the file's tensors.
    """

    def __init__(
        self, control: HttpControl, *, tensors: Shapes, mode: SyncMode, side: ExplorerSide, verify: str
    ) -> None:
        infos = {name: TensorInfo(*described) for name, described in tensors.items()}
        self._infos = {name: infos[name] for name in by_width(infos)}
        self._control = control
        self._side = side
        self._transport = mode.transport(side)
        self._verify = verify
        self._expected = self._into(
            {
                name: torch.empty(info.shape, dtype=to_torch(info.dtype), device="meta")
                for name, info in self._infos.items()
            }
        )
        self._broken = False  # the server's weights are of several versions
        for root in (DEFAULT_ROOT, _elsewhere()):
            remove_stale(root)  # of killed explorers

    def check(self, lease: Lease) -> None:
        """Check names and shapes. Done once per set of layouts."""
        self._expected.check(lease)

    def take(self, lease: Lease, broadcast: Broadcast | None, give_up: Callable[[], None]) -> LoadResult:
        """Write a version to a file while the server generates, then have the server read it."""
        with self._file() as (folder, tensors):
            target = self._into(tensors)
            target.check(lease)
            taken = target.take(lease, broadcast, lambda: None)
            self._pause()
            give_up()
            self._broken = True
            try:
                self._control.reload(folder, str(lease.version))
            except EngineDied:
                raise
            except RunError as error:
                raise RunError(f"{error}; it stays paused until a version gets in whole, or it is started again") from (
                    error
                )
            if not (taken.proves(lease) or self._side.still_leased(lease.id)):
                raise lost_lease(self._side.name, lease)
            self._broken = False
        self._control.resume()
        return taken

    def _pause(self) -> None:
        try:
            self._control.pause("wait")
        except RunError:
            if not self._broken:
                with suppress(RunError):
                    self._control.resume()
            raise

    def _into(self, tensors: Mapping[str, torch.Tensor]) -> InPlace:
        return InPlace(tensors, self._transport, self._side.layouts, self._verify)

    @contextmanager
    def _file(self) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
        """Yield a folder with a safetensors file, and the tensors in the file."""
        begin = header(self._infos)
        size = len(begin) + sum(nbytes(info) for info in self._infos.values())
        key = f"server-{os.getpid()}-{secrets.token_hex(8)}"
        with SlotArena.create(key, 1, {_FILE: size}, fallback=_elsewhere()) as arena:
            mapped = arena.map(0, _FILE)
            mapped[: len(begin)] = begin
            data = byte_tensor(memoryview(mapped))[len(begin) :]
            parts = data.split([nbytes(info) for info in self._infos.values()])
            tensors = {
                name: part.view(to_torch(info.dtype)).view(info.shape)
                for (name, info), part in zip(self._infos.items(), parts, strict=True)
            }
            yield arena.path(0, _FILE).parent, tensors


def _elsewhere() -> Path:
    """Return the folder of the file if shared memory has no room for it."""
    return Path(tempfile.gettempdir())
