"""Reading Megatron's checkpoints without megatron-core: files as its ranks write them, of small models."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel, Qwen3ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.checkpoint import written
from tests.checkpoint.test_reading import assert_reads
from tests.checkpoint.written import Tensors
from trinity_sync.checkpoint.reading import WeightsError, open_weights
from trinity_sync.weights.tensors import saved_tensors

EXPERTS, LAYERS = 4, 2
SIZES = written.SIZES | {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(5)
    if kind == "experts":
        config = Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=6)
        return Qwen3MoeForCausalLM(config)
    return Qwen3ForCausalLM(Qwen3ForCausalLM.config_class(**SIZES, tie_word_embeddings=kind == "tied"))


def as_megatron(model: PreTrainedModel) -> Tensors:
    """What megatron-core calls the tensors of a model, and how it joins them."""
    of = {name: tensor.detach() for name, tensor in saved_tensors(model).items()}
    padding = torch.full((1, SIZES["hidden_size"]), 7.0)

    def layers(name: str) -> torch.Tensor:
        return torch.stack([of[f"model.layers.{layer}.{name}.weight"] for layer in range(LAYERS)])

    groups = SIZES["num_key_value_heads"]
    heads = [layers(f"self_attn.{name}_proj").unflatten(1, (groups, -1)) for name in "qkv"]
    found = {
        "embedding.word_embeddings.weight": torch.cat([of["model.embed_tokens.weight"], padding]),
        "decoder.final_layernorm.weight": of["model.norm.weight"],
        "decoder.layers.self_attention.linear_qkv.weight": torch.cat(heads, 2).flatten(1, 2),
        "decoder.layers.self_attention.linear_proj.weight": layers("self_attn.o_proj"),
        "decoder.layers.self_attention.q_layernorm.weight": layers("self_attn.q_norm"),
        "decoder.layers.self_attention.k_layernorm.weight": layers("self_attn.k_norm"),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": layers("input_layernorm"),
    }
    if "lm_head.weight" in of:
        found["output_layer.weight"] = torch.cat([of["lm_head.weight"], padding])
    norm = layers("post_attention_layernorm")
    if "model.layers.0.mlp.gate.weight" not in of:
        wide = torch.cat([layers("mlp.gate_proj"), layers("mlp.up_proj")], 1)
        more = {"linear_fc1.layer_norm_weight": norm, "linear_fc1.weight": wide}
        more["linear_fc2.weight"] = layers("mlp.down_proj")
        return found | {f"decoder.layers.mlp.{name}": tensor for name, tensor in more.items()}

    def experts(name: str) -> torch.Tensor:
        return torch.stack([layers(f"mlp.experts.{number}.{name}_proj") for number in range(EXPERTS)], 1)

    return found | {
        "decoder.layers.pre_mlp_layernorm.weight": norm,
        "decoder.layers.mlp.router.weight": layers("mlp.gate"),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": torch.cat([experts("gate"), experts("up")], 2),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": experts("down"),
    }


def cut(whole: Tensors, sizes: tuple[int, int, int]) -> Tensors:
    """A rank's part, where pipeline, expert and tensor-parallel ranks share a model so."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "ep", "tp"))

    def part(name: str, tensor: torch.Tensor) -> DTensor:
        layer, expert = name.startswith("decoder.layers."), ".experts.experts." in name
        rows = layer + expert
        shared = name.endswith(("norm.weight", "norm_weight", "router.weight"))
        columns = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        placements = [
            Shard(0) if layer else Replicate(),
            Shard(1) if expert else Replicate(),
            Replicate() if shared else Shard(rows + columns),
        ]
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    return {name: part(name, tensor) for name, tensor in whole.items()}


def write(step: Path, kind: str, tensors: Tensors, sizes: tuple[int, int, int] = (LAYERS, EXPERTS, 2)) -> Tensors:
    """A checkpoint of a model, with these tensors; what `save_pretrained` of the model would write."""
    model, folder = model_of(kind), step / "actor" / "model"
    written.write_distributed(folder / "dist_ckpt", tensors, sizes, partial(cut, sizes=sizes))
    (folder / "dist_ckpt" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    written.write_companions(model, folder)
    return {name: tensor.detach() for name, tensor in saved_tensors(model).items()}


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_megatrons_checkpoints_hold_what_save_pretrained_would_write(tmp_path: Path, kind: str) -> None:
    expected = write(tmp_path, kind, as_megatron(model_of(kind)))
    assert_reads(open_weights(tmp_path), expected)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mtp.layers.0.weight", "lists mtp.layers.0.weight, which no known model has"),
        ("decoder.layers.mlp.shared_experts.linear_fc1.weight", "of layer 0 is not a tensor of a known model"),
        (
            "decoder.layers.mlp.experts.experts.linear_fc3.weight",
            "of layer 0 of expert 0 is not a tensor of a known model",
        ),
    ],
)
def test_names_that_cannot_be_mapped_are_refused(tmp_path: Path, name: str, told: str) -> None:
    tensors = as_megatron(model_of("experts"))
    write(tmp_path, "experts", {**tensors, name: torch.ones(LAYERS, EXPERTS, 8, 8)})
    with pytest.raises(WeightsError, match=name) as refused:
        open_weights(tmp_path)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("sizes", "told"), [((1, EXPERTS, 2), "pieces of several layers"), ((LAYERS, 2, 2), "pieces of several experts")]
)
def test_layers_or_experts_that_are_stored_in_one_piece_are_refused(
    tmp_path: Path, sizes: tuple[int, int, int], told: str
) -> None:
    write(tmp_path, "experts", as_megatron(model_of("experts")), sizes)
    with pytest.raises(WeightsError, match=f"is stored in {told}, which cannot be read"):
        open_weights(tmp_path)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    tensors = as_megatron(model_of("experts"))
    del tensors["decoder.layers.mlp.router.weight"]
    write(tmp_path, "experts", tensors)
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.mlp\.gate\.weight, .* is missing"):
        open_weights(tmp_path)
