"""A program of Trinity-RFT 0.6.0, with its own `Trainer.train` and `Explorer.explore`, on our classes. The control runs
on Trinity-RFT's own.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.trinity.conftest import SCENARIOS
from tests.trinity.steps import STEPS

pytestmark = [pytest.mark.all, pytest.mark.timeout(3600)]

Runs = dict[tuple[str, str], dict[str, Any]]

POLLS = ("notify_no_new_model_state_dict", "explorer_requires_sync")


def calls(run: dict[str, Any], module: str) -> list[Any]:
    """What a module called, and what it was answered; without the questions that it repeats until something happens."""
    found: list[Any] = []
    for call, given, answer in run[module]["calls"]:
        unanswered = answer is None and call == "ready_to_nccl_sync"
        nothing_new = call == "wait_new_model_state_dict" and answer == given[0]
        if call not in POLLS and not unanswered and not nothing_new and found[-1:] != [[call, given, answer]]:
            found.append([call, given, answer])
    return found


def versions(pairs: list[list[Any]]) -> list[list[Any]]:
    """Without what was sent once more, as an explorer that asks twice between two steps gets it."""
    return [pair for number, pair in enumerate(pairs) if pair not in pairs[:number]]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_both_loops_end_as_they_should(runs: Runs, scenario: str) -> None:
    run = runs["ours", scenario]
    assert run["ended"] == ["explorer", "trainer"]
    assert run["trainer"]["calls"][-1] == ["set_trainer_status", ["stopped"], None]
    assert run["explorer"]["calls"][-1] == ["set_explorer_status", ["stopped", "running"], None]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_version_that_is_published_is_loaded_with_its_digest(runs: Runs, scenario: str) -> None:
    run = runs["ours", scenario]
    published = versions(run["trainer"]["published"])
    assert versions(run["explorer"]["loads"]) == published
    assert [step for step, _ in published if step] == list(range(1, STEPS + 1))
    assert len({digest for _, digest in published}) == len(published)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_trinitys_own_classes_give_the_same_calls_and_versions(runs: Runs, scenario: str) -> None:
    ours, control = runs["ours", scenario], runs["trinity", scenario]
    loads, controls = versions(ours["explorer"]["loads"]), versions(control["explorer"]["loads"])
    # Trinity-RFT looks at the tracker once a second, so it may miss the version that its trainer stops after.
    missed = [[version] for version, _ in loads[len(controls) :]]
    assert (loads[: len(controls)], missed in ([], [[STEPS]])) == (controls, True)
    assert not missed or scenario.startswith("checkpoint")
    assert calls(ours, "trainer") == calls(control, "trainer")
    assert [call for call in calls(ours, "explorer") if call[2:] not in missed] == calls(control, "explorer")
