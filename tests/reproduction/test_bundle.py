"""A bundle comes back as it was written, or is refused; it says nothing of where the run lived."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.errors import ConfigError
from trinity_sync.reproduction.outcome import Bundle, Outcome, read_bundle

BUNDLE = Bundle(
    record={"seed": 3, "reproducible": True, "packages": {"python": "3.11", "torch": "2.9.0", "trinity-sync": "1"}},
    config_name="config",
    overrides=("seed=3", "sync=nccl"),
    config={"seed": 3, "name": "Zürich"},
    outcome=Outcome(digests={0: "aa", 10: "bb"}, metrics={1: {"loss": 0.1 + 0.2, "kl": None}}),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    BUNDLE.write(tmp_path / "run.bundle.json")
    return tmp_path / "run.bundle.json"


def test_it_comes_back_as_it_was_written(path: Path) -> None:
    assert read_bundle(path) == BUNDLE


def test_values_that_json_has_no_words_for_do_not_spoil_it(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    Bundle(record={}, config_name="config", overrides=(), config={"lr": float("inf")}, outcome=Outcome()).write(path)
    assert read_bundle(path).config == {"lr": None}


def test_packages_are_constraints_for_pip(path: Path) -> None:
    assert json.loads(path.read_text())["constraints"] == ["torch==2.9.0"]


def test_it_keeps_where_the_run_lived_to_itself(tmp_path: Path) -> None:
    record: Any = {**BUNDLE.record, "command": "launch.py key=secret", "host": "h", "attempts": [{"command": "secret"}]}
    path = tmp_path / "bundle"
    Bundle(record=record, config_name="config", overrides=(), config={}, outcome=Outcome()).write(path)
    assert "secret" not in path.read_text()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["digests"].update({"0": "ab"}),
        lambda content: content["overrides"].append("seed=4"),
        lambda content: content.update(more=1),
        lambda content: content.pop("self"),
        lambda content: content.pop("constraints"),
    ],
)
def test_one_that_was_changed_is_refused(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="was changed after it was written"):
        read_bundle(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"bundle": "1"}', "{", "\xff", "[" * 100_000])
def test_what_is_no_bundle_is_refused(path: Path, text: str) -> None:
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"run\.bundle\.json"):
        read_bundle(path)


def test_a_record_that_is_none_is_refused(path: Path) -> None:
    record: Any = {**BUNDLE.record, "git": "abc"}
    Bundle(record=record, config_name="config", overrides=(), config={}, outcome=Outcome()).write(path)
    with pytest.raises(ConfigError, match=r"run\.bundle\.json is not the record of a run: git is 'abc'"):
        read_bundle(path)


def test_one_of_a_newer_version_is_refused_as_that(path: Path) -> None:
    content = {**json.loads(path.read_text()), "bundle": 2, "new": 1}
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"format 2, written by a newer version"):
        read_bundle(path)


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_bundle(tmp_path / "nothing")
