"""Checkpoints in every format that is read, of small models and without engines.

The ranks are played one after another in this process, over a process group that only knows its size; so the files are
those that as many processes would write.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shard_file import write_shard_file
from trinity_sync.weights.shards import row_slice
from trinity_sync.weights.staging import stage
from trinity_sync.weights.tensors import from_torch, wire_name

SIZES = {
    "vocab_size": 23,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
}

Tensors = dict[str, torch.Tensor]


def small_model(kind: str) -> PreTrainedModel:
    """``tied``, ``untied``, or ``experts``, whose state dict holds several saved tensors as one. In float32."""
    torch.manual_seed(5)
    if kind == "experts":
        config = Qwen3MoeConfig(**SIZES, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=6)
        return Qwen3MoeForCausalLM(config)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=kind == "tied"))


def write_companions(model: PreTrainedModel, actor: Path) -> None:
    """The config of a model, as an engine leaves it."""
    folder = actor / "huggingface"
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Play one rank of several."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def dtensors(state: Mapping[str, torch.Tensor], mesh_sizes: Sequence[int]) -> Tensors:
    """A rank's state dict under FSDP2: cut along dimension 0 over the last dimension of the mesh, replicated else."""
    names = ("ddp", "fsdp")[-len(mesh_sizes) :]
    mesh = init_device_mesh("cpu", tuple(mesh_sizes), mesh_dim_names=names)
    placements = [*(Replicate() for _ in mesh_sizes[1:]), Shard(0)]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    cut: Tensors = {}
    for name, tensor in state.items():
        if not tensor.ndim:
            cut[name] = tensor
            continue
        chunks = tensor.detach().chunk(mesh_sizes[-1])
        local = chunks[coordinate[-1]] if coordinate[-1] < len(chunks) else tensor.detach()[:0]
        cut[name] = DTensor.from_local(
            local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return cut


def write_verl(
    actor: Path,
    state: Mapping[str, torch.Tensor],
    mesh_sizes: Sequence[int],
    change: Callable[[int, dict[str, Any]], None] = lambda rank, cut: None,
) -> list[Path]:
    """verl's files of FSDP2. `change` may alter what a rank writes."""
    actor.mkdir(parents=True, exist_ok=True)
    ranks = prod(mesh_sizes)
    files = [actor / f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    for rank, file in enumerate(files):
        with as_rank(rank, ranks):
            cut: dict[str, Any] = dict(dtensors(state, mesh_sizes))
            change(rank, cut)
            torch.save(cut, file)
    (actor / "fsdp_config.json").write_text(f'{{"FSDP_version": 2, "world_size": {ranks}}}')
    return files


def write_fsdp1(actor: Path, state: Mapping[str, torch.Tensor], ranks: int) -> None:
    """The files of FSDP1 without a device mesh, which hold ShardedTensors."""
    actor.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        with as_rank(rank, ranks):
            torch.save(sharded_tensors(state), actor / f"model_world_size_{ranks}_rank_{rank}.pt")


def sharded_tensors(state: Mapping[str, torch.Tensor]) -> Tensors:
    """A rank's state dict under FSDP1 without a device mesh, cut by FSDP1 itself."""
    from torch.distributed.distributed_c10d import _get_default_group
    from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

    rank, ranks, group = dist.get_rank(), dist.get_world_size(), _get_default_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: _create_chunk_sharded_tensor(tensor, rank, ranks, 1, group) for name, tensor in state.items()}


def write_parts(actor: Path, tensors: Mapping[str, torch.Tensor], ranks: int, wire: str | None = "BF16") -> list[Path]:
    """A weights-only checkpoint of this program."""
    actor.mkdir(parents=True, exist_ok=True)
    files = []
    for rank in range(ranks):
        shards, sources = [], {}
        for name, tensor in tensors.items():
            extent = tensor.shape[0] if tensor.ndim else 1
            start, stop = extent * rank // ranks, extent * (rank + 1) // ranks
            shards.append(row_slice(name, wire_name(from_torch(tensor.dtype), wire), tensor.shape, start, stop))
            sources[name] = (tensor[start:stop] if tensor.ndim else tensor.reshape(1)[start:stop]).detach()
        layout = PartLayout.build(f"rank-{rank:05d}", shards, 1 << 16)
        segment = bytearray(max(layout.nbytes, 1))
        stage(layout, sources, memoryview(segment))
        files.append(actor / f"weights_rank-{rank:05d}.safetensors")
        write_shard_file(files[-1], layout, segment, {}, fsync=False)
    return files


def write_distributed(
    folder: Path, state: Mapping[str, Any], mesh_sizes: Sequence[int], cut: Callable[[Tensors], Tensors] | None = None
) -> None:
    """A checkpoint of torch.distributed.checkpoint, each rank's part planned and written by torch itself.

    Args:
        state: whole tensors, and other things, which are written as they are.
        cut: makes a rank's tensors of the whole ones; as FSDP2 does by default.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    folder.mkdir(parents=True)
    ranks = prod(mesh_sizes)
    whole = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    writer = FileSystemWriter(folder)
    planners, plans = [], []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            planner = DefaultSavePlanner()
            local = cut(whole) if cut else dtensors(whole, mesh_sizes)
            planner.set_up_planner({**state, **local}, None, rank == 0)
            writer.set_up_storage_writer(rank == 0)
            planners.append(planner)
            plans.append(planner.create_local_plan())
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = []
    for planner, plan in zip(planners, plans, strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writer.finish(metadata, results)
