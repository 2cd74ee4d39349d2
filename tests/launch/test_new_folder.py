"""The folder of a run that has not begun: whose it is, and what is taken back of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync.errors import ConfigError
from trinity_sync.launch.app import NewFolder
from trinity_sync.tracking import run_record
from trinity_sync.tracking.run_record import RunFolder, RunFolderInUse

HOLD = """
import sys
from trinity_sync.tracking.run_record import lock_run_folder
lock_run_folder(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_is_taken_back_with_those_above_that_were_made_for_it(tmp_path: Path) -> None:
    new = NewFolder.of(tmp_path / "a" / "b" / "run")
    run_record.lock_run_folder(new.path)
    (new.path / ".hydra").mkdir()
    (new.path / ".hydra" / "config.yaml").touch()
    new.take_back()
    assert list(tmp_path.iterdir()) == []


def test_what_somebody_else_has_put_there_stays(tmp_path: Path) -> None:
    new = NewFolder.of(tmp_path / "run")
    run_record.lock_run_folder(new.path)
    (new.path / "notes.txt").write_text("mine")
    new.take_back()
    assert [path.name for path in new.path.iterdir()] == ["notes.txt"]


def test_nothing_is_taken_back_where_another_run_is_about_to_begin(tmp_path: Path) -> None:
    new = NewFolder.of(tmp_path / "run")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(new.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        (new.path / ".hydra").mkdir()
        with pytest.raises(RunFolderInUse, match=f"in use by process {other.pid}"):
            run_record.lock_run_folder(new.path)
        new.take_back()
        assert (new.path / ".hydra").is_dir()
    finally:
        other.communicate()


def test_a_run_takes_over_the_folder_that_its_process_holds(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    run_record.lock_run_folder(tmp_path / "link" / "run")
    with RunFolder.open(tmp_path / "run", resume=False) as folder:
        assert json.loads((folder.path / ".lock").read_text())["pid"]
        with pytest.raises(ConfigError):
            run_record.lock_run_folder(folder.path)
    run_record.lock_run_folder(tmp_path / "run")
    run_record.unlock_run_folder(tmp_path / "run")
    run_record.lock_run_folder(tmp_path / "run")
    run_record.unlock_run_folder(tmp_path / "run")
