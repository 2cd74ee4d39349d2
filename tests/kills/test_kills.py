"""The campaign's own guards: that each of its checks fires, and that it touches no process but its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kills import checks, places, plan, processes
from tests.kills.checks import Ledger, Owner
from tests.kills.places import Places
from tests.kills.plan import CONFIGS, draw_plan
from tests.kills.processes import MARK, Member, own_mark
from tests.kills.running import Launch
from tests.kills.table import render
from tests.kills.trial import kind_of
from trinity_sync.checkpoint.folder import commits, owner, resume_point
from trinity_sync.checkpoint.folder.contents import (
    MANIFEST,
    Manifest,
    read_manifest,
    staging_dir,
    step_dir,
    tracker_path,
    write_tracker,
)
from trinity_sync.protocol.parts import FULL, STATE_DICT

LIMIT_S = 30.0
OWN, OTHER = "own run id", "id of another run"


def mark(run: str) -> str:
    return owner.Owner(run=run, folder="..", host="host", session="session").to_text()


class PretendRun:
    """What a run leaves: a record, events and committed checkpoints of one small file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.mirror = folder, folder / "checkpoints", folder / "mirror"
        self._events: list[dict[str, object]] = []
        self._attempts: list[int | None] = []

    def begin(self, start: int | None = None) -> None:
        self._attempts.append(start)
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / owner.MARK).write_text(mark(OWN))
        attempts = [{"attempt": index, "resumed_from": at} for index, at in enumerate(self._attempts)]
        record = {"id": OWN, "status": "running", "attempts": attempts}
        (self.folder / "run.json").write_text(json.dumps(record))
        if start is not None:
            resume_point.set_start(self.root, start, self.attempt)

    @property
    def attempt(self) -> int:
        return len(self._attempts) - 1

    def commit(self, step: int, kind: str = FULL, *, digest: str | None = None, run: str = OWN) -> None:
        folder = staging_dir(self.root, step, self.attempt)
        folder.mkdir(parents=True)
        (folder / "weights").write_text(f"{step} {self.attempt} {kind}")
        label = digest or f"digest of {step}"
        commits.commit_folder(self.root, Manifest(step=step, attempt=self.attempt, kind=kind, digest=label, run=run))
        write_tracker(self.root, kind, step)
        self.event("commit", step=step, kind=kind)

    def event(self, name: str, **fields: object) -> None:
        self._events.append({"event": name, "attempt": self.attempt, **fields})
        text = "".join(json.dumps(event) + "\n" for event in self._events)
        (self.folder / "events.jsonl").write_text(text)


@pytest.fixture
def run(tmp_path: Path) -> PretendRun:
    made = PretendRun(tmp_path / "run")
    made.begin()
    for step in (2, 4, 6):
        made.event("publish", version=step, digest=f"digest of {step}")
        made.commit(step)
    return made


def pruned_in_silence(run: PretendRun) -> None:
    shutil.rmtree(step_dir(run.root, 2))


def replaced_by_weights(run: PretendRun) -> None:
    run.begin(6)
    shutil.rmtree(step_dir(run.root, 6))
    run.commit(6, STATE_DICT)


def replaced_by_weights_and_pruned(run: PretendRun) -> None:
    replaced_by_weights(run)
    shutil.rmtree(step_dir(run.root, 6))
    run.event("prune", step=6)


def committed_again(run: PretendRun) -> None:
    run.begin(6)
    shutil.rmtree(step_dir(run.root, 4))
    run.commit(4)


def changed(run: PretendRun) -> None:
    places.damage(step_dir(run.root, 4) / "weights", "flip", 0.5)


def tracker_of_nothing(run: PretendRun) -> None:
    write_tracker(run.root, FULL, 7)


def told_and_not_there(run: PretendRun) -> None:
    run.event("commit", step=8, kind=FULL)


def torn_label(run: PretendRun) -> None:
    run.event("publish", version=8, digest="digest of 7")


def torn_load(run: PretendRun) -> None:
    run.event("load", version=6, explorer="explorer-0", digest="digest of 5")


def torn_manifest(run: PretendRun) -> None:
    run.commit(8, digest="digest of 7")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (pruned_in_silence, "full checkpoint of step 2 (attempt 0) is gone"),
        (replaced_by_weights, "full checkpoint of step 6 (attempt 0) is a state_dict"),
        (replaced_by_weights_and_pruned, "full checkpoint of step 6 (attempt 0) is gone"),
        (committed_again, "checkpoint of step 4 is another one"),
        (changed, "was changed"),
        (tracker_of_nothing, "names step 7, which is not there"),
        (told_and_not_there, "full checkpoint of step 8 (attempt 0) is gone"),
        (torn_label, "version (0, 8) has the digest digest of 7"),
        (torn_load, "explorer-0 holds digest of 5"),
        (torn_manifest, "the manifest of step 8 has the digest digest of 7"),
    ],
)
def test_every_check_fires(run: PretendRun, harm: Callable[[PretendRun], None], told: str) -> None:
    ledger = Ledger(None, {step: f"digest of {step}" for step in range(10)})
    assert ledger.look(run.folder, run.root) == []
    harm(run)
    if len(checks.attempts(run.folder)) > 1:
        ledger.began = 6
    assert [problem for problem in ledger.look(run.folder, run.root) if told in problem]


def test_what_is_allowed_to_go_is_no_loss(run: PretendRun) -> None:
    ledger = Ledger(2, None)
    assert ledger.look(run.folder, run.root) == []
    pruned_in_silence(run)  # by the retention; its driver was killed before it could say so
    assert ledger.look(run.folder, run.root) == []
    ledger.damage(6)
    changed_again = step_dir(run.root, 6) / "weights"
    places.damage(changed_again, "cut", 0.0)
    assert ledger.good == [4]
    run.begin(4)  # passes over 6
    ledger.began = 4
    assert ledger.look(run.folder, run.root) == []
    run.commit(6)
    assert ledger.look(run.folder, run.root) == []
    assert ledger.good == [4, 6]


def test_a_pinned_checkpoint_may_not_go(run: PretendRun) -> None:
    ledger = Ledger(2, None)
    ledger.look(run.folder, run.root)
    ledger.pinned = 2
    pruned_in_silence(run)
    assert ledger.look(run.folder, run.root) == ["lost: the full checkpoint of step 2 (attempt 0) is gone"]


# whose bytes


def manifest_of_another(run: PretendRun) -> None:
    run.commit(8, run=OTHER)


def manifest_without_a_run(run: PretendRun) -> None:
    path = step_dir(run.root, 4) / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "run": None}))


def digest_of_another(run: PretendRun) -> None:
    run.commit(8, digest="digest of the stranger")


def moved_step(run: PretendRun) -> None:
    step_dir(run.root, 4).rename(step_dir(run.root, 5))


def abandoned_of_another(run: PretendRun) -> None:
    run.commit(8, run=OTHER)
    folder = run.mirror / "global_step_8"
    folder.mkdir(parents=True)
    (step_dir(run.root, 8) / MANIFEST).rename(folder / "manifest.abandoned.json")
    (run.mirror / owner.MARK).write_text(mark(OWN))


def mark_of_another(run: PretendRun) -> None:
    (run.root / owner.MARK).write_text(mark(OTHER))


def no_mark(run: PretendRun) -> None:
    (run.root / owner.MARK).unlink()


def another_id(run: PretendRun) -> None:
    record = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps({**record, "id": OTHER}))


def wrong_label(run: PretendRun) -> None:
    run.event("publish", version=8, digest="digest of 8")
    run.commit(8, digest="digest of 6")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (manifest_of_another, "of another run: .*step_8/manifest.json has the run id 'id of another run'"),
        (manifest_without_a_run, "of another run: .*step_4/manifest.json has the run id None"),
        (digest_of_another, "of another run: .*step_8/manifest.json has the digest digest of the stranger"),
        (abandoned_of_another, "of another run: .*step_8/manifest.abandoned.json has the run id"),
        (mark_of_another, "of another run: .* is the mark of the run 'id of another run'"),
        (no_mark, "mislabelled: .*checkpoints has checkpoints and no mark"),
        (another_id, "mislabelled: run.json has the run id 'id of another run'"),
        (
            wrong_label,
            "mislabelled: .*step_8/manifest.json has the digest digest of 6, attempt 0 published digest of 8",
        ),
        (moved_step, "mislabelled: .*step_5/manifest.json says step 4"),
    ],
)
def test_bytes_of_another_run_and_wrong_labels_are_found(
    run: PretendRun, harm: Callable[[PretendRun], None], told: str
) -> None:
    whose, ledger = Owner(frozenset(["digest of the stranger"])), Ledger(None, None)

    def problems() -> list[str]:
        ledger.look(run.folder, run.root)
        return list(whose.look(run.folder, (run.root, run.mirror), ledger.published))

    assert problems() == []
    harm(run)
    found = problems()
    assert len(found) == 1
    assert re.match(told, found[0])


def test_what_is_torn_or_foreign_in_a_mirror_is_found(run: PretendRun) -> None:
    mirror = run.root
    assert list(checks.mirror_problems(mirror)) == []
    (mirror / "thesis").mkdir()
    (mirror / ".probe-7").touch()
    changed(run)
    found = list(checks.mirror_problems(mirror))
    assert sorted(kind_of(problem) for problem in found) == ["left behind", "left behind", "lost"]


@pytest.mark.parametrize(
    ("status", "newest", "saves", "told"),
    [
        ("interrupted", 6, True, []),
        ("interrupted", 4, False, []),
        ("running", 6, True, ["mislabelled: the status of the run is running instead of interrupted"]),
        ("interrupted", 4, True, ["lost: the signal came in step 6, and the newest checkpoint is that of step 4"]),
    ],
)
def test_a_signal_leaves_a_status_and_the_step(
    run: PretendRun, status: str, newest: int, saves: bool, told: list[str]
) -> None:
    record = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps({**record, "status": status}))
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 7)))
    assert list(checks.signal_problems(run.folder, 0, newest, saves=saves)) == told
    assert list(checks.signal_problems(run.folder, 1, newest, saves=saves)) == []  # this start has recorded nothing


def test_a_checkpoint_from_the_mirror_is_no_loss(run: PretendRun) -> None:
    ledger = Ledger(None, None)
    ledger.look(run.folder, run.root)
    aside = run.folder / "aside"
    shutil.copytree(step_dir(run.root, 6), aside)
    places.lose(run.root)
    assert not run.root.exists()
    ledger.fetched(ledger.full[6])
    run.begin(6)
    ledger.began = 6
    assert ledger.look(run.folder, run.root)  # until it is there
    aside.rename(step_dir(run.root, 6))
    write_tracker(run.root, FULL, 6)
    write_tracker(run.root, STATE_DICT, 6)
    ledger.fetched(checks.Kept(6, 0, read_manifest(step_dir(run.root, 6)).own_digest))
    assert ledger.look(run.folder, run.root) == []


def test_a_damaged_checkpoint_that_was_fetched_again_is_good(run: PretendRun) -> None:
    ledger = Ledger(None, None)
    ledger.look(run.folder, run.root)
    mirror = run.folder / "mirror"
    shutil.copytree(run.root, mirror)
    places.damage(step_dir(run.root, 6) / "weights", "cut", 0.0)
    ledger.damage(6)
    ledger.look(run.folder, run.root)
    assert (ledger.good, sorted(checks.whole_in(mirror))) == ([2, 4], [2, 4, 6])
    shutil.copy(step_dir(mirror, 6) / "weights", step_dir(run.root, 6) / "weights")
    assert ledger.look(run.folder, run.root) == []
    assert ledger.good == [2, 4, 6]


def test_a_tracker_that_was_damaged_is_to_be_repaired_by_the_next_attempt(run: PretendRun) -> None:
    ledger = Ledger(None, None)
    ledger.look(run.folder, run.root)
    places.damage(tracker_path(run.root, FULL), "empty", 0.0)
    ledger.tracker_damaged = ledger.attempt
    assert ledger.look(run.folder, run.root) == []
    run.begin(6)
    ledger.began = 6
    places.damage(tracker_path(run.root, FULL), "empty", 0.0)
    assert ledger.look(run.folder, run.root) == []  # it may have been killed before it repaired the tracker
    run.event("commit", step=6, kind=FULL)
    assert [kind_of(problem) for problem in ledger.look(run.folder, run.root)] == ["mislabelled"]


def test_the_lease_of_a_copier_that_was_killed_expires_by_itself(run: PretendRun) -> None:
    (run.root / ".leases").mkdir(exist_ok=True)
    (run.root / ".leases" / "4-0-aa.json").touch()
    assert len(checks.left_behind(run.root)) == 1
    assert checks.left_behind(run.root, copier_died=True) == []


@pytest.mark.parametrize("name", [".staging/4-0", ".trash-x", ".leases/4-0-aa.json"])
def test_leftovers_are_found(run: PretendRun, name: str) -> None:
    assert checks.left_behind(run.root) == []
    (run.root / name).mkdir(parents=True)
    assert len(checks.left_behind(run.root)) == 1


@pytest.mark.parametrize(("steps", "fine"), [([1, 2, 3], True), ([1, 3], False), ([1, 2, 2], False), ([2], False)])
def test_metrics_have_each_step_once(tmp_path: Path, steps: list[int], fine: bool) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    assert (checks.metrics_problems(tmp_path) == []) == fine


# processes


@pytest.fixture
def sleeper() -> Iterator[Callable[[str | None], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(mark: str | None) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **({MARK: mark} if mark is not None else {})}
        started.append(subprocess.Popen(["sleep", "600"], env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_only_processes_with_the_mark_are_found_and_struck(
    sleeper: Callable[[str | None], subprocess.Popen[bytes]],
) -> None:
    mark = own_mark("test")
    mine, other, foreign = sleeper(mark), sleeper(own_mark("other")), sleeper(None)
    assert [member.pid for member in processes.members(mark, 0)] == [mine.pid]
    for stranger in (other, foreign):
        assert not processes.send(Member(stranger.pid, "", ""), mark, signal.SIGKILL)
    processes.end_orphans()  # none of them is one: this process lives
    processes.end_all(mark)
    assert mine.wait(LIMIT_S) == -signal.SIGKILL
    assert other.poll() is None
    assert foreign.poll() is None


def test_a_child_of_the_raylet_is_none_before_it_is_another_program(tmp_path: Path) -> None:
    mark, raylet = own_mark("raylet"), tmp_path / "raylet" / "raylet"
    raylet.parent.mkdir()
    raylet.symlink_to(sys.executable)
    code = "import os, time; os.fork(); print(flush=True); time.sleep(600)"
    environment = {**os.environ, MARK: mark}
    with subprocess.Popen([raylet, "-c", code], env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline(), parent.stdout.readline()] == [b"\n", b"\n"]
        members = processes.members(mark, 0)
        processes.end_all(mark)
    assert {member.pid for member in members if member.role == "raylet"} == {parent.pid}
    assert len(members) == 2


def test_what_a_dead_campaign_left_is_ended(sleeper: Callable[[str | None], subprocess.Popen[bytes]]) -> None:
    pid, _, _ = own_mark("x").split(".")
    left = sleeper(f"{pid}.1.chain")  # a campaign of this number that was started at another time
    processes.end_orphans()
    assert left.wait(LIMIT_S) == -signal.SIGKILL


def test_folders_of_a_campaign_that_was_killed_are_removed(tmp_path: Path) -> None:
    dead = Places.make(tmp_path / "chain", small_disk=False)
    done = Places.make(tmp_path / "done", small_disk=False)
    done.close(remove=False)
    done.shm.mkdir()  # somebody else's by now
    places.remove_orphans(tmp_path)
    assert not dead.shm.exists()
    assert not dead.ray.exists()
    assert done.shm.exists()
    done.shm.rmdir()


def test_nothing_of_a_launch_outlives_it(tmp_path: Path) -> None:
    script = "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    mark = own_mark("launch")
    with Launch(
        ["-c", script],
        mark=mark,
        output=tmp_path / "output.txt",
        run=tmp_path,
        checkpoints=tmp_path,
        stop=threading.Event(),
    ) as launch:
        members = launch.members()
        while sorted(member.role == "driver" for member in members) != [False, True]:
            assert launch.code is None
            members = launch.members()  # while a process becomes another program, nobody can tell whose it is
        launch.strike(next(one for one in members if one.role != "driver"), signal.SIGSTOP)
    assert processes.members(mark, 0) == []


# plans and places


def test_every_kind_of_trial_is_drawn() -> None:
    plans = [draw_plan(0, chain) for chain in range(60)]
    blows = {(blow.kind, blow.victim) for one in plans for life in one.lives for blow in life.blows}
    visits = {visit.name for one in plans for life in one.lives for visit in life.visits}
    kinds = {"kill", "pause", "hang", "full disk", "SIGTERM", "SIGHUP", "intrusion"}
    assert {kind for kind, _ in blows} == kinds
    assert {
        ("SIGTERM", "all"),
        ("SIGHUP", "all"),
        ("SIGTERM", "driver"),
        ("SIGTERM", "rank"),
        ("pause", "all"),
    } <= blows
    assert ("kill", plan.ORPHANED) in blows
    assert {("intrusion", name) for name in (*plan.WHILE_IT_RUNS, plan.SERVER)} <= blows
    assert visits == set(plan.BETWEEN_LIVES)
    assert any(one.setup.served for one in plans)
    assert not any(draw_plan(0, chain, serves=False).setup.served for chain in range(60))


def test_names_of_a_run_in_a_shared_place_are_told_from_others(tmp_path: Path) -> None:
    machine = places.make_machine(tmp_path / "machine")
    try:
        spots = Places.make(tmp_path / "chain", small_disk=False, machine=machine)
        for pid in (41, 42):
            (machine[0] / "trinity-sync-0" / f"{pid}-ab").mkdir(parents=True)
            (machine[0] / "trinity-sync-0" / f"{pid}-ab" / "slot").touch()
        assert spots.left_in_memory([41]) == [str(machine[0] / "trinity-sync-0/41-ab/slot")]
        spots.close(remove=True)
        assert machine[0].exists()
    finally:
        for folder in machine:
            shutil.rmtree(folder)


def test_a_seed_gives_the_same_plan_and_goes_through_all_configurations() -> None:
    assert draw_plan(3, 1) == draw_plan(3, 1) != draw_plan(3, 2)
    plans = [draw_plan(3, chain, serves=False) for chain in range(len(CONFIGS))]
    assert {(plan.setup.backend, plan.setup.sync, plan.setup.schedule) for plan in plans} == set(CONFIGS)


def test_every_run_of_the_campaign_is_one_that_the_config_allows() -> None:
    from tests.kills.running import SMALL
    from trinity_sync import config

    for chain in range(len(CONFIGS)):
        config.check(config.compose([*SMALL, *draw_plan(3, chain).setup.overrides()]))


def test_a_small_disk_is_full_and_free_again(tmp_path: Path) -> None:
    try:
        spots = Places.make(tmp_path / "chain", small_disk=True)
    except OSError:
        pytest.skip("a small file system can only be mounted by root")
    try:
        spots.fill()
        with pytest.raises(OSError, match="No space left"):
            (spots.checkpoints / "file").write_bytes(b"x")
        spots.free()
        (spots.checkpoints / "file").write_bytes(b"x" * 100)
    finally:
        spots.close(remove=True)
    assert not spots.home.exists()


@pytest.mark.parametrize(("how", "left"), [("flip", 10), ("cut", 5), ("empty", 0), ("delete", None)])
def test_damage_changes_one_copy_of_a_file(tmp_path: Path, how: str, left: int | None) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"0123456789")
    os.link(path, link)
    places.damage(path, how, 0.99)
    assert (path.stat().st_size if path.exists() else None) == left
    assert link.read_bytes() == b"0123456789"
    assert how != "flip" or path.read_bytes() != link.read_bytes()


def test_the_table_counts_by_kind() -> None:
    line = {"kind": "kill", "victim": "rank", "outcome": "resumed", "problems": []}
    others = [{**line, "kind": "damage", "victim": "optim"}, {**line, "kind": "SIGTERM", "victim": "all, twice"}]
    table = render([line, {**line, "victim": "driver", "problems": ["x"]}, *others])
    assert "| SIGKILL of driver, rank | 2 | 0 | 2 | 0 | 0 | 0 | 0 | 0 | 1 |" in table
    assert "| SIGTERM to all | 1 |" in table
    assert "| all | 4 | 0 | 4 | 0 | 0 | 0 | 0 | 0 | 1 |" in table
    lost = {**line, "outcome": "lost", "problems": ["lost: x", "of another run: y"]}
    assert "| SIGKILL of rank | 1 | 0 | 0 | 0 | 1 | 0 | 1 | 0 | 0 |" in render([lost])
