"""Where the samples of a run come from, in each of its schedules. What makes them is imported where it is needed."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from trinity_sync.config import build_task, validation_prompts
from trinity_sync.launch.start import Start
from trinity_sync.tracking.recorder import Recorder

if TYPE_CHECKING:
    from trinity_sync.explorer.bytes_data import NoData
    from trinity_sync.explorer.free_rollout import FreeRollout
    from trinity_sync.explorer.pool import ExplorerPool
    from trinity_sync.explorer.rollout import RolloutData
    from trinity_sync.explorer.validation import Validation
    from trinity_sync.samples.advantages import Judge
    from trinity_sync.sync.base import Publisher
    from trinity_sync.trainer.sft import PairsData


def lockstep_data(
    cfg: DictConfig, model_path: str, pool: ExplorerPool | None, publisher: Publisher
) -> NoData | PairsData | RolloutData:
    """Make the data of a run whose explorers, where it has any, go step by step with the trainer.

    Args:
        cfg: the run's configuration.
        model_path: folder of the model, for its tokenizer.
        pool: the explorers; None: the task has pairs.
        publisher: the driver's half of the sync mode, which brings them each version.
    """
    if cfg.workload.kind == "bytes" and pool is not None:
        from trinity_sync.explorer.bytes_data import NoData

        return NoData(pool, publisher)
    task = build_task(cfg.task, cfg.seed)
    if pool is None:
        from trinity_sync.trainer.sft import PairsData

        return PairsData(
            task,
            model_path,
            batch_size=cfg.algorithm.batch_size,
            max_length=cfg.task.max_length,
            trust_remote_code=cfg.model.trust_remote_code,
        )
    from trinity_sync.explorer.rollout import RolloutData

    return RolloutData(
        task,
        pool,
        publisher,
        prompts_per_step=cfg.algorithm.prompts_per_step,
        samples_per_prompt=cfg.algorithm.samples_per_prompt,
        judge=_judge(cfg),
    )


def validation_of(
    cfg: DictConfig, start: Start, pool: ExplorerPool | None, publisher: Publisher, last_step: int
) -> Validation | None:
    """Make what validates versions; None where the run does not.

    Args:
        cfg: the run's configuration.
        start: a run that goes on has validated what it begins with.
        pool: the explorers.
        publisher: the driver's half of the sync mode.
        last_step: of the run.
    """
    prompts = validation_prompts(cfg)
    if not prompts or pool is None:
        return None
    from trinity_sync.explorer.validation import Validation, ValidationSettings
    from trinity_sync.samples.validation import shared_prompts

    task = build_task(cfg.task, cfg.seed)
    if "path" in cfg.task and (shared := shared_prompts(task.validation_prompts(None), prompts)):
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


def free_data(cfg: DictConfig, start: Start, pool: ExplorerPool, recorder: Recorder) -> FreeRollout:
    """Make the source of samples of a run whose explorers go at their own pace.

    Args:
        cfg: the run's configuration.
        start: says where the data go on.
        pool: the explorers.
        recorder: takes their loads and faults.
    """
    from trinity_sync.explorer.free_rollout import FreeRollout
    from trinity_sync.samples.queue import QueueRules
    from trinity_sync.trainer.saves import data_position
    from trinity_sync.trainer.steps import record_load

    groups = cfg.algorithm.prompts_per_step
    folder = start.folder
    position = data_position(folder) if folder is not None and start.continued else None
    if position is not None and position["groups_per_step"] != groups:
        before = position["groups_per_step"]
        print(
            f"note: {start.folder} was saved with algorithm.prompts_per_step={before}, so "
            f"the run goes on with the prompts of step {start.step + 1}: a few may be missed or repeated",
            file=sys.stderr,
        )
    return FreeRollout(
        build_task(cfg.task, cfg.seed),
        pool,
        QueueRules(
            groups_per_step=groups,
            max_staleness=cfg.sync.max_staleness,
            wait=cfg.samples.over_stale == "wait",
            max_open=groups * cfg.samples.buffer,
            overdue_s=cfg.explorer.timeout_s,
        ),
        samples_per_prompt=cfg.algorithm.samples_per_prompt,
        judge=_judge(cfg),
        first=start.step + 1,
        position=position,
        timeout_s=cfg.explorer.timeout_s + cfg.cluster.start_timeout_s,
        on_load=partial(record_load, recorder),
        on_fault=recorder.fault,
    )


def _judge(cfg: DictConfig) -> Judge:
    """How samples are judged against the others of their prompt."""
    from trinity_sync.samples.advantages import Overlong, group_advantages

    overlong = None
    node = cfg.algorithm.get("overlong")  # an algorithm of the user's own may have none
    if node is not None and node.buffer:
        overlong = Overlong(longest=cfg.task.response_length, buffer=node.buffer, penalty=node.penalty)
    return partial(group_advantages, normalise=cfg.algorithm.normalise_advantages, overlong=overlong)
