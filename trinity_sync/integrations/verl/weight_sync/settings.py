"""What the user says of the weight sync: the keys of ``engine_kwargs.<backend>``, checked when an engine is made."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from pathlib import Path

from trinity_sync.errors import ConfigError
from trinity_sync.weights import dtypes

_FLOATING = tuple(name for name in dtypes.NAMES if dtypes.is_floating(name))
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "mode": ("memory", "nccl", "checkpoint"),
    "transport": ("auto", "nccl", "gloo"),
    "verify": ("full", "bucket"),
    "wire_dtype": (None, *_FLOATING),
}
_LONGEST_S = 7 * 24 * 3600


@dataclasses.dataclass(frozen=True)
class Settings:
    """The keys, which are equal on all members.

    Attributes:
        mode: how bytes travel. ``memory``: through shared memory of the node; ``nccl``: over a process group of the
            sync; ``checkpoint``: through a folder that all nodes share.
        timeout_s: limit of every wait for another member, seconds.
        bucket_mb: MiB that travel at a time, at most verl's ``update_weights_bucket_megabytes``.
        wire_dtype: the dtype of floating tensors on their way, such as ``BF16``; None: as the trainer holds them.
        verify: ``full``: each bucket's digest, and that of the version, as checkpoints have it; ``bucket``: only the
            first.
        transport: of mode nccl: ``nccl`` between GPUs, ``gloo`` between CPUs, ``auto``: as there are GPUs.
        dir: of mode checkpoint: the folder.
    """

    mode: str = "memory"
    timeout_s: float = 600.0
    bucket_mb: int = 64
    wire_dtype: str | None = None
    verify: str = "full"
    transport: str = "auto"
    dir: str | None = None


def read(given: Mapping[str, object], backend: str) -> Settings:
    """Check the keys.

    Args:
        given: as verl hands them over.
        backend: the name under which they stand.

    Raises:
        ConfigError: names the key.
    """
    for key, value in given.items():
        if problem := _problem(key, value):
            raise ConfigError(f"{_place(backend)}{key}={value}: {problem}")
    settings = Settings(**given)  # type: ignore[arg-type]  # each was looked at
    if settings.mode == "checkpoint" and settings.dir is None:
        raise ConfigError(f"{_place(backend)}dir is needed for mode=checkpoint: name a folder that all nodes share")
    if settings.mode != "checkpoint" and settings.dir is not None:
        raise ConfigError(f"{_place(backend)}dir={settings.dir} has no effect with mode={settings.mode}; leave it out")
    if settings.mode != "nccl" and settings.transport != "auto":
        raise ConfigError(
            f"{_place(backend)}transport={settings.transport} has no effect with mode={settings.mode}; leave it out"
        )
    return settings


def _place(backend: str) -> str:
    return f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{backend}."


def _problem(key: str, value: object) -> str | None:
    known = [field.name for field in dataclasses.fields(Settings)]
    if key not in known:
        near = difflib.get_close_matches(key, known, 1)
        return f"there is no such key{f', did you mean {near[0]}' if near else ''}; the keys are {', '.join(known)}"
    if key in _CHOICES:
        choices = _CHOICES[key]
        return None if value in choices else f"expected one of {', '.join(str(one or 'null') for one in choices)}"
    if key == "timeout_s":
        fine = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LONGEST_S
        return None if fine and math.isfinite(float(str(value))) else "expected seconds, above 0 and at most a week"
    if key == "bucket_mb":
        fine = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return None if fine else "expected a whole number of MiB, at least 1"
    fine = value is None or (isinstance(value, str) and Path(value).is_absolute())
    return None if fine else "expected an absolute path, since members work in different folders"
