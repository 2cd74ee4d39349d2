"""The sending of a version: tensors packed into buckets, each of which goes out with its digest."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from xxhash import xxh3_128_digest

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.integrations.verl.weight_sync.link import End
from trinity_sync.integrations.verl.weight_sync.transfers import BucketSender
from trinity_sync.weights import shards
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.packing import pack_shards, unpack
from trinity_sync.weights.shards import Rect, Shard, flat_range
from trinity_sync.weights.tensors import digest_entry, from_torch, wire_name


@dataclass(frozen=True)
class Sent:
    """What was sent.

    Attributes:
        nbytes: that travelled to each receiver.
        tensors, buckets: how many.
        digest: of the version; None: not computed here.
        gather_s: of it waiting for the trainer's tensors, seconds.
    """

    nbytes: int
    tensors: int
    buckets: int
    digest: str | None
    gather_s: float


def send(
    shards: Iterable[tuple[Shard, torch.Tensor]],
    sender: BucketSender,
    *,
    bucket_bytes: int,
    step: int | None,
    whole: bool,
) -> Sent:
    """Send what there is.

    Args:
        shards: as of `pack_shards`.
        sender: this member's half of the mode.
        bucket_bytes: length of a bucket.
        step: the trainer's, for receivers.
        whole: compute the version's digest; all shards are of whole tensors then.

    Raises:
        RunError: as of the mode; or there is nothing to send.
        WaitTimeout: as of the mode, or of what yields the tensors.
    """
    asked = _TimedIterator(shards)
    entries: list[tuple[str, str, tuple[int, ...], bytes]] = []
    nbytes = buckets = tensors = 0
    for number, (layout, data) in enumerate(pack_shards(asked, sender.room, bucket_bytes=bucket_bytes)):
        here = data.cpu()
        sender.put(number, layout, data, xxh3_128_digest(here.numpy().data))
        if whole:  # while it travels
            entries += [digest_entry(name, tensor, None) for name, tensor in unpack(layout, here)]
        nbytes, buckets, tensors = nbytes + layout.nbytes, number + 1, tensors + len(layout.entries)
    if not tensors:
        raise RunError("the engine has no weights to send")
    digest = version_digest(entries) if whole else None
    sender.end(End(step, buckets, tensors, digest))
    return Sent(nbytes, tensors, buckets, digest, asked.seconds)


def travelling(name: str, tensor: torch.Tensor, wire_dtype: str | None) -> str:
    """The dtype in which a tensor of the trainer's travels.

    Args:
        name: the tensor's.
        tensor: what is held of it.
        wire_dtype: that of floating tensors; None: as they are.

    Raises:
        RunError: it is not to travel at all.
    """
    if ".base_layer." in name:
        raise RunError(
            f"{name} is of a model with LoRA adapters that are not merged, and receivers would have the frozen weights "
            "for ever: set verl's model.lora.merge=true, and backend=trinity"
        )
    try:
        return wire_name(from_torch(tensor.dtype), wire_dtype)
    except ValueError as error:
        raise RunError(f"{name} cannot be sent: {error}") from error


class _TimedIterator(Iterator[tuple[Shard, torch.Tensor]]):
    """Counts the seconds of waiting for the next one."""

    def __init__(self, items: Iterable[tuple[Shard, torch.Tensor]]) -> None:
        self._items = iter(items)
        self.seconds = 0.0

    def __next__(self) -> tuple[Shard, torch.Tensor]:
        started = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += time.perf_counter() - started


# The trainer's tensors, of which each is gathered from all its ranks, with a limit to each wait for them.


T = TypeVar("T")

_GRACE_S = 1.0
"""By then a thread has ended that has nothing left to do."""


class Gathering(Generic[T]):
    """What an engine of verl's yields, one by one. No item is asked for before the one before was used.

    All ranks go through all of it, or their peers would wait for them: `finish` does so after an error.

    Args:
        items: the engine's generator.
        what: is gathered, for errors, such as ``"version 7"``.
        timeout_s: limit of the wait for each item, seconds.
    """

    def __init__(self, items: Iterable[T], what: str, timeout_s: float) -> None:
        self._items = iter(items)
        self._what = what
        self._timeout_s = timeout_s
        self._count = 0
        self._over = False
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[tuple[T] | Exception | None] = SimpleQueue()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._gather, args=(device,), name="gather weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is gathered any more.

        Raises:
            RunError: a wait for an item was given up, and it has still not come.
            WaitTimeout: there is still more to come.
        """
        self._thread.join(_GRACE_S if self._over else self._timeout_s)
        if self._thread.is_alive() and self._over:
            raise RunError(f"a gather of {self._what} still hangs in the trainer; restart its ranks")
        if self._thread.is_alive():
            raise WaitTimeout("the trainer's ranks", f"end the gathers of {self._what}", self._timeout_s)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next item.

        Raises:
            RunError: the engine failed, as where another rank is gone.
            WaitTimeout: it did not come.
        """
        if self._over:
            raise StopIteration
        self._asked.put(True)
        try:
            answer = self._answers.get(timeout=self._timeout_s)
        except Empty:
            self._over = True
            raise WaitTimeout(
                "the trainer's ranks", f"gather tensor {self._count} of {self._what}", self._timeout_s
            ) from None
        if isinstance(answer, tuple):
            self._count += 1
            return answer[0]
        self._over = True
        self._thread.join()  # it has nothing left to do
        if answer is None:
            raise StopIteration
        raise RunError(
            f"tensor {self._count} of {self._what} could not be gathered from the trainer's ranks, of which one may be "
            f"gone: {type(answer).__name__}: {answer}"
        ) from answer

    def finish(self) -> None:
        """Go through what is left."""
        for _ in self:
            pass

    def close(self) -> None:
        """Ask for nothing more, so that the thread ends."""
        self._over = True
        self._asked.put(False)

    def _gather(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.no_grad():
            while self._asked.get():
                answer = self._next()
                self._answers.put(answer)
                if not isinstance(answer, tuple):
                    return
                del answer  # the caller alone holds it

    def _next(self) -> tuple[T] | Exception | None:
        try:
            return (next(self._items),)
        except StopIteration:
            return None
        except Exception as error:
            return error


# What a trainer rank holds of each tensor, as verl's engines hand it out without a gather.


Exported = tuple[str, torch.Tensor, Any]
"""Name, this rank's elements (flat), and verl's `ShardSpec`."""


def own_shards(
    exported: Iterable[Exported], wire_dtype: str | None, family: str
) -> Iterator[tuple[Shard, torch.Tensor]]:
    """Yield the shard of each tensor, and its elements. All ranks yield all tensors, in one order.

    Args:
        exported: what verl's ``get_per_tensor_param_shard`` yields.
        wire_dtype: the dtype of floating tensors on their way; None: as they are.
        family: transformers' ``model_type``.

    Raises:
        RunError: the engine would have to convert what it holds to the names and shapes of Hugging Face, or does not
            hold what it says.
    """
    for name, elements, spec in exported:
        shape = tuple(int(size) for size in spec.full_shape)
        if spec.place is not None or spec.to_hf_chunk is not None or spec.hf_slots is not None:
            _refuse(name)  # the first is of engines whose names and shapes are their own, such as Megatron
        if not _is_saved_so(name, shape, family):
            _refuse(name)
        yield _own(name, shape, elements, spec, wire_dtype)


def _refuse(name: str) -> None:
    raise RunError(
        f"the engine holds {name} in another form than Hugging Face's, and it is put right only where it is gathered: "
        "use backend=trinity for this model"
    )


def _is_saved_so(name: str, shape: tuple[int, ...], family: str) -> bool:
    """Whether verl's gather hands the tensor on as it is: fused experts it takes apart."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    return [one for one, _ in unfuse_moe_params([(name, torch.empty(shape, device="meta"))], family)] == [name]


def _own(
    name: str, shape: tuple[int, ...], elements: torch.Tensor, spec: Any, wire_dtype: str | None
) -> tuple[Shard, torch.Tensor]:
    from verl.workers.engine.spec import BlockPlacement, derive_dtensor_placement

    place, contributes, _ = derive_dtensor_placement(spec)
    dtype = travelling(name, elements, wire_dtype)
    if not contributes or not elements.numel():
        return Shard(name, dtype, shape, ()), elements[:0]
    if not isinstance(place, BlockPlacement):
        shard = flat_range(name, dtype, shape, 0, prod(shape))
    elif place.is_flat_contiguous:
        shard = flat_range(name, dtype, shape, place.flat_offset, place.flat_offset + prod(place.local_shape))
    else:
        rects = _block(shape, place.local_shape, place.global_offset, shards.itemsize(dtype))
        shard = Shard(name, dtype, shape, tuple(rects))
    if shard.numel_local != elements.numel():
        raise RunError(f"the engine holds {elements.numel()} elements of {name}, and says {shard.numel_local}")
    return shard, elements


def _block(shape: Sequence[int], sizes: Sequence[int], starts: Sequence[int], itemsize: int) -> Iterator[Rect]:
    """The rectangles of the matrix view that a block of a tensor is, in the order of its elements.

    Args:
        shape: of the tensor, at least two dimensions, of which one behind the first is cut.
        sizes, starts: of the block, for each dimension.
        itemsize: bytes of an element.
    """
    last = max(dim for dim, size in enumerate(sizes) if size != shape[dim])
    within = prod(shape[last + 1 :])  # what lies behind the last cut is whole, so it lies together
    width = sizes[last] * within
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = sum(start * stride for start, stride in zip(starts[1:], strides[1:], strict=True))
    if last == 1:
        yield Rect(0, starts[0], offset, sizes[0], width)
        return
    at = 0
    for row, *index in itertools.product(*map(range, sizes[:last])):
        col = offset + sum(one * stride for one, stride in zip(index, strides[1:last], strict=True))
        yield Rect(at, starts[0] + row, col, 1, width)
        at += width * itemsize
