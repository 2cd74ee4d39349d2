"""A process that is killed at any point of a commit, a deletion or a resume leaves a folder that can be trusted."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoint.crash_child import SCENARIOS
from tests.checkpoint.helpers import names
from trinity_sync.checkpoint.folder import catalog, recovery, resume_point
from trinity_sync.checkpoint.folder.contents import ABANDONED_PREFIX, read_manifest, read_tracker, step_dir
from trinity_sync.protocol.parts import FULL, STATE_DICT

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """What each scenario left behind, one folder per point of death."""
    found = {}
    for scenario in SCENARIOS:
        base = tmp_path_factory.mktemp(scenario)
        command = [sys.executable, "-m", "tests.checkpoint.crash_child", str(base), scenario]
        subprocess.run(command, cwd=REPO, check=True, timeout=120)
        found[scenario] = sorted(base.iterdir(), key=lambda path: int(path.name))
        assert len(found[scenario]) > 10, "too few system calls were seen; the test would prove nothing"
    return found


def committed(root: Path) -> dict[int, str]:
    infos = [info for info in catalog.scan(root) if info.manifest is not None]
    for info in infos:
        report = catalog.verify(info.path)
        assert report.ok, report.problems
    return {info.step: str(info.kind) for info in infos}


def tracked(root: Path) -> dict[str, int | None]:
    found = {}
    for kind in (FULL, STATE_DICT):
        tracker = read_tracker(root, kind)
        assert tracker.problem is None
        found[kind] = tracker.step
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_whatever_is_listed_verifies_and_trackers_name_it(deaths: dict[str, list[Path]], scenario: str) -> None:
    for root in deaths[scenario]:
        if scenario.endswith("_by_renames"):
            recovery.recover(root)  # without an exchange there is an instant between two renames
        steps = committed(root)
        named = tracked(root)
        assert named[FULL] in steps, root.name
        assert steps[named[FULL]] == FULL
        assert named[STATE_DICT] in steps


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_there_is_always_a_checkpoint_to_resume_from(deaths: dict[str, list[Path]], scenario: str) -> None:
    for root in deaths[scenario]:
        recovery.recover(root)
        found = catalog.newest_good(root)
        assert found is not None, root.name


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_left_behind_after_tidying_up(deaths: dict[str, list[Path]], scenario: str) -> None:
    for root in deaths[scenario]:
        recovery.recover(root, clock=lambda: time.time() + 60.0)  # a claim of one that died ends by itself
        odd = {path.parts[0] for path in map(Path, names(root)) if path.parts[0].startswith(".")}
        assert odd <= {".pruned"}, root.name


@pytest.mark.parametrize("scenario", ["first", "upgrade", "upgrade_by_renames", "partial", "in_place"])
def test_the_one_that_was_not_killed_committed_and_pruned(deaths: dict[str, list[Path]], scenario: str) -> None:
    last = deaths[scenario][-1]
    assert committed(last) == {20: FULL}
    assert tracked(last) == {FULL: 20, STATE_DICT: 20}


@pytest.mark.parametrize("scenario", ["upgrade", "upgrade_by_renames"])
def test_weights_that_were_committed_are_never_lost_on_the_way_to_full(
    deaths: dict[str, list[Path]], scenario: str
) -> None:
    for root in deaths[scenario]:
        recovery.recover(root)
        assert 20 in committed(root), root.name


@pytest.mark.parametrize("scenario", ["replace", "replace_by_renames", "beside"])
def test_what_was_full_stays_full_whoever_commits_the_step_again(deaths: dict[str, list[Path]], scenario: str) -> None:
    for root in deaths[scenario]:
        recovery.recover(root)
        assert committed(root)[20] == FULL, root.name
        if scenario == "beside":
            assert read_manifest(step_dir(root, 20)).attempt == 0
    assert read_manifest(step_dir(deaths["replace"][-1], 20)).attempt == 1


def test_a_resume_that_was_killed_can_be_done_again(deaths: dict[str, list[Path]]) -> None:
    for root in deaths["resume"]:
        resume_point.set_start(root, 10, 1)
        assert committed(root) == {10: FULL}
        assert tracked(root) == {FULL: 10, STATE_DICT: 10}
        assert len(list(root.glob(f"{ABANDONED_PREFIX}*"))) == 2
