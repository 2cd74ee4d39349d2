"""Where the samples of a run come from, in each of its schedules. What makes them is imported where it is needed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig

from trinity_sync.launch.start import Start
from trinity_sync.tracking.recorder import Recorder

if TYPE_CHECKING:
    from trinity_sync.actors.synchronizer_client import SynchronizerClient
    from trinity_sync.explorer.free_rollout import FreeRollout
    from trinity_sync.explorer.pool import ExplorerPool
    from trinity_sync.explorer.rollout import NoData, RolloutData
    from trinity_sync.explorer.validation import Validation, ValidationSettings, VersionValidations
    from trinity_sync.launch.row_scan import Scanned
    from trinity_sync.samples.advantages import GroupFilter, Judge, Overlong
    from trinity_sync.samples.batch import PairBatch
    from trinity_sync.samples.metrics import ValidationTimes
    from trinity_sync.samples.position import Numbering
    from trinity_sync.samples.record import Prompt
    from trinity_sync.sync.base import Publisher
    from trinity_sync.tasks.encoding import PairEncoder
    from trinity_sync.trainer.group import TrainerGroup
    from trinity_sync.trainer.sft_data import Examples, PairsData
    from trinity_sync.trainer.steps import LossValidation

_LEAST_SLOTS = 2
"""One for the newest version and one for the next: with more a version can be held that is neither."""


def lockstep_data(
    cfg: DictConfig, task: Any, start: Start, model_path: str, pool: ExplorerPool | None, publisher: Publisher
) -> NoData | PairsData | RolloutData:
    """Make the data of a run whose explorers, where it has any, go step by step with the trainer.

    Args:
        cfg: the run's configuration.
        task: of the run, its rows looked through.
        start: says where the data go on.
        model_path: folder of the model, for its tokenizer.
        pool: the explorers; None: the task has pairs.
        publisher: the driver's half of the sync mode, which brings them each version.
    """
    if cfg.workload.kind == "bytes" and pool is not None:
        from trinity_sync.explorer.rollout import NoData

        return NoData(pool, publisher)
    if pool is None:
        from trinity_sync.trainer.sft_data import PairsData

        numbering = _numbering(start, cfg.algorithm.batch_size, "algorithm.batch_size", task, "pairs_from")
        return PairsData(task, _pair_encoder(cfg, model_path), numbering)
    from trinity_sync.explorer.rollout import RolloutData

    key = "algorithm.prompts_per_step"
    return RolloutData(
        task,
        pool,
        publisher,
        numbering=_numbering(start, cfg.algorithm.prompts_per_step, key, task, "prompts_from"),
        samples_per_prompt=cfg.algorithm.samples_per_prompt,
        judge=_judge(cfg),
        group_filter=_filter(cfg),
    )


def validation_of(
    cfg: DictConfig, scanned: Scanned, times: ValidationTimes, pool: ExplorerPool, publisher: Publisher
) -> Validation | None:
    """Make what has explorers answer prompts; None where the run validates nothing.

    Args:
        cfg: the run's configuration.
        scanned: the run's task, and the prompts to validate on.
        times: when that is done.
        pool: the explorers.
        publisher: the driver's half of the sync mode.
    """
    if not scanned.validation:
        return None
    from trinity_sync.explorer.validation import Validation

    settings = _validation_settings(cfg, times)
    return Validation(cast("Sequence[Prompt]", scanned.validation), pool, publisher, settings)


def _validation_settings(cfg: DictConfig, times: ValidationTimes) -> ValidationSettings:
    from trinity_sync.explorer.validation import ValidationSettings

    asked, algorithm = cfg.task.validation, cfg.algorithm
    return ValidationSettings(
        times=times,
        samples_per_prompt=asked.samples_per_prompt,
        temperature=asked.temperature,
        at_a_time=algorithm.prompts_per_step * algorithm.samples_per_prompt,
    )


def loss_validation_of(
    cfg: DictConfig,
    scanned: Scanned,
    times: ValidationTimes,
    *,
    model_path: str,
    trainer: TrainerGroup,
    timeout_s: float,
) -> LossValidation | None:
    """Make what has the trainer measure the loss of rows; None where the run validates nothing.

    Args:
        cfg: the run's configuration.
        scanned: the run's task, and the rows to validate on.
        times: when that is done.
        model_path: folder of the model, for its tokenizer.
        trainer: the group of ranks.
        timeout_s: limit of as many rows as a step has, seconds.
    """
    rows, most = cast("Examples", scanned.validation), cfg.algorithm.batch_size
    if not rows:
        return None
    from trinity_sync.trainer.steps import LossValidation

    batches = partial(_pair_batches, _pair_encoder(cfg, model_path), rows, most)
    return LossValidation(batches, trainer, times, timeout_s)


def validation_times(cfg: DictConfig, start: Start, metrics: Path, last_step: int) -> ValidationTimes | None:
    """When a run validates; None: never. One that goes on validates what it begins with where that was due and is not
    on record.

    Args:
        cfg: the run's configuration.
        start: where it begins.
        metrics: its metrics.jsonl.
        last_step: of the run.
    """
    from trinity_sync.config.model_checks import validates
    from trinity_sync.samples.metrics import ValidationTimes
    from trinity_sync.tracking.summary import was_validated

    if not validates(cfg.task):
        return None
    asked = cfg.task.validation
    times = ValidationTimes(interval=asked.interval, last=last_step, at_start=asked.at_start)
    if not start.continued:
        return times
    return replace(times, at_start=times.due(start.step) and not was_validated(metrics, start.step))


def version_validations_of(
    cfg: DictConfig,
    scanned: Scanned,
    times: ValidationTimes,
    *,
    start: Start,
    pool: ExplorerPool,
    synchronizer: SynchronizerClient,
    recorder: Recorder,
) -> VersionValidations | None:
    """Make what has explorers validate versions while others go on; None where the run validates nothing.

    Args:
        cfg: the run's configuration.
        scanned: the run's task, and the prompts to validate on.
        times: when that is done.
        start: where the run begins.
        pool: the explorers.
        synchronizer: knows the versions.
        recorder: takes loads and faults.
    """
    if not scanned.validation:
        return None
    from trinity_sync.explorer.validation import VersionValidations
    from trinity_sync.trainer.steps import record_load

    settings = _validation_settings(cfg, times)
    return VersionValidations(
        cast("Sequence[Prompt]", scanned.validation),
        pool,
        replace(settings, at_a_time=-(-settings.at_a_time // cfg.explorer.replicas)),
        begins_with=start.step,
        attempt=recorder.attempt,
        synchronizer=synchronizer,
        keep=cfg.sync.slots > _LEAST_SLOTS,
        timeout_s=cfg.explorer.timeout_s + cfg.cluster.start_timeout_s,
        on_load=partial(record_load, recorder),
        on_fault=recorder.fault,
    )


def free_data(
    cfg: DictConfig,
    task: Any,
    start: Start,
    pool: ExplorerPool,
    recorder: Recorder,
    validations: VersionValidations | None = None,
) -> FreeRollout:
    """Make the source of samples of a run whose explorers go at their own pace.

    Args:
        cfg: the run's configuration.
        task: of the run, its rows looked through.
        start: says where the data go on.
        pool: the explorers.
        recorder: takes their loads and faults.
        validations: what explorers do first.
    """
    from trinity_sync.explorer.free_rollout import FreeRollout
    from trinity_sync.samples.queue import QueueRules
    from trinity_sync.trainer.steps import record_load

    groups, group_filter = cfg.algorithm.prompts_per_step, _filter(cfg)
    saved = _saved(start)
    if saved is not None and saved["groups_per_step"] != groups and not hasattr(task, "prompts_from"):
        _tell_inexact(start, saved["groups_per_step"], "algorithm.prompts_per_step", task, "prompts_from")
        saved = None
    return FreeRollout(
        task,
        pool,
        QueueRules(
            groups_per_step=groups,
            max_staleness=cfg.sync.max_staleness,
            wait=cfg.samples.over_stale == "wait",
            max_open=groups * cfg.samples.buffer,
            overdue_s=cfg.explorer.timeout_s,
            most_made=None if group_filter is None else group_filter.most,
        ),
        samples_per_prompt=cfg.algorithm.samples_per_prompt,
        judge=_judge(cfg),
        first=start.step + 1,
        position=saved,
        timeout_s=cfg.explorer.timeout_s + cfg.cluster.start_timeout_s,
        on_load=partial(record_load, recorder),
        on_fault=recorder.fault,
        group_filter=group_filter,
        validations=validations,
    )


def _pair_encoder(cfg: DictConfig, model_path: str) -> PairEncoder:
    from trinity_sync.config import plain
    from trinity_sync.models.tokens import read_tokens
    from trinity_sync.tasks.encoding import PairEncoder

    tokens = read_tokens(model_path, trust_remote_code=cfg.model.trust_remote_code)
    return PairEncoder.of_task(plain(cfg.task), tokens)


def _pair_batches(encoder: PairEncoder, rows: Examples, most: int) -> list[PairBatch]:
    """All rows as tokens, so many at a time."""
    from trinity_sync.trainer.sft_data import pair_batch

    return [pair_batch(encoder, rows[at : at + most]) for at in range(0, len(rows), most)]


def _judge(cfg: DictConfig) -> Judge:
    """How samples are judged against the others of their prompt."""
    from trinity_sync.samples.advantages import group_advantages

    return partial(group_advantages, normalise=cfg.algorithm.normalise_advantages, overlong=_overlong(cfg))


def _overlong(cfg: DictConfig) -> Overlong | None:
    """The penalty on long responses; None: there is none."""
    from trinity_sync.samples.advantages import Overlong

    node = cfg.algorithm.get("overlong")  # an algorithm of the user's own may have none
    if node is None or not node.buffer:
        return None
    return Overlong(longest=cfg.task.response_length, buffer=node.buffer, penalty=node.penalty)


def _filter(cfg: DictConfig) -> GroupFilter | None:
    """Which groups are left out; None: none is."""
    from trinity_sync.samples.advantages import GroupFilter

    node = cfg.algorithm.get("filter_groups")
    if node is None or not node.enable:
        return None
    return GroupFilter(
        wanted=cfg.algorithm.prompts_per_step,
        metric=node.metric,
        batches=node.max_num_gen_batches,
        fill=node.on_shortage == "fill",
        overlong=_overlong(cfg),
    )


def _numbering(start: Start, count: int, key: str, task: object, by_number: str) -> Numbering:
    """Which of the task's prompts the steps of a run in lockstep have, so many each.

    Args:
        start: where the run begins.
        count: prompts of each step.
        key: what says so.
        task: of the run.
        by_number: the method with which a task gives prompts by their number.
    """
    from trinity_sync.samples.position import Position

    step, saved = start.step + 1, _saved(start)
    if saved is None:
        return Position.at(step, count).numbering
    found = Position.of_json(saved)
    going_on, missed, twice = found.in_step(step, count)
    if count != found.numbering.per_step and not hasattr(task, by_number):
        _tell_inexact(start, found.numbering.per_step, key, task, by_number)
    elif missed or twice:
        print(
            f"note: {start.folder} was saved with trainer.schedule=free, which trains on prompts as they become ready: "
            f"in lockstep {missed} prompts are missed and {twice} trained on twice",
            file=sys.stderr,
        )
    return going_on.numbering


def _saved(start: Start) -> Mapping[str, Any] | None:
    """Where the data were when the checkpoint was saved with which the run begins; None: it does not say."""
    from trinity_sync.trainer.full_saves import driver_state

    return None if start.folder is None else driver_state(start.folder, "data")


def _tell_inexact(start: Start, before: int, key: str, task: object, by_number: str) -> None:
    print(
        f"note: {start.folder} was saved with {key}={before}, and {type(task).__name__} has no {by_number}(): the run "
        f"goes on with what it gives for step {start.step + 1}, so some may be missed or repeated",
        file=sys.stderr,
    )
