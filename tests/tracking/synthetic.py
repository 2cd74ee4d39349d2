"""A made-up run, recorded through the recorder with a clock of its own. The tests of tracking and report share it."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from trinity_sync.tracking.events import Event, parse_event
from trinity_sync.tracking.recorder import Recorder
from trinity_sync.tracking.run_record import RunFolder

START = 1_700_000_000.0


_REQUIRED: dict[str, dict[str, Any]] = {
    "publish": {"mode": "memory", "encoding": "full"},
    "load": {"explorer": "explorer-0"},
    "commit": {"kind": "full"},
    "prune": {"reason": "r"},
}


def event(name: str, **fields: Any) -> Event:
    """An event, with the texts that its class requires where a test does not care for them."""
    return parse_event({"event": name, **_REQUIRED.get(name, {}), **fields})


class Clock:
    """Time that passes only when told to."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def quiet_console() -> Console:
    return Console(file=io.StringIO(), width=80)


def digest(step: int) -> str:
    return f"{step * 0x9E3779B97F4A7C15 % 2**64:016x}" * 2


def publish(version: int, **other: Any) -> dict[str, Any]:
    wave = 1 + 0.5 * math.sin(version)
    fields = {
        "version": version,
        "mode": "memory",
        "encoding": "delta" if version else "full",
        "digest": digest(version),
        "bytes_full": 1_240_000_000,
        "bytes_moved": 1_240_000_000 if version == 0 else 58_000_000 + 1_000_000 * (version % 7),
        "blocked_s": 0.004 * wave,
        "total_s": 0.21 * wave,
    }
    return {**fields, **other}


def load(version: int, explorer: str = "explorer-0", **other: Any) -> dict[str, Any]:
    wave = 1 + 0.4 * math.cos(version)
    fields = {
        "version": version,
        "explorer": explorer,
        "digest": digest(version),
        "total_s": 0.33 * wave,
        "paused_s": 0.05 * wave,
    }
    return {**fields, **other}


def commit(step: int, kind: str = "full", **other: Any) -> dict[str, Any]:
    fields = {
        "step": step,
        "kind": kind,
        "digest": digest(step),
        "bytes": 3_700_000_000,
        "blocked_s": 0.012,
        "total_s": 1.9,
    }
    return {**fields, **other}


def metrics(step: int) -> dict[str, float]:
    noise = 0.07 * math.sin(step * 12.9898)
    return {
        "reward/mean": max(0.0, min(1.0, 1 / (1 + math.exp(-(step - 25) / 7)) + noise)),
        "loss": 0.4 * math.exp(-step / 30) + noise / 3,
        "staleness/mean": float(step % 3 == 0),
        "rollout_corr/kl": -1e-4,
        "rollout_corr/k3_kl": 2e-5 * (1 + step % 2),
        "rollout_corr/log_prob_abs_diff": 5e-3,
        "rollout_corr/log_prob_abs_diff_max": 2e-2,
        "timing/generate": 1.1 + noise,
        "timing/train": 0.8,
        "timing/publish": 0.05,
        "timing/save": 0.3 if step % 10 == 0 else 0.0,
        "timing/step": 2.3 + noise,
    }


def queued() -> dict[str, float]:
    """What a step of a free run says of its samples."""
    return {"samples/ready": 64.0, "samples/dropped": 3.0, "samples/waited_s": 0.2, "samples/explorers": 2.0}


def samples(step: int) -> list[dict[str, Any]]:
    """Two samples: of one version, and of two and cut."""
    fixed = {"for_step": step, "prompt": 0, "text": "12<b>=", "exact": None, "tokens": 4}
    whole = {"response": "21&", "reward": 1.0, "advantage": 0.7, "finished": True, "version": step - 1}
    mixed = {"response": "2" * 900, "reward": 0.25, "advantage": -0.7, "finished": False, "version": step - 2}
    return [
        {**fixed, **whole, "sample": 0, "spans": [[0, 4, step - 1]]},
        {**fixed, **mixed, "sample": 1, "spans": [[0, 1, step - 2], [1, 4, step - 1]]},
    ]


def slower(fields: dict[str, Any], pace: float) -> dict[str, Any]:
    """The same, whose seconds are longer by a factor."""
    return {name: value * pace if name.endswith("_s") else value for name, value in fields.items()}


def steps(
    recorder: Recorder, clock: Clock, first: int, last: int, explorers: int = 2, pace: float = 1.0, late: int = 0
) -> None:
    """Trains the steps `first` to `last`: publishes and loads each, saves every tenth, keeps the newest two.

    All times are `pace` times as long, and what is learned comes `late` steps later.
    """
    for step in range(first, last + 1):
        clock.pass_(2.5 * pace)
        recorder.event(event("publish", **slower(publish(step), pace)))
        began = clock.now - metrics(step)["timing/step"]
        for index in range(explorers):
            name, total_s = f"explorer-{index}", pace * (1 - 0.2 * index)
            recorder.event(event("generate", step=step, explorer=name, version=step - 1, began=began, total_s=total_s))
            recorder.event(event("load", **slower(load(step, name), pace)))
        if step % 10 == 0:
            recorder.event(event("commit", **slower(commit(step), pace), written_s=1.5 * pace, began=clock.now))
            (recorder.folder.checkpoints / f"global_step_{step}").mkdir(parents=True, exist_ok=True)
            if step > 20:
                (recorder.folder.checkpoints / f"global_step_{step - 20}").rmdir()
                recorder.event(
                    event("prune", step=step - 20, reason="keep_last n=2: two newer ones", freed_bytes=3_700_000_000)
                )
        recorder.metrics(step, {**metrics(step), "reward/mean": metrics(step - late)["reward/mean"]})


def hydra(
    path: Path, overrides: list[str], name: str = "copy_digits", total: int = 60, seed: int = 7, mode: str = "memory"
) -> None:
    folder = path / ".hydra"
    folder.mkdir(parents=True)
    (folder / "overrides.yaml").write_text("".join(f"- {text}\n" for text in overrides))
    (folder / "config.yaml").write_text(
        f"name: {name}\nseed: {seed}\nbackend:\n  strategy: fsdp2\n  ranks: 2\n"
        f"explorer:\n  kind: hf\n  replicas: 2\nsync:\n  mode: {mode}\n  interval: 1\n"
        f"trainer:\n  steps: {total}\n  lr: 0.001\nagain: ${{trainer.steps}}\n"
        "algorithm:\n  prompts_per_step: 4\n  samples_per_prompt: 8\n"
    )


def start(
    folder: RunFolder,
    clock: Clock,
    *,
    total: int = 60,
    resumed_from: int | None = None,
    report: Callable[[Path], object] | None = None,
    **other: Any,
) -> Recorder:
    options: dict[str, Any] = {
        "command": ["python", "launch.py", "sync=memory"],
        "seed": 7,
        "config_digest": "c0ffee" * 5,
        "threads": 1,
        "name": "copy_digits",
        "view": "off",
        "console": quiet_console(),
    }
    return Recorder.start(
        folder, total_steps=total, resumed_from=resumed_from, report=report, clock=clock, **{**options, **other}
    )


@contextlib.contextmanager
def recording(
    path: Path, clock: Clock | None = None, *, resumed_from: int | None = None, **other: Any
) -> Iterator[Recorder]:
    """A recorder of a folder that is held for as long; resumed if a step to resume from is given."""
    with (
        RunFolder.open(path, resume=resumed_from is not None) as folder,
        start(folder, clock or Clock(), resumed_from=resumed_from, **other) as recorder,
    ):
        yield recorder


def whole_run(
    path: Path,
    *,
    total: int = 60,
    overrides: list[str] | None = None,
    report: Callable[[Path], object] | None = None,
    seed: int = 7,
    mode: str = "memory",
    pace: float = 1.0,
    late: int = 0,
) -> Path:
    """A completed run of `total` steps; `pace` and `late` as for `steps`."""
    clock = Clock()
    hydra(path, overrides or ["backend=fsdp2", "sync=memory"], total=total, seed=seed, mode=mode)
    with recording(path, clock, total=total, report=report, seed=seed) as recorder:
        recorder.event(event("publish", **slower(publish(0), pace)))
        steps(recorder, clock, 1, total, pace=pace, late=late)
        recorder.samples(total, samples(total))
        recorder.finish("completed", peak_memory={"trainer": 9_400_000_000, "explorer": 4_100_000_000})
    return path
