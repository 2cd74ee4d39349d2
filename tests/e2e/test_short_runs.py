"""A run of an adapter, one at its own pace and one that is refused, one after the other in one program: Ray and its
processes start once. Others of their kind are in `test_lora`, `test_free` and `test_agreement`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import test_agreement as agreement
from tests.e2e import test_free as free
from tests.e2e import test_lora as lora
from tests.e2e.runs import SMALL, Run, in_one_program, initial_digest
from trinity_sync.checkpoint.export import export_checkpoint

RUNS = {
    "adapter": lora.SHORT,
    "free": (*free.FREE, "backend=fsdp", "sync=memory", "trainer.steps=12", "checkpoint.interval=5"),
    "refused": (*agreement.SHARP, *agreement.LOST_ROPE),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("short")
    agreement.put_lost_rope(folder)
    ended = in_one_program({folder / name: ["run", *SMALL, *chosen] for name, chosen in RUNS.items()})
    return dict(zip(RUNS, ended, strict=True))


def test_the_adapter_is_the_same_at_trainer_explorer_and_checkpoint(runs: dict[str, Run]) -> None:
    lora.assert_the_same_adapter_everywhere(runs["adapter"])


def test_a_free_run_trains_within_the_bound_and_never_on_a_wrong_label(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["free"]
    free.assert_sound(run, 12)
    assert run.digests[0] == initial_digest(run.folder)
    run.assert_what_is_saved_is_what_was_published(last=12)
    run.assert_timed()
    assert {load["explorer"] for load in run.events("load")} <= {"explorer-0", "explorer-1"}
    assert sorted(run.manifests) == [10, 12]
    assert not run.events("fault")
    assert run.summary["samples"]["dropped"] is not None
    # What was copied for the explorers while the ranks trained on is what was saved.
    exported = export_checkpoint(run.folder / "checkpoints" / "global_step_10", tmp_path / "exported-10")
    assert exported.digest == exported.checked == run.digests[10]


def test_another_function_at_the_explorers_is_refused_with_both_figures(runs: dict[str, Run]) -> None:
    run = runs["refused"]
    assert run.code == 2, run.output
    assert "error: explorer-0 and the trainer do not compute the same of version 0: their log-probs of " in run.output
    assert "where 0.1 on average is allowed (mean log-prob" in run.output
    agreement.assert_refused(run)
