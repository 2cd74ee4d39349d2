"""The disk side of the monitor: commits, retention, trackers, journals. `execution` and `monitor` call it in threads,
as it blocks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO

from trinity_sync.actors.monitor_client import CommitReport, PrunedStep
from trinity_sync.checkpoint.folder import catalog, commits, contents, deletion, owner, recovery
from trinity_sync.checkpoint.folder.contents import Manifest, NoManifestError, read_manifest
from trinity_sync.checkpoint.folder.deletion import prune, prune_plan, read_deletion, unlink_notes
from trinity_sync.checkpoint.folder.lock import lock_as_writer
from trinity_sync.errors import RunError
from trinity_sync.host.durable import replace_file
from trinity_sync.host.logs import story
from trinity_sync.protocol.commit import CommitBook
from trinity_sync.protocol.parts import FULL, KINDS, STATE_DICT, Commit, Decision, FileEntry, Kind
from trinity_sync.protocol.retention import Policy
from trinity_sync.protocol.step import JournalEntry
from trinity_sync.weights.wire import WireFormat


@dataclass(frozen=True, kw_only=True)
class CheckpointDisk:
    """The checkpoint folder of one attempt."""

    root: Path | None  # the folder; None: commits are only counted
    attempt: int
    policies: Sequence[Policy]
    keep_state_dicts: int
    fsync: bool
    clock: Callable[[], float]  # Unix seconds
    writer: str | None = None  # the run that may write in the folder, see `lock.lock_as_writer`; None: any
    of_run: str | None = None  # the run id; None: that of the folder
    known: contents.KnownManifests = field(default_factory=dict)  # for `prune`, which is not called twice at a time

    @cached_property
    def run(self) -> str | None:
        """The run id for manifests; None: no checkpoint folder. Raises UnreadableError if the folder's mark cannot be
        read.
        """
        return self.of_run or (None if self.root is None else owner.adopt(self.root))

    # ---- commits

    def prepare(self, step: int) -> Path:
        """Create the staging folder of a step. Raises RunError without a checkpoint folder."""
        if self.root is None:
            raise RunError("the checkpoint monitor was started without a checkpoint folder, so nothing can be saved")
        return commits.prepare_staging(self.root, step, self.attempt)

    def placed(self, commit: Commit) -> Commit:
        """Return the commit, with `beside` set if weights find another checkpoint in their place: one of verl's or of a
        newer version of this program, or one that cannot be read now.
        """
        if self.root is None or commit.kind != STATE_DICT or not commits.taken(self.root, commit.step, self.attempt):
            return commit
        return replace(commit, beside=True)

    def commit(self, commit: Commit) -> Manifest:
        """Make a step visible; see `commits.commit_folder`."""
        meta = commit.meta
        wire = meta.get("wire")
        draft = Manifest(
            step=commit.step,
            attempt=commit.attempt,
            kind=commit.kind,
            backend=str(meta.get("backend", "")),
            world_size=int(meta.get("world_size", 0)),
            created=self.clock(),
            digest=commit.digest,
            config_digest=meta.get("config_digest"),
            wire=WireFormat.from_json(wire) if wire else None,
            metrics=dict(meta.get("metrics") or {}),
            files=tuple(FileEntry(*file) for file in commit.files),
            left_out=meta.get("left_out"),
            reference=meta.get("reference"),
            base=contents.Base.from_json(base) if (base := meta.get("base")) is not None else None,
            run=self.run,
        )
        if self.root is None:
            return draft
        durable = self.fsync if commit.durable is None else commit.durable
        return commits.commit_folder(
            self.root, draft, partial=commit.partial, durable=durable, beside=commit.beside, clock=self.clock
        )

    def describe(
        self,
        manifest: Manifest,
        pruned: Sequence[PrunedStep] = (),
        *,
        written_s: float = 0.0,
        total_s: float = 0.0,
        beside: bool = False,
    ) -> CommitReport:
        """Return a commit as `CheckpointMonitor.wait_committed` does."""
        place = self._beside if beside else self.root
        return {
            "step": manifest.step,
            "attempt": manifest.attempt,
            "kind": manifest.kind,
            "digest": manifest.digest,
            "bytes": manifest.bytes,
            "written_s": written_s,
            "total_s": total_s,
            "path": str(contents.step_dir(place, manifest.step)) if place is not None else None,
            "beside": beside,
            "pruned": list(pruned),
            "base": manifest.base.digest if manifest.base is not None else None,
        }

    def describe_committed(self, step: int, kind: Kind | None = None) -> CommitReport:
        """Return a commit that an earlier process of the monitor, or an earlier attempt, made. Raises RunError if the
        step is not on disk.
        """
        if self.root is None:
            raise RunError(f"step {step} was committed before, but there is no checkpoint folder to read it from")
        is_beside = kind == STATE_DICT and step in self._steps_beside()
        place = self._beside if is_beside and self._beside is not None else self.root
        try:
            manifest = read_manifest(contents.step_dir(place, step))
        except NoManifestError:
            deleted = self.describe_deleted(step, kind)
            if deleted is None:
                raise
            return deleted
        return self.describe(manifest, beside=is_beside)

    def describe_deleted(self, step: int, kind: Kind | None = None) -> CommitReport | None:
        """Return a commit of this attempt and kind that retention has deleted; None: there is no note of one."""
        noted = read_deletion(self.root, step, self.attempt, kind or STATE_DICT) if self.root is not None else None
        if noted is None:
            return None
        manifest = Manifest(step=step, attempt=self.attempt, kind=noted.kind, digest=noted.digest, base=noted.base)
        return {**self.describe(manifest), "bytes": noted.nbytes}

    def move_tracker(self, kind: Kind, step: int, saving: Collection[int] = ()) -> None:
        """Set a tracker to the step. The tracker of full checkpoints stays if it names a later step that is being
        saved: verl's trainer writes it in advance, and `clean` resets it when that step fails. Raises RunError if the
        disk refuses.
        """
        if self.root is None:
            return
        try:
            if kind == FULL:
                contents.write_committed(self.root, step)
                named = self.named_by_verl()
                if named is not None and named > step and named in saving:
                    return
            contents.write_tracker(self.root, kind, step)
        except OSError as error:
            raise RunError(
                f"{contents.tracker_path(self.root, kind)} could not be set to step {step}: {error}"
            ) from error

    def named_by_verl(self) -> int | None:
        """Return the step in the tracker of full checkpoints, whoever wrote it; None: none, or unreadable."""
        return None if self.root is None else contents.read_tracker(self.root, FULL).step

    def clean(self, step: int) -> None:
        """Remove the staged files of a failed step, and reset a tracker that verl's trainer has set to it in
        advance.
        """
        if self.root is not None:
            recovery.clean_staging(self.root, step, self.attempt, clock=self.clock)
            if self.named_by_verl() == step != contents.read_committed(self.root):
                steps = [info.step for info in catalog.scan(self.root) if info.kind == FULL or info.state == "verl"]
                contents.write_tracker(self.root, FULL, max((one for one in steps if one < step), default=None))

    # ---- afterwards

    def prune(self, saving: Iterable[int], extra: Sequence[Policy] = ()) -> tuple[list[PrunedStep], list[str]]:
        """Move checkpoints that no policy keeps to the trash; return them and warnings. Frees no bytes yet."""
        if self.root is None:
            return [], []
        now, saving = self.clock(), set(saving)
        policies, kept = [*self.policies, *extra], self.keep_state_dicts
        plan = prune_plan(self.root, policies, now=now, keep_state_dicts=kept, saving=saving, known=self.known)
        pruned, problems = prune(self.root, plan, now=now, defer=True)
        warnings = [*problems, *(warning for row in plan for warning in row.warnings)]

        def wanted(step: int) -> bool:
            """Keep as many of the newest as of the visible weights, and those that a full commit will need."""
            newer = sum(row.step > step for row in plan)
            return step in saving or newer < max(1, self.keep_state_dicts)

        try:
            recovery.clean_versions(self.root, attempt=self.attempt, keep=wanted, now=now)
        except (OSError, RunError) as error:
            warnings.append(f"weights next to the step folders could not be deleted: {error}")
        return pruned, warnings

    def empty_trash(self) -> list[str]:
        """Free the bytes of the trash; return problems."""
        return deletion.empty_trash(self.root) if self.root is not None else []

    def full_steps(self) -> list[int]:
        """List the steps of the committed full checkpoints."""
        return [info.step for info in catalog.scan(self.root) if info.kind == FULL] if self.root is not None else []

    def newest_weights(self) -> int | None:
        """Return the step of the newest committed weights, from the tracker."""
        return None if self.root is None else contents.read_tracker(self.root, STATE_DICT).step

    # ---- after a restart of the monitor

    def write_journal(self, step: int, dumped: JournalEntry | None) -> None:
        """Write the book's state of an open step for a restarted monitor; None removes it. Not durable: a power cut
        ends the writers too, and what was staged is removed then.
        """
        if self.root is None:
            return
        path = contents.journal_path(self.root, step, self.attempt)
        if dumped is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(dumped), durable=False)

    def write_failed(self, failures: Mapping[int, str]) -> None:
        """Write the failed steps, so that a restarted monitor does not revive them."""
        if self.root is not None:
            self._failed_path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(
                self._failed_path, json.dumps({str(step): error for step, error in failures.items()}), durable=False
            )

    def forget_failures(self) -> None:
        """Remove the note of the failed steps: no process of this attempt is left to save them again."""
        if self.root is not None:
            self._failed_path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty, or missing
                (self.root / contents.STAGING).rmdir()

    def rebuild(self, make_book: Callable[[list[tuple[int, int, Kind]]], CommitBook], *, restarted: bool) -> Rebuild:
        """Put the folder in order and make the book of its state. Raises RunError if another run writes in it."""
        if self.root is None:
            return Rebuild(make_book([]), [], [], None)
        lock = lock_as_writer(self.root, self.writer)
        story.info("the checkpoints in %s belong to run %s", self.root, self.run)
        journals, problems = self._read_journals() if restarted else ([], [])
        failures = self._read_failed() if restarted else {}
        journals = [dumped for dumped in journals if dumped["step"] not in failures]
        kept = [(dumped["step"], self.attempt) for dumped in journals]
        recovery.recover(self.root, keep=kept, attempt=self.attempt if restarted else None, clock=self.clock)
        if not restarted:
            unlink_notes(self.root, self.attempt)
        trackers = {kind: contents.read_tracker(self.root, kind) for kind in KINDS}
        infos = catalog.scan(self.root, trackers[FULL], self.known)
        manifests = {info.step: info.manifest for info in infos if info.manifest is not None}
        book = make_book([(manifest.step, manifest.attempt, manifest.kind) for manifest in manifests.values()])
        others = {info.step for info in infos if info.manifest is None and info.state != "damaged"}
        problems += self._repair_trackers(book, trackers, others)
        versions = self._steps_beside()
        for step in versions:
            book.restore_beside(step)
        committed = versions | {step: one for step, one in manifests.items() if one.attempt == self.attempt}
        for step, manifest in committed.items():
            book.restore_files(step, [entry.as_tuple() for entry in manifest.files])
        for step, error in failures.items():
            book.restore_failure(step, error)
        if failures:
            self.write_failed(failures)
        decisions = []
        for dumped in journals:
            step = dumped["step"]
            try:
                decisions += book.restore(dumped, committed[step].paths if step in committed else ())
            except (KeyError, TypeError, ValueError) as error:
                problems.append(f"the journal of step {step} cannot be used: {error}")
                self.clean(step)
                continue
            if book.dump(step) is None:
                # All of it was committed before the crash: the staged files are those that the commit replaced.
                self.clean(step)
        return Rebuild(book, decisions, problems, lock)

    @property
    def _beside(self) -> Path | None:
        return contents.versions_dir(self.root, self.attempt) if self.root is not None else None

    def _steps_beside(self) -> dict[int, Manifest]:
        """Return the manifests of this attempt's weights next to the step folders, by step."""
        assert self._beside is not None
        return {info.step: info.manifest for info in catalog.scan(self._beside) if info.manifest is not None}

    @property
    def _failed_path(self) -> Path:
        assert self.root is not None
        return self.root / contents.STAGING / f"failed-{self.attempt}.json"

    def _read_failed(self) -> dict[int, str]:
        try:
            noted = json.loads(self._failed_path.read_text(encoding="utf-8"))
            return {int(step): str(error) for step, error in noted.items()}
        except (OSError, ValueError, AttributeError):
            return {}

    def _read_journals(self) -> tuple[list[JournalEntry], list[str]]:
        assert self.root is not None
        journals: list[JournalEntry] = []
        problems = []
        for path in sorted((self.root / contents.STAGING).glob(f"*-{self.attempt}.json")):
            if path == self._failed_path:
                continue
            try:
                dumped = json.loads(path.read_text(encoding="utf-8"))
                if contents.staging_dir(self.root, dumped["step"], self.attempt).name == path.stem:
                    journals.append(dumped)
            except (OSError, ValueError, KeyError, TypeError) as error:
                problems.append(f"{path} cannot be read: {error}")
        return journals, problems

    def _repair_trackers(
        self, book: CommitBook, trackers: Mapping[Kind, contents.TrackerFile], others: Collection[int]
    ) -> list[str]:
        """Set the trackers to what is committed, as a crash may have come between a commit and its tracker; return
        problems.
        """
        assert self.root is not None
        problems = []
        newest, noted = book.trackers[FULL] or 0, contents.read_committed(self.root)
        if noted is None or noted < newest:
            contents.write_committed(self.root, newest)
        for kind, tracker in trackers.items():
            if tracker.problem is not None:
                problems.append(tracker.problem)
            named = book.trackers[kind]
            if tracker.step == named and tracker.problem is None:
                continue
            newer = {step for step in others if step > (named or 0)}
            # A newer checkpoint that is verl's own or cannot be read now keeps its tracker; so does one that a damaged
            # tracker may have named, since verl's writes are not atomic.
            if tracker.unreadable or (newer if tracker.problem is not None else tracker.step in newer):
                continue
            contents.write_tracker(self.root, kind, named)
        return problems


@dataclass(frozen=True)
class Rebuild:
    """The result of `CheckpointDisk.rebuild`."""

    book: CommitBook
    decisions: list[Decision]
    problems: list[str]
    # Keep it open while this process writes in the folder, see `lock.lock_as_writer`; None: no folder.
    lock: IO[bytes] | None
