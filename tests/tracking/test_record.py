from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tracking.synthetic import START, Clock
from trinity_sync.errors import ConfigError
from trinity_sync.tracking.run_record import RunRecord, git_state, read_record, run_id


def new(path: Path, clock: Clock, **other: Any) -> RunRecord:
    options: dict[str, Any] = {"command": "python launch.py", "seed": 3, "config_digest": "ab", "threads": 1}
    return RunRecord.new(path / "run.json", clock=clock, source=path, **{**options, **other})


def test_a_fresh_run_is_attempt_0_and_running(tmp_path: Path) -> None:
    new(tmp_path, Clock()).start()
    written = json.loads((tmp_path / "run.json").read_text())
    assert {key: written[key] for key in ("status", "attempt", "seed", "started", "ended", "error")} == {
        "status": "running",
        "attempt": 0,
        "seed": 3,
        "started": START,
        "ended": None,
        "error": None,
    }
    promised = {"command", "git", "packages", "host", "threads", "config_digest"}
    assert promised <= written.keys()
    assert written["reproducible"]


def test_a_run_that_cannot_be_repeated_bit_for_bit_says_so(tmp_path: Path) -> None:
    new(tmp_path, Clock(), reproducible=False).start()
    assert read_record(tmp_path / "run.json")["reproducible"] is False


def test_nothing_is_written_before_the_start(tmp_path: Path) -> None:
    new(tmp_path, Clock())
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_says_how_and_when_it_ended(tmp_path: Path) -> None:
    clock = Clock()
    record = new(tmp_path, clock)
    record.start()
    clock.pass_(9)
    record.finish("failed", "rank 1 died")
    written = read_record(tmp_path / "run.json")
    assert (written["status"], written["ended"], written["error"]) == ("failed", START + 9, "rank 1 died")


def test_a_resume_is_one_attempt_more_and_keeps_the_earlier_ones(tmp_path: Path) -> None:
    clock = Clock()
    first = new(tmp_path, clock)
    first.start()
    first.finish("failed", "why")
    new(tmp_path, clock, resumed_from=4).start()
    third = new(tmp_path, clock, resumed_from=8)
    third.start()
    third.finish("completed")
    written = read_record(tmp_path / "run.json")
    assert written["attempt"] == 2
    assert written["status"] == "completed"
    assert [(item["attempt"], item["status"], item["resumed_from"]) for item in written["attempts"]] == [
        (0, "failed", None),
        (1, "interrupted", 4),
        (2, "completed", 8),
    ]


def test_a_run_cannot_finish_as_running(tmp_path: Path) -> None:
    record = new(tmp_path, Clock())
    record.start()
    with pytest.raises(ValueError, match="completed, failed, interrupted"):
        record.finish("running")


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "{}"),
        *('{"attempt": 0, "git": "x"}', '{"attempt": 0, "packages": [1]}'),
        *('{"attempt": 0, "attempts": [null]}', '{"attempt": 0, "attempts": 3}'),
    ],
)
def test_a_damaged_record_is_a_configuration_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=r"run\.json"):
        new(tmp_path, Clock())


def test_a_command_given_in_parts_is_quoted_for_a_shell(tmp_path: Path) -> None:
    record = new(tmp_path, Clock(), command=["python", "launch.py", "name=a b"])
    assert record.command == "python launch.py 'name=a b'"


def test_git_names_the_commit_and_whether_tracked_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert git_state(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "first")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "new").write_text("untracked")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("b")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}


def test_versions_are_known_without_importing_the_packages() -> None:
    code = (
        "import sys\nfrom trinity_sync.tracking.run_record import package_versions\n"
        "found = package_versions()\nassert {'python', 'torch', 'ray'} <= found.keys()\n"
        "print(sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_has_one_id_in_all_its_attempts(tmp_path: Path) -> None:
    first = new(tmp_path, Clock())
    first.start()
    assert len(first.id) == 32
    assert read_record(tmp_path / "run.json")["id"] == first.id
    assert new(tmp_path, Clock()).id == first.id
    (tmp_path / "run.json").unlink()
    assert new(tmp_path, Clock()).id != first.id


def test_a_run_of_an_earlier_release_gets_an_id_that_stays(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"attempt": 3, "status": "failed"}))
    made = run_id(tmp_path / "run.json")
    assert run_id(tmp_path / "run.json") == made
    assert read_record(tmp_path / "run.json")["status"] == "failed"


@pytest.mark.parametrize("id", ["", "../../x", "A" * 32, "a" * 31, 7])
def test_an_id_that_is_none_is_refused(tmp_path: Path, id: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"attempt": 0, "id": id}))
    with pytest.raises(ConfigError, match="is not the record of a run: id is"):
        read_record(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("attempt", value) for value in (-1, True, 10**30)],
        *[("started", value) for value in (-1.0, 1e300, float("inf"), float("nan"))],
        *[("last_version", {"step": step, "digest": "ab"}) for step in (-1, True, 10**30)],
    ],
)
def test_a_number_out_of_its_bounds_is_no_record(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"attempt": 0, name: value}))
    with pytest.raises(ConfigError, match="is not the record of a run: "):
        read_record(path)
