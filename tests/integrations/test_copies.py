"""What can be saved of a model is known when the manager is made."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlCheckpointManager

from tests.checkpoint.written import small_model
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl import FSDPCheckpointManager
from trinity_sync.integrations.verl.copies import Copies


def test_an_export_of_a_model_with_an_adapter_is_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = get_peft_model(small_model("tied"), LoraConfig(r=2, target_modules=["q_proj"]))

    def made(self: Any, **kwargs: Any) -> None:
        self.model, self.checkpoint_save_contents = model, ["model", "hf_model"]

    monkeypatch.setattr(VerlCheckpointManager, "__init__", made)
    with pytest.raises(ConfigError, match=r"hf_model in save_contents .* with a LoRA adapter"):
        FSDPCheckpointManager()


class Adapted:
    """What a manager of verl knows of a model with an adapter."""

    should_save_lora_only = True

    def _has_lora(self) -> bool:
        return True


def test_of_a_model_whose_adapters_alone_are_saved_these_are_all_that_is() -> None:
    state = {"base.weight": 1, "base.lora_A.weight": 2, "base.adapter_bias": 3}
    chosen = Copies(Adapted(), 1.0, lazily=False)._chosen(state)
    assert chosen == {"base.lora_A.weight": 2, "base.adapter_bias": 3}


def test_adapters_alone_of_a_model_that_has_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="none of its tensors is one"):
        Copies(Adapted(), 1.0, lazily=False)._chosen({"base.weight": 1})
