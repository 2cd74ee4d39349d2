"""The samples of a GRPO run: of `trainer.schedule=lockstep`, with the empty data of `workload=bytes`, and of `free`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trinity_sync.actors.calls import DeathError
from trinity_sync.actors.explorer_client import LOAD_TRIES, Beside, LoadError, LoadReport, Production
from trinity_sync.errors import ProcessLoss, RunError, WaitTimeout
from trinity_sync.explorer.pool import ExplorerPool
from trinity_sync.host import interrupts
from trinity_sync.host.logs import log_failure
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.advantages import DrawnGroups, GroupFilter, Judge
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.samples.journal import Journal, UpdateGroupIds
from trinity_sync.samples.metrics import Line, excerpt
from trinity_sync.samples.position import GroupId, Numbering, Position, SavedPosition
from trinity_sync.samples.queue import GroupQueue, QueueRules, ReadyGroup, UpdateGroups
from trinity_sync.samples.record import Prompt
from trinity_sync.sync.base import Publisher
from trinity_sync.tasks.base import prompts_of

if TYPE_CHECKING:
    from trinity_sync.explorer.validation import VersionValidations
    from trinity_sync.tasks.base import Task


class RolloutData:
    """The `Data` of a run whose explorers generate each step's batch from the task's prompts. `mode`: the sync mode, by
    which they load. `group_filter`: leaves out groups, in place of which further prompts are answered; None: keeps all.
    `journal`: has samples that were finished before.
    """

    def __init__(
        self,
        task: Task,
        pool: ExplorerPool,
        mode: Publisher,
        *,
        numbering: Numbering,
        samples_per_prompt: int,
        judge: Judge,
        group_filter: GroupFilter | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._task = task
        self._pool = pool
        self._mode = mode
        self._journal = journal
        self._digest: str | None = None
        self._numbering = numbering
        self._samples_per_prompt = samples_per_prompt
        self._judge = judge
        self._filter = group_filter
        self._following = numbering
        self._drawn: DrawnGroups | None = None
        self._prompts: tuple[int, Sequence[Prompt]] = (0, ())

    def batch(self, step: int) -> SampleBatch:
        if step >= self._following.step:
            self._numbering = self._following
        self._prompts, self._drawn = (step, ()), None
        drawn = self._draw(step)
        if self._filter is None:
            return drawn
        while (chosen := self._filter.choose(step, drawn)) is None:
            drawn = SampleBatch.concatenate([drawn, self._draw(step)])
        self._following, self._drawn = self._numbering.after(step, chosen.used), chosen.drawn
        return chosen.batch

    def _draw(self, step: int) -> SampleBatch:
        """Have one more step's number of prompts answered."""
        earlier = self._prompts[1]
        prompts = prompts_of(self._task, self._numbering, step, len(earlier))
        self._prompts = step, [*earlier, *prompts]
        journal = self._journal.of_step(step, self._digest) if self._journal is not None and self._digest else None
        return self._pool.generate(step, prompts, self._samples_per_prompt, self._mode.deliver, journal=journal)

    def drawn(self) -> DrawnGroups | None:
        return self._drawn

    def advantages(self, batch: SampleBatch) -> np.ndarray:
        return np.asarray(self._judge(batch))

    def position(self, step: int) -> Mapping[str, object]:
        return Position(self._following, GroupId(step + 1, 0)).to_json()

    def load(self, version: Version) -> list[LoadReport]:
        reports = self._pool.load(version, self._mode.deliver)
        digests = {report.digest for report in reports}
        self._digest = digests.pop() if len(digests) == 1 else None
        return reports

    def excerpt(self, batch: SampleBatch, advantages: np.ndarray | None, groups: int) -> list[Line]:
        return excerpt(batch, advantages, groups, self._prompt)

    def _prompt(self, step: int, number: int) -> Prompt:
        prompts_step, prompts = self._prompts
        assert step == prompts_step, "an excerpt is of the last batch"
        return prompts[number]


class NoData:
    """The `Data` of `workload=bytes`: empty batches, and explorers that load each version. `mode`: the sync mode, by
    which they load.
    """

    def __init__(self, pool: ExplorerPool, mode: Publisher) -> None:
        self._pool = pool
        self._mode = mode

    def batch(self, step: int) -> PairBatch:
        return PairBatch.of([], [])

    def advantages(self, batch: PairBatch) -> None:
        return None

    def drawn(self) -> None:
        return None

    def position(self, step: int) -> None:
        return None

    def load(self, version: Version) -> list[LoadReport]:
        return self._pool.load(version, self._mode.deliver)

    def excerpt(self, batch: PairBatch, advantages: object, groups: int) -> list[Line]:
        return []


# The samples of a run with `trainer.schedule=free`.


GRACE_S = 5.0
"""Limit of an explorer's current call when the run ends."""

_KILLED_S = 5.0


class _Piece(NamedTuple):
    """A group's samples: rows of one call's batch."""

    batch: SampleBatch
    rows: NDArray[np.int64]


class FreeRollout:
    """Keeps all explorers of a run busy, and gives the trainer its batches.

    Args:
        position: `position` of an earlier attempt; None: begin with the prompts of `first`.
        explorer_timeout_s: limit of the trainer's wait without any delivery, seconds.
        on_load: called with each load, on an explorer's thread.
        on_fault: called with each lost explorer and each failed load: (where, error).
        group_filter: tells which groups are flat, where `rules` count them; None: none is.
        validations: come before all other work; None: no validation.
        journal: has groups that earlier attempts finished; None: there is none.
        outlives: `pause` leaves the choice between `go_on_alone` and `close` to its caller.

    Attributes:
        alone: it goes on without the trainer.
        made: groups made since `pause`.
        lost: explorers that have died or hung while it was alone.
    """

    def __init__(
        self,
        task: Task,
        pool: ExplorerPool,
        rules: QueueRules,
        *,
        samples_per_prompt: int,
        judge: Judge,
        first: int,
        position: SavedPosition | None,
        explorer_timeout_s: float,
        on_load: Callable[[LoadReport], None],
        on_fault: Callable[[str, str], None],
        group_filter: GroupFilter | None = None,
        validations: VersionValidations | None = None,
        journal: Journal | None = None,
        outlives: bool = False,
    ) -> None:
        self._outlives = outlives
        self.alone = False
        self.made = 0
        self.lost: set[str] = set()
        self._filter = group_filter
        self._drawn: DrawnGroups | None = None
        self._validations = validations
        self._task = task
        self._pool = pool
        self._rules = rules
        self._samples_per_prompt = samples_per_prompt
        self._judge = judge
        self._timeout_s = explorer_timeout_s
        self._on_load = on_load
        self._on_fault = on_fault
        self._queue: GroupQueue[_Piece] = GroupQueue(rules, first, time.monotonic, position)
        self._journal = journal
        self._repeats: dict[int, UpdateGroups[_Piece]] = {}
        self._finished: list[tuple[ReadyGroup[_Piece], bool]] = []
        if journal is not None:
            self._take_up(journal, first)
        self._changed = threading.Condition()
        self._alive = set(pool.clients)
        self._busy: set[str] = set()
        self._error: BaseException | None = None
        self._closed = self._over = False  # no more work for the trainer; none at all
        self._progress = time.monotonic()
        self._waited_s = 0.0
        self._mixed = 0
        self._reported = (0, 0.0, 0)
        self._prompts: dict[int, Sequence[Prompt]] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(name,), name=name, daemon=True) for name in pool.clients
        ]

    # -- called by the training loop

    def start(self) -> None:
        """Start the explorers' threads; each begins once its explorer is up and a version is published."""
        self._progress = time.monotonic()
        for thread in self._threads:
            thread.start()

    def published(self, step: int) -> None:
        """Announce that the version of this step can be loaded. Any thread."""
        if self._validations is not None:
            self._validations.published(step)
        with self._changed:
            self._queue.publish(step)
            self._changed.notify_all()

    def take(self, step: int) -> SampleBatch:
        """Return the samples for an update, sorted. Waits while too few are ready."""
        began = time.monotonic()  # the explorers may have been idle before
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                assert step == self._queue.step, "updates are taken in order"
                repeats = step in self._repeats
                taken = self._repeated(step) if repeats else self._queue.take()
                # In either case explorers may go on: places are free, or overdue groups are handed out again.
                self._changed.notify_all()
                if taken is not None:
                    break
                left = max(self._progress, began) + self._timeout_s - time.monotonic()
                if left <= 0:
                    who = ", ".join(self._queue.explorers_out()) or "the explorers"
                    raise WaitTimeout(who, f"make the samples of step {step}", self._timeout_s)
                self._changed.wait(left)
        if self._journal is not None and not repeats:
            self._journal.took(step, UpdateGroupIds(*([one.group for one in part] for part in taken)))
        if self._filter is not None:
            self._drawn = _drawn(taken)
            self._filter.check_filled(step, self._drawn.filled, self._drawn.groups)
        return _assemble([*taken.groups, *taken.filled])

    def _take_up(self, journal: Journal, first: int) -> None:
        """Take up the steps and the finished groups of earlier attempts."""
        taken, finished = journal.go_on(first - 1, self._queue.is_open)
        left = {group for group in finished if self._queue.is_open(group)}  # flat ones of a step need not be
        self._queue.reserve(left)
        ready = {
            group: ReadyGroup(one.version_step, group, _Piece(one.batch, one.rows)) for group, one in finished.items()
        }
        for step, groups in taken.items():
            self._repeats[step] = UpdateGroups(*([ready[group] for group in part] for part in groups))
            left.difference_update(groups.all())
        self._finished = [(ready[group], finished[group].flat) for group in sorted(left)]
        if not self._repeats:
            self._restore()

    def _repeated(self, step: int) -> UpdateGroups[_Piece]:
        """Return the groups that an earlier attempt took for a step."""
        taken = self._repeats.pop(step)
        self._queue.repeat(one.group for part in taken for one in part)
        if not self._repeats:
            self._restore()
        return taken

    def _restore(self) -> None:
        for ready, flat in self._finished:
            self._queue.restore(ready.group, ready.version_step, ready.samples, flat=flat)
        self._finished = []

    def drawn(self) -> DrawnGroups | None:
        """Return all groups used up for the last batch; None: they are the batch."""
        return self._drawn

    def metrics(self) -> dict[str, float]:
        """Return dropped samples, samples of mixed versions and seconds of idle explorers since the last call, and the
        present numbers of ready samples and of explorers.
        """
        with self._changed:
            now = (self._queue.dropped, self._waited_s, self._mixed)
            dropped, waited, mixed = (new - old for new, old in zip(now, self._reported, strict=True))
            self._reported = now
            return {
                "samples/dropped": float(dropped * self._samples_per_prompt),
                "samples/waited_s": waited,
                "samples/mixed": float(mixed),
                "samples/ready": float(self._queue.ready * self._samples_per_prompt),
                "samples/explorers": float(len(self._alive)),
            }

    def position(self) -> SavedPosition:
        """Return the position in the task's prompts, for a checkpoint of the last step."""
        with self._changed:
            return self._queue.position()

    def advantages(self, batch: SampleBatch) -> np.ndarray:
        return np.asarray(self._judge(batch))

    def excerpt(self, batch: SampleBatch, advantages: np.ndarray | None, groups: int) -> list[Line]:
        return excerpt(batch, advantages, groups, lambda step, number: self._prompts_of(step)[number])

    def fail(self, error: BaseException) -> None:
        """Have `take` raise an error. Any thread; the first error counts."""
        if self._validations is not None:
            self._validations.fail(error)
        with self._changed:
            if self._error is None and not self._closed:
                self._error = error
            self._changed.notify_all()

    @property
    def paused(self) -> bool:
        """Whether `pause` was called and the threads may still write to the journal."""
        return self._closed and not self._over

    def pause(self) -> None:
        """End the work for a trainer that has failed, but not the explorers' calls; without `outlives`, close."""
        if not self._outlives:
            self.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def go_on_alone(self, names: Collection[str]) -> None:
        """After `pause`, have these explorers generate for the next attempt until `close`, with the versions that they
        hold. Kills the others that are busy.
        """
        with self._changed:
            self.alone, self._alive = True, {*names}
            others = sorted(self._busy - self._alive)
        self._end(others)
        before = {thread.name: thread for thread in self._threads}
        following = [
            threading.Thread(target=self._serve_alone, args=(name, before[name]), name=name, daemon=True)
            for name in sorted(names)
        ]
        self._threads += following
        for thread in following:
            thread.start()

    def close(self, grace_s: float | None = None) -> None:
        """End the explorers' threads and the journal; kill explorers busy after `grace_s` (None: `GRACE_S`)."""
        with self._changed:
            self._closed = self._over = True
            self._changed.notify_all()
        deadline = time.monotonic() + interrupts.left(GRACE_S if grace_s is None else grace_s, interrupts.REST_S)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        try:
            self._end(sorted(self._busy))  # a thread must not be in a call when Ray shuts down
            deadline = time.monotonic() + interrupts.left(_KILLED_S, interrupts.REST_S)
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(max(0.0, deadline - time.monotonic()))
        finally:
            if self._journal is not None:
                self._journal.close()

    def _end(self, names: Collection[str]) -> None:
        """Kill explorers, as far as Ray can."""
        for name in names:
            try:
                self._pool.end(name)
            except Exception as error:
                log_failure(f"the end of {name}", error)

    # -- an explorer's thread

    def _serve(self, name: str) -> None:
        try:
            with self._inside(name):
                lost = self._join(name)
            while lost is None or self._replaced(name, lost):
                lost = self._work(name)
                if lost is None:
                    return
        except BaseException as error:
            self.fail(error)

    def _serve_alone(self, name: str, before: threading.Thread) -> None:
        """Have an explorer generate once the call of its earlier thread has ended. An error ends this thread only: the
        next attempt meets it if it comes again.
        """
        try:
            before.join()  # its call has a timeout
            with self._inside(name):
                held = None if self._over else self._pool.leave(name)
            while held is not None and (groups := self._wait_alone(name, held)):
                for step, prompts in self._prompts_by_step(groups):
                    with self._inside(name):
                        if self._over:  # Ray may be about to end
                            return
                        batch = self._pool.go_on(name, step, prompts, self._samples_per_prompt)
                    self._deliver(Production(batch, None))
        except Exception as error:
            log_failure(f"{name}, while the run goes on", error)
            if isinstance(error, (DeathError, WaitTimeout)):
                self.lost.add(name)
        finally:
            self._give_back(name)

    def _wait_alone(self, name: str, held: Version) -> list[GroupId]:
        """Return the next groups to generate with a version, as the bound allows; none: the next attempt begins."""
        with self._changed:
            while not self._over:
                if groups := self._queue.hand_out(name, self._share(), held.step):
                    return groups
                self._changed.wait()
            return []

    def _join(self, name: str) -> Exception | None:
        try:
            self._pool.join(name)
        except (DeathError, WaitTimeout) as error:
            return error
        return None

    def _work(self, name: str) -> Exception | None:
        """Have an explorer generate until the run ends (None), or until the explorer is lost: return the error."""
        failures = 0
        while (work := self._wait_for_work(name)) is not None:
            if isinstance(work, int):
                if (lost := self._validate(name, work)) is not None:
                    return lost
                continue
            prompts = self._prompts_by_step(work)
            try:
                with self._inside(name):
                    if self._over:  # Ray may be about to end
                        return None
                    produced = self._pool.produce(name, prompts, self._samples_per_prompt)
            except LoadError as error:
                failures += 1
                self._report_loads(error.load, error.beside)
                self._give_back(name)
                if failures == LOAD_TRIES:
                    return error
                self._report(name, str(error))
            except (DeathError, WaitTimeout) as error:
                self._give_back(name)
                return error
            else:
                failures = 0
                self._report_loads(produced.load, produced.beside)
                if produced.failed is not None:
                    self._report(name, produced.failed)
                self._deliver(produced)
        return None

    def _validate(self, name: str, step: int) -> Exception | None:
        """Have an explorer validate the version of a step; if it is lost, return the error."""
        assert self._validations is not None, "it handed out the step"
        try:
            with self._inside(name):
                self._validations.run(name, step, self._go_on_validating)
        except (DeathError, WaitTimeout) as error:
            return error
        finally:
            self._note_progress()
        return None

    def _go_on_validating(self) -> None:
        if self._closed:
            raise RunError("the run ended within a validation")
        self._note_progress()

    def _note_progress(self) -> None:
        with self._changed:
            self._progress = time.monotonic()
            self._changed.notify_all()

    def _wait_for_work(self, name: str) -> list[GroupId] | int | None:
        """Return the next groups to generate, or the step of a version to validate; None: the run is over."""
        began = time.monotonic()
        with self._changed:
            most = self._share()
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

    def _share(self) -> int:
        """Return the most groups of one call: with fewer explorers than the settings have it stays, as its limit."""
        return -(-self._rules.groups_per_step // self._pool.replicas)

    def _prompts_by_step(self, groups: Collection[GroupId]) -> list[tuple[int, list[Prompt]]]:
        by_step = groupby(sorted(groups), key=lambda group: group.step)
        return [(step, [self._prompts_of(step)[group.prompt] for group in members]) for step, members in by_step]

    def _prompts_of(self, step: int) -> Sequence[Prompt]:
        with self._changed:
            if step not in self._prompts:
                while len(self._prompts) > 16:  # prompts of a late group are built again
                    del self._prompts[next(iter(self._prompts))]
                self._prompts[step] = prompts_of(self._task, self._queue.numbering, step)
            return self._prompts[step]

    def _deliver(self, produced: Production) -> None:
        batch = produced.batch
        pieces = {
            GroupId(int(step), int(prompt)): np.flatnonzero((batch.steps == step) & (batch.prompts == prompt))
            for step, prompt in {*zip(batch.steps.tolist(), batch.prompts.tolist(), strict=True)}
        }
        oldest = batch.version_steps
        flat = {group: self._is_flat(_Piece(batch, rows)) for group, rows in pieces.items()}
        if self._journal is not None:  # before the trainer can take them
            with self._changed:
                wanted = [group for group in pieces if self._queue.expects(group)]
            if wanted:
                rows = np.sort(np.concatenate([pieces[group] for group in wanted]))
                self._journal.append(batch.take(rows), flat=[group for group in wanted if flat[group]])
        with self._changed:
            self._progress = time.monotonic()
            self._mixed += int(batch.spans.mixed.sum())
            for group in sorted(pieces):
                rows = pieces[group]
                made = self._queue.deliver(group, int(oldest[rows].min()), _Piece(batch, rows), flat=flat[group])
                self.made += made and self._closed
            self._changed.notify_all()

    def _is_flat(self, piece: _Piece) -> bool:
        return self._filter is not None and not self._filter.differing(piece.batch.take(piece.rows)).all()

    def _report_loads(self, first: LoadReport | None, beside: Beside) -> None:
        for load in (first, *(load for _, load in beside)):
            if load is not None and not self._closed:
                self._on_load(load)

    def _give_back(self, name: str) -> None:
        with self._changed:
            self._queue.give_back(name)
            self._changed.notify_all()

    def _replaced(self, name: str, why: Exception) -> bool:
        """Restart a lost explorer if restarts are left; the others go on. False: it is gone for good."""
        if self._closed:
            return False
        with self._changed:
            self._alive.discard(name)
        with self._inside(name):
            restarted = self._pool.replace(name, why)
        with self._changed:
            if restarted:
                self._alive.add(name)
                self._progress = time.monotonic()
            left, restarting = sorted(self._alive), bool(self._busy)  # the busy ones: no other explorer is alive
        if restarted:
            return True
        hint = f"See logs/{name}.log. Set explorer.max_restarts above 0 to have explorers restarted"
        if left:
            self._report(name, f"{why}; the run goes on with {', '.join(left)}. {hint}")
        elif not restarting:
            is_lost = isinstance(why, ProcessLoss) or (isinstance(why, LoadError) and why.lost)
            none_left = (ProcessLoss if is_lost else RunError)(f"{why}, and no other explorer is left. {hint}")
            none_left.__cause__ = why
            self.fail(none_left)
        return False

    def _report(self, name: str, error: str) -> None:
        if not self._closed:
            self._on_fault(name, error)

    @contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        """Mark an explorer as busy with a call."""
        with self._changed:
            self._busy.add(name)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(name)


def _drawn(taken: UpdateGroups[_Piece]) -> DrawnGroups:
    filled, left_out = len(taken.filled), len(taken.left_out)
    groups = [*taken.groups, *taken.filled, *taken.left_out]
    return DrawnGroups(_assemble(groups), len(groups), flat=filled + left_out, filled=filled, surplus=0)


def _assemble(groups: Sequence[ReadyGroup[_Piece]]) -> SampleBatch:
    """Join the samples of all groups, sorted. Takes all rows of one batch at once."""
    pieces = [group.samples for group in groups]
    rows: dict[int, list[NDArray[np.int64]]] = {}
    batches = {id(piece.batch): piece.batch for piece in pieces}
    for piece in pieces:
        rows.setdefault(id(piece.batch), []).append(piece.rows)
    return SampleBatch.concatenate([batches[key].take(np.concatenate(parts)) for key, parts in rows.items()]).sorted()
