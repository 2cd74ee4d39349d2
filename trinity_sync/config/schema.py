"""The dataclasses that type the configuration. They carry ranges, never a default: those stand in `conf/`.

Each is a node `schema/<name>` of Hydra's ConfigStore, so an option file of your own gets the same types by naming it in
its defaults list: `- /schema/sync@_here_`. Those of what is trained, on what and how are in
`trinity_sync.config.training_schema`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from trinity_sync.config.fields import choice, number, seconds
from trinity_sync.config.retention import policy_schema
from trinity_sync.config.training_schema import (
    AlgorithmConfig,
    ConversationsConfig,
    CopyDigitsConfig,
    FileValidationConfig,
    GrpoConfig,
    JsonlConfig,
    LossValidationConfig,
    PairsConfig,
    SamplesConfig,
    SftConfig,
    TrainerConfig,
    ValidationConfig,
    VerlConfig,
)
from trinity_sync.protocol.retention import POLICIES

DTYPES = ("bf16", "fp32", "fp16")


@dataclass(kw_only=True)
class BackendConfig:
    """Keys that every training engine has."""

    _target_: str = MISSING
    strategy: str = MISSING
    ranks: int = number(at_least=1)
    param_offload: bool = MISSING
    optimizer_offload: bool = MISSING
    timeout_s: float = seconds(more_than=0)
    overrides: dict[str, Any] = MISSING


@dataclass(kw_only=True)
class FsdpConfig(BackendConfig):
    """FSDP1 and FSDP2 of PyTorch, through verl's engine."""

    fsdp_size: int = number(at_least=-1)
    sp: int = number(at_least=1)
    master_dtype: str = choice("fp32", "bf16")
    param_dtype: str = choice(*DTYPES)
    reduce_dtype: str = choice(*DTYPES)


@dataclass(kw_only=True)
class MegatronConfig(BackendConfig):
    """megatron-core, through verl's engine."""

    tp: int = number(at_least=1)
    pp: int = number(at_least=1)
    ep: int = number(at_least=1)
    sequence_parallel: bool = MISSING
    dtype: str = choice(*DTYPES)
    optimizer_format: str = choice("fully_reshardable", "dp_reshardable")
    restore_rng: bool = MISSING


@dataclass(kw_only=True)
class SyncConfig:
    """How versions of the weights reach the explorers."""

    _target_: str = MISSING
    mode: str = MISSING
    interval: int = number(at_least=1)
    max_staleness: int = number(at_least=0)
    what: str = choice("auto", "full", "adapter", "merged")
    encoding: str = choice("full")
    wire_dtype: str = choice(*DTYPES)
    keep_fp32: list[str] | None = MISSING
    bucket_mb: int = number(at_least=1)
    slots: int = number(at_least=2)
    verify: str = choice("full", "bucket", "off")
    timeout_s: float = seconds(more_than=0)
    lease_s: float = seconds(more_than=0)
    transport: str = choice("auto", "nccl", "gloo")
    shm_dir: str = MISSING
    durable: bool = MISSING


@dataclass(kw_only=True)
class RetentionConfig:
    """Which checkpoints stay: policy name to the fields of that policy."""

    policies: dict[str, Any] = MISSING


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where checkpoints go, how often, and in which format."""

    dir: str | None = MISSING
    interval: int = number(at_least=0)
    format: str = choice("verl", "dcp")
    snapshot: str = choice("lazy", "eager")
    resume_from: str | None = MISSING
    mirror: str | None = MISSING
    mirror_options: dict[str, Any] = MISSING
    mirror_keep: str = choice("same", "all")
    mirror_tries: int = number(at_least=1)
    mirror_backoff_s: float = seconds(more_than=0)
    mirror_timeout_s: float = seconds(more_than=0)
    mirror_wait_s: float = seconds(at_least=0)
    timeout_s: float = seconds(more_than=0)
    save_strategy: str = choice("unrestricted", "single_node", "single_process", "single_thread")
    fsync: bool = MISSING
    save_on_sigterm: bool = MISSING
    stop_s: float = seconds(more_than=0)
    monitor: dict[str, Any] = MISSING
    coordinator: dict[str, Any] = MISSING


@dataclass(kw_only=True)
class LoraConfig:
    """A low-rank adapter that is trained in place of the weights."""

    rank: int = number(at_least=0)
    alpha: int | None = number(at_least=1)
    targets: Any = MISSING
    path: str | None = MISSING


@dataclass(kw_only=True)
class ModelConfig:
    """The policy: a model in Hugging Face format, or the fields of a config that one is made from."""

    path: str | None = MISSING
    architecture: dict[str, Any] | None = MISSING
    shapes: str | None = MISSING
    layers: int | None = number(at_least=1)
    trust_remote_code: bool = MISSING
    attn_implementation: str = choice("sdpa", "eager", "flash_attention_2")
    lora: LoraConfig = MISSING


@dataclass(kw_only=True)
class WorkloadConfig:
    """What a run is for: `train`, or `bytes` with keys of its own."""

    kind: str = choice("train", "bytes")


@dataclass(kw_only=True)
class BytesConfig(WorkloadConfig):
    """Weights that change without training."""

    changed: float = number(at_least=0, at_most=1)
    master_dtype: str = choice("bf16", "fp32")
    optimizer: bool = MISSING


@dataclass(kw_only=True)
class ExplorerConfig:
    """The rollout replicas."""

    _target_: str = MISSING
    kind: str = MISSING
    replicas: int = number(at_least=1)
    max_restarts: int = number(at_least=0)
    dtype: str = choice(*DTYPES)
    temperature: float = number(at_least=0)
    top_k: int = number(at_least=0)
    top_p: float = number(more_than=0, at_most=1)
    batch_size: int = number(at_least=1)
    check_agreement: str = choice("refuse", "warn", "off")
    timeout_s: float = seconds(more_than=0)


@dataclass(kw_only=True)
class VllmConfig(ExplorerConfig):
    """Explorers that run vLLM."""

    tp: int = number(at_least=1)
    kv_cache_gb: int | None = number(at_least=1)
    eager: bool | None = MISSING
    on_update: str = choice("wait", "keep", "abort")
    engine: dict[str, Any] = MISSING


@dataclass(kw_only=True)
class VllmServerConfig(ExplorerConfig):
    """An explorer that asks a vLLM server."""

    url: str | None = MISSING


@dataclass(kw_only=True)
class ClusterConfig:
    """Where Ray runs."""

    address: str | None = MISSING
    num_cpus: int | None = number(at_least=1)
    object_store_mb: int = number(at_least=75)
    temp_dir: str | None = MISSING
    forks: bool = MISSING
    start_timeout_s: float = seconds(more_than=0)
    metrics: bool = MISSING


@dataclass(kw_only=True)
class TrackerConfig:
    """What every tracker has."""

    names: str = choice("ours", "verl")


@dataclass(kw_only=True)
class TensorboardConfig(TrackerConfig):
    """The TensorBoard tracker."""

    flush_s: float = seconds(more_than=0)


@dataclass(kw_only=True)
class WandbConfig(TrackerConfig):
    """The Weights & Biases tracker."""

    project: str = MISSING
    entity: str | None = MISSING
    mode: str = choice("online", "offline", "disabled")
    tags: list[str] = MISSING
    timeout_s: float = seconds(more_than=0)


@dataclass(kw_only=True)
class MlflowConfig(TrackerConfig):
    """The MLflow tracker."""

    experiment: str = MISSING
    uri: str | None = MISSING
    timeout_s: float = seconds(more_than=0)


@dataclass(kw_only=True)
class TrackioConfig(TrackerConfig):
    """The Trackio tracker."""

    project: str = MISSING
    folder: str | None = MISSING
    space: str | None = MISSING
    timeout_s: float = seconds(more_than=0)


@dataclass(kw_only=True)
class SwanlabConfig(TrackerConfig):
    """The SwanLab tracker."""

    project: str = MISSING
    workspace: str | None = MISSING
    mode: str = choice("online", "offline", "local", "disabled")
    tags: list[str] = MISSING
    timeout_s: float = seconds(more_than=0)


@dataclass(kw_only=True)
class Config:
    """A whole run. `task` may be a class of the user's own, so its option files type it, as they do trackers."""

    name: str = MISSING
    seed: int = number(at_least=0, at_most=2**32 - 1)
    live: str = choice("auto", "panel", "line", "off")
    workload: WorkloadConfig = MISSING
    backend: BackendConfig = MISSING
    sync: SyncConfig = MISSING
    retention: RetentionConfig = MISSING
    checkpoint: CheckpointConfig = MISSING
    model: ModelConfig = MISSING
    trainer: TrainerConfig = MISSING
    algorithm: AlgorithmConfig = MISSING
    task: Any = MISSING  # a dictionary for whoever reads it, see `typed`
    explorer: ExplorerConfig = MISSING
    samples: SamplesConfig = MISSING
    cluster: ClusterConfig = MISSING
    tracker: dict[str, Any] = field(default_factory=dict)


SCHEMA: dict[str, type] = {
    "root": Config,
    "workload": WorkloadConfig,
    "bytes": BytesConfig,
    "engine": BackendConfig,
    "fsdp": FsdpConfig,
    "megatron": MegatronConfig,
    "sync": SyncConfig,
    **{name: policy_schema(policy) for name, policy in POLICIES.items()},
    "checkpoint": CheckpointConfig,
    "model": ModelConfig,
    "trainer": TrainerConfig,
    "algorithm": AlgorithmConfig,
    "grpo": GrpoConfig,
    "sft": SftConfig,
    "copy_digits": CopyDigitsConfig,
    "jsonl": JsonlConfig,
    "verl": VerlConfig,
    "pairs": PairsConfig,
    "validation": ValidationConfig,
    "file_validation": FileValidationConfig,
    "loss_validation": LossValidationConfig,
    "conversations": ConversationsConfig,
    "explorer": ExplorerConfig,
    "vllm": VllmConfig,
    "vllm_server": VllmServerConfig,
    "samples": SamplesConfig,
    "cluster": ClusterConfig,
    "tensorboard": TensorboardConfig,
    "wandb": WandbConfig,
    "mlflow": MlflowConfig,
    "trackio": TrackioConfig,
    "swanlab": SwanlabConfig,
}
