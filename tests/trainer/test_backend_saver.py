"""Saves of ranks whose backend writes by itself: what one of them fails of, before or after the copy, fails the step on
all of them and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests import local_ray
from tests.trainer.test_agent_saver import LIMIT, Saves, meetings
from trinity_sync.actors.agent_client import FolderCoordinators
from trinity_sync.backends.meetings import RankMeeting
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.checkpoint.folder.contents import step_dir
from trinity_sync.errors import RunError
from trinity_sync.trainer.member import BackendSaver
from trinity_sync.weights.staging import TensorCopy

PARTS = ["rank-00000", "rank-00001"]

cluster = local_ray.cluster


class PretendBackend:
    """An engine that is one tensor; `broken` names where its saves fail, once the other rank waits for it."""

    deadline = "optimizer_step"

    def __init__(self, part: str) -> None:
        self.part = part
        self.broken = ""
        self.writes = threading.Event()
        self.other_writes = self.writes

    def before_change(self, callback: Callable[[], None]) -> None:
        pass

    def begin_save(
        self, folder: Path, meeting: RankMeeting, *, lazily: bool = False, durable: bool = False
    ) -> tuple[TensorCopy, Callable[[], list[Path]]]:
        self._fail("begin")
        copying = TensorCopy(self._pairs(), [torch.device("cpu")], "the state")
        copying.copy(in_background=lazily)

        def write() -> list[Path]:
            self.writes.set()
            self._fail("alone")
            meeting.gather("write", lambda: self._write(folder, copying))
            return [folder / self.part]

        return copying, write

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self._fail("copy")
        yield torch.ones(3), torch.zeros(3)

    def _write(self, folder: Path, copying: TensorCopy) -> None:
        copying.wait_whole(LIMIT)
        self._fail("write")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.part).write_text("written")

    def _fail(self, where: str) -> None:
        if self.broken == where:
            assert self.other_writes.wait(LIMIT)
            raise OSError(28, "No space left on device", "/there")


@pytest.fixture(scope="module")
def saves(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(tmp_path_factory.mktemp("saves"))


class Telling(CheckpointCoordinator):
    """Notes what it tells the monitor of parts that failed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: list[tuple[int, str, str]] = []

    def _report_failed(self, part: Any, error: BaseException, reason: str = "") -> None:
        self.told.append((part.step, part.name, f"{reason}{error}"))
        super()._report_failed(part, error, reason)


@pytest.mark.parametrize("broken", ["begin", "turn", "alone", "copy", "write"])
@pytest.mark.few(2)
def test_what_a_rank_fails_of_fails_the_step_on_all_ranks_which_name_it_and_the_next_one_works(
    saves: Saves, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"begin": 10, "turn": 20, "alone": 30, "copy": 40, "write": 50}[broken]
    backends = [PretendBackend(part) for part in PARTS]
    coordinators = [Telling(saves.monitor, job_id=part, timeout_s=LIMIT, attempt=0) for part in PARTS]
    savers = [
        BackendSaver(backend, FolderCoordinators(coordinator), own, part, lazy=True)
        for backend, coordinator, own, part in zip(backends, coordinators, meetings(2), PARTS, strict=True)
    ]

    def save(step: int) -> None:
        folder = saves.begin(step, PARTS)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda saver: saver.save(step, folder), savers))

    backends[1].broken, backends[1].other_writes = broken, backends[0].writes
    with monkeypatch.context() as patch:
        if broken == "turn":
            patch.setattr(coordinators[1], "_ask_for_turn", lambda *_, **__: backends[1]._fail("turn"))
        save(step)
        with pytest.raises(RunError, match=rf"step {step} failed.*('{PARTS[1]}' failed|rank 1): "):
            ray.get(saves.monitor.wait_committed.remote(step, 0, LIMIT), timeout=LIMIT)
        for coordinator in coordinators:
            coordinator.settle()
    for part, coordinator in zip(PARTS, coordinators, strict=True):
        ((told_step, told_part, error),) = coordinator.told
        assert (told_step, told_part) == (step, part)
        # a rank that is late finds that the monitor has removed the folder of the step, which the other one has failed
        gone = part == PARTS[0] and "No such file or directory" in error and f".staging/{step}-0" in error
        assert gone or "No space left on device" in error
        assert gone or part == PARTS[1] or "rank 1: " in error
    backends[1].broken = ""
    save(step + 1)
    ray.get(saves.monitor.wait_committed.remote(step + 1, 0, LIMIT), timeout=LIMIT)
    assert sorted(path.name for path in (step_dir(saves.root, step + 1) / "actor").iterdir()) == PARTS
    for saver in savers:
        saver.finish()
