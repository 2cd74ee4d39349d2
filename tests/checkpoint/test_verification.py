"""Verify, and the newest checkpoint that does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint import written
from tests.checkpoint.helpers import commit, stage
from trinity_sync.checkpoint.folder import catalog, commits
from trinity_sync.checkpoint.folder.contents import (
    Manifest,
    file_entry,
    read_manifest,
    staging_dir,
    step_dir,
    write_manifest,
)
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL, STATE_DICT, Kind


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda path: path.write_text("weights 21"), "was changed"),
        (lambda path: path.write_text("short"), "bytes instead of"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_verify_finds_damage(tmp_path: Path, damage: object, word: str) -> None:
    commit(tmp_path, 20)
    damage(step_dir(tmp_path, 20) / "actor/model.pt")  # type: ignore[operator]
    report = catalog.verify(step_dir(tmp_path, 20))
    assert not report.ok
    assert word in report.problems[0]
    assert "model.pt" in report.problems[0]


def test_verify_names_files_that_nobody_committed(tmp_path: Path) -> None:
    commit(tmp_path, 20)
    (step_dir(tmp_path, 20) / "stray").write_text("x")
    report = catalog.verify(step_dir(tmp_path, 20))
    assert report.ok
    assert report.unlisted == ("stray",)


def test_verify_tells_how_far_it_is(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"a": "123", "b": "4567"})
    seen: list[tuple[int, int]] = []
    catalog.verify(step_dir(tmp_path, 20), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 7), (7, 7)]


def test_a_resume_takes_the_newest_that_verifies_and_says_what_it_passed_over(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        commit(tmp_path, step)
    commit(tmp_path, 40, kind=STATE_DICT)
    (step_dir(tmp_path, 30) / "actor/model.pt").write_text("torn")
    (step_dir(tmp_path, 20) / "manifest.json").write_text("")
    skipped: list[str] = []
    found = catalog.newest_good(tmp_path, on_skip=skipped.append)
    assert found is not None
    assert found.step == 10
    assert [("step 30" in text, "step 20" in text) for text in skipped] == [(True, False), (False, True)]


def test_where_nothing_verifies_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    commit(tmp_path, 10, {})
    assert catalog.newest_good(tmp_path) is None


# ---- the files of all ranks


def of_ranks(place: str, ranks: int, *contents: str) -> dict[str, str]:
    """The files of verl's FSDP engines: of replicas in a hybrid mesh, too, each rank has its own."""
    return {f"{place}{content}_world_size_{ranks}_rank_{rank}.pt": "x" for content in contents for rank in range(ranks)}


FULL_SET = ("model", "optim", "extra_state")
WITH_FILES_OF_ALL_RANKS = {
    "full": of_ranks("actor/", 2, *FULL_SET),
    "weights": of_ranks("actor/", 4, "model"),
    "one rank": of_ranks("actor/", 1, *FULL_SET),
    "two roles of other worlds": of_ranks("actor/", 2, *FULL_SET) | of_ranks("critic/", 3, *FULL_SET),
    "in the step's folder": of_ranks("", 2, *FULL_SET),
    "dcp beside which is extra_state": of_ranks("actor/", 2, "extra_state"),
    "published by two of four": {f"actor/weights_rank-{rank:05d}.safetensors": "x" for rank in (0, 2)},
    "no ranks at all": {"actor/model.safetensors": "x", "data.pt": "x", "explorer/step.json": "x"},
}
LACKING = {
    "model": (of_ranks("actor/", 2, *FULL_SET), "actor/model_world_size_2_rank_1.pt"),
    "optimizer": (of_ranks("actor/", 2, *FULL_SET), "actor/optim_world_size_2_rank_0.pt"),
    "extra": (of_ranks("actor/", 2, *FULL_SET), "actor/extra_state_world_size_2_rank_1.pt"),
    "weights only": (of_ranks("actor/", 2, "model"), "actor/model_world_size_2_rank_1.pt"),
    "critic": (
        of_ranks("actor/", 2, *FULL_SET) | of_ranks("critic/", 2, "model"),
        "critic/model_world_size_2_rank_1.pt",
    ),
    "in the step's folder": (of_ranks("", 2, "model"), "model_world_size_2_rank_0.pt"),
}


def commit_without(root: Path, files: Mapping[str, str], left_out: str, kind: Kind = FULL) -> Path:
    """A checkpoint as an earlier release may have committed it."""
    commit(root, 20, files, kind=kind)
    return leave_out(step_dir(root, 20), left_out)


def leave_out(folder: Path, left_out: str) -> Path:
    manifest = read_manifest(folder)
    rest = tuple(entry for entry in manifest.files if entry.path != left_out)
    assert len(rest) == len(manifest.files) - 1
    write_manifest(folder, replace(manifest, files=rest, world_size=2), durable=False)
    (folder / left_out).unlink()
    return folder


@pytest.mark.parametrize("files", WITH_FILES_OF_ALL_RANKS.values(), ids=WITH_FILES_OF_ALL_RANKS)
def test_a_checkpoint_with_the_files_of_all_ranks_verifies(tmp_path: Path, files: dict[str, str]) -> None:
    commit(tmp_path, 20, files)
    assert catalog.verify(step_dir(tmp_path, 20)).problems == ()


@pytest.mark.parametrize(("files", "left_out"), LACKING.values(), ids=LACKING)
def test_verify_finds_a_checkpoint_that_lacks_the_file_of_a_rank(
    tmp_path: Path, files: dict[str, str], left_out: str
) -> None:
    report = catalog.verify(commit_without(tmp_path, files, left_out))
    assert report.state == "damaged"
    assert left_out in report.problems[0]


def test_a_resume_passes_over_a_checkpoint_that_lacks_the_file_of_a_rank(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    commit_without(tmp_path, of_ranks("actor/", 2, *FULL_SET), "actor/optim_world_size_2_rank_1.pt")
    found = catalog.newest_good(tmp_path)
    assert found is not None
    assert found.step == 10


@pytest.mark.parametrize(("files", "left_out"), LACKING.values(), ids=LACKING)
@pytest.mark.parametrize("place", ["staged", "in place"])
def test_a_step_that_lacks_the_file_of_a_rank_is_not_committed(
    tmp_path: Path, files: dict[str, str], left_out: str, place: str
) -> None:
    rest = {name: text for name, text in files.items() if name != left_out}
    if place == "staged":
        entries = tuple(stage(tmp_path, 20, rest))
    else:
        for name, text in rest.items():
            (step_dir(tmp_path, 20) / name).parent.mkdir(parents=True, exist_ok=True)
            (step_dir(tmp_path, 20) / name).write_text(text)
        entries = ()
    with pytest.raises(RunError, match=f"{left_out} is missing"):
        commits.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=FULL, files=entries))
    assert not (step_dir(tmp_path, 20) / "manifest.json").exists()


@pytest.mark.parametrize("place", ["actor/dcp", "actor/model/dist_ckpt"])  # FSDP's and Megatron's
@pytest.mark.parametrize("left_out", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_the_files_that_torchs_metadata_names_belong_to_the_checkpoint(
    tmp_path: Path, place: str, left_out: str
) -> None:
    staging = staging_dir(tmp_path, 20, 0)
    written.write_distributed(staging / place, {"model.a": torch.arange(6.0).view(3, 2)}, (2,))
    names = sorted(path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file())
    draft = Manifest(step=20, attempt=0, kind=FULL, files=tuple(file_entry(staging, name) for name in names))
    commits.commit_folder(tmp_path, draft)
    assert catalog.verify(step_dir(tmp_path, 20)).ok
    report = catalog.verify(leave_out(step_dir(tmp_path, 20), f"{place}/{left_out}"))
    assert (report.ok, left_out in report.problems[0]) == (False, True)
