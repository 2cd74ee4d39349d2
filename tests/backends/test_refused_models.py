"""Models that the FSDP engines cannot publish whole are refused by name. One rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.families import architecture
from trinity_sync.backends.fsdp import FsdpBackend
from trinity_sync.backends.saved import check_causal
from trinity_sync.errors import ConfigError
from trinity_sync.weights.saved_views import Saved


def backend_of(model_type: str, fields: dict[str, Any], wider: int = 0) -> FsdpBackend:
    """The backend of a model on one rank, whose feed-forward layers are wider than its config says."""
    made = CONFIG_MAPPING[model_type](**(fields | {"intermediate_size": fields["intermediate_size"] + wider}))
    with torch.device("cpu"):
        module = AutoModelForCausalLM.from_config(made)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    config = CONFIG_MAPPING[model_type](**fields, architectures=[type(module).__name__.removeprefix("FSDP")])
    engine: Any = SimpleNamespace(
        module=module,
        model_config=SimpleNamespace(hf_config=config, trust_remote_code=False),
        engine_config=SimpleNamespace(model_dtype="fp32"),
        is_param_offload_enabled=False,
        is_optimizer_offload_enabled=False,
    )
    return FsdpBackend(engine, "BF16")


@pytest.fixture(autouse=True)
def _group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_whose_saved_tensors_are_not_views_of_the_held_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"joined": Saved("BF16", (8, 3), None), "plain": Saved.as_held("BF16", (4, 3), "plain")}
    monkeypatch.setattr("trinity_sync.backends.fsdp.saved_by", lambda *_: saved)
    fields = {name: value for name, value in architecture("llama").items() if name != "model_type"}
    with pytest.raises(ConfigError, match=r"backend=fsdp2 cannot publish this model: .* 1 of its 2 .*: joined"):
        backend_of("llama", fields)


def test_a_model_of_other_sizes_than_its_config_has_is_refused() -> None:
    fields = {name: value for name, value in architecture("llama").items() if name != "model_type"}
    with pytest.raises(ConfigError, match=r"the engine holds model\.layers\.0\.mlp\.\w+\.weight as .* has 1536$"):
        backend_of("llama", fields, wider=8)
    assert backend_of("llama", fields).shards()


@pytest.mark.parametrize(
    ("architectures", "words"),
    [(["GPT2LMHeadModel"], "verl makes GPT2LMHeadModel without its output layer"), (None, "has no `architectures`")],
)
def test_a_model_that_verl_would_make_without_its_output_layer_is_refused(architectures: Any, words: str) -> None:
    engine: Any = SimpleNamespace(hf_config=CONFIG_MAPPING["gpt2"](architectures=architectures))
    with pytest.raises(ConfigError, match=words):
        check_causal(engine)
    engine.hf_config = CONFIG_MAPPING["llama"](architectures=["LlamaForCausalLM"])
    check_causal(engine)
