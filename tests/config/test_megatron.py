"""The checks on `backend=megatron`: layouts against ranks and model, and what it cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.test_checks import refused
from tests.families import EXPERTS, FAMILIES
from tests.model_folders import bare_model
from trinity_sync.config import check, compose, typed
from trinity_sync.trainer.worker_spec import worker_spec


@pytest.mark.parametrize(
    "layout",
    [(2, 2, 1), (2, 1, 2), (2, 1, 1), (4, 2, 2), (4, 2, 1), (4, 1, 2), (1, 1, 1)],
    ids=lambda layout: "x".join(map(str, layout)),
)
def test_layouts_that_fit_the_ranks_pass(layout: tuple[int, int, int]) -> None:
    ranks, tp, pp = layout
    check(compose(["backend=megatron", f"backend.ranks={ranks}", f"backend.tp={tp}", f"backend.pp={pp}"]))


@pytest.mark.parametrize(
    "layout",
    [(1, 1, 1, 1), (2, 1, 1, 2), (4, 1, 1, 2), (4, 2, 1, 2), (4, 1, 2, 2), (4, 1, 1, 4)],
    ids=lambda layout: "x".join(map(str, layout)),
)
def test_layouts_that_fit_the_experts_pass(layout: tuple[int, int, int, int]) -> None:
    ranks, tp, pp, ep = layout
    sizes = [f"backend.ranks={ranks}", f"backend.tp={tp}", f"backend.pp={pp}", f"backend.ep={ep}"]
    cfg = compose(["backend=megatron", *sizes, *EXPERTS])
    check(cfg)
    assert worker_spec(typed(cfg), "model", "logs").engine["expert_model_parallel_size"] == ep


@pytest.mark.parametrize(
    ("overrides", "key", "right"),
    [
        (["backend.ep=2", "model.architecture.num_experts=3"], "backend.ep", "num_experts (3)"),
        (["backend.ranks=2", "backend.ep=4"], "backend.ep", "data-parallel ranks"),
        (["backend.ranks=4", "backend.tp=2", "backend.ep=4"], "backend.ep", "(backend.tp x backend.pp) = 2"),
        (["backend.ep=0"], "backend.ep", "must be at least 1"),
        (["backend.tp=2", "model.architecture.moe_intermediate_size=23"], "backend.tp", "moe_intermediate_size (23)"),
        (["backend.tp=2", "backend.sequence_parallel=false"], "backend.sequence_parallel", "set it to true"),
        (["+model.architecture.mlp_only_layers=[0]"], "backend", "mlp_only_layers; use backend=fsdp2"),
        (["+model.architecture.decoder_sparse_step=2"], "backend", "decoder_sparse_step"),
        (
            ["model.architecture.num_experts_per_tok=1"],
            "backend",
            "num_experts_per_tok=1",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_experts_that_cannot_be_laid_out_so_are_refused(overrides: list[str], key: str, right: str) -> None:
    message = refused("backend=megatron", *EXPERTS, *overrides)
    assert message.startswith(f"{key} ")
    assert right in message


@pytest.mark.parametrize(
    ("overrides", "key", "right"),
    [
        (["backend.tp=2", "backend.pp=2"], "backend.ranks", "2 x 2 = 4"),
        (["backend.ranks=3", "backend.tp=2"], "backend.ranks", "must divide it"),
        (["backend.ranks=8", "backend.tp=8"], "backend.tp", "num_attention_heads (4)"),
        (["backend.ranks=4", "backend.tp=4"], "backend.tp", "num_key_value_heads (2)"),
        (["backend.ranks=4", "backend.pp=4"], "backend.pp", "num_hidden_layers (2)"),
        (["backend.tp=2", "model.architecture.intermediate_size=255"], "backend.tp", "intermediate_size (255)"),
        (["backend.ep=2"], "backend.ep", "has no experts; set it to 1"),
        (["model.lora.rank=8"], "model.lora.rank", "mbridge, which has no LoRA"),
        (["backend.dtype=fp32"], "backend.dtype", "trains in bf16"),
        (["backend.dtype=fp16"], "backend.dtype", "trains in bf16"),
        (["sync.wire_dtype=fp32", "explorer.dtype=fp32"], "sync.wire_dtype", "set it to bf16"),
        (["model.architecture.model_type=gpt2"], "backend", "llama, qwen2, qwen3, qwen3_moe"),
        (["trainer.warmup_steps=140"], "trainer.warmup_steps", "139 or less"),
        (["checkpoint.format=dcp"], "checkpoint.format", "set it to verl"),
        (["checkpoint.save_strategy=single_process"], "checkpoint.save_strategy", "unrestricted"),
        (["backend.optimizer_format=flat"], "backend.optimizer_format", "fully_reshardable, dp_reshardable"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_with_its_key(overrides: list[str], key: str, right: str) -> None:
    message = refused("backend=megatron", *overrides)
    assert message.startswith(f"{key} ")
    assert right in message


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama", "qwen2", "qwen3", "qwen3_moe"}))
def test_other_families_are_refused_by_name(family: str) -> None:
    attention = "model.attn_implementation=eager"  # which all of them have
    message = refused("backend=megatron", f"model.architecture.model_type={family}", attention)
    assert message.startswith("backend is megatron, which trains models of the families llama, qwen2, qwen3, qwen3_moe")
    assert f"this one is {family}; use backend=fsdp2" in message


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("dtype=float16", "backend.dtype"),
        ("tensor_model_parallel_size=2", "backend.tp"),
        ("pp=2", "backend.pp"),
        ("expert_model_parallel_size=2", "backend.ep"),
        ("expert_tensor_parallel_size=1", "backend.tp"),
        ("dist_ckpt_optim_fully_reshardable=false", "backend.optimizer_format"),
        ("seed=3", "seed"),
        ("override_transformer_config.params_dtype=float16", "backend.dtype"),
        ("override_transformer_config.sequence_parallel=true", "backend.sequence_parallel"),
    ],
)
def test_a_field_of_the_engine_that_has_a_key_is_not_set_past_it(override: str, key: str) -> None:
    name = override.partition("=")[0]
    assert refused("backend=megatron", f"+backend.overrides.{override}") == (
        f"backend.overrides.{name} would take the place of {key}; set that instead"
    )


@pytest.mark.parametrize("name", ["override_transformer_config", "override_ddp_config"])
def test_fields_of_megatrons_config_that_have_no_values_are_refused(name: str) -> None:
    assert refused("backend=megatron", f"backend.overrides.{name}=[overlap_param_gather]") == (
        f"backend.overrides.{name} is ['overlap_param_gather']; must hold fields of megatron-core's config"
    )


def test_a_batch_is_shared_out_over_the_data_parallel_ranks_only() -> None:
    sizes = ["algorithm.prompts_per_step=3", "algorithm.samples_per_prompt=3", "explorer.replicas=1"]
    check(compose(["backend=megatron", "backend.tp=2", *sizes]))
    message = refused("backend=megatron", *sizes)
    assert message.startswith("algorithm.prompts_per_step ")
    assert "data-parallel ranks" in message


def test_the_models_folder_is_looked_into(tmp_path: Path) -> None:
    bare_model(tmp_path, model_type="llama", num_hidden_layers=3)
    message = refused("backend=megatron", "backend.pp=2", f"model.path={tmp_path}")
    assert message.startswith("backend.pp ")
    assert "num_hidden_layers (3)" in message
    bare_model(tmp_path, model_type="mamba")
    assert "mamba" in refused("backend=megatron", f"model.path={tmp_path}")


def test_dtype_and_generators_are_those_of_the_configuration() -> None:
    cfg = compose(["backend=megatron"])
    assert worker_spec(typed(cfg), "model", "logs").engine["dtype"] == "bfloat16"
    assert worker_spec(typed(cfg), "model", "logs").backend.restore_rng
    cfg = compose(["backend=megatron", "backend.dtype=fp16", "backend.restore_rng=false"])  # which `check` refuses
    assert worker_spec(typed(cfg), "model", "logs").engine["dtype"] == "float16"
    assert not worker_spec(typed(cfg), "model", "logs").backend.restore_rng


def test_verls_settings_reach_its_configs() -> None:
    late = "backend.overrides.override_ddp_config={overlap_param_gather: true, overlap_grad_reduce: true}"
    cfg = compose(["backend=megatron", "backend.tp=2", late, "trainer.gradient_checkpointing=true"])
    spec = worker_spec(typed(cfg), "model", "logs")
    assert spec.engine["tensor_model_parallel_size"] == 2
    assert spec.engine["override_transformer_config"]["sequence_parallel"]
    assert spec.engine["override_transformer_config"]["recompute_granularity"] == "full"
    assert spec.engine["override_ddp_config"]["overlap_param_gather"]
    assert spec.optimizer["override_optimizer_config"] == {
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "loss_scale": 1.0,
        "overlap_param_gather": True,
    }
