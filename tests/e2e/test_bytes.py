"""A run that only moves bytes: the same digests everywhere, in all modes and on any number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import launch, resume
from tests.models.test_shapes import SMALL
from tests.pages import ROOT
from trinity_sync.checkpoint.export import export_checkpoint


@pytest.mark.all
def test_weights_without_an_engine_are_published_loaded_saved_and_gone_on_with(tmp_path: Path) -> None:
    shapes = tmp_path / "config.json"
    shapes.write_text(json.dumps(SMALL))
    common = ("workload=bytes", f"model.shapes={shapes}", "model.layers=2", "live=off", "trainer.steps=3")
    digests = []
    for number, chosen in enumerate((("sync=memory",), ("sync=nccl", "backend.ranks=3"), ("sync=checkpoint",))):
        run = launch(tmp_path / str(number), *common, *chosen, small=False)
        assert run.code == 0, run.output
        digests.append(run.digests)
        assert {event["digest"] for event in run.events("load")} == set(run.digests.values())
        assert len(set(run.digests.values())) == 4, "each step changes the weights"
        assert run.summary["shapes"]["share"] < 1
        assert "of the whole model" in run.output
    assert digests[1] == digests[2] == digests[0]
    step = tmp_path / "0" / "checkpoints" / "global_step_3"
    export_checkpoint(step, tmp_path / "exported")  # compares with the manifest
    settings = (tmp_path / "0" / ".hydra" / "config.yaml").read_text()
    for changed, key in (("model.layers=1", "model.layers"), ("workload.optimizer=true", "workload.optimizer=false")):
        refused = resume(tmp_path / "0", "trainer.steps=5", changed)
        assert refused.code == 2, refused.output
        assert key in refused.output
        assert (tmp_path / "0" / ".hydra" / "config.yaml").read_text() == settings
    longer = launch(tmp_path / "longer", *common, "trainer.steps=5", small=False)
    resumed = resume(tmp_path / "0", "trainer.steps=5")
    assert resumed.code == 0, resumed.output
    assert resumed.digests == longer.digests


@pytest.mark.all
@pytest.mark.parametrize("output", ["| head -n 1", ">&- 2>&- <&-", ">/dev/full 2>/dev/full"])
def test_a_run_whose_output_is_closed_completes(output: str, tmp_path: Path) -> None:
    shapes = tmp_path / "config.json"
    shapes.write_text(json.dumps(SMALL))
    given = f"workload=bytes model.shapes={shapes} model.layers=2 trainer.steps=2 hydra.run.dir={tmp_path / 'run'}"
    command = f"set -o pipefail; {sys.executable} launch.py {given} {output}"
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.DEVNULL, timeout=300, cwd=ROOT)
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "completed"
