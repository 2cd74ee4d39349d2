"""Retention: policies as small frozen dataclasses, and one pure function that decides which checkpoints stay, and why.

The monitor calls it after every commit, the command line for ``ckpt prune``. A full checkpoint stays if any policy
keeps it. If a byte budget is exceeded, the oldest checkpoints that only one policy keeps are deleted first. State-dict
folders, which exist for sync, have a rule of their own: the newest few stay. Never deleted: the newest full checkpoint,
the newest weights, and checkpoints that are leased, pinned, being saved or named by a tracker.

A policy is a subclass of `Policy`. Its fields are declared only here: the schema of the configuration is made of them.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from trinity_sync.errors import ConfigError
from trinity_sync.protocol.choices import mistyped
from trinity_sync.protocol.parts import FULL, STATE_DICT, Kind

QUANTITY = "quantity"
"""Metadata key of dataclass fields that take text such as ``12h`` or ``100GB``; the value is their `Quantity`."""


@dataclass(frozen=True)
class Quantity:
    """A number with a unit."""

    units: Mapping[str, float]  # factor by unit in lower case; the empty unit is for a bare number
    right: str  # what the user may write, for error messages
    whole: bool = False  # an int

    def parse(self, text: str) -> float:
        """Return the number that a text means, or raise a `ValueError` with the text of `right`."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", text.lower())
        if not match or match[2] not in self.units:
            raise ValueError(self.right)
        amount = float(match[1]) * self.units[match[2]]
        return int(amount) if self.whole else amount


DURATION = Quantity(
    {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800},
    "a number of seconds, or a text such as 90s, 30m, 12h or 7d",
)
"""In seconds."""

SIZE = Quantity(
    {"": 1, "b": 1}
    | {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)}
    | {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
    "a number of bytes, or a text such as 500MB, 100GB or 2TiB",
    whole=True,
)
"""In bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """The facts of one committed checkpoint that a decision depends on.

    Args:
        step: its step; one checkpoint per step.
        kind: ``full`` or ``state_dict``.
        created: when it was committed, Unix seconds.
        bytes: size of its files.
        metrics: name to value, as in its manifest.
        pinned: a user has pinned it.
        leased: a reader has a lease on it.
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
    """Whether the checkpoint of a step stays, and why."""

    step: int
    keep: bool
    reasons: tuple[str, ...]  # at least one reason for keeping or for deleting it
    # Messages for the user, such as a budget that cannot be met; given with the newest checkpoint.
    warnings: tuple[str, ...] = ()


class Policy(ABC):
    """One rule: a frozen dataclass whose fields are what the configuration sets, by the same names.

    It is pickled, so define your own class in an importable module. For a wrong value its constructor raises a
    `ConfigError` whose text begins with the field, after `name` and a dot where it has a name.

    Attributes:
        name: the policy's name for users; empty: the name of the class.
        keeps_weights: keep all state-dict folders as well.
    """

    __slots__ = ()
    name: ClassVar[str] = ""
    keeps_weights: ClassVar[bool] = False

    @abstractmethod
    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        """Return the steps that this policy keeps, with the reason.

        Args:
            checkpoints: the full ones, oldest first.
            now: Unix seconds.
        """

    @property
    def budget(self) -> int | None:
        """The most bytes of all checkpoints together. A policy with a budget keeps nothing, it only deletes."""
        return None

    def warnings(self, checkpoints: Sequence[CheckpointFacts]) -> Sequence[str]:
        """Return messages for the user; `checkpoints` as for `kept`."""
        return ()


@dataclass(frozen=True, slots=True)
class KeepAll(Policy):
    """Keep everything, state-dict folders too."""

    name: ClassVar[str] = "keep_all"
    keeps_weights: ClassVar[bool] = True

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        return {checkpoint.step: "keep_all" for checkpoint in checkpoints}


@dataclass(frozen=True, slots=True)
class KeepLast(Policy):
    """Keep the newest `n`."""

    name: ClassVar[str] = "keep_last"
    n: int

    def __post_init__(self) -> None:
        _at_least_one("keep_last.n", self.n)

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        return {checkpoint.step: f"keep_last {self.n}" for checkpoint in checkpoints[-self.n :]}


@dataclass(frozen=True, slots=True)
class KeepEvery(Policy):
    """Keep the steps that are a multiple of `steps`."""

    name: ClassVar[str] = "keep_every"
    steps: int

    def __post_init__(self) -> None:
        _at_least_one("keep_every.steps", self.steps)

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        return {c.step: f"keep_every {self.steps} steps" for c in checkpoints if c.step % self.steps == 0}


@dataclass(frozen=True, slots=True)
class KeepBest(Policy):
    """Keep the `n` best by a metric of the manifest; among equals the newer.

    A checkpoint without a finite number under that name might be the best, so it is kept too, with a warning.
    """

    name: ClassVar[str] = "keep_best"
    metric: str  # its name, such as ``reward/mean``
    n: int = 1
    mode: str = "max"  # ``max``: more is better; ``min``: less is

    def __post_init__(self) -> None:
        _at_least_one("keep_best.n", self.n)
        if self.mode not in ("max", "min"):
            raise ConfigError(f"keep_best.mode is {self.mode!r}; it has to be max or min")

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        sign = 1.0 if self.mode == "max" else -1.0
        rated = [(sign * value, c.step) for c in checkpoints if (value := self._rating(c)) is not None]
        best = sorted(rated, reverse=True)[: self.n]
        reasons = {step: f"keep_best {self.n} by {self.metric} ({sign * value:g})" for value, step in best}
        return reasons | {c.step: f"keep_best: without {self.metric}" for c in self._unrated(checkpoints)}

    def warnings(self, checkpoints: Sequence[CheckpointFacts]) -> list[str]:
        """Name the metric that some checkpoints lack, and the metrics that they have."""
        unrated = self._unrated(checkpoints)
        if not unrated:
            return []
        metrics = unrated[-1].metrics
        if self.metric in metrics:
            fault = "which is not a number in some checkpoints"
        else:
            fault = f"which some checkpoints do not have; they have {', '.join(sorted(metrics)) or 'no metrics'}"
        return [f"retention.policies.keep_best.metric is {self.metric}, {fault}. keep_best keeps all of them"]

    def _unrated(self, checkpoints: Sequence[CheckpointFacts]) -> list[CheckpointFacts]:
        return [checkpoint for checkpoint in checkpoints if self._rating(checkpoint) is None]

    def _rating(self, checkpoint: CheckpointFacts) -> float | None:
        value = checkpoint.metrics.get(self.metric)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class KeepFor(Policy):
    """Keep the checkpoints committed at most `seconds` ago."""

    name: ClassVar[str] = "keep_for"
    seconds: float = field(metadata={QUANTITY: DURATION})

    def __post_init__(self) -> None:
        _more_than_nothing("keep_for.seconds", self.seconds)

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        return {c.step: f"keep_for {self.seconds:g} s" for c in checkpoints if now - c.created <= self.seconds}


@dataclass(frozen=True, slots=True)
class KeepWithinBudget(Policy):
    """Limit the bytes of all checkpoints together. It keeps nothing by itself."""

    name: ClassVar[str] = "keep_within_budget"
    bytes: int = field(metadata={QUANTITY: SIZE})

    def __post_init__(self) -> None:
        _more_than_nothing("keep_within_budget.bytes", self.bytes)

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        return {}

    @property
    def budget(self) -> int:
        return self.bytes


@dataclass(frozen=True, slots=True)
class KeepVersions(Policy):
    """Keep every published version of the run restorable, as deltas over one base of every `base_every` versions. It
    keeps no checkpoint, and `decide` goes by the other policies.
    """

    name: ClassVar[str] = "keep_versions"
    base_every: int = 512

    def __post_init__(self) -> None:
        _at_least_one("keep_versions.base_every", self.base_every)

    def kept(self, checkpoints: Sequence[CheckpointFacts], now: float) -> Mapping[int, str]:
        return {}


POLICIES: Mapping[str, type[Policy]] = {
    policy.name: policy for policy in (KeepAll, KeepLast, KeepEvery, KeepBest, KeepFor, KeepWithinBudget, KeepVersions)
}
"""The built-in policies by name."""


def make_policies(config: Mapping[str, Mapping[str, object] | None]) -> tuple[Policy, ...]:
    """Make built-in policies from a map of policy name to fields; a `ConfigError` names the wrong key."""
    return tuple(make_policy(name, policy_named(name), fields or {}) for name, fields in config.items())


def policy_named(name: str) -> type[Policy]:
    """Return the class of a built-in policy, or raise a `ConfigError`."""
    if name not in POLICIES:
        raise ConfigError(
            f"retention.policies.{name} is not a policy; there are {', '.join(POLICIES)}; a class of your own is named "
            f"by retention.policies.{name}._target_"
        )
    return POLICIES[name]


def make_policy(name: str, policy: type[Policy], fields: Mapping[str, object]) -> Policy:
    """Make a policy from its class and the values of its fields; durations and sizes as numbers or text (``12h``,
    ``100GB``).

    `name`: its key in the configuration, `retention.policies.NAME`. A `ConfigError` names the key of an unknown field
    or a value out of range.
    """
    key = f"retention.policies.{name}"
    values = dict(fields)
    for declared in getattr(policy, "__dataclass_fields__", {}).values():
        quantity, given = declared.metadata.get(QUANTITY), values.get(declared.name)
        if isinstance(quantity, Quantity) and isinstance(given, str):
            try:
                values[declared.name] = quantity.parse(given)
            except ValueError as error:
                raise ConfigError(f"{key}.{declared.name} is {given}; must be {error}") from None
    if wrong := mistyped(policy, values):
        raise ConfigError(f"{key}.{wrong}")
    try:
        return policy(**values)
    except TypeError as error:
        raise ConfigError(f"{key}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{key}.{str(error).removeprefix(f'{policy.name}.')}") from None


def decide(
    checkpoints: Iterable[CheckpointFacts],
    policies: Collection[Policy],
    clock_now: float,
    *,
    keep_state_dicts: int = 2,
    history: int = 0,
) -> list[Decision]:
    """Decide which of these committed checkpoints stay; return one decision per checkpoint, oldest first.

    Args:
        checkpoints: all committed ones, in any order.
        policies: with none, or only a budget or `KeepVersions`, everything is kept (within the budget).
        clock_now: Unix seconds.
        keep_state_dicts: how many of the newest state-dict folders stay; policies do not count them. All of them stay
            under a policy that keeps weights, as `KeepAll` does.
        history: bytes of the versions that `KeepVersions` keeps, which count for a budget and are never deleted.
    """
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    deciding = [policy for policy in policies if policy.budget is None and not isinstance(policy, KeepVersions)]
    rules: list[Policy] = deciding or [KeepAll()]
    budgets = [policy.budget for policy in policies if policy.budget is not None]

    protected = _protected(ordered)
    keep_all = any(policy.keeps_weights for policy in policies)
    kept = _kept(ordered, rules, clock_now, None if keep_all else keep_state_dicts)
    gone: dict[int, str] = {}
    for checkpoint in ordered:
        if not kept[checkpoint.step] and not protected[checkpoint.step]:
            gone[checkpoint.step] = _against(checkpoint, rules, keep_state_dicts)

    full = [checkpoint for checkpoint in ordered if checkpoint.kind == FULL]
    warnings = [text for rule in rules for text in rule.warnings(full)]
    if budgets:
        budget = min(budgets)
        staying = [checkpoint for checkpoint in ordered if checkpoint.step not in gone]
        total = history + sum(checkpoint.bytes for checkpoint in staying)
        # Stable: within "kept by one rule" and "kept by several", oldest first.
        for checkpoint in sorted(staying, key=lambda c: len(kept[c.step]) > 1):
            if total <= budget or history > budget or protected[checkpoint.step]:  # no deletion meets it
                continue
            total -= checkpoint.bytes
            gone[checkpoint.step] = (
                f"over the budget of {budget} bytes (was kept by {', '.join(kept[checkpoint.step])})"
            )
        if total > budget:
            of_history = f", and the history of versions ({history} bytes)," if history else ""
            warnings.append(
                f"the newest checkpoint and those pinned, leased or being saved{of_history} take {total} bytes, "
                f"more than the budget of {budget} bytes allows"
            )

    decisions = []
    for checkpoint in ordered:
        step = checkpoint.step
        newest = checkpoint is ordered[-1]
        reasons = (gone[step],) if step in gone else (*protected[step], *kept[step])
        decisions.append(Decision(step, step not in gone, reasons, tuple(warnings) if newest else ()))
    return decisions


def most_at_once(policies: Collection[Policy], steps: Iterable[int], size: int) -> int:
    """Return how many full checkpoints of these steps and this size in bytes a disk holds at a time, at the least: each
    is written before others are deleted. All have the same metrics and are old; users' own policies keep nothing.
    """
    known = [policy for policy in policies if type(policy) in POLICIES.values()] or [KeepLast(1)]
    metrics = {policy.metric: 0.0 for policy in known if isinstance(policy, KeepBest)}
    there: list[CheckpointFacts] = []
    most = 0
    for step in steps:
        there.append(CheckpointFacts(step=step, kind=FULL, created=0.0, bytes=size, metrics=metrics))
        most = max(most, len(there))
        kept = {decision.step for decision in decide(there, known, math.inf) if decision.keep}
        there = [checkpoint for checkpoint in there if checkpoint.step in kept]
    return most


def _protected(ordered: Sequence[CheckpointFacts]) -> dict[int, list[str]]:
    """Return by step why no policy and no budget may delete it; an empty list: it is not protected."""
    reasons: dict[int, list[str]] = {checkpoint.step: [] for checkpoint in ordered}
    full = [checkpoint for checkpoint in ordered if checkpoint.kind == FULL]
    if full:
        reasons[full[-1].step].append("newest full checkpoint")
    if ordered and ordered[-1].kind == STATE_DICT:
        reasons[ordered[-1].step].append("newest weights")
    for checkpoint in ordered:
        flags = {"pinned": checkpoint.pinned, "leased": checkpoint.leased, "being saved": checkpoint.saving}
        reasons[checkpoint.step] += [reason for reason, applies in flags.items() if applies]
        if checkpoint.named and not reasons[checkpoint.step]:  # usually a tracker names the newest
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
    return f"not kept by {', '.join(rule.name or type(rule).__name__ for rule in rules)}"


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{key} is {value!r}; it has to be a whole number of at least 1")


def _more_than_nothing(key: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{key} is {value!r}; it has to be a number greater than 0")
