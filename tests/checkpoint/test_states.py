"""What a step folder is: good, damaged, not to be read now, of a newer version, verl's. Only damage is passed over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoint.helpers import commit, names, newer, stage, unreadable, verls
from tests.checkpoint.mirror_places import OWNER, marked
from trinity_sync.checkpoint.folder import catalog, commits, deletion, recovery, resume_point
from trinity_sync.checkpoint.folder.contents import (
    MANIFEST,
    Manifest,
    ManifestError,
    read_manifest,
    read_tracker,
    step_dir,
    write_tracker,
)
from trinity_sync.checkpoint.folder.deletion import prune, prune_plan
from trinity_sync.checkpoint.mirror.copies import Mirror, Storage
from trinity_sync.errors import RunError, TrinityError
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.protocol.retention import make_policies


@contextmanager
def another_user() -> Iterator[None]:
    """As somebody who may not look into folders that are closed."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


SPOILT: dict[str, Callable[[Path], None]] = {
    "manifest": lambda folder: unreadable(folder / MANIFEST),
    "file": lambda folder: unreadable(folder / "actor/model.pt"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_cannot_be_read_now_is_not_passed_over(tmp_path: Path, what: str) -> None:
    commit(tmp_path, 10)
    commit(tmp_path, 20)
    SPOILT[what](step_dir(tmp_path, 20))
    with pytest.raises(RunError, match=r"global_step_20.*cannot be read now: .*Input/output error"):
        catalog.newest_good(tmp_path)


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    commit(root, 10)
    for folder in (step_dir(root, 10), root):
        folder.chmod(0o000)
        with another_user(), pytest.raises(RunError, match=r"cannot be read now: .*Permission denied"):
            catalog.newest_good(root)
        folder.chmod(0o755)


def test_what_cannot_be_read_now_can_be_skipped_on_purpose(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    commit(tmp_path, 20)
    unreadable(step_dir(tmp_path, 20) / MANIFEST)
    said: list[str] = []
    found = catalog.newest_good(tmp_path, on_skip=said.append, skip_unreadable=True)
    assert found is not None
    assert found.step == 10
    assert "step 20 is skipped" in said[0]


def test_damage_counts_more_than_what_else_cannot_be_read(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    commit(tmp_path, 20, {"a": "1", "b": "2"})
    unreadable(step_dir(tmp_path, 20) / "a")
    (step_dir(tmp_path, 20) / "b").unlink()
    assert catalog.verify(step_dir(tmp_path, 20)).state == "damaged"
    found = catalog.newest_good(tmp_path)
    assert found is not None
    assert found.step == 10


def test_a_checkpoint_of_a_newer_version_is_not_called_damaged(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    commit(tmp_path, 20)
    newer(step_dir(tmp_path, 20))
    said = "written by a newer version of trinity-sync: format 2, this one reads 1"
    with pytest.raises(ManifestError, match=said):
        read_manifest(step_dir(tmp_path, 20))
    assert [info.state for info in catalog.scan(tmp_path)] == ["committed", "newer"]
    for skip in (False, True):
        with pytest.raises(RunError, match=said):
            catalog.newest_good(tmp_path, skip_unreadable=skip)
    report = catalog.verify(step_dir(tmp_path, 20))
    assert (report.ok, report.state) == (False, "newer")


@pytest.mark.parametrize("version", [0, "2", None, True, -1])
def test_a_format_that_is_no_later_number_is_damage(tmp_path: Path, version: object) -> None:
    commit(tmp_path, 10)
    newer(step_dir(tmp_path, 10), version)
    assert catalog.scan(tmp_path)[0].state == "damaged"


def test_a_start_sets_nothing_aside_that_a_newer_version_wrote(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    commit(tmp_path, 20)
    write_tracker(tmp_path, FULL, 20)
    newer(step_dir(tmp_path, 20))
    before = names(tmp_path)
    with pytest.raises(TrinityError, match=r"global_step_20.*newer version"):
        resume_point.set_start(tmp_path, 10, 1)
    assert names(tmp_path) == before
    assert read_tracker(tmp_path, FULL).step == 20


def test_nothing_takes_the_place_of_what_a_newer_version_or_verl_wrote(tmp_path: Path) -> None:
    commit(tmp_path, 20)
    newer(step_dir(tmp_path, 20))
    verls(tmp_path, 30)
    before = {step: names(step_dir(tmp_path, step)) for step in (20, 30)}
    for step, word in ((20, "newer version"), (30, "verl")):
        for kind in (FULL, STATE_DICT):
            stage(tmp_path, step, {"actor/model.pt": "mine"}, attempt=1)
            draft = Manifest(step=step, attempt=1, kind=kind)
            with pytest.raises(RunError, match=rf"global_step_{step}.*{word}"):
                commits.commit_folder(tmp_path, draft)
    assert {step: names(step_dir(tmp_path, step)) for step in (20, 30)} == before


def test_nothing_takes_the_place_of_what_cannot_be_read_now(tmp_path: Path) -> None:
    commit(tmp_path, 20)
    unreadable(step_dir(tmp_path, 20) / MANIFEST)
    before = names(tmp_path)
    stage(tmp_path, 20, {"actor/model.pt": "mine"}, attempt=1)
    with pytest.raises(RunError, match=r"global_step_20.*cannot be read now"):
        commits.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=FULL))
    recovery.clean_staging(tmp_path, 20, 1)
    assert names(tmp_path) == before


def test_retention_leaves_alone_what_a_newer_version_or_verl_wrote(tmp_path: Path) -> None:
    for step in (10, 20, 40, 50):
        commit(tmp_path, step)
    newer(step_dir(tmp_path, 20))
    verls(tmp_path, 30)
    plan = prune_plan(tmp_path, make_policies({"keep_last": {"n": 1}}), now=0.0)
    assert [row.step for row in plan if not row.keep] == [10, 40]
    prune(tmp_path, plan, now=0.0)
    assert [info.step for info in catalog.scan(tmp_path)] == [20, 30, 50]


def test_the_mirror_keeps_and_names_what_a_newer_version_wrote(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    mirror = Mirror(lambda: Storage(marked(str(there)), {}), OWNER)
    for step in (10, 20):
        commit(here, step)
        mirror.upload(here, step)
    newer(step_dir(there, 20))
    said = "newer version of trinity-sync"
    with pytest.raises(RunError, match=said):
        mirror.download(tmp_path / "back", newer_than=(0, 10))
    with pytest.raises(RunError, match=said):
        mirror.upload(here, 20)
    assert mirror.missing(here, [10, 20]) == [20]
    commit(here, 30)
    mirror.upload(here, 30)
    deletion.delete_folder(here, step_dir(here, 20))
    assert mirror.prune(make_policies({"keep_last": {"n": 1}}), here, now=0.0) == [10]
    assert json.loads((step_dir(there, 20) / MANIFEST).read_text())["format"] == 2
    assert mirror.download(tmp_path / "back", newer_than=None) == 30


def test_a_checkpoint_of_verls_is_one_that_nobody_has_verified(tmp_path: Path) -> None:
    verls(tmp_path, 30)
    commit(tmp_path, 40)
    (step_dir(tmp_path, 40) / MANIFEST).unlink()
    (tmp_path / "global_step_50").mkdir()
    infos = catalog.scan(tmp_path)
    assert [(info.step, info.state) for info in infos] == [(30, "verl"), (40, "no_manifest"), (50, "no_manifest")]
    assert "not verified" in infos[0].problems[0]


def test_what_holds_our_trainers_state_is_not_called_verls(tmp_path: Path) -> None:
    (verls(tmp_path, 30) / "trainer_state.json").write_text("{}")
    assert [info.state for info in catalog.scan(tmp_path)] == ["no_manifest"]


def test_the_mirror_brings_back_a_checkpoint_that_lost_its_manifest(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    mirror = Mirror(lambda: Storage(marked(str(there)), {}), OWNER)
    commit(here, 20, {"actor/model_world_size_1_rank_0.pt": "weights"})
    mirror.upload(here, 20)
    (step_dir(here, 20) / MANIFEST).unlink()
    assert mirror.download(here, newer_than=None) == 20
    assert catalog.verify(step_dir(here, 20)).ok
    assert (here / "abandoned-global_step_20").is_dir()
