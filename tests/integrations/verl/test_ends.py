"""How loads and runs end that go wrong, in one process: no engine and no actor is needed for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint.helpers import commit, unreadable
from trinity_sync.checkpoint.folder.lock import lock_as_writer, locked
from trinity_sync.errors import RunError
from trinity_sync.integrations.verl import program_run as runs
from trinity_sync.integrations.verl.program_run import VerlRun


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_rank_that_cannot_hold_what_it_is_to_load_says_so_to_all(tmp_path: Path) -> None:
    from trinity_sync.integrations.verl.manager import FSDPCheckpointManager

    commit(tmp_path, 8, {"actor/x.pt": "x"})
    unreadable(tmp_path / "global_step_8/manifest.json")
    manager: Any = FSDPCheckpointManager.__new__(FSDPCheckpointManager)
    manager._root, manager.rank, manager.world_size, manager._timeout_s = tmp_path, 0, 1, 60.0
    manager.checkpoint_load_contents = []
    manager.wait_on_save_thread = lambda: None
    with pytest.raises(RunError, match=r"could not load .*: rank 0: .*cannot be read now"):
        manager.load_checkpoint(str(tmp_path / "global_step_8/actor"))


def opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> VerlRun:
    """A run whose actors are gone already."""
    monkeypatch.setattr(runs.ray, "kill", lambda actor: None)
    lock = ExitStack()
    lock.enter_context(locked(root, root))
    run = VerlRun(
        namespace="",
        attempt=0,
        step=0,
        resume_path=None,
        verified=True,
        monitor=None,
        synchronizer=SimpleNamespace(actor=None),  # type: ignore[arg-type]
        root=root,
        lock=lock,
    )
    runs._open.append(run)
    return run


def test_a_run_that_cannot_tidy_up_lets_its_folder_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = opened(tmp_path, monkeypatch)
    (tmp_path / ".versions").mkdir()
    (tmp_path / ".versions/0").write_text("no folder")
    with pytest.raises(RunError, match=r"versions/0"):
        run.close()
    with locked(tmp_path, tmp_path, timeout_s=0.2):
        pass


def test_a_run_takes_nothing_away_under_a_monitor_that_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(tmp_path, monkeypatch)
    commit(tmp_path / ".versions/0", 8)
    monkeypatch.setattr(runs, "_END_S", 0.2, raising=False)
    with lock_as_writer(tmp_path):
        run.close()
    assert (tmp_path / ".versions/0/global_step_8").is_dir()
    opened(tmp_path, monkeypatch).close()
    assert not (tmp_path / ".versions").exists()
