"""`algorithm=grpo`: group relative policy optimization, by verl's losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import ClassVar

from trinity_sync.config import Check, Get, Problem
from trinity_sync.config.model_checks import hub_or_folder_problem, model_fields, read_fields
from trinity_sync.config.schema import GrpoConfig, InRewardConfig
from trinity_sync.models.families import attention_problem, class_problem
from trinity_sync.trainer.algorithms.base import Algorithm

# Checks of the keys of `algorithm=grpo`, and advice printed when a run begins.


_RULES = frozenset(
    [f"{what}_k{kind}" for what in ("token", "seq_sum", "seq_mean") for kind in (1, 2, 3)]
    + ["seq_max_k2", "seq_max_k3"]
)
"""verl's `SUPPORTED_ROLLOUT_RS_OPTIONS`."""
_BY_SEQUENCE = "seq-mean-token-mean"
_OWN_MEANS = ("sapo", "geo_mean")
"""verl's losses that always aggregate as `_BY_SEQUENCE`."""
_LARGEST_CHANGE = 0.2
"""Largest relative change of verl's adaptive coefficient within its horizon."""
_NORMED = "seq-mean-token-sum-norm"


def check_replicas(get: Get) -> Iterator[Problem]:
    """Check that each explorer has a prompt."""
    replicas, prompts = get("explorer.replicas"), get("algorithm.prompts_per_step")
    if replicas > prompts:
        yield Problem(
            "explorer.replicas",
            f"is {replicas}, more than algorithm.prompts_per_step ({prompts}), so some would have nothing to do; "
            f"set it to {prompts} or less",
        )


def check_temperature(get: Get) -> Iterator[Problem]:
    """Check that the samples of a prompt can differ."""
    if get("explorer.temperature") == 0:
        yield Problem(
            "explorer.temperature",
            "is 0: all samples of a prompt would be the same, and algorithm=grpo would have nothing to compare; "
            "set it above 0, such as 1.0",
        )


def check_aggregation(get: Get) -> Iterator[Problem]:
    """Check that token losses can be aggregated as configured."""
    loss, mode, factor = get("algorithm.loss_mode"), get("algorithm.loss_agg_mode"), get("algorithm.loss_scale_factor")
    if loss in _OWN_MEANS and mode != _BY_SEQUENCE:
        yield Problem(
            "algorithm.loss_agg_mode",
            f"is {mode}, but verl's loss {loss} is a mean over the sequences' own means; set it to {_BY_SEQUENCE}",
        )
    if mode == _NORMED and factor is None:
        yield Problem(
            "algorithm.loss_scale_factor",
            f"is null; with algorithm.loss_agg_mode={_NORMED} it needs a value, such as the longest response in tokens",
        )
    if mode != _NORMED and factor is not None:
        yield Problem(
            "algorithm.loss_scale_factor",
            f"is {factor}, but algorithm.loss_agg_mode={mode} does not divide by it; set it to null, or the mode to "
            f"{_NORMED}",
        )


def check_covariances(get: Get) -> Iterator[Problem]:
    """Check the order of the bounds of `clip_cov`."""
    lower, upper = get("algorithm.policy_loss.clip_cov_lb"), get("algorithm.policy_loss.clip_cov_ub")
    if lower >= upper:
        yield Problem("algorithm.policy_loss.clip_cov_lb", f"is {lower}; must be less than clip_cov_ub ({upper})")


def check_correction(get: Get) -> Iterator[Problem]:
    """Check that samples are corrected once, by rules that verl has."""
    node = "algorithm.rollout_correction"
    rules, bounds = get(f"{node}.rollout_rs"), get(f"{node}.rollout_rs_threshold")
    if get("algorithm.old_log_probs") == "sampler" and get(f"{node}.rollout_is") is not None:
        yield Problem(
            f"{node}.rollout_is",
            "is set, but with algorithm.old_log_probs=sampler the ratios are those to the explorer already, and would "
            "count twice; set one of them to null or auto",
        )
    if rules is None:
        if bounds is not None:
            yield Problem(
                f"{node}.rollout_rs_threshold", f"is {bounds}, but rollout_rs names no rule; give one such as token_k1"
            )
        return
    named = [rule.strip() for rule in str(rules).split(",")]
    if odd := [rule for rule in named if rule not in _RULES]:
        yield Problem(f"{node}.rollout_rs", f"is {rules}; {odd[0]!r} is none of {', '.join(sorted(_RULES))}")
    elif len({*named}) < len(named):
        yield Problem(f"{node}.rollout_rs", f"is {rules}, which names a rule twice; name it once")
    elif bounds is None:
        yield Problem(f"{node}.rollout_rs_threshold", f"is null; rollout_rs={rules} needs one, such as 2.0")
    elif text := _bounds_problem(named, str(bounds)):
        yield Problem(f"{node}.rollout_rs_threshold", f"is {bounds}; {text}")


def _bounds_problem(rules: list[str], bounds: str) -> str | None:
    each = [part.strip() for part in bounds.split(",")]
    if len(each) not in (1, len(rules)):
        return f"must be one bound, or one for each of the {len(rules)} rules"
    for rule, bound in zip(rules, each if len(each) > 1 else each * len(rules), strict=True):
        limits = bound.split("_") if rule.endswith("k1") else [bound]
        try:
            numbers = [float(limit) for limit in limits]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 2 or not all(isfinite(number) and number > 0 for number in numbers):
            form = 'a number, or lower_upper such as "0.5_2.0"' if rule.endswith("k1") else "a number"
            return f"the bound of {rule} must be {form}, above 0"
        if sorted(numbers) != numbers or (len(numbers) == 1 and rule.endswith("k1") and numbers[0] < 1):
            return f"the lower bound of {rule} is above its upper one (a single one is 1/upper to upper)"
    return None


def check_overlong(get: Get) -> Iterator[Problem]:
    """Check that the penalty begins within the longest response."""
    buffer = get("algorithm.overlong.buffer")
    if not buffer:
        return
    longest = get("task.response_length")
    if longest is None:
        yield Problem(
            "algorithm.overlong.buffer", f"is {buffer}, but the task says no response_length that it could end at"
        )
    elif buffer > longest:
        yield Problem("algorithm.overlong.buffer", f"is {buffer}, more than task.response_length ({longest})")


def check_reference(get: Get) -> Iterator[Problem]:
    """Check that the reference exists, is used, and has the model's vocabulary."""
    path, key = get("algorithm.kl.reference"), "algorithm.kl.reference"
    if path is None:
        return
    if not (get("algorithm.kl.coeff") or get("algorithm.kl.in_reward.coeff") or get("algorithm.kl.measure")):
        keys = "algorithm.kl.coeff, kl.in_reward.coeff, or kl.measure=true"
        yield Problem(key, f"is {path}, but nothing is compared with it; set {keys}")
        return
    if text := hub_or_folder_problem(path):
        yield Problem(key, text)
        return
    reference, model = (read_fields(Path(path)) if Path(path).is_dir() else {}), model_fields(get)
    if reference and (text := class_problem(reference)):
        yield Problem(key, f"is {path}, whose {text}")
    elif text := attention_problem(reference, get("model.attn_implementation"), f"{path}/config.json"):
        yield Problem("model.attn_implementation", text)
    tokens, wanted = reference.get("vocab_size"), model.get("vocab_size")
    if tokens is not None and wanted is not None and tokens != wanted:
        yield Problem(
            key,
            f"is {path}, with a vocabulary of {tokens} tokens, the trained model has one of {wanted}; a reference has "
            "to give the same tokens a probability",
        )


def check_in_reward(get: Get) -> Iterator[Problem]:
    """Check that an adaptive coefficient can adapt."""
    node = "algorithm.kl.in_reward"
    if get(f"{node}.type") != "adaptive":
        return
    if get(f"{node}.coeff") == 0:
        yield Problem(
            f"{node}.type", f"is adaptive, but nothing grows from {node}.coeff=0; set that above 0, or type=fixed"
        )
    horizon = get(f"{node}.horizon")
    sequences = get("algorithm.prompts_per_step") * get("algorithm.samples_per_prompt")
    if horizon <= sequences * _LARGEST_CHANGE:
        yield Problem(
            f"{node}.horizon",
            f"is {horizon}: with {sequences} samples a step the coefficient could reach 0 or change its sign in one "
            f"step; set it above {sequences * _LARGEST_CHANGE:g}",
        )


def advise_truncation(get: Get) -> Iterator[Problem]:
    """Advise against truncated sampling, which is off-policy."""
    for key, all_tokens in (("explorer.top_k", 0), ("explorer.top_p", 1)):
        if get(key) != all_tokens:
            yield Problem(
                key,
                f"is {get(key)}: samples are drawn from some of the tokens, and trained on with log-probs over all of "
                f"them, so the update is not on-policy; {key}={all_tokens} draws them from all",
            )


def advise_correction(get: Get) -> Iterator[Problem]:
    """Advise to correct for old samples."""
    stale = get("sync.max_staleness")
    if get("trainer.schedule") != "free" or stale <= 1:
        return
    if all(get(f"algorithm.rollout_correction.{key}") is None for key in ("rollout_is", "rollout_rs")):
        bound = "nothing bounds" if get("algorithm.old_log_probs") == "recomputed" else "clipping alone bounds"
        yield Problem(
            "sync.max_staleness",
            f"is {stale} with trainer.schedule=free: samples of policies so old are off-policy, which {bound}; "
            "algorithm.rollout_correction.rollout_is=token weighs them, rollout_rs leaves the worst out",
        )


def advise_estimator(get: Get) -> Iterator[Problem]:
    """Advise against estimators without a gradient."""
    kind = get("algorithm.kl.estimator")
    if get("algorithm.kl.coeff") > 0 and kind in ("kl", "k1"):
        yield Problem(
            "algorithm.kl.estimator",
            f"is {kind}, whose gradient in the loss is 0 on average, so that it holds nothing back; k1+ has the same "
            "value and the gradient of the divergence",
        )


@dataclass(kw_only=True)
class Grpo(GrpoConfig, Algorithm):
    """Compares each sample with the others of its prompt."""

    checks: ClassVar[tuple[Check, ...]] = (
        check_replicas,
        check_temperature,
        check_aggregation,
        check_covariances,
        check_correction,
        check_overlong,
        check_reference,
        check_in_reward,
    )
    advice: ClassVar[tuple[Check, ...]] = (advise_truncation, advise_correction, advise_estimator)

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
            # not used by the loss, but checked by verl
            strategy=strategy,
            ppo_micro_batch_size_per_gpu=1,
            rollout_n=1,
            use_torch_compile=False,
        )
        return policy_loss(config, self.rollout_correction, recomputed=self.recomputes)
