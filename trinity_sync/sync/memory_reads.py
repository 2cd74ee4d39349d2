"""Reads of another node's memory with NIXL: over RDMA where the network has it, else over UCX's own TCP.

NIXL never gets the memory of a slot to write to: a read that was given up may still arrive. Pieces arrive in memory of
their own and are copied.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trinity_sync.errors import RunError

if TYPE_CHECKING:
    from nixl._api import nixl_agent
    from numpy.typing import NDArray

_SPINS = 100
"""Looks at a read without a sleep: with RDMA a piece takes about as long as one sleep."""
_SLEEP_S = 50e-6


class ReadError(RunError):
    """A read with NIXL did not end, or NIXL does not work here."""


class ReadPlace(NamedTuple):
    """Memory that other nodes can read."""

    agent: bytes  # NIXL's description of the process's agent and of the memory that it has registered
    address: int  # of the first byte


class MemoryReads:
    """This process's agent of NIXL. Any thread.

    Raises:
        ReadError: NIXL is not installed, or of a version with other functions.
    """

    def __init__(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            self._agent: nixl_agent = nixl_agent(secrets.token_hex(8), nixl_agent_config(backends=["UCX"]))
        except Exception as error:  # an import may fail in any way, and so may a library of another version
            raise ReadError(f"NIXL does not work here ({type(error).__name__}: {error})") from error
        self._lock = threading.Lock()
        # By address. It stays mapped until the process ends: UCX may be asked for it until then.
        self._registered: dict[int, NDArray[np.uint8]] = {}
        self._known: dict[bytes, str] = {}
        self._rooms: list[NDArray[np.uint8]] = []

    def place(self, memory: memoryview) -> ReadPlace:
        """Return where other nodes read this memory. ReadError: it cannot be registered."""
        data = np.frombuffer(memory, np.uint8)
        with self._lock:
            try:
                self._register(data)
                return ReadPlace(self._agent.get_agent_metadata(), data.ctypes.data)
            except Exception as error:
                raise ReadError(f"NIXL registers no memory here ({type(error).__name__}: {error})") from error

    def read(
        self, place: ReadPlace, start: int, into: memoryview, limit_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Read bytes of a place from `start` on. ReadError: they have not come within so many seconds, or not at all.

        `check` is called meanwhile; its error gives the read up.
        """
        with self._lock:
            fits = [number for number, room in enumerate(self._rooms) if len(room) >= len(into)]
            room = self._rooms.pop(fits[0]) if fits else None
        try:
            if room is None:
                room = np.empty(len(into), np.uint8)
                with self._lock:
                    self._register(room)
            self._read(place, start, room, len(into), limit_s, check)
        except RunError:
            raise
        except Exception as error:
            raise ReadError(f"NIXL does not read it ({type(error).__name__}: {error})") from error
        into[:] = room[: len(into)].data
        with self._lock:
            self._rooms.append(room)  # only now: what was given up may still be written to

    def _read(
        self,
        place: ReadPlace,
        start: int,
        room: NDArray[np.uint8],
        nbytes: int,
        limit_s: float,
        check: Callable[[], None],
    ) -> None:
        agent, until, looks = self._agent, time.monotonic() + limit_s, 0
        with self._lock:
            if place.agent not in self._known:
                self._known[place.agent] = agent.add_remote_agent(place.agent)
            here = agent.get_xfer_descs([(room.ctypes.data, nbytes, 0)], "DRAM")
            there = agent.get_xfer_descs([(place.address + start, nbytes, 0)], "DRAM")
            read = agent.initialize_xfer("READ", here, there, self._known[place.agent])
            state = agent.transfer(read)
        while state == "PROC":
            if time.monotonic() > until:
                raise ReadError(f"NIXL has not read {nbytes} bytes within {limit_s:g} s")
            check()
            looks += 1
            if looks > _SPINS:
                time.sleep(_SLEEP_S)
            with self._lock:
                state = agent.check_xfer_state(read)
        if state != "DONE":
            raise ReadError(f"NIXL's read of {nbytes} bytes ended as {state}")
        with self._lock:
            agent.release_xfer_handle(read)

    def _register(self, data: NDArray[np.uint8]) -> None:
        address = data.ctypes.data
        if address not in self._registered or len(self._registered[address]) < len(data):
            self._agent.register_memory([(address, len(data), 0, "")], "DRAM")
            self._registered[address] = data


_opening = threading.Lock()
_opened: MemoryReads | ReadError | None = None


def open_reads() -> MemoryReads:
    """Return this process's `MemoryReads`, made once, in seconds. ReadError: see there; the same one each time."""
    global _opened
    with _opening:
        if _opened is None:
            try:
                _opened = MemoryReads()
            except ReadError as error:
                _opened = error
    if isinstance(_opened, ReadError):
        raise _opened
    return _opened
