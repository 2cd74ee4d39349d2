"""The benchmarks run, small: what they call is the program's, and would fail in silence otherwise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.figures import models

pytestmark = pytest.mark.all

ROOT = Path(__file__).parents[1]


def run(tmp_path: Path, name: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{") :])


def test_every_way_of_sync_is_measured(tmp_path: Path) -> None:
    found = run(tmp_path, "sync.py", "--params", "2e6", "--model", "qwen3-0.6b", "--rounds", "1", "--syncs", "10")
    assert {"model", "small tensors", "control plane"} <= found["results"].keys()
    ways = {"memory/total_s", "checkpoint/total_s", "nccl/total_s", "fleet/four/total_s"}
    assert ways <= found["results"]["model"].keys()


def test_what_grows_with_a_run_is_measured(tmp_path: Path) -> None:
    found = run(tmp_path, "long_run.py", "--steps", "50", "--kept", "5", "--ranks", "2")
    assert found["record"]["report_s"] > 0
    assert found["checkpoints of 2 ranks"]["retention_s"] > 0


def test_checkpoints_are_measured_beside_others(tmp_path: Path) -> None:
    found = run(tmp_path, "checkpoint.py", "--params", "8e6", "--backends", "fsdp2", "--rounds", "1")
    assert {"lazy/committed_s", "verl/blocked_s", "dcp_process/total_s"} <= found["results"]["fsdp2"].keys()


def test_a_write_is_measured_with_a_crc_and_without(tmp_path: Path) -> None:
    found = run(tmp_path, "checkpoint_crc.py", "--megabytes", "16", "--rounds", "1")
    assert {f"{way}/write_s" for way in ("without", "with", "beside")} <= found["results"].keys()
    assert found["cost"]["with/processor_s"] > 0


def test_deltas_are_measured_beside_other_codes_and_bounds(tmp_path: Path) -> None:
    found = run(tmp_path, "delta.py", "--elements", "1e5", "--only", "size", "speed", "rows")
    assert {(one["data"], one["steps"]) for one in found["size"]} == {
        (data, n) for data in ("white", "adam") for n in (1, 4, 16)
    }
    for one in found["size"]:
        assert one["bytes per change"]["bound given the exponent"] < one["bytes per change"]["class_gap"]
    assert {"gap8z decode", "class_gap apply", "copy"} <= found["speed"][0]["copies"].keys()
    assert all(one["ns"]["xxhash"] > 0 for one in found["rows"])


def test_a_history_is_measured_by_its_bytes_and_the_time_of_a_restore(tmp_path: Path) -> None:
    found = run(tmp_path, "delta.py", "--only", "history", "--elements", "2e4", "--shares", "0.0013")["history"]
    assert [one["codec"] for one in found] == ["class_gap", "gap8z"]
    assert all(one["bytes"] > 1 and one["bytes of 1,000"] > 2 and one["restores"] > 0 for one in found)


def test_starts_are_measured_with_forks_and_without(tmp_path: Path) -> None:
    found = run(tmp_path, "start.py", "--rounds", "1")["results"]
    assert found.keys() == {"forks", "no forks"}
    assert all(value > 0 for way in found.values() for value in way.values())


def test_steps_of_training_are_measured_padded_and_packed(tmp_path: Path) -> None:
    found = run(tmp_path, "training.py", "--rounds", "1")
    assert {name.partition("/")[0] for name in found["results"]} == {"default", "mixed", "alike"}
    assert all(value > 0 for value in found["results"].values())


def test_tensors_and_adapters_of_real_shapes_are_measured_and_held_against_their_aims(tmp_path: Path) -> None:
    found = run(tmp_path, "models.py", "--only", "tensors", "lora", "--output", str(tmp_path / "models.json"))
    assert found == json.loads((tmp_path / "models.json").read_text())
    assert found["tensors"]["tensors"] == 18_867
    assert [point["curve"] for point in found["curves"]] == ["lora"]
    assert len(found["aims"]) == 5
    assert all(aim["holds"] == (aim["value"] <= aim["aim"]) for aim in found["aims"])
    assert found["aims"][0]["holds"], "an adapter is a fiftieth of the model"
    models.draw(found)


def test_explorers_with_faults_are_farther_from_the_trainer_than_healthy_ones(tmp_path: Path) -> None:
    asked = ("--families", "qwen3", "--dtypes", "fp32", "--length", "8")
    found = run(tmp_path, "agreement.py", *asked)["results"]
    healthy = found["qwen3-sharp/fp32/hf"]["mean"]
    assert 0 < healthy < 1e-5
    for fault in ("rope_base", "wrong_class", "dropout"):
        assert found[f"qwen3-sharp/fp32/{fault}"]["mean"] > 100 * healthy


def test_a_node_that_dies_between_nodes_with_slow_links_is_left_out_and_comes_back(tmp_path: Path) -> None:
    """Four namespaces of this machine. The owner compares the digests of what each node has with its own."""
    for needed in ("unshare", "ip", "tc"):
        if shutil.which(needed) is None:
            pytest.skip(f"there is no {needed} to limit links with")
    if subprocess.run(["unshare", "-m", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make network namespaces")
    four = ("--nodes", "4", "--mbit", "200")
    [found] = run(tmp_path, "nodes.py", *four, "--pieces", "32", "--versions", "6", "--kill", "3")["runs"]
    took_it = found["took_it"]
    assert (took_it[:2], min(took_it), took_it[-1]) == ([3, 3], 2, 3)
    assert found["s"] > found["bytes"] * 8 / 200e6, "the links are limited"


def test_a_death_and_the_journal_are_measured(tmp_path: Path) -> None:
    found = run(tmp_path, "heal.py", "--rounds", "1", "--victims", "trainer-rank-0")
    assert found["medians"]["trainer-rank-0"]["same"] == 1
    assert found["medians"]["trainer-rank-0"]["total_s"] > 0
    assert found["journal/checkpoint"] > 0
