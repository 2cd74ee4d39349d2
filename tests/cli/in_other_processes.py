"""A stand-in run for jobs that a launcher of Hydra's starts in other processes, where a test patches nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import trinity_sync.launch
from trinity_sync.config import RunConfig
from trinity_sync.errors import RunError
from trinity_sync.host.interrupts import finishing_steps, interruptible
from trinity_sync.launch import app

LIMIT_S = 60.0


def job(cfg: Any) -> float:
    """What Hydra calls, in whatever process."""
    module: Any = ModuleType("trinity_sync.launch.launcher")
    module.run = _run
    sys.modules[module.__name__] = trinity_sync.launch.launcher = module  # type: ignore[attr-defined]
    return app.job(cfg)


def _run(checked: RunConfig, run_dir: Path, *, resume: Any, until: int | None, settings: Any, **_: Any) -> int:
    """By its name a run fails, is preempted, or waits for its interrupt; others complete. The reward is the rate."""
    cfg = checked.settings
    if resume is None:
        with settings(checked):
            pass
    _record(run_dir, "running", resume)
    stop = threading.Event()
    with interruptible():
        if cfg.name == "fails" and cfg.seed == 2:
            _record(run_dir, "failed", resume)
            raise RunError("rank 0 died")
        with finishing_steps(stop):
            if cfg.name == "preempted" and resume is None:
                os.kill(os.getpid(), signal.SIGUSR2)
                assert stop.wait(LIMIT_S)
            elif cfg.name == "waits":
                print("waiting", flush=True)
                stop.wait(LIMIT_S)
        if stop.is_set():
            _record(run_dir, "interrupted", resume)
            return 130
    print("done", flush=True)
    (run_dir / "summary.json").write_text(json.dumps({"reward_last": cfg.trainer.lr}))
    _record(run_dir, "completed", resume)
    return 0


def _record(run_dir: Path, status: str, resume: Any) -> None:
    attempt = 0 if resume is None else 1
    record = {"status": status, "attempt": attempt, "command": " ".join(sys.argv), "pid": os.getpid()}
    (run_dir / "run.json").write_text(json.dumps(record))


if __name__ == "__main__":
    import hydra

    from trinity_sync import config

    entry = hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="config")(job)
    sys.exit(app.run_main(entry))
