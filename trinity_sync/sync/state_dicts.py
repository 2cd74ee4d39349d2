"""A state dict through Ray's object store: packed into large buckets on one side, checked and unpacked on the other.

Called by the client `Synchronizer`, in the processes of trainer and explorers; it needs torch, which the actor has not.
The buckets belong to the process that put them: when it dies, so do they, and readers are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectFetchTimedOutError, ObjectLostError, RayError
from xxhash import xxh3_128_digest

from trinity_sync.actors.synchronizer import StoredState
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.protocol.versions import Version
from trinity_sync.weights.apply import check_bytes
from trinity_sync.weights.packing import BUCKET_BYTES, described, layouts, pack, unpack
from trinity_sync.weights.tensors import byte_tensor

Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class StateLostError(RunError):
    """The tensors of a version are gone with the process that owned them."""


def put(tensors: Tensors, *, wire_dtype: str | None = None, bucket_bytes: int = BUCKET_BYTES) -> StoredState:
    """Put tensors into the object store; return what the actor is told of them.

    Raises:
        RunError: there is no tensor, or a name came twice.
    """
    stored = StoredState(tensors=[], bucket_bytes=bucket_bytes, digests=[], buckets=[])
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    for bucket, data in pack(pairs, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes):
        stored.tensors.extend(described(bucket.shards))
        stored.digests.append(xxh3_128_digest(data.numpy().data))
        stored.buckets.append(ray.put(data.numpy()))
    if not stored.buckets:
        raise RunError("the state dict is empty: nothing can be published")
    return stored


def get(version: Version, stored: StoredState, timeout_s: float) -> dict[str, torch.Tensor]:
    """Fetch and check all buckets; the tensors are views of shared memory and must not be written to.

    Args:
        version: whose state dict it is.
        stored: what `put` returned.
        timeout_s: limit of the fetch, seconds.

    Raises:
        StateLostError: the process that put them is gone.
        RunError: they cannot be had here now.
        WaitTimeout: they did not come in time.
        ChecksumError: a bucket is damaged.
    """
    try:
        arrays = ray.get(stored.buckets, timeout=timeout_s)
    except GetTimeoutError:
        raise WaitTimeout("the object store", f"hand out version {version}", timeout_s) from None
    except RayError as error:
        if isinstance(error, ObjectLostError) and not isinstance(error, ObjectFetchTimedOutError):
            raise StateLostError(f"the tensors of version {version} are lost: {type(error).__name__}") from error
        # What this node has run into says nothing of what others find.
        raise RunError(f"the tensors of version {version} cannot be fetched now: {error}") from error
    found: dict[str, torch.Tensor] = {}
    buckets = layouts(stored.tensors, stored.bucket_bytes)
    for bucket, array, digest in zip(buckets, arrays, stored.digests, strict=True):
        check_bytes(f"{bucket.part} of version {version}", memoryview(array), bucket.nbytes, digest)
        found.update(unpack(bucket, byte_tensor(memoryview(array))))
    return found
