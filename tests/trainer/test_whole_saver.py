"""Saves of ranks whose backend writes by itself: what one of them fails of, before or after the copy, fails the step on
all of them and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import torch

from tests import local_ray
from tests.trainer.test_state_saver import LIMIT, Saves, meetings
from trinity_sync.backends.meetings import Meeting
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.checkpoint.layout import step_dir
from trinity_sync.errors import RunError
from trinity_sync.trainer.whole_saver import WholeSaver
from trinity_sync.weights.copying import Copying

PARTS = ["rank-00000", "rank-00001"]

cluster = local_ray.cluster


class PretendBackend:
    """An engine that is one tensor; `broken` names where its saves fail."""

    deadline = "optimizer_step"

    def __init__(self, part: str) -> None:
        self.part = part
        self.broken = ""

    def before_change(self, callback: Callable[[], None]) -> None:
        pass

    def begin_save(
        self, folder: Path, meeting: Meeting, *, lazily: bool = False
    ) -> tuple[Copying, Callable[[], list[Path]]]:
        self._fail("begin")
        target = torch.zeros(3)
        copying = Copying([(torch.ones(3), target)], [torch.device("cpu")], "the state")
        copying.copy(in_background=lazily)

        def write() -> list[Path]:
            meeting.gather("write", lambda: self._write(folder))
            return [folder / self.part]

        return copying, write

    def _write(self, folder: Path) -> None:
        self._fail("write")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.part).write_text("written")

    def _fail(self, where: str) -> None:
        if self.broken == where:
            raise OSError(28, "No space left on device", "/there")


@pytest.fixture(scope="module")
def saves(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(tmp_path_factory.mktemp("saves"))


@pytest.mark.parametrize("broken", ["begin", "write", "turn"])
def test_what_a_rank_fails_of_fails_the_step_on_all_ranks_and_the_next_one_works(
    saves: Saves, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"begin": 10, "write": 20, "turn": 30}[broken]
    backends = [PretendBackend(part) for part in PARTS]
    coordinators = [CheckpointCoordinator(saves.monitor, job_id=part, timeout_s=LIMIT, attempt=0) for part in PARTS]
    savers = [
        WholeSaver(backend, coordinator, own, part, lazy=True)
        for backend, coordinator, own, part in zip(backends, coordinators, meetings(2), PARTS, strict=True)
    ]

    def save(step: int) -> None:
        folder = saves.begin(step, PARTS)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda saver: saver.save(step, folder), savers))

    def refuse(*_: object, **__: object) -> None:
        raise RunError("no turn")

    backends[1].broken = broken
    with monkeypatch.context() as patch:
        if broken == "turn":
            patch.setattr(coordinators[1], "_ask_for_turn", refuse)
        save(step)
        with pytest.raises(RunError, match=f"step {step} failed"):
            ray.get(saves.monitor.wait_committed.remote(step, 0, LIMIT), timeout=LIMIT)
        for coordinator in coordinators:
            coordinator.settle()
    backends[1].broken = ""
    save(step + 1)
    ray.get(saves.monitor.wait_committed.remote(step + 1, 0, LIMIT), timeout=LIMIT)
    assert sorted(path.name for path in (step_dir(saves.root, step + 1) / "actor").iterdir()) == PARTS
    for saver in savers:
        saver.finish()
