"""What people type becomes what Hydra takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from trinity_sync.config.messages import CommandLine, plain_override
from trinity_sync.errors import ConfigError
from trinity_sync.launch.app import NewFolder


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ("name=größe", ["größe"]),
        ("task.path=pröm pt.jsonl", ["pröm pt.jsonl"]),
        ("task.path=~/rows.jsonl", ["/home/me/rows.jsonl"]),
        ("checkpoint.dir=~", ["/home/me"]),
        ("model.path=/models/a=b", ["/models/a=b"]),
        ("name=größe,klein", ["größe", "klein"]),
        ("+task.path=~/a,~/b", ["/home/me/a", "/home/me/b"]),
        ("task.path=[~/a*, ö]", ["['/home/me/a*', 'ö']"]),
    ],
)
def test_a_value_that_hydra_has_no_word_for_is_quoted(
    monkeypatch: pytest.MonkeyPatch, given: str, values: list[str]
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    override = OverridesParser.create().parse_override(plain_override(given))
    found = list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]
    assert [str(value).strip("'") for value in found] == values


@pytest.mark.parametrize(
    "text",
    ["trainer.steps=3", "retention=[keep_last,keep_best]", "name='größe'", "a=[ö", "trainer", "--config-dir=~x=ö",
     "~task", "x=${oc.env:HOME}", "x=", "seed=1,2"],
)  # fmt: skip
def test_all_others_stay_as_they_are(text: str) -> None:
    assert plain_override(text) == text


def test_another_path_of_option_files_is_looked_in_beside_ours() -> None:
    assert CommandLine.read(["--config-path", "mine", "a=1"]) == (["--config-dir", "mine", "a=1"], False, False)
    assert CommandLine.read(["-cp=mine", "--dry-run"]) == (["--config-dir=mine"], True, False)
    assert CommandLine.read(["a=1", "--supervise"]) == (["a=1"], False, True)
    with pytest.raises(ConfigError, match="can be given once"):
        CommandLine.read(["--config-path=a", "--config-dir", "b"])


def test_a_new_folder_is_taken_back_with_what_was_made_above_it(tmp_path: Path) -> None:
    new = NewFolder.of(tmp_path / "a" / "b" / "c")
    (new.path / ".hydra").mkdir(parents=True)
    new.take_back()
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_or_is_of_others_stays(tmp_path: Path) -> None:
    there = NewFolder.of(tmp_path)
    there.take_back()
    assert tmp_path.is_dir()
    new = NewFolder.of(tmp_path / "a" / "b")
    new.path.mkdir(parents=True)
    (tmp_path / "a" / "other").touch()
    new.take_back()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["other"]
    run = NewFolder.of(tmp_path / "run")
    run.path.mkdir()
    (run.path / "run.json").touch()
    run.take_back()
    assert run.path.is_dir()
