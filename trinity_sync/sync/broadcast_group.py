"""Process groups beside torch's default one, for broadcasts of rank 0: of the rounds of `sync=nccl`, of verl's weight
sync, and of programs that broadcast by `sync.stream`. Every operation has a timeout.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol, cast

from trinity_sync.errors import WaitLimit, limit_text

if TYPE_CHECKING:
    import torch
    from torch.distributed import BroadcastOptions, Store, TCPStore
    from torch.distributed.distributed_c10d import Work


_WATCHDOG_S = 60.0
"""NCCL's watchdog ends the whole process at its own timeout, so the error of a wait has to come before that."""

Wait = Callable[[], None]
"""Waits until a broadcast has ended; RuntimeError of torch's: it failed, or did not end in time."""


class TorchGroup(Protocol):
    """torch's process groups; their stubs leave out `broadcast`."""

    def name(self) -> str: ...

    def barrier(self) -> Work: ...

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


def make_group(store: Store, rank: int, size: int, transport: str, timeout_s: float) -> TorchGroup:
    """Enter a group of ``gloo`` or ``nccl``. NCCL's members meet in the first broadcast. With gloo it returns once all
    members have connected to each other: a member that left earlier would break the connections of the others. Gloo
    does not use the store afterwards.

    Args:
        timeout_s: timeout of each operation, seconds.

    Raises:
        RuntimeError: a member is gone, or does not enter in time.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    if transport == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout + timedelta(seconds=_WATCHDOG_S)
        return cast(TorchGroup, dist.ProcessGroupNCCL(store, rank, size, options))
    group = cast(TorchGroup, dist.ProcessGroupGloo(store, rank, size, timeout))
    try:
        group.barrier().wait()
    except RuntimeError:
        del group  # the error's traceback would keep its connections open, for which other members wait
        raise
    return group


def enter(store: Store, rank: int, size: int, transport: str, timeout_s: float) -> BroadcastGroup:
    """Enter a group for broadcasts of rank 0; see `make_group`."""
    with limited(timeout_s):
        group = make_group(store, rank, size, transport, timeout_s)
    return BroadcastGroup(group, device_of(transport), timeout_s)


@contextlib.contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Name the settings of the limit in torch's error about its end."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(limit_s, WaitLimit) and re.search(r"time(d |-)?\s?out", str(error), re.IGNORECASE):
            raise RuntimeError(f"{error}: not within {limit_text(limit_s)}") from error
        raise


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """Serve a store, at which the members of a group meet, at an address of this node; RuntimeError: it is not one.

    Args:
        timeout_s: timeout of each wait for a key, seconds.
    """
    from torch.distributed import TCPStore

    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def device_of(transport: str) -> torch.device:
    """Return the device whose memory a transport reaches: the CPU, or the current GPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if transport == "nccl" else torch.device("cpu")


class BroadcastGroup:
    """Broadcasts of rank 0 of a process group to all other members, each with a timeout. Errors are torch's own
    RuntimeErrors: in a round the driver looks for the member that caused them (`actors.calls.results`).

    Args:
        group: the group.
        device: where the tensors are: a GPU for NCCL, the CPU for gloo.
        timeout_s: timeout of each broadcast, seconds.
    """

    def __init__(self, group: TorchGroup, device: torch.device, timeout_s: float) -> None:
        self.device = device
        self.timeout_s = timeout_s
        # A list, for `close` to empty: the traceback of an error may refer to this object for long.
        self._groups = [group]
        self._has_met = False

    def begin(self, tensor: torch.Tensor) -> Wait:
        """Begin to send a tensor of the group's device, on rank 0, or to receive into it; return the function that
        waits for its end. Its memory is in use until then.

        Raises:
            RuntimeError: it cannot be sent, or a member did not come to the group's first broadcast.
        """
        return partial(self._wait, self._begin(tensor) if self._has_met else self._meet(tensor))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor, on rank 0, or receive into it; errors as of `begin`."""
        self.begin(tensor)()

    def abort(self) -> None:
        """Break off the broadcasts in flight: NCCL's, for gloo's end with their connections."""
        if self.device.type == "cuda" and self._groups:
            with contextlib.suppress(RuntimeError):
                self._groups[0].abort()

    def close(self, *, failed: bool = False) -> None:
        """Leave the group; `failed`: after an `abort`. May be called again.

        gloo takes 20 ms to close its connections (two turns of its loop), so a thread does it. NCCL would break off
        what is in flight without a shutdown before.
        """
        if failed:
            self.abort()
        if self.device.type == "cpu":
            threading.Thread(target=self._groups.clear, name="close group", daemon=True).start()
            return
        for group in self._groups:
            with contextlib.suppress(RuntimeError):
                group.shutdown()
        self._groups.clear()

    def _begin(self, tensor: torch.Tensor) -> Work:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=self.timeout_s)
        return self._groups[0].broadcast([tensor], options)

    def _meet(self, tensor: torch.Tensor) -> Work:
        """Begin the first broadcast. NCCL's members meet in it, without a timeout, so a thread begins it."""
        import torch

        # A new thread would use the first GPU, and not wait for the work of this thread's stream.
        stream = torch.cuda.current_stream(self.device) if torch.cuda.is_initialized() else None
        answer: SimpleQueue[Work | Exception] = SimpleQueue()

        def begin() -> None:
            try:
                with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                    answer.put(self._begin(tensor))
            except Exception as error:
                answer.put(error)

        threading.Thread(target=begin, name="meet in a group", daemon=True).start()
        try:
            work = answer.get(timeout=self.timeout_s)
        except Empty:
            raise RuntimeError(f"its members did not meet within {limit_text(self.timeout_s)}") from None
        if isinstance(work, Exception):
            raise work
        self._has_met = True
        return work

    def _wait(self, work: Work) -> None:
        with limited(self.timeout_s):
            if self.device.type == "cuda":
                # Without a timeout NCCL's would only make the device's stream wait.
                work.wait(timedelta(seconds=self.timeout_s))
            else:
                # gloo keeps the group's timeout, and closes its connections when a wait with another one ends.
                work.wait()
