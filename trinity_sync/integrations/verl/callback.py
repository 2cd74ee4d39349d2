"""The callback of verl's V1 trainer: commits a step as soon as it is written, and records the commit.

::

    trainer.checkpoint_callback_class=trinity_sync.integrations.verl.callback.CheckpointCallback

verl calls it in the driver, when the trainer has written its own last file. Without it, the monitor learns that only
when an engine is used again.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from verl.trainer.ppo import checkpoint_callback

from trinity_sync.actors.monitor_client import commit_events
from trinity_sync.actors.pending import ANSWER_S as MARGIN_S
from trinity_sync.checkpoint.execution import EventLog
from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.integrations.verl.at_exit import Saves, finish_at_exit
from trinity_sync.integrations.verl.local_run import ANSWER_S, COMMIT_S, RunMonitor, join_alone
from trinity_sync.integrations.verl.vendor import is_on, say
from trinity_sync.protocol.parts import FULL
from trinity_sync.tracking.json_lines import JsonlWriter

EVENTS = "events.jsonl"
"""The file in the checkpoint folder: ``commit``, ``prune`` and ``fault`` events, one JSON object a line."""

_END_S = 60.0
"""Timeout, at the end of the program, for steps that are not recorded, seconds."""


class CheckpointCallback(checkpoint_callback.CheckpointCallback):
    """Tells the checkpoint monitor that a step is written, and records its commit in the background.

    Errors never end the training: they are printed to standard error, and a lost step is raised by the engine's next
    save. The end of the program waits up to a minute for commits that are not recorded; a step lost then makes the exit
    code 1, except in an actor, which Ray ends. `config`: verl's.
    """

    def __init__(self, config: object = None) -> None:
        super().__init__(config)
        self._record: _SavesRecord | None = None
        if not is_on():
            say("the checkpoint callback has nothing to do: VERL_ENGINE_VENDOR is not trinity in the driver")

    def on_save(
        self, trainer: object, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: object
    ) -> None:
        """Report that the trainer has written its own files. Waits for the monitor's answer, not for the commit."""
        if not is_on():
            return
        try:
            if self._record is None:
                self._record = _SavesRecord(join_alone(Path(checkpoint_dir).absolute().parent, ANSWER_S))
                finish_at_exit(self._record)
            self._record.tell_whole(global_step)
        except TrinityError as error:
            say(f"step {global_step} is committed when its engines are used again, and not recorded: {error}")
            return
        self._record.follow(global_step)


class _SavesRecord(Saves):
    """The commits of a run, recorded in a file. Raises RunError if the file cannot be opened."""

    def __init__(self, monitor: RunMonitor) -> None:
        if monitor.root is None:
            raise RunError("the checkpoint monitor writes nothing")
        self._client, self._attempt = monitor.client, monitor.attempt
        self._file = JsonlWriter(monitor.root / EVENTS)
        self._following: dict[int, threading.Thread] = {}
        self._ending = threading.Event()
        self._lost: list[TrinityError] = []

    def tell_whole(self, step: int) -> None:
        """Report that the trainer's own files are there."""
        self._client.notify_beside(step, attempt=self._attempt).result(ANSWER_S)

    def follow(self, step: int) -> None:
        """Wait for the commit and record it, in the background. Errors are printed."""
        self._following = {one: thread for one, thread in self._following.items() if thread.is_alive()}
        thread = threading.Thread(target=self._follow, args=(step,), name=f"record-{step}", daemon=True)
        self._following[step] = thread
        thread.start()

    def settle_at_exit(self) -> None:
        """Let `finish` raise later errors: no save comes that would raise them."""
        self._ending.set()

    def finish(self, limit_s: float | None) -> None:
        """Wait until all steps are recorded. Raises RunError, WaitTimeout."""
        self._ending.set()
        limit = _END_S if limit_s is None else limit_s
        deadline = time.monotonic() + limit
        for step, thread in self._following.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise WaitTimeout("the checkpoint monitor", f"commit step {step}, which is not recorded", limit)
        if self._lost:
            raise self._lost[0]

    def _follow(self, step: int) -> None:
        log = EventLog(self._attempt, time.time)
        try:
            commit = self._client.wait_committed(step, self._attempt, COMMIT_S, kind=FULL).result(COMMIT_S + MARGIN_S)
            for event in commit_events(commit):
                log.add(event)
        except TrinityError as error:
            say(f"the checkpoint of step {step} is not committed: {error}")
            log.fault(f"checkpoint of step {step}", error)
            if self._ending.is_set():
                self._lost.append(error)
        try:
            for line in (*log.drain(), *self._client.drain_events().result(ANSWER_S)):
                self._file.append(line)
        except TrinityError as error:
            say(f"the events of step {step} could not be recorded: {error}")
