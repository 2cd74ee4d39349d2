"""What becomes of weights that `megatron_save_state_dict` saves: how the monitor counts them, and what it commits.

One rank, and an engine that writes files as verl's does; the real one is in `tests/backends/test_megatron.py`. The
monitor is its book and its disk, without the actor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.checkpoint.disk import CheckpointDisk
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.contents import read_manifest, step_dir
from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.engine_functions import megatron_save_state_dict
from trinity_sync.protocol.commit import CommitBook
from trinity_sync.protocol.parts import FULL, STATE_DICT, Abort, Commit, Decision, Kind

STEP = 20
LOG = logging.getLogger("test")


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class PretendMonitor(MonitorClient):
    """Gives the answer in place of a call."""

    def __init__(self, monitored: Monitored) -> None:
        super().__init__(None)
        self._monitored = monitored

    def _call(self, what: str, method: str, *args: Any, **given: Any) -> Any:
        monitored = self._monitored
        match method:
            case "describe":
                return {"root": str(monitored.root), "attempt": 0, "fsync": False}
            case "has_part":
                return monitored.book.has(*args)
            case "announce":
                monitored.book.announce(*args, **given)
            case "notify_finished":
                step, weights = args
                files = [entry.as_tuple() for entry in given.pop("files") or ()]
                monitored.apply(monitored.book.finished(step, weights=weights, files=files, **given))
            case "notify_failed":
                monitored.apply(monitored.book.failed(*args, **given))
        return None


class Monitored(CheckpointCoordinator):
    """A coordinator whose monitor is here."""

    def __init__(self, root: Path) -> None:
        self._monitor = PretendMonitor(self)
        self._timeout_s, self._attempt, self._root, self._facts = 60.0, 0, root, None
        self._node_id, self._job_id, self._life = "node", "job", "life"
        self.book = CommitBook(clock=lambda: 0.0)
        self.root = root
        self._disk = CheckpointDisk(
            root=root, attempt=0, policies=(), keep_state_dicts=1, fsync=False, clock=lambda: 0.0
        )

    def _ask_for_turn(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def _answered(self, call: Any) -> Any:
        return call

    def register(self, kind: Kind, *, weights: int = 1, checkpoint: int = 0) -> None:
        self.apply(self.book.register(STEP, weights=weights, checkpoint=checkpoint))
        self.apply(self.book.mark(STEP, kind))

    def apply(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert not isinstance(decision, Abort), decision
            if isinstance(decision, Commit):
                self._disk.commit(decision)
                self.apply(self.book.commit_done(decision.step, decision.kind))


def engine(text: str) -> Any:
    def save(path: str, *, global_step: int) -> None:
        model = Path(path) / "model" / "dist_ckpt"
        model.mkdir(parents=True)
        (model / "__0_0.distcp").write_text(text)
        (model / ".metadata").write_text("__0_0.distcp")
        (Path(path) / "ckpt_contents.json").write_text("{}")

    manager = SimpleNamespace(
        checkpoint_save_contents=["model", "optimizer"],
        checkpoint_config=SimpleNamespace(async_save=False),
        previous_saved_paths=[],
    )
    return SimpleNamespace(checkpoint_mananager=manager, save_checkpoint=save)


def save(coordinator: CheckpointCoordinator, root: Path, role: str) -> None:
    megatron_save_state_dict(engine(role), str(step_dir(root, STEP) / role), STEP, coordinator, LOG)


def weights(root: Path, role: str) -> str:
    return (step_dir(root, STEP) / role / "model" / "dist_ckpt" / "__0_0.distcp").read_text()


def test_the_weights_of_each_role_of_a_program_are_saved(tmp_path: Path) -> None:
    coordinator = Monitored(tmp_path)
    for role in ("actor", "critic"):
        coordinator.register(STATE_DICT)
        save(coordinator, tmp_path, role)
        assert coordinator.book.status(STEP).state == "committed"
    assert [weights(tmp_path, role) for role in ("actor", "critic")] == ["actor", "critic"]
    assert catalog.verify(step_dir(tmp_path, STEP)).ok


def test_weights_that_are_committed_before_the_rest_of_the_step_are_there(tmp_path: Path) -> None:
    coordinator = Monitored(tmp_path)
    coordinator.register(STATE_DICT)
    coordinator.register(FULL, weights=0, checkpoint=1)
    optimizer = coordinator.staged(step_dir(tmp_path, STEP) / "actor", STEP) / "optim.pt"
    optimizer.parent.mkdir(parents=True)
    optimizer.write_text("half of i")
    save(coordinator, tmp_path, "actor")
    folder = step_dir(tmp_path, STEP)
    assert (read_manifest(folder).kind, weights(tmp_path, "actor")) == (STATE_DICT, "actor")
    optimizer.write_text("half of it, and the other half")
    coordinator.save_sync(lambda: [optimizer], STEP, part="optim")
    assert (read_manifest(folder).kind, weights(tmp_path, "actor")) == (FULL, "actor")
    assert catalog.verify(folder).ok


def test_weights_that_are_committed_already_and_cannot_be_reported_are_an_error_of_all_ranks(tmp_path: Path) -> None:
    class Gone(Monitored):
        def save_sync(self, *args: Any, **kwargs: Any) -> None:
            raise ConnectionError("the monitor is gone")

    coordinator = Monitored(tmp_path)
    coordinator.register(STATE_DICT)
    save(coordinator, tmp_path, "actor")
    gone = Gone(tmp_path)
    gone.book = coordinator.book
    with pytest.raises(RunError, match="save the weights of step 20: rank 0: ConnectionError: the monitor is gone"):
        save(gone, tmp_path, "actor")
