"""What a verl program goes on from, and what of the folder stays as it was."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.checkpoint.helpers import commit, names, newer, stage, unreadable, verls
from trinity_sync.checkpoint.disk import CheckpointDisk
from trinity_sync.checkpoint.folder import catalog, recovery
from trinity_sync.checkpoint.folder.contents import read_tracker, write_tracker
from trinity_sync.checkpoint.folder.deletion import prune_plan
from trinity_sync.checkpoint.folder.resume_point import StartPoint, put_in_order
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.protocol.retention import KeepLast


def state(root: Path) -> set[str]:
    return {name for name in names(root) if not name.startswith(".")}


def disk(root: Path) -> CheckpointDisk:
    """Of the monitor."""
    return CheckpointDisk(root=root, attempt=0, policies=(), keep_state_dicts=2, fsync=False, clock=time.time)


def verl_run(root: Path, *steps: int, tracker: int | None) -> None:
    for step in steps:
        verls(root, step)
    if tracker is not None:
        write_tracker(root, FULL, tracker)


def test_the_checkpoints_of_verl_are_gone_on_from_and_left_alone(tmp_path: Path) -> None:
    verl_run(tmp_path, 10, 20, 30, tracker=30)
    before = state(tmp_path)
    assert put_in_order(tmp_path, None) == StartPoint(attempt=0, step=30, verified=False)
    assert state(tmp_path) - {"latest_state_dict_iteration.txt"} == before
    assert (read_tracker(tmp_path, FULL).step, read_tracker(tmp_path, STATE_DICT).step) == (30, 30)


@pytest.mark.parametrize("place", ["", "critic"])
def test_what_verls_other_trainers_wrote_is_theirs_too(tmp_path: Path, place: str) -> None:
    for step in (10, 20):
        verls(tmp_path, step, place=place)
    with pytest.raises(RunError, match=r"resume_step=20"):
        put_in_order(tmp_path, None)
    write_tracker(tmp_path, FULL, 20)
    before = state(tmp_path)
    with pytest.raises(RunError, match=r"global_step_10.*verl.*move it"):
        put_in_order(tmp_path, 0)
    assert state(tmp_path) == before
    assert put_in_order(tmp_path, None) == StartPoint(attempt=0, step=20, verified=False)


def test_a_checkpoint_of_verls_without_a_rank_of_its_critic_is_passed_over(tmp_path: Path) -> None:
    verl_run(tmp_path, 10, 20, tracker=20)
    for step in (10, 20):
        verls(tmp_path, step, place="critic")
    (tmp_path / "global_step_20/critic/optim_world_size_2_rank_0.pt").unlink()
    with pytest.raises(RunError, match=r"global_step_20.*verl.*left where it is"):
        put_in_order(tmp_path, None)


@pytest.mark.parametrize("resume_step", [None, 20])
def test_an_actor_that_verl_saved_is_not_gone_on_from_without_its_critic(
    tmp_path: Path, resume_step: int | None
) -> None:
    put_in_order(tmp_path, None)
    commit(tmp_path, 10, {"actor/model.pt": "a", "critic/model.pt": "c"})
    verls(tmp_path, 20)
    stage(tmp_path, 20, {"critic/model_world_size_2_rank_0.pt": "half"})
    recovery.clean_staging(tmp_path, 20, 0)
    write_tracker(tmp_path, FULL, 20)  # as verl's trainer does when it has asked both to save
    before = state(tmp_path)
    with pytest.raises(RunError, match=r"global_step_20.* verl"):
        put_in_order(tmp_path, resume_step, ("actor", "critic"))
    assert state(tmp_path) == before
    verls(tmp_path, 20, place="critic")
    assert put_in_order(tmp_path, resume_step, ("actor", "critic")).step == 20


def test_a_checkpoint_of_a_run_of_other_roles_is_gone_on_from_when_it_is_named(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    write_tracker(tmp_path, FULL, 10)
    before = state(tmp_path)
    with pytest.raises(RunError, match=r"global_step_10 has no checkpoint of the role critic, .*; resume_step=10"):
        put_in_order(tmp_path, None, ("actor", "critic"))
    assert state(tmp_path) == before
    assert put_in_order(tmp_path, None, ("actor",)).step == 10
    assert put_in_order(tmp_path, 10, ("actor", "critic")).step == 10


def test_what_verl_did_not_finish_is_set_aside_as_verl_itself_passes_it_over(tmp_path: Path) -> None:
    verl_run(tmp_path, 20, 30, tracker=20)
    assert put_in_order(tmp_path, None).step == 20
    assert [path.name for path in tmp_path.glob("abandoned-*")] == ["abandoned-global_step_30"]


def test_after_verl_our_own_checkpoints_go_on_and_verl_may_go_on_after_them(tmp_path: Path) -> None:
    verl_run(tmp_path, 10, 20, tracker=20)
    put_in_order(tmp_path, None)
    commit(tmp_path, 30)
    write_tracker(tmp_path, FULL, 30)
    assert put_in_order(tmp_path, None) == StartPoint(attempt=1, step=30, verified=True)
    verl_run(tmp_path, 40, tracker=40)
    assert put_in_order(tmp_path, None) == StartPoint(attempt=1, step=40, verified=False)
    assert [info.step for info in catalog.scan(tmp_path)] == [10, 20, 30, 40]
    assert read_tracker(tmp_path, FULL).step == 40


def test_a_damaged_one_of_ours_is_passed_over_for_verls(tmp_path: Path) -> None:
    verl_run(tmp_path, 10, tracker=10)
    commit(tmp_path, 20)
    write_tracker(tmp_path, FULL, 20)
    (tmp_path / "global_step_20/actor/model.pt").write_text("")
    assert put_in_order(tmp_path, None) == StartPoint(attempt=1, step=10, verified=False)


@pytest.mark.parametrize("part", ["model", "optim", "extra_state"])
def test_a_checkpoint_of_verls_that_lacks_a_rank_is_passed_over_but_not_moved(tmp_path: Path, part: str) -> None:
    verl_run(tmp_path, 10, 20, tracker=20)
    (tmp_path / f"global_step_20/actor/{part}_world_size_2_rank_1.pt").unlink()
    before = state(tmp_path)
    with pytest.raises(RunError, match=r"global_step_20.*verl.*left where it is"):
        put_in_order(tmp_path, None)
    assert state(tmp_path) == before


def test_an_earlier_step_is_not_gone_on_from_over_later_ones_of_verl(tmp_path: Path) -> None:
    verl_run(tmp_path, 10, 20, tracker=20)
    before = state(tmp_path)
    for step in (0, 10):
        with pytest.raises(RunError, match=r"global_step_[12]0.*verl.*move it"):
            put_in_order(tmp_path, step)
    assert state(tmp_path) == before
    assert put_in_order(tmp_path, 20) == StartPoint(attempt=0, step=20, verified=False)


@pytest.mark.parametrize("tracker", [None, "not a number"])
def test_where_no_tracker_says_what_verl_finished_the_user_does(tmp_path: Path, tracker: str | None) -> None:
    verl_run(tmp_path, 20, tracker=None)
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    before = state(tmp_path)
    with pytest.raises(RunError, match=r"latest_checkpointed_iteration\.txt.*resume_step=20"):
        put_in_order(tmp_path, None)
    assert state(tmp_path) == before
    assert put_in_order(tmp_path, 20).step == 20


def test_a_start_that_cannot_see_what_was_committed_is_refused(tmp_path: Path) -> None:
    write_tracker(tmp_path, FULL, 20)
    with pytest.raises(RunError, match=r"step 20 was committed.*resume_step=0"):
        put_in_order(tmp_path, None)
    commit(tmp_path, 10)
    with pytest.raises(RunError, match=r"step 20 was committed.*resume_step=N"):
        put_in_order(tmp_path, None)
    commit(tmp_path, 20)
    unreadable(tmp_path / "global_step_20" / "actor/model.pt")
    with pytest.raises(RunError, match=r"global_step_20.*cannot be read now.*resume_step=N"):
        put_in_order(tmp_path, None)
    newer(tmp_path / "global_step_20")
    for step in (None, 10):
        with pytest.raises(RunError, match=r"global_step_20.*newer version"):
            put_in_order(tmp_path, step)
    assert read_tracker(tmp_path, FULL).step == 20
    assert not list(tmp_path.glob("abandoned-*"))


def test_a_user_may_insist_on_an_older_step(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    commit(tmp_path, 20)
    unreadable(tmp_path / "global_step_20" / "manifest.json")
    assert put_in_order(tmp_path, 10) == StartPoint(attempt=1, step=10, verified=True)
    assert [info.step for info in catalog.scan(tmp_path)] == [10]
    with pytest.raises(RunError, match="global_step_20 is not a committed full checkpoint"):
        put_in_order(tmp_path, 20)


@pytest.mark.parametrize("resume_step", [None, 20])
def test_a_step_that_a_crash_left_between_two_places_is_gone_on_from(tmp_path: Path, resume_step: int | None) -> None:
    commit(tmp_path, 10)
    commit(tmp_path, 20, attempt=3)
    (tmp_path / "global_step_20").rename(tmp_path / ".replaced-global_step_20")
    assert put_in_order(tmp_path, resume_step) == StartPoint(attempt=4, step=20, verified=True)
    assert [info.step for info in catalog.scan(tmp_path)] == [10, 20]


@pytest.mark.parametrize("how", ["killed", "failed"])
@pytest.mark.parametrize("trainers", [{}, {"data.pt": "x"}])
def test_the_tracker_that_verls_trainer_writes_before_the_commit_is_no_word_of_ours(
    tmp_path: Path, how: str, trainers: dict[str, str]
) -> None:
    put_in_order(tmp_path, None)
    for step, before in ((2, 0), (4, 2)):
        if before:
            commit(tmp_path, before)
            disk(tmp_path).move_tracker(FULL, before)
        stage(tmp_path, step, {"actor/model.pt": "half"})
        for name, text in trainers.items():
            (tmp_path / f"global_step_{step}").mkdir()
            (tmp_path / f"global_step_{step}" / name).write_text(text)
        write_tracker(tmp_path, FULL, step)
        if how == "failed":
            recovery.clean_staging(tmp_path, step, 0)
        assert put_in_order(tmp_path, None).step == before
        assert read_tracker(tmp_path, FULL).step == (before or None)


def test_what_was_committed_and_is_gone_is_missed_whatever_verls_tracker_says(tmp_path: Path) -> None:
    put_in_order(tmp_path, None)
    for step in (2, 4):
        commit(tmp_path, step)
        disk(tmp_path).move_tracker(FULL, step)
    shutil.rmtree(tmp_path / "global_step_4")
    write_tracker(tmp_path, FULL, 6)
    with pytest.raises(RunError, match=r"step 4 was committed.*resume_step=N"):
        put_in_order(tmp_path, None)
    assert put_in_order(tmp_path, 2).step == 2
    assert put_in_order(tmp_path, None).step == 2


def test_a_first_save_in_verls_own_place_that_was_killed_is_set_aside(tmp_path: Path) -> None:
    put_in_order(tmp_path, None)
    verls(tmp_path, 2)
    assert put_in_order(tmp_path, None).step == 0
    assert [path.name for path in tmp_path.glob("*global_step_2*")] == ["abandoned-global_step_2"]


@pytest.mark.parametrize("finished", [True, False])
def test_a_step_whose_weights_were_committed_before_verl_saved_it_is_verls(tmp_path: Path, finished: bool) -> None:
    put_in_order(tmp_path, None)
    commit(tmp_path, 4)
    disk(tmp_path).move_tracker(FULL, 4)
    commit(tmp_path, 8, {f"actor/model_world_size_2_rank_{rank}.pt": "x" for rank in range(2)}, kind=STATE_DICT)
    verls(tmp_path, 8)
    if finished:
        write_tracker(tmp_path, FULL, 8)
        plan = prune_plan(tmp_path, [KeepLast(1)], now=0.0, keep_state_dicts=0)
        assert [row.step for row in plan] == [4]
    start = put_in_order(tmp_path, None)
    assert (start.step, start.verified) == ((8, False) if finished else (4, True))
    assert (tmp_path / "global_step_8").is_dir() == finished


def test_a_fresh_folder_begins_at_the_start(tmp_path: Path) -> None:
    assert put_in_order(tmp_path / "checkpoints", None) == StartPoint(attempt=0, step=0, verified=True)


def test_a_save_that_fails_gives_the_tracker_back_to_the_newest_that_is_there(tmp_path: Path) -> None:
    """verl's trainer names a step before it is whole."""
    verl_run(tmp_path, 10, tracker=20)
    (tmp_path / "global_step_20").mkdir()
    disk(tmp_path).clean(20)
    assert read_tracker(tmp_path, FULL).step == 10
    commit(tmp_path, 12)
    write_tracker(tmp_path, FULL, 20)
    disk(tmp_path).clean(20)
    assert read_tracker(tmp_path, FULL).step == 12
    disk(tmp_path).clean(14)
    assert read_tracker(tmp_path, FULL).step == 12


def test_a_first_save_that_fails_leaves_no_tracker(tmp_path: Path) -> None:
    write_tracker(tmp_path, FULL, 20)
    disk(tmp_path).clean(20)
    assert read_tracker(tmp_path, FULL).step is None
