"""Continues a run that has lost a process as its next attempt, in the same program (`trainer.max_restarts`). Each
attempt is a resume (`launcher.run`); the local Ray stays where it still works.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from trinity_sync.actors.pending import DeathError, NoAnswerError
from trinity_sync.checkpoint.memory_states import memory_states
from trinity_sync.config import Config, RunConfig
from trinity_sync.errors import ConfigError, ProcessLoss, RunError, TrinityError, WaitTimeout
from trinity_sync.host.interrupts import failing_of_it
from trinity_sync.host.masking import without_hidden
from trinity_sync.host.origin import origin
from trinity_sync.host.supervisor import Note
from trinity_sync.launch import supervision
from trinity_sync.launch.kept_explorers import KeptExplorers
from trinity_sync.launch.local_ray import ray_kept
from trinity_sync.launch.start import Resume, Start, checkpoint_folder, committed_steps
from trinity_sync.launch.supervision import SupervisedDriver
from trinity_sync.tracking.events import HealEvent
from trinity_sync.tracking.json_lines import metrics_step, read_last
from trinity_sync.tracking.run_record import (
    RunFolder,
    Status,
    amend_end,
    lock_run_folder,
    read_record,
    unlock_run_folder,
)


@dataclass(frozen=True, kw_only=True)
class AttemptProgress:
    """How far an attempt came before it failed."""

    attempt: int
    began: int  # the step after which it started
    step: int  # the last one that is recorded
    committed: int  # step of the newest full checkpoint; 0: there is none
    last: int  # the last one that it planned

    @classmethod
    def of(cls, run_dir: Path, checkpoints: Path, *, attempt: int, began: int, last: int) -> AttemptProgress:
        """Read it from the record of the run."""
        lines = read_last(run_dir / "metrics.jsonl", 1)
        steps = [step for line in lines if (step := metrics_step(line)) is not None]
        committed = max([began, *committed_steps(run_dir / "events.jsonl", checkpoints)])  # a state has no commit
        return cls(attempt=attempt, began=began, step=max([began, *steps]), committed=committed, last=last)


class RestartPolicy:
    """Decides by the type of an error whether a run goes on after it, and counts the restarts.

    Args:
        most: restarts within `window_s` seconds or since the newest checkpoint, whichever is longer.
        silent_s: time after which ranks give up one that does not answer (`backend.timeout_s`), seconds.
        clock: returns Unix seconds.
        driver: this process, where it is supervised.

    Attributes:
        kept: explorers that live on until the next attempt.
        gpus_per_node: the most that an attempt had on a node; 0: none has used GPUs.
    """

    def __init__(
        self,
        most: int,
        window_s: float,
        silent_s: float,
        clock: Callable[[], float] = time.time,
        driver: SupervisedDriver | None = None,
    ) -> None:
        self.kept = KeptExplorers(lambda error: self.heals(error) and not _is_of_memory(error))
        self.gpus_per_node = 0
        self._most, self._window_s, self._silent_s, self._clock, self._driver = most, window_s, silent_s, clock, driver
        self._restarts: list[tuple[float, int]] = []  # when, and the step of the newest checkpoint then
        self._story: list[str] = []
        self._judged: BaseException | None = None
        self._heals = False
        self._used_up = False
        self._worked = False  # an attempt has done a step
        self._no_memory_at: int | None = None  # the step at which memory ran out last
        # since the last step: the deaths, when the first of them was, and after which step
        self._died: list[str] = []
        self._since, self._step = 0.0, 0
        # of the last attempt
        self._attempt, self._did_step, self._saved = -1, False, False

    @classmethod
    def of(cls, cfg: Config) -> RestartPolicy:
        """Make that of a run."""
        limits = cfg.trainer.max_restarts, cfg.trainer.restart_window_s, cfg.backend.timeout_s
        return cls(*limits, driver=supervision.driver())

    def begun(self, run_dir: Path, attempt: int) -> None:
        """Tell the supervisor, if there is one, that the run has an attempt from which it can go on."""
        if self._driver is not None:
            told = Note(most=self._most, restarts=self._restarts, story=self._story)
            self._driver.begun(run_dir, attempt, {**told, "worked": self._worked, "gpus_per_node": self.gpus_per_node})

    def most_gpus(self, run_dir: Path, attempt: int, gpus_per_node: int) -> int:
        """Return the most GPUs that an attempt had on a node, this one included: a lost node may come back."""
        if gpus_per_node > self.gpus_per_node:
            self.gpus_per_node = gpus_per_node
            self.begun(run_dir, attempt)  # also for a driver after this one
        return self.gpus_per_node

    def after_deaths(self, config: RunConfig, run_dir: Path, resume: Resume | None) -> Resume | None:
        """Judge the deaths of drivers before this one, and return how it resumes. Their attempt is recorded as failed,
        and the folder is left locked for the next one. Raises RunError: the run ends. Raises ConfigError: another
        command has resumed the run since.
        """
        if self._driver is None or resume is None or not self._driver.deaths:
            return resume
        run_json = run_dir / "run.json"
        if Path(self._driver.before["run"]).resolve() != run_json.resolve():  # the program resumes another run now
            return resume
        lock_run_folder(run_dir)
        record, checkpoints = read_record(run_json), checkpoint_folder(config.settings, run_dir)
        own = self._driver.before["attempt"] + len(self._driver.deaths) - 1  # those that died later may have begun one
        if record["attempt"] > own:
            raise ConfigError(
                f"{run_dir} has been resumed by another command since its driver died: attempt {record['attempt']} on "
                f"{record.get('host')}, {record.get('status')}. This command leaves it alone"
            )
        began, said = record.get("resumed_from") or 0, record.get("error")
        if began:  # the checkpoint that the user wanted to leave was left by an attempt before
            resume = replace(resume, from_scratch=False, skip_unreadable=False)
        last = record.get("total_steps") or config.settings.trainer.steps
        self._restarts = [(at, step) for at, step in self._driver.before["restarts"]]
        self._story = [*self._driver.before["story"]]
        self._worked = self._driver.before.get("worked", False)
        self.gpus_per_node = self._driver.before.get("gpus_per_node", 0)
        for death in self._driver.deaths:
            reached = AttemptProgress.of(run_dir, checkpoints, attempt=record["attempt"], began=began, last=last)
            error = ProcessLoss(f"{death['died']} ({said})" if said else death["died"])
            then = self.judge(error, reached, death["time"])
            if then is None:
                told = self.story(error) or str(error)
                _record_end(run_dir, "failed", told)
                raise RunError(told)
            amend_end(run_json, "failed", str(error))
            print(f"{error}; {then}", file=sys.stderr)
            resume, began, said = self.next(resume), reached.step, None  # the later ones have begun no attempt
        return resume

    def goes_on(
        self, folder: RunFolder, start: Start, last: int, error: BaseException, attempt: int, since: float
    ) -> str | None:
        """As `judge`; a record that cannot be read ends the run."""
        told = None
        with contextlib.suppress(TrinityError, OSError):
            reached = AttemptProgress.of(folder.path, start.checkpoints, attempt=attempt, began=start.step, last=last)
            told = self.judge(error, reached, since)
        if told is not None:
            self.begun(folder.path, attempt + 1)  # which this process may write to run.json and die
        elif self._driver is not None:
            self._driver.over()  # before Ray ends, which may end this process
        return told

    def judge(self, error: BaseException, reached: AttemptProgress, since: float | None = None) -> str | None:
        """Decide whether the run goes on after an error that ends an attempt. `since`: when it was met, if that was
        before. Returns what to tell the user then, None: the run ends.
        """
        now, self._judged, self._heals = self._clock(), error, False
        told = without_hidden(str(error))
        self._attempt, self._saved = reached.attempt, reached.committed > reached.began
        self._did_step = reached.step > reached.began
        self._worked |= self._did_step
        if self._did_step or not self._died:
            self._died, self._since, self._step = [], now if since is None else since, reached.step
        self._died.append(told)
        self._story.append(f"attempt {reached.attempt}: {told}")
        no_memory_at = reached.step if _is_of_memory(error) else None
        again, self._no_memory_at = no_memory_at is not None and no_memory_at == self._no_memory_at, no_memory_at
        if again or not self._is_lost(error) or reached.committed >= reached.last:
            return None
        # a run that fails before each next checkpoint makes no progress, however long it takes
        self._restarts = [
            (at, step) for at, step in self._restarts if now - at < self._window_s or reached.committed <= step
        ]
        if len(self._restarts) >= self._most:
            self._used_up = True
            return None
        self._restarts.append((now, reached.committed))
        self._heals = True
        count = f"restart {len(self._restarts)} of {self._most} within {self._window_s:g} s or since a new checkpoint"
        return f"the run goes on from its newest checkpoint ({count}, trainer.max_restarts)"

    def _is_lost(self, error: BaseException) -> bool:
        """Return whether a process has died or hangs, and not by the user's own code or settings."""
        if origin(error) is not None:
            return False
        if isinstance(error, NoAnswerError):
            return self._worked and error.seconds >= self._silent_s
        # a process that misses its first start may never start, for example with too few processors
        return isinstance(error, ProcessLoss) and (self._worked or not isinstance(error, WaitTimeout))

    def heals(self, error: BaseException | None) -> bool:
        """Return whether the run goes on after this error, as judged."""
        return self._heals and error is not None and error is self._judged

    def story(self, error: Exception) -> str | None:
        """Return the text of the error that ends the run, with what came before; None: its own says all."""
        earlier = self._story[:-1] if error is self._judged else self._story
        if not earlier or not (self._used_up or isinstance(error, ConfigError)):
            return None
        if not self._used_up:
            return f"{'; '.join(earlier)}. The run cannot go on: {error}"
        limit = f"trainer.max_restarts={self._most} within trainer.restart_window_s={self._window_s:g}"
        return f"{error}. The restarts are used up ({limit}); before that, {'; '.join(earlier)}"

    def next(self, resume: Resume) -> Resume:
        """Return how the next attempt resumes, after one that was started by `resume`."""
        self._judged = None  # it refers to all that the attempt has used
        # without a newer checkpoint, the resume would find the one that the user asked to skip
        return replace(resume, from_scratch=False, skip_unreadable=False) if self._saved else resume

    def event(self, step: int) -> HealEvent | None:
        """Return the event for the next step of an attempt that starts after a step; None: nothing has died. Its time
        is that of the first death.
        """
        if not self._died:
            return None
        lost = max(0, self._step - step)
        return HealEvent(time=self._since, died="; then ".join(self._died), resumed_from=step, lost=lost, total_s=None)

    def is_between(self, run_json: Path) -> bool:
        """Return whether the run was to go on, and the next attempt has not begun."""
        with contextlib.suppress(ConfigError):
            return self._heals and read_record(run_json)["attempt"] == self._attempt
        return False


def _is_of_memory(error: BaseException | None) -> bool:
    """Return whether Ray has ended a process for want of memory, by an error or its causes."""
    while error is not None and not (isinstance(error, DeathError) and error.of_memory):
        error = error.__cause__
    return error is not None


def _record_end(run_dir: Path, status: Status, error: str | None) -> None:
    from trinity_sync.report import write_report

    amend_end(run_dir / "run.json", status, error)
    write_report(run_dir)


def run(
    config: RunConfig,
    run_dir: Path,
    *,
    started_in: Path,
    resume: Resume | None,
    until: int | None,
    settings: Callable[[RunConfig], AbstractContextManager[None]],
) -> int:
    """Do a run with all of its attempts; arguments and result as of `launcher.run`. `started_in`: folder of its first
    start.
    """
    from trinity_sync.launch import launcher

    healing, used = RestartPolicy.of(config.settings), [config]

    def saved(counted: RunConfig) -> AbstractContextManager[None]:
        used[0] = counted  # the files of `trainer.total_epochs` may grow: further attempts have the same steps
        return settings(counted)

    saving: Callable[[RunConfig], AbstractContextManager[None]] | None = saved
    try:
        resume = healing.after_deaths(config, run_dir, resume)
        with (
            memory_states(config.settings, run_dir) as states,
            ray_kept(after=healing.heals, spared=healing.kept.pids, ends=healing.kept.close),
            contextlib.closing(healing.kept),
        ):
            while True:
                try:
                    with failing_of_it():
                        code = launcher.run(
                            used[0],
                            run_dir,
                            resume=resume,
                            until=until,
                            settings=saving,
                            healing=healing,
                            states=states,
                        )
                    if healing.is_between(run_dir / "run.json"):  # a signal after the record of a failed attempt
                        raise KeyboardInterrupt
                    return code
                except KeyboardInterrupt:
                    if states is not None and healing.is_between(run_dir / "run.json"):
                        states.discard()
                    raise
                except Exception as error:
                    if not healing.heals(error):
                        if (told := healing.story(error)) is None:
                            raise
                        raise RunError(told) from error
                resume, saving = healing.next(resume or Resume(started_in=started_in)), None
    except BaseException as error:
        if healing.is_between(run_dir / "run.json"):
            stopped = isinstance(error, KeyboardInterrupt)
            with contextlib.suppress(TrinityError):
                _record_end(run_dir, "interrupted" if stopped else "failed", None if stopped else str(error))
        raise
    finally:
        unlock_run_folder(run_dir)
