"""Where the samples of a run come from, in each of its schedules. What makes them is imported where it is needed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from trinity_sync.launch.start import Start
from trinity_sync.tracking.recorder import Recorder

if TYPE_CHECKING:
    from trinity_sync.explorer.bytes_data import NoData
    from trinity_sync.explorer.free_rollout import FreeRollout
    from trinity_sync.explorer.pool import ExplorerPool
    from trinity_sync.explorer.rollout import RolloutData
    from trinity_sync.explorer.validation import Validation
    from trinity_sync.launch.row_scan import Scanned
    from trinity_sync.samples.advantages import Judge, Overlong
    from trinity_sync.samples.filtering import GroupFilter
    from trinity_sync.samples.position import Numbering
    from trinity_sync.sync.base import Publisher
    from trinity_sync.trainer.sft import PairsData


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
        from trinity_sync.explorer.bytes_data import NoData

        return NoData(pool, publisher)
    if pool is None:
        from transformers import AutoConfig, AutoTokenizer

        from trinity_sync.config import plain
        from trinity_sync.launch.encoders import pair_encoder
        from trinity_sync.trainer.sft import PairsData

        tokenizer, config = (
            of.from_pretrained(model_path, trust_remote_code=cfg.model.trust_remote_code)
            for of in (AutoTokenizer, AutoConfig)
        )
        numbering = _numbering(start, cfg.algorithm.batch_size, "algorithm.batch_size", task, "pairs_from")
        return PairsData(task, pair_encoder(plain(cfg.task), tokenizer, config), numbering)
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
    cfg: DictConfig, scanned: Scanned, start: Start, pool: ExplorerPool | None, publisher: Publisher, last_step: int
) -> Validation | None:
    """Make what validates versions; None where the run does not.

    Args:
        cfg: the run's configuration.
        scanned: the run's task, and the prompts to validate on.
        start: a run that goes on has validated what it begins with.
        pool: the explorers.
        publisher: the driver's half of the sync mode.
        last_step: of the run.
    """
    prompts = scanned.validation
    if not prompts or pool is None:
        return None
    from trinity_sync.explorer.validation import Validation, ValidationSettings
    from trinity_sync.samples.validation import shared_prompts

    if "path" in cfg.task and (shared := shared_prompts(scanned.task.validation_prompts(None), prompts)):
        print(
            f"note: {shared} of the {len(prompts)} prompts of task.validation.path={cfg.task.validation.path} are in "
            f"task.path={cfg.task.path}, too, so the validation is not of new prompts alone",
            file=sys.stderr,
        )
    asked, algorithm = cfg.task.validation, cfg.algorithm
    settings = ValidationSettings(
        interval=asked.interval,
        last=last_step,
        at_start=asked.at_start and not start.continued,
        samples_per_prompt=asked.samples_per_prompt,
        temperature=asked.temperature,
        at_a_time=algorithm.prompts_per_step * algorithm.samples_per_prompt,
    )
    return Validation(prompts, pool, publisher, settings)


def free_data(cfg: DictConfig, task: Any, start: Start, pool: ExplorerPool, recorder: Recorder) -> FreeRollout:
    """Make the source of samples of a run whose explorers go at their own pace.

    Args:
        cfg: the run's configuration.
        task: of the run, its rows looked through.
        start: says where the data go on.
        pool: the explorers.
        recorder: takes their loads and faults.
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
    )


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
    from trinity_sync.samples.filtering import GroupFilter

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
    from trinity_sync.trainer.saves import driver_state

    return None if start.folder is None else driver_state(start.folder, "data")


def _tell_inexact(start: Start, before: int, key: str, task: object, by_number: str) -> None:
    print(
        f"note: {start.folder} was saved with {key}={before}, and {type(task).__name__} has no {by_number}(): the run "
        f"goes on with what it gives for step {start.step + 1}, so some may be missed or repeated",
        file=sys.stderr,
    )
