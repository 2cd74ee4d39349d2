"""Explorers that never wait for each other: each generates, takes the newest version, and generates again, while the
trainer takes what is ready. The data of a run with `trainer.schedule=free`.

One thread per explorer asks the queue for groups to make, hands them to its explorer and brings back what was made; a
dead, hanging or restarting explorer so keeps nobody but its own thread. What may be made, and what the trainer gets,
the queue decides (`samples.queue`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trinity_sync.actors.calls import MemberDied
from trinity_sync.actors.explorer_client import LOAD_TRIES, Beside, ExplorerClient, LoadFailed, LoadReport, Produced
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host import interrupts
from trinity_sync.samples.advantages import Drawn, GroupFilter, Judge
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.excerpt import Line, excerpt
from trinity_sync.samples.position import GroupId
from trinity_sync.samples.queue import GroupQueue, QueueRules, ReadyGroup, UpdateGroups
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import prompts_of

if TYPE_CHECKING:
    from trinity_sync.explorer.validation import VersionValidations
    from trinity_sync.tasks.base import Task

GRACE_S = 5.0
"""How long an explorer may go on with what it is in the middle of when the run ends."""


_KILLED_S = 5.0


class Members(Protocol):
    """What is asked of the explorers; `ExplorerPool` is that."""

    @property
    def clients(self) -> Mapping[str, ExplorerClient]:
        """Explorers by name."""
        ...

    def join(self, name: str) -> None:
        """Connect an explorer; waits until it is up."""
        ...

    def produce(self, name: str, work: Sequence[tuple[int, Sequence[Prompt]]], samples_per_prompt: int) -> Produced:
        """Have it make samples."""
        ...

    def replace(self, name: str, why: Exception) -> bool:
        """Start it again; False: it is gone for good."""
        ...

    def end(self, name: str) -> None:
        """Kill it; from now on none is started again."""
        ...


class _Piece(NamedTuple):
    """A group's samples: rows of what an explorer made at a time."""

    batch: SampleBatch
    rows: NDArray[np.int64]


class FreeRollout:
    """Keeps all explorers of a run busy, and gives the trainer its batches.

    Args:
        task: gives the prompts.
        members: the explorers.
        rules: the rules of the queue.
        samples_per_prompt: size of a group.
        judge: makes the advantages of a batch.
        first: the first step.
        position: where an earlier attempt was in the task's prompts (`position`), None to begin with those of `first`.
        timeout_s: limit of the trainer's wait while nobody brings anything, seconds.
        on_load: told of each load, on an explorer's thread.
        on_fault: told of each explorer that is gone for good, and of loads that failed: (where, error).
        group_filter: says which groups are flat, where `rules` count them; None: none is.
        validations: what explorers do first where there is something to do; None: nothing is validated.
    """

    def __init__(
        self,
        task: Task,
        members: Members,
        rules: QueueRules,
        *,
        samples_per_prompt: int,
        judge: Judge,
        first: int,
        position: Mapping[str, object] | None,
        timeout_s: float,
        on_load: Callable[[LoadReport], None],
        on_fault: Callable[[str, str], None],
        group_filter: GroupFilter | None = None,
        validations: VersionValidations | None = None,
    ) -> None:
        self._filter = group_filter
        self._drawn: Drawn | None = None
        self._validations = validations
        self._task = task
        self._members = members
        self._rules = rules
        self._samples_per_prompt = samples_per_prompt
        self._judge = judge
        self._timeout_s = timeout_s
        self._on_load = on_load
        self._on_fault = on_fault
        self._queue: GroupQueue[_Piece] = GroupQueue(rules, first, time.monotonic, position)
        self._changed = threading.Condition()
        self._alive = set(members.clients)
        self._busy: set[str] = set()
        self._error: BaseException | None = None
        self._closed = False
        self._progress = time.monotonic()
        self._waited_s = 0.0
        self._mixed = 0
        self._told = (0, 0.0, 0)
        self._prompts: dict[int, Sequence[Prompt]] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(name,), name=name, daemon=True) for name in members.clients
        ]

    # -- the trainer's side

    def start(self) -> None:
        """Let all explorers begin, as soon as each is up and a version is there."""
        self._progress = time.monotonic()
        for thread in self._threads:
            thread.start()

    def published(self, step: int) -> None:
        """Take note that the version of this step can be loaded. Any thread."""
        if self._validations is not None:
            self._validations.published(step)
        with self._changed:
            self._queue.publish(step)
            self._changed.notify_all()

    def take(self, step: int) -> SampleBatch:
        """Return the samples for an update, sorted. Waits while too few are ready.

        Raises:
            RunError: no explorer is left, one of them made an error that no restart mends, or `fail` was called; or too
                few groups differ, and others are not to be taken.
            WaitTimeout: nobody brought anything for too long.
        """
        began = time.monotonic()  # before that nobody may have had anything to do
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                assert step == self._queue.step, "updates are taken in order"
                taken = self._queue.take()
                # Places have become free in either case, or the wait for what is overdue begins.
                self._changed.notify_all()
                if taken is not None:
                    break
                left = max(self._progress, began) + self._timeout_s - time.monotonic()
                if left <= 0:
                    who = ", ".join(self._queue.explorers_out()) or "the explorers"
                    raise WaitTimeout(who, f"make the samples of step {step}", self._timeout_s)
                self._changed.wait(left)
        if self._filter is not None:
            self._drawn = _drawn(taken)
            self._filter.check_filled(step, self._drawn.filled, self._drawn.groups)
        return _assemble([*taken.groups, *taken.filled])

    def drawn(self) -> Drawn | None:
        """Return all groups that were done with for the batch that was taken last; None: these are the batch."""
        return self._drawn

    def metrics(self) -> dict[str, float]:
        """Count, since the last call, dropped samples, those that more than one version made, and the seconds that
        explorers waited; as of now, ready samples and living explorers.
        """
        with self._changed:
            now = (self._queue.dropped, self._waited_s, self._mixed)
            dropped, waited, mixed = (new - old for new, old in zip(now, self._told, strict=True))
            self._told = now
            return {
                "samples/dropped": float(dropped * self._samples_per_prompt),
                "samples/waited_s": waited,
                "samples/mixed": float(mixed),
                "samples/ready": float(self._queue.ready * self._samples_per_prompt),
                "samples/explorers": float(len(self._alive)),
            }

    def position(self) -> Mapping[str, object]:
        """Return where the run is in the task's prompts, for a checkpoint of the step that was taken last."""
        with self._changed:
            return self._queue.position()

    def advantages(self, batch: SampleBatch) -> np.ndarray:
        """Compute one advantage per sample, within each prompt's group."""
        return np.asarray(self._judge(batch))

    def excerpt(self, batch: SampleBatch, advantages: np.ndarray | None, groups: int) -> list[Line]:
        """Write out a batch's samples for so many prompts."""
        return excerpt(batch, advantages, groups, lambda step, number: self._prompts_of(step)[number])

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits for samples this instead. Any thread; the first error counts."""
        if self._validations is not None:
            self._validations.fail(error)
        with self._changed:
            if self._error is None and not self._closed:
                self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """Let all explorers end. One that is in the middle of something is killed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + interrupts.left(GRACE_S, interrupts.REST_S)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        for name in sorted(self._busy):  # a thread must not be inside Ray when Ray goes
            self._members.end(name)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_KILLED_S)

    # -- an explorer's thread

    def _serve(self, name: str) -> None:
        try:
            with self._inside(name):
                lost = self._join(name)
            while lost is None or self._made_good(name, lost):
                lost = self._work(name)
                if lost is None:
                    return
        except BaseException as error:
            self.fail(error)

    def _join(self, name: str) -> Exception | None:
        try:
            self._members.join(name)
        except (MemberDied, WaitTimeout) as error:
            return error
        return None

    def _work(self, name: str) -> Exception | None:
        """Have an explorer make samples until the run ends (None), or the explorer is lost: return why."""
        failures = 0
        while (asked := self._wait_for_work(name)) is not None:
            if isinstance(asked, int):
                if (lost := self._validate(name, asked)) is not None:
                    return lost
                continue
            work = self._work_of(asked)
            try:
                with self._inside(name):
                    produced = self._members.produce(name, work, self._samples_per_prompt)
            except LoadFailed as error:
                failures += 1
                self._tell_loads(error.load, error.beside)
                self._give_back(name)
                if failures == LOAD_TRIES:
                    return error
                self._report(name, str(error))
            except (MemberDied, WaitTimeout) as error:
                self._give_back(name)
                return error
            else:
                failures = 0
                self._tell_loads(produced.load, produced.beside)
                if produced.failed is not None:
                    self._report(name, produced.failed)
                self._bring(produced)
        return None

    def _validate(self, name: str, step: int) -> Exception | None:
        """Have an explorer validate the version of a step; where it is lost, return why."""
        assert self._validations is not None, "who else asked for it?"
        try:
            with self._inside(name):
                self._validations.run(name, step, self._note_progress)
        except (MemberDied, WaitTimeout) as error:
            return error
        finally:
            self._note_progress()
        return None

    def _note_progress(self) -> None:
        with self._changed:
            self._progress = time.monotonic()
            self._changed.notify_all()

    def _wait_for_work(self, name: str) -> list[GroupId] | int | None:
        """Return what to make next: groups, or the step of a version to validate; None: the run is over."""
        began = time.monotonic()
        with self._changed:
            most = -(-self._rules.groups_per_step // max(1, len(self._alive)))
            while not self._closed and self._error is None:
                step = self._validations.hand_out(name) if self._validations is not None else None
                if step is not None:
                    return step
                groups = self._queue.hand_out(name, most)
                if groups:
                    self._waited_s += time.monotonic() - began
                    return groups
                self._changed.wait(self._queue.overdue_in())
            return None

    def _work_of(self, groups: Collection[GroupId]) -> list[tuple[int, list[Prompt]]]:
        by_step = groupby(sorted(groups), key=lambda group: group.step)
        return [(step, [self._prompts_of(step)[group.prompt] for group in members]) for step, members in by_step]

    def _prompts_of(self, step: int) -> Sequence[Prompt]:
        with self._changed:
            if step not in self._prompts:
                while len(self._prompts) > 16:  # of a late group they are made again
                    del self._prompts[next(iter(self._prompts))]
                self._prompts[step] = prompts_of(self._task, self._queue.numbering, step)
            return self._prompts[step]

    def _bring(self, produced: Produced) -> None:
        batch = produced.batch
        pieces = {
            GroupId(int(step), int(prompt)): np.flatnonzero((batch.steps == step) & (batch.prompts == prompt))
            for step, prompt in {*zip(batch.steps.tolist(), batch.prompts.tolist(), strict=True)}
        }
        oldest = batch.version_steps
        flat = {group: self._is_flat(_Piece(batch, rows)) for group, rows in pieces.items()}
        with self._changed:
            self._progress = time.monotonic()
            self._mixed += int(batch.spans.mixed.sum())
            for group in sorted(pieces):
                rows = pieces[group]
                self._queue.deliver(group, int(oldest[rows].min()), _Piece(batch, rows), flat=flat[group])
            self._changed.notify_all()

    def _is_flat(self, piece: _Piece) -> bool:
        return self._filter is not None and not self._filter.differing(piece.batch.take(piece.rows)).all()

    def _tell_loads(self, first: LoadReport | None, beside: Beside) -> None:
        for load in (first, *(load for _, load in beside)):
            if load is not None and not self._closed:
                self._on_load(load)

    def _give_back(self, name: str) -> None:
        with self._changed:
            self._queue.give_back(name)
            self._changed.notify_all()

    def _made_good(self, name: str, why: Exception) -> bool:
        """Start a lost explorer again, if that is allowed; the others go on meanwhile, and without it."""
        if self._closed:
            return False
        with self._changed:
            self._alive.discard(name)
        with self._inside(name):
            back = self._members.replace(name, why)
        with self._changed:
            if back:
                self._alive.add(name)
                self._progress = time.monotonic()
            left = sorted(self._alive)
        if back:
            return True
        hint = f"See logs/{name}.log. Set explorer.max_restarts above 0 to have explorers restarted"
        if left:
            self._report(name, f"{why}; the run goes on with {', '.join(left)}. {hint}")
        elif not self._starting_again():
            self.fail(RunError(f"{why}, and no other explorer is left. {hint}"))
        return False

    def _starting_again(self) -> bool:
        """Tell whether another explorer is being started in place of a lost one."""
        with self._changed:
            return bool(self._busy)

    def _report(self, name: str, error: str) -> None:
        if not self._closed:
            self._on_fault(name, error)

    @contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        """Note that an explorer's thread waits for its explorer."""
        with self._changed:
            self._busy.add(name)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(name)


def _drawn(taken: UpdateGroups[_Piece]) -> Drawn:
    filled, left_out = len(taken.filled), len(taken.left_out)
    groups = [*taken.groups, *taken.filled, *taken.left_out]
    return Drawn(_assemble(groups), len(groups), flat=filled + left_out, filled=filled, surplus=0)


def _assemble(groups: Sequence[ReadyGroup[_Piece]]) -> SampleBatch:
    """Join the samples of all groups, sorted. Pieces of one batch are cut out of it together."""
    pieces = [group.samples for group in groups]
    rows: dict[int, list[NDArray[np.int64]]] = {}
    batches = {id(piece.batch): piece.batch for piece in pieces}
    for piece in pieces:
        rows.setdefault(id(piece.batch), []).append(piece.rows)
    return SampleBatch.concatenate([batches[key].take(np.concatenate(parts)) for key, parts in rows.items()]).sorted()
