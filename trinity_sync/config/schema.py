"""The dataclasses that type the configuration. They carry ranges, never defaults: those are in `conf/`. Each is a node
`schema/<name>` of Hydra's ConfigStore, so a user's option file gets the same types by an entry in its defaults list: `-
/schema/sync@_here_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from trinity_sync.config.composition import plain, register_resolvers
from trinity_sync.config.lookup import LABELS, TARGET, load_class
from trinity_sync.config.overrides import accept_short_rewards
from trinity_sync.errors import WaitLimit
from trinity_sync.host.references import Settings, Value
from trinity_sync.protocol.retention import POLICIES, QUANTITY, Policy, make_policy, policy_named

# -- fields


if TYPE_CHECKING:
    Option: TypeAlias = Settings
    """An option with a schema of its own, as plain values after `typed`."""
    Texts: TypeAlias = str | list[str]
    OptionalTexts: TypeAlias = str | list[str] | None
else:
    Option = Any
    # OmegaConf has no unions of containers
    Texts, OptionalTexts = Annotated[Option, "text or list"], Annotated[Option, "text or list, or null"]


LONGEST_S = 10**9
"""About 30 years: locks take no longer timeout."""


def choice(*values: str) -> Any:
    """Declare a text that is one of these values."""
    return field(default=MISSING, metadata={"choices": values})


def number(*, at_least: float | None = None, more_than: float | None = None, at_most: float | None = None) -> Any:
    """Declare a number within these bounds."""
    bounds = {"at_least": at_least, "more_than": more_than, "at_most": at_most}
    return field(default=MISSING, metadata={name: bound for name, bound in bounds.items() if bound is not None})


seconds = partial(number, at_most=LONGEST_S)
"""Declares a duration of at most `LONGEST_S`."""


# -- the groups trainer, algorithm, task and samples


TOO_LONG = ("refuse", "filter", "truncate")
"""What is done with rows that have too many tokens."""


@dataclass(kw_only=True)
class TrainerConfig:
    """The training loop and its optimizer."""

    steps: int = number(at_least=0)
    total_epochs: int | None = number(at_least=1)
    lr: float = number(more_than=0)
    betas: list[float] = MISSING
    weight_decay: float = number(at_least=0)
    clip_grad: float = number(more_than=0)
    lr_scheduler: str = choice("constant", "cosine")
    warmup_steps: int = number(at_least=0)
    schedule: str = choice("lockstep", "free")
    deterministic: bool = MISSING
    micro_batch_size: int = number(at_least=1)
    max_tokens: int | None = number(at_least=1)
    balance_tokens: bool = MISSING
    remove_padding: str = choice("auto", "always", "never")
    mini_batches: int = number(at_least=1)
    epochs: int = number(at_least=1)
    gradient_checkpointing: bool = MISSING
    max_restarts: int = number(at_least=0)
    restart_window_s: float = seconds(more_than=0)


@dataclass(kw_only=True)
class AlgorithmConfig:
    """Keys of every algorithm."""

    _target_: str = MISSING
    kind: str = MISSING


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """Importance weights and rejection of samples whose log-probs differ from the trainer's; keys as in verl."""

    rollout_is: str | None = choice("token", "sequence")
    rollout_is_threshold: float = number(more_than=0)
    rollout_rs: str | None = MISSING
    rollout_rs_threshold: str | None = MISSING


@dataclass(kw_only=True)
class PolicyLossConfig:
    """Parameters of single policy losses of verl; keys as in verl."""

    clip_cov_ratio: float = number(more_than=0, at_most=1)
    clip_cov_lb: float = MISSING
    clip_cov_ub: float = MISSING
    kl_cov_ratio: float = number(more_than=0, at_most=1)
    ppo_kl_coef: float = number(at_least=0)
    dro_beta: float = number(more_than=0)
    tau_pos: float = number(more_than=0)
    tau_neg: float = number(more_than=0)


@dataclass(kw_only=True)
class InRewardConfig:
    """The KL penalty in rewards; the last three keys as in verl."""

    coeff: float = number(at_least=0)
    estimator: str = choice("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
    type: str = choice("fixed", "adaptive")
    target_kl: float = number(more_than=0)
    horizon: int = number(at_least=1)


@dataclass(kw_only=True)
class KlConfig:
    """The distance of the policy from a reference."""

    coeff: float = number(at_least=0)
    estimator: str = choice("kl", "k1", "k1+", "abs", "mse", "k2", "low_var_kl", "low_var_kl+", "k3", "k3+")
    reference: str | None = MISSING
    measure: bool = MISSING
    in_reward: InRewardConfig = MISSING


@dataclass(kw_only=True)
class OverlongConfig:
    """A penalty on responses near the longest allowed length."""

    buffer: int = number(at_least=0)
    penalty: float = number(more_than=0)


@dataclass(kw_only=True)
class FilterGroupsConfig:
    """Groups that are dropped, and replaced by other prompts; all keys but the last as in verl."""

    enable: bool = MISSING
    metric: str = choice("reward", "score", "acc")
    max_num_gen_batches: int = number(at_least=1)
    on_shortage: str = choice("fill", "stop")


@dataclass(kw_only=True)
class GrpoConfig(AlgorithmConfig):
    """Group relative policy optimization."""

    prompts_per_step: int = number(at_least=1)
    samples_per_prompt: int = number(at_least=2)
    clip_ratio: float = number(more_than=0, at_most=1)
    clip_ratio_high: float | None = number(more_than=0)
    clip_ratio_c: float = number(more_than=1)
    loss_mode: str = choice(
        "vanilla", "gspo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "sapo", "dppo_tv", "dppo_kl", "dro"
    )
    policy_loss: PolicyLossConfig = MISSING
    loss_agg_mode: str = choice(
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"
    )
    loss_scale_factor: int | None = number(at_least=1)
    normalise_advantages: bool = MISSING
    overlong: OverlongConfig = MISSING
    filter_groups: FilterGroupsConfig = MISSING
    kl: KlConfig = MISSING
    old_log_probs: str = choice("auto", "sampler", "recomputed")
    entropy_coeff: float = number(at_least=0)
    calculate_entropy: bool = MISSING
    rollout_correction: RolloutCorrectionConfig = MISSING


@dataclass(kw_only=True)
class SftConfig(AlgorithmConfig):
    """Supervised fine-tuning."""

    batch_size: int = number(at_least=1)


@dataclass(kw_only=True)
class ValidationTimesConfig:
    """When a validation takes place."""

    interval: int = number(at_least=0)
    at_start: bool = MISSING


@dataclass(kw_only=True)
class ValidationConfig(ValidationTimesConfig):
    """When explorers answer validation prompts, and how."""

    prompts: int | None = number(at_least=1)
    samples_per_prompt: int = number(at_least=1)
    temperature: float = number(at_least=0)


@dataclass(kw_only=True)
class FileValidationConfig(ValidationConfig):
    """The same, with prompts from files."""

    path: OptionalTexts = MISSING


@dataclass(kw_only=True)
class LossValidationConfig(ValidationTimesConfig):
    """When the trainer measures the loss of held-out rows."""

    path: OptionalTexts = MISSING
    rows: int | None = number(at_least=1)


@dataclass(kw_only=True)
class CopyDigitsConfig:
    """The default task."""

    _target_: str = MISSING
    digits: int = number(at_least=1)
    response_length: int = number(at_least=1)
    validation: ValidationConfig = MISSING


@dataclass(kw_only=True)
class PromptFileConfig:
    """Prompts from files."""

    _target_: str = MISSING
    path: Texts = MISSING
    prompt_key: str = MISSING
    shuffle: bool = MISSING
    reward: Settings = MISSING
    prompt_length: int = number(at_least=1)
    response_length: int = number(at_least=1)
    too_long: str = choice(*TOO_LONG)
    chat_template: Settings = MISSING
    validation: FileValidationConfig = MISSING


@dataclass(kw_only=True)
class JsonlConfig(PromptFileConfig):
    """Prompts from files, with a reward function."""

    answer_key: str | None = MISSING


@dataclass(kw_only=True)
class VerlConfig(PromptFileConfig):
    """verl's data and rewards."""

    _convert_: str = MISSING


@dataclass(kw_only=True)
class ResponseFileConfig:
    """Prompts with their responses from files."""

    _target_: str = MISSING
    path: Texts = MISSING
    max_length: int = number(at_least=2)
    too_long: str = choice(*TOO_LONG)
    chat_template: Settings = MISSING
    validation: LossValidationConfig = MISSING


@dataclass(kw_only=True)
class PairsConfig(ResponseFileConfig):
    """Pairs of prompt and response from files."""

    prompt_key: str = MISSING
    response_key: str = MISSING


@dataclass(kw_only=True)
class ConversationsConfig(ResponseFileConfig):
    """Conversations from files."""

    messages_key: str = MISSING
    tools_key: str = MISSING
    enable_thinking_key: str = MISSING
    ignore_input_ids_mismatch: bool = MISSING


@dataclass(kw_only=True)
class SamplesConfig:
    """Samples between explorers and trainer, and which of them are recorded."""

    record_interval: int = number(at_least=0)
    record_groups: int = number(at_least=1)
    journal: bool = MISSING
    journal_mb: int = number(at_least=1)
    over_stale: str = choice("wait", "drop")
    buffer: int = number(at_least=1)


DTYPES = ("bf16", "fp32", "fp16")


@dataclass(kw_only=True)
class BackendConfig:
    """Keys of every training engine."""

    _target_: str = MISSING
    strategy: str = MISSING
    ranks: int = number(at_least=1)
    param_offload: bool = MISSING
    optimizer_offload: bool = MISSING
    timeout_s: float = seconds(more_than=0)
    overrides: Settings = MISSING


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
class DeltaConfig:
    """How deltas between versions are made."""

    full_every: int = number(at_least=1)
    codec: str = choice("auto", "class_gap", "gap8z", "sparse", "full")


@dataclass(kw_only=True)
class SyncConfig:
    """How versions of the weights reach the explorers."""

    _target_: str = MISSING
    mode: str = MISSING
    interval: int = number(at_least=1)
    max_staleness: int = number(at_least=0)
    what: str = choice("auto", "full", "adapter", "merged")
    encoding: str = choice("full", "delta", "auto")
    delta: DeltaConfig = MISSING
    wire_dtype: str = choice(*DTYPES)
    keep_fp32: list[str] | None = MISSING
    bucket_mb: int = number(at_least=1)
    store: str | None = MISSING
    slots: int = number(at_least=2)
    verify: str = choice("full", "bucket", "off")
    timeout_s: float = seconds(more_than=0)
    min_rate_mbps: float | None = number(more_than=0)
    lease_s: float = seconds(more_than=0)
    transport: str = choice("auto", "nccl", "gloo", "tcp", "nixl", "ray")
    shm_dir: str = MISSING
    durable: bool = MISSING

    @property
    def limit_s(self) -> WaitLimit:
        """The limit of a wait, which grows with its bytes."""
        return WaitLimit(self.timeout_s, self.min_rate_mbps)


@dataclass(kw_only=True)
class RetentionConfig:
    """Which checkpoints are kept: the fields of each policy by its name."""

    policies: Settings = MISSING


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where checkpoints go, how often, and in which format."""

    dir: str | None = MISSING
    interval: int = number(at_least=0)
    memory_interval: int = number(at_least=0)
    format: str = choice("verl", "dcp")
    snapshot: str = choice("lazy", "eager")
    resume_from: str | None = MISSING
    mirror: str | None = MISSING
    mirror_options: Settings = MISSING
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
    monitor: Settings = MISSING
    coordinator: Settings = MISSING


@dataclass(kw_only=True)
class LoraConfig:
    """A low-rank adapter, trained instead of the weights."""

    rank: int = number(at_least=0)
    alpha: int | None = number(at_least=1)
    targets: OptionalTexts = MISSING
    path: str | None = MISSING


@dataclass(kw_only=True)
class ModelConfig:
    """The policy: a model in Hugging Face format, or the fields of a new model's config."""

    path: str | None = MISSING
    architecture: Settings | None = MISSING
    shapes: str | None = MISSING
    layers: int | None = number(at_least=1)
    trust_remote_code: bool = MISSING
    attn_implementation: str = choice("sdpa", "eager", "flash_attention_2")
    lora: LoraConfig = MISSING


@dataclass(kw_only=True)
class WorkloadConfig:
    """The purpose of a run: `train`, or `bytes` with keys of its own."""

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
    engine: Settings = MISSING


@dataclass(kw_only=True)
class VllmServerConfig(ExplorerConfig):
    """Explorers that each use a vLLM server."""

    url: OptionalTexts = MISSING
    key_env: str | None = MISSING


@dataclass(kw_only=True)
class ClusterConfig:
    """Where Ray runs."""

    address: str | None = MISSING
    num_cpus: int | None = number(at_least=1)
    object_store_mb: int = number(at_least=75)
    temp_dir: str | None = MISSING
    forks: bool = MISSING
    start_timeout_s: float = seconds(more_than=0)
    rejoin_s: float = seconds(at_least=0)
    metrics: bool = MISSING


@dataclass(kw_only=True)
class TrackerConfig:
    """Keys of every tracker."""

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
    """A whole run. `task` and trackers may be users' classes, so their option files type them."""

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
    task: Option = MISSING
    explorer: ExplorerConfig = MISSING
    samples: SamplesConfig = MISSING
    cluster: ClusterConfig = MISSING
    tracker: Settings = field(default_factory=dict)


def policy_schema(policy: type[Policy]) -> type:
    """Make the dataclass for the options of a retention policy: its class name and its fields."""
    types = get_type_hints(policy)
    typed: list[tuple[str, object, object]] = [(TARGET, str, field(default=MISSING))]
    for declared in fields(policy):  # type: ignore[arg-type]
        kind = int | float | str if QUANTITY in declared.metadata else types[declared.name]
        typed.append((declared.name, kind, field(default=MISSING)))
    schema = make_dataclass(policy.__name__, typed, kw_only=True, namespace={"__module__": __name__})
    globals()[schema.__name__] = schema  # so that a composed configuration can be pickled
    return schema


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


def typed(cfg: DictConfig) -> Config:
    """Return a whole configuration as the dataclasses of the schema, interpolations resolved.

    Keys that only a user's class has are attributes too. `task`, `tracker` and `retention.policies` are dictionaries,
    since users' classes may stand there.
    """
    found = OmegaConf.to_object(cfg)
    assert isinstance(found, Config)
    found.task, found.tracker, found.retention.policies = map(plain, (cfg.task, cfg.tracker, cfg.retention.policies))
    return found


# -- retention policies that a configuration names


def retention_policies(cfg: DictConfig | Config) -> tuple[Policy, ...]:
    """Build the chosen retention policies. Users' own policies are imported."""
    policies = cfg.retention.policies
    nodes = plain(policies) if isinstance(policies, DictConfig) else policies
    return tuple(build_policy(name, node) for name, node in nodes.items())


def build_policy(name: str, node: Value) -> Policy:
    """Build one policy from its fields: the class under `_target_`, else our policy of that name. Errors as of
    `retention_policies`.
    """
    given = dict(node) if isinstance(node, Mapping) else {}
    target = given.pop(TARGET, None)
    if target is None:
        return make_policy(name, policy_named(name), given)
    found: type[Policy] = load_class(f"retention.policies.{name}.{TARGET}", str(target), Policy)  # type: ignore[type-abstract]
    return make_policy(name, found, given)


# -- registration with Hydra

FORMER_MODULES = ("trinity_sync.config.retention", "trinity_sync.config.training_schema")
"""Modules of these classes in earlier releases, which configurations that were pickled then name."""

_PASSED_ON: tuple[tuple[type, str], ...] = (
    (BackendConfig, "overrides"),
    (VllmConfig, "engine"),
    (CheckpointConfig, "mirror_options"),
    (CheckpointConfig, "monitor"),
    (CheckpointConfig, "coordinator"),
    (PromptFileConfig, "chat_template"),
    (ResponseFileConfig, "chat_template"),
)
"""Keys whose values are passed unchanged to verl, fsspec, a chat template, or the named class."""


def register() -> None:
    """Give the schema to Hydra's ConfigStore and our resolvers to OmegaConf. Called on import of the package."""
    accept_short_rewards()
    store = ConfigStore.instance()
    # Hydra copies the whole store for each group of --help, which takes seconds; it copies nodes when it loads them
    vars(store)["__deepcopy__"] = lambda memo: store
    for name, schema in SCHEMA.items():
        node = OmegaConf.structured(schema)
        for key in (key for owner, key in _PASSED_ON if issubclass(schema, owner)):
            # others check these keys: any can be set without '+'
            node[key] = {}
            node[key]._set_flag("struct", False)
        store.store(group="schema", name=name, node=node)
    # a user's option file lists this if its class has keys that no option of ours has
    any_key = OmegaConf.create({}, flags={"struct": False})
    store.store(group="schema", name="own_keys", node=any_key)
    # applied after all option files: an undeclared key then needs '+'
    closed = OmegaConf.create({group: {} for group in LABELS} | {"backend": {"overrides": any_key}})
    for group in LABELS:
        closed[group]._set_flag("struct", True)
    store.store(group="schema", name="closed", node=closed)
    register_resolvers()
