"""An explorer's load of a version: lease, check, apply, prove. The same for every sync mode.

From the first applied byte to the last check the explorer holds no version. Every bucket is checked before its bytes
are used, and with `sync.verify=full` the explorer computes the version digest of what it then holds and compares it
with the trainer's, so a label can never stand on other bytes than its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from trinity_sync.errors import RunError
from trinity_sync.process import peak_rss
from trinity_sync.protocol.versions import Version
from trinity_sync.sync.base import LoadReport, Transport
from trinity_sync.sync.layouts import LayoutCache
from trinity_sync.sync.synchronizer import Synchronizer
from trinity_sync.weights.apply import ChecksumError, MismatchError, Receiver
from trinity_sync.weights.tensors import state_digest

# A load that met damaged bytes is repeated once from the source; damage that stays is an error.
_TRIES = 2


class WeightLoader:
    """Holds the explorer's version and the tensors that it names.

    Args:
        name: the explorer's name.
        destinations: Hugging Face name -> live parameter, overwritten in place.
        synchronizer: the run's synchronizer.
        transport: the sync mode's explorer half.
        layouts: layouts that were seen before.
        verify: ``full``, ``bucket`` or ``off``.
        wire_dtype: dtype of floating parameters on the wire, as safetensors names it.
    """

    def __init__(
        self,
        name: str,
        destinations: Mapping[str, torch.Tensor],
        synchronizer: Synchronizer,
        transport: Transport,
        layouts: LayoutCache,
        verify: str,
        wire_dtype: str,
    ) -> None:
        self._name = name
        self._destinations = destinations
        self._receiver = Receiver(destinations)
        self._synchronizer = synchronizer
        self._transport = transport
        self._layouts = layouts
        self._checked: frozenset[str] = frozenset()
        self._verify = verify
        self._wire_dtype = wire_dtype
        self.held: Version | None = None

    def load(self, version: Version | None, ticket: Any = None) -> LoadReport:
        """Take a committed version (the newest for None).

        Raises:
            RunError: it is gone, its bytes are damaged or were replaced meanwhile, or what was loaded is not what the
                trainer published.
        """
        started = time.perf_counter()
        lease = self._synchronizer.call("lease", self._name, version)
        try:
            self._check(lease)
            paused = time.perf_counter()
            moved, digest = self._take(lease, ticket)
        finally:
            in_time = self._synchronizer.call("release", lease.id)
        if not in_time and (digest is None or lease.digest is None):
            raise RunError(
                f"{self._name} lost its lease on version {lease.version} while it loaded, so other bytes may have "
                f"taken the place of that version's; raise sync.lease_s"
            )
        self.held = lease.version
        ended = time.perf_counter()
        return LoadReport(
            explorer=self._name,
            version=lease.version,
            digest=digest,
            bytes_moved=moved,
            total_s=ended - started,
            paused_s=ended - paused,
            peak_rss=peak_rss(),
        )

    def _take(self, lease: Any, ticket: Any) -> tuple[int, str | None]:
        self.held = None
        tries = 1 if ticket is not None else _TRIES
        for attempt in range(1, tries + 1):
            try:
                moved = self._apply(lease, ticket)
                break
            except ChecksumError as error:
                if attempt == tries:
                    raise RunError(f"{self._name} cannot load version {lease.version}: {error}") from error
        digest = None
        if self._verify == "full":
            digest = state_digest(self._destinations, self._wire_dtype)
            if lease.digest is not None and digest != lease.digest:
                raise RunError(
                    f"{self._name} loaded version {lease.version} but holds {digest}; "
                    f"the trainer published {lease.digest}"
                )
        return moved, digest

    def _check(self, lease: Any) -> None:
        """Names and shapes must fit before the first byte is applied. Done once per set of layouts."""
        digests = frozenset(info.layout for info in lease.parts.values())
        if digests == self._checked:
            return
        try:
            self._receiver.check([self._layouts.get(info) for info in lease.parts.values()])
        except MismatchError as error:
            raise RunError(f"{self._name} cannot load version {lease.version}: {error}") from error
        self._checked = digests

    def _apply(self, lease: Any, ticket: Any) -> int:
        moved = 0
        for layout, buffer, buckets in self._transport.parts(lease, ticket):
            self._receiver.apply(layout, buffer, buckets if self._verify != "off" else None)
            moved += layout.nbytes
        return moved
