"""Metrics by verl's names, for trackers that ask for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trinity_sync import config
from trinity_sync.errors import ConfigError
from trinity_sync.tracking import trackers
from trinity_sync.tracking.tracker_feed import Trackers
from trinity_sync.tracking.trackers import OF_VERL, TrackedRun, build_trackers, named

STEP = {"loss": 0.5, "lr": 1e-3, "reward/mean": 0.25, "actor/ppo_kl": 0.0, "timing/generate": 2.0, "timing/load": 3.0}
VALIDATED = {"val/prompts": 3.0, "val/samples": 12.0, "val/failed": 0.0, "val/reward/mean": 0.5, "val/truncated": 0.0}


def test_our_names_stay_as_they_are() -> None:
    assert named("ours", 3, STEP) == STEP


def test_what_verl_measures_has_its_name_and_the_rest_keeps_its_own() -> None:
    assert named("verl", 3, STEP) == {
        "training/global_step": 3.0,
        "loss": 0.5,
        "actor/lr": 1e-3,
        "critic/score/mean": 0.25,
        "critic/rewards/mean": 0.25,
        "actor/ppo_kl": 0.0,
        "timing_s/gen": 2.0,
        "timing_s/load": 3.0,
    }


def test_a_validation_is_named_by_the_samples_of_a_prompt_and_what_is_right_is_its_core() -> None:
    found = named("verl", 3, VALIDATED)
    assert found["val-core/unknown/reward/mean@4"] == 0.5
    assert found["val/truncated"] == 0.0
    found = named("verl", 3, VALIDATED | {"val/exact": 0.75})
    assert (found["val-core/unknown/acc/mean@4"], found["val-aux/unknown/reward/mean@4"]) == (0.75, 0.5)
    assert not found.keys() & {"val/reward/mean", "val/exact"}


def test_verl_has_these_names() -> None:
    spec = find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    files = [*(folder / "trainer").rglob("*.py"), *(folder / "workers").rglob("*.py")]
    text = "\n".join(file.read_text() for file in files)
    for name in {name for names in OF_VERL.values() for name in names}:
        group, _, rest = name.partition("/")
        known = rest if group in ("timing_s", "actor") else name
        assert re.search(rf"[\"'/]{re.escape(known)}[\"']", text), name


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self, **options: object) -> None:
        self.options, self.lines = options, []

    def start(self, run: TrackedRun) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.lines.append(values)

    def close(self) -> None:
        pass


def test_each_tracker_gets_the_names_that_it_asks_for(tmp_path: Path) -> None:
    target = {"_target_": f"{__name__}.Kept"}
    given = {"one": target, "two": target | {"names": "verl", "more": 1}, "three": target | {"names": "ours"}}
    built: list[Any] = build_trackers(given)
    assert [tracker.options for tracker in built] == [{}, {"more": 1}, {}]
    fed = Trackers(built, TrackedRun(folder=tmp_path, name="copy"))
    fed.log(3, STEP)
    fed.close("completed")
    assert [tracker.lines for tracker in built] == [[STEP], [named("verl", 3, STEP)], [STEP]]


@pytest.mark.parametrize("tracker", trackers._KNOWN)
def test_every_option_of_a_tracker_has_the_key(tracker: str) -> None:
    cfg = config.compose([f"tracker=[{tracker}]"])
    assert cfg.tracker[tracker].names == "ours"
    wrong = config.compose([f"tracker=[{tracker}]", f"tracker.{tracker}.names=theirs"])
    with pytest.raises(ConfigError, match=rf"^tracker\.{tracker}\.names is theirs; must be one of ours, verl"):
        config.check(wrong)


def test_another_name_is_refused_of_a_tracker_of_ones_own_too() -> None:
    with pytest.raises(ConfigError, match=r"^tracker\.mine\.names is theirs; must be one of ours, verl$"):
        build_trackers({"mine": {"_target_": f"{__name__}.Kept", "names": "theirs"}})


def test_a_reward_keeps_its_name_where_a_response_could_not_be_judged() -> None:
    told = VALIDATED | {"val/exact": 0.5, "val/failed": 3.0}
    assert {"val-aux/unknown/reward/mean@4", "val-core/unknown/acc/mean@4"} <= set(named("verl", 8, told))
    nobody = VALIDATED | {"val/failed": 12.0}
    assert "val/reward/mean" in named("verl", 8, nobody)
