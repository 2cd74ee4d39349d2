"""The simulated disk loses what a real one may lose, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.campaign.conftest import PLACE
from tests.campaign.filesystem import FileSystem
from trinity_sync.checkpoint.folder import contents
from trinity_sync.host.durable import replace_file, sync_folder


def write(path: Path, text: str, *, durable: bool) -> None:
    with open(path, "w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def after_cuts(disk: FileSystem, path: Path, times: int = 60) -> set[str | None]:
    """What may be in a file after a power cut."""
    import copy

    found = set()
    for seed in range(times):
        cut = copy.deepcopy(disk)
        cut.lose_power(random.Random(seed))
        node = cut.find(str(path))
        found.add(node.data.decode() if node is not None else None)  # type: ignore[union-attr]
    return found


def test_a_file_that_was_never_synced_may_be_gone_whole_or_torn(disk: FileSystem) -> None:
    write(PLACE / "a", "abc", durable=False)
    assert after_cuts(disk, PLACE / "a") == {None, "", "a", "ab", "abc"}


def test_a_file_without_its_folder_may_be_gone_but_is_not_torn(disk: FileSystem) -> None:
    write(PLACE / "a", "abc", durable=True)
    assert after_cuts(disk, PLACE / "a") == {None, "abc"}


def test_what_was_synced_with_its_folder_stays(disk: FileSystem) -> None:
    write(PLACE / "a", "abc", durable=True)
    sync_folder(PLACE)
    assert after_cuts(disk, PLACE / "a") == {"abc"}


def test_a_name_that_goes_ahead_of_its_bytes_may_be_empty(disk: FileSystem) -> None:
    write(PLACE / "new", "abc", durable=False)
    (PLACE / "new").rename(PLACE / "a")
    sync_folder(PLACE)
    assert "" in after_cuts(disk, PLACE / "a")
    assert None not in after_cuts(disk, PLACE / "a")


def test_a_replaced_file_is_the_old_or_the_new_one(disk: FileSystem) -> None:
    replace_file(PLACE / "a", "old")
    write(PLACE / "new", "new", durable=True)
    (PLACE / "new").replace(PLACE / "a")
    assert after_cuts(disk, PLACE / "a") == {"old", "new"}


def test_replace_file_is_durable(disk: FileSystem) -> None:
    replace_file(PLACE / "a", "old")
    replace_file(PLACE / "a", "new")
    assert after_cuts(disk, PLACE / "a") == {"new"}


def test_a_folder_is_renamed_in_both_places_or_in_none(disk: FileSystem) -> None:
    (PLACE / "from/x").mkdir(parents=True)
    (PLACE / "to").mkdir()
    disk.make_durable()
    (PLACE / "from/x").rename(PLACE / "to/x")
    for seed in range(40):
        import copy

        cut = copy.deepcopy(disk)
        cut.lose_power(random.Random(seed))
        assert (cut.find(str(PLACE / "from/x")) is None) != (cut.find(str(PLACE / "to/x")) is None)


def test_the_sync_of_one_folder_makes_a_rename_into_it_durable_in_the_other(disk: FileSystem) -> None:
    (PLACE / "from/x").mkdir(parents=True)
    (PLACE / "from/x").rename(PLACE / "x")
    sync_folder(PLACE)
    disk.lose_power(random.Random(1))
    assert disk.find(str(PLACE / "x")) is not None
    assert disk.find(str(PLACE / "from/x")) is None


def test_folders_change_places_in_one_step(disk: FileSystem) -> None:
    for name in ("a", "b"):
        (PLACE / name).mkdir()
        write(PLACE / name / name, name, durable=True)
    assert contents.exchange(PLACE / "a", PLACE / "b")
    assert (PLACE / "a/b").read_text() == "b"
    disk.exchanges = False
    assert not contents.exchange(PLACE / "a", PLACE / "b")


def test_the_usual_functions_work_on_it(disk: FileSystem) -> None:
    (PLACE / "folder/inner").mkdir(parents=True)
    write(PLACE / "folder/inner/file", "text", durable=False)
    os.link(PLACE / "folder/inner/file", PLACE / "link")
    shutil.copyfile(PLACE / "link", PLACE / "copy")
    assert {path.relative_to(PLACE).as_posix() for path in PLACE.rglob("*")} == {
        "folder", "folder/inner", "folder/inner/file", "link", "copy",
    }  # fmt: skip
    assert (PLACE / "link").stat().st_nlink == 2
    with pytest.raises(OSError, match="not empty") as caught:
        (PLACE / "folder").rmdir()
    assert caught.value.errno == errno.ENOTEMPTY
    shutil.rmtree(PLACE / "folder")
    assert sorted(os.listdir(PLACE)) == ["copy", "link"]  # noqa: PTH208
    with open(PLACE / "copy", "a+b") as file:
        file.write(b" and more")
        file.seek(0)
        assert file.read() == b"text and more"
    with pytest.raises(FileNotFoundError):
        (PLACE / "nowhere").read_text()
    (PLACE / "touched").touch()
    assert (PLACE / "touched").read_bytes() == b""


def test_a_lock_keeps_others_out_until_its_holder_ends(disk: FileSystem) -> None:
    first, second = open(PLACE / "lock", "ab"), open(PLACE / "lock", "ab")  # noqa: SIM115
    fcntl.flock(first, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        fcntl.flock(second, fcntl.LOCK_SH | fcntl.LOCK_NB)
    first.close()
    fcntl.flock(second, fcntl.LOCK_SH | fcntl.LOCK_NB)
    second.close()
