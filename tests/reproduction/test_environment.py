"""What differs between the places of two attempts is told by name; what an old record does not have is passed over."""

from __future__ import annotations

from trinity_sync.reproduction.outcome import differences
from trinity_sync.tracking.run_record import RunJson

HERE: RunJson = {
    "packages": {"python": "3.11.2", "torch": "2.9.0"},
    "git": {"commit": "0123456789abcdef", "dirty": False},
    "threads": 1,
    "hardware": {"machine": "x86_64", "cpu": "Model A", "vectors": "avx2"},
}


def told(old: RunJson, new: RunJson) -> list[str]:
    return [str(one) for one in differences(old, new)]


def test_the_same_place_does_not_differ() -> None:
    assert told(HERE, HERE) == []


def test_each_difference_is_told() -> None:
    there: RunJson = {
        "packages": {"python": "3.11.2", "torch": "2.8.0", "vllm": "0.11"},
        "git": {"commit": "fedcba9876543210", "dirty": True},
        "threads": 2,
        "hardware": {"machine": "x86_64", "cpu": "Model B", "vectors": "avx2", "gpus": "1 x H"},
    }
    assert told(there, HERE) == [
        "torch: 2.8.0 -> 2.9.0",
        "vllm: 0.11 -> none",
        "git: fedcba987654 with changes -> 0123456789ab",
        "threads: 2 -> 1",
        "cpu: Model B -> Model A",
        "gpus: 1 x H -> none",
    ]


def test_a_record_without_hardware_or_threads_is_not_compared_in_them() -> None:
    old: RunJson = {"packages": HERE["packages"], "git": HERE["git"], "threads": None}
    assert told(old, HERE) == []


def test_changes_that_were_not_committed_may_be_others_today() -> None:
    dirty: RunJson = {"git": {"commit": "0123456789abcdef", "dirty": True}}
    assert told(dirty, dirty) == ["git: 0123456789ab with changes -> 0123456789ab with changes"]


def test_a_run_outside_of_a_repository_differs_from_one_inside() -> None:
    assert told({"git": None}, HERE) == ["git: none -> 0123456789ab"]
    assert told({"git": None}, {"git": None}) == []
