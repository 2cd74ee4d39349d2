"""The functions over verl's engines, and the example of the guide."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.integrations.real_engines.ranks import LIMIT, WORLD, every, merged, outcomes
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.contents import read_manifest, step_dir
from trinity_sync.integrations.verl.program_run import VerlRun
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.sync.stream import join_group, receive
from trinity_sync.weights.tensors import state_digest

BOTH = pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("fsdp", marks=pytest.mark.all)])
GUIDE = Path(__file__).parents[3] / "docs" / "verl-reference.md"


def version_of(tensors: dict[str, Any], strategy: str) -> str:
    """Of what verl exports, which has tied tensors twice."""
    if strategy == "fsdp":
        tensors.pop("lm_head.weight")
    return state_digest(tensors, "BF16")


@BOTH
def test_sharded_weights_are_committed_as_the_trainer_registered_them(
    ranks: list[Any], run: VerlRun, root: Path, step: int, strategy: str
) -> None:
    path = str(step_dir(root, step) / "actor")
    every(ranks, "save_weights", strategy, None, step, run.monitor)
    every(ranks, "save_weights", strategy, path, step, run.monitor)
    coordinator = CheckpointCoordinator(run.monitor, timeout_s=LIMIT)
    asyncio.run(coordinator.register_and_monitor(step, True, state_dict_thread_count=WORLD))
    ray.get(run.monitor.wait_committed.remote(step, None, LIMIT), timeout=LIMIT)
    folder = step_dir(root, step)
    assert read_manifest(folder).kind == STATE_DICT
    assert catalog.verify(folder).ok
    names = {file.relative_to(folder / "actor").as_posix() for file in (folder / "actor").rglob("*") if file.is_file()}
    assert {
        "model_world_size_2_rank_0.pt",
        "model_world_size_2_rank_1.pt",
        "fsdp_config.json",
        "huggingface/config.json",
        "huggingface/tokenizer.json",
    } <= names
    if strategy == "fsdp2":
        assert state_digest(merged(folder / "actor"), "BF16") == every(ranks, "digest", strategy)[0]


@pytest.mark.parametrize("first", [0, 1])
def test_the_shards_of_all_ranks_are_committed_though_the_trainer_registers_one_part(
    ranks: list[Any], run: VerlRun, root: Path, step: int, first: int
) -> None:
    coordinator = CheckpointCoordinator(run.monitor, timeout_s=LIMIT)
    asyncio.run(coordinator.register_and_monitor(step, True, state_dict_thread_count=1))
    folder = step_dir(root, step)
    saving = ranks if first == 0 else ranks[::-1]
    ray.get([rank.save_weights.remote("fsdp2", str(folder / "actor"), step, run.monitor) for rank in saving])
    ray.get(run.monitor.wait_committed.remote(step, None, LIMIT), timeout=LIMIT)
    assert catalog.verify(folder).ok
    shards = {entry.path for entry in read_manifest(folder).files if "rank" in entry.path}
    assert shards == {f"actor/model_world_size_{WORLD}_rank_{rank}.pt" for rank in range(WORLD)}


@BOTH
def test_the_full_weights_reach_the_synchronizer_in_wire_dtype(
    ranks: list[Any], run: VerlRun, step: int, strategy: str
) -> None:
    before = run.synchronizer.get_latest_model_version()
    every(ranks, "function", "fsdp_upload_state_dict", strategy, run.synchronizer, 0)
    assert run.synchronizer.get_latest_model_version() == before
    every(ranks, "train", strategy, 7)
    every(ranks, "function", "fsdp_upload_state_dict", strategy, run.synchronizer, step, wire_dtype="BF16")
    found, version = run.synchronizer.get_model_state_dict()
    assert version == step
    assert found is not None
    assert {str(tensor.dtype) for tensor in found.values()} == {"torch.bfloat16"}
    assert version_of(dict(found), strategy) == every(ranks, "digest", strategy)[0]
    raised = outcomes(ranks, "function", "fsdp_upload_state_dict", strategy, run.synchronizer, step - 1)
    assert all("rank 0: RunError: version" in str(error) for error in raised)


@BOTH
def test_adapters_of_lora_do_not_stay_behind_in_silence(
    ranks: list[Any], run: VerlRun, step: int, strategy: str
) -> None:
    """verl's engine hands out the frozen weights alone: explorers would have the first version for ever."""
    (name,) = set(every(ranks, "with_adapters", strategy))
    before = run.synchronizer.get_latest_model_version()
    calls = [
        outcomes(ranks, "function", "fsdp_upload_state_dict", name, run.synchronizer, step),
        outcomes(ranks, "function", "fsdp_state_dict_meta", name),
        outcomes(ranks, "function", "fsdp_sync_weight_nccl", name, None),
    ]
    for raised in calls:
        assert all("LoRA adapters" in str(error) and "model.lora.merge" in str(error) for error in raised), raised
    assert run.synchronizer.get_latest_model_version() == before


@BOTH
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.few(1)
def test_a_broadcast_brings_the_version_to_an_explorer(
    ranks: list[Any], make_run: Callable[..., VerlRun], tmp_path: Path, strategy: str, packed: bool
) -> None:
    synchronizer = make_run(tmp_path).synchronizer
    sent = [rank.broadcast.remote(strategy, synchronizer, 1, 5, packed=packed) for rank in ranks]
    group, told = join_group(synchronizer, "explorer-0", timeout_s=LIMIT)
    assert synchronizer.ready_to_nccl_sync("explorer-0") == 5
    assert told.meta is not None
    found = {name: tensor.clone() for name, tensor in receive(group, told.meta, packed=packed, timeout_s=LIMIT)}
    ray.get(sent, timeout=LIMIT)
    assert synchronizer.get_latest_model_version() == 5
    assert version_of(found, strategy) == every(ranks, "digest", strategy)[0]


@pytest.mark.all
def test_the_example_of_the_guide_runs(ranks: list[Any], pair: dict[str, Any], tmp_path: Path) -> None:
    driver, worker, explorer = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"checkpoint_dir": tmp_path}
    exec(driver, names)
    run = names["run"]
    try:
        every(ranks, "run", worker, "fsdp2", checkpoint_dir=str(tmp_path), steps=[1, 2])
        exec(explorer, names)
        assert names["version"] == 2
        assert [(info.step, info.kind) for info in catalog.scan(tmp_path)] == [(1, FULL), (2, FULL)]
    finally:
        run.close()
