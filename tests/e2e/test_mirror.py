"""A run with a mirror on a real SFTP server: its checkpoint folder is lost, and it goes on from what is there."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.mirror_places import SftpServer
from tests.e2e.runs import Run, completed, launch, resume, start
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.contents import step_dir

pytestmark = pytest.mark.all

SETTINGS = ("trainer.steps=6", "checkpoint.interval=2", "seed=7")


def mirrored(server: SftpServer, *more: str) -> tuple[str, ...]:
    options = "checkpoint.mirror_options={client_keys: [], agent_path: null, config: []}"
    return (*SETTINGS, f"checkpoint.mirror={server.url}", options, *more)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SftpServer]:
    server = SftpServer(tmp_path / "server")
    yield server
    server.kill()


uninterrupted = completed(*SETTINGS, "trainer.steps=9")


def faults(run: Run) -> list[str]:
    return [f"{event['where']}: {event['error']}" for event in run.events("fault")]


def test_a_run_whose_folder_is_lost_goes_on_from_the_mirror(
    server: SftpServer, tmp_path: Path, uninterrupted: Run
) -> None:
    server.start()
    folder = tmp_path / "run"
    run = launch(folder, *mirrored(server))
    assert run.code == 0, run.output
    assert faults(run) == []
    there = server.folder / "run"
    assert [info.step for info in catalog.scan(there)] == [4, 6], "retention holds there as it does here"
    assert {event["step"] for event in run.events("mirror") if event["state"] == "copied"} >= {6}

    shutil.rmtree(folder / "checkpoints")
    (step_dir(there, 6) / "trainer_state.json").write_text("{}")
    refused = resume(folder, "trainer.steps=9")
    assert refused.code == 2, "two steps of training would be lost"
    assert "the mirror's copy of step 6 is skipped" in refused.output
    assert "steps 4, 6 were committed" in refused.output
    assert server.url in refused.output
    again = resume(folder, "--skip-unreadable", "trainer.steps=9")
    assert again.code == 0, again.output
    assert "the mirror's copy of step 6 is skipped" in again.output
    assert "fetching the checkpoint of step 4" in again.output
    assert again.digests == uninterrupted.digests
    assert faults(again) == []
    assert [info.step for info in catalog.scan(there)] == [8, 9]
    assert all(catalog.verify(step_dir(there, step)).ok for step in (8, 9))

    taken = launch(tmp_path / "other", *mirrored(server))
    assert taken.code == 2
    assert "belongs to another run" in taken.output


def test_a_mirror_that_is_gone_stops_no_run_and_what_is_not_there_is_said(server: SftpServer, tmp_path: Path) -> None:
    server.start()
    quick = ("checkpoint.mirror_tries=2", "checkpoint.mirror_backoff_s=0.1", "checkpoint.mirror_wait_s=60")
    started = start(tmp_path / "run", *mirrored(server, *quick))
    started.wait_for_line("loading trainer and explorers")
    server.kill()
    run = started.finish()
    assert run.code == 0, run.output
    assert run.record["status"] == "completed"
    assert f"not copied to {server.url}" in run.output
    assert any(text.startswith(f"copy of step 2 to {server.url}: try 1 of 2 failed") for text in faults(run))
    assert any("not copied at the end of the run: step 4" in text or "; step 6" in text for text in faults(run))
    assert sorted(run.manifests) == [4, 6]

    server.start()
    again = resume(tmp_path / "run", "trainer.steps=7")
    assert again.code == 0, again.output
    assert [info.step for info in catalog.scan(server.folder / "run")] == [6, 7]


def test_after_ctrl_c_copies_have_some_seconds_and_what_is_not_there_is_said(
    server: SftpServer, tmp_path: Path
) -> None:
    server.start(hold_after=10_000)
    started = start(tmp_path / "run", *mirrored(server, "trainer.steps=400", "checkpoint.mirror_wait_s=60"))
    started.wait_for_line("loading trainer and explorers")
    server.wait_until_holding()
    os.kill(started.process.pid, signal.SIGINT)
    run = started.finish()
    assert run.code == 130, run.output
    assert run.record["status"] == "interrupted"
    left = rf"not copied to {re.escape(server.url)} within 1[0-9.]+ s: step 2 \(still waiting or under way\)"
    assert re.search(left, run.output)
    assert any("not copied at the end of the run: step 2 (" in text for text in faults(run))
    assert [info for info in catalog.scan(server.folder / "run") if info.manifest is not None] == []


def test_a_mirror_that_cannot_be_used_is_refused_before_anything_starts(server: SftpServer, tmp_path: Path) -> None:
    server.start()
    place = mirrored(server)
    server.kill()
    run = launch(tmp_path / "run", *place)
    assert run.code == 2
    assert "checkpoint.mirror=sftp://" in run.output
    assert "cannot be used" in run.output
