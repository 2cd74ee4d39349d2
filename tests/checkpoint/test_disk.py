"""Book and folder together, without the actor around them: resumes, and deaths between two decisions."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.checkpoint.helpers import commit, names, stage, unreadable, verls
from trinity_sync.actors.pending import Changes
from trinity_sync.checkpoint.disk import CheckpointDisk
from trinity_sync.checkpoint.execution import EventLog, Execution
from trinity_sync.checkpoint.folder import catalog, commits, deletion, recovery, resume_point
from trinity_sync.checkpoint.folder.contents import (
    Base,
    Manifest,
    read_manifest,
    read_tracker,
    staging_dir,
    step_dir,
    tracker_path,
    versions_dir,
    write_tracker,
)
from trinity_sync.checkpoint.folder.deletion import noted_deletions, prune, prune_plan
from trinity_sync.checkpoint.folder.leases import find_config, lease_checkpoint, pin
from trinity_sync.checkpoint.folder.resume_point import put_in_order
from trinity_sync.errors import RunError
from trinity_sync.protocol.commit import CommitBook
from trinity_sync.protocol.parts import (
    FULL,
    STATE_DICT,
    Abort,
    Cleanup,
    Commit,
    CommitMeta,
    Decision,
    Kind,
    MoveTracker,
)
from trinity_sync.protocol.retention import KeepLast
from trinity_sync.weights.wire import WireFormat

FILES = {"actor/model.pt": "w", "actor/optim.pt": "o"}
WEIGHTS = {"actor/weights_rank-00000.safetensors": "version"}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Death(BaseException):
    """The process ends here."""


class Life:
    """One life of the monitor, which carries out each decision at once."""

    def __init__(self, root: Path, attempt: int = 0, *, restarted: bool = False, keep_state_dicts: int = 2) -> None:
        self.clock = Clock()
        self.root = root
        self.disk = CheckpointDisk(
            root=root,
            attempt=attempt,
            policies=(KeepLast(10),),
            keep_state_dicts=keep_state_dicts,
            fsync=False,
            clock=self.clock,
        )
        rebuilt = self.disk.rebuild(
            lambda committed: CommitBook(clock=self.clock, attempt=attempt, committed=committed), restarted=restarted
        )
        assert rebuilt.problems == []
        self.book = rebuilt.book
        self.failures: list[str] = []
        self.carry_out(rebuilt.decisions)

    def carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Commit(step, _, kind):
                    self.disk.write_journal(step, self.book.dump(step))
                    try:
                        decision = self.disk.placed(decision)
                        self.disk.commit(decision)
                    except Exception as error:
                        self.carry_out(self.book.commit_failed(step, kind, str(error)))
                        continue
                    self.carry_out(self.book.commit_done(step, kind, beside=decision.beside))
                    self.disk.write_journal(step, self.book.dump(step))
                    for gone in self.disk.prune(self.book.open_steps())[0]:
                        self.book.forget(gone["step"])
                    self.disk.empty_trash()
                case MoveTracker(kind, step):
                    self.disk.move_tracker(kind, step)
                case Abort(step, _, error):
                    self.failures.append(error)
                    self.disk.clean(step)
                case Cleanup(step, _):
                    self.disk.clean(step)

    def save(self, step: int, kind: Kind, files: Mapping[str, str], meta: CommitMeta | None = None) -> dict[str, Any]:
        """Write and report one part; what `CheckpointDisk.describe_committed` then says."""
        part = f"part-{kind}"
        self.carry_out(self.book.begin(step, kind, [part], meta=meta))
        entries = stage(self.root, step, files, attempt=self.book.attempt)
        self.carry_out(self.book.finished(step, part=part, files=[entry.as_tuple() for entry in entries]))
        assert self.failures == []
        return self.disk.describe_committed(step, kind)

    @property
    def trackers(self) -> tuple[int | None, int | None]:
        return read_tracker(self.root, FULL).step, read_tracker(self.root, STATE_DICT).step


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What an attempt left that has saved step 20 and was resumed from there."""
    Life(tmp_path).save(20, FULL, FILES)
    resume_point.set_start(tmp_path, 20, 1)
    return tmp_path


def whole(root: Path, step: int) -> bool:
    """The full checkpoint of attempt 0 is as it was, and a resume would find it."""
    manifest, good = read_manifest(step_dir(root, step)), catalog.newest_good(root)
    assert good is not None
    assert {entry.path for entry in manifest.files} == set(FILES)
    return (manifest.kind, manifest.attempt, good.step) == (FULL, 0, step)


def test_a_resume_that_publishes_the_step_it_began_with_takes_nothing_away(left: Path) -> None:
    life = Life(left, 1)
    told = life.save(20, STATE_DICT, WEIGHTS)
    assert whole(left, 20)
    assert life.trackers == (20, 20)
    assert (told["kind"], told["attempt"], told["beside"]) == (STATE_DICT, 1, True)
    assert catalog.verify(Path(told["path"])).ok
    assert names(Path(told["path"])) == {*WEIGHTS, "manifest.json"}
    assert names(left / ".staging") == set()


def test_weights_beside_outlive_the_monitor_and_go_with_their_run(left: Path) -> None:
    told = Life(left, 1).save(20, STATE_DICT, WEIGHTS)
    life = Life(left, 1, restarted=True)
    assert life.book.status(20, STATE_DICT).state == "committed"
    assert life.disk.describe_committed(20, STATE_DICT)["path"] == told["path"]
    assert catalog.verify(Path(told["path"])).ok
    Life(left, 2)
    assert not (left / ".versions").exists()
    assert whole(left, 20)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_death_about_the_commit_of_weights_beside(left: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = commits.publish

    def die(*args: Any) -> None:
        if moment == "after":
            real(*args)
        raise Death

    life = Life(left, 1)
    with monkeypatch.context() as patch:
        patch.setattr(commits, "publish", die)
        with pytest.raises(Death):
            life.save(20, STATE_DICT, WEIGHTS)
    life = Life(left, 1, restarted=True)
    assert life.book.status(20, STATE_DICT).state == "committed"
    assert catalog.verify(Path(life.disk.describe_committed(20, STATE_DICT)["path"])).ok
    assert whole(left, 20)
    assert names(left / ".staging") == set()


def test_weights_beside_stay_for_as_long_as_visible_ones_would_and_while_they_are_read(left: Path) -> None:
    life = Life(left, 1)
    told = life.save(20, STATE_DICT, WEIGHTS)
    place = Path(told["path"])
    life.save(21, STATE_DICT, WEIGHTS)
    assert catalog.verify(place).ok
    with lease_checkpoint(place.parent, 20, reader="explorer-0", seconds=60, clock=life.clock):
        life.save(22, STATE_DICT, WEIGHTS)
        assert catalog.verify(place).ok
    life.save(23, STATE_DICT, WEIGHTS)
    assert not place.exists()
    assert whole(left, 20)


def test_retention_leaves_the_place_of_a_commit_beside_it(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(left, 1)
    real = commits.sync_tree

    def during(folder: Path) -> None:
        real(folder)
        life.disk.prune([20])

    monkeypatch.setattr(commits, "sync_tree", during)
    files = stage(left, 20, WEIGHTS, attempt=1)
    commits.commit_folder(left, Manifest(step=20, attempt=1, kind=STATE_DICT, files=tuple(files)), beside=True)
    assert catalog.verify(step_dir(versions_dir(left, 1), 20)).ok
    Life(left, 2)
    assert not (left / ".versions").exists()


def test_weights_beside_that_cannot_be_looked_at_do_not_hide_what_was_pruned(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for step in (2, 4, 6):
        commit(tmp_path, step)
    beside = versions_dir(tmp_path, 0)
    beside.parent.mkdir()
    beside.symlink_to(beside)  # looking into it fails, whoever looks
    life.disk = replace(life.disk, policies=(KeepLast(1),))
    pruned, warnings = life.disk.prune([])
    assert [gone["step"] for gone in pruned] == [2, 4]
    assert [text for text in warnings if "next to the step folders" in text]


def test_weights_are_published_though_somebody_holds_the_step(left: Path) -> None:
    pin(left, 20)
    life = Life(left, 1)
    with lease_checkpoint(left, 20, reader="mirror", seconds=60, clock=life.clock):
        assert life.save(20, STATE_DICT, WEIGHTS)["beside"]
    assert whole(left, 20)


def test_the_resumed_step_can_be_saved_in_full_again_with_the_weights_that_lie_beside(left: Path) -> None:
    life = Life(left, 1)
    life.save(20, STATE_DICT, WEIGHTS)
    life.save(20, FULL, FILES)
    assert read_manifest(step_dir(left, 20)).attempt == 1
    assert names(step_dir(left, 20)) == {*WEIGHTS, *FILES, "manifest.json"}
    assert catalog.verify(step_dir(left, 20)).ok


def test_a_pinned_step_that_is_saved_in_full_again_fails_the_save_and_stays(left: Path) -> None:
    pin(left, 20)
    life = Life(left, 1)
    with pytest.raises(AssertionError):
        life.save(20, FULL, FILES)
    assert "held by a pin" in life.failures[0]
    assert whole(left, 20)
    assert names(left / ".staging") == set()


def test_versions_of_a_run_that_was_killed_go_with_the_next_though_leases_are_left(left: Path) -> None:
    told = Life(left, 1).save(20, STATE_DICT, WEIGHTS)
    life = Life(left, 1, restarted=True)
    lease_checkpoint(Path(told["path"]).parent, 20, reader="explorer-0", seconds=60, clock=life.clock)
    life = Life(left, 2)
    assert catalog.verify(Path(told["path"])).ok, "somebody still reads it"
    assert life.save(20, STATE_DICT, WEIGHTS)["path"] == str(step_dir(versions_dir(left, 2), 20))
    life.clock.now += 61
    life.save(21, STATE_DICT, WEIGHTS)
    assert not Path(told["path"]).exists()


def test_deltas_stay_for_a_restarted_monitor_and_go_with_their_attempt(tmp_path: Path) -> None:
    index = tmp_path / ".deltas" / "0-3" / "index.json"
    index.parent.mkdir(parents=True)
    index.touch()
    recovery.recover(tmp_path, attempt=0)
    assert index.exists()
    recovery.recover(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_config_of_weights_beside_is_that_of_the_nearest_checkpoint(left: Path) -> None:
    place = Path(Life(left, 1).save(20, STATE_DICT, WEIGHTS)["path"])
    config = step_dir(left, 20) / "actor/huggingface"
    config.mkdir()
    (config / "config.json").write_text("{}")
    assert find_config(place) == config


# ---- deaths


def test_a_death_after_the_exchange_of_weights_for_a_full_checkpoint_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise Death

    life = Life(tmp_path)
    life.save(20, STATE_DICT, {"actor/model.pt": "w"})
    with monkeypatch.context() as patch:
        patch.setattr(commits, "move_to_trash", die)
        with pytest.raises(Death):
            life.save(20, FULL, {"actor/optim.pt": "o"})
    assert staging_dir(tmp_path, 20, 0).is_dir(), "the weights that the full checkpoint has replaced"
    life = Life(tmp_path, restarted=True)
    assert life.book.status(20, FULL).state == "committed"
    assert life.trackers == (20, 20)
    assert names(tmp_path / ".staging") == set()
    assert list((tmp_path / ".staging").iterdir()) == []
    for step in (30, 40):
        life.save(step, FULL, FILES)
    (row, *_) = prune_plan(tmp_path, [KeepLast(1)], now=life.clock.now)
    assert (row.step, row.keep) == (20, False), "it is not being saved any more"


def test_a_report_that_another_life_has_committed_is_a_double_and_others_are_late(tmp_path: Path) -> None:
    """The writer reports again where the answer did not get out."""
    life = Life(tmp_path)
    part, files = f"part-{FULL}", stage(tmp_path, 10, FILES)
    life.save(10, FULL, FILES)
    told = [entry.as_tuple() for entry in files]
    life = Life(tmp_path, restarted=True)
    for again in (told, told[:1], []):
        assert life.book.finished(10, part=part, files=again, ticket="t") == []
    for late in ([*told, ("actor/more.pt", 1, "x")], [(told[0][0], 1, "x")]):
        with pytest.raises(RunError, match="came after the commit of step 10"):
            life.book.finished(10, part=part, files=late, ticket="t")
    assert life.book.status(10).state == "committed"


@pytest.mark.parametrize("base", [None, Base("ab" * 16, "model", wire=WireFormat("BF16"))], ids=["whole", "adapter"])
def test_a_commit_that_retention_took_is_told_in_another_life(tmp_path: Path, base: Base | None) -> None:
    life = Life(tmp_path)
    meta: CommitMeta = {} if base is None else {"base": base.to_json()}
    told = {step: life.save(step, STATE_DICT, WEIGHTS, meta) for step in (10, 20, 30)}
    assert {one["base"] for one in told.values()} == {None if base is None else base.digest}
    assert not step_dir(tmp_path, 10).exists()
    life = Life(tmp_path, restarted=True)
    assert life.book.status(10).state == "unknown"
    assert life.disk.describe_deleted(10, STATE_DICT) == life.disk.describe_deleted(10) == told[10]
    assert life.disk.describe_deleted(10, FULL) is None
    assert Life(tmp_path, 1).disk.describe_deleted(10) is None, "it is another attempt's"
    assert noted_deletions(tmp_path) == set(), "a resume misses no weights"
    prune(tmp_path, prune_plan(tmp_path, [], now=2000.0, keep_state_dicts=1), now=2000.0)
    assert life.book.status(20).state == "committed", "somebody else has deleted it"
    assert life.disk.describe_committed(20, STATE_DICT) == told[20]
    life.save(40, FULL, FILES)
    life.save(10, FULL, FILES)
    assert life.disk.describe_deleted(10) is None
    note = tmp_path / ".pruned" / "20-0.weights"
    note.write_text("")  # as a disk that is full leaves it
    assert life.disk.describe_deleted(20) is None


@pytest.mark.parametrize("ordered", [True, False])
def test_what_an_earlier_run_of_the_same_attempt_deleted_is_not_told(tmp_path: Path, ordered: bool) -> None:
    life = Life(tmp_path)
    for step in (10, 20, 30):
        life.save(step, STATE_DICT, WEIGHTS)
    assert life.disk.describe_deleted(10) is not None
    for step in (20, 30):
        deletion.delete_folder(tmp_path, step_dir(tmp_path, step))
    if ordered:
        assert put_in_order(tmp_path, None).attempt == 0
    life = Life(tmp_path, restarted=ordered)
    assert life.disk.describe_deleted(10) is None
    for step in (10, 20, 30):
        life.save(step, STATE_DICT, WEIGHTS)
    assert Life(tmp_path, restarted=True).disk.describe_deleted(10) is not None
    resume_point.set_start(tmp_path, 0, 1)
    assert life.disk.describe_deleted(10) is not None, "an earlier attempt of this run"


def test_what_a_commit_failed_of_is_told_with_what_could_not_be_taken_back(tmp_path: Path) -> None:
    async def failure() -> str:
        life = Life(tmp_path)
        error = OSError(errno.EIO, "the disk fails")
        error.add_note("nor can it be taken back")
        committing = Mock(side_effect=error)
        disk = Mock(wraps=life.disk, commit=committing)
        events, changes = EventLog(0, life.clock), Changes()
        execution = Execution(disk, life.book, events, changes, life.clock)
        life.book.begin(20, FULL, ["a"])
        execution.apply(life.book.finished(20, part="a", files=[]))
        await changes.wait(lambda: committing.called and execution.idle, lambda: ("the test", "end"), 30.0)
        await execution.stop()
        return life.book.failures[20]

    told = asyncio.run(failure())
    assert "the disk fails; nor can it be taken back" in told


def test_a_step_that_had_failed_is_not_taken_up_again_from_its_journal(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.carry_out(life.book.begin(20, FULL, ["a"]))
    entries = stage(tmp_path, 20, FILES)
    dumped = life.book.dump(20)
    life.book.failed(20, None, "disk full")
    life.disk.write_failed(life.book.failures)  # and then it died, before it could clean up
    life.disk.write_journal(20, dumped)
    life = Life(tmp_path, restarted=True)
    life.carry_out(life.book.finished(20, part="a", files=[entry.as_tuple() for entry in entries]))
    assert life.book.status(20).state == "failed"
    assert catalog.scan(tmp_path) == []
    assert not staging_dir(tmp_path, 20, 0).exists()


def test_what_another_attempt_committed_in_full_is_listed_as_such_to_the_end(left: Path) -> None:
    commit(left, 19, WEIGHTS, kind=STATE_DICT)
    life = Life(left, 1)
    assert life.save(19, STATE_DICT, WEIGHTS)["beside"], "of an earlier step than the resumed one"
    assert read_manifest(step_dir(left, 19)).attempt == 0
    assert life.trackers == (20, 20)


def test_weights_of_a_step_that_verl_saved_lie_beside_it(tmp_path: Path) -> None:
    verls(tmp_path, 20)
    write_tracker(tmp_path, FULL, 20)
    assert put_in_order(tmp_path, None).step == 20
    life = Life(tmp_path)
    verls(tmp_path, 30)
    write_tracker(tmp_path, FULL, 30)
    before = {step: names(step_dir(tmp_path, step)) for step in (20, 30)}
    for step in (20, 30):
        result = life.save(step, STATE_DICT, WEIGHTS)
        assert (result["beside"], Path(result["path"])) == (True, step_dir(versions_dir(tmp_path, 0), step))
    assert Life(tmp_path, restarted=True).book.status(30, STATE_DICT).state == "committed"
    assert {step: names(step_dir(tmp_path, step)) for step in (20, 30)} == before
    assert life.trackers == (30, 20)
    assert put_in_order(tmp_path, None).step == 30


def rebuilt(root: Path) -> list[str]:
    """The monitor begins again; what it then says."""
    disk = CheckpointDisk(root=root, attempt=0, policies=(), keep_state_dicts=2, fsync=False, clock=Clock())
    return disk.rebuild(lambda committed: CommitBook(clock=Clock(), committed=committed), restarted=True).problems


@pytest.mark.parametrize("over_weights", [False, True])
def test_a_monitor_leaves_the_tracker_that_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over_weights: bool
) -> None:
    put_in_order(tmp_path, None)
    if over_weights:
        commit(tmp_path, 20, WEIGHTS, kind=STATE_DICT)
    verls(tmp_path, 20)
    write_tracker(tmp_path, FULL, 20)
    real = Path.read_bytes

    def read(path: Path) -> bytes:
        if path == tracker_path(tmp_path, FULL):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read)
        (problem,) = rebuilt(tmp_path)
    assert "latest_checkpointed_iteration.txt cannot be read" in problem
    assert put_in_order(tmp_path, None).step == 20


@pytest.mark.parametrize("over_weights", [False, True])
def test_a_monitor_leaves_an_empty_tracker_where_verl_may_have_saved_since(tmp_path: Path, over_weights: bool) -> None:
    put_in_order(tmp_path, None)
    if over_weights:
        commit(tmp_path, 20, WEIGHTS, kind=STATE_DICT)
    verls(tmp_path, 20)
    tracker_path(tmp_path, FULL).write_text("")
    (problem,) = rebuilt(tmp_path)
    assert "latest_checkpointed_iteration.txt holds ''" in problem
    assert tracker_path(tmp_path, FULL).read_text() == ""
    with pytest.raises(RunError, match=r"global_step_20 was written by verl.*resume_step=20"):
        put_in_order(tmp_path, None)
    assert put_in_order(tmp_path, 20).step == 20
    commit(tmp_path, 30)
    tracker_path(tmp_path, FULL).write_text("")
    assert rebuilt(tmp_path)
    assert read_tracker(tmp_path, FULL).step == 30, "there is none of verl's after it"


def test_weights_are_published_though_what_is_in_their_place_cannot_be_read_now(left: Path) -> None:
    unreadable(step_dir(left, 20) / "manifest.json")
    assert Life(left, 1).save(20, STATE_DICT, WEIGHTS)["beside"]


def test_the_first_step_of_a_folder_may_have_a_part_in_its_own_place(tmp_path: Path) -> None:
    life = Life(tmp_path)
    verls(tmp_path, 2, place="critic")
    life.save(2, FULL, FILES)
    assert set(FILES) < read_manifest(step_dir(tmp_path, 2)).paths
    assert catalog.verify(step_dir(tmp_path, 2)).unlisted == ()


@pytest.mark.parametrize(
    ("fsync", "asked", "synced"), [(True, None, True), (True, False, False), (False, None, False), (False, True, True)]
)
def test_a_commit_is_made_durable_as_was_asked_for_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool, asked: bool | None, synced: bool
) -> None:
    disk = CheckpointDisk(
        root=root, attempt=0, policies=(KeepLast(10),), keep_state_dicts=2, fsync=fsync, clock=Clock()
    )
    stage(root, 3, FILES)
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(os.fstat(descriptor).st_ino))
    disk.commit(Commit(3, 0, FULL, (), None, {}, 0.0, False, asked))
    of_files = [(step_dir(root, 3) / name).stat().st_ino for name in FILES]
    assert set(of_files) <= set(calls) if synced else not set(of_files) & set(calls)
