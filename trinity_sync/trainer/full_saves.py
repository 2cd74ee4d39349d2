"""Full checkpoints as the loop sees them, and weights-only ones as the checkpoint sync mode sees them: the driver's
side of the monitor.

A full save, step by step: `begin` makes the staging folder and announces the parts; all ranks copy their state (the
trainer is blocked for that only) and write it in the background; the driver adds its own part and the version digest;
the monitor commits. `poll` records what was committed meanwhile; `finish` waits for the rest.

A save that fails does not end the run: it is recorded as a fault at once, the checkpoint before it stays in force, and
the next save is tried. Where the newest save of a run has failed, `finish` raises it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.calls import ANSWER_S, ended, results
from trinity_sync.actors.monitor_client import Committed, MonitorClient
from trinity_sync.actors.pending import Pending
from trinity_sync.actors.rank_client import RankClient
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.checkpoint.folder.contents import TRAINER_STATE, file_entry
from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.host.interrupts import REST_S, left
from trinity_sync.protocol.parts import CommitMeta, FileEntry, Kind
from trinity_sync.protocol.versions import Version
from trinity_sync.tracking.events import CommitEvent, Event, PruneEvent
from trinity_sync.trainer.group import TrainerGroup
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shard_file import ShardFile

# The part of a weights-only save that brings the version digest. A full save of the same step has a "driver" part.
_DIGEST = "weights-digest"


# The ranks are between two steps when they are asked, or gone.
_ASK_S = 30.0

# A rank waits for its earlier save, for the agent and for the other ranks, within the limit each, and tells itself what
# did not come: then the save fails, and the run goes on.
_WAITS_OF_A_RANK = 3


class SaveLog(Protocol):
    """Where saves report."""

    def event(self, event: Event) -> None:
        """Record one event."""
        ...

    def fault(self, where: str, error: BaseException | str) -> None:
        """Record that something failed."""
        ...

    def saving(self, step: int) -> None:
        """Take note that a save has begun."""
        ...


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """What every save of a run has in common.

    Attributes:
        attempt: the run's attempt.
        seed: the run's seed.
        meta: manifest fields: backend, world_size, config_digest, wire; of an adapter base.
        ranks: names of the ranks' parts.
        timeout_s: limit from the announcement to the commit, seconds (`checkpoint.timeout_s`).
        of_versions: what is saved is what is published. Else a version's digest says nothing of it, and manifests of
            full checkpoints have none.
    """

    attempt: int
    seed: int
    meta: CommitMeta
    ranks: list[str]
    timeout_s: float
    of_versions: bool = True


Late = Callable[[int], Mapping[str, float] | None]
"""Gives the metrics of a step that come after its save has begun; None: not yet."""


class _Untold(NamedTuple):
    """A save of which the monitor lacks the driver's part, held back until `until` at the latest."""

    step: int
    files: list[FileEntry]
    digest: str | None
    metrics: dict[str, float]
    late: Late | None
    until: float


class FullSaves:
    """Full checkpoints of a run.

    Args:
        monitor: the checkpoint monitor.
        trainer: the group of ranks.
        settings: see `SaveSettings`.
        log: takes what is reported.
        published: saves what explorers hold; None where there are none.
    """

    def __init__(
        self,
        monitor: MonitorClient,
        trainer: TrainerGroup,
        settings: SaveSettings,
        log: SaveLog,
        published: PublishedState | None = None,
    ) -> None:
        self._published = published
        self._monitor = monitor
        self._trainer = trainer
        self._settings = settings
        self._log = log
        self._pending: dict[Pending[Committed], tuple[int, float, float]] = {}
        self._untold: list[_Untold] = []
        self._telling = threading.RLock()
        self._failed: dict[int, TrinityError] = {}
        self._succeeded = -1

    def begin(
        self,
        step: int,
        digest: str | None,
        metrics: dict[str, float],
        *,
        published: bool = True,
        state: Mapping[str, Mapping[str, object] | None] | None = None,
        late: Late | None = None,
    ) -> None:
        """Start a full checkpoint of the state after `step`. All ranks are between steps. It is not committed before
        the next call of `poll`.

        Args:
            step: the global step.
            digest: version digest of the weights, None where versions are not digested.
            metrics: the step's metrics, for the manifest and the retention policies.
            published: the explorers hold the version of this step; else what they hold is saved, too.
            state: what of the driver a resume needs: under ``data`` where the run is in its data
                (`samples.position.Position`), under ``algorithm`` what changes from step to step; empty ones are not
                written.
            late: see `Late`; the commit waits for it, half of `SaveSettings.timeout_s` at most. None: there is nothing
                 more to come.

        Raises:
            TrinityError: a rank is gone, or the monitor.
        """
        self.poll()
        self._log.saving(step)
        try:
            self._begin(step, digest, metrics, published, state or {}, late)
        except _SaveFailed as failure:
            self._monitor.fail_step(step, str(failure), attempt=self._settings.attempt)
            self._fail(step, self._first_failure(step) or failure)

    def _begin(
        self,
        step: int,
        digest: str | None,
        metrics: dict[str, float],
        published: bool,
        given: Mapping[str, Mapping[str, object] | None],
        late: Late | None,
    ) -> None:
        settings = self._settings
        behind = self._published if not published else None
        parts = [*settings.ranks, *(behind.parts() if behind is not None else ()), "driver"]
        began = time.time()
        try:
            folder = _begin(self._monitor, Version(settings.attempt, step), "full", parts, settings, metrics)
        except TrinityError as error:
            raise _SaveFailed(str(error)) from error
        call = self._monitor.wait_committed(step, settings.attempt, settings.timeout_s, kind="full")
        limit = _WAITS_OF_A_RANK * settings.timeout_s + _ASK_S
        blocked = self._trainer.all(lambda rank: rank.save(step, str(folder)), limit)
        self._pending[call] = (step, max(blocked), began)
        state: dict[str, object] = {"step": step, "attempt": settings.attempt, "seed": settings.seed}
        state["next_data_step"] = step + 1
        state |= {name: value for name, value in given.items() if value}
        texts = {TRAINER_STATE: json.dumps(state, indent=2) + "\n"}
        if behind is not None:
            texts |= dict([behind.save(step, folder)])
        try:
            for name, text in texts.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text)
            files = [file_entry(folder, name) for name in texts]
        except OSError as error:
            raise _SaveFailed(f"{error.filename or folder}: {error.strerror}") from error
        digest = digest if settings.of_versions else None
        until = time.monotonic() + settings.timeout_s / 2
        with self._telling:
            self._untold.append(_Untold(step, files, digest, metrics, late, until))
        if late is not None:  # a step may take longer than that
            overdue = threading.Timer(settings.timeout_s / 2, self._tell_overdue)
            overdue.daemon = True
            overdue.start()

    def _tell(self, timeout_s: float | None = None, *, at_once: bool = False) -> None:
        """Tell the monitor of the driver's part, which lets the step be committed: when the step is on record, so that
        no run goes on from one that is not, and what comes late is there. `at_once`: that is not waited for.
        """
        limit = self._settings.timeout_s if timeout_s is None else timeout_s
        with self._telling:
            while self._untold:
                untold = self._untold[0]
                late = untold.late(untold.step) if untold.late is not None else {}
                if late is None and not at_once and time.monotonic() < untold.until:
                    return
                del self._untold[0]
                self._tell_one(untold, late or {}, limit)

    def _tell_overdue(self) -> None:
        """Tell without what comes late where that has not come for too long; on a thread of its own."""
        with self._telling:
            while self._untold and time.monotonic() >= self._untold[0].until:
                untold = self._untold.pop(0)
                try:
                    self._tell_one(untold, {}, self._settings.timeout_s)
                except TrinityError as error:
                    self._fail(untold.step, error)

    def _tell_one(self, untold: _Untold, late: Mapping[str, float], limit: float) -> None:
        step, attempt = untold.step, self._settings.attempt
        if late:
            metrics = {**untold.metrics, **late}
            try:
                _begin(self._monitor, Version(attempt, step), "full", [], self._settings, metrics)
            except TrinityError as error:  # a part has failed meanwhile
                self._fail(step, self._first_failure(step) or error)
                return
        told = self._monitor.notify_finished(
            step, part="driver", attempt=attempt, files=untold.files, digest=untold.digest
        )
        told.result(limit)

    def poll(self) -> None:
        """Let the save be committed that the step began, which is on record by now, and record the saves that ended
        since the last call. Called after each step; waits for none.
        """
        self._tell()
        while self._pending:
            done = next(iter(ended(self._pending)), None)
            if done is None:
                return
            self._collect(done)

    def finish(self) -> None:
        """Wait for all saves and for the background work of the ranks.

        Raises:
            TrinityError: what the newest save failed of.
        """
        settings = self._settings
        self._tell(at_once=True)
        finished = self._trainer.begin(RankClient.finish_saves)  # before: from here on there is nothing to yield to
        for call in list(self._pending):
            self._collect(call, settings.timeout_s + ANSWER_S)
        self._raise_failure()
        finished(settings.timeout_s)

    def settle(self, seconds: float) -> None:
        """For a run that ends early: give the saves under way a last chance to commit, and record what became of it."""
        try:
            self._tell(seconds, at_once=True)
        finally:
            if self._pending:
                self._trainer.begin(RankClient.finish_saves)  # by those that live; hurried
                ended(self._pending, left(seconds, REST_S))
            self.poll()

    def _collect(self, call: Pending[Committed], timeout_s: float = 1.0) -> None:
        step, blocked, began = self._pending[call]
        try:
            result = call.result(timeout_s)
        except TrinityError as error:
            self._fail(step, error)
            del self._pending[call]
            return
        del self._pending[call]  # not where the wait was interrupted: `settle` takes that up
        self._succeeded = max(self._succeeded, step)
        record_commit(self._log, result, self._blocked(step, blocked), began)

    def _first_failure(self, step: int) -> TrinityError | None:
        """Return what the monitor was told first of a step that has failed: what a rank failed of, because of which the
        folder is gone, says more than that it is gone.
        """
        for call, (pending, *_) in self._pending.items():
            if pending == step:
                try:
                    call.result(_ASK_S)
                except TrinityError as error:
                    return None if isinstance(error, WaitTimeout) else error
        return None

    def _fail(self, step: int, error: TrinityError) -> None:
        # The wait for the commit and the driver's own part may both tell of one failure.
        if step not in self._failed:
            self._log.fault(f"save of step {step}", error)
            self._failed[step] = error

    def _blocked(self, step: int, begun: float) -> float:
        """With what the optimizer's step waited after the save had begun, where the ranks can still say."""
        try:
            waited = self._trainer.all(lambda rank: rank.save_blocked(step), _ASK_S)
            return max(*waited, begun)
        except TrinityError:
            return begun

    def _raise_failure(self) -> None:
        newest = max(self._failed, default=-1)
        if newest > self._succeeded:
            error = self._failed[newest]
            raise RunError(f"the newest checkpoint could not be saved: {error}") from error


def driver_state(folder: Path, name: str) -> Mapping[str, object] | None:
    """Read what `FullSaves.begin` was given as `state`, under one of its names, for the checkpoint in this folder;
    None: nothing, as of earlier releases and other programs.
    """
    try:
        state: dict[str, Any] = json.loads((folder / TRAINER_STATE).read_text())
    except FileNotFoundError:  # verl's and Trinity's checkpoints have no such file
        return None
    return state.get(name)


class _SaveFailed(RunError):  # noqa: N818 - it says what happened
    """The driver's share of a save failed."""


class WeightSaves:
    """Weights-only checkpoints of the checkpoint sync mode (`sync.checkpoint.StateDictStore`).

    Args:
        monitor: the checkpoint monitor.
        settings: see `SaveSettings`.
        log: takes what is reported.
        durable: make the commits survive a power cut (`sync.durable`).
    """

    def __init__(self, monitor: MonitorClient, settings: SaveSettings, log: SaveLog, durable: bool) -> None:
        self._monitor = monitor
        self._settings = settings
        self._log = log
        self._durable = durable
        self._began: dict[Version, float] = {}

    def begin(self, version: Version, nodes: list[str]) -> Path:
        self._began = {version: time.time()}
        parts = [*(f"weights-{node}" for node in nodes), _DIGEST]
        return _begin(self._monitor, version, "state_dict", parts, self._settings, {}, durable=self._durable)

    def part_written(self, version: Version, node: str, files: list[tuple[str, int, str]]) -> None:
        entries = [FileEntry(path=path, bytes=nbytes, xxh3_128=digest) for path, nbytes, digest in files]
        self._notify(version, f"weights-{node}", entries, None)

    def commit(self, version: Version, digest: str | None) -> Path:
        self._notify(version, _DIGEST, [], digest)
        limit = self._settings.timeout_s
        call = self._monitor.wait_committed(version.step, version.attempt, limit, kind="state_dict")
        result = call.result(limit + ANSWER_S)
        record_commit(self._log, result, 0.0, self._began.get(version))
        assert result["path"] is not None, "a run has a checkpoint folder"
        return Path(result["path"])

    def fail(self, version: Version, error: str) -> None:
        self._monitor.fail_step(version.step, error, attempt=version.attempt)

    def _notify(self, version: Version, part: str, files: list[FileEntry], digest: str | None) -> None:
        told = self._monitor.notify_finished(
            version.step, True, part=part, attempt=version.attempt, files=files, digest=digest
        )
        told.result(self._settings.timeout_s)


def record_commit(log: SaveLog, result: Committed, blocked_s: float, began: float | None) -> None:
    """Write the events of a commit and of what retention removed after it. Weights that lie beside the step's folder
    are no checkpoint of the run.

    Args:
        log: takes them.
        result: what the monitor told.
        blocked_s: seconds in which training stood still.
        began: when the save began, in Unix seconds.
    """
    if not result["beside"]:
        log.event(
            CommitEvent(
                step=result["step"],
                kind=result["kind"],
                digest=result["digest"],
                bytes=result["bytes"],
                blocked_s=blocked_s,
                written_s=result["written_s"],
                total_s=result["total_s"],
                began=began,
                base=result["base"],
            )
        )
    for pruned in result["pruned"]:
        log.event(PruneEvent(**pruned))


def _begin(
    monitor: MonitorClient,
    version: Version,
    kind: Kind,
    parts: list[str],
    settings: SaveSettings,
    metrics: dict[str, float],
    durable: bool | None = None,
) -> Path:
    meta: CommitMeta = {**settings.meta, "metrics": metrics}
    call = monitor.begin(version.step, version.attempt, kind, parts, meta, durable=durable)
    return Path(call.result(settings.timeout_s))


# What the explorers hold, kept in a full checkpoint where it is not the checkpoint's own weights.


EXPLORER = "explorer"
"""Folder of the shard files below the checkpoint's."""

_FILE = "version.json"


class PublishedState:
    """Saves and restores the newest published version.

    Args:
        synchronizer: the run's synchronizer.
        agents: the agents of the nodes that hold parts, by Ray node id.
        timeout_s: limit of each wait, seconds.
    """

    def __init__(self, synchronizer: SynchronizerClient, agents: Mapping[str, AgentClient], timeout_s: float) -> None:
        self._synchronizer = synchronizer
        self._agents = agents
        self._timeout_s = timeout_s

    def parts(self) -> list[str]:
        """Name the parts that `save` adds to a checkpoint."""
        return [_part(node) for node in self._agents]

    def save(self, step: int, folder: Path) -> tuple[str, str]:
        """Have the agents write the newest published version into a staging folder, and report it; does not wait.

        Returns:
            (name below `folder`, contents) of a file that goes into the driver's part.
        """
        synchronizer = self._synchronizer
        newest = synchronizer.newest().result(synchronizer.timeout_s)
        assert newest is not None, "explorers hold a version before the first step"
        for node, agent in self._agents.items():
            leased = synchronizer.lease(f"{_part(node)} of step {step}", newest)
            agent.save_published(step, str(folder), _part(node), leased.result(synchronizer.timeout_s))
        return f"{EXPLORER}/{_FILE}", json.dumps({"step": newest.step}) + "\n"

    def restore(self, folder: Path, version: Version, slot: int) -> None:
        """Have the agents fill a slot with what `save` wrote below the checkpoint's `folder`, as the ranks would."""
        calls = [agent.restore_published(version, slot, str(folder / EXPLORER)) for agent in self._agents.values()]
        results(calls, self._timeout_s)


def published_step(folder: Path, layouts: Sequence[PartLayout]) -> int | None:
    """Read the step of the version in a checkpoint's folder that explorers held; None: there is none, or it cannot be
    restored part by part.

    Args:
        folder: the checkpoint's folder.
        layouts: of the run's parts. Those that were saved are others where other ranks saved them, or where something
            else was published, or in other dtypes.

    Raises:
        RunError: a file cannot be read.
    """
    path = folder / EXPLORER / _FILE
    if not path.exists():
        return None
    wanted = {f"{layout.part}.safetensors": layout for layout in layouts}
    saved = {file.name: file for file in (folder / EXPLORER).glob("*.safetensors")}
    if saved.keys() != wanted.keys() or not all(_layout_of(file).lies_as(wanted[name]) for name, file in saved.items()):
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _layout_of(path: Path) -> PartLayout:
    with ShardFile(path) as file:
        return file.layout


def _part(node: str) -> str:
    return f"{EXPLORER}-{node}"
