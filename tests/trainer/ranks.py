"""A trainer rank without an engine, for the tests of the group. Apart from them, so that its process stays light."""

from __future__ import annotations

import os
from typing import Any

from trinity_sync.trainer.spec import RankInfo


class PretendWorker:
    """Says where and with what it was started."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec

    def initialise(self) -> RankInfo:
        rank = int(os.environ["RANK"])
        return RankInfo(rank=rank, part=f"{self._spec}-{rank}", layout=None, node="here", pid=os.getpid())

    def environment(self, *names: str) -> list[str]:
        return [os.environ[name] for name in names]

    def add(self, first: int, second: int) -> int:
        return first + second
