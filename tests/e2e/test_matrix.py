"""Every FSDP backend with every sync mode, ranks and explorers: the same weights have the same digest everywhere."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.e2e.runs import launch

BACKENDS, MODES = ("fsdp", "fsdp2"), ("checkpoint", "memory", "nccl")
GROUPS = ("2-1", "1-2")  # trainer ranks, explorers

# Every pair of two settings occurs at least once.
PAIRWISE = {
    ("fsdp", "checkpoint", "2-1"),
}
# Runs that other tests start anyway, of which they assert the same.
ELSEWHERE = {
    ("fsdp2", "memory", "2-1"),  # test_resume.py, the uninterrupted run
    ("fsdp", "memory", "1-2"),  # test_free.py, the first run
    ("fsdp2", "checkpoint", "1-2"),  # test_reference.py
    ("fsdp", "nccl", "1-2"),  # test_rollout_correction.py
    ("fsdp2", "nccl", "2-1"),  # test_vllm.py, with another engine in the explorer
}
LARGER = [("fsdp2", "memory", "2-3"), ("fsdp", "nccl", "1-3")]

CASES = [
    pytest.param(*case, marks=() if case in PAIRWISE else pytest.mark.all, id="-".join(case))
    for case in [*itertools.product(BACKENDS, MODES, GROUPS), *LARGER]
]


def test_the_pairwise_choice_covers_all_pairs() -> None:
    for first, second in itertools.combinations(range(3), 2):
        options = (BACKENDS, MODES, GROUPS)
        wanted = set(itertools.product(options[first], options[second]))
        assert {(case[first], case[second]) for case in PAIRWISE | ELSEWHERE} == wanted


@pytest.mark.parametrize(("backend", "mode", "groups"), CASES)
def test_a_run_completes_with_equal_digests_at_trainer_explorer_and_checkpoint(
    tmp_path: Path, backend: str, mode: str, groups: str
) -> None:
    ranks, explorers = map(int, groups.split("-"))
    run = launch(
        tmp_path / "run",
        f"backend={backend}",
        f"sync={mode}",
        f"backend.ranks={ranks}",
        f"explorer.replicas={explorers}",
    )
    run.assert_the_same_weights_everywhere([0, 1, 2, 3], [2, 3], explorers)
    assert {2, 3} <= run.manifests.keys()
    if (backend, mode, groups) not in PAIRWISE:
        run.assert_reproduced()
