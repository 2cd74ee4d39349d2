"""What is said of an adapter before Ray starts, from the model's config alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.families import EXPERTS
from tests.model_folders import bare_model
from trinity_sync.config import compose, plain, typed
from trinity_sync.errors import ConfigError
from trinity_sync.launch.launcher import check_beforehand
from trinity_sync.models.architecture import architecture_config
from trinity_sync.weights.lora import held_adapter, saved_name

RANK = "model.lora.rank=4"


def looked(*overrides: str) -> None:
    check_beforehand(typed(compose([*overrides])))


@pytest.fixture
def dropping(tmp_path: Path) -> Path:
    """An adapter that peft has put on the default model, with dropout."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture_config(plain(compose().model.architecture)))
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1))
    wrapped.peft_config["default"].save_pretrained(tmp_path)
    tensors = {saved_name(name): torch.zeros(tensor.shape) for name, tensor in held_adapter(model).items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    return tmp_path


def test_what_the_default_leaves_out_of_a_mixture_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    looked(RANK, *EXPERTS)
    assert capsys.readouterr().err == (
        "note: model.lora.targets=all-linear leaves out fused experts (mlp.experts); routers (mlp.gate); "
        "the adapter is for k_proj, o_proj, q_proj, v_proj\n"
    )


def test_nothing_is_said_of_a_model_all_of_whose_layers_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    looked(RANK)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*EXPERTS, "model.lora.targets=[gate]"], "gate means model.layers.0.mlp.gate, a router"),
        (["workload=bytes", "model.shapes=qwen3-0.6b", "model.lora.targets=[w1]"], "no layer is called w1"),
    ],
)
def test_a_target_that_cannot_be_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        looked(RANK, *overrides)
    assert str(caught.value).startswith("model.lora.targets: ")
    assert said in str(caught.value)


def test_a_folder_is_read_without_its_weights(tmp_path: Path) -> None:
    architecture_config(plain(compose().model.architecture)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no layer is called qq_proj \(did you mean q_proj\?\)"):
        looked(RANK, "model=path", f"model.path={tmp_path}", "model.lora.targets=[qq_proj]")


def test_a_folder_of_which_no_model_can_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    bare_model(tmp_path, hidden_size="large")
    with pytest.raises(ConfigError, match=r"no model can be made of it: Strict.*: .*'hidden_size' expected int"):
        looked(RANK, f"model.path={tmp_path}")


def test_dropout_of_an_adapter_that_is_gone_on_from_is_reported(
    dropping: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looked(f"model.lora.path={dropping}")
    assert "note: the adapter at model.lora.path has lora_dropout=0.1" in capsys.readouterr().err


def test_an_adapter_of_another_model_is_refused(dropping: Path) -> None:
    with pytest.raises(ConfigError, match=r"is an adapter for another model: .* is 4x128 there, this model wants 4x64"):
        looked(f"model.lora.path={dropping}", "model.architecture.hidden_size=64")


def test_a_model_that_only_the_nodes_have_is_left_to_the_ranks() -> None:
    looked(RANK, "model=path", "model.path=/only/there", "cluster.address=ray://host:1", "model.lora.targets=[no]")
