"""`algorithm=bytes`: no training, for runs that only move bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from trinity_sync.config import Check, Get, Problem
from trinity_sync.config.schema import AlgorithmConfig
from trinity_sync.errors import ConfigError
from trinity_sync.trainer.algorithms.base import Algorithm


def _check_lockstep(get: Get) -> Iterator[Problem]:
    if get("trainer.schedule") == "free":
        yield Problem(
            "trainer.schedule",
            "is free, but explorers of workload=bytes generate nothing that could run ahead; "
            "set trainer.schedule=lockstep",
        )


@dataclass(kw_only=True)
class Bytes(AlgorithmConfig, Algorithm):
    """Trains nothing; explorers load each version."""

    task_methods: ClassVar[tuple[str, ...]] = ()
    checks: ClassVar[tuple[Check, ...]] = (_check_lockstep,)

    @classmethod
    def sequences(cls, get: Get) -> tuple[int, str, str]:
        return 0, "algorithm.kind", "has no sequences"

    def loss(self, strategy: str) -> Callable[..., object]:
        raise ConfigError("algorithm=bytes has no loss; choose workload=bytes, or another algorithm")
