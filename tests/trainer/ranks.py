"""A trainer rank without an engine, for the tests of the group, and one that is not even asked. Apart from them, so
that their processes stay light.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from trinity_sync.actors.rank_client import RankClient, RankInfo


class Asked(RankClient):
    """Gives the name of the method that is asked for and its arguments, in place of a call."""

    def __init__(self) -> None:
        super().__init__(None, 0)

    def _call(self, what: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return method, (*args, *kwargs.values())


@dataclass(frozen=True)
class PretendSpec:
    """In place of a `WorkerSpec`."""

    name: str
    log_dir: str | None = None


class PretendWorker:
    """Says where and with what it was started."""

    def __init__(self, spec: PretendSpec) -> None:
        self._spec = spec

    def initialise(self) -> RankInfo:
        rank = int(os.environ["RANK"])
        return RankInfo(rank=rank, part=f"{self._spec.name}-{rank}", layout=None, node="here", pid=os.getpid())

    def environment(self, *names: str) -> list[str]:
        return [os.environ[name] for name in names]

    def add(self, first: int, second: int) -> int:
        return first + second
