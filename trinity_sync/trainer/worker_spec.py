"""The plain values that a trainer rank is built from. The driver makes them, without transformers and without an
engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trinity_sync.backends.option import BackendOption, ConfigFields, backend_option
from trinity_sync.config import dtype_name
from trinity_sync.config.checks import sync_settings
from trinity_sync.config.lora_settings import Adapter, adapter_of, travels
from trinity_sync.config.schema import Config
from trinity_sync.errors import ConfigError
from trinity_sync.trainer.algorithms.base import Algorithm, algorithm_of
from trinity_sync.weights.shards import CoverageError, check_complete
from trinity_sync.weights.wire import WireFormat

if TYPE_CHECKING:
    from trinity_sync.actors.rank_client import RankInfo


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """The values that `TrinityWorker` builds its engine from.

    Attributes:
        backend: the part that depends on the training engine.
        engine, optimizer: fields of verl's engine and optimizer configs.
        model_path: folder in Hugging Face format, or a hub id.
        adapter: the adapter that is trained; None: all weights are.
        what: content of a version: ``full``, ``adapter`` or ``merged`` (`sync.what`).
        gradient_checkpointing: recompute activations in the backward pass.
        mini_batches, epochs: optimizer steps per training step, passes over the samples.
        micro_batch_size: most sequences per forward and backward and rank.
        max_tokens: most tokens, in place of that; None: no limit.
        balance_tokens: ranks train on about equally many tokens.
        remove_padding: ``auto``, ``always`` or ``never`` (`trainer.remove_padding`).
        reference: folder or hub id of the reference model; None: there is none, or it is the base of the adapter.
        temperature: of the sampler; log-probs are recomputed with it.
        deterministic: use kernels that give the same bits each time, where there are others.
        sync: the sync mode: its class and its keys.
        wire_dtype: dtype of floating parameters in versions, as safetensors names it.
        keep_fp32: parts of the names of parameters that stay in fp32; None: those that the model's class names.
        bucket_bytes: unit of transfer and checking.
        checkpoint_format: ``verl`` or ``dcp`` (`checkpoint.format`).
        lazy_snapshot: copy training states during the next forward and backward (`checkpoint.snapshot`).
        backend_timeout_s: limit of a collective of the engine's process group, seconds.
        log_dir: where the rank logs, None for Ray's own logs.
    """

    backend: BackendOption
    engine: ConfigFields = field(default_factory=dict)
    optimizer: ConfigFields = field(default_factory=dict)
    model_path: str
    attn_implementation: str
    trust_remote_code: bool
    adapter: Adapter | None = None
    what: str = "full"
    gradient_checkpointing: bool
    algorithm: Algorithm
    mini_batches: int
    epochs: int
    micro_batch_size: int
    max_tokens: int | None = None
    balance_tokens: bool = False
    remove_padding: str = "never"
    reference: str | None = None
    temperature: float
    seed: int
    deterministic: bool
    sync: Mapping[str, object]
    wire_dtype: str
    keep_fp32: Sequence[str] | None = None
    bucket_bytes: int
    checkpoint_format: Literal["verl", "dcp"]
    lazy_snapshot: bool
    backend_timeout_s: float
    log_dir: str | None = None


def check_whole(infos: Sequence[RankInfo], backend: str) -> None:
    """Check that the ranks together publish everything that `save_pretrained` of their model would write. `infos`: of
    all ranks.
    """
    saved = next((info.saved for info in infos if info.saved is not None), None)
    assert saved is not None, "rank 0 has the names of all tensors"
    layouts = [info.layout for info in infos if info.layout is not None]
    try:
        check_complete([layout.shards for layout in layouts], saved)
    except CoverageError as error:
        raise ConfigError(
            f"backend={backend} cannot publish this model: what its ranks hold is not what save_pretrained would "
            f"write, {error}; choose another model or backend"
        ) from error


def published_wire(infos: Sequence[RankInfo], wire_dtype: str) -> WireFormat:
    """Return the dtypes in which the ranks publish, for manifests. `infos`: of all ranks."""
    saved = next(info.saved for info in infos if info.saved is not None)
    return WireFormat.seen(dtype_name(wire_dtype), {name: dtype for name, (dtype, _) in saved.items()})


def worker_spec(cfg: Config, model_path: str, log_dir: str, given: str | None = None) -> WorkerSpec:
    """Make the spec of a rank from a checked config. `log_dir`: folder of the ranks' logs."""
    backend, trainer, algorithm = backend_option(cfg.backend), cfg.trainer, algorithm_of(cfg.algorithm)
    adapter = adapter_of(cfg.model.lora)
    reference = algorithm.reference_path or (None if adapter else given or model_path)
    return WorkerSpec(
        backend=backend,
        engine=backend.engine_fields(cfg),
        optimizer=backend.optimizer_fields(cfg),
        model_path=model_path,
        attn_implementation=cfg.model.attn_implementation,
        trust_remote_code=cfg.model.trust_remote_code,
        adapter=adapter,
        what=travels(cfg),
        gradient_checkpointing=trainer.gradient_checkpointing,
        algorithm=algorithm,
        mini_batches=trainer.mini_batches,
        epochs=trainer.epochs,
        micro_batch_size=trainer.micro_batch_size,
        max_tokens=trainer.max_tokens,
        balance_tokens=trainer.balance_tokens,
        remove_padding=trainer.remove_padding,
        reference=reference if algorithm.needs_reference else None,
        temperature=cfg.explorer.temperature,
        seed=cfg.seed,
        deterministic=trainer.deterministic and trainer.schedule == "lockstep",
        sync=sync_settings(vars(cfg.sync), cfg.explorer.kind),
        wire_dtype=dtype_name(cfg.sync.wire_dtype),
        keep_fp32=cfg.sync.keep_fp32,
        bucket_bytes=cfg.sync.bucket_mb * 2**20,
        checkpoint_format="dcp" if cfg.checkpoint.format == "dcp" else "verl",
        lazy_snapshot=cfg.checkpoint.snapshot == "lazy",
        backend_timeout_s=cfg.backend.timeout_s,
        log_dir=log_dir,
    )
