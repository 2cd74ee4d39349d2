"""Tensors that are copied beside the training thread, into host memory that is there already."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.weights.layout import aligned
from trinity_sync.weights.staging import pin_segment, unpin_segment

_CHUNK_BYTES = 64 << 20


class Copying:
    """Tensors to copy, and how far that is.

    CUDA tensors are copied on a side stream of their device, which sees what was enqueued on the current stream before
    this was made; the targets should be page-locked.

    Args:
        pairs: a source and its target on the host, contiguous and of the same shape and dtype. The sources must not
            change until `wait_until_copied` returns. Gone through by the thread that copies.
        devices: where the sources are.
        what: is copied, for errors, such as ``"the state of step 20"``.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        devices: Collection[torch.device],
        what: str,
    ) -> None:
        self._what = what
        self._pairs = pairs
        self._streams = {device: torch.cuda.Stream(device) for device in devices if device.type == "cuda"}
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        self._copied = threading.Event()
        self._error: Exception | None = None

    def copy(self, *, in_background: bool) -> None:
        """Begin, once. An error of the copy, or of its beginning, is left to `wait_whole`.

        Args:
            in_background: on a thread of its own; else all is copied when this returns.
        """
        if not in_background:
            self._copy()
            return
        try:
            threading.Thread(target=self._copy, name="snapshot", daemon=True).start()
        except RuntimeError as error:  # there can be no more threads
            self._error, self._pairs = error, ()
            self._copied.set()

    def wait_until_copied(self, timeout_s: float) -> float:
        """Wait until the sources may change; seconds waited. An error of the copy is left to `wait_whole`.

        Raises:
            WaitTimeout: the copy takes longer than `timeout_s`.
        """
        started = time.perf_counter()
        if not self._copied.wait(timeout_s):
            raise WaitTimeout("the snapshot", f"copy {self._what}", timeout_s)
        return time.perf_counter() - started

    def wait_whole(self, timeout_s: float) -> None:
        """Wait until the targets hold the copy.

        Raises:
            RunError: the copy failed.
            WaitTimeout: it takes longer than `timeout_s`.
        """
        self.wait_until_copied(timeout_s)
        if self._error is not None:
            raise RunError(f"{self._what} could not be copied: {self._error}") from self._error

    def _copy(self) -> None:
        held = []  # nobody else may keep a source, which is read until its stream has come so far
        try:
            with torch.no_grad():
                for source, target in self._pairs:
                    held.append(source)
                    with torch.cuda.stream(self._streams.get(source.device)):
                        self._copy_one(source.detach().reshape(-1), target.view(-1))
            for stream in self._streams.values():
                stream.synchronize()
        except Exception as error:
            self._error = error
        finally:
            self._pairs = ()
            held.clear()  # also where an error keeps this frame
            self._copied.set()

    def _copy_one(self, source: torch.Tensor, target: torch.Tensor) -> None:
        step = max(_CHUNK_BYTES // source.element_size(), 1)
        for start in range(0, source.numel(), step):
            target[start : start + step].copy_(source[start : start + step], non_blocking=source.is_cuda)


class HostMemory:
    """Memory for copies of the same tensors, save after save: page faults are paid for once. Page-locked where there
    are GPUs, as it is: torch's own pinned memory comes in powers of two, and is kept when it is let go.
    """

    def __init__(self) -> None:
        self._held: mmap.mmap | None = None

    def places(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A place for each tensor, of its shape and dtype and with a storage of its own bytes only. What was handed out
        before is used again.
        """
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + aligned(tensor.nbytes))
        if self._held is None or len(self._held) < starts[-1]:
            if self._held is not None:
                unpin_segment(self._held)
            self._held = None  # before the larger one is there
            self._held = mmap.mmap(-1, max(starts[-1], mmap.PAGESIZE))
            pin_segment(self._held)
        held = np.frombuffer(self._held, np.uint8)
        return [
            torch.from_numpy(held[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(tensors, starts[:-1], strict=True)
        ]
