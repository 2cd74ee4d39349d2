"""Readers, pins and deletions at once: at every file operation somebody else may come in between, or a program die."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoint.helpers import commit, stage
from tests.checkpoint.interleaving import interleave, quick_disk  # noqa: F401 - a fixture
from trinity_sync.checkpoint.folder import catalog, commits, contents, deletion, leases, recovery
from trinity_sync.checkpoint.folder.contents import LEASES, PINS, Manifest, read_manifest, staging_dir, step_dir
from trinity_sync.checkpoint.folder.deletion import prune, prune_plan
from trinity_sync.checkpoint.folder.leases import lease_checkpoint, pin, unpin
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.protocol.retention import KeepLast

pytestmark = pytest.mark.usefixtures("quick_disk")

_EVER = 1e9
_SEEDS = 120


@pytest.fixture
def pool(tmp_path: Path) -> Callable[[], Path]:
    """A checkpoint folder with the steps 10, 20 and 30, of which retention keeps the last; each time a new one."""
    model, root = tmp_path / "model", tmp_path / "root"
    for step in (10, 20, 30):
        commit(model, step)

    def make() -> Path:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(model, root)
        return root

    return make


class Programs:
    """Programs of readers, pinners and pruners over one folder, and what those that got a hold rely on."""

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self.root = root
        self.clock = clock
        self.got = 0
        self.reading: set[int] = set()
        self.pinned: set[int] = set()

    def reader(self, step: int, *, stays: bool = False) -> Callable[[], None]:
        def body() -> None:
            try:
                lease = lease_checkpoint(self.root, step, reader="reader", seconds=_EVER, clock=self.clock)
            except RunError:
                return
            self.got += 1
            self.reading.add(step)
            if not stays:
                (self.root / "what a reader does").exists()
                self.reading.discard(step)
                lease.release()

        return body

    def pinner(self, step: int) -> Callable[[], None]:
        def body() -> None:
            try:
                pin(self.root, step, clock=self.clock)
            except RunError:
                return
            self.got += 1
            self.pinned.add(step)

        return body

    def look(self) -> None:
        """What somebody holds may be read at any time."""
        for step in self.reading | self.pinned:
            assert (step_dir(self.root, step) / "actor" / "model.pt").is_file(), f"step {step} is away"

    def pruner(self, *, defer: bool) -> Callable[[], None]:
        def body() -> None:
            now = self.clock()
            prune(self.root, prune_plan(self.root, [KeepLast(1)], now=now), now=now, defer=defer)
            if defer:
                deletion.empty_trash(self.root)

        return body

    def check(self, *, deaths: bool = False) -> None:
        """What is held is there and whole, and nothing lies about: of those who died, a pin that came too late may."""
        for step in self.reading | self.pinned | {30}:
            report = catalog.verify(step_dir(self.root, step))
            assert report.ok, report.problems
        left = {path.name for path in self.root.iterdir()} - {".staging", ".pins", ".leases", ".pruned"}
        steps = {info.step for info in catalog.scan(self.root)}
        assert left == {f"global_step_{step}" for step in steps}
        assert deaths or {step for step, _ in leases.pinned(self.root)} <= steps


def test_a_pin_keeps_a_checkpoint_of_weights_alone(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step, kind=STATE_DICT)
    pin(tmp_path, 1)
    prune(tmp_path, prune_plan(tmp_path, [KeepLast(1)], now=_EVER, keep_state_dicts=1), now=_EVER)
    assert [info.step for info in catalog.scan(tmp_path)] == [1, 3]


@pytest.mark.parametrize(
    "held", [pytest.param("read", marks=pytest.mark.all), pytest.param("pinned", marks=pytest.mark.all), "both"]
)
def test_nobody_who_got_a_hold_misses_the_checkpoint_for_an_instant(
    pool: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    monkeypatch.setattr(leases, "_POLL_S", 0.0, raising=False)
    outcomes = set()
    for seed in range(_SEEDS):
        world = Programs(pool(), lambda: 100.0)
        programs = [world.pruner(defer=True)]
        if held != "pinned":
            programs.append(world.reader(10))
        if held != "read":
            programs.append(world.pinner(10))
        if held == "both":
            programs += [world.pruner(defer=False), world.reader(20), world.pinner(20)]
        try:
            interleave(seed, *programs, watch=world.look)
            world.check()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        outcomes.add((world.got, frozenset(info.step for info in catalog.scan(world.root))))
        assert list(world.root.glob(".leases/*")) == []
    # Each side wins at times, else this would tell nothing.
    assert {10 in steps for _, steps in outcomes} >= ({False} if held == "read" else {True, False})
    assert {got > 0 for got, _ in outcomes} == {True, False} or held == "both"


def test_who_dies_or_starts_anew_loses_nothing_that_is_held(
    pool: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_POLL_S", 0.0, raising=False)
    for seed in range(2 * _SEEDS):
        # Each look at the clock is a second: claims run out while their owners have yet to go on.
        monkeypatch.setattr(leases, "_CLAIM_S", float(seed % 5), raising=False)
        seconds = itertools.count(100)
        world = Programs(pool(), lambda seconds=seconds: float(next(seconds)))
        programs = [world.reader(10, stays=True), world.pinner(20), world.pruner(defer=True)]
        if seed % 2:
            programs += [world.pruner(defer=False), lambda world=world: recovery.recover(world.root)]
        try:
            interleave(seed, *programs, kills=seed % 3)
            recovery.recover(world.root)
            world.check(deaths=seed % 3 > 0)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize(
    ("how", "attempt"),
    [
        ("exchanged", 0),
        pytest.param("exchanged", 1, marks=pytest.mark.all),
        pytest.param("renamed", 0, marks=pytest.mark.all),
        pytest.param("renamed", 1, marks=pytest.mark.all),
        ("in place", 1),
    ],
)
@pytest.mark.few(1)
def test_what_is_held_is_not_replaced_for_an_instant(
    pool: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, how: str, attempt: int
) -> None:
    monkeypatch.setattr(leases, "_POLL_S", 0.0)
    if how == "renamed":
        monkeypatch.setattr(contents, "exchange", lambda first, second: False)
    winners = set()
    for seed in range(_SEEDS):
        root = pool()
        files = () if how == "in place" else tuple(stage(root, 10, {"actor/model.pt": "other"}, attempt=attempt))
        draft = Manifest(step=10, attempt=attempt, kind=FULL, created=1.0, digest="other", files=files)
        held: dict[str, Manifest] = {}
        committed = []

        def committer(root: Path = root, draft: Manifest = draft, committed: list[Manifest] = committed) -> None:
            with contextlib.suppress(RunError):
                committed.append(commits.commit_folder(root, draft, clock=lambda: 100.0))

        def reader(root: Path = root, held: dict[str, Manifest] = held) -> None:
            with contextlib.suppress(RunError):
                lease = lease_checkpoint(root, 10, reader="reader", seconds=_EVER, clock=lambda: 100.0)
                held["reader"] = read_manifest(lease.path)

        def pinner(root: Path = root, held: dict[str, Manifest] = held) -> None:
            with contextlib.suppress(RunError):
                pin(root, 10, clock=lambda: 100.0)
                held["pin"] = read_manifest(step_dir(root, 10))

        def look(root: Path = root, held: dict[str, Manifest] = held) -> None:
            for who, manifest in held.items():
                assert read_manifest(step_dir(root, 10)) == manifest, who

        try:
            interleave(seed, committer, reader, pinner, watch=look)
            # What is pinned is what the pin names, and a commit that was told is what is there.
            assert all((10, manifest.attempt) in leases.pinned(root) for who, manifest in held.items() if who == "pin")
            assert catalog.verify(step_dir(root, 10)).ok
            assert read_manifest(step_dir(root, 10)).created == (1.0 if committed else 0.0)
            # Whoever comes too late leaves the others what they have, so one of them has it.
            assert held or committed
            assert not list(root.glob(".leases/*.claim"))
            assert not staging_dir(root, 10, attempt).exists() or not committed
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        winners.add((bool(committed), bool(held)))
    assert {committed for committed, _ in winners} == {True, False}


def test_nobody_comes_to_hold_what_may_have_to_go_again(
    pool: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: Path, *_: object) -> None:
        for _ in range(30):
            (place / "what a slow disk does").exists()
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(leases, "_POLL_S", 0.0)
    monkeypatch.setattr(commits, "_trash_or_abandon", fail)
    for seed in range(_SEEDS):
        root = pool()
        draft = Manifest(step=10, attempt=0, kind=FULL, files=tuple(stage(root, 10, {"actor/more.pt": "more"})))
        held: list[Manifest] = []

        def committer(root: Path = root, draft: Manifest = draft) -> None:
            with pytest.raises(OSError, match="the disk fails"):
                commits.commit_folder(root, draft, clock=lambda: 100.0)

        def reader(root: Path = root, held: list[Manifest] = held) -> None:
            lease = lease_checkpoint(root, 10, reader="reader", seconds=_EVER, clock=lambda: 100.0)
            held.append(lease._manifest)  # what is there now may be what the commit adds to that, until it goes again

        with contextlib.suppress(RunError):  # the reader was told of one that went again before it had a hold
            interleave(seed, committer, reader)
        assert all(read_manifest(step_dir(root, 10)).extends(manifest) for manifest in held), f"seed {seed}"


def test_a_reader_waits_for_as_long_as_the_claim_of_one_that_died_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = commit(tmp_path, 10)
    now = [1000.05]  # a claim lasts until a whole second

    def sleep(seconds: float) -> None:
        now[0] += max(seconds, 0.05)

    dead = leases.claim(tmp_path, manifest, now=now[0])
    dead.__enter__()
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with lease_checkpoint(tmp_path, 10, reader="reader", seconds=60, clock=lambda: now[0]) as lease:
        assert lease.step == 10
    assert 1030 < now[0] < 1032
    dead.__exit__(None, None, None)


@pytest.mark.parametrize(("attempt", "looks"), [(0, 0), (1, 3)])
def test_a_commit_looks_at_the_leases_as_often_as_it_has_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: int, looks: int
) -> None:
    """One that adds to what is there not at all; another one before it claims, then, and when it is done."""
    commit(tmp_path, 10)
    commit(tmp_path, 20)
    lease_checkpoint(tmp_path, 20, reader="reader", seconds=60)
    read, real = [], leases._read_lease
    monkeypatch.setattr(leases, "_read_lease", lambda path: (read.append(path), real(path))[1])
    commit(tmp_path, 10, {"actor/model.pt": "weights 10", "actor/more.pt": "more"}, attempt=attempt)
    assert len(read) == looks


def refuse_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the folder of leases be one that we may not write in."""
    real = Path.touch

    def touch(path: Path, *args: object, **kwargs: object) -> None:
        if path.suffix == ".claim":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real(path)

    monkeypatch.setattr(Path, "touch", touch)


@pytest.mark.parametrize("there", ["nothing", "what it adds to"])
def test_a_commit_that_takes_nothing_from_anybody_needs_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    if there != "nothing":
        commit(tmp_path, 10)
    refuse_claims(monkeypatch)
    commit(tmp_path, 10, {"actor/model.pt": "weights 10", "actor/more.pt": "more"})
    assert catalog.verify(step_dir(tmp_path, 10)).ok


def test_a_commit_that_takes_something_needs_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = commit(tmp_path, 10)
    refuse_claims(monkeypatch)
    with pytest.raises(PermissionError, match=r"so readers cannot be kept from.*step 10: '.*/\.leases'"):
        commit(tmp_path, 10, {"actor/model.pt": "other"}, attempt=1)
    assert read_manifest(step_dir(tmp_path, 10)) == before


@pytest.mark.parametrize(("above", "folder"), [(0o2775, 0o755), (0o3777, 0o1777), (0o2770, 0o700)])
def test_the_folder_of_leases_is_open_to_a_group_that_it_cannot_have_as_it_is_to_others(
    above: int, folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Above(type(tmp_path)):  # type: ignore[misc]
        """A folder of a group of which this user is not."""

        def stat(self, **how: bool) -> SimpleNamespace:
            found = super().stat(**how)
            return SimpleNamespace(st_mode=found.st_mode & ~0o7777 | above, st_gid=found.st_gid + 1)

    def refuse(descriptor: int, user: int, group: int) -> None:
        raise PermissionError(errno.EPERM, "not of that group")

    monkeypatch.setattr(os, "fchown", refuse)
    umask = os.umask(0o077)
    try:
        leases.make_leases_folder(Above(tmp_path))
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / LEASES).stat().st_mode) == folder


@pytest.mark.parametrize("place", [LEASES, PINS])
def test_behind_a_link_nothing_is_deleted_or_written(tmp_path: Path, place: str) -> None:
    root, theirs = tmp_path / "root", tmp_path / "theirs"
    manifest = commit(root, 10)
    shutil.rmtree(root / LEASES)
    theirs.mkdir()
    for name in ("package.json", "10-0-x.json", "10-0.json", "x.claim", "10-0-1-x.claim", ".draft.tmp"):
        (theirs / name).write_text("{}")
        os.utime(theirs / name, (1.0, 1.0))
    before = {path.name: path.read_text() for path in theirs.iterdir()}
    (root / place).symlink_to(theirs)
    leases.clean_claims(root, now=1e9)
    leases.leased(root, now=1e9)
    leases.blockers(root, manifest, now=1e9)
    with pytest.raises((RunError, OSError), match="is a link"):
        pin(root, 10)
    if place == PINS:
        with pytest.raises(RunError, match="is a link"):
            unpin(root, 10)
    assert {path.name: path.read_text() for path in theirs.iterdir()} == before


def test_only_leases_and_claims_are_deleted_when_they_have_ended(tmp_path: Path) -> None:
    (tmp_path / LEASES).mkdir()
    for name in ("package.json", "x.claim", "10-0-x.json", "10-0-1-x.claim"):
        (tmp_path / LEASES / name).write_text("{}")
        os.utime(tmp_path / LEASES / name, (1.0, 1.0))
    leases.clean_claims(tmp_path, now=1e9)
    leases.leased(tmp_path, now=1e9)
    assert {path.name for path in (tmp_path / LEASES).iterdir()} == {"package.json", "x.claim"}
