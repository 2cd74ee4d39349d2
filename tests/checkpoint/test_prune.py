"""Retention on disk, pins and leases."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.helpers import commit, refuse, stage, verls
from trinity_sync.checkpoint.folder import catalog, contents, deletion, leases, recovery, resume_point
from trinity_sync.checkpoint.folder.contents import (
    ManifestError,
    UnreadableError,
    step_dir,
    tracker_path,
    write_tracker,
)
from trinity_sync.checkpoint.folder.deletion import prune, prune_plan
from trinity_sync.checkpoint.folder.leases import lease_checkpoint, pin, unpin
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.protocol.retention import KeepBest, KeepFor, KeepLast, Policy


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(root: Path, *policies: Policy, now: float = 100.0) -> list[int]:
    return [gone["step"] for gone in prune(root, prune_plan(root, policies, now=now), now=now)[0]]


def steps(root: Path) -> list[int]:
    return [info.step for info in catalog.scan(root)]


def test_a_plan_deletes_nothing(tmp_path: Path) -> None:
    for step in (10, 20):
        commit(tmp_path, step)
    plan = prune_plan(tmp_path, [KeepLast(1)], now=100.0)
    assert [(row.step, row.keep) for row in plan] == [(10, False), (20, True)]
    assert all(row.reasons for row in plan)
    assert steps(tmp_path) == [10, 20]


def test_a_process_that_plans_again_parses_only_what_has_changed_and_sees_all_that_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    parse = contents.parse_manifest

    def counted(text: str, name: Path, step: int | None) -> contents.Manifest:
        parsed.append(name.parent.name)
        return parse(text, name, step)

    def plans() -> list[tuple[int, bool, tuple[str, ...]]]:
        """The plan of one that has looked before, which is that of one that has not."""
        parsed.clear()
        found = prune_plan(root, [KeepLast(2), KeepBest("m", 1)], now=100.0, known=known)
        new = list(parsed)
        assert prune_plan(root, [KeepLast(2), KeepBest("m", 1)], now=100.0) == found
        parsed[:] = new
        return [(row.step, row.keep, row.reasons[:1]) for row in found]

    monkeypatch.setattr(contents, "parse_manifest", counted)
    known: contents.KnownManifests = {}
    root, elsewhere = tmp_path / "a", tmp_path / "b"
    for step in range(10, 70, 10):
        commit(root, step, metrics={"m": -step})
        commit(elsewhere, step, metrics={"m": -step}, attempt=1)
    assert [step for step, keep, _ in plans() if keep] == [10, 50, 60]
    assert len(parsed) == 6
    assert (plans(), parsed) == (plans(), [])

    pin(root, 20)  # as another process or a person does
    shutil.rmtree(step_dir(root, 60))
    shutil.rmtree(step_dir(root, 40))
    step_dir(elsewhere, 40).rename(step_dir(root, 40))
    file = step_dir(root, 30) / "manifest.json"
    before = file.stat()
    with file.open("r+") as same:  # the file, its size and its times stay
        manifest = parse(same.read(), file, 30)
        same.seek(0)
        same.write(replace(manifest, metrics={"m": 777}).to_text())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    kept = {step: reason for step, keep, (reason,) in plans() if keep}
    assert kept == {20: "pinned", 30: "keep_best 1 by m (777)", 40: "keep_last 2", 50: "newest full checkpoint"}
    assert sorted(parsed) == ["global_step_30", "global_step_40"]
    assert {folder.name for folder in known} == {f"global_step_{step}" for step in (10, 20, 30, 40, 50)}
    file.write_bytes(file.read_bytes()[:-9])
    assert 30 not in {step for step, _, _ in plans()}


def test_pruning_removes_the_whole_step_folder_and_says_what_it_freed(tmp_path: Path) -> None:
    commit(tmp_path, 10, {"a": "12345"})
    commit(tmp_path, 20)
    (gone,), _ = prune(tmp_path, prune_plan(tmp_path, [KeepLast(1)], now=0.0), now=0.0)
    assert (gone["step"], gone["freed_bytes"]) == (10, 5)
    assert "keep_last" in gone["reason"]
    assert {path.name for path in tmp_path.iterdir()} == {".staging", ".leases", ".pruned", "global_step_20"}
    assert list((tmp_path / ".leases").iterdir()) == []


def test_the_limit_is_known_from_the_disk_so_it_survives_a_restart(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        commit(tmp_path, step, created=float(step), metrics={"m": -step})
    assert run(tmp_path, KeepFor(75.0)) == [10, 20]
    assert run(tmp_path, KeepBest("m", 1)) == []


def test_a_folder_that_is_not_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    step_dir(tmp_path, 5).mkdir()
    commit(tmp_path, 10)
    commit(tmp_path, 20)
    assert run(tmp_path, KeepLast(1)) == [10]
    assert steps(tmp_path) == [5, 20]


def test_weights_on_the_way_to_a_full_checkpoint_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        commit(tmp_path, step, kind=STATE_DICT)
    stage(tmp_path, 10, {"optim": "o"})
    assert run(tmp_path, KeepLast(1)) == [20]


def test_sync_folders_that_nobody_reads_go(tmp_path: Path) -> None:
    for step in range(1, 8):
        commit(tmp_path, step, kind=STATE_DICT)
    assert run(tmp_path, KeepLast(1)) == [1, 2, 3, 4, 5]


def test_a_pin_holds_until_it_is_taken_away(tmp_path: Path) -> None:
    for step in (10, 20):
        commit(tmp_path, step)
    pin(tmp_path, 10, note="paper")
    assert run(tmp_path, KeepLast(1)) == []
    assert unpin(tmp_path, 10)
    assert run(tmp_path, KeepLast(1)) == [10]


def test_taking_away_a_pin_that_is_not_there_is_told(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    assert not unpin(tmp_path, 10)


def test_only_a_checkpoint_can_be_pinned(tmp_path: Path) -> None:
    with pytest.raises(ManifestError):
        pin(tmp_path, 10)


def test_a_pin_does_not_hold_the_same_step_of_another_attempt(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    pin(tmp_path, 10)
    resume_point.set_start(tmp_path, 0, 1)
    commit(tmp_path, 10, {"new": "1"}, attempt=1)
    commit(tmp_path, 20, attempt=1)
    assert run(tmp_path, KeepLast(1)) == [10]


def test_a_folder_that_is_being_read_stays_until_the_reader_is_done(tmp_path: Path) -> None:
    for step in (10, 20):
        commit(tmp_path, step)
    clock = Clock()
    with lease_checkpoint(tmp_path, 10, reader="explorer-0", seconds=60, clock=clock) as lease:
        assert lease.path == step_dir(tmp_path, 10)
        assert run(tmp_path, KeepLast(1), now=clock.now) == []
    assert run(tmp_path, KeepLast(1), now=clock.now) == [10]


def test_a_reader_that_died_holds_nothing_up_for_long(tmp_path: Path) -> None:
    for step in (10, 20):
        commit(tmp_path, step)
    clock = Clock()
    lease = lease_checkpoint(tmp_path, 10, reader="explorer-0", seconds=60, clock=clock)
    clock.now += 50
    lease.renew(60)
    assert run(tmp_path, KeepLast(1), now=clock.now + 59) == []
    assert run(tmp_path, KeepLast(1), now=clock.now + 61) == [10]
    assert list((tmp_path / ".leases").iterdir()) == []


def test_a_lease_that_was_taken_after_the_plan_is_honoured(tmp_path: Path) -> None:
    for step in (10, 20):
        commit(tmp_path, step)
    plan = prune_plan(tmp_path, [KeepLast(1)], now=100.0)
    lease_checkpoint(tmp_path, 10, reader="explorer-0", seconds=60, clock=Clock())
    assert prune(tmp_path, plan, now=100.0) == ([], [])
    assert catalog.verify(step_dir(tmp_path, 10)).ok


@pytest.fixture
def deleted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 10 is deleted when somebody has seen it and is about to write the file that holds it."""
    for step in (10, 20):
        commit(tmp_path, step)
    real = leases.replace_file

    def delete(path: Path, text: str, **options: bool) -> None:
        monkeypatch.setattr(leases, "replace_file", real)
        assert run(tmp_path, KeepLast(1)) == [10]
        real(path, text, **options)

    monkeypatch.setattr(leases, "replace_file", delete)


@pytest.mark.usefixtures("deleted_first")
def test_a_lease_on_what_is_deleted_at_the_same_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="was deleted while explorer-0"):
        lease_checkpoint(tmp_path, 10, reader="explorer-0", seconds=60, clock=Clock())
    assert list((tmp_path / ".leases").iterdir()) == []


@pytest.mark.usefixtures("deleted_first")
def test_a_pin_on_what_is_deleted_at_the_same_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="step 10 was deleted while a pin"):
        pin(tmp_path, 10)
    assert list(tmp_path.glob(".pins/*")) + list(tmp_path.glob(".leases/*")) == []


def test_a_pin_that_comes_too_late_because_its_program_was_stopped_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        commit(tmp_path, step)
    clock, real = Clock(), leases.replace_file

    def stopped(path: Path, text: str, **options: bool) -> None:
        if path.parent.name == ".pins":
            clock.now += 1000
            assert run(tmp_path, KeepLast(1), now=clock.now) == [10]
        real(path, text, **options)

    monkeypatch.setattr(leases, "replace_file", stopped)
    with pytest.raises(RunError, match="step 10 was deleted"):
        pin(tmp_path, 10, clock=clock)
    assert list(tmp_path.glob(".pins/*")) + list(tmp_path.glob(".leases/*")) == []


def test_a_lease_that_ran_out_is_not_renewed_once_the_checkpoint_is_gone(tmp_path: Path) -> None:
    for step in (10, 20):
        commit(tmp_path, step)
    clock = Clock()
    lease = lease_checkpoint(tmp_path, 10, reader="mirror", seconds=60, clock=clock)
    clock.now += 61
    lease.renew(60)  # it is still there
    clock.now += 61
    assert run(tmp_path, KeepLast(1), now=clock.now) == [10]
    with pytest.raises(RunError, match="step 10 was deleted while mirror"):
        lease.renew(60)


def test_a_lease_that_cannot_be_read_now_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        commit(tmp_path, step)
    lease_checkpoint(tmp_path, 10, reader="explorer-0", seconds=60, clock=Clock())
    read = Path.read_text

    def stale(path: Path, *args: object, **kwargs: object) -> str:
        if path.parent.name == ".leases":
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", stale)
    assert run(tmp_path, KeepLast(1), now=1e12) == []


def test_what_took_the_place_of_a_checkpoint_since_the_plan_stays(tmp_path: Path) -> None:
    commit(tmp_path, 10, kind=STATE_DICT)
    for step in (20, 30, 40):
        commit(tmp_path, step, kind=STATE_DICT)
    plan = prune_plan(tmp_path, [KeepLast(1)], now=100.0)
    commit(tmp_path, 10, {"optim": "o"})
    assert [gone["step"] for gone in prune(tmp_path, plan, now=100.0)[0]] == [20]
    assert catalog.verify(step_dir(tmp_path, 10)).ok


def test_a_checkpoint_that_cannot_be_put_back_is_abandoned_not_lost(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    condemned = tmp_path / ".condemned-0a-global_step_10"
    step_dir(tmp_path, 10).rename(condemned)
    commit(tmp_path, 10, {"new": "1"}, attempt=1)
    recovery.recover(tmp_path)
    assert catalog.verify(step_dir(tmp_path, 10)).ok
    assert catalog.verify(tmp_path / "abandoned-global_step_10-attempt_0").ok
    assert (step_dir(tmp_path, 10) / "new").exists()
    assert not condemned.exists()


def test_a_deletion_that_can_neither_be_done_nor_taken_back_tells_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = commit(tmp_path, 10)

    def fail(*_: object) -> None:
        refuse(condemned, monkeypatch)
        raise RuntimeError("the first error")

    condemned = tmp_path / ".condemned-0a-global_step_10"
    with monkeypatch.context() as failing:
        failing.setattr(deletion.secrets, "token_hex", lambda size: "0a")
        failing.setattr(deletion, "note_deletion", fail)
        with pytest.raises(RuntimeError, match="the first error") as told:
            deletion.trash_checkpoint(tmp_path, manifest, now=100.0)
    assert "Input/output error" in told.value.__notes__[0]
    monkeypatch.undo()
    recovery.recover(tmp_path)
    assert catalog.verify(step_dir(tmp_path, 10)).ok


def test_a_claim_that_cannot_be_taken_away_is_no_fault_of_what_was_done_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = commit(tmp_path, 10)
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".claim":
            raise OSError(errno.EIO, "the disk fails")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert deletion.trash_checkpoint(tmp_path, manifest, now=100.0)
    assert steps(tmp_path) == []


def test_a_checkpoint_to_which_a_resume_has_set_a_tracker_meanwhile_stays(tmp_path: Path) -> None:
    for step in (10, 20):
        commit(tmp_path, step, kind=STATE_DICT)
    plan = prune_plan(tmp_path, [], now=100.0, keep_state_dicts=1)
    write_tracker(tmp_path, STATE_DICT, 10)
    assert prune(tmp_path, plan, now=100.0) == ([], [])
    assert steps(tmp_path) == [10, 20]


def test_what_was_deleted_before_the_disk_refused_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20, 30, 40):
        commit(tmp_path, step)
    refuse(step_dir(tmp_path, 20), monkeypatch)
    pruned, problems = prune(tmp_path, prune_plan(tmp_path, [KeepLast(1)], now=100.0), now=100.0)
    assert [gone["step"] for gone in pruned] == [10, 30]
    assert problems == ["step 20 could not be deleted: Input/output error"]
    assert steps(tmp_path) == [20, 40]


def test_nothing_is_given_up_while_a_tracker_cannot_be_read(tmp_path: Path) -> None:
    for step in (10, 20):
        commit(tmp_path, step)
    tracker_path(tmp_path, FULL).mkdir()
    with pytest.raises(UnreadableError, match=r"latest_checkpointed_iteration\.txt"):
        prune_plan(tmp_path, [KeepLast(1)], now=100.0)


def saved_over(root: Path, *of: int) -> None:
    """Weights that were committed, and over which verl has saved in full since."""
    for step in of:
        commit(root, step, {"actor/weights.safetensors": "w"}, kind=STATE_DICT)
        verls(root, step)


@pytest.mark.parametrize("text", ["", "not a step"])
def test_nothing_is_given_up_where_verl_has_saved_and_its_tracker_says_nothing(tmp_path: Path, text: str) -> None:
    saved_over(tmp_path, 1, 2, 3)
    tracker_path(tmp_path, FULL).write_text(text)
    with pytest.raises(UnreadableError, match=r"latest_checkpointed_iteration\.txt holds"):
        run(tmp_path)
    for step in (1, 2, 3):
        deletion.delete_folder(tmp_path, step_dir(tmp_path, step))
    for step in (10, 20):
        commit(tmp_path, step)
    assert run(tmp_path, KeepLast(1)) == [10], "of verl's there is nothing here"


def test_one_read_of_the_tracker_decides_what_is_verls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_over(tmp_path, 1, 2, 3, 4)
    write_tracker(tmp_path, FULL, 4)
    real, fails = Path.read_bytes, iter([True] * 4)

    def read(path: Path) -> bytes:
        if path == tracker_path(tmp_path, FULL) and next(fails, False):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(UnreadableError, match=r"latest_checkpointed_iteration\.txt"):
        run(tmp_path)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_weights_over_which_verl_saves_stay_before_its_tracker_names_them(tmp_path: Path) -> None:
    plain = {"actor/weights.safetensors": "w"}
    for step in (1, 2, 3, 4, 5):
        commit(tmp_path, step, plain, kind=STATE_DICT)
    plan = prune_plan(tmp_path, [], now=100.0)
    assert [row.step for row in plan if not row.keep] == [1, 2, 3]
    write_tracker(tmp_path, FULL, 0)
    verls(tmp_path, 1)
    assert [gone["step"] for gone in prune(tmp_path, plan, now=100.0)[0]] == [2, 3], "verl began after the plan"
    assert run(tmp_path) == []
    assert steps(tmp_path) == [1, 4, 5]


def test_what_was_deleted_is_noted_and_the_notes_stay_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "_MOST_NOTES", 2)
    for step in (1, 2, 3, 4, 5):
        commit(tmp_path, step)
    assert run(tmp_path, KeepLast(1)) == [1, 2, 3, 4]
    assert deletion.noted_deletions(tmp_path) == {(3, 0), (4, 0)}


def test_a_note_that_cannot_be_written_stops_no_deletion(tmp_path: Path) -> None:
    (tmp_path / ".pruned").write_text("in the way")
    for step in (10, 20):
        commit(tmp_path, step)
    assert run(tmp_path, KeepLast(1)) == [10]
    assert deletion.noted_deletions(tmp_path) == set()
    commit(tmp_path, 10)


@pytest.mark.parametrize("link", [".pruned", ".pruned/10-0"])
def test_a_note_is_written_over_nothing_behind_a_link(tmp_path: Path, link: str) -> None:
    root, theirs = tmp_path / "root", tmp_path / "theirs"
    theirs.mkdir()
    for name in ("10-0", "20-0"):
        (theirs / name).write_text("theirs")
    for step in (10, 20):
        commit(root, step)
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(theirs / "10-0" if "/" in link else theirs)
    assert run(root, KeepLast(1)) == [10]
    deletion.unlink_notes(root, 0)
    assert {path.name: path.read_text() for path in theirs.iterdir()} == {"10-0": "theirs", "20-0": "theirs"}


def test_a_deletion_is_noted_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in (10, 20):
        commit(tmp_path, step)
    monkeypatch.setattr(deletion, "replace_file", full)
    run(tmp_path, KeepLast(1))
    assert deletion.noted_deletions(tmp_path) == {(10, 0)}


def test_a_garbled_lease_holds_nothing(tmp_path: Path) -> None:
    for step in (10, 20):
        commit(tmp_path, step)
    (tmp_path / ".leases").mkdir(exist_ok=True)
    (tmp_path / ".leases/10-0-dead.json").write_text("")
    assert run(tmp_path, KeepLast(1), now=1e12) == [10]


def test_deleting_what_is_gone_already_is_no_error(tmp_path: Path) -> None:
    for step in (10, 20):
        commit(tmp_path, step)
    plan = prune_plan(tmp_path, [KeepLast(1)], now=100.0)
    assert run(tmp_path, KeepLast(1)) == [10]
    assert prune(tmp_path, plan, now=100.0) == ([], [])


def test_what_a_tracker_names_stays_until_the_tracker_has_moved(tmp_path: Path) -> None:
    for step in (2, 4):
        commit(tmp_path, step)
    write_tracker(tmp_path, FULL, 2)  # the disk refused the next one, or the monitor died before it
    assert run(tmp_path, KeepLast(1), now=0.0) == []
    write_tracker(tmp_path, FULL, 4)
    assert run(tmp_path, KeepLast(1), now=0.0) == [2]


def test_what_died_while_it_wrote_a_pin_or_a_lease_leaves_nothing_for_long(tmp_path: Path) -> None:
    torn = [tmp_path / name for name in (".pins/.2-0.json.7.tmp", ".leases/.2-0-ab.json.7.tmp")]
    for path in torn:
        path.parent.mkdir()
        path.touch()
    written = torn[0].stat().st_mtime
    leases.leased(tmp_path, now=written + 5.0)
    assert all(path.exists() for path in torn)
    leases.leased(tmp_path, now=written + 3600.0)
    assert not any(path.exists() for path in torn)
