"""`backend=megatron`: megatron-core with mbridge, by verl's engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from trinity_sync.backends.megatron.megatron_families import FAMILIES, WITH_EXPERTS, check_layout, dense_layers
from trinity_sync.backends.option import PACKED, BackendOption, ConfigFields, adam_fields, check_unpadded, shared_fields
from trinity_sync.config import Check, Get, Problem
from trinity_sync.config.composition import section
from trinity_sync.config.model_checks import model_fields
from trinity_sync.config.schema import Config, MegatronConfig

if TYPE_CHECKING:
    from trinity_sync.backends.base import Engine, MegatronEngineProtocol
    from trinity_sync.backends.megatron.backend import MegatronBackend

_TRANSFORMER_KEYS = {name: "backend.dtype" for name in ("bf16", "fp16", "params_dtype", "pipeline_dtype")}
"""Fields of megatron-core's `TransformerConfig` that other keys set."""

_OF_TRANSFORMER, _OF_DDP = "override_transformer_config", "override_ddp_config"


def _check_ranks(get: Get) -> Iterator[Problem]:
    ranks, tp, pp = get("backend.ranks"), get("backend.tp"), get("backend.pp")
    if ranks % (tp * pp):
        yield Problem(
            "backend.ranks",
            f"is {ranks}; backend.tp x backend.pp ({tp} x {pp} = {tp * pp}) must divide it; "
            f"set backend.ranks={tp * pp} or another multiple, or a smaller backend.tp or backend.pp",
        )


def _check_model(get: Get) -> Iterator[Problem]:
    model = model_fields(get)
    family = model.get("model_type")
    if family is not None and family not in FAMILIES:
        yield Problem(
            "backend",
            f"is megatron, which trains models of the families {', '.join(FAMILIES)}; this one is {family}; "
            "use backend=fsdp2",
        )
    width = "moe_intermediate_size" if family in WITH_EXPERTS else "intermediate_size"
    cuts = {"backend.tp": ("num_attention_heads", "num_key_value_heads", width), "backend.pp": ("num_hidden_layers",)}
    for key, names in cuts.items():
        parts = get(key)
        uneven = [
            f"{name} ({model[name]})" for name in names if isinstance(model.get(name), int) and model[name] % parts
        ]
        if uneven:
            yield Problem(key, f"is {parts}; it must divide the model's {' and '.join(uneven)}")


def _check_experts(get: Get) -> Iterator[Problem]:
    model = model_fields(get)
    ranks, shared, ep = get("backend.ranks"), get("backend.tp") * get("backend.pp"), get("backend.ep")
    if ranks % shared == 0 and (ranks // shared) % ep:
        yield Problem(
            "backend.ep",
            f"is {ep}; it must divide the data-parallel ranks, backend.ranks / (backend.tp x backend.pp) = "
            f"{ranks // shared}",
        )
    if not model:
        return
    if model.get("model_type") not in WITH_EXPERTS:
        if ep > 1:
            yield Problem(
                "backend.ep", f"is {ep}, and this model ({model.get('model_type')}) has no experts; set it to 1"
            )
        return
    experts = model.get("num_experts")
    if isinstance(experts, int) and experts % ep:
        yield Problem("backend.ep", f"is {ep}; it must divide the model's num_experts ({experts})")
    tp = get("backend.tp")
    if tp > 1 and not get("backend.sequence_parallel"):
        yield Problem(
            "backend.sequence_parallel",
            f"is false; with experts and backend.tp={tp} megatron-core needs it, so set it to true",
        )
    mixed = [name for name, is_one in dense_layers(model).items() if is_one]
    if mixed:
        yield Problem(
            "backend",
            f"is megatron, which trains models with experts in every layer and several for a token; this one has "
            f"{', '.join(mixed)}; use backend=fsdp2",
        )


def _check_settings(get: Get) -> Iterator[Problem]:
    dtype, wire = get("backend.dtype"), get("sync.wire_dtype")
    if dtype != "bf16":
        yield Problem(
            "backend.dtype", f"is {dtype}; backend=megatron trains in bf16 (its optimizer keeps copies in fp32)"
        )
    elif wire != dtype:
        yield Problem(
            "sync.wire_dtype",
            f"is {wire}; backend=megatron publishes the weights it computes with, so set it to {dtype} (backend.dtype)",
        )
    warmup, steps = get("trainer.warmup_steps"), get("trainer.steps")
    if warmup == steps > 0 and get("trainer.total_epochs") is None:
        yield Problem(
            "trainer.warmup_steps",
            f"is {warmup}, as many as trainer.steps; backend=megatron needs less, set it to {steps - 1} or less",
        )
    form = get("checkpoint.format")
    if form != "verl":
        yield Problem(
            "checkpoint.format",
            f"is {form}, which is for fsdp and fsdp2; with backend=megatron verl's files are megatron-core's, which "
            "other layouts can load too, so set it to verl",
        )
    writers = get("checkpoint.save_strategy")
    if writers != "unrestricted":
        yield Problem(
            "checkpoint.save_strategy",
            f"is {writers}; the ranks of backend=megatron finish a checkpoint together, so set it to unrestricted",
        )
    for name in (_OF_TRANSFORMER, _OF_DDP):
        fields = get(f"backend.overrides.{name}")
        if fields is not None and not isinstance(fields, Mapping):
            yield Problem(f"backend.overrides.{name}", f"is {fields}; must hold fields of megatron-core's config")


@dataclass(kw_only=True)
class MegatronOption(MegatronConfig, BackendOption):
    """Tensor, pipeline, data and sequence parallel training."""

    checks: ClassVar[tuple[Check, ...]] = (
        _check_ranks,
        _check_model,
        _check_experts,
        _check_settings,
        partial(check_unpadded, "megatron"),
    )
    engine_config: ClassVar[str | None] = "McoreEngineConfig"
    engine_keys: ClassVar[Mapping[str, str]] = {
        "tensor_model_parallel_size": "backend.tp",
        "pipeline_model_parallel_size": "backend.pp",
        "expert_model_parallel_size": "backend.ep",
        "expert_tensor_parallel_size": "backend.tp",
        "dist_ckpt_optim_fully_reshardable": "backend.optimizer_format",
        "seed": "seed",
    }
    useless: ClassVar[Mapping[str, str]] = {
        **BackendOption.useless,
        "context_parallel_size": PACKED,
        "dynamic_context_parallel": PACKED,
        "max_seqlen_per_dp_cp_rank": PACKED,
    }
    reads: ClassVar[frozenset[str]] = frozenset({"megatron"})
    no_adapters: ClassVar[str] = (
        "is built on mbridge, which has no LoRA: verl trains adapters on Megatron through Megatron-Bridge alone"
    )
    writes_own_files: ClassVar[bool] = True

    @classmethod
    def sharing_ranks(cls, get: Get) -> tuple[int, str] | None:
        ranks, shared = get("backend.ranks"), get("backend.tp") * get("backend.pp")
        if ranks % shared:
            return None  # `_check_ranks` reports it
        return ranks // shared, "data-parallel ranks (backend.ranks / (backend.tp x backend.pp))"

    @classmethod
    def overridden(cls, get: Get) -> Iterator[tuple[str, str | None]]:
        yield from super().overridden(get)
        backend = get("backend")
        transformer = backend.overrides.get(_OF_TRANSFORMER)
        if isinstance(transformer, Mapping):
            named = {name: f"backend.{name}" for name in map(str, backend) if name != "overrides"}
            named |= {**cls.engine_keys, **_TRANSFORMER_KEYS}
            yield from ((f"{_OF_TRANSFORMER}.{name}", named.get(name)) for name in map(str, transformer))

    def engine_fields(self, cfg: Config) -> ConfigFields:
        overrides = cfg.backend.overrides
        transformer: ConfigFields = {
            # verl passes sequence_parallel to its other bridge only
            "sequence_parallel": self.sequence_parallel and self.tp > 1,
            # fused kernels that need Apex or come with Transformer Engine
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": False,
        }
        if cfg.trainer.gradient_checkpointing:
            transformer |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "sequence_parallel": self.sequence_parallel,
            "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[self.dtype],  # as verl names it
            "vanilla_mbridge": True,
            "seed": cfg.seed,
            "dist_ckpt_optim_fully_reshardable": self.optimizer_format == "fully_reshardable",
            **shared_fields(cfg),
            **overrides,
            _OF_TRANSFORMER: {**transformer, **section(overrides, _OF_TRANSFORMER)},
        }

    def optimizer_fields(self, cfg: Config) -> ConfigFields:
        trainer, ddp = cfg.trainer, section(cfg.backend.overrides, _OF_DDP)
        return {
            **adam_fields(cfg),
            "lr_decay_style": trainer.lr_scheduler,
            "use_checkpoint_opt_param_scheduler": False,  # schedule from the configuration, step from a checkpoint
            # verl does not pass its betas on, and megatron-core needs the overlap in both configs
            "override_optimizer_config": {
                "adam_beta1": trainer.betas[0],
                "adam_beta2": trainer.betas[1],
                "loss_scale": 1.0,  # it checks for non-finite gradients only where it scales them
                "overlap_param_gather": bool(ddp.get("overlap_param_gather", False)),
            },
        }

    def check_resume(self, checkpoint: Path, saved_by: str, ranks: int) -> str | None:
        return check_layout(self, checkpoint)

    def prepare(self) -> None:
        from trinity_sync.backends.megatron.megatron_engine import prepare

        prepare()

    def engine_configs(self, engine: Mapping[str, object], optimizer: Mapping[str, object]) -> tuple[object, object]:
        from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig

        return McoreEngineConfig(**engine), McoreOptimizerConfig(**optimizer)

    @contextmanager
    def random_numbers_kept(self) -> Iterator[None]:
        from trinity_sync.backends.megatron.writer import rng_state, set_rng_state

        before = rng_state()  # megatron-core has generators of its own
        try:
            yield
        finally:
            set_rng_state(before)

    def view(
        self, engine: Engine, wire_dtype: str, keep_fp32: Sequence[str] | None, *, merged: bool = False
    ) -> MegatronBackend:
        # megatron-core takes seconds to import
        from trinity_sync.backends.megatron.backend import MegatronBackend

        return MegatronBackend(
            cast("MegatronEngineProtocol", engine), wire_dtype, keep_fp32, restore_rng=self.restore_rng
        )
