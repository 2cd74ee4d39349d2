"""What real engines with a LoRA adapter publish: the adapter, or its sum with the base, whoever holds which rows."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.backends.engines import Ranks, _digest, _step, adapted, go_through, write_state

CASES = [{"strategy": strategy} for strategy in ("fsdp", "fsdp2")]

pytestmark = pytest.mark.all


def _examine(case: Mapping[str, Any], models: Path, saves: Path, rank: int, ranks: int) -> dict[str, Any]:
    import torch.distributed as dist

    from trinity_sync.backends.fsdp import FsdpBackend
    from trinity_sync.backends.fsdp_state import FsdpState, peft_config, write_adapter_config
    from trinity_sync.checkpoint.reading import open_weights
    from trinity_sync.errors import ConfigError
    from trinity_sync.trainer.base_model import check_held
    from trinity_sync.weights.shards import check_complete

    model = models / "tied"
    engine = adapted(model, case["strategy"], 4)
    alone, merged = FsdpBackend(engine, "BF16"), FsdpBackend(engine, "BF16", merged=True)
    wanted = open_weights(model).digest("BF16")
    facts: dict[str, Any] = {
        "base_wanted": wanted,
        "base": check_held(model, alone.base(), "BF16", digested=True).digest,
    }
    facts["config"] = alone.adapter_config()
    facts["merged_at_first"] = _digest(merged, ranks)  # B is zero
    for number in range(3):
        _step(engine, rank, number)
    write_state(FsdpState(engine), "verl", saves / "actor")
    if rank == 0:
        write_adapter_config(peft_config(engine.module), saves / "actor")
    dist.barrier()
    gathered: list[Any] = [None] * ranks
    for name, backend in (("adapter", alone), ("merged", merged)):
        dist.all_gather_object(gathered, list(backend.shards()))
        check_complete([shards for shards in gathered if shards], {n: one[:2] for n, one in backend.saved().items()})
        facts[name] = _digest(backend, ranks)
    adapter = open_weights(saves)
    facts["adapter_saved"] = adapter.digest("BF16")
    facts["merged_saved"] = adapter.merged_into(open_weights(model)).digest("BF16")

    other = saves / "other"
    if rank == 0:
        shutil.copytree(model, other)
        _change(other, "model.layers.1.mlp.up_proj.weight")
    dist.barrier()
    try:
        check_held(other, alone.base(), "BF16", digested=False)
    except ConfigError as error:
        facts["refused"] = str(error)
    dist.barrier()
    return facts


def _change(folder: Path, name: str) -> None:
    """Change each element of a tensor."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return Ranks(tmp_path_factory.mktemp("lora"), 2, CASES, {}, partial(go_through, _examine)).facts()


@pytest.mark.parametrize("case", range(len(CASES)), ids=[case["strategy"] for case in CASES])
class TestVersions:
    def test_an_adapter_is_what_is_saved_of_it(self, facts: Any, case: int) -> None:
        for of_rank in facts[case]:
            assert of_rank["adapter"] == of_rank["adapter_saved"]

    def test_merged_is_the_export_of_the_checkpoint(self, facts: Any, case: int) -> None:
        for of_rank in facts[case]:
            assert of_rank["merged_at_first"] == of_rank["base_wanted"]
            assert of_rank["merged"] == of_rank["merged_saved"] != of_rank["base_wanted"]

    def test_its_config_is_what_peft_saves_of_it(self, facts: Any, case: int) -> None:
        config = facts[case][0]["config"]
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
        assert config["target_modules"] == sorted(config["target_modules"])

    def test_the_base_is_the_folder_s(self, facts: Any, case: int) -> None:
        assert facts[case][0]["base"] == facts[case][0]["base_wanted"]
        refused = [of_rank["refused"] for of_rank in facts[case] if "refused" in of_rank]
        assert refused, "one of the ranks holds some of the tensor that was changed"
        for text in refused:
            assert "other: the trainer's base of the adapter differs" in text
            assert "in model.layers.1.mlp.up_proj.weight, so explorers" in text
