"""State dicts in Ray's object store: `put` packs them into large buckets, `get` checks and unpacks them.

Called in the processes of the trainer and the explorers. The synchronizer's actor does not import it: it loads torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectFetchTimedOutError, ObjectLostError, RayError
from xxhash import xxh3_128_digest

from trinity_sync.actors.calls import connected
from trinity_sync.actors.synchronizer_client import StoredState
from trinity_sync.errors import RunError, WaitTimeout, grown
from trinity_sync.protocol.versions import Version
from trinity_sync.weights.apply import check_bytes
from trinity_sync.weights.packing import BUCKET_BYTES, described, layouts, pack, unpack
from trinity_sync.weights.tensors import byte_tensor

Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class StateLostError(RunError):
    """The tensors of a version are gone with the process that owned them."""


def put(tensors: Tensors, *, wire_dtype: str | None = None, bucket_bytes: int = BUCKET_BYTES) -> StoredState:
    """Put tensors into the object store; RunError where there is none, or a name comes twice."""
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
    """Return the tensors of a version, views of shared memory that must not be written to. Every byte is checked.

    Raises:
        StateLostError: the process that put them is gone.
        ChecksumError: a bucket is damaged.
    """
    buckets = list(layouts(stored.tensors, stored.bucket_bytes))
    limit_s = grown(timeout_s, sum(bucket.nbytes for bucket in buckets))
    try:
        with connected():
            arrays = ray.get(stored.buckets, timeout=limit_s)
    except GetTimeoutError:
        raise WaitTimeout("the object store", f"hand out version {version}", limit_s) from None
    except RayError as error:
        if isinstance(error, ObjectLostError) and not isinstance(error, ObjectFetchTimedOutError):
            raise StateLostError(f"the tensors of version {version} are lost: {type(error).__name__}") from error
        # An error of this node says nothing about the other nodes.
        raise RunError(f"the tensors of version {version} cannot be fetched now: {error}") from error
    found: dict[str, torch.Tensor] = {}
    for bucket, array, digest in zip(buckets, arrays, stored.digests, strict=True):
        check_bytes(f"{bucket.part} of version {version}", memoryview(array), bucket.nbytes, digest)
        found.update(unpack(bucket, byte_tensor(memoryview(array))))
    return found
