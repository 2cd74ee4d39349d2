"""The sending of a version: tensors packed into buckets, each of which goes out with its digest."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from xxhash import xxh3_128_digest

from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.weight_sync.base import Outgoing
from trinity_sync.integrations.verl.weight_sync.messages import End
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.packing import pack_shards, unpack
from trinity_sync.weights.shards import Shard
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
    outgoing: Outgoing,
    *,
    bucket_bytes: int,
    step: int | None,
    whole: bool,
) -> Sent:
    """Send what there is.

    Args:
        shards: as of `pack_shards`.
        outgoing: the sender's half of the mode.
        bucket_bytes: length of a bucket.
        step: the trainer's, for receivers.
        whole: compute the version's digest; all shards are of whole tensors then.

    Raises:
        RunError: as of the mode; or there is nothing to send.
        WaitTimeout: as of the mode, or of what yields the tensors.
    """
    asked = _Timed(shards)
    entries: list[tuple[str, str, tuple[int, ...], bytes]] = []
    nbytes = buckets = tensors = 0
    for number, (layout, data) in enumerate(pack_shards(asked, outgoing.room, bucket_bytes=bucket_bytes)):
        here = data.cpu()
        outgoing.put(number, layout, data, xxh3_128_digest(here.numpy().data))
        if whole:  # while it travels
            entries += [digest_entry(name, tensor, None) for name, tensor in unpack(layout, here)]
        nbytes, buckets, tensors = nbytes + layout.nbytes, number + 1, tensors + len(layout.entries)
    if not tensors:
        raise RunError("the engine has no weights to send")
    digest = version_digest(entries) if whole else None
    outgoing.end(End(step, buckets, tensors, digest))
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


class _Timed(Iterator[tuple[Shard, torch.Tensor]]):
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
