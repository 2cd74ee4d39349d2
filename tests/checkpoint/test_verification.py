"""Verify, and the newest checkpoint that does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.helpers import commit
from trinity_sync.checkpoint import verification
from trinity_sync.checkpoint.layout import step_dir
from trinity_sync.protocol.parts import STATE_DICT


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
    report = verification.verify(step_dir(tmp_path, 20))
    assert not report.ok
    assert word in report.problems[0]
    assert "model.pt" in report.problems[0]


def test_verify_names_files_that_nobody_committed(tmp_path: Path) -> None:
    commit(tmp_path, 20)
    (step_dir(tmp_path, 20) / "stray").write_text("x")
    report = verification.verify(step_dir(tmp_path, 20))
    assert report.ok
    assert report.unlisted == ("stray",)


def test_verify_tells_how_far_it_is(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"a": "123", "b": "4567"})
    seen: list[tuple[int, int]] = []
    verification.verify(step_dir(tmp_path, 20), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 7), (7, 7)]


def test_a_resume_takes_the_newest_that_verifies_and_says_what_it_passed_over(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        commit(tmp_path, step)
    commit(tmp_path, 40, kind=STATE_DICT)
    (step_dir(tmp_path, 30) / "actor/model.pt").write_text("torn")
    (step_dir(tmp_path, 20) / "manifest.json").write_text("")
    skipped: list[str] = []
    found = verification.newest_good(tmp_path, on_skip=skipped.append)
    assert found is not None
    assert found.step == 10
    assert [("step 30" in text, "step 20" in text) for text in skipped] == [(True, False), (False, True)]


def test_where_nothing_verifies_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    commit(tmp_path, 10, {})
    assert verification.newest_good(tmp_path) is None
