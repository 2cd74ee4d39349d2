"""What can be saved of a model is known when the manager is made."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlCheckpointManager

from tests.checkpoint.written import small_model
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl import FSDPCheckpointManager


def test_an_export_of_a_model_with_an_adapter_is_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = get_peft_model(small_model("tied"), LoraConfig(r=2, target_modules=["q_proj"]))

    def made(self: Any, **kwargs: Any) -> None:
        self.model, self.checkpoint_save_contents = model, ["model", "hf_model"]

    monkeypatch.setattr(VerlCheckpointManager, "__init__", made)
    with pytest.raises(ConfigError, match=r"hf_model in save_contents .* with a LoRA adapter"):
        FSDPCheckpointManager()
