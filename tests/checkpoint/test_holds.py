"""Holders and deletions at once: at every file operation somebody else may come in between, or the program may die."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.helpers import commit
from tests.checkpoint.interleaving import interleave, quick_disk  # noqa: F401 - a fixture
from trinity_sync.checkpoint import holds, store
from trinity_sync.checkpoint.holds import lease_checkpoint, pin
from trinity_sync.checkpoint.layout import step_dir
from trinity_sync.checkpoint.prune import prune, prune_plan
from trinity_sync.errors import RunError
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


class Holders:
    """Programs of readers, pinners and pruners over one folder, and what those that got a hold rely on."""

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self.root = root
        self.clock = clock
        self.got = 0
        self.held: set[int] = set()
        self.pinned: set[int] = set()

    def reader(self, step: int, *, stays: bool = False) -> Callable[[], None]:
        def body() -> None:
            try:
                lease = lease_checkpoint(self.root, step, holder="reader", seconds=_EVER, clock=self.clock)
            except RunError:
                return
            self.got += 1
            self.held.add(step)
            if not stays:
                (self.root / "what a reader does").exists()
                self.held.discard(step)
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
        for step in self.held | self.pinned:
            assert (step_dir(self.root, step) / "actor" / "model.pt").is_file(), f"step {step} is away"

    def pruner(self, *, defer: bool) -> Callable[[], None]:
        def body() -> None:
            now = self.clock()
            prune(self.root, prune_plan(self.root, [KeepLast(1)], now=now), now=now, defer=defer)
            if defer:
                store.purge(self.root)

        return body

    def check(self) -> None:
        """What is held is there and whole, and nothing lies about."""
        for step in self.held | self.pinned | {30}:
            report = store.verify(step_dir(self.root, step))
            assert report.ok, report.problems
        left = {path.name for path in self.root.iterdir()} - {".staging", ".pins", ".leases", ".pruned"}
        assert left == {f"global_step_{info.step}" for info in store.scan(self.root)}
        assert {step for step, _ in holds.pinned(self.root)} <= {info.step for info in store.scan(self.root)}


@pytest.mark.parametrize("held", ["read", "pinned", "both"])
def test_nobody_who_got_a_hold_misses_the_checkpoint_for_an_instant(
    pool: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    monkeypatch.setattr(holds, "_POLL_S", 0.0, raising=False)
    outcomes = set()
    for seed in range(_SEEDS):
        world = Holders(pool(), lambda: 100.0)
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
        outcomes.add((world.got, frozenset(info.step for info in store.scan(world.root))))
        assert list(world.root.glob(".leases/*")) == []
    # Each side wins at times, else this would tell nothing.
    assert {10 in steps for _, steps in outcomes} >= ({False} if held == "read" else {True, False})
    assert {got > 0 for got, _ in outcomes} == {True, False} or held == "both"


def test_who_dies_or_starts_anew_loses_nothing_that_is_held(
    pool: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "_POLL_S", 0.0, raising=False)
    for seed in range(2 * _SEEDS):
        # Each look at the clock is a second: claims run out while their owners have yet to go on.
        monkeypatch.setattr(holds, "_CLAIM_S", float(seed % 5), raising=False)
        seconds = itertools.count(100)
        world = Holders(pool(), lambda seconds=seconds: float(next(seconds)))
        programs = [world.reader(10, stays=True), world.pinner(20), world.pruner(defer=True)]
        if seed % 2:
            programs += [world.pruner(defer=False), lambda world=world: store.recover(world.root)]
        try:
            interleave(seed, *programs, kills=seed % 3)
            store.recover(world.root)
            world.check()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
