"""The driver's side of checkpoints: full ones for the training loops, weights-only ones for the checkpoint sync mode.

A full save: `begin` makes the staging folder and announces the parts; all ranks copy their state, which blocks the
trainer, and write it in the background; the driver adds its own part with the version digest; the monitor commits.
`poll` records the commits since the last call; `finish` waits for the rest.

A failed save does not end the run. It is recorded as a fault at once, the checkpoint before it stays in force, and the
next save is tried. If the newest save of a run failed, `finish` raises its error.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.calls import ANSWER_S, ended, results
from trinity_sync.actors.monitor_client import CommitReport, MonitorClient, commit_events
from trinity_sync.actors.pending import PendingCall
from trinity_sync.actors.rank_client import RankClient
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.checkpoint.folder.commits import keep_weights
from trinity_sync.checkpoint.folder.contents import TRAINER_STATE, file_entry
from trinity_sync.errors import ProcessLoss, RunError, TrinityError, WaitTimeout
from trinity_sync.host.interrupts import REST_S, left
from trinity_sync.protocol.parts import CommitMeta, FileEntry, Kind
from trinity_sync.protocol.versions import Version
from trinity_sync.trainer.group import TrainerGroup
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shard_file import ShardFile

if TYPE_CHECKING:
    from trinity_sync.tracking.recorder import Recorder

_DIGEST = "weights-digest"
"""The part of a weights-only save with the version digest; of a full save it is "driver"."""

_ASK_S = 30.0
"""Limit of an answer from ranks that are between two steps."""

_WAITS_OF_A_RANK = 3
"""A rank waits for its earlier save, for the agent and for the other ranks, `checkpoint.timeout_s` each. It reports a
timeout itself: the save fails, and the run goes on.
"""


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """The settings of all saves of a run."""

    attempt: int
    seed: int
    meta: CommitMeta  # manifest fields: backend, world_size, config_digest, wire; of an adapter base
    ranks: list[str]
    save_timeout_s: float  # limit from the announcement to the commit, seconds (`checkpoint.timeout_s`)
    # The saved weights are those that are published. Otherwise manifests of full checkpoints have no version digest.
    of_versions: bool = True


LateMetrics = Callable[[int], Mapping[str, float] | None]
"""Returns metrics of a step that come after its save has begun, such as those of its validation; None: not yet."""


class _DriverPart(NamedTuple):
    """The driver's part of a save before it is reported to the monitor; `deadline` by `time.monotonic`."""

    step: int
    files: list[FileEntry]
    digest: str | None
    metrics: dict[str, float]
    late: LateMetrics | None
    deadline: float


class _OpenSave(NamedTuple):
    """A save before its commit: seconds in which the ranks were blocked, and its begin in Unix seconds. `deadline`: of
    the monitor's answer, by `time.monotonic`; it gives the save up in half of the time.
    """

    step: int
    blocked_s: float
    began: float
    deadline: float


class FullSaves:
    """Full checkpoints of a run. `published`: saves the version that explorers hold; None: there are no explorers.
    `committed`: called with the step of each that is committed. `records`: whether they are in the run's record, as
    states in memory are not. `memory`: saves these states.
    """

    def __init__(
        self,
        monitor: MonitorClient,
        trainer: TrainerGroup,
        settings: SaveSettings,
        log: Recorder,
        published: PublishedState | None = None,
        committed: Callable[[int], None] | None = None,
        *,
        records: bool = True,
        memory: FullSaves | None = None,
    ) -> None:
        self._records = records
        self._memory = memory
        self._published = published
        self._committed = committed
        self._monitor = monitor
        self._trainer = trainer
        self._settings = settings
        self._log = log
        self._pending: dict[PendingCall[CommitReport], _OpenSave] = {}
        self._unreported: list[_DriverPart] = []
        self._reporting = threading.RLock()
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
        late: LateMetrics | None = None,
        in_memory: bool = False,
    ) -> None:
        """Start a full checkpoint of the state after `step`. All ranks are between steps. Its commit comes after the
        next call of `poll`. `state`: the driver's state for a resume: under ``data`` the position in the data
        (`samples.position.Position`), under ``algorithm`` the algorithm's state; empty ones are not written.
        `in_memory`: see `keeps`.
        """
        if in_memory:
            assert self._memory is not None, "the run keeps states in memory"
            self._memory.begin(step, digest, metrics, published=published, state=state, late=late)
            return
        self.poll()
        if self._records:
            self._log.saving(step)
        try:
            self._begin(step, digest, metrics, published, state or {}, late)
        except _SaveError as failure:
            self._monitor.fail_step(step, str(failure), attempt=self._settings.attempt)
            self._fail(step, self._first_failure(step) or failure)

    def keeps(self) -> bool:
        """Return whether a state can be kept in memory now: no save is under way, for which the ranks would wait."""
        if self._memory is None:
            return False
        self.poll()
        return not self._pending and not self._memory._pending

    def _begin(
        self,
        step: int,
        digest: str | None,
        metrics: dict[str, float],
        published: bool,
        states: Mapping[str, Mapping[str, object] | None],
        late: LateMetrics | None,
    ) -> None:
        settings = self._settings
        older_version = self._published if not published else None
        parts = [*settings.ranks, *(older_version.parts() if older_version is not None else ()), "driver"]
        began = time.time()
        try:
            folder = _begin(self._monitor, Version(settings.attempt, step), "full", parts, settings, metrics)
        except WaitTimeout:  # the monitor hangs: every later save would block the trainer as long, and fail
            raise
        except TrinityError as error:
            raise _SaveError(str(error)) from error
        call = self._monitor.wait_committed(step, settings.attempt, settings.save_timeout_s, kind="full")
        limit = _WAITS_OF_A_RANK * settings.save_timeout_s + _ASK_S
        blocked = self._trainer.all(lambda rank: rank.save(step, str(folder)), limit)
        deadline = time.monotonic() + 2 * settings.save_timeout_s
        self._pending[call] = _OpenSave(step, max(blocked), began, deadline)
        place = {"step": step, "attempt": settings.attempt, "seed": settings.seed, "next_data_step": step + 1}
        state = {**place, **{name: value for name, value in states.items() if value}}
        texts = {TRAINER_STATE: json.dumps(state, indent=2) + "\n"}
        if older_version is not None:
            texts |= dict([older_version.save(step, folder)])
        try:
            for name, text in texts.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text)
            files = [file_entry(folder, name) for name in texts]
        except OSError as error:
            raise _SaveError(f"{error.filename or folder}: {error.strerror}") from error
        if not settings.of_versions:
            digest = None
        wait_s = settings.save_timeout_s / 2
        with self._reporting:
            self._unreported.append(_DriverPart(step, files, digest, metrics, late, time.monotonic() + wait_s))
        if late is not None:  # `poll` may come later than that: a step may take longer
            overdue = threading.Timer(wait_s, self._report_overdue)
            overdue.daemon = True
            overdue.start()

    def _report(self, timeout_s: float | None = None, *, at_once: bool = False) -> None:
        """Report the driver's parts to the monitor, which then commits. Called when their steps' metrics are on disk,
        so that no run resumes from a step without metrics. `timeout_s`: limit of each report, seconds; None:
        `SaveSettings.save_timeout_s`.
        """
        limit = self._settings.save_timeout_s if timeout_s is None else timeout_s
        with self._reporting:
            while self._unreported:
                part = self._unreported[0]
                late = part.late(part.step) if part.late is not None else {}
                if late is None and not at_once and time.monotonic() < part.deadline:
                    return
                del self._unreported[0]
                self._report_part(part, late or {}, limit)

    def _report_overdue(self) -> None:
        """Report parts whose late metrics did not come in time, without them. Runs on a timer's thread."""
        with self._reporting:
            while self._unreported and time.monotonic() >= self._unreported[0].deadline:
                part = self._unreported.pop(0)
                try:
                    self._report_part(part, {}, self._settings.save_timeout_s)
                except TrinityError as error:
                    self._fail(part.step, error)

    def _report_part(self, part: _DriverPart, late: Mapping[str, float], limit: float) -> None:
        step, attempt = part.step, self._settings.attempt
        if late:
            metrics = {**part.metrics, **late}
            try:
                _begin(self._monitor, Version(attempt, step), "full", [], self._settings, metrics)
            except TrinityError as error:  # a part has failed meanwhile
                self._fail(step, self._first_failure(step) or error)
                return
        call = self._monitor.notify_finished(step, part="driver", attempt=attempt, files=part.files, digest=part.digest)
        call.result(limit)

    def poll(self) -> None:
        """Let the monitor commit the save of the last step, whose metrics are on disk by now, and record the saves that
        ended. Called after each step; does not wait. Raises WaitTimeout: the monitor hangs.
        """
        self._report()
        while done := next(iter(ended(self._pending)), None):
            self._collect(done)
        for call, save in self._pending.items():
            if time.monotonic() > save.deadline and not call.has_ended(ANSWER_S):  # this process may have stood still
                raise WaitTimeout(call.who, call.what, 2 * self._settings.save_timeout_s)
        if self._memory is not None:
            self._memory.poll()

    def finish(self) -> None:
        """Wait for all saves and for the background work of the ranks."""
        settings = self._settings
        self._report(at_once=True)
        finished = self._trainer.begin(RankClient.finish_saves)  # first: from now on saves need not yield to training
        for call in list(self._pending):
            self._collect(call, settings.save_timeout_s + ANSWER_S)
        self._raise_failure()
        finished(settings.save_timeout_s)

    def settle(self, seconds: float) -> None:
        """Give the running saves of a run that ends early so many seconds to commit, and record the results."""
        kinds = [self, *([] if self._memory is None else [self._memory])]
        try:
            for saves in kinds:
                saves._report(seconds, at_once=True)
        finally:
            if pending := [call for saves in kinds for call in saves._pending]:
                self._trainer.begin(RankClient.finish_saves)  # lets the living ranks hurry
                ended(pending, left(seconds, REST_S))
            self.poll()

    def _collect(self, call: PendingCall[CommitReport], timeout_s: float = 1.0) -> None:
        save = self._pending[call]
        try:
            result = call.result(timeout_s)
        except TrinityError as error:
            self._fail(save.step, error)
            del self._pending[call]
            return
        del self._pending[call]  # an interrupted wait leaves it to `settle`
        self._succeeded = max(self._succeeded, save.step)
        if self._records:
            record_commit(self._log, result, self._blocked(save), save.began)
        if self._committed is not None:
            self._committed(save.step)

    def _first_failure(self, step: int) -> TrinityError | None:
        """Return the monitor's first error of a failed step. The error of a rank says more than its consequence, the
        deleted staging folder.
        """
        for call, save in self._pending.items():
            if save.step == step:
                try:
                    call.result(_ASK_S)
                except TrinityError as error:
                    return None if isinstance(error, WaitTimeout) else error
        return None

    def _fail(self, step: int, error: TrinityError) -> None:
        # the wait for the commit and the report of the driver's part may both raise it
        if step not in self._failed:
            what = "save" if self._records else "state in memory"
            self._log.fault(f"{what} of step {step}", error)
            self._failed[step] = error

    def _blocked(self, save: _OpenSave) -> float:
        """Return the seconds in which the ranks were blocked, with those of later optimizer steps if they answer."""
        try:
            return max(*self._trainer.all(lambda rank: rank.save_blocked(save.step), _ASK_S), save.blocked_s)
        except TrinityError:
            return save.blocked_s

    def _raise_failure(self) -> None:
        newest = max(self._failed, default=-1)
        if newest > self._succeeded:
            error = self._failed[newest]
            lost = any(isinstance(one, ProcessLoss) for one in (error, error.__cause__))
            raise (ProcessLoss if lost else RunError)(f"the newest checkpoint could not be saved: {error}") from error


def driver_state(folder: Path, name: str) -> Mapping[str, object] | None:
    """Read one of the driver's states (`FullSaves.begin`) from a checkpoint's folder; None: it has none, as checkpoints
    of earlier releases and of other programs.
    """
    try:
        state: dict[str, Mapping[str, object]] = json.loads((folder / TRAINER_STATE).read_text())
    except FileNotFoundError:  # verl's and Trinity's checkpoints have no such file
        return None
    return state.get(name)


class _SaveError(RunError):
    """The driver's part of a save failed."""


class WeightSaves:
    """Weights-only checkpoints of the checkpoint sync mode (`sync.base.StateDictStore`). `durable`: make the
    commits survive a power cut (`sync.durable`).
    """

    def __init__(self, monitor: MonitorClient, settings: SaveSettings, log: Recorder, durable: bool) -> None:
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
        limit = self._settings.save_timeout_s
        call = self._monitor.wait_committed(version.step, version.attempt, limit, kind="state_dict")
        result = call.result(limit + ANSWER_S)
        record_commit(self._log, result, 0.0, self._began.get(version))
        assert result["path"] is not None, "a run has a checkpoint folder"
        return Path(result["path"])

    def fail(self, version: Version, error: str) -> None:
        self._monitor.fail_step(version.step, error, attempt=version.attempt)

    def keep(self, folder: Path, target: Path) -> None:
        keep_weights(folder, target, durable=self._durable)

    def _notify(self, version: Version, part: str, files: list[FileEntry], digest: str | None) -> None:
        call = self._monitor.notify_finished(
            version.step, True, part=part, attempt=version.attempt, files=files, digest=digest
        )
        call.result(self._settings.save_timeout_s)


def record_commit(log: Recorder, result: CommitReport, blocked_s: float, began: float | None) -> None:
    """Record the events of `commit_events`."""
    for event in commit_events(result, blocked_s, began):
        log.event(event)


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
    return Path(call.result(settings.save_timeout_s))


# The explorers' version in a full checkpoint, where it is not the checkpoint's own.


EXPLORER = "explorer"
"""Folder of the shard files below the checkpoint's."""

_FILE = "version.json"


class PublishedState:
    """Saves and restores the newest published version. `agents`: the agents of the nodes that hold parts, by Ray node
    id. `read_s`: limit until a version is read, seconds.
    """

    def __init__(self, synchronizer: SynchronizerClient, agents: Mapping[str, AgentClient], read_s: float) -> None:
        self._synchronizer = synchronizer
        self._agents = agents
        self._read_s = read_s

    def parts(self) -> list[str]:
        """Return the names of the parts that `save` adds to a checkpoint."""
        return [_part(node) for node in self._agents]

    def save(self, step: int, folder: Path) -> tuple[str, str]:
        """Have the agents write the newest published version into a staging folder and report it. Does not wait.
        Returns name below `folder` and contents of a file for the driver's part.
        """
        synchronizer = self._synchronizer
        newest = synchronizer.newest().result(synchronizer.timeout_s)
        assert newest is not None, "explorers hold a version before the first step"
        for node, agent in self._agents.items():
            leased = synchronizer.lease(f"{_part(node)} of step {step}", newest)
            agent.save_published(step, str(folder), _part(node), leased.result(synchronizer.timeout_s))
        return f"{EXPLORER}/{_FILE}", json.dumps({"step": newest.step}) + "\n"

    def restore(self, folder: Path, version: Version, slot: int) -> None:
        """Have the agents fill a slot with the version saved in a checkpoint's folder, as the ranks would."""
        calls = [agent.restore_published(version, slot, str(folder / EXPLORER)) for agent in self._agents.values()]
        results(calls, self._read_s)


def published_step(folder: Path, layouts: Sequence[PartLayout]) -> int | None:
    """Return the step of the explorers' version in a checkpoint's folder; None: there is none, or its parts are not
    those of this run. `layouts`: of the run's parts. They differ from the saved ones after a change of ranks, of dtypes
    or of the published weights.
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
