"""`backend=fsdp` and `backend=fsdp2`: both generations of PyTorch's FSDP, by verl's engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from trinity_sync.backends import option
from trinity_sync.config import Check, Get, Problem
from trinity_sync.config.model_checks import model_fields
from trinity_sync.config.schema import Config, FsdpConfig
from trinity_sync.errors import ConfigError
from trinity_sync.models.families import IMAGES, auto_class

if TYPE_CHECKING:
    from trinity_sync.backends.base import Engine, FsdpEngine
    from trinity_sync.backends.fsdp import FsdpBackend


def _check_fsdp_size(get: Get) -> Iterator[Problem]:
    ranks, size = get("backend.ranks"), get("backend.fsdp_size")
    if size == 0 or (size > 0 and ranks % size):
        yield Problem("backend.fsdp_size", f"is {size}; must divide backend.ranks ({ranks}), or be -1 for all ranks")
    elif size == 1 and ranks > 1 and get("backend.strategy") == "fsdp":
        yield Problem(
            "backend.fsdp_size",
            f"is 1 with {ranks} ranks of fsdp, whose copies of the weights drift apart without an error; "
            "set backend.fsdp_size=-1, or use backend=fsdp2",
        )


def _check_images(get: Get) -> Iterator[Problem]:
    """Check that weight decay does not change a vision tower, whose gradients from texts are zero at most."""
    model, decay = model_fields(get), get("trainer.weight_decay")
    adapter = get("model.lora.rank") or get("model.lora.path")  # then nothing else is trained
    if decay and not adapter and auto_class(model) == IMAGES:
        yield Problem(
            "trainer.weight_decay",
            f"is {decay}, which would shrink the vision tower of model_type {model['model_type']}, as texts do not "
            "train it; set it to 0",
        )


@dataclass(kw_only=True)
class FsdpOption(FsdpConfig, option.BackendOption):
    """FSDP1 and FSDP2; `strategy` says which."""

    checks: ClassVar[tuple[Check, ...]] = (_check_fsdp_size, _check_images, option.check_sharing, option.check_packing)
    engine_config: ClassVar[str | None] = "FSDPEngineConfig"
    engine_keys: ClassVar[Mapping[str, str]] = {
        "dtype": "backend.param_dtype",
        "model_dtype": "backend.master_dtype",
        "mixed_precision": "backend.param_dtype and backend.reduce_dtype",
        "ulysses_sequence_parallel_size": "backend.sp",
    }
    useless: ClassVar[Mapping[str, str]] = {
        **option.BackendOption.useless,
        "entropy_from_logits_with_chunking": option.PACKED,
        "entropy_from_logits_chunk_size": option.PACKED,
    }
    trains_adapters: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"fsdp", "fsdp2"})

    @classmethod
    def sharing_ranks(cls, get: Get) -> tuple[int, str] | None:
        ranks, sharing = get("backend.ranks"), get("backend.sp")
        if sharing == 1:
            return super().sharing_ranks(get)
        if ranks % sharing:
            return None  # `check_sharing` reports it
        return ranks // sharing, "data-parallel ranks (backend.ranks / backend.sp)"

    @property
    def compute_dtype(self) -> str:
        return self.param_dtype

    def engine_fields(self, cfg: Config) -> option.ConfigFields:
        return {
            "strategy": self.strategy,
            "fsdp_size": self.fsdp_size,
            "ulysses_sequence_parallel_size": self.sp,
            "model_dtype": self.master_dtype,
            "mixed_precision": {
                "param_dtype": self.param_dtype,
                "reduce_dtype": self.reduce_dtype,
                "buffer_dtype": "fp32",
            },
            **option.shared_fields(cfg),
            "use_torch_compile": False,
            "wrap_policy": {"min_num_params": 0},
            **cfg.backend.overrides,
        }

    def optimizer_fields(self, cfg: Config) -> option.ConfigFields:
        return {**option.adam_fields(cfg), "lr_scheduler_type": cfg.trainer.lr_scheduler}

    def check_resume(self, checkpoint: Path, saved_by: str, ranks: int) -> str | None:
        if (saved_by, ranks) == (self.strategy, self.ranks):
            return None
        if not (checkpoint / "actor" / "dcp").is_dir():
            raise ConfigError(
                f"{checkpoint} was saved by backend={saved_by} on backend.ranks={ranks}, this run asks for "
                f"backend={self.strategy} on backend.ranks={self.ranks}; verl's shard files need the same engine and "
                f"ranks (a run with checkpoint.format=dcp can be resumed on others)"
            )
        if ranks == self.ranks:
            return None
        return (
            f"{checkpoint} was saved by {ranks} trainer ranks; weights and optimizer are the same on "
            f"{self.ranks}, the random numbers of a rank are not"
        )

    def engine_configs(self, engine: Mapping[str, object], optimizer: Mapping[str, object]) -> tuple[object, object]:
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig

        return FSDPEngineConfig(**engine), FSDPOptimizerConfig(**optimizer)

    def reference_fields(self, engine: Mapping[str, object]) -> option.ConfigFields:
        import torch

        # verl keeps a model for inference in pinned memory, which needs an accelerator. Without one the model gets an
        # optimizer, which is empty before its first step. The dtype stays that of the master weights: verl casts
        # buffers to it as well, and bf16 would change the frequencies of rotary embeddings.
        return {**engine, "forward_only": torch.cuda.is_available()}

    @property
    def ranks_per_sequence(self) -> int:
        return self.sp

    def packs(self, model: Mapping[str, object], attention: str, wanted: str) -> bool:
        if text := option.refused(wanted, self.sp, model, attention):
            raise ConfigError(" ".join(text))
        return wanted != "never" and option.unpackable(model, attention) is None

    def prepare(self) -> None:
        from trinity_sync.backends.fsdp import accumulate_without_unused

        accumulate_without_unused()

    def divide_in_fp32(self, engine: Engine) -> None:
        from trinity_sync.backends.fsdp import logits_in_fp32

        logits_in_fp32(cast("FsdpEngine", engine))

    def view(
        self, engine: Engine, wire_dtype: str, keep_fp32: Sequence[str] | None, *, merged: bool = False
    ) -> FsdpBackend:
        from trinity_sync.backends.fsdp import FsdpBackend

        return FsdpBackend(cast("FsdpEngine", engine), wire_dtype, keep_fp32, merged=merged)
