"""FSDP1 that wraps by size."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trinity_sync.backends.fsdp_option import FsdpOption
from trinity_sync.config import Check, Get, Problem
from trinity_sync.config.schema import Config


def check_unit(get: Get) -> Iterator[Problem]:
    if get("backend.unit_params") < 1:
        yield Problem("backend.unit_params", f"is {get('backend.unit_params')}; must be at least 1")


@dataclass(kw_only=True)
class WrappedOption(FsdpOption):
    """FSDP1 with a unit of communication for each so many parameters, whatever layers the model has."""

    unit_params: int

    checks: ClassVar[tuple[Check, ...]] = (*FsdpOption.checks, check_unit)
    engine_keys: ClassVar[Mapping[str, str]] = {**FsdpOption.engine_keys, "wrap_policy": "backend.unit_params"}

    def engine_fields(self, cfg: Config) -> dict[str, Any]:
        return {**super().engine_fields(cfg), "wrap_policy": {"min_num_params": self.unit_params}}
