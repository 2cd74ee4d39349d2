"""Which checkpoints stay: policies as small frozen dataclasses, and one pure function that decides, with reasons.

The monitor asks after every commit, the command line asks for ``ckpt prune``. A full checkpoint stays if any policy
keeps it. Then, if a byte budget is set and exceeded, the oldest of those that only one policy keeps go first.
State-dict folders, which exist for sync, follow a rule of their own: the newest few stay. Never deleted: the newest
full checkpoint, the newest weights, and what is leased, pinned, being saved or named by a tracker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from trinity_sync.errors import ConfigError
from trinity_sync.protocol.parts import FULL, STATE_DICT, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What a decision needs to know of one committed checkpoint.

    Args:
        step: its step; one checkpoint per step.
        kind: ``full`` or ``state_dict``.
        created: when it was committed, Unix seconds.
        bytes: size of its files.
        metrics: name to value, as its manifest has them.
        pinned, leased: by a user; by a reader that is at it now.
        saving: more of it is being saved (weights on the way to a full checkpoint).
        named: a tracker names it.
    """

    step: int
    kind: Kind
    created: float
    bytes: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    pinned: bool = False
    leased: bool = False
    saving: bool = False
    named: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the checkpoint of a step stays, and why.

    Args:
        reasons: at least one; of a checkpoint that goes, what spoke against it.
        warnings: what the user should know, such as a budget that cannot be met; given with the newest checkpoint.
    """

    step: int
    keep: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


class Policy(Protocol):
    """One rule. `kept` gets the full checkpoints, oldest first, and returns step to reason for those it keeps."""

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        """The steps that this policy keeps; `now` in Unix seconds."""


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keep everything, state-dict folders too."""

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        """All of them."""
        return {checkpoint.step: "keep_all" for checkpoint in checkpoints}


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the newest `n`."""

    n: int

    def __post_init__(self) -> None:
        _at_least("keep_last.n", self.n, 1)

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        """The last `n` by step."""
        return {checkpoint.step: f"keep_last {self.n}" for checkpoint in checkpoints[-self.n :]}


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Keep the steps that are a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _at_least("keep_every.steps", self.steps, 1)

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        """Every `steps`-th step."""
        return {c.step: f"keep_every {self.steps} steps" for c in checkpoints if c.step % self.steps == 0}


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the `n` best by a metric of the manifest; of equals the newer. What has no finite number under that name
    cannot be told from the best, so it is kept beside them, with a warning.

    Args:
        metric: its name, such as ``reward/mean``.
        mode: ``max``: more is better; ``min``: less is.
    """

    metric: str
    n: int = 1
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        _at_least("keep_best.n", self.n, 1)
        if self.mode not in ("max", "min"):
            raise ConfigError(f"keep_best.mode is {self.mode!r}; it has to be max or min")

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        """The `n` best of those that have the metric, and those that do not have it."""
        sign = 1.0 if self.mode == "max" else -1.0
        rated = [(sign * value, c.step) for c in checkpoints if (value := self._rating(c)) is not None]
        best = sorted(rated, reverse=True)[: self.n]
        reasons = {step: f"keep_best {self.n} by {self.metric} ({sign * value:g})" for value, step in best}
        return reasons | {c.step: f"keep_best: without {self.metric}" for c in self._unrated(checkpoints)}

    def warnings(self, checkpoints: Sequence[CheckpointFacts]) -> list[str]:
        """What the user should know: checkpoints that have no such metric, and what they have."""
        unrated = self._unrated(checkpoints)
        if not unrated:
            return []
        metrics = unrated[-1].metrics
        if self.metric in metrics:
            fault = "which is not a number in some checkpoints"
        else:
            fault = f"which some checkpoints do not have; they have {', '.join(sorted(metrics)) or 'no metrics'}"
        return [f"retention.policies.keep_best.metric is {self.metric}, {fault}. keep_best keeps all of those"]

    def _unrated(self, checkpoints: Sequence[CheckpointFacts]) -> list[CheckpointFacts]:
        return [checkpoint for checkpoint in checkpoints if self._rating(checkpoint) is None]

    def _rating(self, checkpoint: CheckpointFacts) -> float | None:
        value = checkpoint.metrics.get(self.metric)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class KeepFor:
    """Keep what was committed at most `seconds` ago."""

    seconds: float

    def __post_init__(self) -> None:
        _more_than_nothing("keep_for.seconds", self.seconds)

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        """Those that are not older."""
        return {c.step: f"keep_for {self.seconds:g} s" for c in checkpoints if now - c.created <= self.seconds}


@dataclass(frozen=True, slots=True)
class KeepWithinBudget:
    """A limit to the bytes of all checkpoints together. It keeps nothing by itself."""

    bytes: int

    def __post_init__(self) -> None:
        _more_than_nothing("keep_within_budget.bytes", self.bytes)

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        """Nothing: a budget only takes away."""
        return {}


POLICIES: Mapping[str, Callable[..., Policy]] = {
    "keep_all": KeepAll,
    "keep_last": KeepLast,
    "keep_every": KeepEvery,
    "keep_best": KeepBest,
    "keep_for": KeepFor,
    "keep_within_budget": KeepWithinBudget,
}


def make_policies(config: Mapping[str, Mapping[str, object] | None]) -> tuple[Policy, ...]:
    """Policies from a map of policy name to fields, as the configuration group ``retention`` has it.

    Raises:
        ConfigError: an unknown policy or field, or a value out of range; the message names the key.
    """
    policies = []
    for name, fields in config.items():
        if name not in POLICIES:
            raise ConfigError(f"retention.policies.{name} is not a policy; there are {', '.join(POLICIES)}")
        try:
            policies.append(POLICIES[name](**(fields or {})))
        except TypeError as error:
            raise ConfigError(f"retention.policies.{name}: {error}") from None
        except ConfigError as error:
            raise ConfigError(f"retention.policies.{error}") from None
    return tuple(policies)


def decide(
    checkpoints: Iterable[CheckpointFacts],
    policies: Collection[Policy],
    clock_now: float,
    *,
    keep_state_dicts: int = 2,
) -> list[Decision]:
    """Which of these committed checkpoints stay.

    Args:
        checkpoints: all that are committed, in any order.
        policies: none, or only a budget, means that everything is kept (within the budget).
        clock_now: Unix seconds.
        keep_state_dicts: how many of the newest state-dict folders stay; they are not counted by the policies, and
            all of them stay under `KeepAll`.

    Returns:
        One decision per checkpoint, oldest first.
    """
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    rules: list[Policy] = [policy for policy in policies if not isinstance(policy, KeepWithinBudget)] or [KeepAll()]
    budgets = [policy for policy in policies if isinstance(policy, KeepWithinBudget)]

    protected = _protected(ordered)
    keep_all = any(isinstance(policy, KeepAll) for policy in policies)
    kept = _kept(ordered, rules, clock_now, None if keep_all else keep_state_dicts)
    gone: dict[int, str] = {}
    for checkpoint in ordered:
        if not kept[checkpoint.step] and not protected[checkpoint.step]:
            gone[checkpoint.step] = _against(checkpoint, rules, keep_state_dicts)

    full = [checkpoint for checkpoint in ordered if checkpoint.kind == FULL]
    warnings = [text for rule in rules if isinstance(rule, KeepBest) for text in rule.warnings(full)]
    if budgets:
        budget = min(policy.bytes for policy in budgets)
        staying = [checkpoint for checkpoint in ordered if checkpoint.step not in gone]
        total = sum(checkpoint.bytes for checkpoint in staying)
        # Stable: within "kept by one rule" and "kept by several", oldest first.
        for checkpoint in sorted(staying, key=lambda c: len(kept[c.step]) > 1):
            if total <= budget or protected[checkpoint.step]:
                continue
            total -= checkpoint.bytes
            gone[checkpoint.step] = (
                f"over the budget of {budget} bytes (was kept by {', '.join(kept[checkpoint.step])})"
            )
        if total > budget:
            warnings.append(
                f"the newest checkpoint and those pinned, leased or being saved take {total} bytes, "
                f"more than the budget of {budget} bytes allows"
            )

    decisions = []
    for checkpoint in ordered:
        step = checkpoint.step
        newest = checkpoint is ordered[-1]
        reasons = (gone[step],) if step in gone else (*protected[step], *kept[step])
        decisions.append(Decision(step, step not in gone, reasons, tuple(warnings) if newest else ()))
    return decisions


def _protected(ordered: Sequence[CheckpointFacts]) -> dict[int, list[str]]:
    """Why no policy and no budget can remove it; an empty list: nothing protects it."""
    reasons: dict[int, list[str]] = {checkpoint.step: [] for checkpoint in ordered}
    full = [checkpoint for checkpoint in ordered if checkpoint.kind == FULL]
    if full:
        reasons[full[-1].step].append("newest full checkpoint")
    if ordered and ordered[-1].kind == STATE_DICT:
        reasons[ordered[-1].step].append("newest weights")
    for checkpoint in ordered:
        flags = {"pinned": checkpoint.pinned, "leased": checkpoint.leased, "being saved": checkpoint.saving}
        reasons[checkpoint.step] += [reason for reason, holds in flags.items() if holds]
        if checkpoint.named and not reasons[checkpoint.step]:  # what is newest, as a rule
            reasons[checkpoint.step].append("named by a tracker")
    return reasons


def _kept(
    ordered: Sequence[CheckpointFacts], rules: Collection[Policy], now: float, keep_state_dicts: int | None
) -> dict[int, list[str]]:
    reasons: dict[int, list[str]] = {checkpoint.step: [] for checkpoint in ordered}
    full = [checkpoint for checkpoint in ordered if checkpoint.kind == FULL]
    for rule in rules:
        for step, reason in rule.kept(full, now).items():
            reasons[step].append(reason)
    weights = [checkpoint for checkpoint in ordered if checkpoint.kind == STATE_DICT]
    reason = "keep_all" if keep_state_dicts is None else f"newest {keep_state_dicts} state-dict folders"
    for checkpoint in weights if keep_state_dicts is None else weights[max(0, len(weights) - keep_state_dicts) :]:
        reasons[checkpoint.step].append(reason)
    return reasons


def _against(checkpoint: CheckpointFacts, rules: Collection[Policy], keep_state_dicts: int) -> str:
    if checkpoint.kind == STATE_DICT:
        return f"older than the newest {keep_state_dicts} state-dict folders"
    names: dict[object, str] = {cls: name for name, cls in POLICIES.items()}
    return f"not kept by {', '.join(names.get(type(rule), type(rule).__name__) for rule in rules)}"


def _at_least(key: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key} is {value!r}; it has to be a whole number of at least {least}")


def _more_than_nothing(key: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{key} is {value!r}; it has to be a number greater than 0")
