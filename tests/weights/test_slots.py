from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from trinity_sync.weights import slots as slots_module
from trinity_sync.weights.slots import MappedSegments, SegmentError, SlotArena, map_segment, remove_stale

PARTS = {"rank-00000": 10_000, "rank-00001": 0}
HOME = f"trinity-sync-{os.geteuid()}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@contextmanager
def other_process_with_an_arena(root: Path, key: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has made an arena and lives until it is killed."""
    program = (
        "import sys, pathlib; from trinity_sync.weights.slots import SlotArena\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "arena = SlotArena.create(sys.argv[2], 1, {'rank-00000': 5000}, root, fallback=root)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(root), key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_what_one_process_writes_another_mapping_reads(root: Path) -> None:
    with SlotArena.create("run", 2, PARTS, root, fallback=root) as arena:
        written = map_segment(arena.path(1, "rank-00000"), 10_000, writable=True)
        written[:3] = b"abc"
        assert arena.map(1, "rank-00000")[:3] == b"abc"
        assert arena.map(0, "rank-00000")[:3] == bytes(3)
        assert len(map_segment(arena.path(1, "rank-00000"), 10_000)) == 10_000
        assert arena.notes == []
        assert arena.folder == root / HOME / "run"


def test_a_segment_is_mapped_once_until_another_one_takes_its_place(root: Path) -> None:
    segments = MappedSegments()
    with SlotArena.create("run", 1, PARTS, root, fallback=root) as arena:
        path = arena.path(0, "rank-00000")
        first = segments.get(path, 10_000)
        arena.map(0, "rank-00000")[:3] = b"abc"
        assert segments.get(path, 10_000) is first
        assert first[:3] == b"abc"
    with pytest.raises(SegmentError, match="no longer exists"):
        segments.get(path, 10_000)
    with SlotArena.create("run", 1, PARTS, root, fallback=root) as arena:  # the same names, by the next agent
        arena.map(0, "rank-00000")[:3] = b"xyz"
        assert segments.get(path, 10_000)[:3] == b"xyz"
        with pytest.raises(SegmentError, match="is torn"):
            segments.get(path, 20_000)


def test_a_reader_cannot_write(root: Path) -> None:
    with SlotArena.create("run", 1, PARTS, root, fallback=root) as arena:
        mapping = map_segment(arena.path(0, "rank-00000"), 10_000)
        with pytest.raises(TypeError):
            mapping[0] = 1


def test_a_part_that_holds_nothing_can_be_mapped(root: Path) -> None:
    with SlotArena.create("run", 1, PARTS, root, fallback=root) as arena:
        assert len(map_segment(arena.path(0, "rank-00001"), 0, writable=True)) == 1


def test_all_memory_is_reserved_at_the_start(root: Path) -> None:
    with SlotArena.create("run", 2, {"p": 1 << 20}, root, fallback=root) as arena:
        assert all(arena.path(slot, "p").stat().st_blocks * 512 >= 1 << 20 for slot in range(2))


def test_close_leaves_nothing_may_be_repeated_and_ends_the_arena(root: Path) -> None:
    arena = SlotArena.create("run", 2, PARTS, root, fallback=root)
    path = arena.path(0, "rank-00000")
    arena.close()
    arena.close()
    assert list(root.iterdir()) == []
    with pytest.raises(SegmentError, match=r"rank-00000 no longer exists: its node agent ended"):
        map_segment(path, 10)
    with pytest.raises(SegmentError, match="is closed"):
        arena.map(0, "rank-00000")


def test_close_with_a_view_in_use_removes_the_files_and_leaves_the_view_alone(root: Path) -> None:
    arena = SlotArena.create("run", 1, PARTS, root, fallback=root)
    view = memoryview(arena.map(0, "rank-00000"))
    arena.close()
    assert bytes(view[:4]) == bytes(4)
    assert list(root.iterdir()) == []


def test_close_spares_the_other_runs_of_the_node(root: Path) -> None:
    first = SlotArena.create("one", 1, PARTS, root, fallback=root)
    with SlotArena.create("two", 1, PARTS, root, fallback=root):
        first.close()
        assert [folder.name for folder in (root / HOME).iterdir()] == ["two"]


def test_a_segment_that_is_too_small_is_torn(root: Path) -> None:
    with SlotArena.create("run", 1, PARTS, root, fallback=root) as arena:
        path = arena.path(0, "rank-00000")
        with pytest.raises(SegmentError, match=r"is torn: it has 10000 bytes, the layout needs 10001"):
            map_segment(path, 10_001)


def test_an_unknown_slot_or_part_is_named(root: Path) -> None:
    with (
        SlotArena.create("run", 1, PARTS, root, fallback=root) as arena,
        pytest.raises(SegmentError, match=r"no segment rank-00000 in slot 1: .* has 1 slots"),
    ):
        arena.map(1, "rank-00000")


@pytest.mark.parametrize("bad", ["", "..", "a/b", "../x", ".hidden", "a b"])
def test_names_that_leave_the_folder_are_refused(root: Path, bad: str) -> None:
    with pytest.raises(ValueError, match="is not a plain file name"):
        SlotArena.create(bad, 1, PARTS, root, fallback=root)
    with pytest.raises(ValueError, match="is not a plain file name"):
        SlotArena.create("run", 1, {bad: 1}, root, fallback=root)


def test_no_slots_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="0 slots; at least 1"):
        SlotArena.create("run", 0, PARTS, root, fallback=root)


def test_shared_memory_that_is_too_small_gives_mapped_files_and_a_note(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = slots_module.os.statvfs
    small = SimpleNamespace(f_bavail=16, f_frsize=4096)
    monkeypatch.setattr(slots_module.os, "statvfs", lambda path: small if Path(path) == root else real(path))
    with SlotArena.create("run", 2, {"p": 1 << 20}, root, fallback=tmp_path / "disk") as arena:
        assert arena.folder == tmp_path / "disk" / HOME / "run"
        arena.map(1, "p")[:2] = b"ok"
        assert map_segment(arena.path(1, "p"), 1 << 20)[:2] == b"ok"
        (note,) = arena.notes
        assert f"{root} cannot hold the 2 slots, which need 2 MiB (0 MiB free)" in note
        assert "--shm-size" in note
    assert list(root.iterdir()) == []


def test_shared_memory_that_is_absent_gives_mapped_files_and_a_note(tmp_path: Path) -> None:
    with SlotArena.create("run", 1, PARTS, tmp_path / "none", fallback=tmp_path / "disk") as arena:
        assert arena.folder.is_relative_to(tmp_path / "disk")
        assert "No such file or directory" in arena.notes[0]


def test_memory_that_runs_out_while_it_is_reserved_gives_mapped_files(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = slots_module._reserve

    def reserve(path: Path, nbytes: int) -> None:
        if path.is_relative_to(root) and path.parent.name == "slot-1":
            raise OSError(28, "No space left on device")
        real(path, nbytes)

    monkeypatch.setattr(slots_module, "_reserve", reserve)
    with SlotArena.create("run", 2, PARTS, root, fallback=tmp_path / "disk") as arena:
        assert arena.folder.is_relative_to(tmp_path / "disk")
        assert "No space left on device" in arena.notes[0]
    assert list(root.iterdir()) == []


def test_no_room_anywhere_is_a_clear_error(tmp_path: Path) -> None:
    huge = {"p": 1 << 55}
    with pytest.raises(SegmentError, match=r"no room for 1 slots, .*neither .*/none nor .*/disk can hold them"):
        SlotArena.create("run", 1, huge, tmp_path / "none", fallback=tmp_path / "disk")


def test_the_folder_of_a_living_process_is_neither_removed_nor_taken(root: Path) -> None:
    with other_process_with_an_arena(root, "run"):
        assert remove_stale(root) == []
        assert (root / HOME / "run" / "slot-0" / "rank-00000").exists()
        with pytest.raises(SegmentError, match="is in use by a live process"):
            SlotArena.create("run", 1, PARTS, root, fallback=root)


def test_the_folder_of_a_killed_process_is_removed(root: Path) -> None:
    with other_process_with_an_arena(root, "run") as process:
        process.kill()
        process.wait()
        with SlotArena.create("alive", 1, PARTS, root, fallback=root):
            assert remove_stale(root) == [root / HOME / "run"]
            assert remove_stale(root) == []
    assert list(root.iterdir()) == []


def test_the_folder_of_a_killed_process_is_replaced_by_a_run_of_the_same_key(root: Path) -> None:
    with other_process_with_an_arena(root, "run") as process:
        process.kill()
        process.wait()
    with SlotArena.create("run", 2, PARTS, root, fallback=root) as arena:
        assert sorted(path.name for path in arena.folder.iterdir()) == ["owner.lock", "slot-0", "slot-1"]


def test_a_folder_whose_maker_died_before_it_was_locked_is_removed(root: Path) -> None:
    (root / HOME / "run").mkdir(parents=True)
    assert remove_stale(root) == [root / HOME / "run"]


def test_an_arena_is_made_although_another_one_takes_the_empty_home_away_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = slots_module.fcntl.flock
    taken: list[Path] = []

    def flock(descriptor: int, operation: int) -> None:
        if not taken:  # the first to be locked is the home: its last user goes just before we get the lock
            taken.append(root / HOME)
            taken[0].rmdir()
        real(descriptor, operation)

    monkeypatch.setattr(slots_module.fcntl, "flock", flock)
    with SlotArena.create("run", 1, PARTS, root, fallback=root) as arena:
        assert arena.notes == []
        assert arena.path(0, "rank-00000").exists()
    assert taken


def test_nothing_is_stale_where_there_is_nothing(root: Path) -> None:
    assert remove_stale(root) == []
    assert remove_stale(root / "absent") == []
