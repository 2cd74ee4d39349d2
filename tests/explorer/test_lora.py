"""An explorer that is brought an adapter only, against peft on the same model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.explorer.helpers import ARCHITECTURE, engine_of
from trinity_sync.config.lora_settings import Adapter
from trinity_sync.models.architecture import make_model
from trinity_sync.tasks.copy_digits import CopyDigits

ADAPTER = Adapter(rank=4, alpha=8, targets="all-linear", path=None)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(ARCHITECTURE, 0, tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def saved(path: Path) -> Path:
    """An adapter with weights, as peft saves it."""
    torch.manual_seed(1)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(path), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapted.save_pretrained(path.with_name("adapter"))
    return path.with_name("adapter")


def loaded(path: Path, saved: Path, **changes: Any) -> Any:
    engine = engine_of(path, **{"adapter": ADAPTER, **changes})
    weights = load_file(saved / "adapter_model.safetensors")
    destinations = engine.destinations()
    assert destinations.keys() == weights.keys()
    for name, tensor in destinations.items():
        assert tensor.shape == weights[name].shape
        tensor.copy_(weights[name])
    engine.after_load()
    return engine


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_adapter_that_was_loaded_is_added_as_peft_adds_it(path: Path, saved: Path, dtype: str) -> None:
    engine = loaded(path, saved, dtype=dtype)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=engine.model.dtype)
    ids = torch.arange(3, 25)[None]
    with torch.inference_mode():
        without = base(ids).logits.clone()
        expected = PeftModel.from_pretrained(base, saved, autocast_adapter_dtype=False)(ids).logits
        found = engine.model(ids).logits
    assert torch.equal(found, expected)
    assert not torch.equal(found, without)
    assert all(tensor.dtype == engine.model.dtype for tensor in engine.destinations().values())


def test_an_adapter_is_scaled_as_it_is_trained(path: Path, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_rslora": True}))
    engine = loaded(path, saved, adapter=replace(ADAPTER, rslora=True), dtype="fp32")
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.arange(3, 25)[None]
    with torch.inference_mode():
        expected = PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False)(ids).logits
        assert torch.equal(engine.model(ids).logits, expected)


def test_it_generates_and_what_it_says_hangs_on_the_adapter(path: Path, saved: Path) -> None:
    engine, task = loaded(path, saved), CopyDigits(2, 0)

    def samples() -> Any:
        return engine.generate(task.prompts(1, 8), task, step=1, samples_per_prompt=4, version=(0, 0))

    first, again = samples(), samples()
    assert first.texts == again.texts
    for tensor in engine.destinations().values():
        tensor.zero_()
    assert samples().texts != first.texts


def test_a_base_of_which_some_is_kept_in_fp32_computes_as_one_of_which_nothing_is(path: Path, saved: Path) -> None:
    """Rotary frequencies included."""
    ids = torch.arange(3, 25)[None]
    with torch.inference_mode():
        plain, kept = (loaded(path, saved, dtype="bf16", keep_fp32=keep).model(ids).logits for keep in (None, []))
    assert torch.equal(plain, kept)
