"""The dataclasses that type the configuration. They carry ranges, never a default: those stand in `conf/`.

Each is a node `schema/<name>` of Hydra's ConfigStore, so an option file of your own gets the same types by naming it in
its defaults list: `- /schema/sync@_here_`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from trinity_sync.config.options import LABELS
from trinity_sync.protocol.quantities import QUANTITY
from trinity_sync.protocol.retention import POLICIES, Policy

DTYPES = ("bf16", "fp32", "fp16")

_LONGEST_S = 10**9
"""More than this, 30 years, is more than a wait for a lock takes."""


def _choice(*values: str) -> Any:
    return field(default=MISSING, metadata={"choices": values})


def _number(*, at_least: float | None = None, more_than: float | None = None, at_most: float | None = None) -> Any:
    bounds = {"at_least": at_least, "more_than": more_than, "at_most": at_most}
    return field(default=MISSING, metadata={name: bound for name, bound in bounds.items() if bound is not None})


def _seconds(*, at_least: float | None = None, more_than: float | None = None) -> Any:
    return _number(at_least=at_least, more_than=more_than, at_most=_LONGEST_S)


@dataclass(kw_only=True)
class BackendConfig:
    """Keys that every training engine has."""

    _target_: str = MISSING
    strategy: str = MISSING
    ranks: int = _number(at_least=1)
    param_offload: bool = MISSING
    optimizer_offload: bool = MISSING
    timeout_s: float = _seconds(more_than=0)
    overrides: dict[str, Any] = MISSING


@dataclass(kw_only=True)
class FsdpConfig(BackendConfig):
    """FSDP1 and FSDP2 of PyTorch, through verl's engine."""

    fsdp_size: int = _number(at_least=-1)
    master_dtype: str = _choice("fp32", "bf16")
    param_dtype: str = _choice(*DTYPES)
    reduce_dtype: str = _choice(*DTYPES)


@dataclass(kw_only=True)
class MegatronConfig(BackendConfig):
    """megatron-core, through verl's engine."""

    tp: int = _number(at_least=1)
    pp: int = _number(at_least=1)
    ep: int = _number(at_least=1)
    sequence_parallel: bool = MISSING
    dtype: str = _choice(*DTYPES)
    optimizer_format: str = _choice("fully_reshardable", "dp_reshardable")
    restore_rng: bool = MISSING


@dataclass(kw_only=True)
class SyncConfig:
    """How versions of the weights reach the explorers."""

    _target_: str = MISSING
    mode: str = MISSING
    interval: int = _number(at_least=1)
    max_staleness: int = _number(at_least=0)
    what: str = _choice("auto", "full", "adapter", "merged")
    encoding: str = _choice("full")
    wire_dtype: str = _choice(*DTYPES)
    keep_fp32: list[str] | None = MISSING
    bucket_mb: int = _number(at_least=1)
    slots: int = _number(at_least=2)
    verify: str = _choice("full", "bucket", "off")
    timeout_s: float = _seconds(more_than=0)
    lease_s: float = _seconds(more_than=0)
    transport: str = _choice("auto", "nccl", "gloo")
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
    interval: int = _number(at_least=0)
    format: str = _choice("verl", "dcp")
    snapshot: str = _choice("lazy", "eager")
    resume_from: str | None = MISSING
    mirror: str | None = MISSING
    mirror_options: dict[str, Any] = MISSING
    mirror_keep: str = _choice("same", "all")
    mirror_tries: int = _number(at_least=1)
    mirror_backoff_s: float = _seconds(more_than=0)
    mirror_timeout_s: float = _seconds(more_than=0)
    mirror_wait_s: float = _seconds(at_least=0)
    timeout_s: float = _seconds(more_than=0)
    save_strategy: str = _choice("unrestricted", "single_node", "single_process", "single_thread")
    fsync: bool = MISSING
    save_on_sigterm: bool = MISSING
    monitor: dict[str, Any] = MISSING
    coordinator: dict[str, Any] = MISSING


@dataclass(kw_only=True)
class LoraConfig:
    """A low-rank adapter that is trained in place of the weights."""

    rank: int = _number(at_least=0)
    alpha: int | None = _number(at_least=1)
    targets: Any = MISSING
    path: str | None = MISSING


@dataclass(kw_only=True)
class ModelConfig:
    """The policy: a model in Hugging Face format, or the fields of a config that one is made from."""

    path: str | None = MISSING
    architecture: dict[str, Any] | None = MISSING
    shapes: str | None = MISSING
    layers: int | None = _number(at_least=1)
    trust_remote_code: bool = MISSING
    attn_implementation: str = _choice("sdpa", "eager", "flash_attention_2")
    lora: LoraConfig = MISSING


@dataclass(kw_only=True)
class WorkloadConfig:
    """What a run is for: `train`, or `bytes` with keys of its own."""

    kind: str = _choice("train", "bytes")


@dataclass(kw_only=True)
class BytesConfig(WorkloadConfig):
    """Weights that change without training."""

    changed: float = _number(at_least=0, at_most=1)
    master_dtype: str = _choice("bf16", "fp32")
    optimizer: bool = MISSING


@dataclass(kw_only=True)
class TrainerConfig:
    """The training loop and its optimizer."""

    steps: int = _number(at_least=1)
    lr: float = _number(more_than=0)
    betas: list[float] = MISSING
    weight_decay: float = _number(at_least=0)
    clip_grad: float = _number(more_than=0)
    lr_scheduler: str = _choice("constant", "cosine")
    warmup_steps: int = _number(at_least=0)
    schedule: str = _choice("lockstep", "free")
    micro_batch_size: int = _number(at_least=1)
    mini_batches: int = _number(at_least=1)
    epochs: int = _number(at_least=1)
    gradient_checkpointing: bool = MISSING


@dataclass(kw_only=True)
class AlgorithmConfig:
    """What every algorithm has."""

    _target_: str = MISSING
    kind: str = MISSING


@dataclass(kw_only=True)
class GrpoConfig(AlgorithmConfig):
    """Group relative policy optimization."""

    prompts_per_step: int = _number(at_least=1)
    samples_per_prompt: int = _number(at_least=2)
    clip_ratio: float = _number(more_than=0, at_most=1)
    clip_ratio_high: float | None = _number(more_than=0)
    clip_ratio_c: float = _number(more_than=1)
    loss_agg_mode: str = _choice("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    normalise_advantages: bool = MISSING
    entropy_coeff: float = _number(at_least=0)


@dataclass(kw_only=True)
class SftConfig(AlgorithmConfig):
    """Supervised fine-tuning."""

    batch_size: int = _number(at_least=1)


@dataclass(kw_only=True)
class CopyDigitsConfig:
    """The default task."""

    _target_: str = MISSING
    digits: int = _number(at_least=1)
    response_length: int = _number(at_least=1)


@dataclass(kw_only=True)
class JsonlConfig:
    """Prompts from a file, judged by a function."""

    _target_: str = MISSING
    path: str = MISSING
    prompt_key: str = MISSING
    answer_key: str = MISSING
    shuffle: bool = MISSING
    reward: dict[str, Any] = MISSING
    prompt_length: int = _number(at_least=1)
    response_length: int = _number(at_least=1)


@dataclass(kw_only=True)
class PairsConfig:
    """Pairs of prompt and response from a file."""

    _target_: str = MISSING
    path: str = MISSING
    prompt_key: str = MISSING
    response_key: str = MISSING
    max_length: int = _number(at_least=2)


@dataclass(kw_only=True)
class ExplorerConfig:
    """The rollout replicas."""

    _target_: str = MISSING
    kind: str = MISSING
    replicas: int = _number(at_least=1)
    max_restarts: int = _number(at_least=0)
    dtype: str = _choice(*DTYPES)
    temperature: float = _number(at_least=0)
    top_k: int = _number(at_least=0)
    top_p: float = _number(more_than=0, at_most=1)
    batch_size: int = _number(at_least=1)
    timeout_s: float = _seconds(more_than=0)


@dataclass(kw_only=True)
class SamplesConfig:
    """What becomes of samples between explorers and trainer (`trainer.schedule=free`)."""

    over_stale: str = _choice("wait", "drop")
    buffer: int = _number(at_least=1)


@dataclass(kw_only=True)
class ClusterConfig:
    """Where Ray runs."""

    address: str | None = MISSING
    num_cpus: int | None = _number(at_least=1)
    object_store_mb: int = _number(at_least=75)
    temp_dir: str | None = MISSING
    forks: bool = MISSING
    start_timeout_s: float = _seconds(more_than=0)
    metrics: bool = MISSING


@dataclass(kw_only=True)
class TensorboardConfig:
    """The TensorBoard tracker."""

    flush_s: float = _seconds(more_than=0)


@dataclass(kw_only=True)
class WandbConfig:
    """The Weights & Biases tracker."""

    project: str = MISSING
    entity: str | None = MISSING
    mode: str = _choice("online", "offline", "disabled")
    tags: list[str] = MISSING
    timeout_s: float = _seconds(more_than=0)


@dataclass(kw_only=True)
class MlflowConfig:
    """The MLflow tracker."""

    experiment: str = MISSING
    uri: str | None = MISSING
    timeout_s: float = _seconds(more_than=0)


@dataclass(kw_only=True)
class TrackioConfig:
    """The Trackio tracker."""

    project: str = MISSING
    folder: str | None = MISSING
    space: str | None = MISSING
    timeout_s: float = _seconds(more_than=0)


@dataclass(kw_only=True)
class SwanlabConfig:
    """The SwanLab tracker."""

    project: str = MISSING
    workspace: str | None = MISSING
    mode: str = _choice("online", "offline", "local", "disabled")
    tags: list[str] = MISSING
    timeout_s: float = _seconds(more_than=0)


@dataclass(kw_only=True)
class Config:
    """A whole run. `task` may be a class of the user's own, so its option files type it, as they do trackers."""

    name: str = MISSING
    seed: int = _number(at_least=0, at_most=2**32 - 1)
    live: str = _choice("auto", "panel", "line", "off")
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


def _policy_schema(policy: type[Policy]) -> type:
    """What types the options of a retention policy: the class that is named, and the fields that it declares."""
    types = get_type_hints(policy)
    typed: list[tuple[str, Any, Any]] = [("_target_", str, field(default=MISSING))]
    for declared in fields(policy):  # type: ignore[arg-type]
        kind = int | float | str if QUANTITY in declared.metadata else types[declared.name]
        typed.append((declared.name, kind, field(default=MISSING)))
    return make_dataclass(policy.__name__, typed, kw_only=True)


SCHEMA: dict[str, type] = {
    "root": Config,
    "workload": WorkloadConfig,
    "bytes": BytesConfig,
    "engine": BackendConfig,
    "fsdp": FsdpConfig,
    "megatron": MegatronConfig,
    "sync": SyncConfig,
    **{name: _policy_schema(policy) for name, policy in POLICIES.items()},
    "checkpoint": CheckpointConfig,
    "model": ModelConfig,
    "trainer": TrainerConfig,
    "algorithm": AlgorithmConfig,
    "grpo": GrpoConfig,
    "sft": SftConfig,
    "copy_digits": CopyDigitsConfig,
    "jsonl": JsonlConfig,
    "pairs": PairsConfig,
    "explorer": ExplorerConfig,
    "samples": SamplesConfig,
    "cluster": ClusterConfig,
    "tensorboard": TensorboardConfig,
    "wandb": WandbConfig,
    "mlflow": MlflowConfig,
    "trackio": TrackioConfig,
    "swanlab": SwanlabConfig,
}


_PASSED_ON: tuple[tuple[type, str], ...] = (
    (BackendConfig, "overrides"),
    (CheckpointConfig, "mirror_options"),
    (CheckpointConfig, "monitor"),
    (CheckpointConfig, "coordinator"),
)
"""Keys that hold what is handed as it is to verl, to fsspec, or to the class that stands there."""


def register() -> None:
    """Give the schema to Hydra's ConfigStore and the resolver `sum` to OmegaConf. Runs when the package is imported."""
    store = ConfigStore.instance()
    for name, schema in SCHEMA.items():
        node = OmegaConf.structured(schema)
        for key in (key for owner, key in _PASSED_ON if issubclass(schema, owner)):
            # its keys are for others to check: any of them can be set without a '+' in front
            node[key] = {}
            node[key]._set_flag("struct", False)
        store.store(group="schema", name=name, node=node)
    # an option file of the user's own lists this where its class has keys that no option of ours has
    any_key = OmegaConf.create({}, flags={"struct": False})
    store.store(group="schema", name="own_keys", node=any_key)
    # and this comes when all option files have been read: what none has given is no setting, but with a '+' in front
    closed = OmegaConf.create({group: {} for group in LABELS} | {"backend": {"overrides": any_key}})
    for group in LABELS:
        closed[group]._set_flag("struct", True)
    store.store(group="schema", name="closed", node=closed)
    OmegaConf.register_new_resolver("sum", lambda *numbers: sum(numbers), replace=True)
