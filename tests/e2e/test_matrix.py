"""Every FSDP backend with every sync mode, ranks and explorers: the same weights have the same digest everywhere."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.e2e.runs import launch
from trinity_sync.checkpoint.export import export_checkpoint

BACKENDS, MODES = ("fsdp", "fsdp2"), ("checkpoint", "memory", "nccl")
GROUPS = ("2-1", "1-3")  # trainer ranks, explorers

# Every pair of two settings occurs at least once.
PAIRWISE = {
    ("fsdp2", "memory", "2-1"),
    ("fsdp2", "checkpoint", "1-3"),
    ("fsdp2", "nccl", "2-1"),
    ("fsdp", "memory", "1-3"),
    ("fsdp", "checkpoint", "2-1"),
    ("fsdp", "nccl", "1-3"),
}

CASES = [
    pytest.param(*case, marks=() if case in PAIRWISE else pytest.mark.all, id="-".join(case))
    for case in [*itertools.product(BACKENDS, MODES, GROUPS), ("fsdp2", "memory", "2-3")]
]


def test_the_pairwise_choice_covers_all_pairs() -> None:
    for first, second in itertools.combinations(range(3), 2):
        options = (BACKENDS, MODES, GROUPS)
        wanted = set(itertools.product(options[first], options[second]))
        assert {(case[first], case[second]) for case in PAIRWISE} == wanted


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
    assert run.code == 0, run.output
    assert run.record["status"] == "completed"
    assert sorted(run.digests) == [0, 1, 2, 3]
    assert run.digests[0] == initial_digest(run.folder)

    loads = run.events("load")
    assert len(loads) == 4 * explorers
    assert all(load["digest"] == run.digests[load["version"]] for load in loads)

    full = {event["step"]: event for event in run.events("commit") if event["kind"] == "full"}
    assert sorted(full) == [2, 3]
    assert {step: run.manifests[step]["digest"] for step in full} == {step: run.digests[step] for step in full}
    assert (run.folder / "checkpoints/latest_checkpointed_iteration.txt").read_text().strip() == "3"
    assert not run.events("fault")

    exported = export_checkpoint(run.folder / "checkpoints" / "global_step_3", tmp_path / "exported")
    assert exported.digest == exported.checked == run.digests[3]


def initial_digest(folder: Path) -> str:
    """Version digest of the safetensors file that the run started from."""
    from safetensors.torch import load_file

    from trinity_sync.weights.tensors import state_digest

    return state_digest(load_file(folder / "model" / "model.safetensors"), "BF16")
