"""The tensors that a trainer rank sends: gathered from all ranks one by one (`TimedItems`), or its own shards of each
(`own_shards`), as verl's engines hand them out without a gather.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.weights import shards
from trinity_sync.weights.shards import Rect, Shard, flat_range
from trinity_sync.weights.tensors import from_torch, wire_name

if TYPE_CHECKING:
    from verl.workers.engine.spec import ShardSpec

T = TypeVar("T", covariant=True)

_GRACE_S = 1.0
"""Timeout for the end of a thread that has nothing left to do."""


class TimedItems(Generic[T]):
    """The items of a generator of verl's engine, each asked for after the one before was used, with a timeout.

    Each item is a collective call, so all ranks have to go through all items: `finish` does so after an error.

    Args:
        items: the engine's generator; a thread of this object runs it.
        what: names the items in errors, such as ``"version 7"``.
        timeout_s: timeout of the wait for each item, seconds.

    Attributes:
        seconds: spent in waiting for items.
    """

    def __init__(self, items: Iterable[T], what: str, timeout_s: float) -> None:
        self._items = iter(items)
        self._what = what
        self._timeout_s = timeout_s
        self._count = 0
        self.seconds = 0.0
        self._over = False
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[tuple[T] | Exception | None] = SimpleQueue()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._gather, args=(device,), name="gather weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end of the generator; RunError: an item that timed out before is still missing."""
        self._thread.join(_GRACE_S if self._over else self._timeout_s)
        if self._thread.is_alive() and self._over:
            raise RunError(f"a gather of {self._what} still hangs in the trainer; restart its ranks")
        if self._thread.is_alive():
            raise WaitTimeout("the trainer's ranks", f"end the gathers of {self._what}", self._timeout_s)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._over:
            raise StopIteration
        started = time.perf_counter()
        self._asked.put(True)
        try:
            answer = self._answers.get(timeout=self._timeout_s)
        except Empty:
            self._over = True
            raise WaitTimeout(
                "the trainer's ranks", f"gather tensor {self._count} of {self._what}", self._timeout_s
            ) from None
        self.seconds += time.perf_counter() - started
        if isinstance(answer, tuple):
            self._count += 1
            return answer[0]
        self._over = True
        self._thread.join()
        if answer is None:
            raise StopIteration
        raise RunError(
            f"tensor {self._count} of {self._what} could not be gathered from the trainer's ranks; one of them may "
            f"have died: {type(answer).__name__}: {answer}"
        ) from answer

    def finish(self) -> None:
        """Go through the items that are left."""
        for _ in self:
            pass

    def close(self) -> None:
        """End the thread, after the item that it is asked for."""
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
                del answer  # only the caller refers to it

    def _next(self) -> tuple[T] | Exception | None:
        try:
            return (next(self._items),)
        except StopIteration:
            return None
        except Exception as error:
            return error


Exported = tuple[str, torch.Tensor, "ShardSpec"]
"""Name, this rank's elements (flat), and verl's `ShardSpec`."""


def own_shards(
    exported: Iterable[Exported], wire_dtype: str | None, family: str
) -> Iterator[tuple[Shard, torch.Tensor]]:
    """Yield this rank's shard of each tensor, and its elements (flat). All ranks yield all tensors, in one order.
    `exported`: from verl's ``get_per_tensor_param_shard``. `wire_dtype`: the dtype of floating tensors on the wire;
    None: as they are. `family`: transformers' ``model_type``.
    """
    for name, elements, spec in exported:
        shape = tuple(int(size) for size in spec.full_shape)
        if spec.place is not None or spec.to_hf_chunk is not None or spec.hf_slots is not None:
            _refuse(name)  # `place` is set by engines with names and shapes of their own, such as Megatron
        if not _is_saved_so(name, shape, family):
            _refuse(name)
        yield _own(name, shape, elements, spec, wire_dtype)


def _refuse(name: str) -> None:
    raise RunError(
        f"the engine holds {name} in another form than Hugging Face's, and only a gather converts it: "
        "use backend=trinity for this model"
    )


def _is_saved_so(name: str, shape: tuple[int, ...], family: str) -> bool:
    """Return whether verl's gather hands out the tensor unchanged; it splits fused experts."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    return [one for one, _ in unfuse_moe_params([(name, torch.empty(shape, device="meta"))], family)] == [name]


def _own(
    name: str, shape: tuple[int, ...], elements: torch.Tensor, spec: ShardSpec, wire_dtype: str | None
) -> tuple[Shard, torch.Tensor]:
    from verl.workers.engine.spec import BlockPlacement, derive_dtensor_placement

    place, contributes, _ = derive_dtensor_placement(spec)
    dtype = travel_dtype(name, elements, wire_dtype)
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
    """Yield the rectangles of a block in the tensor's matrix view, in the order of the block's elements. `shape`: of
    the tensor: two dimensions or more; one after the first is cut. `sizes`, `starts`: of the block, in elements, for
    each dimension. `itemsize`: bytes of an element.
    """
    last = max(dim for dim, size in enumerate(sizes) if size != shape[dim])
    within = prod(shape[last + 1 :])  # the dimensions after the last cut are whole, so they are contiguous
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


def travel_dtype(name: str, tensor: torch.Tensor, wire_dtype: str | None) -> str:
    """Return the dtype in which a tensor travels; RunError: it must not be sent, or its dtype is unknown."""
    if ".base_layer." in name:
        raise RunError(
            f"{name} belongs to a model with LoRA adapters that are not merged, so receivers would keep the frozen "
            "weights for ever: set verl's model.lora.merge=true, and backend=trinity"
        )
    try:
        return wire_name(from_torch(tensor.dtype), wire_dtype)
    except ValueError as error:
        raise RunError(f"{name} cannot be sent: {error}") from error
