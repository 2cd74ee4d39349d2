"""Where the data of a run go on: by what the checkpoint says that it begins with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity_sync.config import RunConfig, compose, typed
from trinity_sync.launch.sample_source import _Groups, _numbering, made_with, validation_times
from trinity_sync.launch.start import Start
from trinity_sync.samples.advantages import LengthPenalty
from trinity_sync.samples.position import GroupId, Numbering, Position

KEY = "algorithm.prompts_per_step"


class ByNumber:
    def prompts_from(self, first: int, count: int) -> list[Any]:
        return []


class ByStep:
    pass


def after(step: int, folder: Path, position: Position | None, *, of_own: bool = True) -> Start:
    """A run that begins with a checkpoint of this step, of its own folder or of another run."""
    state = {"step": step} if position is None else {"step": step, "data": position.to_json()}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return Start(step, of_own, folder.parent if of_own else folder / "other", folder)


def numbering(start: Start, count: int, task: object = None) -> Numbering:
    return _numbering(start, count, KEY, task or ByNumber(), "prompts_from")


@pytest.mark.parametrize("of_own", [True, False])
def test_a_run_goes_on_with_the_next_prompt(tmp_path: Path, of_own: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that begins with the checkpoint of another."""
    start = after(5, tmp_path, Position(Numbering(3, 8, 10), GroupId(6, 0)), of_own=of_own)
    assert [numbering(start, 10).first_of(step) for step in (6, 7)] == [38, 48]
    assert [numbering(start, 4).first_of(step) for step in (6, 7)] == [38, 42]
    assert not capsys.readouterr().err


def test_a_checkpoint_that_does_not_say_counts_from_the_first_step(tmp_path: Path) -> None:
    assert numbering(after(5, tmp_path, None), 10).first_of(6) == 50
    assert numbering(Start(0, False, tmp_path, None), 10).first_of(1) == 0


def test_a_task_that_gives_prompts_by_step_only_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = after(5, tmp_path, Position.at(6, 10))
    numbering(start, 10, ByStep())
    assert not capsys.readouterr().err
    numbering(start, 4, ByStep())
    assert capsys.readouterr().err == (
        f"note: {tmp_path} was saved with algorithm.prompts_per_step=10, and ByStep has no prompts_from(): the run "
        "goes on with what it gives for step 6, so some may be missed or repeated\n"
    )


def test_from_free_to_lockstep_it_says_how_many_are_missed_or_come_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = after(2, tmp_path, Position(Numbering(1, 0, 4), GroupId(3, 2), [GroupId(1, 3), GroupId(2, 0)]))
    assert numbering(start, 4).first_of(3) == 8
    assert "2 prompts are missed and 2 trained on twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("start", "on_record", "validates"),
    [(0, [], True), (4, [0, 2], True), (4, [0, 4], False), (3, [0, 2], False), (6, [0, 4], True)],
)
def test_a_run_that_goes_on_validates_what_it_begins_with_where_that_is_missing(
    tmp_path: Path, start: int, on_record: list[int], validates: bool
) -> None:
    """Each second step is due, and the last, which is 6 here."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": step, "val/reward/mean": 0.5}) + "\n" for step in on_record))
    cfg = typed(compose(["task.validation.prompts=4", "task.validation.interval=2"]))
    begun = Start(start, start > 0, tmp_path, tmp_path / "global_step" if start else None)
    times = validation_times(cfg, begun, metrics, 6)
    assert times is not None
    assert times.at_start is validates
    assert validation_times(typed(compose([])), Start(0, False, tmp_path, None), metrics, 6) is None


@pytest.mark.parametrize("as_object", [False, True])
def test_a_part_of_a_users_algorithm_may_have_further_keys(as_object: bool) -> None:
    cfg = typed(compose())
    overlong = {"buffer": 3, "penalty": 0.5, "shape": "linear"}
    vars(cfg.algorithm)["overlong"] = SimpleNamespace(**overlong) if as_object else overlong
    assert _Groups.of(cfg).judge.keywords["overlong"] == LengthPenalty(  # type: ignore[attr-defined]
        longest=cfg.task["response_length"], buffer=3, penalty=0.5
    )


# -- what the journal of samples depends on


def made_of(folder: Path, *overrides: str) -> str:
    config = RunConfig(compose([f"+task.path={folder / 'rows.jsonl'}", *overrides]))
    values: Any = SimpleNamespace(
        task={"path": str(folder / "rows.jsonl"), "reward": {"_target_": "journal_rewards.score", "pattern": "~~~"}},
        explorer=SimpleNamespace(),
        algorithm=SimpleNamespace(),
    )
    return made_with(values, config.samples_digest)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a reward, a module that it imports, and rows."""
    (tmp_path / "journal_rewards.py").write_text("from journal_helper import score\n")
    (tmp_path / "journal_helper.py").write_text("def score(): return 1\n")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("changed", ["journal_rewards.py", "journal_helper.py", "rows.jsonl"])
def test_finished_samples_are_not_those_of_changed_code_or_rows(code: Path, changed: str) -> None:
    before = made_of(code)
    assert made_of(code) == before
    (code / changed).write_text((code / changed).read_text() + "\n")
    assert made_of(code) != before


@pytest.mark.parametrize(
    ("override", "same"),
    [("checkpoint.interval=7", True), ("samples.journal_mb=7", True), ("trainer.lr=0.1", False), ("seed=7", False)],
)
def test_finished_samples_are_those_of_settings_on_which_samples_depend(code: Path, override: str, same: bool) -> None:
    assert (made_of(code, override) == made_of(code)) == same
