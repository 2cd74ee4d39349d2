"""The training loop in lockstep: explorers sample with the newest version, the trainer trains, publishes and saves.
Runs in the driver.

One step, in this order: the explorers generate; advantages are computed; all ranks train; if the step is due, the
ranks stage the weights into a slot, the sync mode publishes them and the explorers load them; if a checkpoint is due,
the ranks copy their state and write it in the background while the next step runs. Everything that depends on chance
is a function of the seed and the step, so a resumed or repeated run sees the same data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import ray

from trinity_sync.errors import RunError
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.samples.staleness import staleness
from trinity_sync.sync.base import LoadReport, SyncMode
from trinity_sync.sync.synchronizer import Sealed, Synchronizer
from trinity_sync.trainer.group import TrainerGroup
from trinity_sync.trainer.saves import FullSaves


class Log(Protocol):
    """Where the loop reports; `tracking.Recorder` is one."""

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """One trainer step's numbers."""
        ...

    def event(self, name: str, **fields: Any) -> None:
        """One event."""
        ...


class Data(Protocol):
    """Where a step's batch comes from: explorers (GRPO) or a file of pairs (SFT)."""

    def batch(self, step: int) -> SampleBatch | PairBatch:
        """The batch of a step, the same whenever it is asked for."""
        ...

    def advantages(self, batch: SampleBatch | PairBatch) -> np.ndarray | None:
        """One advantage per sequence, None where the loss needs none."""
        ...

    def load(self, version: Version) -> list[LoadReport]:
        """Have whoever generates the data take this version."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What the loop goes by.

    Attributes:
        steps: the last step.
        first: the first step to do (1, or one past the step that was resumed).
        attempt: of the run.
        sync_interval: steps between versions.
        max_staleness: largest staleness that a sample may have.
        save_interval: steps between full checkpoints, 0 for the last only.
        sync_timeout_s, step_timeout_s: limits in seconds.
    """

    steps: int
    first: int
    attempt: int
    sync_interval: int
    max_staleness: int
    save_interval: int
    sync_timeout_s: float
    step_timeout_s: float


@dataclass
class _Timing:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str) -> Any:
        started = time.perf_counter()
        yield
        self.seconds[f"timing/{name}"] = time.perf_counter() - started


class TrainingLoop:
    """Drives a run from its first step to its last.

    Args:
        settings: see `LoopSettings`.
        trainer: the group of ranks, initialised and attached.
        data: where batches come from.
        mode: the sync mode.
        synchronizer: the run's synchronizer.
        parts: names of the parts that make a version.
        saves: full checkpoints.
        log: where to report.
        restored: the step of the version that explorers begin with, where it is not the trainer's, and what fills a
            slot with it.
        stop: once set, the step under way is finished and saved, and is the last.
    """

    def __init__(
        self,
        settings: LoopSettings,
        *,
        trainer: TrainerGroup,
        data: Data,
        mode: SyncMode,
        synchronizer: Synchronizer,
        parts: list[str],
        saves: FullSaves,
        log: Log,
        restored: tuple[int, Callable[[Version, int], None]] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._stop = stop or threading.Event()
        self._restored = restored
        self._settings = settings
        self._trainer = trainer
        self._data = data
        self._mode = mode
        self._synchronizer = synchronizer
        self._parts = parts
        self._saves = saves
        self._log = log

    def run(self) -> bool:
        """All steps; whether they were done, and not stopped before."""
        settings = self._settings
        self._publish(self._first_version(), _Timing())
        for step in range(settings.first, settings.steps + 1):
            if self._step(step):
                break
        self._saves.finish()
        return step == settings.steps

    def _step(self, step: int) -> bool:
        """One step; whether the run is to stop after it."""
        settings, timing = self._settings, _Timing()
        started = time.perf_counter()
        with timing.of("generate"):
            batch = self._data.batch(step)
        lags = self._staleness(batch, step)
        with timing.of("train"):
            metrics = self._train(step, batch)
        last = step == settings.steps
        publish = last or step % settings.sync_interval == 0
        stops = self._stop.is_set()
        save = last or stops or bool(settings.save_interval and step % settings.save_interval == 0)
        if publish or save:
            version = Version(settings.attempt, step)
            with timing.of("stage"):
                staged = self._stage(version)
            if publish:
                self._publish(staged, timing)
            else:
                self._synchronizer.call("discard", version)
            if save:
                with timing.of("save"):
                    numbers = {**metrics, **_batch_metrics(batch)}
                    self._saves.begin(step, staged.sealed.digest, numbers, published=publish)
        timing.seconds["timing/step"] = time.perf_counter() - started
        self._log.metrics(step, {**_batch_metrics(batch), **metrics, **lags, **timing.seconds})
        self._saves.poll()
        return stops

    def _train(self, step: int, batch: SampleBatch | PairBatch) -> dict[str, float]:
        shared = ray.put(batch)
        results = self._trainer.call(
            "train_step",
            step,
            shared,
            self._data.advantages(batch),
            what=f"train step {step}",
            timeout_s=self._settings.step_timeout_s,
        )
        metrics = next(filter(None, results))  # with pipeline stages only ranks of the last one have some
        if not np.isfinite(metrics["loss"]):
            raise RunError(f"the loss of step {step} is {metrics['loss']}; the newest checkpoint is unharmed")
        return metrics

    def _staleness(self, batch: SampleBatch | PairBatch, step: int) -> dict[str, float]:
        if not isinstance(batch, SampleBatch):
            return {}
        lags = [staleness(int(version_step), step) for version_step in np.unique(batch.version_steps)]
        counts = np.unique(batch.version_steps, return_counts=True)[1]
        if max(lags) > self._settings.max_staleness:
            raise RunError(
                f"samples for step {step} are {max(lags)} steps stale; "
                f"sync.max_staleness={self._settings.max_staleness}"
            )
        return {"staleness/mean": float(np.average(lags, weights=counts)), "staleness/max": float(max(lags))}

    def _first_version(self) -> _Staged:
        """The trainer's weights; after a resume, what the explorers held where that was something else."""
        settings = self._settings
        if self._restored is None:
            return self._stage(Version(settings.attempt, settings.first - 1))
        started = time.perf_counter()
        step, restore = self._restored
        version = Version(settings.attempt, step)
        limit = settings.sync_timeout_s
        restore(version, self._synchronizer.call("begin", version, self._parts, limit, timeout_s=limit + 5))
        return _Staged(self._synchronizer.call("wait_sealed", version, limit, timeout_s=limit + 5), 0.0, started)

    def _stage(self, version: Version) -> _Staged:
        started = time.perf_counter()
        limit = self._settings.sync_timeout_s
        slot = self._synchronizer.call("begin", version, self._parts, limit, timeout_s=limit + 5)
        blocked = self._trainer.call("stage", tuple(version), slot, what=f"stage version {version}", timeout_s=limit)
        sealed = self._synchronizer.call("wait_sealed", version, limit, timeout_s=limit + 5)
        return _Staged(sealed, max(blocked), started)

    def _publish(self, staged: _Staged, timing: _Timing) -> None:
        sealed, version = staged.sealed, staged.sealed.version
        with timing.of("publish"):
            self._mode.publish(sealed)
        nbytes = sum(info.nbytes for info in sealed.parts.values())
        self._log.event(
            "publish",
            version=version.step,
            mode=self._mode.name,
            encoding="full",
            digest=sealed.digest,
            bytes_full=nbytes,
            bytes_moved=nbytes,
            blocked_s=staged.blocked_s,
            total_s=time.perf_counter() - staged.started,
        )
        with timing.of("load"):
            reports = self._data.load(version)
        for report in reports:
            self._log.event(
                "load",
                version=report.version.step,
                explorer=report.explorer,
                digest=report.digest,
                total_s=report.total_s,
                paused_s=report.paused_s,
                bytes=report.bytes_moved,
            )


@dataclass(frozen=True)
class _Staged:
    sealed: Sealed
    blocked_s: float
    started: float


def _batch_metrics(batch: SampleBatch | PairBatch) -> dict[str, float]:
    if not isinstance(batch, SampleBatch):
        return {"batch/tokens": float(batch.token_count)}
    metrics = {
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std()),
        "response_length/mean": float(batch.response_lengths.mean()),
    }
    if np.isfinite(batch.exact).all():
        metrics["reward/exact"] = float(batch.exact.mean())
    return metrics
