"""An adapter as verl's engines publish it, against what peft itself saves; and adapters that a model cannot have."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.backends.engines import (
    Ranks,
    _digest,
    _engine,
    _step,
    go_through,
    refused,
    write_state,
)

CASES = [
    {"strategy": "fsdp", "model": "tied", "fsdp_size": -1},
    {"strategy": "fsdp2", "model": "untied", "fsdp_size": -1},
    {"strategy": "fsdp2", "model": "tied", "fsdp_size": 1},
]

pytestmark = pytest.mark.all


def _examine(case: Mapping[str, Any], models: Path, folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from trinity_sync.backends.adapters import adapter_targets
    from trinity_sync.backends.fsdp import FsdpBackend
    from trinity_sync.backends.fsdp_state import FsdpState
    from trinity_sync.backends.saved_tensors import meta_model
    from trinity_sync.checkpoint.reading import open_weights
    from trinity_sync.config.lora_settings import Adapter
    from trinity_sync.errors import ConfigError

    torch.manual_seed(5)
    model = models / case["model"]
    fields: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    engine = _engine(str(model), case["strategy"], case["fsdp_size"], **fields)
    backend = FsdpBackend(engine, "BF16")
    facts: dict[str, Any] = {"refused": refused(backend, case["strategy"], ranks), "first": _digest(backend, ranks)}
    for number in range(2):
        _step(engine, rank, number)
    facts["trained"] = _digest(backend, ranks)
    facts["optimized"] = sorted(
        {bool(parameter.requires_grad) for parameter in engine.optimizer.state}  # frozen ones have no averages
    )
    write_state(FsdpState(engine), "verl", folder.with_name(f"{folder.name}-whole") / "actor")
    if rank == 0:
        whole = open_weights(folder.with_name(f"{folder.name}-whole"))
        facts["of_peft"] = _saved_by_peft(model, fields, {name: whole.read(name) for name in whole}, folder)
    dist.barrier()

    def told(**other: Any) -> str:
        try:
            adapter = Adapter(4, 8, tuple(fields["target_modules"]), str(folder))
            adapter_targets(meta_model(engine.model_config), replace(adapter, **other), "fsdp")
        except ConfigError as error:
            return str(error)
        return ""

    facts["fits"] = told()
    facts["no_such_layer"] = told(path=None, targets=("qq_proj",))
    facts["other_shapes"] = _with_other_shapes(folder, told) if rank == 0 else ""
    dist.barrier()
    again = _engine(str(model), case["strategy"], case["fsdp_size"], **{**fields, "lora_adapter_path": str(folder)})
    facts["went_on"] = _digest(FsdpBackend(again, "BF16"), ranks)
    return facts


def _saved_by_peft(model: Path, fields: Mapping[str, Any], whole: Mapping[str, Any], folder: Path) -> str:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from trinity_sync.weights.tensors import state_digest

    config = LoraConfig(r=fields["lora_rank"], lora_alpha=fields["lora_alpha"], target_modules=fields["target_modules"])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    assert not set_peft_model_state_dict(adapted, whole).unexpected_keys
    adapted.save_pretrained(folder)
    return state_digest(load_file(folder / "adapter_model.safetensors"), "BF16")


def _with_other_shapes(folder: Path, told: Any) -> str:
    from safetensors.torch import load_file, save_file

    other = folder.with_name(f"{folder.name}-other")
    shutil.copytree(folder, other)
    file = other / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if "down_proj.lora_A" in name)
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, file)
    return str(told(path=str(other)))


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return Ranks(tmp_path_factory.mktemp("adapters"), 2, CASES, {}, partial(go_through, _examine)).facts()


@pytest.mark.parametrize("case", range(len(CASES)), ids=["fsdp", "fsdp2", "hybrid"])
class TestAnAdapter:
    def test_is_published_whole_as_peft_saves_it(self, facts: Any, case: int) -> None:
        for of_rank in facts[case]:
            assert of_rank["refused"] is None
            assert of_rank["trained"] == facts[case][0]["of_peft"] != of_rank["first"]

    def test_alone_has_states_in_the_optimizer(self, facts: Any, case: int) -> None:
        assert all(of_rank["optimized"] == [True] for of_rank in facts[case])

    def test_that_a_run_goes_on_from_is_the_first_version(self, facts: Any, case: int) -> None:
        assert all(of_rank["went_on"] == facts[case][0]["of_peft"] for of_rank in facts[case])

    def test_that_the_model_cannot_have_is_refused_by_name(self, facts: Any, case: int) -> None:
        for of_rank in facts[case]:
            assert of_rank["fits"] == ""
            assert "model.lora.targets: no layer is called qq_proj" in of_rank["no_such_layer"]
            assert "its linear layers are down_proj, gate_proj" in of_rank["no_such_layer"]
        assert "down_proj.lora_A.weight is 4x95 there, this model wants 4x96" in facts[case][0]["other_shapes"]
