"""A run that is killed and resumed ends as one that was never interrupted."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, Run, in_one_program, launch, resume, start
from tests.pages import ROOT, missing, sessions
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.cli import main as cli

# At the checkpoint of step 10, from which the killed run goes on, the explorers hold version 9.
SETTINGS = (
    "backend=fsdp2",
    "sync=nccl",
    "sync.encoding=delta",
    "backend.ranks=2",
    "explorer.replicas=1",
    "trainer.steps=20",
    "checkpoint.interval=5",
    "sync.interval=3",
    "sync.max_staleness=2",
    "trainer.lr_scheduler=cosine",
    "seed=7",
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A run without an interruption, and one that was killed with SIGKILL once step 10 was saved and then resumed in
    place. Step 15 waits for the save of step 10.
    """
    folder = tmp_path_factory.mktemp("runs")
    started = start(folder / "killed", *SETTINGS)
    started.wait_for_file("checkpoints/global_step_10/manifest.json")
    os.killpg(started.process.pid, signal.SIGKILL)
    killed = started.finish()
    assert killed.code == -signal.SIGKILL
    begin = ["run", *SMALL, *SETTINGS]
    ended = in_one_program({folder / "uninterrupted": begin, killed.folder: ["resume", str(killed.folder)]})
    assert [run.code for run in ended] == [0, 0], ended[0].output
    return ended


@pytest.fixture(scope="module")
def uninterrupted(both: list[Run]) -> Run:
    return both[0]


@pytest.fixture(scope="module")
def resumed(both: list[Run]) -> Run:
    return both[1]


@pytest.mark.all
def test_the_same_weights_have_the_same_digest_at_trainer_explorer_and_checkpoint(uninterrupted: Run) -> None:
    uninterrupted.assert_the_same_weights_everywhere([*range(0, 20, 3), 20], [*range(5, 21, 5)], explorers=1)


def test_a_resumed_run_ends_with_the_same_digests(uninterrupted: Run, resumed: Run) -> None:
    assert resumed.digests == uninterrupted.digests
    assert resumed.manifests[20]["digest"] == uninterrupted.manifests[20]["digest"]


def test_a_resumed_run_has_the_same_metrics(uninterrupted: Run, resumed: Run) -> None:
    def figures(run: Run) -> list[tuple[float, ...]]:
        names = ("step", "reward/mean", "loss", "lr", "staleness/mean")
        return [tuple(line[name] for name in names) for line in run.lines("metrics.jsonl")]

    assert [line[0] for line in figures(resumed)] == list(range(1, 21))
    assert figures(resumed) == figures(uninterrupted)


def test_a_resume_is_a_new_attempt_of_the_same_run(uninterrupted: Run, resumed: Run) -> None:
    assert resumed.record["attempt"] == 1
    assert resumed.record["status"] == "completed"
    assert resumed.record["config_digest"] == uninterrupted.record["config_digest"]
    steps = {line["step"]: line["attempt"] for line in resumed.lines("metrics.jsonl")}
    assert steps == {step: int(step > 10) for step in range(1, 21)}


@pytest.mark.all
def test_a_resumed_run_is_reproduced_as_one_whole(resumed: Run) -> None:
    """Its first steps: the learning rate goes by all of them."""
    resumed.assert_reproduced("--steps", "6")


def test_the_tour_exports_what_a_run_has_left(
    uninterrupted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of `docs/tour.md` that need a real run and start none; `test_tour.py` has them all."""
    shutil.copytree(uninterrupted.folder, tmp_path / "outputs" / "first")
    monkeypatch.chdir(tmp_path)
    (session,) = (of for of in sessions(ROOT / "docs" / "tour.md") if all("ckpt" in command.words for command in of))
    assert [cli.main(command.words[1:]) for command in session] == [0, 0]
    assert missing(session[0].output, capsys.readouterr().out) is None


def test_a_completed_run_goes_on_with_more_steps_only(resumed: Run) -> None:
    again = resume(resumed.folder)
    assert again.code == 2
    assert "has reached step 20 of trainer.steps=20" in again.output


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
