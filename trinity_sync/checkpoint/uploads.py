"""The monitor's queue of checkpoints on their way to the mirror: one thread, one copy at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from trinity_sync.checkpoint.holds import CheckpointLease, lease_checkpoint
from trinity_sync.checkpoint.layout import step_dir
from trinity_sync.checkpoint.mirror_process import MirrorError, MirrorSettings, call_mirror, try_again
from trinity_sync.checkpoint.storage import shown, without_secrets
from trinity_sync.errors import RunError
from trinity_sync.protocol.retention import Policy

#: A lease is renewed while its copy goes on; of a monitor that was killed it ends by itself.
_LEASE_S = 90.0
_RENEW_S = 20.0


class Uploads:
    """Copies committed full checkpoints to a mirror, oldest first.

    One that retention has deleted here before its turn came is skipped, with an event. One whose tries are used up is
    put off until another has got through. While a step is being copied, between its tries too, it is leased.

    Args:
        root: the local checkpoint folder.
        place: the mirror: a path, or a URL that fsspec knows.
        policies: retention, for a mirror that keeps the same.
        start: the step after which this attempt goes on; None: it is the first, or not known.
        report: gets events, ``mirror`` and ``fault``, as name and fields. Called in the queue's thread.
        on_idle: called there when there is nothing left to do.
        clock: Unix seconds.
    """

    def __init__(
        self,
        root: Path,
        place: str,
        settings: MirrorSettings,
        *,
        policies: Sequence[Policy],
        start: int | None,
        report: Callable[[str, dict[str, Any]], object],
        on_idle: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root, self._place, self._settings = root, place, settings
        self._policies = tuple(policies) if settings.keep == "same" else None
        self._start = start
        self._report, self._on_idle, self._clock = report, on_idle, clock
        self._changed = threading.Condition()
        self._waiting: deque[int] = deque()
        self._unsure: list[int] = []
        self._given_up: dict[int, str] = {}
        self._lost: dict[int, str] = {}
        self._working = False
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="mirror", daemon=True).start()

    def add(self, step: int) -> None:
        """A step was committed."""
        with self._changed:
            if step not in self._waiting:
                self._waiting.append(step)
            self._changed.notify()

    def catch_up(self, steps: Collection[int]) -> None:
        """These are here already; those of them that the mirror does not have are copied first."""
        with self._changed:
            self._unsure = sorted(steps)
            self._changed.notify()

    @property
    def busy(self) -> bool:
        """Whether anything is being copied or waits for it."""
        with self._changed:
            return bool(self._working or self._waiting or self._unsure)

    def left(self) -> dict[int, str]:
        """Steps that are not at the mirror, and why."""
        with self._changed:
            waiting = dict.fromkeys((*self._unsure, *self._waiting), "still waiting or under way")
            return dict(sorted((self._lost | self._given_up | waiting).items()))

    def stop(self) -> None:
        """Break off what is under way."""
        self._stop.set()
        with self._changed:
            self._changed.notify()

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._working and not (self._waiting or self._unsure):
                    self._on_idle()
                self._working = False
                while not (self._waiting or self._unsure or self._stop.is_set()):
                    self._changed.wait()
                self._working = True
                unsure, first = list(self._unsure), self._waiting[0] if self._waiting else None
            if self._stop.is_set():
                return
            try:
                if unsure:
                    self._find_missing(unsure)
                elif first is not None:
                    self._copy(first)
            except Exception as error:  # such as a lease that a full disk does not take; it must not end the thread
                self._fault(f"copies to {shown(self._place)}", f"{type(error).__name__}: {error}")
                self._settle(first, str(error))
                with self._changed:
                    self._unsure = []

    def _find_missing(self, steps: list[int]) -> None:
        where = f"copies to {shown(self._place)}"
        missing: Iterable[int] = ()
        try:
            missing = self._call("missing", lambda text: self._fault(where, text), steps=steps)["steps"]
        except MirrorError as error:
            with self._changed:
                self._given_up.update(dict.fromkeys(steps, str(error)))
        with self._changed:
            self._unsure = []
            self._waiting.extendleft(reversed([step for step in missing if step not in self._waiting]))

    def _copy(self, step: int) -> None:
        where = f"copy of step {step} to {shown(self._place)}"
        started = self._clock()
        try:
            lease = lease_checkpoint(self._root, step, holder="mirror", seconds=_LEASE_S, clock=self._clock)
        except (RunError, OSError) as error:
            if step_dir(self._root, step).exists():
                self._fault(where, str(error))
                self._settle(step, str(error), final=True)
                return
            reason = "retention deleted it here before its turn came"
            self._settle(step)
            self._told(step, state="skipped", bytes=0, total_s=0.0, reason=reason)
            return
        with lease:
            try:
                result = self._call(
                    "upload",
                    lambda text: self._fault(where, text),
                    lease,
                    step=step,
                    start=self._start,
                    policies=self._policies,
                )
            except MirrorError as error:
                self._settle(step, str(error), final=error.final)
                return
        if "problem" in result:
            self._fault(where, without_secrets(result["problem"], self._place, self._settings.options))
        self._told(step, state="copied", bytes=result["bytes"], total_s=max(0.0, self._clock() - started))
        with self._changed:
            # The place answers again, so what was put off has another chance.
            self._waiting.extend(other for other in self._given_up if other not in self._waiting)
            self._given_up.clear()
        self._settle(step)

    def _call(
        self, what: str, on_failure: Callable[[str], None], lease: CheckpointLease | None = None, **job: Any
    ) -> dict[str, Any]:
        renewed = time.monotonic()

        def tick() -> None:
            nonlocal renewed
            if lease is not None and time.monotonic() - renewed > _RENEW_S:
                lease.renew(_LEASE_S)
                renewed = time.monotonic()

        def once() -> dict[str, Any]:
            if lease is not None:
                lease.renew(_LEASE_S)
            return call_mirror(
                self._place,
                self._settings,
                {"do": what, "root": self._root, **job},
                tick=tick,
                stop=self._stop,
            )

        return try_again(self._settings, once, on_failure, self._stop)

    def _settle(self, step: int | None, problem: str | None = None, *, final: bool = False) -> None:
        """A step's turn is over. What failed for good is not tried again, and stays among what is left."""
        with self._changed:
            if step is not None and step in self._waiting:
                self._waiting.remove(step)
            if step is not None and problem is not None:
                (self._lost if final else self._given_up)[step] = problem

    def _told(self, step: int, **fields: Any) -> None:
        self._report("mirror", {"step": step, "url": shown(self._place), **fields})

    def _fault(self, where: str, text: str) -> None:
        self._report("fault", {"where": where, "error": text})
