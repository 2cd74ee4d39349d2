"""A state dict through Ray's object store: packed into large buckets on one side, checked and unpacked on the other.

Called by the client `Synchronizer`, in the processes of trainer and explorers; it needs torch, which the actor has not.
The buckets belong to the process that put them: when it dies, so do they, and readers are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from trinity_sync.actors.synchronizer import Manifest
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.protocol.handed import Handed
from trinity_sync.weights.packing import BUCKET_BYTES, BucketPlan, Packed, bucket_digest, check_bucket, pack, unpack
from trinity_sync.weights.tensors import byte_tensor, to_torch

Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

if TYPE_CHECKING:
    import numpy as np
    from ray import ObjectRef

    State = tuple[Manifest, list[ObjectRef[np.ndarray]]]


class StateLostError(RunError):
    """The tensors of a version are gone with the process that owned them."""


def put(tensors: Tensors, *, wire_dtype: str | None = None, bucket_bytes: int = BUCKET_BYTES) -> State:
    """Put tensors into the object store; return what the actor is told of them, and the references.

    Raises:
        RunError: there is no tensor, or a name came twice.
    """
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    manifest: Manifest = []
    references: list[ObjectRef[np.ndarray]] = []
    for bucket, data in pack(pairs, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes):
        manifest.append(([(*packed,) for packed in bucket.tensors], bucket.nbytes, bucket_digest(data)))
        references.append(ray.put(data.numpy()))
    if not references:
        raise RunError("the state dict is empty: nothing can be published")
    return manifest, references


def get(handed: Handed, timeout_s: float) -> dict[str, torch.Tensor]:
    """Fetch and check all buckets; the tensors are views of shared memory and must not be written to.

    Args:
        handed: a version with its state, which is what `put` returned.
        timeout_s: limit of the fetch, seconds.

    Raises:
        StateLostError: the process that put them is gone.
        WaitTimeout: they did not come in time.
        ChecksumError: a bucket is damaged.
    """
    version, (manifest, references) = handed.version, cast("State", handed.state)
    try:
        arrays = ray.get(references, timeout=timeout_s)
    except GetTimeoutError:
        raise WaitTimeout("the object store", f"hand out version {version}", timeout_s) from None
    except RayError as error:
        raise StateLostError(f"the tensors of version {version} are lost: {type(error).__name__}") from error
    found: dict[str, torch.Tensor] = {}
    for number, ((tensors, nbytes, digest), array) in enumerate(zip(manifest, arrays, strict=True)):
        data = byte_tensor(memoryview(array))
        check_bucket(data, digest, f"bucket {number} of version {version}")
        found.update(unpack(BucketPlan([Packed(*packed) for packed in tensors], nbytes), data))
    return found


def described(handed: Handed) -> list[tuple[str, str, tuple[int, ...]]]:
    """Describe all tensors of a version with its state as (name, torch dtype such as ``torch.bfloat16``, shape), in the
    order in which they came.
    """
    manifest, _ = cast("State", handed.state)
    tensors = [Packed(*packed) for bucket, _, _ in manifest for packed in bucket]
    return [(packed.name, str(to_torch(packed.dtype)), tuple(packed.shape)) for packed in tensors]
