"""What a verl program goes on from: the newest checkpoint that is found at its start, or what it loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.helpers import commit, unreadable
from tests.checkpoint.test_daemon import LIFETIME, LIMIT, begin, save, wait_until_let_go
from tests.checkpoint.test_daemon import commit as commit_through
from trinity_sync.checkpoint import daemon
from trinity_sync.checkpoint.daemon import Lifetime
from trinity_sync.checkpoint.folder.contents import read_manifest, step_dir, write_tracker
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl import local_run, program_start
from trinity_sync.protocol.parts import FULL


def test_what_was_committed_and_is_gone_or_unreadable_stops_the_start_unless_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(program_start.SKIP_MISSING, raising=False)
    write_tracker(tmp_path, FULL, 20)
    with pytest.raises(RunError, match=r"step 20 was committed.*SKIP_MISSING=1.*resume_mode=disable.*\(SFT and V1"):
        program_start.newest(tmp_path)
    commit(tmp_path, 10)
    commit(tmp_path, 20)
    unreadable(step_dir(tmp_path, 20) / "actor/model.pt")
    with pytest.raises(RunError, match=r"global_step_20.*cannot be read now.*SKIP_MISSING=1"):
        program_start.newest(tmp_path)
    monkeypatch.setenv(program_start.SKIP_MISSING, "1")
    assert program_start.newest(tmp_path) == step_dir(tmp_path, 10)
    unreadable(step_dir(tmp_path, 10) / "actor/model.pt")
    capsys.readouterr()
    assert program_start.newest(tmp_path) is None
    assert f"starting from nothing: {tmp_path} has no checkpoint" in capsys.readouterr().err


def test_what_the_monitor_of_the_start_before_is_still_to_commit_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(daemon, "_SILENT_S", 0.1)
    before = daemon.connect(
        tmp_path,
        program="one",
        may_start=True,
        timeout_s=LIMIT,
        lifetime=Lifetime(grace_s=0.5),
        config=MonitorConfig(timeout_s=LIMIT, fsync=False),
    )
    save(before, begin(before, 10, "model", "beside"), 10, "model")
    step_dir(tmp_path, 10).mkdir()
    (step_dir(tmp_path, 10) / "data_0.pt").write_text("the trainer's own")
    write_tracker(tmp_path, FULL, 10)  # as verl's trainer, whose processes end now
    before.close()
    assert program_start.newest(tmp_path) == step_dir(tmp_path, 10)
    assert read_manifest(step_dir(tmp_path, 10)).paths == {"model", "data_0.pt"}
    assert "waiting for the checkpoint monitor of another program" in capsys.readouterr().err
    wait_until_let_go(tmp_path)


def test_a_monitor_at_work_is_not_waited_for(tmp_path: Path) -> None:
    config = MonitorConfig(timeout_s=LIMIT, fsync=False)
    at_work = daemon.connect(tmp_path, program="one", may_start=True, timeout_s=LIMIT, lifetime=LIFETIME, config=config)
    commit_through(at_work, 10)
    assert program_start.newest(tmp_path) == step_dir(tmp_path, 10)
    at_work.close()
    wait_until_let_go(tmp_path)


@pytest.mark.parametrize(
    ("loaded", "begins"),
    [
        (None, 0),
        ("global_step_20/actor", 20),
        ("global_step_20_copy/actor", 0),
        ("abandoned-global_step_20-attempt_0", 0),
        ("elsewhere/global_step_20", 0),
    ],
)
def test_a_save_goes_on_after_the_step_of_its_folder_that_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: str | None, begins: int
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(
        local_run, "join_run", lambda root, **said_of: said.append(SimpleNamespace(root=root, **said_of))
    )
    path = None if loaded is None else str(tmp_path / loaded)
    local_run.open_monitor(str(tmp_path / "global_step_24" / "actor"), path, 1.0)
    assert (said[0].root, said[0].resume_step) == (tmp_path, begins)
    with pytest.raises(ConfigError, match="other/actor is in no folder global_step_N"):
        local_run.open_monitor(str(tmp_path / "other" / "actor"), path, 1.0)
