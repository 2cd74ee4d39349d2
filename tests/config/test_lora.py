"""`model.lora` and `sync.what`: which adapter is trained, and what the checks refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.config import check, compose, typed
from trinity_sync.config.lora_settings import Adapter, adapter_of, travels
from trinity_sync.errors import ConfigError


def adapter(*overrides: str) -> Adapter | None:
    return adapter_of(typed(compose(overrides)).model.lora)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(compose(overrides))
    return str(caught.value)


def saved(folder: Path, **changes: Any) -> Path:
    """What peft saves, as far as it is read before anything starts."""
    folder.mkdir()
    body = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": ["v_proj", "q_proj"]} | changes
    (folder / "adapter_config.json").write_text(json.dumps(body))
    (folder / "adapter_model.safetensors").touch()
    return folder


def test_without_a_rank_the_whole_model_is_trained_and_travels() -> None:
    assert adapter() is None
    assert travels(typed(compose())) == "full"


def test_a_new_adapter_travels_alone_unless_it_is_to_be_merged() -> None:
    assert adapter("model.lora.rank=8") == Adapter(8, 16, "all-linear", None)
    assert adapter("model.lora.rank=8", "model.lora.alpha=4", "model.lora.targets=[q_proj]") == Adapter(
        8, 4, ("q_proj",), None
    )
    assert travels(typed(compose(["model.lora.rank=8"]))) == "adapter"
    assert travels(typed(compose(["model.lora.rank=8", "sync.what=merged"]))) == "merged"


def test_all_linear_is_read_in_any_case_as_peft_reads_it() -> None:
    assert adapter("model.lora.rank=8", "model.lora.targets=All-Linear") == Adapter(8, 16, "all-linear", None)


def test_an_adapter_that_is_gone_on_from_says_what_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path / "adapter")
    assert adapter(f"model.lora.path={path}") == Adapter(4, 32, ("v_proj", "q_proj"), str(path))
    agreed = ("model.lora.rank=4", "model.lora.alpha=32", "model.lora.targets=[q_proj,v_proj]")
    check(compose([f"model.lora.path={path}", *agreed]))


def test_an_adapter_that_is_scaled_by_the_root_of_its_rank_is_carried_so(tmp_path: Path) -> None:
    path = saved(tmp_path / "adapter", use_rslora=True)
    assert adapter(f"model.lora.path={path}") == Adapter(4, 32, ("v_proj", "q_proj"), str(path), rslora=True)


def test_what_peft_saves_of_a_plain_adapter_is_understood(tmp_path: Path) -> None:
    from peft import LoraConfig

    path = saved(tmp_path / "adapter")
    plain = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj"], lora_dropout=0.1, init_lora_weights="gaussian")
    plain.save_pretrained(path)
    assert adapter(f"model.lora.path={path}") == Adapter(4, 32, ("q_proj",), str(path), dropout=0.1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("model.lora.rank=8", "model.lora.rank is 8, the adapter at model.lora.path has 4"),
        ("model.lora.alpha=16", "model.lora.alpha is 16, the adapter at model.lora.path has 32"),
        (
            "model.lora.targets=[q_proj]",
            "model.lora.targets is [q_proj], the adapter at model.lora.path is for [q_proj, v_",
        ),
    ],
)
def test_what_is_given_beside_an_adapter_has_to_agree_with_it(tmp_path: Path, given: str, said: str) -> None:
    assert said in refused(f"model.lora.path={saved(tmp_path / 'adapter')}", given)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "is not that of a LoRA adapter: peft_type IA3"),
        ({"r": 0}, "r 0"),
        ({"use_dora": True}, "an adapter with use_dora, which is not trained here"),
        ({"layers_to_transform": 0}, "an adapter with layers_to_transform, which"),
        ({"exclude_modules": ["v_proj"], "bias": "all"}, "an adapter with bias, exclude_modules, which"),
        ({"init_lora_weights": "pissa_niter_4"}, "an adapter with init_lora_weights, which"),
        ({"of_a_later_peft": {"beta": 0.5}}, "an adapter with of_a_later_peft, which"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refused(f"model.lora.path={saved(tmp_path / 'adapter', **changes)}")


def test_a_folder_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    assert "where there is no adapter_config.json" in refused(f"model.lora.path={tmp_path / 'nowhere'}")
    path = saved(tmp_path / "adapter")
    (path / "adapter_config.json").write_text("{")
    assert "whose adapter_config.json cannot be used" in refused(f"model.lora.path={path}")
    (path / "adapter_model.safetensors").unlink()
    assert "where there is no adapter_model.safetensors" in refused(f"model.lora.path={path}")


@pytest.mark.parametrize("mode", ["checkpoint", "memory", "nccl"])
def test_the_whole_model_does_not_travel_with_an_adapter(mode: str) -> None:
    text = refused(f"sync={mode}", "model.lora.rank=8", "sync.what=full")
    assert text.startswith(f"sync.what is full, which sync={mode} cannot with an adapter")
    assert "adapter (the adapter alone) or merged" in text


@pytest.mark.parametrize("what", ["adapter", "merged"])
def test_no_adapter_travels_where_none_is_trained(what: str) -> None:
    assert f"sync.what is {what}, but no adapter is trained" in refused(f"sync.what={what}")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.lora.rank=-1"], "model.lora.rank is -1; must be at least 0"),
        (["model.lora.alpha=8"], "model.lora.alpha is 8, but no adapter is trained"),
        (["model.lora.rank=8", "model.lora.targets=3"], "model.lora.targets is 3; must be all-linear"),
        (["model.lora.rank=8", "model.lora.targets=[]"], "model.lora.targets names nothing"),
        (
            ["model.lora.rank=8", "backend=megatron"],
            "but backend=megatron is built on mbridge, which has no LoRA: verl trains adapters on Megatron through "
            "Megatron-Bridge alone; use backend=fsdp2",
        ),
    ],
)
def test_a_mistake_is_refused_with_its_key(overrides: list[str], said: str) -> None:
    assert said in refused(*overrides)
