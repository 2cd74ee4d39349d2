"""Every FSDP backend with every sync mode, ranks and explorers: the same weights have the same digest everywhere.

`make test` has whole runs of each mode elsewhere: nccl in `test_short_runs.py`, memory in `test_free.py`, checkpoint in
`test_lora.py`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.e2e.runs import launch

BACKENDS, MODES = ("fsdp", "fsdp2"), ("checkpoint", "memory", "nccl")
GROUPS = ("2-1", "1-2")  # trainer ranks, explorers

LARGER = [("fsdp2", "memory", "2-3"), ("fsdp", "nccl", "1-3")]

CASES = [pytest.param(*case, id="-".join(case)) for case in [*itertools.product(BACKENDS, MODES, GROUPS), *LARGER]]


@pytest.mark.all
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
    run.assert_reproduced()
