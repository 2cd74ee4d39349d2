"""Where a run begins, decided from folders alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.helpers import commit, names, newer, unreadable, verls
from tests.checkpoint.mirror_places import OTHER, OWNER, marked
from trinity_sync.checkpoint.folder import catalog, commits, resume_point
from trinity_sync.checkpoint.folder.contents import Base, Manifest, write_tracker
from trinity_sync.checkpoint.folder.deletion import prune, prune_plan
from trinity_sync.checkpoint.folder.lock import lock_as_writer, locked, writer_of
from trinity_sync.checkpoint.folder.owner import MARK, write_mark
from trinity_sync.checkpoint.memory_states import MemoryStates
from trinity_sync.config import Config, RunConfig, compose
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.launch import launcher
from trinity_sync.launch.actors import Actors, Setup
from trinity_sync.launch.start import Resume, Start, committed_steps, copied_to, look_before_resume, run_mirror
from trinity_sync.protocol.parts import FULL
from trinity_sync.tracking.run_record import RunFolder
from trinity_sync.weights.slots import KeptFolder


def composed(*overrides: str) -> RunConfig:
    return RunConfig(compose(["trainer.steps=100", *overrides]))


def config(*overrides: str) -> Config:
    return composed(*overrides).settings


def saved(
    root: Path, step: int, *, backend: str = "fsdp2", ranks: int = 2, dcp: bool = False, lora_rank: int = 0
) -> Path:
    """A committed full checkpoint."""
    files = {f"actor/model_world_size_{ranks}_rank_{rank}.pt": "x" for rank in range(ranks)}
    if dcp:
        files = {"actor/dcp/.metadata": "x"}
    if lora_rank:
        files["actor/adapter_config.json"] = json.dumps(
            {"r": lora_rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
        )
    folder = commits.prepare_staging(root, step, 0)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    base = Base("ab", "models/seven") if lora_rank else None
    draft = Manifest(step=step, attempt=0, kind="full", backend=backend, world_size=ranks, base=base)
    commits.commit_folder(root, draft)
    return root / f"global_step_{step}"


def test_a_new_run_begins_at_the_model(tmp_path: Path) -> None:
    assert Start.find(config(), tmp_path, resume=None) == Start(0, False, tmp_path, None)


def test_a_resume_takes_the_newest_that_verifies_and_says_what_it_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = saved(tmp_path, 10), saved(tmp_path, 20)
    (bad / "actor" / "model_world_size_2_rank_0.pt").write_text("y")
    assert Start.find(config(), tmp_path, resume=Resume()) == Start(10, True, tmp_path, good)
    assert "step 20 is skipped" in capsys.readouterr().err


LORA = ("backend.ranks=2", "model.lora.rank=4")


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("lora_rank", "overrides", "said"),
    [
        (4, LORA, None),
        (4, (*LORA, "model.lora.targets=[v_proj,q_proj]"), None),
        (4, ("backend.ranks=2",), "is of a LoRA adapter on models/seven, this run trains the whole model"),
        (0, LORA, r"is a checkpoint of a whole model, this run trains a LoRA adapter \(model.lora\)"),
        (8, LORA, "holds an adapter of rank 8, this run asks for model.lora.rank=4"),
        (4, (*LORA, "model.lora.alpha=64"), "holds an adapter with alpha 16, this run asks for model.lora.alpha=64"),
        (4, (*LORA, "model.lora.targets=[q_proj]"), r"for \[q_proj, v_proj\], this run asks for .*targets=\[q_proj\]"),
    ],
)
def test_a_run_goes_on_with_what_it_trains(
    tmp_path: Path, in_place: bool, lora_rank: int, overrides: tuple[str, ...], said: str | None
) -> None:
    folder = saved(tmp_path / "one", 10, lora_rank=lora_rank)
    given = () if in_place else (f"checkpoint.resume_from={folder}",)

    def find() -> Start:
        root = folder.parent if in_place else tmp_path / "another"
        return Start.find(config(*overrides, *given), root, resume=Resume() if in_place else None)

    if said is None:
        assert (find().step, find().weights_only) == (10, False)
        return
    with pytest.raises(ConfigError, match=said):
        find()


def test_a_resume_without_a_checkpoint_begins_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Start.find(config(), tmp_path, resume=Resume()) == Start(0, True, tmp_path, None)
    assert "begins again at step 1" in capsys.readouterr().err


def gone(root: Path, step: int) -> None:
    shutil.rmtree(root / f"global_step_{step}")


@pytest.mark.parametrize("how", ["no folder", "empty", "damaged"])
def test_a_run_that_had_checkpoints_does_not_begin_again_in_silence(tmp_path: Path, how: str) -> None:
    root = tmp_path / "checkpoints"
    if how != "no folder":
        root.mkdir()
    if how == "damaged":
        (saved(root, 20) / "actor" / "model_world_size_2_rank_0.pt").write_text("y")
    before = names(tmp_path)
    with pytest.raises(ConfigError, match=rf"steps 10, 20 were committed, .*checkpoint\.dir={root}.*--from-scratch"):
        Start.find(config(), root, resume=Resume(), committed=[10, 20])
    assert names(tmp_path) == before
    with pytest.raises(ConfigError, match="steps 10, 20 were committed"):
        Start.find(config(), root, resume=Resume(skip_unreadable=True), committed=[10, 20])
    assert Start.find(config(), root, resume=Resume(from_scratch=True), committed=[10, 20]).step == 0


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_state_in_memory_is_gone_on_from_where_the_checkpoint_before_it_is_lost(tmp_path: Path, how: str) -> None:
    root = tmp_path / "checkpoints"
    kept = saved(root, 20)
    if how == "damaged":
        (kept / "actor" / "model_world_size_2_rank_0.pt").write_text("y")
    committed = [20] if how == "damaged" else [20, 22]
    states = MemoryStates(KeptFolder(tmp_path / "states"), OWNER)
    memory = tmp_path / "states" / "attempt-0"
    memory.mkdir(parents=True)
    write_mark(memory, OWNER)
    saved(memory, 24)
    start = Start.find(config(), root, resume=Resume(), committed=committed, states=states)
    assert start == Start(24, True, root, root / "global_step_24")


def test_the_tracker_too_says_what_was_committed(tmp_path: Path) -> None:
    write_tracker(tmp_path, FULL, 20)
    with pytest.raises(ConfigError, match="step 20 was committed"):
        Start.find(config(), tmp_path, resume=Resume())


def test_newer_checkpoints_that_are_gone_are_not_given_up_in_silence(tmp_path: Path) -> None:
    first = saved(tmp_path, 10)
    saved(tmp_path, 20)
    gone(tmp_path, 20)
    with pytest.raises(ConfigError, match=r"step 20 was committed, but the newest .* of step 10\..*--skip-unreadable"):
        Start.find(config(), tmp_path, resume=Resume(), committed=[10, 20])
    start = Start.find(config(), tmp_path, resume=Resume(skip_unreadable=True), committed=[10, 20])
    assert start == Start(10, True, tmp_path, first)


@pytest.mark.parametrize("name", ["manifest.json", "actor/model_world_size_2_rank_0.pt"])
def test_a_newer_checkpoint_that_cannot_be_read_now_is_waited_for(tmp_path: Path, name: str) -> None:
    first, second = saved(tmp_path, 10), saved(tmp_path, 20)
    unreadable(second / name)
    with pytest.raises(ConfigError, match=r"global_step_20/.* cannot be read now: Input/output error.*--skip-unreadab"):
        Start.find(config(), tmp_path, resume=Resume())
    start = Start.find(config(), tmp_path, resume=Resume(skip_unreadable=True), committed=[10, 20])
    assert start == Start(10, True, tmp_path, first)


@pytest.mark.parametrize("insist", [{}, {"skip_unreadable": True}, {"from_scratch": True}])
def test_a_newer_checkpoint_that_lost_its_manifest_is_set_aside(tmp_path: Path, insist: dict[str, bool]) -> None:
    saved(tmp_path, 10)
    (saved(tmp_path, 20) / "manifest.json").unlink()
    write_tracker(tmp_path, FULL, 20)
    look_before_resume(config(), tmp_path, Resume(**insist), [10, 20])
    start = Start.find(config(), tmp_path, resume=Resume(**insist), committed=[10, 20])
    assert start.step == (0 if insist.get("from_scratch") else 10)
    resume_point.set_start(tmp_path, start.step, 1)
    assert (tmp_path / "abandoned-global_step_20-attempt_0").is_dir()


@pytest.mark.parametrize("insist", [{}, {"skip_unreadable": True}, {"from_scratch": True}])
def test_a_resume_stops_at_what_a_newer_version_wrote(tmp_path: Path, insist: dict[str, bool]) -> None:
    saved(tmp_path, 10)
    newer(saved(tmp_path, 20))
    before = names(tmp_path)
    with pytest.raises(
        ConfigError, match=r"global_step_20.* newer version of trinity-sync: format 2, this one reads 1"
    ):
        Start.find(config(), tmp_path, resume=Resume(**insist))
    assert names(tmp_path) == before


def test_a_checkpoint_that_a_crash_left_out_of_its_place_is_put_back(tmp_path: Path) -> None:
    folder = saved(tmp_path, 20)
    folder.rename(tmp_path / ".replaced-global_step_20")
    look_before_resume(config(), tmp_path, Resume(), [20])
    assert Start.find(config(), tmp_path, resume=Resume(), committed=[20]).folder == folder


@pytest.mark.parametrize("insist", [False, True])
def test_a_checkpoint_that_a_killed_pruner_had_condemned_is_put_back(tmp_path: Path, insist: bool) -> None:
    saved(tmp_path, 10)
    folder = saved(tmp_path, 20)
    (saved(tmp_path, 30) / "actor" / "model_world_size_2_rank_0.pt").write_text("y")
    folder.rename(tmp_path / ".condemned-0a-global_step_20")
    resume = Resume(skip_unreadable=insist)
    look_before_resume(config(), tmp_path, resume, [10, 20, 30])
    assert Start.find(config(), tmp_path, resume=resume, committed=[10, 20, 30]).folder == folder


def test_what_was_pruned_without_an_event_is_not_looked_for(tmp_path: Path) -> None:
    events, root = tmp_path / "events.jsonl", tmp_path / "checkpoints"
    for step in (10, 20, 30, 40):
        saved(root, step)
    lines = [{"event": "commit", "step": step, "kind": "full", "attempt": 0} for step in (10, 20, 30, 40)]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prune(root, [replace(row, keep=row.step in (10, 40)) for row in prune_plan(root, [], now=0.0)], now=0.0)
    (root / "global_step_40" / "actor" / "model_world_size_2_rank_0.pt").write_text("y")
    committed = committed_steps(events, root)
    assert committed == [10, 40]
    assert Start.find(config(), root, resume=Resume(), committed=committed).step == 10


@pytest.mark.parametrize("attempt", [0, 1])
def test_what_was_committed_again_after_it_was_pruned_is_looked_for(tmp_path: Path, attempt: int) -> None:
    events, root = tmp_path / "events.jsonl", tmp_path / "checkpoints"
    saved(root, 10)
    prune(root, [replace(row, keep=False) for row in prune_plan(root, [], now=0.0)], now=0.0)
    commit(root, 10, attempt=attempt)
    gone(root, 10)
    lines = [{"event": "commit", "step": 10, "kind": "full", "attempt": of} for of in range(attempt + 1)]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert committed_steps(events, root) == [10]


def test_a_lost_folder_is_fetched_from_the_mirror_only_if_it_has_the_newest(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    saved(here, 10)
    marked(str(shutil.copytree(here, there)))
    gone(here, 10)
    cfg = config(f"checkpoint.mirror={there}")
    look_before_resume(cfg, here, Resume(), [10, 20])
    with pytest.raises(ConfigError, match=rf"steps 10, 20 were committed, .*{here} and checkpoint\.mirror={there}\."):
        Start.find(cfg, here, mirror=run_mirror(cfg, OWNER), resume=Resume(), committed=[10, 20])
    assert Start.find(cfg, here, mirror=run_mirror(cfg, OWNER), resume=Resume(), committed=[10]).step == 10


def test_nothing_is_fetched_that_would_not_do(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    marked(str(saved(there, 10).parent))
    cfg = config(f"checkpoint.mirror={there}")
    mirror = run_mirror(cfg, OWNER)
    with pytest.raises(ConfigError, match=r"steps 10, 20 were committed, .*Nothing was changed"):
        Start.find(cfg, here, mirror=mirror, resume=Resume(), committed=[10, 20])
    assert names(here) == set()
    start = Start.find(cfg, here, mirror=mirror, resume=Resume(skip_unreadable=True), committed=[20])
    assert start.step == 10


@pytest.mark.parametrize("name", ["manifest.json", "actor/model_world_size_2_rank_0.pt"])
@pytest.mark.parametrize("newest", [20, 30])
def test_what_cannot_be_read_here_is_fetched_from_the_mirror(tmp_path: Path, name: str, newest: int) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    saved(here, 10)
    saved(here, 20)
    marked(str(saved(there, newest).parent))
    unreadable(here / "global_step_20" / name)
    cfg = config(f"checkpoint.mirror={there}")
    look_before_resume(cfg, here, Resume(), [10, 20])
    assert Start.find(cfg, here, mirror=run_mirror(cfg, OWNER), resume=Resume(), committed=[10, 20]).step == newest


def test_what_cannot_be_read_here_and_is_not_at_the_mirror_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    saved(here, 10)
    second = saved(here, 20)
    marked(str(saved(there, 15).parent))
    unreadable(second / "actor" / "model_world_size_2_rank_0.pt")
    before = names(here)
    for mirror in (there, tmp_path / "file" / "below"):
        (tmp_path / "file").write_text("")
        cfg = config(f"checkpoint.mirror={mirror}", "checkpoint.mirror_tries=1")
        with pytest.raises(ConfigError, match=r"global_step_20/.* cannot be read now.*--skip-unreadable"):
            Start.find(cfg, here, mirror=run_mirror(cfg, OWNER), resume=Resume(), committed=[10, 20])
        assert "going on" not in capsys.readouterr().err
        assert names(here) == before


@pytest.mark.parametrize("resume", [Resume(), Resume(from_scratch=True)])
def test_a_run_that_never_committed_begins_again_with_the_checkpoint_it_was_given(
    tmp_path: Path, resume: Resume, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "other", 20)
    own = tmp_path / "own"
    own.mkdir()
    start = Start.find(config(f"checkpoint.resume_from={folder}"), own, resume=resume)
    assert start == Start(20, True, own, folder)
    assert not start.continued
    assert f"the run begins again with checkpoint.resume_from={folder}" in capsys.readouterr().err


def test_a_mirror_with_a_checkpoint_of_a_newer_version_stops_a_resume(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    saved(here, 10)
    newer(saved(there, 20))
    marked(str(there))
    cfg = config(f"checkpoint.mirror={there}")
    with pytest.raises(ConfigError, match=rf"the mirror {there}: .*newer version of trinity-sync"):
        Start.find(cfg, here, mirror=run_mirror(cfg, OWNER), resume=Resume())


@pytest.mark.parametrize("resume", [None, Resume(from_scratch=True)])
def test_a_start_and_a_new_beginning_put_the_mark_at_the_mirror(tmp_path: Path, resume: Resume | None) -> None:
    cfg = config(f"checkpoint.mirror={tmp_path}/there")
    Start.find(cfg, tmp_path / "here", resume=resume, mirror=run_mirror(cfg, OWNER))
    assert (tmp_path / "there" / MARK).exists()


def test_a_resume_marks_no_place_that_has_lost_what_the_run_has_copied_there(tmp_path: Path) -> None:
    """As where the disk of the mirror is not mounted."""
    here, there, events = tmp_path / "here", tmp_path / "there", tmp_path / "events.jsonl"
    saved(here, 10)
    there.mkdir()
    lines = [
        {"event": "mirror", "step": 10, "state": state, "url": url}
        for state, url in (("copied", str(there)), ("x", "/y"))
    ]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert copied_to(events) == {str(there)}
    cfg = config(f"checkpoint.mirror={there}", "checkpoint.mirror_tries=1")
    for resume, marks in ((Resume(), []), (Resume(given=frozenset({"checkpoint.mirror"})), [MARK])):
        mirror = run_mirror(cfg, OWNER, resume=resume, copied=copied_to(events))
        assert Start.find(cfg, here, mirror=mirror, resume=resume).step == 10
        assert [path.name for path in there.iterdir()] == marks


def test_a_first_look_writes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with pytest.raises(ConfigError, match="step 20 was committed"):
        look_before_resume(config(), root, Resume(), [20])
    assert not root.exists()
    saved(root, 10)
    second = saved(root, 20)
    unreadable(second / "manifest.json")
    with pytest.raises(ConfigError, match="cannot be read now"):
        look_before_resume(config(), root, Resume(), [])
    (second / "manifest.json").unlink()
    newer(second)
    with pytest.raises(ConfigError, match="newer version"):
        look_before_resume(config(), root, Resume(), [])
    look_before_resume(config(), tmp_path / "fresh", Resume(), [])


@contextmanager
def settings(entered: list[bool]) -> Iterator[None]:
    entered.append(True)
    yield


@pytest.mark.parametrize("resume", [None, Resume(), Resume(given=frozenset({"checkpoint.dir"}))])
def test_a_run_that_is_given_the_folder_of_another_one_leaves_it_as_it_is(
    tmp_path: Path, resume: Resume | None
) -> None:
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    run.mkdir()
    if resume is not None:
        (run / "run.json").write_text('{"attempt": 0}')
    saved(theirs, 10)
    with locked(theirs, tmp_path / "other"):
        write_mark(theirs, OTHER)
    before = {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()}
    cfg = composed(f"checkpoint.dir={theirs}", f"hydra.run.dir={run}")
    with pytest.raises(ConfigError, match=rf"checkpoint\.dir={theirs} (belongs to|holds checkpoints of) another run"):
        launcher.run(cfg, run, resume=resume)
    assert {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()} == before


def test_a_refused_resume_cuts_and_renames_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"attempt": 0}')
    (run / "metrics.jsonl").write_text('{"step": 15}\n')
    (run / "events.jsonl").write_text('{"event": "commit", "step": 20, "kind": "full"}\n')
    saved(run / "checkpoints", 10)
    unreadable(saved(run / "checkpoints", 20) / "actor" / "model_world_size_2_rank_0.pt")
    entered: list[bool] = []
    with pytest.raises(ConfigError, match="cannot be read now"):
        launcher.run(composed(), run, resume=Resume(), settings=lambda config: settings(entered))
    assert entered == []
    assert (run / "metrics.jsonl").read_text() == '{"step": 15}\n'
    assert [info.step for info in catalog.scan(run / "checkpoints")] == [10, 20]


def test_what_a_run_committed_and_did_not_delete_stands_in_its_events(tmp_path: Path) -> None:
    events = [
        {"event": "commit", "step": 10, "kind": "full"},
        {"event": "commit", "step": 15, "kind": "state_dict"},
        {"event": "commit", "step": 20, "kind": "full"},
        {"event": "prune", "step": 10, "reason": "", "freed_bytes": 1},
        {"event": "fault", "where": "x", "error": "y"},
    ]
    path = tmp_path / "events.jsonl"
    assert committed_steps(path, tmp_path) == []
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "comm')
    assert committed_steps(path, tmp_path) == [20]


def test_a_run_at_its_end_needs_more_steps(tmp_path: Path) -> None:
    saved(tmp_path, 100)
    with pytest.raises(ConfigError, match=r"trainer\.steps=200"):
        Start.find(config(), tmp_path, resume=Resume())


@pytest.mark.parametrize("wanted", [["backend.ranks=1"], ["backend=fsdp"], ["backend=fsdp", "backend.ranks=4"]])
def test_another_engine_needs_the_format_for_it(
    tmp_path: Path, wanted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "verl", 10)
    with pytest.raises(ConfigError, match=r"checkpoint\.format=dcp"):
        Start.find(config(*wanted), tmp_path / "verl", resume=Resume())
    saved(tmp_path / "dcp", 10, dcp=True)
    assert Start.find(config(*wanted), tmp_path / "dcp", resume=Resume()).step == 10
    assert ("random numbers" in capsys.readouterr().err) == any("ranks" in text for text in wanted)


def test_a_new_run_may_go_on_from_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "other", 10)
    start = Start.find(config(f"checkpoint.resume_from={folder}"), tmp_path / "own", resume=None)
    assert start == Start(10, False, tmp_path / "own", folder)


def test_a_run_that_begins_again_finds_the_checkpoint_of_another_from_where_it_was_started(tmp_path: Path) -> None:
    folder = saved(tmp_path / "other", 10)
    cfg, own = config("checkpoint.resume_from=other/global_step_10"), tmp_path / "own"
    assert Start.find(cfg, own, resume=Resume(started_in=tmp_path)) == Start(10, True, own, folder)


@pytest.mark.parametrize(
    ("begins_with", "seeds"), [(None, [0, 5]), ("run/checkpoints/global_step_2", [0]), ("other/global_step_2", [0, 5])]
)
def test_a_run_that_does_not_go_on_makes_its_model_anew(
    tmp_path: Path, begins_with: str | None, seeds: list[int]
) -> None:
    made: list[int] = []

    def make_model(architecture: dict[str, object], seed: int, folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "config.json").touch()
        made.append(seed)

    def begin(cfg: Config, start: Start) -> None:
        others: Any = dict.fromkeys(("recorder", "cluster", "run_key", "use_gpu", "last_step", "stop"))
        actors = Actors(Setup(cfg=cfg, config_digest="", folder=folder, start=start, **others))
        actors.trainer = SimpleNamespace(make_model=make_model)  # type: ignore[assignment]
        actors._make_model()

    checkpoints = tmp_path / "run" / "checkpoints"
    with RunFolder.open(tmp_path / "run", resume=False) as folder:
        begin(config(), Start(0, False, checkpoints, None))
        begin(config("seed=5"), Start(0, True, checkpoints, tmp_path / begins_with if begins_with else None))
    assert made == seeds


def test_ranks_that_train_nothing_take_no_weights_of_an_engine(tmp_path: Path) -> None:
    folder = saved(tmp_path / "other", 10)
    asked = config(f"checkpoint.resume_from={folder}", "workload=bytes", "model.shapes=qwen3-0.6b")
    with pytest.raises(ConfigError, match=r"saved by backend=fsdp2, which backend=bytes cannot read; resume with"):
        Start.find(asked, tmp_path / "own", resume=None)


@pytest.mark.parametrize(("version", "backend"), [(1, "fsdp"), (2, "fsdp2")])
def test_a_new_run_may_go_on_from_a_checkpoint_of_verls(tmp_path: Path, version: int, backend: str) -> None:
    folder = verls(tmp_path / "verl", version=version)
    asked = config(f"checkpoint.resume_from={folder}", f"backend={backend}")
    assert Start.find(asked, tmp_path / "own", resume=None) == Start(30, False, tmp_path / "own", folder)
    with pytest.raises(ConfigError, match=r"backend\.ranks=2, this run asks for .*backend\.ranks=1"):
        Start.find(
            config(f"checkpoint.resume_from={folder}", f"backend={backend}", "backend.ranks=1"),
            tmp_path / "own",
            resume=None,
        )


def test_what_cannot_be_gone_on_from_is_named(tmp_path: Path) -> None:
    def refused(folder: Path, text: str) -> None:
        with pytest.raises(ConfigError, match=rf"checkpoint\.resume_from.*{text}"):
            Start.find(config(f"checkpoint.resume_from={folder}"), tmp_path / "own", resume=None)

    refused(tmp_path / "nothing", "not a step folder")
    (tmp_path / "global_step_1").mkdir()
    refused(tmp_path / "global_step_1", "neither manifest.json nor")
    folder = verls(tmp_path / "verl")
    (folder / "actor" / "optim_world_size_2_rank_1.pt").unlink()
    refused(folder, "optim_world_size_2_rank_1.pt is missing")
    (folder / "actor" / "optim_world_size_2_rank_1.pt").write_text("x")
    (folder / "actor" / "fsdp_config.json").write_text("{")
    refused(folder, "fsdp_config.json cannot be read")
    weights = tmp_path / "weights"
    commit(weights, 10, kind="state_dict")
    refused(weights / "global_step_10", "holds weights only")
    damaged = saved(tmp_path / "damaged", 10)
    (damaged / "actor" / "model_world_size_2_rank_0.pt").write_text("")
    refused(damaged, "0 bytes instead of 1")


def test_two_runs_do_not_share_a_checkpoint_folder(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from trinity_sync.checkpoint.folder.lock import locked\n"
        "with locked(Path(sys.argv[1]), Path('first')): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "checkpoints")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=rf"in use by the run in first \(pid {other.pid} "),
            locked(tmp_path / "checkpoints", tmp_path),
        ):
            pass
        other.kill()
    with locked(tmp_path / "checkpoints", tmp_path):
        pass


def test_a_run_waits_until_the_monitor_of_a_killed_one_has_ended(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from trinity_sync.checkpoint.folder.lock import lock_as_writer\n"
        "held = lock_as_writer(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as monitor:
        assert monitor.stdout is not None
        assert monitor.stdout.readline() == "held\n"
        refusal = rf"the checkpoint monitor of the run before \(pid {monitor.pid} on .*\) still writes there after 0 s"
        with pytest.raises(ConfigError, match=refusal), locked(tmp_path, tmp_path, timeout_s=0.2):
            pass
        entered = threading.Event()

        def enter() -> None:
            with locked(tmp_path, tmp_path):
                entered.set()

        run = threading.Thread(target=enter)
        run.start()
        assert not entered.wait(0.3)
        monitor.kill()
        monitor.wait()
        run.join(30)
        assert entered.is_set()


def test_a_monitor_that_comes_up_after_another_run_took_over_ends(tmp_path: Path) -> None:
    with locked(tmp_path, Path("first")):
        first = writer_of(tmp_path)
        lock_as_writer(tmp_path, first).close()
    with locked(tmp_path, Path("first")):
        assert writer_of(tmp_path) != first, "another run of the same process in the same folder is another one"
        refusal = rf"^{tmp_path} has been taken over by the run in first \(pid \d+ on [^)]*\)$"
        with pytest.raises(RunError, match=refusal):
            lock_as_writer(tmp_path, first)
    with locked(tmp_path, Path("third"), timeout_s=0.0):
        pass


def test_a_monitor_that_does_not_see_the_folder_of_its_run_ends_and_makes_none(tmp_path: Path) -> None:
    with locked(tmp_path / "here", tmp_path):
        writer = writer_of(tmp_path / "here")
    refusal = rf"^checkpoint\.dir: pid \d+ on \S+ cannot see what the driver wrote to {tmp_path / 'there'}; .* share$"
    with pytest.raises(RunError, match=refusal):
        lock_as_writer(tmp_path / "there", writer)
    assert not (tmp_path / "there").exists()


def test_a_folder_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"checkpoint\.dir=.*name a folder"), locked(path, tmp_path):
            pass
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="cannot be written"), locked(tmp_path / "closed" / "x", tmp_path):
            pass
