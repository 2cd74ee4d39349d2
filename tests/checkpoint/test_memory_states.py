"""The states of a run in memory, between two attempts and between two programs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.helpers import commit
from trinity_sync.checkpoint import memory_states as module
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.owner import Owner, write_mark
from trinity_sync.checkpoint.memory_states import MemoryStates, memory_states
from trinity_sync.config import Config, compose, typed
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.weights.slots import remove_stale


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    (tmp_path / "shm").mkdir()
    return typed(compose(["checkpoint.memory_interval=1", f"sync.shm_dir={tmp_path / 'shm'}"]))


def owner(tmp_path: Path) -> Owner:
    return Owner.new("of-this-run", tmp_path / "run")


@contextlib.contextmanager
def program(cfg: Config, tmp_path: Path) -> Iterator[MemoryStates]:
    """The states as a program of the run has them."""
    with memory_states(cfg, tmp_path / "run") as states:
        assert states is not None
        states.owner = owner(tmp_path)
        yield states


@pytest.fixture
def states(cfg: Config, tmp_path: Path) -> Iterator[MemoryStates]:
    """Those of an attempt that has ended, of a program that goes on."""
    with program(cfg, tmp_path) as states:
        with states.attempt(0):
            pass
        yield states


def newest(checkpoints: Path) -> catalog.CheckpointInfo | None:
    return catalog.newest_good(checkpoints)


def newest_step(checkpoints: Path) -> int:
    found = newest(checkpoints)
    return 0 if found is None else found.step


def test_the_newest_state_becomes_a_checkpoint(states: MemoryStates, checkpoints: Path) -> None:
    commit(checkpoints, 4)
    for step in (5, 6):
        commit(states.root, step)
    assert states.bring(checkpoints, newest(checkpoints)) == 6
    found = newest(checkpoints)
    assert found is not None
    assert (found.step, (found.path / "actor/model.pt").read_text()) == (6, "weights 6")


def test_a_state_that_is_older_than_the_checkpoint_stays_where_it_is(states: MemoryStates, checkpoints: Path) -> None:
    commit(states.root, 6)
    commit(checkpoints, 8)
    assert states.bring(checkpoints, newest(checkpoints)) is None
    assert newest_step(checkpoints) == 8


@pytest.mark.parametrize(
    ("harm", "told"),
    [("flipped", "the states in memory: "), ("gone", "the states in memory: "), ("foreign", "of-another-run")],
)
def test_a_state_that_is_not_sound_leaves_the_run_to_its_checkpoint(
    states: MemoryStates, checkpoints: Path, capsys: pytest.CaptureFixture[str], harm: str, told: str
) -> None:
    commit(checkpoints, 4)
    commit(states.root, 6)
    file = states.root / "global_step_6/actor/model.pt"
    if harm == "flipped":
        file.write_text("weights 7")
    elif harm == "gone":
        file.unlink()
    else:
        write_mark(states.root, Owner.new("of-another-run", states.root.parent / "other"))
    assert states.bring(checkpoints, newest(checkpoints)) is None
    assert newest_step(checkpoints) == 4
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("before", [None, 4])
def test_a_sound_state_that_cannot_be_copied_now_is_an_error_and_stays(
    states: MemoryStates, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, before: int | None
) -> None:
    if before is not None:
        commit(checkpoints, before)
    commit(states.root, 6)
    with monkeypatch.context() as patched:
        patched.setattr(module.RunMirror, "fetch_newer", refused)
        with pytest.raises(RunError, match=r"the state of step 6 is in memory and cannot be copied to .*No space left"):
            states.bring(checkpoints, newest(checkpoints))
        states.rescue(checkpoints)
    assert states.bring(checkpoints, newest(checkpoints)) == 6


def refused(*_: object) -> int | None:
    raise RunError("global_step_6: No space left on device")


def test_an_attempt_begins_without_states_and_the_next_finds_its_own(
    cfg: Config, states: MemoryStates, checkpoints: Path
) -> None:
    commit(states.root, 6)
    with states.attempt(1):
        assert catalog.scan(states.root) == []
        commit(states.root, 3)
    assert states.bring(checkpoints, None) == 3


def test_a_state_outlives_an_attempt_after_which_none_can_begin(
    cfg: Config, tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, program(cfg, tmp_path) as states:
        with contextlib.suppress(RunError), states.attempt(0):
            commit(states.root, 6)
            raise RunError("a rank died")
        patched.setattr(module.RunMirror, "fetch_newer", refused)
        with pytest.raises(RunError):
            states.bring(checkpoints, None)
    with program(cfg, tmp_path) as states:
        assert states.bring(checkpoints, None) == 6


def test_a_state_of_an_attempt_after_which_the_run_went_on_elsewhere_is_not_used(
    states: MemoryStates, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(checkpoints, 4)
    commit(states.root, 6)
    states.is_recorded = lambda step, attempt: step < 6
    assert states.bring(checkpoints, newest(checkpoints)) is None
    assert "the state of step 6 in memory is not used: the run went on without it" in capsys.readouterr().err


def test_the_folder_goes_with_a_program_that_ends(cfg: Config, tmp_path: Path) -> None:
    with program(cfg, tmp_path) as states, states.attempt(0):
        commit(states.root, 6)
    assert list(Path(cfg.sync.shm_dir).iterdir()) == []


def test_a_program_whose_start_is_refused_leaves_the_states_of_the_one_before(
    cfg: Config, tmp_path: Path, checkpoints: Path
) -> None:
    kill_program(cfg, tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError), program(cfg, tmp_path):
            raise ConfigError("checkpoints/ cannot be read")
    with program(cfg, tmp_path) as states:
        assert not states.begun
        assert states.bring(checkpoints, None) == 6


def test_a_run_that_ends_by_an_error_has_its_newest_state_as_a_checkpoint(
    states: MemoryStates, checkpoints: Path
) -> None:
    commit(states.root, 6)
    states.rescue(checkpoints)
    assert newest_step(checkpoints) == 6


def test_nothing_is_left_of_a_run_that_ends_by_an_error(cfg: Config, tmp_path: Path, checkpoints: Path) -> None:
    with contextlib.suppress(RunError), program(cfg, tmp_path) as states, states.attempt(0):
        commit(states.root, 6)
        states.rescue(checkpoints)
        raise RunError("the reward function failed")
    assert list(Path(cfg.sync.shm_dir).iterdir()) == []


@pytest.mark.parametrize("begun", [True, False])
def test_a_program_that_is_stopped_between_two_attempts_discards_its_own_states_alone(
    cfg: Config, tmp_path: Path, checkpoints: Path, begun: bool
) -> None:
    kill_program(cfg, tmp_path)
    with program(cfg, tmp_path) as states:
        if begun:
            with contextlib.suppress(RunError), states.attempt(1):
                commit(states.root, 8)
                raise RunError("a rank died")
        states.discard()
    with program(cfg, tmp_path) as states:
        assert states.bring(checkpoints, None) == (None if begun else 6)


def test_the_states_of_a_live_program_are_refused_to_another(cfg: Config, tmp_path: Path) -> None:
    in_use = r"^checkpoint\.memory_interval: .* in use by a live process"
    with program(cfg, tmp_path), pytest.raises(ConfigError, match=in_use), program(cfg, tmp_path):
        pass


def test_without_shared_memory_a_run_keeps_no_states_and_says_so(
    cfg: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shm").rmdir()
    with memory_states(cfg, tmp_path / "run") as states:
        assert states is None
    assert "no state is kept in memory (checkpoint.memory_interval): " in capsys.readouterr().err


def kill_program(cfg: Config, tmp_path: Path) -> None:
    """Kill a program that has the state of step 6 in memory."""
    child = os.fork()
    if child == 0:
        with program(cfg, tmp_path) as states, states.attempt(0):
            commit(states.root, 6)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_states_of_a_killed_program_are_spared_for_an_hour(
    cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_program(cfg, tmp_path)
    assert remove_stale(cfg.sync.shm_dir) == []
    with monkeypatch.context() as patched:
        patched.setattr("trinity_sync.weights.slots.time", Later())
        assert len(remove_stale(cfg.sync.shm_dir)) == 1
    kill_program(cfg, tmp_path)
    assert remove_stale(cfg.sync.shm_dir) == [], "the hour of an earlier one is over"
    assert len(remove_stale(cfg.sync.shm_dir, spared_s=0)) == 1


class Later:
    """A clock that is an hour ahead."""

    @staticmethod
    def time() -> float:
        return time.time() + 3700
