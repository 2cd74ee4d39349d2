"""Models that the FSDP engines cannot publish whole are refused by name. One rank."""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests.families import architecture
from trinity_sync.backends.fsdp import FsdpBackend
from trinity_sync.backends.saved_tensors import check_class
from trinity_sync.errors import ConfigError
from trinity_sync.weights.saved_views import SavedTensor


def backend_of(
    model_type: str,
    fields: dict[str, Any],
    change: Callable[[PreTrainedModel], object] = lambda _: None,
    *,
    fsdp1: bool = False,
    **other: Any,
) -> FsdpBackend:
    """The backend of a model on one rank, which was made with other fields than its config says, and changed."""
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**(fields | other)))
    change(model)
    config = CONFIG_MAPPING[model_type](**fields, architectures=[type(model).__name__])
    module = (
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        if fsdp1
        else fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    )
    with TemporaryDirectory() as folder:
        engine: Any = SimpleNamespace(
            module=module,
            model_config=SimpleNamespace(hf_config=config, trust_remote_code=False, local_path=folder),
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
    saved = {"joined": SavedTensor("BF16", (8, 3), None), "plain": SavedTensor.as_held("BF16", (4, 3), "plain")}
    monkeypatch.setattr("trinity_sync.backends.fsdp.on_the_wire", lambda *_: saved)
    fields = {name: value for name, value in architecture("llama").items() if name != "model_type"}
    with pytest.raises(ConfigError, match=r"backend=fsdp2 cannot publish this model: .* 1 of its 2 .*: joined"):
        backend_of("llama", fields)


def test_a_model_of_other_sizes_than_its_config_has_is_refused() -> None:
    fields = {name: value for name, value in architecture("llama").items() if name != "model_type"}
    with pytest.raises(ConfigError, match=r"the engine holds model\.layers\.0\.mlp\.\w+\.weight as .* has 1536$"):
        backend_of("llama", fields, intermediate_size=fields["intermediate_size"] + 8)
    assert backend_of("llama", fields).shards()


@pytest.mark.parametrize("fsdp1", [False, True])
def test_what_the_engine_holds_and_no_version_would_have_is_refused(fsdp1: bool) -> None:
    fields = {name: value for name, value in architecture("llama").items() if name != "model_type"}
    tied = fields | {"tie_word_embeddings": True}
    names = [shard.name for shard in backend_of("llama", tied, fsdp1=fsdp1).shards()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    with pytest.raises(
        ConfigError, match=r"the engine trains lm_head\.weight, .* set tie_word_embeddings=false in its"
    ):
        backend_of("llama", tied, fsdp1=fsdp1, tie_word_embeddings=False)

    def count(model: PreTrainedModel) -> None:
        model.model.register_buffer("passing", torch.ones(3), persistent=False)
        model.model.register_buffer("seen", torch.ones(3))

    with pytest.raises(ConfigError, match=r"the engine trains model\.seen, but by the model"):
        backend_of("llama", fields, count, fsdp1=fsdp1)


@pytest.mark.parametrize(
    ("architectures", "words"),
    [
        (["GPT2LMHeadModel"], r"\[GPT2LMHeadModel\], which verl makes without its output layer"),
        (None, "has no `architectures`"),
    ],
)
def test_a_model_that_verl_would_make_without_its_output_layer_is_refused(architectures: Any, words: str) -> None:
    engine: Any = SimpleNamespace(hf_config=CONFIG_MAPPING["gpt2"](architectures=architectures))
    with pytest.raises(ConfigError, match=words):
        check_class(engine)
    engine.hf_config = CONFIG_MAPPING["llama"](architectures=["LlamaForCausalLM"])
    check_class(engine)
