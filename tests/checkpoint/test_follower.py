"""`trinity-sync follow` over a local store: which version is in the folder, and what is taken for it."""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.histories import commit_weights
from tests.checkpoint.mirror_places import OWNER, Events, marked
from tests.checkpoint.stores import LIMIT_S, PretendRun, calls_here, state
from trinity_sync.checkpoint import export
from trinity_sync.checkpoint.folder.contents import read_manifest, write_manifest
from trinity_sync.checkpoint.mirror import follower, run_mirror
from trinity_sync.checkpoint.mirror.copies import Mirror, Storage
from trinity_sync.checkpoint.mirror.follower import VersionFollower
from trinity_sync.checkpoint.mirror.run_mirror import MirrorError, MirrorSettings, call
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.models.files import ModelFiles
from trinity_sync.protocol.versions import Version


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """Work at the store is done in this process, but by the tests of killed processes."""
    with calls_here():
        yield


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, here: None) -> Path:
    """A store with the versions of steps 1 to 5; 1 and 4 are bases."""
    folder = tmp_path_factory.mktemp("template")
    PretendRun(folder / "run", str(folder / "store")).publish_all(1, 2, 3, 4, 5)
    return folder / "store"


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "store"))


def hide(store: Path, *steps: int) -> None:
    """Let the store be as before these versions."""
    for step in steps:
        (store / f"global_step_{step}").rename(store.with_name(f"hidden-{step}"))


def show(store: Path, *steps: int) -> None:
    for step in steps:
        store.with_name(f"hidden-{step}").rename(store / f"global_step_{step}")


class Kept:
    """A folder that follows a store."""

    def __init__(self, store: Path, into: Path) -> None:
        self.into, self.said = into, list[str]()
        self.follower = VersionFollower(str(store), into, self.said.append)
        self.follower.open()

    def update(self) -> bool:
        return self.follower.update()

    def check(self, step: int) -> None:
        """Check that the folder has this version, bit for bit, and nothing else."""
        self.follower.tidy()
        assert self.follower.version == Version(0, step)
        found = load_file(self.into / "current" / "model.safetensors")
        wanted = state(step)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert (self.into / "current" / "config.json").is_file()
        assert len([path for path in self.into.iterdir() if path.name.startswith("version")]) == 1
        own = {path.name for path in (self.into / ".follow").iterdir()}
        assert own <= {"held", "lock", "log"}


def test_a_new_follower_takes_the_newest_version(store: Path, tmp_path: Path) -> None:
    kept = Kept(store, tmp_path / "into")
    assert kept.update()
    kept.check(5)
    assert not kept.update()
    assert kept.said == []


def without_weights(store: Path, step: int) -> None:
    for path in (store / f"global_step_{step}" / "actor").glob("weights_*"):
        path.unlink()


def deltas(store: Path, step: int) -> list[Path]:
    return sorted((store / f"global_step_{step}" / "deltas").glob("*.delta"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def kept(store: Path, tmp_path: Path) -> Kept:
    """A folder at version 2 of the store, which has got 3 to 5 since."""
    hide(store, 3, 4, 5)
    kept = Kept(store, tmp_path / "into")
    assert kept.update()
    kept.check(2)
    show(store, 3, 4, 5)
    return kept


def test_deltas_are_taken_over_what_is_held(store: Path, kept: Kept) -> None:
    without_weights(store, 1)
    without_weights(store, 4)
    assert kept.update()
    kept.check(5)


def test_the_newest_base_is_taken_where_deltas_are_lost(store: Path, kept: Kept) -> None:
    deltas(store, 3)[0].unlink()
    assert kept.update()
    kept.check(5)
    assert "is missing" in kept.said[0]


@pytest.mark.parametrize("harm", [Path.unlink, flip], ids=["lost", "damaged"])
def test_an_older_version_is_taken_where_nothing_leads_to_the_newest(store: Path, kept: Kept, harm: object) -> None:
    harm(deltas(store, 5)[1])  # type: ignore[operator]
    assert kept.update()
    kept.check(4)
    assert "version 5 is skipped" in kept.said[-1]


def test_a_damaged_file_is_fetched_again_after_growing_pauses_and_told_once(
    store: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, get, asked = [0.0], Storage.get, list[float]()
    bad = deltas(store, 5)[1]

    def counted(storage: Storage, path: str, target: Path) -> None:
        if path.endswith(f"global_step_5/deltas/{bad.name}"):
            asked.append(now[0])
        get(storage, path, target)

    monkeypatch.setattr(Storage, "get", counted)
    monkeypatch.setattr(follower, "time", SimpleNamespace(monotonic=lambda: now[0]))
    flip(bad)
    assert kept.update()
    told = list(kept.said)
    for now[0] in range(10, 240, 10):
        with pytest.raises(RunError, match="no newer version can be made"):
            kept.update()
    assert asked == [0, 30, 90, 210]
    assert kept.said == told
    flip(bad)
    now[0] += 240
    assert kept.update()
    kept.check(5)


def test_a_lost_file_is_asked_for_at_each_look(store: Path, kept: Kept) -> None:
    """It may be listed late."""
    path = deltas(store, 5)[1]
    data = path.read_bytes()
    path.unlink()
    assert kept.update()
    kept.check(4)
    path.write_bytes(data)
    assert kept.update()
    kept.check(5)


@pytest.mark.parametrize("harm", [Path.unlink, flip], ids=["lost", "damaged"])
def test_the_other_files_of_a_base_are_fetched_once(
    store: Path, kept: Kept, harm: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look asks for the one that is not there, until the base can be taken."""
    now, get, fetched = [0.0], Storage.get, list[str]()
    deltas(store, 3)[0].unlink()
    other, bad = sorted((store / "global_step_4" / "actor").glob("weights_*"))
    data = bad.read_bytes()
    harm(bad)

    def counted(storage: Storage, path: str, target: Path) -> None:
        get(storage, path, target)
        fetched.append(Path(path).name)

    monkeypatch.setattr(Storage, "get", counted)
    monkeypatch.setattr(follower, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for now[0] in (0.0, 40.0, 120.0):
        with pytest.raises(RunError, match="no newer version can be made"):
            kept.update()
    assert fetched.count(other.name) == 1
    bad.write_bytes(data)
    now[0] = 400.0
    assert kept.update()
    kept.check(5)
    assert fetched.count(other.name) == 1


def test_a_version_that_is_not_listed_for_a_while_is_newer_than_those_that_are(store: Path, kept: Kept) -> None:
    assert kept.update()
    hide(store, 5)
    assert not kept.update()
    show(store, 5)
    kept.check(5)


def test_a_version_without_its_manifest_is_none(store: Path, kept: Kept) -> None:
    (store / "global_step_5" / "manifest.json").unlink()
    assert kept.update()
    kept.check(4)


def test_the_last_version_stays_where_nothing_leads_further(store: Path, kept: Kept) -> None:
    for step in (3, 4, 5):
        deltas(store, step)[0].unlink()
    without_weights(store, 4)
    with pytest.raises(RunError, match="no newer version can be made"):
        kept.update()
    kept.check(2)


def test_the_last_version_stays_where_the_store_is_away(store: Path, kept: Kept) -> None:
    store.rename(store.with_name("away"))
    with pytest.raises(RunError, match="no version yet"):
        kept.update()
    kept.check(2)


def test_held_parts_that_were_changed_are_found_and_not_served(store: Path, kept: Kept) -> None:
    for path in (kept.into / ".follow" / "held" / "actor").glob("weights_*"):
        flip(path)
    with pytest.raises(RunError, match="version 5 cannot be made"):
        kept.update()
    kept.check(2)
    assert kept.update()  # begins with the base
    kept.check(5)


def test_weights_without_the_digest_of_the_version_are_not_served_and_not_fetched_again(
    store: Path, tmp_path: Path
) -> None:
    manifest = read_manifest(store / "global_step_5")
    write_manifest(store / "global_step_5", replace(manifest, digest="0" * 32))
    kept = Kept(store, tmp_path / "into")
    with pytest.raises(RunError, match="version 5 cannot be made"):
        kept.update()
    assert kept.follower.version is None
    assert kept.update()
    kept.check(4)


def test_the_versions_of_a_resumed_run_are_newer(store: Path, kept: Kept, tmp_path: Path) -> None:
    assert kept.update()
    run = PretendRun(tmp_path / "run", str(store), attempt=1, owner=replace(OWNER, session="2"))
    run.publish_all(3, 4)
    assert kept.update()
    assert kept.follower.version == Version(1, 4)
    assert not (store / "global_step_5" / "manifest.json").exists()


def test_versions_before_the_last_base_but_one_are_deleted(store: Path, tmp_path: Path) -> None:
    run = PretendRun(tmp_path / "run", str(store), owner=replace(OWNER, session="2"))
    run.publish_all(6, 7, 8, 9)
    left = sorted(int(path.name.removeprefix("global_step_")) for path in store.glob("global_step_*"))
    assert left == [6, 7, 8, 9]
    assert not (run.checkpoints / ".deltas" / "store").exists()


def test_a_second_follower_of_a_folder_is_refused(store: Path, kept: Kept) -> None:
    with pytest.raises(ConfigError, match="is in use by another"):
        Kept(store, kept.into)


def test_a_store_that_refuses_delays_no_run_and_gets_the_next_versions(tmp_path: Path) -> None:
    place = tmp_path / "store"
    place.write_text("no folder")
    run = PretendRun(tmp_path / "run", str(place), tries=1)
    run.publish(1)
    run.publish(2)
    assert "global_step_1" not in run.events.wait_for("fault", 2)[0]["error"]
    place.unlink()
    run.publish_all(3)
    assert {event["step"] for event in run.events.of("mirror")} == {1, 2, 3}


def test_versions_that_a_slow_store_need_not_have_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, put = threading.Event(), threading.Event(), Storage.put

    def slow(storage: Storage, source: Path, name: str) -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)
        put(storage, source, name)

    monkeypatch.setattr(Storage, "put", slow)
    run = PretendRun(tmp_path / "run", str(tmp_path / "store"))
    run.publish(1)
    assert begun.wait(LIMIT_S)
    for step in range(2, 11):  # 7 and 10 are bases
        run.publish(step)
    run.copies._completing[10].result(LIMIT_S)
    go_on.set()
    run.publish_all()
    assert {event["step"] for event in run.events.of("mirror")} == {1, 7, 8, 9, 10}
    assert any("faster than the place takes them" in event["error"] for event in run.events.of("fault"))


KILLED = """
import os, signal, sys
from pathlib import Path
from trinity_sync.checkpoint.mirror import copies, follower, run_mirror
from trinity_sync.weights import part_delta
store, into, owner, name = sys.argv[1:]
homes = {"PartDelta": part_delta, "Storage": copies}
of = follower if owner == "module" else getattr(homes.get(owner, follower), owner)
before = getattr(of, name)
def last(*arguments, **named):
    if name in ("apply", "call", "get"):
        before(*arguments, **named)
    if name == "get":  # half of a file has arrived
        os.truncate(arguments[-1], arguments[-1].stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)
def here(place, settings, owner, work, **more):
    return work(copies.Mirror(lambda: copies.Storage(place), owner))
if name == "get":  # else in a process of its own
    follower.call = here
found = follower.VersionFollower(store, Path(into), print)
found.open()
setattr(of, name, last)
found.update()
found.tidy()
"""


@pytest.mark.parametrize(
    "point",
    [
        "PartDelta.apply",
        *(
            pytest.param(point, marks=pytest.mark.all)
            for point in (
                "Storage.get",
                "module.call",
                "VersionFollower._write",
                "module.replace_file",
                "Path.symlink_to",
                "VersionFollower.tidy",
            )
        ),
    ],
)
def test_a_follower_that_is_killed_leaves_a_complete_version_and_the_next_goes_on(
    kept: Kept, store: Path, tmp_path: Path, point: str
) -> None:
    into = tmp_path / "killed"
    shutil.copytree(kept.into, into, symlinks=True)
    done = subprocess.run([sys.executable, "-c", KILLED, store, into, *point.split(".")], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    found = load_file(into / "current" / "model.safetensors")
    assert any(
        all(torch.equal(found[name], tensor) for name, tensor in state(step).items())
        for step in ((2,) if point != "VersionFollower.tidy" else (5,))
    )
    after = Kept(store, into)
    assert after.update() == (point != "VersionFollower.tidy")
    after.check(5)


def test_the_end_of_a_run_waits_for_the_files_of_a_version_no_longer_than_for_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer must not hold the run."""
    run, stuck = PretendRun(tmp_path / "run", str(tmp_path / "store")), threading.Event()
    monkeypatch.setattr(run.copies, "_add_model", lambda folder: stuck.wait(LIMIT_S))
    run.publish(1)
    began = time.monotonic()
    assert run.copies.finish(0.2) == {1: "its files were not read in time"}
    assert time.monotonic() - began < LIMIT_S / 2
    stuck.set()


def test_a_store_names_its_own_setting_in_errors(tmp_path: Path) -> None:
    settings = MirrorSettings(key="sync.store", timeout_s=LIMIT_S)
    with pytest.raises(MirrorError, match=r"name it to a resume: sync\.store=\.\.\."):
        call(str(tmp_path), settings, OWNER, partial(Mirror.claim, again=True))


# ---- a disk, a store or a link that fails


def test_a_version_for_which_there_was_no_room_is_taken_once_there_is(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(export.shutil, "disk_usage", lambda path: SimpleNamespace(total=10**6, free=1))
        for _ in range(2):
            with pytest.raises(RunError, match="are free there"):
                kept.update()
    monkeypatch.setattr(Storage, "get", Mock(side_effect=AssertionError("it was there already")))
    assert kept.update()
    kept.check(5)


def test_a_link_that_cannot_be_read_now_costs_no_version(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as away:
        away.setattr(Path, "readlink", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
        with pytest.raises(RunError, match="Stale file handle"):
            kept.update()
        kept.follower.tidy()
        assert kept.follower.version is None
    kept.check(2)


def test_an_old_version_of_which_a_reader_has_files_holds_up_nothing(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept.into / "version-0-1-aaaaaaaa").mkdir()

    def rmtree(path: Path, ignore_errors: bool = False, of: Callable[..., None] = shutil.rmtree) -> None:
        if path.name != "version-0-1-aaaaaaaa":
            of(path, ignore_errors=ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(follower.shutil, "rmtree", rmtree)
    assert kept.update()
    assert kept.follower.version == Version(0, 5)


def test_what_is_held_stays_until_another_base_has_arrived(store: Path, kept: Kept) -> None:
    """The base of step 4 has fewer bytes than the deltas; it is damaged, so these are taken."""
    for path in (store / "global_step_4" / "actor").glob("weights_*"):
        flip(path)
    for step in (3, 4, 5):
        cheaper_base(store, step)
    assert kept.update()
    kept.check(5)


def cheaper_base(store: Path, step: int) -> None:
    """Let a base seem to have fewer bytes than deltas."""
    folder = store / f"global_step_{step}"
    manifest = read_manifest(folder)
    files = tuple(replace(one, bytes=0) if one.path.startswith("actor/weights") else one for one in manifest.files)
    write_manifest(folder, replace(manifest, files=files))


def test_a_version_whose_files_cannot_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = PretendRun(tmp_path / "run", str(tmp_path / "store"))
    monkeypatch.setattr(ModelFiles, "read", Mock(side_effect=ConfigError("config.json cannot be read")))
    run.publish(1)
    [fault] = run.events.wait_for("fault")
    assert "config.json cannot be read" in fault["error"]
    run.copies.finish(LIMIT_S)


def test_a_record_that_takes_nothing_keeps_no_version_back_and_hides_no_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one on a full disk."""
    monkeypatch.setattr(Events, "report", Mock(side_effect=RunError("events.jsonl cannot be written")))
    run = PretendRun(tmp_path / "run", str(tmp_path / "store"))
    with monkeypatch.context() as full:
        refused = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        full.setattr(run_mirror.contents, "write_manifest", refused)
        run.publish(1)
        run.copies._completing[1].exception(LIMIT_S)
    run.publish(2)
    assert run.copies.finish(LIMIT_S) == {1: "[Errno 28] No space left on device"}
    assert [path.name for path in (tmp_path / "store").glob("global_*")] == ["global_step_2"]


def test_a_checkpoint_in_the_place_of_a_version_is_neither_replaced_nor_deleted(tmp_path: Path) -> None:
    """As in the mirror of the same run."""
    place = tmp_path / "store"
    run = PretendRun(tmp_path / "run", str(place), tries=1)
    for step in (1, 2):
        full = commit_weights(place, step, state(step))
        write_manifest(full, replace(read_manifest(full), kind="full", run=OWNER.run))
    marked(str(place))
    for step in (1, 2, 3, 4, 5, 6, 7):
        run.publish(step)
    missing = run.copies.finish(LIMIT_S)
    assert set(missing) == {1, 2}
    assert "is a checkpoint of this run, and not a version" in missing[1]
    assert [read_manifest(place / f"global_step_{step}").kind for step in (1, 2)] == ["full", "full"]
