"""The way of a save, of two ranks that are threads, with a monitor in a process of its own; no engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from trinity_sync.checkpoint.daemon import Lifetime, connect
from trinity_sync.checkpoint.folder.catalog import scan
from trinity_sync.checkpoint.folder.contents import read_manifest, step_dir, write_tracker
from trinity_sync.checkpoint.folder.leases import leased
from trinity_sync.checkpoint.memory_states import states_path
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.host.threads import comes_true
from trinity_sync.integrations.verl import committed_saves, local_run
from trinity_sync.integrations.verl.at_exit import SIGNAL_S
from trinity_sync.integrations.verl.committed_saves import CommittedSaves
from trinity_sync.integrations.verl.local_run import Program, RunMonitor, finish_saves_of_workers
from trinity_sync.protocol.parts import FULL, STATE_DICT

WORLD, LIMIT = 2, 15.0


def leased_steps(root: Path) -> set[int]:
    return {step for step, _ in leased(root, now=time.time())}


NAMES = ["model", "metadata", "optim"]


class Group:
    """Stands in for `ranks.together`."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(WORLD, timeout=LIMIT)
        self._found: list[Any] = [None] * WORLD
        self.rank = threading.local()

    def together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        self._found[self.rank.number] = (result, error)
        self._barrier.wait()
        found = list(self._found)
        self._barrier.wait()
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(found) if error is not None]
        if failed:
            raise RunError(f"could not {what}: {'; '.join(failed)}")
        return [result for result, _ in found]


class Copies:
    """Copies and writes a file for each name."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.taken: list[tuple[int, list[str]]] = []
        self.given_up: list[str] = []
        self.fails: str | None = None
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_copied = threading.Event()
        self.is_copied.set()

    def take(self, step: int, todo: list[str], folder: Path, staging: Path, *, durable: bool) -> dict[str, Any]:
        if self.fails == "copy":
            raise RunError("no memory for a copy")
        assert folder.parent == staging
        assert not durable
        self.taken.append((step, todo))
        mine = [name for name in todo if name != "metadata" or self.rank == 0]
        return {name: partial(self._write, folder, name) for name in mine}

    def _write(self, folder: Path, name: str) -> list[Path]:
        assert self.may_write.wait(LIMIT)
        if self.fails == name:
            raise OSError(28, "No space left on device")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-{self.rank}"
        path.write_text(name)
        return [path]

    def give_up(self, name: str, error: BaseException) -> None:
        self.given_up.append(name)

    def wait_until_copied(self) -> None:
        assert self.is_copied.wait(LIMIT)


class Manager(CommittedSaves):
    """A rank's, of an engine that has nothing but a rank."""

    def __init__(self, rank: int, opens: Any, roles: tuple[str, ...] = ()) -> None:
        self.rank, self.world_size = rank, WORLD
        self.copies = Copies(rank)
        self.refuses: list[str] = []
        self.loaded: list[tuple[str, set[int]]] = []
        super().__init__(opens=opens, timeout_s=LIMIT)

    _backend = "fsdp"

    def _make_copies(self, timeout_s: float, *, lazily: bool) -> Copies:
        return self.copies

    def _check(self, todo: list[str]) -> None:
        for name in self.refuses:
            if name in todo:
                raise ConfigError(f"{name} cannot be saved")

    def _check_files(self, local_path: str) -> None:
        if not Path(local_path).is_dir():
            raise RunError(f"{local_path} is not there")

    def _load_as_verl(self, local_path: str, hdfs_path: str | None, del_local_after_load: bool) -> None:
        assert self._root is not None
        assert not del_local_after_load
        self.loaded.append((local_path, leased_steps(self._root)))

    def save(self, path: Path, step: int, *names: str, kind: Any = FULL, limit: int | None = None) -> None:
        self.trainer_went_on()  # as an engine does
        self._save(str(path), step, kind, list(names or NAMES), limit)


class Ranks:
    """Both ranks of a program, which save in a folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, roles: tuple[str, ...] = ()) -> None:
        self.root, self.group = root, Group()
        monkeypatch.setattr(committed_saves, "together", self.group.together)
        self.handles: list[Any] = []
        self.opened: list[tuple[str, str | None]] = []
        self._roles = roles
        self.managers = [Manager(rank, partial(self._open, rank)) for rank in range(WORLD)]

    def _open(self, rank: int, local_path: str, loaded: str | None, timeout_s: float) -> RunMonitor:
        self.opened.append((local_path, loaded))
        config = MonitorConfig(timeout_s=timeout_s, fsync=False, roles=self._roles)
        lifetime = Lifetime(first_s=LIMIT, grace_s=0.1)
        handle = connect(
            *(Path(local_path).parents[1],),
            program="one",
            may_start=rank == 0,
            timeout_s=LIMIT,
            config=config,
            lifetime=lifetime,
        )
        self.handles.append(handle)
        return RunMonitor.of(handle, timeout_s)

    def all(self, do: Callable[[Manager], object]) -> list[Exception | None]:
        """Call on each rank, at once; what each raised."""
        raised: list[Exception | None] = [None] * WORLD

        def of_rank(manager: Manager) -> None:
            self.group.rank.number = manager.rank
            try:
                do(manager)
            except Exception as error:
                raised[manager.rank] = error

        threads = [threading.Thread(target=of_rank, args=(manager,)) for manager in self.managers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        return raised

    def ok(self, do: Callable[[Manager], object]) -> None:
        assert self.all(do) == [None] * WORLD

    @property
    def memory(self) -> Path:
        """The folder of their states in memory."""
        return states_path(self.root, self.root.parent)

    def save_state(self, step: int) -> None:
        self.ok(lambda manager: manager.save(step_dir(self.memory, step) / "actor", step, limit=1))
        self.managers[0]._commits.follow(
            step, FULL, lambda _: self.managers[0].register_checkpoint(str(step_dir(self.memory, step)), 1)
        )

    def save(self, step: int, *names: str, place: str = "actor", **options: Any) -> None:
        self.ok(lambda manager: manager.save(step_dir(self.root, step) / place, step, *names, **options))

    def trainer_writes(self, step: int) -> None:
        """Its tracker, last of all."""
        step_dir(self.root, step).mkdir(parents=True, exist_ok=True)
        write_tracker(self.root, FULL, step)

    def state(self, step: int) -> str:
        return str(self.managers[0]._monitor.status(step).result(LIMIT)["state"])

    def paths(self, step: int) -> set[str]:
        return set(read_manifest(step_dir(self.root, step)).paths)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*roles: str) -> Ranks:
        made.append(Ranks(tmp_path / "checkpoints", monkeypatch, roles))
        return made[-1]

    yield make
    for ranks in made:
        for manager in ranks.managers:
            manager.copies.may_write.set()
        for handle in ranks.handles:
            handle.close()


@pytest.fixture
def ranks(make: Callable[..., Ranks]) -> Ranks:
    return make()


OF_ALL = {"actor/model-0", "actor/model-1", "actor/metadata-0", "actor/optim-0", "actor/optim-1"}


def test_a_save_is_committed_when_both_ranks_have_written_and_the_trainer_has_gone_on(ranks: Ranks) -> None:
    ranks.managers[1].copies.may_write.clear()
    ranks.save(4)
    assert ranks.state(4) == "open"
    ranks.managers[1].copies.may_write.set()
    ranks.ok(lambda manager: manager.finish_writing())
    assert ranks.state(4) == "open"
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    assert ranks.paths(4) == OF_ALL
    manifest = read_manifest(step_dir(ranks.root, 4))
    assert (manifest.backend, manifest.world_size, manifest.kind) == ("fsdp", WORLD, FULL)
    assert [manager.previous_global_step for manager in ranks.managers] == [4, 4]


def test_states_in_memory_are_committed_beside_the_checkpoints_and_of_both_none_is_lost(ranks: Ranks) -> None:
    for step in (1, 3, 5):
        ranks.save_state(step)
        ranks.save(step + 1)
    ranks.save_state(7)
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    assert comes_true(lambda: [one.step for one in scan(ranks.memory)] == [7], LIMIT, 0.05)
    assert [one.step for one in scan(ranks.root)] == [2, 4, 6]


def test_a_state_that_cannot_be_written_is_told_and_the_next_save_is_made(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.managers[1].copies.fails = "model"
    ranks.save_state(3)
    assert comes_true(lambda: "model" in ranks.managers[1].copies.given_up, LIMIT, 0.05)
    ranks.managers[1].copies.fails = None
    ranks.save(4)
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    assert ranks.paths(4) == OF_ALL
    assert "a state in memory is lost: " in capsys.readouterr().err


def test_the_monitor_is_opened_by_the_first_save_and_by_no_later_one(ranks: Ranks) -> None:
    ranks.ok(lambda manager: manager.wait_on_save_thread())  # nothing to wait for
    ranks.ok(lambda manager: manager.finish_writing())
    for limit_s in (None, SIGNAL_S):
        ranks.ok(lambda manager, limit_s=limit_s: manager.finish(limit_s))  # type: ignore[misc]
    ranks.ok(lambda manager: manager.settle_at_exit())
    assert ranks.opened == []
    ranks.save(2)
    ranks.save(4)
    assert ranks.opened == [(f"{ranks.root}/global_step_2/actor", None)] * WORLD


def test_what_is_saved_of_a_step_is_not_written_again(ranks: Ranks) -> None:
    ranks.save(4, "model", "metadata", kind=STATE_DICT)
    ranks.save(4, "model", "metadata", "optim")
    ranks.save(4, "model", "metadata", "optim")
    ranks.save(4, "model", place="critic")
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    taken = [(4, ["model", "metadata"]), (4, ["optim"]), (4, ["model"])]
    assert [manager.copies.taken for manager in ranks.managers] == [taken, taken]
    assert ranks.paths(4) == OF_ALL | {"critic/model-0", "critic/model-1"}


@pytest.mark.parametrize("first", [STATE_DICT, FULL])
def test_weights_that_are_saved_count_as_the_other_kind_too(ranks: Ranks, first: Any) -> None:
    other = FULL if first == STATE_DICT else STATE_DICT
    ranks.save(4, "model", kind=first)
    ranks.managers[1]._monitor.monitor_step = None  # type: ignore[assignment, method-assign] # rank 0 tells it
    ranks.save(4, "model", kind=other)
    ranks.save(4, "model", kind=other)
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    assert ranks.managers[0].copies.taken == [(4, ["model"])]
    assert read_manifest(step_dir(ranks.root, 4)).kind == FULL


def test_weights_count_as_full_also_when_the_full_checkpoint_of_another_engine_is_committed(
    make: Callable[..., Ranks],
) -> None:
    actor, critic = make(), make()
    actor.group = critic.group
    actor.save(4, "model", kind=STATE_DICT)
    critic.save(4, "model", place="critic")
    critic.ok(lambda manager: manager.wait_on_save_thread())
    actor.save(4, "model")
    actor.ok(lambda manager: manager.wait_on_save_thread())
    assert actor.paths(4) == {f"{place}/model-{rank}" for place in ("actor", "critic") for rank in range(WORLD)}


def test_weights_alone_do_not_wait_for_the_files_of_the_trainer(ranks: Ranks) -> None:
    ranks.save(4, "model", kind=STATE_DICT)
    monitor = ranks.managers[0]._monitor
    assert monitor.wait_committed(4, None, LIMIT, kind=STATE_DICT).result(LIMIT)["kind"] == STATE_DICT


def test_another_step_is_written_anew(ranks: Ranks) -> None:
    ranks.save(4)
    ranks.save(6)
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    assert [step for step, _ in ranks.managers[0].copies.taken] == [4, 6]
    assert ranks.paths(4) == ranks.paths(6) == OF_ALL


def test_a_save_waits_for_the_one_before(ranks: Ranks) -> None:
    ranks.save(4)
    ranks.ok(lambda manager: manager.finish_writing())
    for manager in ranks.managers:
        manager.copies.may_write.clear()
    ranks.save(6)
    threading.Timer(0.3, lambda: [manager.copies.may_write.set() for manager in ranks.managers]).start()
    ranks.save(8)
    assert ranks.managers[0]._monitor.status(6).result(LIMIT)["awaited"] == []


def test_what_one_rank_cannot_write_is_raised_on_both_and_the_next_save_goes_well(ranks: Ranks) -> None:
    ranks.managers[1].copies.fails = "optim"
    ranks.save(4)
    raised = ranks.all(lambda manager: manager.save(step_dir(ranks.root, 6) / "actor", 6))
    assert all("could not save step 6, because an earlier save failed" in str(error) for error in raised)
    assert all("the checkpoint of step 4 failed" in str(error) and "No space left" in str(error) for error in raised)
    assert "optim" in ranks.managers[1].copies.given_up
    ranks.managers[1].copies.fails = None
    ranks.save(8)
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    assert ranks.paths(8) == OF_ALL
    assert not step_dir(ranks.root, 4).exists()


def test_the_trainers_files_of_a_failed_step_are_not_looked_for_at_the_end(ranks: Ranks) -> None:
    for manager in ranks.managers:
        manager.copies.fails = "model"
    ranks.save(4)
    path = str(step_dir(ranks.root, 6) / "actor")
    raised = ranks.all(lambda manager: manager._save(path, 6, FULL, NAMES))
    assert all("the checkpoint of step 4 failed" in str(error) for error in raised)
    ranks.managers[0]._monitor.fail_step = None  # type: ignore[assignment, method-assign]
    ranks.managers[0].settle_at_exit()


def test_a_failed_step_is_told_once_by_who_waits_for_it(ranks: Ranks) -> None:
    ranks.managers[0].copies.fails = "model"
    ranks.save(4)
    raised = ranks.all(lambda manager: manager.wait_on_save_thread())
    assert all("the checkpoint of step 4 failed" in str(error) for error in raised)
    ranks.managers[0].copies.fails = None
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    step_dir(ranks.root, 4).mkdir(exist_ok=True)  # the trainer's own files
    assert not ranks.managers[0].follow(str(step_dir(ranks.root, 4)), lambda: None)
    ranks.save(6)
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    assert ranks.paths(6) == OF_ALL


def test_what_this_rank_fails_of_is_raised_where_the_monitor_knows_of_no_failure(ranks: Ranks) -> None:
    ranks.save(4)
    first = ranks.managers[0]
    first._coordinator.wait_all = Mock(side_effect=WaitTimeout("its writer", "end", 1.0))  # type: ignore[method-assign]
    with pytest.raises(WaitTimeout, match="its writer"):
        first.finish_writing()


def test_what_followed_a_commit_and_failed_is_raised_by_the_next_save(ranks: Ranks) -> None:
    ranks.save(4)
    ranks.trainer_writes(4)
    commits = ranks.managers[0]._commits
    assert ranks.managers[0].follow(str(step_dir(ranks.root, 4)), Mock(side_effect=RunError("no room for a copy")))
    ranks.ok(lambda manager: manager.trainer_went_on())
    (thread,) = commits.following()
    thread.join(LIMIT)
    raised = ranks.all(lambda manager: manager.save(step_dir(ranks.root, 6) / "actor", 6))
    assert all("no room for a copy" in str(error) for error in raised)


@pytest.mark.parametrize("where", ["check", "copy"])
def test_a_save_that_cannot_begin_is_raised_on_both_and_is_given_up_at_the_monitor(ranks: Ranks, where: str) -> None:
    ranks.save(2)
    if where == "check":
        for manager in ranks.managers:
            manager.refuses = ["optim"]
    else:
        for manager in ranks.managers:
            manager.copies.fails = "copy"
    ranks.managers[1]._monitor.fail_step = None  # type: ignore[assignment, method-assign] # rank 0 tells it
    said = "optim cannot be saved" if where == "check" else "no memory for a copy"
    raised = ranks.all(lambda manager: manager.save(step_dir(ranks.root, 4) / "actor", 4))
    assert all(said in str(error) for error in raised)
    status = ranks.managers[0]._monitor.status(4).result(LIMIT)
    assert status["state"] == ("unknown" if where == "check" else "failed")
    assert where == "check" or said in str(status["error"])


def test_a_full_checkpoint_has_every_role_and_no_other(make: Callable[..., Ranks]) -> None:
    ranks = make("actor", "critic")
    raised = ranks.all(lambda manager: manager.save(step_dir(ranks.root, 4) / "reward", 4))
    assert all("is saved, but the roles of this run are actor, critic (open_run)" in str(error) for error in raised)
    ranks.save(6)
    ranks.ok(lambda manager: manager.trainer_went_on())
    ranks.ok(lambda manager: manager.finish_writing())
    assert ranks.managers[0]._monitor.status(6).result(LIMIT)["awaited"] == ["critic/announced"]
    ranks.save(6, place="critic")
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    assert {path.partition("/")[0] for path in ranks.paths(6)} == {"actor", "critic"}


def test_a_role_without_anything_left_to_write_is_announced_all_the_same(make: Callable[..., Ranks]) -> None:
    ranks = make("actor")
    ranks.save(4, "model", kind=STATE_DICT)
    ranks.save(4, "model", kind=FULL)
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    assert read_manifest(step_dir(ranks.root, 4)).kind == FULL
    ranks.save(4, "model", kind=FULL)


def test_what_the_monitor_does_not_take_of_an_announcement_is_raised(make: Callable[..., Ranks]) -> None:
    ranks = make("actor")
    ranks.save(2)
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    refused = SimpleNamespace(result=Mock(side_effect=RunError("the monitor is gone")))
    ranks.managers[0]._monitor.notify_finished = lambda *_, **__: refused  # type: ignore[assignment, method-assign]
    raised = ranks.all(lambda manager: manager._save(str(step_dir(ranks.root, 4) / "actor"), 4, FULL, NAMES))
    assert all("the monitor is gone" in str(error) for error in raised)


def test_the_limit_of_a_save_is_kept_at_its_commit(ranks: Ranks) -> None:
    for step in (2, 4, 6):
        ranks.save(step, limit=2)
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    assert [step_dir(ranks.root, step).exists() for step in (2, 4, 6)] == [False, True, True]


def test_a_smaller_limit_deletes_now_and_what_is_gone_is_forgotten(ranks: Ranks) -> None:
    first = ranks.managers[0]
    for step in (2, 4):
        ranks.save(step)
        ranks.ok(lambda manager: manager.wait_on_save_thread())
        first.register_checkpoint(str(step_dir(ranks.root, step)), None)
    first.register_checkpoint(str(step_dir(ranks.root, 4)), 0)
    assert first.previous_saved_paths == [str(step_dir(ranks.root, step)) for step in (2, 4)]
    first.register_checkpoint(str(step_dir(ranks.root, 4)), 1)
    assert first.previous_saved_paths == [str(step_dir(ranks.root, 4))]


# ---- copies to a remote place


def test_a_copy_follows_the_commit_of_the_step_that_is_saved_and_of_no_other(ranks: Ranks) -> None:
    first, copied = ranks.managers[0], []
    path = str(step_dir(ranks.root, 4))
    assert not first.follow(path, lambda: None)  # no monitor yet
    for manager in ranks.managers:
        manager.copies.may_write.clear()
    ranks.save(4)
    for step in (2, 4, 6):
        step_dir(ranks.root, step).mkdir()  # the trainer has written files of its own
    assert not first.follow(str(step_dir(ranks.root, 2)), lambda: None)
    assert not first.follow(str(ranks.root.parent / "elsewhere"), lambda: None)
    assert first.follow(path, lambda: copied.append(leased_steps(ranks.root)))
    assert copied == []
    for manager in ranks.managers:
        manager.copies.may_write.set()
    ranks.ok(lambda manager: manager.wait_on_save_thread())
    assert copied == [{4}]
    ranks.save(6, "model", kind=STATE_DICT)
    assert not first.follow(str(step_dir(ranks.root, 6)), lambda: None)


# ---- the end of the program


def test_at_the_end_rank_0_waits_for_the_commit_and_others_for_what_they_write(ranks: Ranks) -> None:
    for manager in ranks.managers:
        manager.copies.may_write.clear()
    ranks.save(4)
    ranks.trainer_writes(4)
    first, other = ranks.managers
    ended = threading.Event()

    def end_other() -> None:
        other.settle_at_exit()
        other.finish(None)
        ended.set()

    threading.Thread(target=end_other).start()
    assert not ended.wait(0.3)
    other.copies.may_write.set()
    assert ended.wait(LIMIT)  # though rank 0 has not written
    assert ranks.state(4) == "open"
    first.copies.may_write.set()
    first.settle_at_exit()
    first.finish(None)
    assert ranks.paths(4) == OF_ALL


def test_at_the_end_a_save_without_the_files_of_the_trainer_fails(ranks: Ranks) -> None:
    ranks.save(4)
    ranks.managers[0].settle_at_exit()
    with pytest.raises(RunError, match="the program ended before its trainer had written"):
        ranks.managers[0].finish(None)


def test_at_the_end_a_rank_whose_trainer_has_said_nothing_waits_for_what_it_writes_only(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the tracker cannot be read now, the monitor decides."""
    ranks.save(4)
    first = ranks.managers[0]
    (ranks.root / "latest_checkpointed_iteration.txt").mkdir()
    first.settle_at_exit()
    first.finish(None)
    assert ranks.state(4) == "open"


def test_a_signal_waits_for_the_save_that_has_begun_and_for_its_commit(ranks: Ranks) -> None:
    for manager in ranks.managers:
        manager.copies.may_write.clear()
    ranks.save(4)
    ended = threading.Event()

    def at_signal() -> None:
        ranks.managers[1].finish(SIGNAL_S)
        ended.set()

    threading.Thread(target=at_signal).start()
    assert not ended.wait(0.3)
    for manager in ranks.managers:
        manager.copies.may_write.set()
    assert not ended.wait(0.3)
    ranks.trainer_writes(4)
    assert ended.wait(LIMIT)
    assert ranks.paths(4) == OF_ALL


def test_a_signal_waits_for_the_copy_of_what_is_committed_and_tells_that_it_failed(ranks: Ranks) -> None:
    first, may_copy, ended = ranks.managers[0], threading.Event(), threading.Event()
    ranks.save(4)
    ranks.trainer_writes(4)

    def copy() -> None:
        assert may_copy.wait(LIMIT)
        raise RunError("no room for a copy")

    assert first.follow(str(step_dir(ranks.root, 4)), copy)

    def at_signal() -> None:
        with pytest.raises(RunError, match="no room for a copy"):
            first.finish(SIGNAL_S)
        ended.set()

    threading.Thread(target=at_signal).start()
    assert not ended.wait(0.5)
    may_copy.set()
    assert ended.wait(LIMIT)


def test_a_signal_does_not_wait_for_a_save_that_begins_later(ranks: Ranks) -> None:
    ranks.save(4)
    ranks.trainer_writes(4)
    first = ranks.managers[0]
    finish_saves = first._monitor.finish_saves

    def then_the_next(timeout_s: float) -> Any:
        finished = finish_saves(timeout_s).result(LIMIT)
        for manager in ranks.managers:
            manager.copies.may_write.clear()
        ranks.save(6)
        return SimpleNamespace(result=lambda seconds: finished)

    first._monitor.finish_saves = then_the_next  # type: ignore[method-assign]
    began = time.monotonic()
    first.finish(SIGNAL_S)
    assert time.monotonic() < began + LIMIT
    assert ranks.state(6) == "open"


def test_a_signal_within_the_call_of_a_save_waits_for_its_end(ranks: Ranks) -> None:
    ranks.save(2)
    manager, order = ranks.managers[0], []

    def saving(*_: object) -> None:
        order.append("saving")
        threading.Event().wait(0.3)
        order.append("saved")

    manager._begin_save = saving  # type: ignore[method-assign]
    manager._monitor.finish_saves = lambda limit: (  # type: ignore[method-assign]
        order.append("asked") or SimpleNamespace(result=lambda seconds: None)
    )
    manager._commits.drop()
    thread = threading.Thread(target=lambda: manager.save(ranks.root, 4))
    thread.start()
    while not order:
        pass
    manager.finish(SIGNAL_S)
    thread.join(LIMIT)
    assert order == ["saving", "saved", "asked"]


def test_a_signal_to_a_program_whose_save_fails_says_so(ranks: Ranks) -> None:
    ranks.managers[1].copies.fails = "model"
    ranks.managers[1].copies.may_write.clear()
    ranks.save(4)
    threading.Timer(0.3, ranks.managers[1].copies.may_write.set).start()
    with pytest.raises(RunError, match="the checkpoint of step 4 failed"):
        ranks.managers[0].finish(SIGNAL_S)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What Ray's store has, in a process that is a driver under Ray."""
    store: dict[str, bytes] = {}
    monkeypatch.setattr(local_run, "under_ray", lambda: True)
    monkeypatch.setattr(local_run, "this_program", lambda: Program(word="one", address="127.0.0.1"))
    monkeypatch.setattr(local_run, "internal_kv", lambda: SimpleNamespace(_internal_kv_get=store.get))
    return store


def test_a_driver_waits_for_the_saves_of_its_workers(ranks: Ranks, told: dict[str, bytes]) -> None:
    finish_saves_of_workers(0.0)  # no worker has saved
    told["trinity-sync-checkpoints-one"] = str(ranks.root).encode()
    finish_saves_of_workers(0.0)  # no monitor is there, or not any more
    ranks.save(4)
    with pytest.raises(WaitTimeout, match="step 4"):
        finish_saves_of_workers(0.2)
    threading.Timer(0.3, partial(ranks.trainer_writes, 4)).start()
    finish_saves_of_workers(LIMIT)
    assert ranks.paths(4) == OF_ALL


# ---- loading


def test_a_load_waits_for_the_save_holds_the_step_and_begins_anew(ranks: Ranks) -> None:
    ranks.save(4)
    path = str(step_dir(ranks.root, 4) / "actor")
    ranks.ok(lambda manager: manager.load_checkpoint(None))
    ranks.ok(lambda manager: manager.load_checkpoint(path))
    assert [manager.loaded for manager in ranks.managers] == [[(path, {4})]] * WORLD
    assert leased_steps(ranks.root) == set()
    assert [(manager._loaded, manager._step) for manager in ranks.managers] == [(4, None)] * WORLD


def test_a_load_before_the_first_save_is_told_to_who_opens_the_monitor(ranks: Ranks) -> None:
    elsewhere = ranks.root.parent / "loaded"
    elsewhere.mkdir()
    for manager in ranks.managers:
        manager._root = None
        manager._load_as_verl = lambda *_: None  # type: ignore[method-assign]
    ranks.ok(lambda manager: manager.load_checkpoint(str(elsewhere)))
    ranks.save(4)
    assert ranks.opened == [(f"{ranks.root}/global_step_4/actor", str(elsewhere))] * WORLD


def test_what_is_not_there_to_be_loaded_is_told_to_all(ranks: Ranks) -> None:
    ranks.save(4)
    missing = str(ranks.root / "global_step_3")
    raised = ranks.all(lambda manager: manager.load_checkpoint(missing))
    assert all(f"could not load {missing}" in str(error) for error in raised)
    assert [manager.loaded for manager in ranks.managers] == [[], []]


@pytest.mark.parametrize("call", ["wait_until_copied", "finish_writing"])
def test_the_copy_is_waited_for(ranks: Ranks, call: str) -> None:
    ranks.save(4)
    manager, waited = ranks.managers[0], threading.Event()
    manager.copies.is_copied.clear()

    def wait() -> None:
        getattr(manager, call)()
        waited.set()

    threading.Thread(target=wait).start()
    assert not waited.wait(0.1)
    manager.copies.is_copied.set()
    assert waited.wait(LIMIT)
