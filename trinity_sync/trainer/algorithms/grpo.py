"""`algorithm=grpo`: group relative policy optimization, by verl's losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar

from trinity_sync.config import Check, Get
from trinity_sync.config.training_schema import GrpoConfig, InRewardConfig
from trinity_sync.trainer.algorithms import grpo_checks
from trinity_sync.trainer.algorithms.base import Algorithm


@dataclass(kw_only=True)
class Grpo(GrpoConfig, Algorithm):
    """Each sample is judged against the others of its prompt."""

    checks: ClassVar[tuple[Check, ...]] = (
        grpo_checks.check_replicas,
        grpo_checks.check_temperature,
        grpo_checks.check_aggregation,
        grpo_checks.check_covariances,
        grpo_checks.check_correction,
        grpo_checks.check_overlong,
        grpo_checks.check_reference,
        grpo_checks.check_in_reward,
    )
    advice: ClassVar[tuple[Check, ...]] = (
        grpo_checks.advise_truncation,
        grpo_checks.advise_correction,
        grpo_checks.advise_estimator,
    )

    @classmethod
    def sequences(cls, get: Get) -> tuple[int, str, str]:
        prompts, samples = get("algorithm.prompts_per_step"), get("algorithm.samples_per_prompt")
        number = prompts * samples
        counted = f"times algorithm.samples_per_prompt is {number} sequences a step ({prompts} x {samples})"
        return number, "algorithm.prompts_per_step", counted

    @property
    def recomputes(self) -> bool:
        if self.old_log_probs == "auto":
            correction = self.rollout_correction
            corrected = correction.rollout_is is not None or correction.rollout_rs is not None
            return corrected or self.in_reward is not None
        return self.old_log_probs == "recomputed"

    @property
    def needs_entropy(self) -> bool:
        return self.calculate_entropy or self.entropy_coeff > 0

    @property
    def needs_reference(self) -> bool:
        return self.kl.coeff > 0 or self.kl.measure or self.in_reward is not None

    @property
    def in_reward(self) -> InRewardConfig | None:
        return self.kl.in_reward if self.kl.in_reward.coeff > 0 else None

    @property
    def reference_path(self) -> str | None:
        return self.kl.reference

    def loss(self, strategy: str) -> Callable[..., object]:
        from verl.workers.config import ActorConfig, PolicyLossConfig

        from trinity_sync.trainer.algorithms.policy_loss import GEO_MEAN, policy_loss

        of_losses = asdict(self.policy_loss)
        tau = {name: of_losses.pop(name) for name in ("tau_pos", "tau_neg")}
        mode = GEO_MEAN if self.loss_mode == "geo_mean" else self.loss_mode
        config = ActorConfig(
            clip_ratio=self.clip_ratio,
            clip_ratio_low=self.clip_ratio,
            clip_ratio_high=self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high,
            clip_ratio_c=self.clip_ratio_c,
            policy_loss=PolicyLossConfig(loss_mode=mode, **of_losses),
            **tau,
            loss_agg_mode=self.loss_agg_mode,
            loss_scale_factor=self.loss_scale_factor,
            entropy_coeff=self.entropy_coeff,
            use_kl_loss=self.kl.coeff > 0,
            kl_loss_coef=self.kl.coeff,
            kl_loss_type=self.kl.estimator,
            # What its loss does not read still has to pass verl's own checks.
            strategy=strategy,
            ppo_micro_batch_size_per_gpu=1,
            rollout_n=1,
            use_torch_compile=False,
        )
        return policy_loss(config, self.rollout_correction, recomputed=self.recomputes)
