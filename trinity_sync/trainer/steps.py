"""What a step is made of, whatever the schedule: train, stage a version, and what is written down of it. Runs in the
driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray

from trinity_sync.actors.calls import ANSWER_S
from trinity_sync.actors.explorer_client import Generated, LoadReport
from trinity_sync.actors.synchronizer_client import Sealed, SynchronizerClient
from trinity_sync.config.schema import InRewardConfig
from trinity_sync.errors import RunError
from trinity_sync.host import interrupts
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.advantages import Drawn, batch_metrics, drawn_metrics
from trinity_sync.samples.batch import PairBatch, SampleBatch, staleness
from trinity_sync.samples.excerpt import Line
from trinity_sync.samples.position import ValidationTimes
from trinity_sync.tracking.events import (
    AllRejectedEvent,
    Event,
    FailedRewardsEvent,
    FilledBatchEvent,
    GenerateEvent,
    LoadEvent,
    PublishEvent,
    SkippedUpdateEvent,
)
from trinity_sync.tracking.summary import SKIPPED
from trinity_sync.trainer.agreement_check import AgreementCheck
from trinity_sync.trainer.algorithms.base import REJECTED
from trinity_sync.trainer.group import TrainerGroup

if TYPE_CHECKING:
    from ray import ObjectRef


_ROUNDING = 1e-6
"""Of shares that were added up."""


class Log(Protocol):
    """Where the loops report; `tracking.Recorder` is one."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record one trainer step's numbers."""
        ...

    def event(self, event: Event) -> None:
        """Record one event."""
        ...

    def samples(self, step: int, lines: Sequence[Mapping[str, object]]) -> None:
        """Record samples of one trainer step."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What a loop goes by.

    Attributes:
        steps: the last step.
        first: the first step to do (1, or one past the step that was resumed).
        attempt: the run's attempt.
        mode: what the sync mode is called in events, the label of its option.
        sync_interval: steps between versions.
        max_staleness: largest staleness that a sample may have.
        save_interval: steps between full checkpoints, 0 for the last only.
        sync_timeout_s, step_timeout_s: limits in seconds.
        base: digest of the base of the adapters that are published; None: versions are whole.
        record_interval, record_groups: steps between those of which samples are recorded, 0 for none; and of how many
            prompts.
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
    base: str | None = None
    record_interval: int = 0
    record_groups: int = 0

    def publishes(self, step: int) -> bool:
        """Tell whether a step's weights are to become a version."""
        return step == self.steps or step % self.sync_interval == 0

    def records(self, step: int) -> bool:
        """Tell whether samples of a step are to be recorded."""
        return bool(self.record_interval and step % self.record_interval == 0)

    def saves(self, step: int) -> bool:
        """Tell whether a step is to be checkpointed."""
        return step == self.steps or bool(self.save_interval and step % self.save_interval == 0)


@dataclass
class Timing:
    """Seconds of the parts of one step, as metrics."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Measure the block."""
        started = time.perf_counter()
        yield
        self.seconds[f"timing/{name}"] = time.perf_counter() - started

    def step(self, seconds: float, tokens: int) -> None:
        """Note the whole step, and how fast it learnt from so many tokens of responses."""
        self.seconds["timing/step"] = seconds
        self.seconds["perf/tokens_per_s"] = tokens / seconds


@dataclass(frozen=True)
class Staged:
    """A version whose bytes are in a slot: how long the trainer stood still for it, when that began, and how long after
    it was sealed.
    """

    sealed: Sealed
    blocked_s: float
    started: float
    sealed_s: float


class Steps:
    """The parts of a step.

    Args:
        settings: see `LoopSettings`.
        trainer: the group of ranks, initialised and attached.
        synchronizer: the run's synchronizer.
        parts: names of the parts that make a version.
        log: takes what is reported.
        penalty: takes the divergence from the rewards; None: nothing is taken.
        agreement: looks whether trainer and explorers compute the same; None: nobody does.
    """

    def __init__(
        self,
        settings: LoopSettings,
        *,
        trainer: TrainerGroup,
        synchronizer: SynchronizerClient,
        parts: list[str],
        log: Log,
        penalty: RewardPenalty | None = None,
        agreement: AgreementCheck | None = None,
    ) -> None:
        self._penalty = penalty
        self._agreement = agreement
        self._settings = settings
        self._trainer = trainer
        self._synchronizer = synchronizer
        self._parts = parts
        self._log = log

    def measure(self, step: int, batch: SampleBatch | PairBatch, drawn: Drawn | None) -> dict[str, float]:
        """Return the metrics of what a step trains on. Responses that could not be judged are an event, and so is a
        batch that lacks groups with a difference.

        Args:
            step: the step.
            batch: what is trained on.
            drawn: all that was drawn for it; None: the batch is all.
        """
        found = batch_metrics(batch)
        if drawn is not None:
            found |= drawn_metrics(drawn)
            if drawn.filled:
                self._log.event(FilledBatchEvent(step=step, count=drawn.filled, drawn=drawn.groups))
        made = batch if drawn is None else drawn.samples
        if isinstance(made, SampleBatch) and (errors := [error for error in made.errors if error]):
            self._log.event(FailedRewardsEvent(step=step, count=len(errors), error=errors[0]))
        return found

    def train(
        self, step: int, batch: SampleBatch | PairBatch, judge: Callable[[Any], np.ndarray | None]
    ) -> tuple[np.ndarray | None, dict[str, float]]:
        """Have all ranks train on a batch; return its advantages and the metrics, with a `loss` where the batch has
        something to learn. Updates that were skipped, since their gradient was not finite, are an event, and so is a
        step of whose tokens each was left out.

        Args:
            step: the step.
            batch: what is trained on.
            judge: makes the advantages, of samples with the rewards that count.

        Raises:
            RunError: the loss is not finite, or missing.
        """
        interrupts.check()
        if self._agreement is not None and isinstance(batch, SampleBatch):
            self._agreement.check(step, batch)
        shared = ray.put(batch)
        judged, penalised = batch, dict[str, float]()
        if self._penalty is not None and isinstance(batch, SampleBatch):
            judged, penalised = self._penalty.apply(step, batch, shared)
        advantages = judge(judged)
        results = self._trainer.all(
            lambda rank: rank.train_step(step, shared, advantages), self._settings.step_timeout_s
        )
        metrics = next(filter(None, results), {})  # with pipeline stages only ranks of the last one have some
        loss = metrics.get("loss")
        if len(batch) and (loss is None or not np.isfinite(loss)):
            found = "missing from the ranks' metrics" if loss is None else loss
            raise RunError(f"the loss of step {step} is {found}; the newest checkpoint is unharmed")
        if skipped := int(metrics.get(SKIPPED, 0)):
            self._log.event(SkippedUpdateEvent(step=step, count=skipped))
        if metrics.get(REJECTED, 0.0) > 1 - _ROUNDING:
            self._log.event(AllRejectedEvent(step=step))
        return advantages, {**metrics, **penalised}

    def state(self) -> dict[str, object]:
        """Return what of the algorithm changes from step to step, for a checkpoint, as JSON values."""
        return {} if self._penalty is None else self._penalty.state()

    def staleness(self, batch: SampleBatch | PairBatch, step: int) -> dict[str, float]:
        """Measure the staleness of a batch's samples, as metrics.

        Raises:
            RunError: a sample is staler than is allowed.
        """
        if not isinstance(batch, SampleBatch):
            return {}
        lags = [staleness(int(version_step), step) for version_step in np.unique(batch.version_steps)]
        counts = np.unique(batch.version_steps, return_counts=True)[1]
        if max(lags) > self._settings.max_staleness:
            raise RunError(
                f"samples for step {step} are {max(lags)} steps stale; "
                f"sync.max_staleness={self._settings.max_staleness}"
            )
        return {"staleness/mean": float(np.average(lags, weights=counts)), "staleness/max": float(max(lags))}

    def begin(self, version: Version) -> int:
        """Return a slot for a version; wait for one."""
        limit = self._settings.sync_timeout_s
        return self._synchronizer.begin(version, self._parts, limit).result(limit + ANSWER_S)

    def begin_if_free(self, version: Version) -> int | None:
        """Return a slot for a version, None where none is free now."""
        limit = self._settings.sync_timeout_s
        return self._synchronizer.begin_if_free(version, self._parts).result(limit)

    def copy(self, version: Version, slot: int, *, lazily: bool = False) -> float:
        """Have all ranks copy their weights into a slot.

        Args:
            version: the version that the weights are.
            slot: number of the slot.
            lazily: the ranks may go on copying while they train, until their weights change.

        Returns:
            Seconds in which the trainer stood still; copying lazily, `Sealed.blocked_s` will say.
        """
        limit = self._settings.sync_timeout_s
        return max(self._trainer.all(lambda rank: rank.stage(version, slot, lazily=lazily), limit))

    def wait_sealed(self, version: Version) -> Sealed:
        """Wait until all of a version is in its slot and digested. Any thread."""
        limit = self._settings.sync_timeout_s
        return self._synchronizer.wait_sealed(version, limit).result(limit + ANSWER_S)

    def stage(self, version: Version) -> Staged:
        """Do `begin`, `copy` and `wait_sealed`."""
        started = time.perf_counter()
        blocked = self.copy(version, self.begin(version))
        sealed = self.wait_sealed(version)
        return Staged(sealed, blocked, started, time.perf_counter() - started)

    def give_up(self, version: Version, error: str) -> None:
        """Say that the version will not be complete: whoever waits for it is told. Any thread."""
        self._synchronizer.failed(version, error).result(self._synchronizer.timeout_s)

    def discard(self, version: Version) -> None:
        """Give back the slot of a version that is not to be published."""
        self._synchronizer.discard(version).result(self._synchronizer.timeout_s)

    def record_publish(self, staged: Staged) -> None:
        """Write down that a version is available. Any thread."""
        sealed = staged.sealed
        nbytes = sum(info.nbytes for info in sealed.parts.values())
        self._log.event(
            PublishEvent(
                version=sealed.version.step,
                mode=self._settings.mode,
                encoding="full",
                digest=sealed.digest,
                bytes_full=nbytes,
                bytes_moved=nbytes,
                blocked_s=staged.blocked_s,
                digest_s=sealed.digest_s,
                sealed_s=staged.sealed_s,
                total_s=time.perf_counter() - staged.started,
                base=self._settings.base,
            )
        )


def record_load(log: Log, report: LoadReport) -> None:
    """Write down that an explorer holds a version. Any thread."""
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
        )
    )


def record_generated(log: Log, generated: Generated) -> None:
    """Write down that an explorer made samples. Any thread."""
    log.event(GenerateEvent(**asdict(generated)))


# Validation of a supervised run: the loss of rows that are not learnt, measured by the trainer. In the driver.


class LossValidation:
    """Has the ranks measure the loss of a file.

    Args:
        batches: makes them: all that is measured, in pieces, each at least one pair.
        trainer: the group of ranks.
        times: when it takes place.
        timeout_s: limit of a piece, seconds.

    Attributes:
        at_start: whether what the run begins with is validated.
        failure: empty: nothing is judged.
    """

    failure = ""

    def __init__(
        self,
        batches: Callable[[], list[PairBatch]],
        trainer: TrainerGroup,
        times: ValidationTimes,
        timeout_s: float,
    ) -> None:
        self._make_batches = batches
        self._batches: list[PairBatch] | None = None
        self._trainer = trainer
        self._times = times
        self._timeout_s = timeout_s
        self.at_start = times.at_start

    def due(self, step: int) -> bool:
        """Tell whether the weights after a step are validated."""
        return self._times.due(step)

    def run(self, step: int) -> dict[str, float]:
        """Measure the loss of the weights that the ranks have: ``val/loss``, the mean over all tokens that would be
        learnt, in nats; ``val/tokens`` and ``val/rows``, how many these are and of how many rows.

        Raises:
            RunError: a row cannot be learnt, or a rank has measured something else than it was asked for.
        """
        if self._batches is None:
            self._batches = self._make_batches()
        measured = [self._measured(step, batch) for batch in self._batches]
        tokens = sum(batch.token_count for batch in self._batches)
        rows = sum(map(len, self._batches))
        return {"val/loss": sum(measured) / tokens, "val/tokens": float(tokens), "val/rows": float(rows)}

    def excerpt(self, groups: int) -> list[Line]:
        """Write out nothing: nothing is sampled."""
        return []

    def _measured(self, step: int, batch: PairBatch) -> float:
        shared = ray.put(batch)
        found = self._trainer.all(lambda rank: rank.measure_loss(shared), self._timeout_s)
        shares = {one.share: one for one in found if one is not None}
        tokens = sum(one.tokens for one in shares.values())
        if tokens != batch.token_count:
            raise RunError(f"the validation of step {step} has {batch.token_count} tokens, the ranks measured {tokens}")
        return sum(shares[number].loss for number in sorted(shares))


# The divergence from a reference that is taken from rewards (`algorithm.kl.in_reward`). Runs in the driver: the ranks
# measure it, and compute the coefficient of the next step by verl's controller, as the driver imports no engine.


_COEFFICIENT = "reward_kl_coeff"


class RewardPenalty:
    """Takes the divergence of each response from its reward.

    Args:
        trainer: the group of ranks, initialised.
        config: how much of it, and how that changes.
        timeout_s: limit of a measurement, seconds.
        saved: what `state` gave when the checkpoint was saved with which the run begins; None: nothing.

    Attributes:
        coefficient: of the next step.
    """

    def __init__(
        self, trainer: TrainerGroup, config: InRewardConfig, timeout_s: float, saved: Mapping[str, Any] | None = None
    ) -> None:
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._adapts = config.type == "adaptive"
        self.coefficient = (saved or {}).get(_COEFFICIENT, config.coeff) if self._adapts else config.coeff

    def apply(
        self, step: int, batch: SampleBatch, shared: ObjectRef[SampleBatch]
    ) -> tuple[SampleBatch, dict[str, float]]:
        """Return the samples of a step with the rewards that advantages are made of, and metrics by verl's names:
        ``actor/reward_kl_penalty`` (the divergence per token, nats; the mean over responses) and
        ``actor/reward_kl_penalty_coeff`` (what it was multiplied by). One that adapts changes for the next step.

        Args:
            step: the trainer's global step.
            batch: its samples.
            shared: the same, as the ranks are given it.
        """
        sums, means = np.full(len(batch), np.nan), np.full(len(batch), np.nan, np.float32)
        for found in self._trainer.all(lambda rank: rank.divergences(step, shared), self._timeout_s):
            if found is not None:  # with pipeline stages only ranks of the last one have some
                sums[found.rows], means[found.rows] = found.sums, found.means
        if not (np.isfinite(sums).all() and np.isfinite(means).all()):
            raise RunError(
                f"the divergence of step {step} from the reference is not finite; checkpoints of before are unharmed"
            )
        used, mean = self.coefficient, float(means.mean())
        if self._adapts:
            call = self._trainer.ranks[0].adapted(used, mean, len(batch))
            self.coefficient = call.result(self._timeout_s)
        judged = replace(batch, rewards=batch.rewards - used * sums)
        return judged, {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": used}

    def state(self) -> dict[str, object]:
        """Return what a run that goes on needs to know, as JSON values."""
        return {_COEFFICIENT: self.coefficient} if self._adapts else {}
