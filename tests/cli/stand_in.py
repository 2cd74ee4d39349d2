"""A stand-in for `trinity_sync.launch.launcher`, for tests of what stands before it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import xxhash

import trinity_sync.launch
from trinity_sync import config
from trinity_sync.tracking import run_record
from trinity_sync.tracking.run_record import RunRecord

_package_versions = cache(run_record.package_versions)


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
        self,
        checked: config.RunConfig,
        run_dir: Path,
        *,
        resume: Any = None,
        until: int | None = None,
        settings: Any = None,
        healing: object = None,
        states: object = None,
    ) -> int:
        cfg: Any = checked.composed
        self.calls.append(SimpleNamespace(cfg=cfg, run_dir=run_dir, resume=resume, until=until, command=list(sys.argv)))
        with nullcontext() if self.refuses or settings is None else settings(checked):
            if resume is None:
                (run_dir / "run.json").write_text(json.dumps({"attempt": 0, "status": "running"}))
            code = self.behave(cfg)
        self.leave(cfg, run_dir, until)
        return code

    def look(self, checked: config.RunConfig, run_dir: Path) -> None:
        """What a dry run does: nothing."""

    def leave(self, cfg: Any, run_dir: Path, until: int | None) -> None:
        """Write what a run that has ended leaves."""
        (run_dir / "summary.json").write_text(json.dumps({"reward_last": 0.5}))


class Computing(StandIn):
    """Leaves what a run leaves, with digests and metrics that follow from its settings and from `spoilt`.

    Attributes:
        spoilt: a step from which on other weights come out; 0: none.
        ends: status of the run.
        cut: the last step that is recorded; None: the last.
    """

    spoilt = 0
    ends: Any = "completed"
    cut: int | None = None

    def leave(self, cfg: Any, run_dir: Path, until: int | None) -> None:
        last = min(cfg.trainer.steps, until or cfg.trainer.steps, self.cut or cfg.trainer.steps)
        if "attempts" not in json.loads((run_dir / "run.json").read_text()):
            (run_dir / "run.json").unlink()  # what the stand-in has left at the start
        record = RunRecord.new(
            run_dir / "run.json",
            command=sys.argv,
            seed=cfg.seed,
            config_digest=config.config_digest(cfg),
            threads=1,
            reproducible=cfg.trainer.schedule == "lockstep",
        )
        record.start()
        events, metrics = [], []
        for step in range(last + 1):
            made = [cfg.seed, cfg.trainer.lr, step, step >= self.spoilt > 0]
            hashed = xxhash.xxh3_128_hexdigest(json.dumps(made).encode())
            digest = hashed if cfg.sync.verify == "full" else None
            event = {"event": "publish", "version": step, "mode": "memory", "encoding": "full", "digest": digest}
            events.append({**event, "attempt": record.attempt})
            if step:
                made = {
                    "loss": made[0] + 1 / step,
                    "reward/mean": step / 10 + made[0] / 100,
                    "timing/step": id(made) % 7,
                }
                metrics.append({"step": step, "attempt": record.attempt, "time": float(step), **made})
        for name, lines in (("events.jsonl", events), ("metrics.jsonl", metrics)):
            (run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        record.finish(self.ends, last_version=digest and {"step": last, "digest": digest})


S = TypeVar("S", bound=StandIn)


@contextmanager
def standing_in(stand_in: S, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S]:
    """Put it in the launcher's place, and make `folder` the current one. Nothing here outlives a power cut, and the
    installed packages stay: neither is waited for at each run.
    """
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(run_record, "package_versions", _package_versions)
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
