"""The mirror of a run: the driver checks it and fetches from it before the run, the monitor fills it in the
background.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, TypedDict, TypeVar, cast

import tenacity

from trinity_sync.checkpoint.folder import contents
from trinity_sync.checkpoint.folder.catalog import CheckpointInfo, scan
from trinity_sync.checkpoint.folder.commits import keep_weights
from trinity_sync.checkpoint.folder.leases import CheckpointLease, lease_checkpoint, leased
from trinity_sync.checkpoint.folder.owner import Owner, Recorded, manifests
from trinity_sync.checkpoint.mirror.copies import DamagedError, ForeignError, Mirror, Storage, oldest_needed, point_of
from trinity_sync.errors import ConfigError, RunError, TrinityError, in_one_line
from trinity_sync.host import interrupts
from trinity_sync.host.child_process import Child, ChildPipe, start_child
from trinity_sync.host.logs import log_failure
from trinity_sync.host.masking import shown, without_secrets
from trinity_sync.host.origin import shortened
from trinity_sync.host.threads import comes_true, run_when_idle
from trinity_sync.host.urls import are_same
from trinity_sync.models.files import ModelFiles
from trinity_sync.protocol.parts import FileEntry
from trinity_sync.protocol.retention import Policy
from trinity_sync.protocol.versions import Version
from trinity_sync.tracking.events import FaultEvent, MirrorEvent

if TYPE_CHECKING:
    from trinity_sync.actors.monitor_client import MonitorClient


T = TypeVar("T")

#: A place that is asked for the first time has so long to answer.
_FIRST_S = 60.0
_ADVICE = "; name a place that can be written to, with checkpoint.mirror_options where it needs them, or null"
_STORE_ADVICE = "; name a place that can be written to, or null"
#: What the monitor may need beyond its own limit before it answers.
_ANSWER_S = 20.0
#: A lease is renewed until its copy is done, between its tries too; of a monitor that was killed it ends by itself.
_LEASE_S = 90.0
_RENEW_S = 20.0


def _say(text: str) -> None:
    print(text, file=sys.stderr)


@dataclass
class RunMirror:
    """The mirror, for the driver."""

    place: str
    settings: MirrorSettings
    owner: Owner
    log: Path | None = None  # file for the output of the child processes; None: standard error
    say: Callable[[str], object] = _say  # called with a sentence for the user

    @property
    def name(self) -> str:
        """The place without secrets."""
        return shown(self.place)

    def check(self, root: Path, recorded: Recorded = (), *, required: bool = True) -> None:
        """Check before a run that the place can be written and is this run's, and put its mark there. Raises
        ConfigError; where the place is not `required`, only if another try would not help.
        """
        try:
            self._ask(root, partial(Mirror.claim, **_claim(root, self.settings, recorded)))
        except ConfigError as error:
            cause = error.__cause__
            if required or not isinstance(cause, MirrorError) or cause.final:
                raise
            self.say(f"{self.settings.key}={self.name} does not answer now, and is tried again: {cause}")
            return
        self.settings = replace(self.settings, marked=True)

    def look(self, root: Path) -> None:
        """Check a new run's place as `check` does, and write nothing."""
        self._ask(root, Mirror.check)

    def unmark(self) -> None:
        """Delete the mark of `check`, if there is one. Raises MirrorError."""
        if self.settings.marked:
            self._call(Mirror.unmark)

    def _ask(self, root: Path, work: Callable[[Mirror], None]) -> None:
        self._check_apart(root)
        try:
            self._call(work)
        except MirrorError as error:
            raise self._unusable(error) from error

    def _call(self, work: Callable[[Mirror], None]) -> None:
        brief = replace(self.settings, timeout_s=min(self.settings.timeout_s, _FIRST_S))
        call(self.place, brief, self.owner, work, log=self.log)

    def _unusable(self, error: MirrorError) -> ConfigError:
        advice = "" if error.final else _ADVICE if self.settings.key == MirrorSettings.key else _STORE_ADVICE
        return ConfigError(f"{self.settings.key}={self.name} cannot be used: {error}{advice}")

    def fetch_newer(
        self,
        root: Path,
        best: CheckpointInfo | None,
        least: int = 0,
        progress: Callable[[int, int], object] = lambda done, total: None,
        recorded: Recorded = (),
    ) -> int | None:
        """Fetch the newest good checkpoint into the local folder if it is newer than the best local one. Raises
        ConfigError, NewerFormatError, RunError. `progress`: called with (bytes here, bytes in all) during the download.
        Returns the step that was fetched; None: the mirror has nothing newer, or cannot be reached and there is a
        `best`.
        """
        self._check_apart(root)
        local_step = best.step if best is not None else 0
        newer_than = ((best.attempt or 0) if best is not None else 0, max(local_step, least - 1))
        work = partial(_fetch, root=root, newer_than=newer_than, claim=_claim(root, self.settings, recorded))
        try:
            found = try_again(
                self.settings,
                partial(
                    call, self.place, self.settings, self.owner, work, say=self.say, progress=progress, log=self.log
                ),
                lambda text: self.say(f"the mirror {self.name}: {text}"),
            )
        except MirrorError as error:
            if error.final:
                raise self._unusable(error) from error
            if best is not None:
                consequence = f"; resuming from local step {local_step}" if local_step >= least else ""
                self.say(f"the mirror cannot be asked for a newer checkpoint{consequence}")
                return None
            raise RunError(
                f"no checkpoint in {root} verifies, and the mirror {self.name} cannot be asked for one: {error}; "
                f"try again when it can be reached, or begin again at step 1 with --from-scratch"
            ) from error
        self.settings = replace(self.settings, marked=True)
        if isinstance(found, contents.NewerFormatError):
            raise contents.NewerFormatError(f"the mirror {self.name}: {found}")
        return found

    def finish(self, monitor: MonitorClient, limit_s: float, fault: Callable[[str, str], None]) -> None:
        """Wait for the copies under way, at most `limit_s` seconds; report missing ones to the user and as a fault."""
        try:
            missing = monitor.wait_mirrored(limit_s).result(
                interrupts.left(limit_s + _ANSWER_S, interrupts.REST_S - 2.0)
            )
        except RunError as error:
            self._report(
                f"not known, for the checkpoint monitor does not answer ({type(error).__name__})", limit_s, fault
            )
        else:
            self.report_missing(missing, limit_s, fault)

    def report_missing(self, missing: Mapping[int, str], limit_s: float, fault: Callable[[str, str], None]) -> None:
        """Report the steps that are not at the place after a wait of so long, and why."""
        self._report("; ".join(f"step {step} ({reason})" for step, reason in missing.items()), limit_s, fault)

    def _report(self, text: str, limit_s: float, fault: Callable[[str, str], None]) -> None:
        if text:
            self.say(f"not copied to {self.name} within {round(limit_s, 1):g} s: {text}")
            fault(f"mirror {self.name}", f"not copied at the end of the run: {text}")

    def _check_apart(self, root: Path) -> None:
        if are_same(self.place, str(root)):
            key = self.settings.key
            raise ConfigError(f"{key}={self.place} is the checkpoint folder itself; name another place")


def _report_to(report: Callable[[MirrorEvent | FaultEvent], object], event: MirrorEvent | FaultEvent) -> None:
    """Report an event of a copy. A record that takes none, as on a full disk, keeps no copy back."""
    try:
        report(event)
    except Exception as error:
        log_failure("the record of a copy", error)


class Uploads:
    """Copies committed full checkpoints to a mirror, oldest first, on a thread of its own.

    A step that retention has deleted locally before its turn is skipped, with an event. A step whose tries are used up
    is put off until another step has been copied. A step is leased from its first try to its last.

    Args:
        start: the step after which this attempt resumed; None: it is the first, or not known.
        report: called with the events, on the thread; its errors are logged.
        on_idle: called there when no work is left.
        clock: Unix seconds.
    """

    def __init__(
        self,
        root: Path,
        place: str,
        settings: MirrorSettings,
        *,
        owner: Owner,
        policies: Sequence[Policy],
        start: int | None,
        report: Callable[[MirrorEvent | FaultEvent], object],
        on_idle: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root, self._place, self._settings = root, place, settings
        self._owner = owner
        self._claims = True  # the driver may not have reached the place
        self._policies = tuple(policies) if settings.keep == "same" else None
        self._start = start
        self._report, self._on_idle, self._clock = partial(_report_to, report), on_idle, clock
        self._changed = threading.Condition()
        self._waiting: deque[int] = deque()
        self._unsure: list[int] = []
        self._given_up: dict[int, str] = {}
        self._lost: dict[int, str] = {}
        self._working = False
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="mirror", daemon=True).start()

    def add(self, step: int) -> None:
        """Queue a committed step."""
        with self._changed:
            if step not in self._waiting:
                self._waiting.append(step)
            self._changed.notify()

    def catch_up(self, steps: Collection[int]) -> None:
        """Queue local steps: those that the mirror does not have are copied first."""
        with self._changed:
            self._unsure = sorted(steps)
            self._changed.notify()

    @property
    def busy(self) -> bool:
        """Whether a step is being copied or queued."""
        with self._changed:
            return bool(self._working or self._waiting or self._unsure)

    def left(self) -> dict[int, str]:
        """Return the steps that are not at the mirror, and why."""
        with self._changed:
            waiting = dict.fromkeys((*self._unsure, *self._waiting), "still waiting or under way")
            return dict(sorted((self._lost | self._given_up | waiting).items()))

    def stop(self) -> None:
        """Cancel the work under way."""
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
            missing = self._call(partial(Mirror.missing, root=self._root, steps=steps), where)
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
            lease = try_again(self._settings, partial(self._lease, step), partial(self._fault, where), self._stop)
        except MirrorError as error:
            self._settle(step, str(error))
            return
        except RunError as error:
            self._fault(where, str(error))
            self._settle(step, str(error), final=True)
            return
        if lease is None:
            reason = "retention deleted it here before its turn came"
            self._settle(step)
            self._told(step, "skipped", 0, 0.0, reason)
            return
        bases = self._settings.keep == "bases"
        work = partial(_copy, root=self._root, step=step, start=self._start, policies=self._policies, bases=bases)
        if self._claims:
            work = partial(work, claim=_claim(self._root, self._settings))
        with lease:
            try:
                sent, problem = self._call(work, where, lease)
            except MirrorError as error:
                self._settle(step, str(error), final=error.final)
                return
        self._claims = False
        if problem is not None:
            self._fault(where, without_secrets(problem, self._place, self._settings.options))
        self._told(step, "copied", sent, max(0.0, self._clock() - started))
        with self._changed:
            # The place answers again, so what was put off has another chance.
            self._waiting.extend(other for other in self._given_up if other not in self._waiting)
            self._given_up.clear()
        self._settle(step)

    def _lease(self, step: int) -> CheckpointLease | None:
        """Lease a step's checkpoint; None: retention has deleted it. Raises MirrorError, RunError."""
        try:
            return lease_checkpoint(self._root, step, reader="mirror", seconds=_LEASE_S, clock=self._clock)
        except (contents.UnreadableError, OSError) as error:
            raise MirrorError(str(error)) from error
        except RunError:
            if contents.step_dir(self._root, step).exists():
                raise
            return None

    def _call(self, work: Callable[[Mirror], T], where: str, lease: CheckpointLease | None = None) -> T:
        """Do work in several tries, and renew the lease meanwhile; each failed try is a fault event."""

        def tick() -> None:
            if lease is not None:
                lease.keep(_LEASE_S, renew_s=_RENEW_S)

        once = partial(call, self._place, self._settings, self._owner, work, tick=tick, stop=self._stop)
        return try_again(self._settings, once, partial(self._fault, where), self._stop, tick)

    def _settle(self, step: int | None, problem: str | None = None, *, final: bool = False) -> None:
        """End a step's turn. A final failure is not tried again, and stays in `left`."""
        with self._changed:
            if step is not None and step in self._waiting:
                self._waiting.remove(step)
            if step is not None and problem is not None:
                (self._lost if final else self._given_up)[step] = problem

    def _told(self, step: int, state: str, nbytes: int, total_s: float, reason: str | None = None) -> None:
        self._report(
            MirrorEvent(step=step, url=shown(self._place), state=state, bytes=nbytes, total_s=total_s, reason=reason)
        )

    def _fault(self, where: str, text: str) -> None:
        self._report(FaultEvent(where=where, error=text))


# Versions for followers (`sync.store`). The place is laid out as a mirror. The folder of a version holds the deltas
# that lead to it, and of a base also its weights and the model's files:
#
#     global_step_16/manifest.json
#     global_step_16/deltas/rank-00000-from-0-15.delta
#     global_step_16/actor/weights_rank-00000.safetensors, global_step_16/actor/huggingface/config.json
#
# Until a version is copied, its files are in a folder of links in that of the checkpoints.


OUTGOING = "store"
"""Folder of the links, in that of the deltas."""

DELTA_FILES = "deltas"
"""Folder of the deltas to a version."""

_POLL_S = 0.05


class VersionCopies:
    """Copies published versions in their order, in the background (a `sync.base.VersionStore`).

    Args:
        checkpoints: the run's checkpoint folder.
        store: the place.
        model: folder of the model, with config and tokenizer; None: there is none.
        start: as for `Uploads`.
        report: called with the events, on threads; its errors are logged.
    """

    def __init__(
        self,
        checkpoints: Path,
        store: RunMirror,
        *,
        model: Path | None,
        start: int | None,
        report: Callable[[MirrorEvent | FaultEvent], object],
    ) -> None:
        self._root, self._store = checkpoints / contents.DELTAS / OUTGOING, store
        self._model = model
        self._report = partial(_report_to, report)
        self._lost: dict[int, str] = {}  # by step: why its files are not here
        self._base: contents.Manifest | None = None
        shutil.rmtree(self._root, ignore_errors=True)
        self._todo = SimpleQueue[tuple[Future[None], Version, str | None, Path] | None]()
        # not of a pool, whose threads keep the process alive, also where a disk does not answer
        threading.Thread(target=self._complete_all, name="store", daemon=True).start()
        self._completing: dict[int, Future[None]] = {}  # by step; those that have ended go with the next version
        self._uploads = Uploads(
            self._root, store.place, store.settings, owner=store.owner, policies=(), start=start, report=self._hear
        )

    def add(self, version: Version, digest: str | None, full: Path | None, deltas: Sequence[Path]) -> None:
        folder = contents.step_dir(self._root, version.step)
        self._completing = self._incomplete()
        try:
            shutil.rmtree(folder, ignore_errors=True)
            if full is not None:
                keep_weights(full, folder, durable=False)
            for path in deltas:
                contents.link_or_copy(path, folder / DELTA_FILES / path.name)
        except (OSError, TrinityError) as error:
            self._give_up(version.step, folder, error)
            return
        self._completing[version.step] = Future()
        self._todo.put((self._completing[version.step], version, digest, folder))

    def finish(self, limit_s: float) -> Mapping[int, str]:
        """Wait for the copies under way, at most so long, and stop; return the steps that are not there, and why."""
        comes_true(lambda: not (self._incomplete() or self._uploads.busy), limit_s, _POLL_S)
        for future in self._completing.values():
            future.cancel()
        self._todo.put(None)
        late = dict.fromkeys(self._incomplete(), "its files were not read in time")
        missing = self._lost | self._uploads.left() | late
        self._uploads.stop()
        shutil.rmtree(self._root, ignore_errors=True)
        return dict(sorted(missing.items()))

    def _incomplete(self) -> dict[int, Future[None]]:
        return {step: future for step, future in self._completing.items() if future.cancelled() or not future.done()}

    def _complete_all(self) -> None:
        while (one := self._todo.get()) is not None:
            future, version, digest, folder = one
            if future.set_running_or_notify_cancel():
                self._complete(version, digest, folder)
                future.set_result(None)

    def _complete(self, version: Version, digest: str | None, folder: Path) -> None:
        """Write the manifest of a version, and have it copied."""
        try:
            weights = self._add_model(folder) if (folder / contents.MANIFEST).exists() else ()
            if self._base is None:
                raise RunError("the full version before it could not be copied")
            paths = [path for path in sorted(folder.glob("*/**/*")) if path.is_file()]
            names = [path.relative_to(folder).as_posix() for path in paths]
            digested = {entry.path for entry in weights}
            files = (*weights, *(contents.file_entry(folder, name) for name in names if name not in digested))
            manifest = replace(
                self._base,
                attempt=version.attempt,
                step=version.step,
                digest=digest,
                created=time.time(),
                files=files,
                run=self._store.owner.run,
            )
            contents.write_manifest(folder, manifest, durable=False)
            self._drop_superfluous()
        except Exception as error:  # such as a model's file that cannot be read: the version is not there, and said so
            self._give_up(version.step, folder, error)
        else:
            self._uploads.add(version.step)

    def _add_model(self, folder: Path) -> Sequence[FileEntry]:
        """Add the model's files to a base; return its files of weights."""
        manifest = contents.read_manifest(folder)
        if manifest.base is None and self._model is not None:  # an adapter is loaded without them
            ModelFiles.read(self._model).write(folder / "actor" / "huggingface")
        self._base = replace(manifest, files=())
        return manifest.files

    def _drop_superfluous(self) -> None:
        """Delete versions that no follower will need: the place is slower than the run."""
        waiting = [info.manifest for info in scan(self._root) if info.manifest is not None]
        oldest, copied = oldest_needed(waiting), leased(self._root, now=time.time())
        for one in waiting:
            if point_of(one) < oldest and (one.step, one.attempt) not in copied:
                shutil.rmtree(contents.step_dir(self._root, one.step), ignore_errors=True)

    def _hear(self, event: MirrorEvent | FaultEvent) -> None:
        if isinstance(event, MirrorEvent) and event.state == "copied":
            shutil.rmtree(contents.step_dir(self._root, event.step), ignore_errors=True)
        elif isinstance(event, MirrorEvent):
            text = f"step {event.step} was not copied: the run publishes versions faster than the place takes them"
            event = FaultEvent(where=f"copies to {self._store.name}", error=text)
        self._report(event)

    def _give_up(self, step: int, folder: Path, error: Exception) -> None:
        self._lost[step] = str(error)
        shutil.rmtree(folder, ignore_errors=True)
        self._report(FaultEvent(where=f"copy of step {step} to {self._store.name}", error=str(error)))


# ---- done at the mirror, in a process of its own


class _Claim(TypedDict):
    """The arguments of `Mirror.claim`."""

    known: Recorded
    again: bool
    named: bool


def _claim(root: Path, settings: MirrorSettings, recorded: Recorded = ()) -> _Claim:
    """Return the arguments of `Mirror.claim`; the commits in the checkpoint folder count as recorded."""
    local = {(one.step, one.attempt, one.digest, one.bytes) for one in manifests(root, skip_unreadable=True)}
    return {"known": {*recorded, *local}, "again": settings.marked, "named": settings.named}


def _copy(
    mirror: Mirror,
    root: Path,
    step: int,
    start: int | None,
    policies: Collection[Policy] | None,
    claim: _Claim | None = None,
    *,
    bases: bool = False,
) -> tuple[int, str | None]:
    """Copy a checkpoint, then delete there what the policies give up, or for `bases` what no follower needs. It yields
    to training, as do the threads that it starts. Returns the bytes sent, and what hindered the deletion.
    """
    run_when_idle()
    if claim is not None:
        mirror.claim(**claim)
    sent = mirror.upload(root, step, start=start)
    try:
        if bases:
            mirror.prune_versions(root)
        elif policies is not None:
            mirror.prune(policies, root, now=time.time())
    except Exception as error:
        return sent, f"what retention gives up could not be deleted there: {described(error)}"
    return sent, None


def _fetch(
    mirror: Mirror, root: Path, newer_than: tuple[int, int], claim: _Claim
) -> int | contents.NewerFormatError | None:
    """Call `Mirror.download`, and return a NewerFormatError, which would not change in a retry."""
    mirror.claim(**claim)
    try:
        return mirror.download(root, newer_than=newer_than)
    except contents.NewerFormatError as error:
        return error


# Work at the mirror in a process of its own, which says over a `Connection` what comes of it.


#: How often the child says that bytes are moving, and what is more than its own small change.
_BEAT_S = 1.0
_BEAT_BYTES = 1 << 16
#: For Python to start and take the work, which names all commits of the run; shorter than the lease of a copy.
_START_S = 60.0
#: For the process to end after its last message.
_END_S = 10
_MAX_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True)
class MirrorSettings:
    """How a mirror is kept (`checkpoint.mirror_*`)."""

    key: str = "checkpoint.mirror"  # the setting that names the place
    options: Mapping[str, object] = field(default_factory=dict)
    # ``same``: the retention policies hold there too; ``all``: nothing is deleted there; ``bases``: it holds versions,
    # and those go that no follower needs.
    keep: Literal["same", "all", "bases"] = "same"
    tries: int = 8
    backoff_s: float = 2.0
    timeout_s: float = 300.0  # a try that moves no bytes for so long is broken off
    named: bool = False
    marked: bool = False


class MirrorError(RunError):
    """A try failed."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


def call(
    place: str,
    settings: MirrorSettings,
    owner: Owner,
    work: Callable[[Mirror], T],
    *,
    say: Callable[[str], object] = lambda text: None,
    progress: Callable[[int, int], object] = lambda done, total: None,
    tick: Callable[[], object] = lambda: None,
    stop: threading.Event | None = None,
    log: Path | None = None,
) -> T:
    """Have work done in a process of its own, once. Raises MirrorError if it failed, moved nothing for
    `MirrorSettings.timeout_s`, or was stopped. `work`: what to do there, such as ``partial(Mirror.upload, root=root,
    step=20)``; it is pickled. Returns what it returned.
    """
    tick()
    try:
        started = start_child(__name__, log)
    except OSError as error:
        raise MirrorError(f"the copying process could not be started: {error}") from error
    with started as child:
        _send(child.pipe, (place, settings.key, dict(settings.options), owner, work), min(_START_S, settings.timeout_s))
        heard, most = time.monotonic(), -1
        while stop is None or not stop.is_set():
            tick()
            if child.pipe.poll(_BEAT_S):
                message, before = _receive(child), heard
                heard = time.monotonic()
                match message:
                    case "done", result:
                        return cast(T, result)
                    case "failed", str(text), bool(final):
                        raise MirrorError(without_secrets(text, place, settings.options), final=final)
                    case "say", str(text):
                        say(text)
                    case "progress", int(done), int(total):
                        heard = heard if done > most else before  # it also says that nothing has moved
                        most = max(most, done)
                        progress(done, total)
            if time.monotonic() - heard > settings.timeout_s:
                raise MirrorError(f"nothing moved for {settings.timeout_s:g} s")
        raise MirrorError("the run ended meanwhile", final=True)


def _send(pipe: ChildPipe, message: tuple[object, ...], limit_s: float) -> None:
    try:
        pipe.send(message, limit_s)
    except TimeoutError:
        raise MirrorError(f"the copying process has not taken its work within {limit_s:g} s") from None
    except OSError:
        pass  # it died at once; `_receive` finds its end


def _receive(child: Child) -> tuple[object, ...]:
    try:
        message: tuple[object, ...] = child.pipe.recv()
    except EOFError:
        if (status := child.status(_END_S)) is None:
            raise MirrorError(f"the copying process has hung up and not ended within {_END_S} s") from None
        raise MirrorError(f"the copying process ended with {status}") from None
    return message


def try_again(
    settings: MirrorSettings,
    work: Callable[[], T],
    on_failure: Callable[[str], object],
    stop: threading.Event | None = None,
    tick: Callable[[], object] = lambda: None,
) -> T:
    """Repeat work that fails with a `MirrorError` that is not final, waiting longer each time. Raises MirrorError if
    the last failure.
    """

    def told(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        error, pause = state.outcome.exception(), state.next_action.sleep
        on_failure(f"try {state.attempt_number} of {settings.tries} failed: {error}; the next is in {pause:g} s")

    stop = stop or threading.Event()

    def sleep(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not stop.wait(min(left, _BEAT_S)):
            tick()

    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(settings.tries) | tenacity.stop_when_event_set(stop),
        wait=tenacity.wait_exponential(multiplier=settings.backoff_s, max=max(_MAX_BACKOFF_S, settings.backoff_s)),
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, MirrorError) and not error.final),
        sleep=sleep,
        before_sleep=told,
        reraise=True,
    )
    try:
        return retrying(work)
    except MirrorError as error:
        tries = retrying.statistics["attempt_number"]
        on_failure(f"given up{f' after {tries} tries' if tries > 1 else ''}: {error}")
        raise


# ---- the child


def serve(descriptor: int) -> None:
    """Run as the child: do what the parent asks for, and end with it."""
    os.set_inheritable(descriptor, False)
    connection, lock = Connection(descriptor), threading.Lock()

    def send(*message: object) -> None:
        with lock:
            connection.send(message)

    asked = connection.recv_bytes()
    threading.Thread(target=_end_with_parent, args=[connection], daemon=True).start()
    threading.Thread(target=_beat, args=[partial(send, "moving")], daemon=True).start()
    try:
        place, key, options, owner, work = pickle.loads(asked)
        mirror = Mirror(partial(Storage, place, options), owner, partial(send, "say"), partial(send, "progress"), key)
        send("done", work(mirror))
    except Exception as error:
        lasting = ImportError | contents.ManifestError | DamagedError | ForeignError
        final = isinstance(error, lasting) and not isinstance(error, contents.UnreadableError)
        send("failed", described(error), final)
    # Clients leave threads and connections behind; the exit does not wait for them.
    os._exit(0)


def described(error: Exception) -> str:
    """An error of a client in one line, with its class, which often says more than its words."""
    text, name = shortened(in_one_line(error)), type(error).__name__
    return text if isinstance(error, RunError) or text == name else f"{name}: {text}"


def _end_with_parent(connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    os._exit(1)


def _beat(say_so: Callable[[], object]) -> None:
    """Say so whenever bytes have moved: all of them are read from files here, or written to some."""
    before = _moved()
    while True:
        time.sleep(_BEAT_S)
        now = _moved()
        if now is None or before is None or now - before > _BEAT_BYTES:
            say_so()
            before = now


def _moved() -> int | None:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    figures = dict(line.split(": ") for line in lines)
    return int(figures["rchar"]) + int(figures["wchar"])
