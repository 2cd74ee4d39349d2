"""Persistent buffers are weights: `save_pretrained` writes them, so versions have them.

FSDP's own modules in a group of one rank, in this process; of the engine only what is read of one is there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trinity_sync.weights.digests import digest_rows
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.staging import stage
from trinity_sync.weights.tensors import state_digest


class BufferedConfig(Qwen3Config):
    model_type = "buffered_qwen3"


class BufferedForCausalLM(Qwen3ForCausalLM):
    """Balances something, as routers of mixtures of experts do."""

    config_class = BufferedConfig

    def __init__(self, config: BufferedConfig) -> None:
        super().__init__(config)
        self.model.register_buffer("load_bias", torch.zeros(4))
        self.model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.model.register_buffer("of_no_checkpoint", torch.ones(2), persistent=False)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    AutoConfig.register("buffered_qwen3", BufferedConfig)
    AutoModelForCausalLM.register(BufferedConfig, BufferedForCausalLM)
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


def sharded(model: torch.nn.Module, strategy: str) -> torch.nn.Module:
    if strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        return model
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_persistent_buffers_travel_with_each_version_as_they_are_then(tmp_path: Path, strategy: str) -> None:
    from trinity_sync.backends.fsdp import FsdpBackend

    config = BufferedConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        architectures=["BufferedForCausalLM"],
    )
    torch.manual_seed(0)
    whole = BufferedForCausalLM(config)
    module: Any = sharded(copy.deepcopy(whole), strategy)
    live = module.module if strategy == "fsdp" else module
    engine = SimpleNamespace(
        module=module,
        model_config=SimpleNamespace(hf_config=config, trust_remote_code=False, local_path=str(tmp_path)),
        is_param_offload_enabled=False,
        is_optimizer_offload_enabled=False,
    )
    backend = FsdpBackend(engine, "BF16")
    published = []
    for version in range(2):
        with torch.no_grad():
            live.model.load_bias.add_(1.5)
            live.model.seen.add_(7)
            whole.model.load_bias.copy_(live.model.load_bias)
            whole.model.seen.copy_(live.model.seen)
        layout = PartLayout.build("rank-00000", backend.shards(), 1 << 16)
        segment = bytearray(layout.nbytes)
        stage(layout, backend.sources(), memoryview(segment))
        published.append(digest_rows([(layout, segment)]).version_digest())
        whole.save_pretrained(tmp_path / str(version))
        saved = load_file(tmp_path / str(version) / "model.safetensors")
        assert {"model.load_bias", "model.seen"} < saved.keys()
        assert published[version] == state_digest(saved, "BF16")
    assert published[0] != published[1]
