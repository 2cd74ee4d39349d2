"""Programs that use a place of another run: each is refused, and the oracle finds it where one is not."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT
from tests.kills import checks, plan
from tests.kills.places import Places
from tests.kills.plan import BETWEEN_LIVES, Setup, draw_plan
from tests.kills.processes import own_mark
from tests.kills.running import SMALL, Launch
from tests.kills.sharing import Stranger, Visits
from trinity_sync.tracking import json_lines

LIMIT_S = 400.0


@dataclass
class Scene:
    """A run that has ended, and another one."""

    places: Places
    setup: Setup
    stranger: Stranger


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    home = Path(tempfile.mkdtemp(prefix="kills-", dir="/tmp"))  # pytest's own folder is closed to other users
    home.chmod(0o755)
    drawn = next(one.setup for chain in range(99) if (one := draw_plan(0, chain)).setup.name == "fsdp-memory-lockstep")
    setup = replace(drawn, mirrored=True, by_environment=True, ranks=1, nohup=False, retention="keep_last")
    places = Places.make(home / "chain", small_disk=False)
    stop = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(home / "state"))
        stranger = Stranger.make(home / "stranger", stop)
        overrides = [*SMALL, *setup.overrides(), *places.overrides(mirrored=True, by_environment=True)]
        with Launch(
            [str(ROOT / "launch.py"), *overrides, "trainer.steps=4"],
            mark=own_mark("scene"),
            output=places.home / "output.txt",
            run=places.run,
            checkpoints=places.checkpoints,
            stop=stop,
            environment=places.environment(),
        ) as launch:
            assert launch.wait_end(LIMIT_S)
            assert launch.code == 0, launch.text
        yield Scene(places, setup, stranger)
    places.close(remove=False)
    shutil.rmtree(home)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import sys; print('error: /place belongs to another run'); sys.exit(2)", None),
        ("import sys; print('error: no'); sys.exit(2)", "the refusal does not name /place"),
        ("import sys; print('no'); sys.exit(2)", "the refusal does not name /place"),
        ("print('error: /place belongs to another run')", "of another run: the visitor ended with 0"),
        ("print('sending the first version', flush=True); input()", "of another run: the visitor ended"),
        (
            "import time; print('sending the first version', flush=True); time.sleep(600)",
            "of another run: the visitor was not refused",
        ),
    ],
)
def test_a_visitor_that_is_not_refused_is_a_problem(tmp_path: Path, script: str, told: str | None) -> None:
    setup = replace(draw_plan(0, 0).setup, by_environment=False)
    places = Places(tmp_path, tmp_path, tmp_path, tmp_path, tmp_path, small_disk=False)
    visits = Visits(places, setup, Stranger(tmp_path, frozenset()), [], threading.Event())
    problems = visits.refused(tmp_path, ["-c", script], "/place")
    assert [told] == [problem[: len(told)] for problem in problems] if told else not problems


def test_a_run_is_not_visited_at_a_place_that_it_lacks() -> None:
    setup = replace(draw_plan(0, 0).setup, mirrored=False, by_environment=False)
    places = Places(Path(), Path(), Path(), Path(), Path(), small_disk=False)
    visits = Visits(places, setup, Stranger(Path(), frozenset()), [], threading.Event())
    assert {visits.possible(name) for name in (plan.MIRROR, plan.FOREIGN_MIRROR)} == {plan.CHECKPOINTS}
    assert visits.possible(plan.ENVIRONMENT) == plan.EDITED
    assert visits.possible(plan.SWEEP) == plan.SWEEP


@pytest.fixture
def visits(scene: Scene) -> Visits:
    shutil.rmtree(scene.places.home / "elsewhere", ignore_errors=True)
    for left in scene.places.home.glob("visit-*"):
        shutil.rmtree(left)
    return Visits(scene.places, scene.setup, scene.stranger, [], threading.Event())


@pytest.mark.all
@pytest.mark.parametrize("draw", [0.1, 0.6, 0.9])
@pytest.mark.parametrize("name", sorted(set(BETWEEN_LIVES)))
def test_a_program_that_uses_a_place_of_a_run_is_refused(visits: Visits, name: str, draw: float) -> None:
    assert visits.possible(name) == name, "needs root"
    problems = visits.visit(name, draw)
    print(visits.said)
    assert problems == []
    assert visits.said or name in (plan.ENVIRONMENT, plan.AT_ONCE)


@pytest.mark.all
def test_each_place_of_a_run_has_bytes_of_that_run_only(scene: Scene) -> None:
    published = {
        (event["attempt"], event["version"]): event["digest"]
        for event in json_lines.read(scene.places.run / "events.jsonl")
        if event["event"] == "publish"
    }
    places = (scene.places.checkpoints, scene.places.mirror)
    owner = checks.Owner(scene.stranger.digests)
    assert list(owner.look(scene.places.run, places, published)) == []
    assert list(checks.mirror_problems(scene.places.mirror)) == []
