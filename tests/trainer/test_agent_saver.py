"""A rank's training state on its way to the disk: through the agent's segment, with the real agent and monitor."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from tests import local_ray
from trinity_sync.actors.agent_client import AgentClient, FolderCoordinators
from trinity_sync.actors.calls import Call
from trinity_sync.backends.meetings import Meetings
from trinity_sync.checkpoint import CheckpointCoordinator, CheckpointMonitor
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.protocol.parts import FULL
from trinity_sync.sync import Synchronizer, SynchronizerConfig
from trinity_sync.sync.node_agent import AgentConfig, NodeAgent
from trinity_sync.trainer import member
from trinity_sync.trainer.member import AgentSaver

LIMIT = 60.0
PART = "rank-00000"

cluster = local_ray.cluster
_numbers = itertools.count()


class PretendBackend:
    """An engine that is a dict of tensors."""

    def __init__(self, numel: int = 1000, deadline: str = "optimizer_step") -> None:
        self.deadline = deadline
        self.part = PART
        self.weights = {"weight": torch.zeros(numel)}
        self._callbacks: list[Callable[[], None]] = []

    def state(self, form: str) -> Mapping[str, Any]:
        return {f"model_{self.part}.pt": dict(self.weights), f"extra_{self.part}.pt": {"rng": torch.get_rng_state()}}

    def before_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def write_metadata(self, folder: Path) -> list[Path]:
        (folder / "config.json").write_text("{}")
        return [folder / "config.json"]

    def train(self, step: int) -> None:
        for callback in self._callbacks:
            callback()
        self.weights["weight"].fill_(step)


def meetings(ranks: int) -> list[Meetings]:
    """Of ranks in this process."""
    limit = timedelta(seconds=LIMIT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    return [Meetings(store, rank, ranks, LIMIT) for rank in range(ranks)]


def _coordinators(
    coordinator: type[CheckpointCoordinator], monitor: Any, attempt: int
) -> FolderCoordinators[CheckpointCoordinator]:
    return FolderCoordinators(coordinator(monitor, job_id="node-agent", timeout_s=LIMIT, attempt=attempt))


class Saves:
    """What a rank, its agent and the driver have to do with saves."""

    def __init__(
        self,
        root: Path,
        *,
        attempt: int = 0,
        coordinator: type[CheckpointCoordinator] = CheckpointCoordinator,
        ready: Callable[[dict[str, int]], None] = lambda pids: None,
    ) -> None:
        self.root = root / "checkpoints"
        self.attempt = attempt
        self.ready = ready
        number = f"{os.getpid()}-{next(_numbers)}"
        self.synchronizer = Synchronizer.get_actor(
            SynchronizerConfig(slots=2, lease_s=600.0, timeout_s=LIMIT), namespace=f"states-{number}"
        )
        self.monitor = CheckpointMonitor.get_actor(
            f"states-{number}", None, str(self.root), config=MonitorConfig(attempt=attempt, timeout_s=LIMIT)
        )
        shm = root / "shm"
        shm.mkdir(exist_ok=True)
        settings = AgentConfig(
            run_key=f"states-{number}",
            slots=2,
            root=str(shm),
            fallback=str(root / "slots"),
            verify="off",
            nodes=1,
            threads=1,
        )
        actor = ray.remote(NodeAgent).options(num_cpus=0, max_concurrency=100)
        self.agent = AgentClient(actor.remote(settings, self.synchronizer.client), "here")
        self.agent.register({}, partial(_coordinators, coordinator, self.monitor, attempt)).result(LIMIT)

    def __reduce__(self) -> Any:
        return _restored, ({name: value for name, value in vars(self).items() if name != "ready"},)

    def saver(self, backend: Any, *, lazy: bool = True, part: str = PART) -> AgentSaver:
        backend.part = part
        coordinator = CheckpointCoordinator(self.monitor, job_id=part, timeout_s=LIMIT, attempt=self.attempt)
        options: dict[str, Any] = {"writes_metadata": part == PART, "form": "verl", "lazy": lazy}
        return AgentSaver(backend, self.agent, FolderCoordinators(coordinator), meetings(1)[0], part, **options)

    def begin(self, step: int, parts: list[str] | None = None) -> Path:
        return Path(ray.get(self.monitor.begin.remote(step, self.attempt, FULL, parts or [PART]), timeout=LIMIT))

    def committed(self, step: int) -> dict[str, torch.Tensor]:
        """The weights of a step, once it is committed."""
        ray.get(self.monitor.wait_committed.remote(step, 0, LIMIT), timeout=LIMIT)
        folder = self.root / f"global_step_{step}"
        assert catalog.verify(folder).ok
        return torch.load(folder / "actor" / f"model_{PART}.pt", weights_only=True)

    def end(self) -> None:
        """Nobody writes any more."""
        for actor in (self.agent.handle, self.monitor, self.synchronizer.actor):
            local_ray.kill(actor)


def _restored(values: dict[str, Any]) -> Saves:
    saves = object.__new__(Saves)
    vars(saves).update(values)
    return saves


@pytest.fixture(scope="module")
def saves(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(tmp_path_factory.mktemp("saves"))


@pytest.fixture
def step() -> int:
    """One that no test has used."""
    return 100 * next(_numbers)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("deadline", ["optimizer_step", "now"])
@pytest.mark.few(2)
def test_what_is_saved_is_the_state_at_the_time_of_the_save(saves: Saves, step: int, lazy: bool, deadline: str) -> None:
    backend = PretendBackend(deadline=deadline)
    saver = saves.saver(backend, lazy=lazy)
    for number in range(step, step + 3):
        backend.train(number)
        saver.prepare()
        assert saver.save(number, saves.begin(number)) >= 0
    backend.train(999)
    saver.finish()
    for number in range(step, step + 3):
        assert saves.committed(number)["weight"].eq(number).all()
        names = {path.name for path in (saves.root / f"global_step_{number}" / "actor").iterdir()}
        assert names == {f"model_{PART}.pt", f"extra_{PART}.pt", "config.json"}


def test_writing_is_hurried_by_a_save_that_has_to_wait_for_it_and_by_the_end(
    saves: Saves, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, hurried = saves.saver(PretendBackend()), []
    real = AgentClient.wait_state_written

    def observed(agent: AgentClient, part: str, timeout_s: float, *, hurry: bool = False) -> Call[None]:
        hurried.append(hurry)
        return real(agent, part, timeout_s, hurry=hurry)

    monkeypatch.setattr(AgentClient, "wait_state_written", observed)
    monkeypatch.setattr(Call, "is_answered", lambda call: waits)
    for waits in (True, False, True):  # noqa: B007 - read above
        saver.save(step, saves.begin(step))
        saver.finish()
        assert saves.committed(step)["weight"].eq(0).all()
        step += 1
    assert hurried == [True, False, True] * 2 + [False, True]


def test_a_state_that_grows_gets_a_larger_segment(saves: Saves, step: int) -> None:
    backend = PretendBackend()
    saver = saves.saver(backend)
    saver.prepare()
    for number in range(step, step + 3):
        backend.weights["weight"] = torch.full((5000 * (number - step + 1),), float(number))
        saver.save(number, saves.begin(number))
        assert saves.committed(number)["weight"].shape == (5000 * (number - step + 1),)


def test_a_state_that_cannot_be_had_fails_its_step_and_not_the_run(
    saves: Saves, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = PretendBackend()
    saver = saves.saver(backend)
    with monkeypatch.context() as patch:

        def no_room(form: str) -> Mapping[str, Any]:
            raise OSError(28, "No space left on device")

        patch.setattr(backend, "state", no_room)
        saver.save(step, saves.begin(step))
    with pytest.raises(RunError, match=f"step {step} failed.*part '{PART}' failed.*No space left"):
        ray.get(saves.monitor.wait_committed.remote(step, 0, LIMIT), timeout=LIMIT)
    saver.save(step + 1, saves.begin(step + 1))
    assert saves.committed(step + 1)["weight"].eq(0).all()
    saver.finish()


def test_the_memory_of_the_first_save_is_page_locked_before_it(
    saves: Saves, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training would stand still for it, for seconds."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(member, "pin_segment", lambda segment: threads.append(threading.current_thread()))
    saver = saves.saver(PretendBackend())
    saver.prepare()
    saver.save(step, saves.begin(step))
    assert saves.committed(step)["weight"].eq(0).all()
    saver.finish()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_a_segment_for_which_there_was_no_room_is_asked_for_again(saves: Saves, step: int) -> None:
    backend = PretendBackend()
    saver = saves.saver(backend, part=f"rank-{step}")
    small, large = backend.weights, {"weight": torch.empty(1 << 50, device="meta")}
    for number, weights, error in ((step, large, "no room"), (step + 1, small, None), (step + 2, large, "no room")):
        backend.weights = weights
        saver.save(number, saves.begin(number, [f"rank-{step}"]))
        waiting = saves.monitor.wait_committed.remote(number, 0, LIMIT)
        if error is None:
            ray.get(waiting, timeout=LIMIT)
        else:
            with pytest.raises(RunError, match=f"step {number} failed.*{error}"):
                ray.get(waiting, timeout=LIMIT)
    backend.weights = small
    saver.save(step + 3, saves.begin(step + 3, [f"rank-{step}"]))
    ray.get(saves.monitor.wait_committed.remote(step + 3, 0, LIMIT), timeout=LIMIT)


def test_a_wait_for_room_that_has_ended_too_early_fails_no_save_for_which_there_is_room(
    saves: Saves, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent may need longer than the limit to allocate, and have the room long before the first save."""
    reserve, late = AgentClient.reserve_state, []

    class Late(Call[Any]):
        def result(self, timeout_s: float) -> Any:
            if not late:
                late.append(timeout_s)
                raise WaitTimeout(self.who, self.what, timeout_s)
            return super().result(timeout_s)

    def asked(agent: AgentClient, part: str, nbytes: int) -> Call[Any]:
        call = reserve(agent, part, nbytes)
        return Late(call.reference, call.who, call.what)

    monkeypatch.setattr(AgentClient, "reserve_state", asked)
    saver = saves.saver(PretendBackend())
    saver.prepare()
    assert saver._mapping is not None
    with pytest.raises(WaitTimeout):
        saver._mapping.result(LIMIT)
    assert saver._reserving is not None
    assert saver._reserving.has_ended(LIMIT)
    saver.save(step, saves.begin(step))
    assert saves.committed(step)["weight"].eq(0).all()
    saver.finish()


@ray.remote(num_cpus=0)
class Rank:
    """A rank in a process of its own."""

    def save(self, saves: Saves, step: int, folder: Path) -> int:
        self._saver = saves.saver(PretendBackend())
        self._saver.save(step, folder)
        self._saver.finish()
        return os.getpid()


def test_a_rank_that_dies_after_it_has_handed_over_loses_nothing(saves: Saves, step: int) -> None:
    rank = Rank.remote()
    folder = saves.begin(step, [PART, "driver"])
    pid = ray.get(rank.save.remote(saves, step, folder), timeout=LIMIT)
    os.kill(pid, signal.SIGKILL)
    local_ray.kill(rank)
    ray.get(saves.monitor.notify_finished.remote(step, part="driver"), timeout=LIMIT)
    assert saves.committed(step)["weight"].eq(0).all()


def test_a_save_whose_files_cannot_be_written_fails_the_step_and_the_next_one_works(saves: Saves, step: int) -> None:
    backend = PretendBackend()
    saver = saves.saver(backend)
    folder = saves.begin(step)
    (folder / "actor").write_text("in the way")
    saver.save(step, folder)
    with pytest.raises(FileExistsError):
        saver.finish()
    with pytest.raises(RunError, match=f"step {step} failed.*FileExistsError"):
        ray.get(saves.monitor.wait_committed.remote(step, 0, LIMIT), timeout=LIMIT)
    saver.save(step + 1, saves.begin(step + 1))
    assert saves.committed(step + 1)["weight"].eq(0).all()


def test_a_save_that_does_not_even_get_its_turn_holds_up_no_later_one(
    saves: Saves, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saves.saver(PretendBackend())
    saver._timeout_s = 2.0
    with monkeypatch.context() as patch:

        def refuse(*_: Any, **__: Any) -> None:
            raise RunError("no turn")

        patch.setattr(saver._coordinator, "_ask_for_turn", refuse)
        saver.save(step, saves.begin(step))
        saver._coordinator.settle()
    saver._timeout_s = LIMIT
    saver.save(step + 1, saves.begin(step + 1))
    assert saves.committed(step + 1)["weight"].eq(0).all()


class Stuck(CheckpointCoordinator):
    """Never comes to the end of a save."""

    def save_sync(self, save_fn: Any, *args: Any, **kwargs: Any) -> None:
        super().save_sync(lambda: (save_fn(), threading.Event().wait()), *args, **kwargs)


def test_an_agent_that_dies_while_it_writes_is_noticed(cluster: None, tmp_path: Path, step: int) -> None:
    saves = Saves(tmp_path, coordinator=Stuck)
    saver = saves.saver(PretendBackend())
    saver.save(step, saves.begin(step))
    saver.finish()
    os.kill(saves.agent.memory().result(LIMIT)["pid"], signal.SIGKILL)
    with pytest.raises(RunError, match=f"part '{PART}' failed: the writer node-agent .* was lost"):
        ray.get(saves.monitor.wait_committed.remote(step, 0, LIMIT), timeout=LIMIT)
    assert not (saves.root / f"global_step_{step}").exists()
