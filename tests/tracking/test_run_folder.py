from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync.errors import ConfigError
from trinity_sync.tracking import run_record
from trinity_sync.tracking.run_record import RunFolder, RunFolderInUse, lock_owner


def test_a_fresh_run_makes_its_folder(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "a" / "b", resume=False) as folder:
        assert folder.path == tmp_path / "a" / "b"
        assert folder.logs.is_dir()
        assert not folder.resumed


def test_nothing_but_the_lock_and_the_logs_is_left_by_opening(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, resume=False).close()
    assert sorted(child.name for child in tmp_path.iterdir()) == [".lock", "logs"]


def test_a_held_folder_is_refused_and_its_holder_named(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, resume=False):
        with pytest.raises(RunFolderInUse, match=f"process {os.getpid()} on {socket.gethostname()}"):
            RunFolder.open(tmp_path, resume=False)
        owner = lock_owner(tmp_path)
        assert owner is not None
        assert owner.pid == os.getpid()


def test_leaving_lets_go(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, resume=False):
        pass
    assert lock_owner(tmp_path) is None
    RunFolder.open(tmp_path, resume=False).close()


def test_a_folder_that_is_passed_on_stays_held_until_the_next_one_leaves_it(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, resume=False) as folder:
        folder.pass_on()
    assert lock_owner(tmp_path) is not None
    RunFolder.open(tmp_path, resume=False).close()
    assert lock_owner(tmp_path) is None


def test_a_folder_that_is_passed_on_and_cannot_be_opened_is_let_go_in_the_end(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, resume=False) as folder:
        folder.pass_on()
    with pytest.raises(ConfigError, match="no run to resume"):
        RunFolder.open(tmp_path, resume=True)
    run_record.unlock_run_folder(tmp_path)
    assert lock_owner(tmp_path) is None


def test_looking_for_a_holder_leaves_no_trace(tmp_path: Path) -> None:
    assert lock_owner(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_lets_go(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom trinity_sync.tracking.run_record import RunFolder\n"
        "held = RunFolder.open(sys.argv[1], resume=False)\nprint('held', flush=True)\ntime.sleep(600)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunFolderInUse, match=f"process {other.pid} on"):
            RunFolder.open(tmp_path, resume=False)
    finally:
        other.kill()
        other.wait()
    RunFolder.open(tmp_path, resume=False).close()


def test_a_fresh_run_in_the_folder_of_another_is_refused_and_does_not_hold_it(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"already holds a run.*trinity-sync resume"):
        RunFolder.open(tmp_path, resume=False)
    RunFolder.open(tmp_path, resume=True).close()


def test_a_resume_where_no_run_is_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run\.json"):
        RunFolder.open(tmp_path / "none", resume=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_below_a_file_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/run"):
        RunFolder.open(tmp_path / "file" / "run", resume=False)


@pytest.mark.parametrize(("number", "words"), [(28, "No space left"), (30, "Read-only file system")])
def test_a_disk_that_takes_no_write_is_a_configuration_error_and_the_folder_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(handle: int, data: memoryview) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_record.os, "write", refuse)
    with pytest.raises(ConfigError, match=f"{tmp_path} does not take writes: {words}"):
        RunFolder.open(tmp_path, resume=False)
    monkeypatch.undo()
    assert lock_owner(tmp_path) is None
    assert not list(tmp_path.glob(".probe*"))


def test_a_link_in_the_place_of_what_is_written_to_try_the_disk_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / f".probe-{os.getpid()}").symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="does not take writes"):
        RunFolder.open(tmp_path, resume=False)
    assert (tmp_path / "theirs").read_text() == "theirs"
