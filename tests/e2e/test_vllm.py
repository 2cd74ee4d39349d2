"""`explorer=vllm` as a user runs it: every backend with every sync mode, a model over two processes, and deaths."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.e2e.runs import launch

BACKENDS, MODES, PROCESSES = ("fsdp2", "megatron"), ("checkpoint", "memory", "nccl"), (1, 2)
PAIRWISE = {("fsdp2", "nccl", 2)}
"""The others: test_resume.py and the rest of this file, and `tests/vllm`, which give the same engine versions."""

CASES = [
    pytest.param(*case, marks=() if case in PAIRWISE else pytest.mark.all, id="-".join(map(str, case)))
    for case in itertools.product(BACKENDS, MODES, PROCESSES)
]


@pytest.mark.parametrize(("backend", "mode", "processes"), CASES)
def test_a_run_completes_with_equal_digests_at_trainer_explorer_and_checkpoint(
    tmp_path: Path, backend: str, mode: str, processes: int
) -> None:
    run = launch(
        tmp_path / "run",
        f"backend={backend}",
        f"sync={mode}",
        "explorer=vllm",
        "explorer.eager=true",
        f"explorer.tp={processes}",
    )
    run.assert_the_same_weights_everywhere([0, 1, 2, 3], [2, 3], 1)
