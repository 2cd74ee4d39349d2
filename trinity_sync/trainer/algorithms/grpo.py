"""`algorithm=grpo`: group relative policy optimization, by verl's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from trinity_sync.config import Check, Get, Problem
from trinity_sync.config.training_schema import GrpoConfig
from trinity_sync.trainer.algorithms.base import Algorithm


def _check_replicas(get: Get) -> Iterator[Problem]:
    replicas, prompts = get("explorer.replicas"), get("algorithm.prompts_per_step")
    if replicas > prompts:
        yield Problem(
            "explorer.replicas",
            f"is {replicas}, more than algorithm.prompts_per_step ({prompts}), so some would have nothing to do; "
            f"set it to {prompts} or less",
        )


def _check_temperature(get: Get) -> Iterator[Problem]:
    if get("explorer.temperature") == 0:
        yield Problem(
            "explorer.temperature",
            "is 0: all samples of a prompt would be the same, and algorithm=grpo would have nothing to compare; "
            "set it above 0, such as 1.0",
        )


def _advise_truncation(get: Get) -> Iterator[Problem]:
    for key, all_tokens in (("explorer.top_k", 0), ("explorer.top_p", 1)):
        if get(key) != all_tokens:
            yield Problem(
                key,
                f"is {get(key)}: samples are drawn from some of the tokens, and trained on with log-probs over all of "
                f"them, so the update is not on-policy; {key}={all_tokens} draws them from all",
            )


@dataclass(kw_only=True)
class Grpo(GrpoConfig, Algorithm):
    """Each sample is judged against the others of its prompt."""

    checks: ClassVar[tuple[Check, ...]] = (_check_replicas, _check_temperature)
    advice: ClassVar[tuple[Check, ...]] = (_advise_truncation,)

    @classmethod
    def sequences(cls, get: Get) -> tuple[int, str, str]:
        prompts, samples = get("algorithm.prompts_per_step"), get("algorithm.samples_per_prompt")
        number = prompts * samples
        counted = f"times algorithm.samples_per_prompt is {number} sequences a step ({prompts} x {samples})"
        return number, "algorithm.prompts_per_step", counted

    @property
    def recomputes(self) -> bool:
        return self.rollout_correction.rollout_is is not None

    @property
    def needs_entropy(self) -> bool:
        return self.calculate_entropy or self.entropy_coeff > 0

    def loss(self, strategy: str) -> Callable[..., object]:
        from verl.workers.config import ActorConfig

        from trinity_sync.trainer.algorithms.policy_loss import policy_loss

        config = ActorConfig(
            clip_ratio=self.clip_ratio,
            clip_ratio_low=self.clip_ratio,
            clip_ratio_high=self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high,
            clip_ratio_c=self.clip_ratio_c,
            loss_agg_mode=self.loss_agg_mode,
            entropy_coeff=self.entropy_coeff,
            # What its loss does not read still has to pass verl's own checks.
            strategy=strategy,
            ppo_micro_batch_size_per_gpu=1,
            rollout_n=1,
            use_torch_compile=False,
        )
        return policy_loss(config, self.rollout_correction)
