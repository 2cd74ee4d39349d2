"""What can be saved of a model is known when the manager is made."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from transformers import Qwen3Config, Qwen3ForTokenClassification
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlCheckpointManager

from tests.checkpoint.written import small_model
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl import FSDPCheckpointManager, model_files
from trinity_sync.integrations.verl import manager as module
from trinity_sync.integrations.verl.manager import FsdpCopies


def test_an_export_of_a_model_with_an_adapter_is_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = get_peft_model(small_model("tied"), LoraConfig(r=2, target_modules=["q_proj"]))

    def made(self: Any, **kwargs: Any) -> None:
        self.model, self.checkpoint_save_contents = model, ["model", "hf_model"]

    monkeypatch.setattr(VerlCheckpointManager, "__init__", made)
    with pytest.raises(ConfigError, match=r"hf_model in save_contents .* with a LoRA adapter"):
        FSDPCheckpointManager()


def test_an_export_that_a_save_asks_for_is_refused_of_a_model_with_an_adapter() -> None:
    manager: Any = SimpleNamespace(model=Mock(), optimizer=Mock(), _has_lora=lambda: True)
    with pytest.raises(ConfigError, match=r"save_as_hf.* with a LoRA adapter"):
        FSDPCheckpointManager._check(manager, ["model", "hf_model"])


class Adapted:
    """What a manager of verl knows of a model with an adapter."""

    should_save_lora_only = True
    rank = 1

    def _has_lora(self) -> bool:
        return True


def test_of_a_model_whose_adapters_alone_are_saved_these_are_all_that_is() -> None:
    state = {"base.weight": 1, "base.lora_A.weight": 2, "base.adapter_bias": 3}
    chosen = FsdpCopies(Adapted(), 1.0, lazily=False)._chosen(state)
    assert chosen == {"base.lora_A.weight": 2, "base.adapter_bias": 3}


def test_adapters_alone_of_a_model_that_has_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="none of its tensors is one"):
        FsdpCopies(Adapted(), 1.0, lazily=False)._chosen({"base.weight": 1})


@pytest.mark.parametrize(("alone", "has_some"), [(True, False), (False, True)])
def test_of_all_other_models_everything_is_saved(alone: bool, has_some: bool) -> None:
    manager: Any = SimpleNamespace(rank=1, should_save_lora_only=alone, _has_lora=lambda: has_some)
    state = {"base.weight": 1, "base.lora_A.weight": 2}
    assert FsdpCopies(manager, 1.0, lazily=False)._chosen(state) == state


@pytest.fixture
def take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take copies of these contents on a rank that is given; `made` are the ranks that have asked for metadata."""
    monkeypatch.setattr(module, "together", lambda what, work: [work()])
    monkeypatch.setattr(module, "sharded", lambda *_, **__: nullcontext())
    made: list[int] = []
    files = {"config.json": b"{}"}
    monkeypatch.setattr(module.model_files, "metadata", lambda manager: made.append(manager.rank) or files)
    random = {"numpy": 3}
    managers: list[Any] = [
        SimpleNamespace(rank=rank, world_size=2, model=Mock(), lr_scheduler=None, get_rng_state=lambda: random)
        for rank in range(2)
    ]
    copies = [FsdpCopies(manager, 1.0, lazily=False) for manager in managers]

    def take(rank: int, *todo: str) -> dict[str, Any]:
        return copies[rank].take(3, list(todo), tmp_path / "actor", tmp_path, durable=False)

    take.made, take.copies = made, copies  # type: ignore[attr-defined]
    return take


def test_metadata_are_read_at_once_and_written_by_rank_0_in_each_save(take: Any, tmp_path: Path) -> None:
    assert take.made == [0]
    assert take(0) == take(1, "metadata") == {}
    for _ in range(2):
        take(0, "metadata")["metadata"]()
        assert (tmp_path / "actor/config.json").read_bytes() == b"{}"
        (tmp_path / "actor/config.json").unlink()


def test_the_state_that_is_no_models_is_written_by_each_rank(take: Any, tmp_path: Path) -> None:
    ((name, write),) = take(1, "extra_state").items()
    write()
    assert name == "extra_state"
    saved = torch.load(tmp_path / "actor/extra_state_world_size_2_rank_1.pt", weights_only=False)
    assert saved == {"lr_scheduler": None, "rng": {"numpy": 3}}


def test_what_is_given_up_or_waited_for_is_the_copy(take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = take.copies[1]
    copies._copy = Mock()
    copies.give_up("extra_state", RunError("no room"))
    copies.wait_until_copied()
    copies._copy.let_go.assert_called_once_with("extra_state_world_size_2_rank_1.pt")
    copies._copy.wait_until_copied.assert_called_once_with(1.0)


def test_an_export_changes_no_more_when_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.model_files, "empty_model", lambda model, dtype: dtype)
    manager: Any = SimpleNamespace(rank=1, model=None)
    live = {"position_ids": torch.arange(3), "weight": torch.ones(3, dtype=torch.bfloat16)}
    dtype, state = FsdpCopies(manager, 1.0, lazily=False)._export(iter(live.items()))
    live["weight"] += 1
    assert dtype == torch.bfloat16
    assert state["weight"].equal(torch.ones(3, dtype=torch.bfloat16))
    assert set(state) == set(live)


def test_an_export_has_the_head_that_was_trained_whatever_the_config_names(tmp_path: Path) -> None:
    """verl makes a critic of the config of a language model."""
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    config = Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True, num_labels=1)
    critic = Qwen3ForTokenClassification(config)
    state = {name: tensor.clone() for name, tensor in critic.state_dict().items()}
    critic.__class__ = type("FSDPCritic", (FSDPModule, Qwen3ForTokenClassification), {})  # as torch does
    model_files.write_export(model_files.empty_model(critic, torch.float32), state, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == state.keys()


def test_an_export_of_what_is_no_model_of_transformers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^Linear is not a model of transformers, so it cannot be exported to Hugg"):
        model_files.class_of(torch.nn.Linear(1, 1))
