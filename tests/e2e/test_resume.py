"""A run that has ended goes on, with another engine where its files allow that. That a killed run ends as one that was
never interrupted is shown in `test_short_runs`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import launch, resume, start
from trinity_sync.checkpoint.folder import catalog


@pytest.mark.all
@pytest.mark.parametrize("other", ["backend.ranks=1", "backend=fsdp"])
def test_a_run_goes_on_with_another_engine_where_its_format_allows(tmp_path: Path, other: str) -> None:
    run = launch(tmp_path / "run", "checkpoint.format=dcp", "trainer.steps=4")
    assert run.code == 0, run.output
    again = resume(run.folder, "trainer.steps=6", other)
    assert again.code == 0, again.output
    first = next(event for event in again.events("publish") if event["attempt"] == 1)
    assert (first["version"], first["digest"]) == (4, run.digests[4])
    assert sorted(again.manifests) == [4, 6]


@pytest.mark.all
def test_files_of_verls_format_are_refused_for_another_engine(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "trainer.steps=2")
    again = resume(run.folder, "trainer.steps=4", "backend.ranks=1")
    assert again.code == 2
    assert "checkpoint.format=dcp" in again.output


@pytest.mark.all
def test_a_resume_that_is_killed_after_its_first_step_leaves_the_checkpoint_it_began_with(tmp_path: Path) -> None:
    first = launch(tmp_path / "run", "sync=checkpoint", "trainer.steps=6")
    assert first.code == 0, first.output
    place, before = first.folder / "checkpoints", first.manifests[6]
    started = start(first.folder, "resume", str(first.folder), "trainer.steps=400", command=["-m", "trinity_sync.cli"])
    started.wait_for_line("step 7/400")
    os.killpg(started.process.pid, signal.SIGKILL)
    killed = started.finish()
    assert (killed.manifests[6], before["kind"]) == (before, "full")
    assert catalog.verify(place / "global_step_6").ok
    again = resume(first.folder, "trainer.steps=8")
    assert again.code == 0, again.output
    assert again.manifests[8]["kind"] == "full"
    published = [(event["version"], event["digest"]) for event in again.events("publish") if event["attempt"] == 2]
    assert published[0] == (6, before["digest"])
    assert again.summary["checkpoint"]["latest"] == 8
    assert not list(place.glob(".versions")) + list(place.glob(".staging/*"))
