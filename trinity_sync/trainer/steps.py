"""The parts of a training step that both loops share: train, stage a version, record metrics and events. Runs in the
driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from trinity_sync.actors.calls import ANSWER_S, put
from trinity_sync.actors.explorer_client import Generation, LoadReport
from trinity_sync.actors.synchronizer_client import SealedVersion, SynchronizerClient
from trinity_sync.backends.option import backend_option
from trinity_sync.config.schema import Config, InRewardConfig
from trinity_sync.errors import ConfigError, RunError, grown
from trinity_sync.host import interrupts
from trinity_sync.protocol.parts import VersionBytes
from trinity_sync.protocol.versions import LOAD_HOPS, Version
from trinity_sync.samples.advantages import DrawnGroups
from trinity_sync.samples.batch import PairBatch, SampleBatch, staleness
from trinity_sync.samples.metrics import Line, ValidationTimes, batch_metrics, drawn_metrics
from trinity_sync.sync.base import Published
from trinity_sync.tracking.events import (
    AgreementEvent,
    AllRejectedEvent,
    Event,
    FailedRewardsEvent,
    FaultEvent,
    FilledBatchEvent,
    GenerateEvent,
    LoadEvent,
    PublishEvent,
    SkippedUpdateEvent,
)
from trinity_sync.tracking.summary import SKIPPED
from trinity_sync.trainer.algorithms.base import REJECTED
from trinity_sync.trainer.group import TrainerGroup

if TYPE_CHECKING:
    from ray import ObjectRef

    from trinity_sync.tracking.recorder import Recorder


_ROUNDING = 1e-6
"""Rounding error of a sum of shares."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The settings of a loop.

    Attributes:
        first: the first step to do (1, or one past the step that was resumed).
        mode: name of the sync mode in events.
        max_staleness: largest allowed staleness of a sample, in steps.
        save_interval: steps between full checkpoints, 0 for the last only.
        memory_interval: steps between states in memory, 0 for none.
        sync_timeout_s, step_timeout_s: limits in seconds; the first is a `WaitLimit`, which grows with bytes.
        base: digest of the base of the published adapters; None: versions are whole.
        record_interval: steps between recorded samples; 0: none are recorded.
        explores: there are explorers; without them no version is published.
    """

    steps: int
    first: int
    attempt: int
    mode: str
    sync_interval: int
    max_staleness: int
    save_interval: int
    sync_timeout_s: float
    step_timeout_s: float
    memory_interval: int = 0
    version_bytes: VersionBytes = field(default_factory=VersionBytes)
    base: str | None = None
    record_interval: int = 0
    record_groups: int = 0
    explores: bool = True

    def publishes(self, step: int) -> bool:
        return step == self.steps or step % self.sync_interval == 0

    def records(self, step: int) -> bool:
        return bool(self.record_interval and step % self.record_interval == 0)

    def saves(self, step: int) -> bool:
        return step == self.steps or bool(self.save_interval and step % self.save_interval == 0)

    def keeps(self, step: int) -> bool:
        """Return whether the state after a step is kept in memory."""
        return bool(self.memory_interval and step % self.memory_interval == 0)


@dataclass
class StepTimes:
    """Seconds of the parts of one step, by the metric's name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Measure the block."""
        started = time.perf_counter()
        yield
        self.seconds[f"timing/{name}"] = time.perf_counter() - started

    def step(self, seconds: float, tokens: int) -> None:
        """Note the seconds of the whole step, and its response tokens per second."""
        self.seconds["timing/step"] = seconds
        self.seconds["perf/tokens_per_s"] = tokens / seconds


@dataclass(frozen=True)
class StagedVersion:
    """A version in a slot. `blocked_s`: seconds in which the trainer was blocked for it. `sealed_s`: seconds from then
    until it was sealed.
    """

    sealed: SealedVersion
    blocked_s: float
    started: float
    sealed_s: float


class Answers(Protocol):
    """The samples of a validation, or a validator with those of its last one."""

    @property
    def failure(self) -> str: ...

    def excerpt(self, groups: int) -> list[Line]: ...


class Steps:
    """The parts of a step.

    Args:
        trainer: the group of ranks, initialised and attached.
        parts: names of the parts of a version.
        penalty: subtracts the divergence from the rewards; None: nothing is subtracted.
        agreement: compares trainer and explorers; None: no check.
    """

    def __init__(
        self,
        settings: LoopSettings,
        *,
        trainer: TrainerGroup,
        synchronizer: SynchronizerClient,
        parts: list[str],
        log: Recorder,
        penalty: RewardPenalty | None = None,
        agreement: AgreementCheck | None = None,
    ) -> None:
        self.settings = settings
        self.log = log
        self._penalty = penalty
        self._agreement = agreement
        self._trainer = trainer
        self._synchronizer = synchronizer
        self._parts = parts

    def measure(self, step: int, batch: SampleBatch | PairBatch, drawn: DrawnGroups | None) -> dict[str, float]:
        """Return the metrics of a step's batch. Records events: responses that could not be judged, and a batch filled
        with groups of equal rewards.
        """
        found = batch_metrics(batch)
        if isinstance(batch, SampleBatch) and (earlier := int((batch.version_attempts < self.settings.attempt).sum())):
            found["samples/journaled"] = float(earlier)
        if drawn is not None:
            found |= drawn_metrics(drawn)
            if drawn.filled:
                self.log.event(FilledBatchEvent(step=step, count=drawn.filled, drawn=drawn.groups))
        samples = batch if drawn is None else drawn.samples
        if isinstance(samples, SampleBatch) and (errors := [error for error in samples.errors if error]):
            self.log.event(FailedRewardsEvent(step=step, count=len(errors), error=errors[0]))
        return found

    def train(
        self, step: int, batch: SampleBatch | PairBatch, judge: Callable[[Any], np.ndarray | None]
    ) -> tuple[np.ndarray | None, dict[str, float]]:
        """Have all ranks train on a batch; return its advantages and the metrics, with a `loss` if the batch is not
        empty. Records events: updates skipped because their gradient was not finite, and a step all of whose tokens
        were rejected.
        """
        interrupts.check()
        if self._agreement is not None and isinstance(batch, SampleBatch):
            self._agreement.check(step, batch)
        shared = put(batch)
        judged, penalties = batch, dict[str, float]()
        if self._penalty is not None and isinstance(batch, SampleBatch):
            judged, penalties = self._penalty.apply(step, batch, shared)
        advantages = judge(judged)
        results = self._trainer.all(
            lambda rank: rank.train_step(step, shared, advantages), self.settings.step_timeout_s
        )
        metrics = next(filter(None, results), {})  # only ranks of the last pipeline stage have some
        loss = metrics.get("loss")
        if len(batch) and (loss is None or not np.isfinite(loss)):
            found = "missing from the ranks' metrics" if loss is None else loss
            raise RunError(f"the loss of step {step} is {found}; the newest checkpoint is unharmed")
        if skipped := int(metrics.get(SKIPPED, 0)):
            self.log.event(SkippedUpdateEvent(step=step, count=skipped))
        if metrics.get(REJECTED, 0.0) > 1 - _ROUNDING:
            self.log.event(AllRejectedEvent(step=step))
        return advantages, {**metrics, **penalties}

    def state(self) -> Mapping[str, object]:
        """Return the algorithm's state for a checkpoint, as JSON values."""
        return {} if self._penalty is None else self._penalty.state()

    def staleness(self, batch: SampleBatch | PairBatch, step: int) -> dict[str, float]:
        """Return the staleness of a batch's samples as metrics."""
        if not isinstance(batch, SampleBatch):
            return {}
        versions, counts = np.unique(batch.version_steps, return_counts=True)
        lags = [staleness(int(version_step), step) for version_step in versions]
        if max(lags) > self.settings.max_staleness:
            raise RunError(
                f"samples for step {step} are {max(lags)} steps stale; sync.max_staleness={self.settings.max_staleness}"
            )
        return {"staleness/mean": float(np.average(lags, weights=counts)), "staleness/max": float(max(lags))}

    def begin(self, version: Version) -> int:
        """Wait for a slot for a version, and return it. Readers of older versions may still be loading them."""
        limit = self._limit(LOAD_HOPS * self.settings.version_bytes.whole)
        return self._synchronizer.begin(version, self._parts, limit).result(limit + ANSWER_S)

    def begin_if_free(self, version: Version) -> int | None:
        """Return a slot for a version, None if none is free now."""
        limit = self.settings.sync_timeout_s
        return self._synchronizer.begin_if_free(version, self._parts).result(limit)

    def copy(self, version: Version, slot: int, *, lazily: bool = False) -> float:
        """Have all ranks copy their weights into a slot. `lazily`: the ranks may copy while they train, until their
        weights change. Returns the seconds of blocked training so far; at the end they are `SealedVersion.blocked_s`.
        """
        limit = self._limit(self.settings.version_bytes.part)
        return max(self._trainer.all(lambda rank: rank.stage(version, slot, lazily=lazily), limit))

    def wait_sealed(self, version: Version) -> SealedVersion:
        """Wait until all parts of a version are in its slot and digested. Any thread."""
        limit = self._limit(self.settings.version_bytes.part + self.settings.version_bytes.node)
        return self._synchronizer.wait_sealed(version, limit).result(limit + ANSWER_S)

    def _limit(self, nbytes: int) -> float:
        return grown(self.settings.sync_timeout_s, nbytes)

    def stage(self, version: Version) -> StagedVersion:
        """Do `begin`, `copy` and `wait_sealed`."""
        started = time.perf_counter()
        blocked = self.copy(version, self.begin(version))
        sealed = self.wait_sealed(version)
        return StagedVersion(sealed, blocked, started, time.perf_counter() - started)

    def give_up(self, version: Version, error: str) -> None:
        """Fail a version that will not be complete, and with it all waits for it. Any thread."""
        self._synchronizer.failed(version, error).result(self._synchronizer.timeout_s)

    def discard(self, version: Version) -> None:
        """Free the slot of a version that is not published."""
        self._synchronizer.discard(version).result(self._synchronizer.timeout_s)

    def record_publish(self, staged: StagedVersion, published: Published | None) -> None:
        """Record that a version is available. Any thread."""
        sealed, nbytes = staged.sealed, staged.sealed.nbytes
        sent = published or Published(encoding="full", nbytes=nbytes)
        self.log.event(
            PublishEvent(
                version=sealed.version.step,
                mode=self.settings.mode,
                encoding=sent.encoding,
                digest=sealed.digest,
                bytes_full=nbytes,
                bytes_moved=sent.nbytes,
                blocked_s=staged.blocked_s,
                digest_s=sealed.digest_s,
                sealed_s=staged.sealed_s,
                total_s=time.perf_counter() - staged.started,
                base=self.settings.base,
                codec=sent.codec,
                changed=sent.changed,
                changed_ppm=sent.changed_ppm,
                encode_s=sent.encode_s,
            )
        )
        if sent.fault is not None:
            self.log.event(FaultEvent(where="deltas", error=sent.fault))

    def record_validation(self, step: int, metrics: Mapping[str, float], found: Answers) -> None:
        """Record the failed rewards and the samples of a validation; the caller records the metrics."""
        if failed := int(metrics.get("val/failed", 0)):
            self.log.event(FailedRewardsEvent(step=step, count=failed, error=found.failure, validation=True))
        if self.settings.record_interval:
            self.log.samples(step, found.excerpt(self.settings.record_groups))


def record_load(log: Recorder, report: LoadReport) -> None:
    """Record that an explorer holds a version. Any thread."""
    log.event(
        LoadEvent(
            version=report.version.step,
            explorer=report.explorer,
            digest=report.digest,
            total_s=report.total_s,
            paused_s=report.paused_s,
            bytes=report.bytes_moved,
            began=report.began,
            base=report.base,
            apply_s=report.apply_s or None,
        )
    )
    if report.fault is not None:
        log.event(FaultEvent(where=report.explorer, error=report.fault))


def record_generated(log: Recorder, generated: Generation) -> None:
    """Record that an explorer made samples. Any thread."""
    log.event(GenerateEvent(**asdict(generated)))


# Validation of a supervised run: the loss of rows that are not trained on.


class LossValidation:
    """Has the ranks measure the loss of a file. A `Validator` without rewards and samples. `batches`: makes the batches
    to measure, each at least one pair. `timeout_s`: limit of a batch, seconds.
    """

    failure = ""

    def __init__(
        self, batches: Callable[[], list[PairBatch]], trainer: TrainerGroup, times: ValidationTimes, timeout_s: float
    ) -> None:
        self._make_batches = batches
        self._batches: list[PairBatch] | None = None
        self._trainer = trainer
        self._times = times
        self._timeout_s = timeout_s
        self.at_start = times.at_start

    def due(self, step: int) -> bool:
        return self._times.due(step)

    def run(self, step: int) -> dict[str, float]:
        """Measure the loss of the ranks' weights: ``val/loss``, the mean over all tokens that count, in nats;
        ``val/tokens`` and ``val/rows``, the numbers of tokens and rows. Raises RunError if a row cannot be encoded, or
        the ranks measured another number of tokens.
        """
        if self._batches is None:
            self._batches = self._make_batches()
        measured = [self._measured(step, batch) for batch in self._batches]
        tokens = sum(batch.token_count for batch in self._batches)
        rows = sum(map(len, self._batches))
        return {"val/loss": sum(measured) / tokens, "val/tokens": float(tokens), "val/rows": float(rows)}

    def excerpt(self, groups: int) -> list[Line]:
        return []

    def _measured(self, step: int, batch: PairBatch) -> float:
        shared = put(batch)
        found = self._trainer.all(lambda rank: rank.measure_loss(shared), self._timeout_s)
        shares = {one.share: one for one in found if one is not None}
        tokens = sum(one.tokens for one in shares.values())
        if tokens != batch.token_count:
            raise RunError(f"the validation of step {step} has {batch.token_count} tokens, the ranks measured {tokens}")
        return sum(shares[number].loss for number in sorted(shares))


# The divergence from a reference that is subtracted from rewards (`algorithm.kl.in_reward`). The ranks measure it, and
# compute the next step's coefficient by verl's controller, as the driver does not import verl.


_COEFFICIENT = "reward_kl_coeff"


class RewardPenalty:
    """Subtracts the divergence of each response from its reward. `timeout_s`: limit of a measurement, seconds. `saved`:
    `state` of the checkpoint that the run begins with; None: none.
    """

    def __init__(
        self, trainer: TrainerGroup, config: InRewardConfig, timeout_s: float, saved: Mapping[str, object] | None = None
    ) -> None:
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._adapts = config.type == "adaptive"
        begin = (saved or {}).get(_COEFFICIENT, config.coeff) if self._adapts else config.coeff
        self.coefficient = cast("float", begin)

    def apply(
        self, step: int, batch: SampleBatch, shared: ObjectRef[SampleBatch]
    ) -> tuple[SampleBatch, dict[str, float]]:
        """Return the samples of a step with their rewards less the penalty, and metrics by verl's names:
        ``actor/reward_kl_penalty`` (the divergence per token in nats, the mean over responses) and
        ``actor/reward_kl_penalty_coeff`` (its coefficient). Then adapts the coefficient. `shared`: the same in Ray's
        object store, for the ranks.
        """
        sums, means = np.full(len(batch), np.nan), np.full(len(batch), np.nan, np.float32)
        for found in self._trainer.all(lambda rank: rank.divergences(step, shared), self._timeout_s):
            if found is not None:  # only ranks of the last pipeline stage have some
                sums[found.rows], means[found.rows] = found.sums, found.means
        if not (np.isfinite(sums).all() and np.isfinite(means).all()):
            raise RunError(
                f"the divergence of step {step} from the reference is not finite; the newest checkpoint is unharmed"
            )
        used, mean = self.coefficient, float(means.mean())
        if self._adapts:
            call = self._trainer.ranks[0].adapted(used, mean, len(batch))
            self.coefficient = call.result(self._timeout_s)
        judged = replace(batch, rewards=batch.rewards - used * sums)
        return judged, {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": used}

    def state(self) -> Mapping[str, object]:
        """Return the coefficient, for a checkpoint, as JSON values."""
        return {_COEFFICIENT: self.coefficient} if self._adapts else {}


# Check that explorers and trainer compute the same log-probs (`explorer.check_agreement`). Before the first update of
# each attempt the ranks compute the log-probs of some samples as training does, dropout included; they are compared
# with those of the explorers. A different class, attention, rope base or soft cap on one side shows here, although all
# weights are equal.


_BOUNDS = {"fp32": 0.01, "fp16": 0.03, "bf16": 0.1}
"""Largest mean difference of a token's log-probs, nats, by the coarsest dtype of either side or of the wire.
docs/explorers.md has the figures of healthy and of wrong pairs.
"""
_SAMPLES, _OF_EACH = 32, 4
"""Samples that are measured at a time, and the fewest of each explorer."""


class AgreementCheck:
    """Measures each explorer once, by samples of the version that the trainer holds. `bound`: of the mean difference,
    nats. `refuse`: a larger difference ends the run; otherwise it is a fault. `timeout_s`: limit of the measurement,
    seconds. `attempt`: of the run; samples of earlier ones say nothing of its explorers.
    """

    def __init__(
        self,
        trainer: TrainerGroup,
        event: Callable[[Event], None],
        bound: float,
        timeout_s: float,
        *,
        refuse: bool,
        attempt: int = 0,
    ) -> None:
        self._attempt = attempt
        self._trainer, self._event, self._timeout_s = trainer, event, timeout_s
        self._bound, self._refuse = bound, refuse
        self._measured: set[str] = set()

    def check(self, step: int, batch: SampleBatch) -> None:
        """Measure samples of explorers that were not measured yet, before a step trains on them. Samples of older
        versions are skipped. Records an event ``agreement`` for each explorer.
        """
        now = (batch.version_steps == step - 1) & (batch.version_attempts == self._attempt)
        fresh = np.flatnonzero(now & ~np.isin(batch.explorers, [*self._measured]))
        of_each = [fresh[batch.explorers[fresh] == name] for name in np.unique(batch.explorers[fresh])]
        if not of_each:
            return
        count = max(_OF_EACH, _SAMPLES // len(of_each))
        some = batch.take(np.concatenate([_spread(rows, count) for rows in of_each]))
        trained = np.full(some.token_count, np.nan)
        shared = put(some)
        for one in self._trainer.all(lambda rank: rank.recompute(shared), self._timeout_s):
            if one is not None:
                trained[some.responses.positions(one.rows)] = one.log_probs
        explorers = np.repeat(some.explorers, some.response_lengths)
        problems = [self._judged(step, str(name), trained, some, explorers == name) for name in np.unique(explorers)]
        if self._refuse and (wrong := next(filter(None, problems), None)):
            raise ConfigError(
                f"{wrong}; step {step} was not trained. Docs: explorers.md, Agreement; explorer.check_agreement=warn "
                "trains all the same"
            )

    def _judged(
        self, step: int, explorer: str, trained: np.ndarray, batch: SampleBatch, tokens: np.ndarray
    ) -> str | None:
        """Record an explorer's figures; return the error, None if they agree."""
        self._measured.add(explorer)
        here, there, count = trained[tokens], batch.log_probs[tokens].astype(np.float64), int(tokens.sum())
        mean, largest = float(np.abs(here - there).mean()), float(np.abs(here - there).max())
        self._event(
            AgreementEvent(step=step, explorer=explorer, tokens=count, mean=mean, largest=largest, bound=self._bound)
        )
        if mean <= self._bound:  # False for NaN, too
            return None
        text = (
            f"{explorer} and the trainer do not compute the same of version {step - 1}: their log-probs of {count} "
            f"tokens differ by {mean:.3g} on average and by {largest:.3g} at most, where {self._bound:.3g} on average "
            f"is allowed (mean log-prob {there.mean():.4g} at the explorer, {here.mean():.4g} at the trainer)"
        )
        if not self._refuse:
            self._event(FaultEvent(where=explorer, error=text))
        return text


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    """Return so many rows, spread evenly over all."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64))]


def agreement_bound(cfg: Config) -> float:
    """Return the largest mean difference of log-probs that dtypes explain, nats. A low temperature does not raise it:
    the logits differ more, but the sampled tokens are more certain.
    """
    dtypes = (cfg.sync.wire_dtype, cfg.explorer.dtype, backend_option(cfg.backend).compute_dtype)
    return max(_BOUNDS[dtype] for dtype in dtypes)
