"""The dataclasses that type what is trained, on what and how: the groups trainer, algorithm, task and samples.

As in `trinity_sync.config.schema`, they carry ranges, never a default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from trinity_sync.config.fields import choice, number

TOO_LONG = ("refuse", "filter", "truncate")
"""What becomes of rows of a file that have too many tokens."""


@dataclass(kw_only=True)
class TrainerConfig:
    """The training loop and its optimizer."""

    steps: int = number(at_least=1)
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


@dataclass(kw_only=True)
class AlgorithmConfig:
    """What every algorithm has."""

    _target_: str = MISSING
    kind: str = MISSING


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """Importance weights of samples whose log-probs are not the trainer's, and which are left out; keys as verl's."""

    rollout_is: str | None = choice("token", "sequence")
    rollout_is_threshold: float = number(more_than=0)
    rollout_rs: str | None = MISSING
    rollout_rs_threshold: str | None = MISSING


@dataclass(kw_only=True)
class PolicyLossConfig:
    """What single ones of verl's policy losses go by; the keys are verl's."""

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
    """What of the divergence is taken from rewards; the last three keys as verl's."""

    coeff: float = number(at_least=0)
    estimator: str = choice("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
    type: str = choice("fixed", "adaptive")
    target_kl: float = number(more_than=0)
    horizon: int = number(at_least=1)


@dataclass(kw_only=True)
class KlConfig:
    """How far the policy may go from a reference."""

    coeff: float = number(at_least=0)
    estimator: str = choice("kl", "k1", "k1+", "abs", "mse", "k2", "low_var_kl", "low_var_kl+", "k3", "k3+")
    reference: str | None = MISSING
    measure: bool = MISSING
    in_reward: InRewardConfig = MISSING


@dataclass(kw_only=True)
class OverlongConfig:
    """A penalty on responses that come near to the longest that there may be."""

    buffer: int = number(at_least=0)
    penalty: float = number(more_than=0)


@dataclass(kw_only=True)
class FilterGroupsConfig:
    """Groups that are left out, and the prompts that are answered in their place; keys as verl's, but the last."""

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
    """When the explorers answer prompts that are not trained on, and how."""

    prompts: int | None = number(at_least=1)
    samples_per_prompt: int = number(at_least=1)
    temperature: float = number(at_least=0)


@dataclass(kw_only=True)
class FileValidationConfig(ValidationConfig):
    """The same with prompts from a file."""

    path: str | None = MISSING


@dataclass(kw_only=True)
class LossValidationConfig(ValidationTimesConfig):
    """When the trainer measures the loss of rows that it does not learn."""

    path: str | None = MISSING
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
    """Prompts from a file."""

    _target_: str = MISSING
    path: str = MISSING
    prompt_key: str = MISSING
    shuffle: bool = MISSING
    reward: dict[str, Any] = MISSING
    prompt_length: int = number(at_least=1)
    response_length: int = number(at_least=1)
    too_long: str = choice(*TOO_LONG)
    chat_template: dict[str, Any] = MISSING
    validation: FileValidationConfig = MISSING


@dataclass(kw_only=True)
class JsonlConfig(PromptFileConfig):
    """Prompts from a file, judged by a function."""

    answer_key: str = MISSING


@dataclass(kw_only=True)
class VerlConfig(PromptFileConfig):
    """verl's data and rewards."""

    _convert_: str = MISSING


@dataclass(kw_only=True)
class PairsConfig:
    """Pairs of prompt and response from a file."""

    _target_: str = MISSING
    path: str = MISSING
    prompt_key: str = MISSING
    response_key: str = MISSING
    max_length: int = number(at_least=2)
    too_long: str = choice(*TOO_LONG)
    chat_template: dict[str, Any] = MISSING
    validation: LossValidationConfig = MISSING


@dataclass(kw_only=True)
class ConversationsConfig:
    """Conversations from a file."""

    _target_: str = MISSING
    path: str = MISSING
    messages_key: str = MISSING
    tools_key: str = MISSING
    enable_thinking_key: str = MISSING
    max_length: int = number(at_least=2)
    too_long: str = choice(*TOO_LONG)
    chat_template: dict[str, Any] = MISSING
    ignore_input_ids_mismatch: bool = MISSING
    validation: LossValidationConfig = MISSING


@dataclass(kw_only=True)
class SamplesConfig:
    """What becomes of samples between explorers and trainer, and which of them are recorded."""

    record_interval: int = number(at_least=0)
    record_groups: int = number(at_least=1)
    over_stale: str = choice("wait", "drop")
    buffer: int = number(at_least=1)
