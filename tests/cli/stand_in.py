"""A stand-in for `trinity_sync.launch.launcher`, for tests of what stands before it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

import trinity_sync.launch


@dataclass
class StandIn:
    """Notes the calls of the launcher, and leaves the files that others look for.

    Attributes:
        behave: what a run does, and its exit code.
        refuses: whether runs end before their record begins.
    """

    calls: list[SimpleNamespace] = field(default_factory=list)
    behave: Callable[[Any], int] = lambda cfg: 0
    refuses: bool = False

    def run(
        self, cfg: Any, run_dir: Path, *, resume: Any = None, until: int | None = None, settings: Any = None
    ) -> int:
        self.calls.append(SimpleNamespace(cfg=cfg, run_dir=run_dir, resume=resume, until=until, command=list(sys.argv)))
        if resume is None:
            (run_dir / "run.json").write_text(json.dumps({"status": "running"}))
        with nullcontext() if self.refuses or settings is None else settings:
            code = self.behave(cfg)
        self.leave(cfg, run_dir, until)
        return code

    def leave(self, cfg: Any, run_dir: Path, until: int | None) -> None:
        """Write what a run that has ended leaves."""
        (run_dir / "summary.json").write_text(json.dumps({"reward_last": 0.5}))


S = TypeVar("S", bound=StandIn)


@contextmanager
def standing_in(stand_in: S, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S]:
    """Put it in the launcher's place, and make `folder` the current one."""
    monkeypatch.setattr(trinity_sync.launch, "launcher", stand_in, raising=False)
    monkeypatch.setitem(sys.modules, "trinity_sync.launch.launcher", stand_in)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    handlers, level = list(logging.root.handlers), logging.root.level
    yield stand_in
    for handler in [h for h in logging.root.handlers if h not in handlers]:
        handler.close()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
