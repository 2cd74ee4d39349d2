"""Files that others write into a step's folder stay with the step."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.helpers import commit, names, stage
from trinity_sync.checkpoint.folder import catalog, commits, contents, recovery
from trinity_sync.checkpoint.folder.contents import Manifest, read_manifest, staging_dir, step_dir
from trinity_sync.protocol.parts import FULL, STATE_DICT, Kind


def data(root: Path, step: int) -> Path:
    return step_dir(root, step) / "data.pt"


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("kind", [STATE_DICT, FULL])
def test_a_file_that_others_wrote_into_a_committed_folder_stays_with_the_step(
    tmp_path: Path, exchange: bool, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(contents, "exchange", lambda first, second: False)
    commit(tmp_path, 8, {"actor/model.pt": "w"}, kind=kind)
    data(tmp_path, 8).write_text("where the data is")
    commit(tmp_path, 8, {"actor/model.pt": "w", "critic/model.pt": "c"})
    assert data(tmp_path, 8).read_text() == "where the data is"
    with data(tmp_path, 8).open("a") as still_being_written:
        still_being_written.write(" in all")
    report = catalog.verify(step_dir(tmp_path, 8))
    assert (report.ok, report.unlisted) == (True, ("data.pt",))


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("partial", [True, False])
def test_a_file_that_others_write_while_the_step_is_committed_stays_with_it(
    tmp_path: Path, exchange: bool, attempt: int, partial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = STATE_DICT if partial else FULL
    commit(tmp_path, 8, {"actor/model.pt": "w"}, kind=kind)
    real = contents.exchange

    def then_verl_writes(first: Path, second: Path) -> bool:
        data(tmp_path, 8).write_text("where the data is")
        return exchange and real(first, second)

    monkeypatch.setattr(contents, "exchange", then_verl_writes)
    files = {"actor/model.pt": "w", "actor/more.pt": "m"}
    commit(tmp_path, 8, files, kind=kind, attempt=attempt, partial=partial)
    assert data(tmp_path, 8).read_text() == "where the data is"
    assert catalog.verify(step_dir(tmp_path, 8)).unlisted == ("data.pt",)


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("attempt", [0, 1])
def test_a_death_before_the_old_folder_goes_takes_no_files_of_others_with_it(
    tmp_path: Path, exchange: bool, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Death(BaseException):
        pass

    commit(tmp_path, 8, {"actor/model.pt": "w"}, created=1.0)
    real = contents.exchange

    def then_verl_writes(first: Path, second: Path) -> bool:
        data(tmp_path, 8).write_text("where the data is")
        return exchange and real(first, second)

    def die(*_: object) -> None:
        raise Death

    with monkeypatch.context() as crash:
        crash.setattr(contents, "exchange", then_verl_writes)
        crash.setattr(commits, "_trash_or_abandon", die)
        with pytest.raises(Death):
            commit(tmp_path, 8, {"actor/model.pt": "w", "actor/more.pt": "m"}, attempt=attempt, created=2.0)
    recovery.recover(tmp_path)
    assert data(tmp_path, 8).read_text() == "where the data is"
    assert catalog.verify(step_dir(tmp_path, 8)).ok
    assert read_manifest(step_dir(tmp_path, 8)).attempt == attempt
    assert not [path for path in names(tmp_path) if path.startswith((".staging", ".trash", ".replaced"))]


def test_weights_that_are_committed_first_take_nothing_of_what_others_write_in_the_steps_folder(tmp_path: Path) -> None:
    step_dir(tmp_path, 8).mkdir(parents=True)
    data(tmp_path, 8).write_text("where the data is")
    commit(tmp_path, 8, {"actor/model.pt": "w"}, kind=STATE_DICT, partial=True)
    assert data(tmp_path, 8).read_text() == "where the data is"


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_without_hard_links_what_others_write_moves_with_the_step(
    tmp_path: Path, exchange: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(contents, "exchange", lambda first, second: False)

    def refuse_links(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    commit(tmp_path, 20)
    with open(data(tmp_path, 20), "w") as writing, monkeypatch.context() as failing:
        failing.setattr(os, "link", refuse_links)
        if fails:
            put_away = commits.move_to_trash

            def fail(place: Path, path: Path) -> Path:
                raise OSError(errno.EIO, "the disk fails")

            failing.setattr(commits, "move_to_trash", fail)
            with pytest.raises(OSError, match="the disk fails"):
                commit(tmp_path, 20, {"actor/model.pt": "other"}, attempt=1)
            failing.setattr(commits, "move_to_trash", put_away)
        else:
            commit(tmp_path, 20, {"actor/model.pt": "other"}, attempt=1)
        writing.write("state of the data")
    assert read_manifest(step_dir(tmp_path, 20)).attempt == (0 if fails else 1)
    assert data(tmp_path, 20).read_text() == "state of the data"


def fail_to_list(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    real, number = os.scandir, folder.stat().st_ino

    def scandir(path: str | Path) -> Any:
        if Path(path).stat().st_ino == number:
            raise OSError(errno.EIO, "the disk fails")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)


def test_a_folder_that_cannot_be_listed_now_is_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 8, {"actor/model.pt": "w"})
    theirs = step_dir(tmp_path, 8) / "theirs"
    theirs.mkdir()
    (theirs / "data.pt").write_text("where the data is")
    with monkeypatch.context() as patch:
        fail_to_list(patch, theirs)
        with pytest.raises(OSError, match="the disk fails"):
            commit(tmp_path, 8, {"actor/model.pt": "v", "critic/model.pt": "c"})
        assert catalog.verify(step_dir(tmp_path, 8)).ok
    assert (theirs / "data.pt").read_text() == "where the data is"
    commit(tmp_path, 8, {"actor/model.pt": "v", "critic/model.pt": "c"})
    assert (theirs / "data.pt").read_text() == "where the data is"


def test_staged_files_that_cannot_be_listed_now_are_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(tmp_path, 8, {"actor/model.pt": "w"})
    draft = Manifest(step=8, attempt=0, kind=FULL)
    with monkeypatch.context() as patch:
        fail_to_list(patch, staging_dir(tmp_path, 8, 0) / "actor")
        with pytest.raises(OSError, match="the disk fails"):
            commits.commit_folder(tmp_path, draft)
    assert not step_dir(tmp_path, 8).exists()
    assert commits.commit_folder(tmp_path, draft).paths == {"actor/model.pt"}
