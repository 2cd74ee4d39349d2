"""Makes the sources of a run's samples and its validation, for each schedule. `Job` calls these functions; each imports
what it needs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from xxhash import xxh3_128_hexdigest

from trinity_sync.config.lookup import module_source
from trinity_sync.config.schema import (
    Config,
    FileValidationConfig,
    FilterGroupsConfig,
    OverlongConfig,
    ValidationTimesConfig,
)
from trinity_sync.errors import ConfigError
from trinity_sync.host.references import matched_files
from trinity_sync.launch.row_scan import note
from trinity_sync.launch.start import Start
from trinity_sync.tracking.recorder import Recorder

if TYPE_CHECKING:
    from trinity_sync.actors.synchronizer_client import SynchronizerClient
    from trinity_sync.explorer.pool import ExplorerPool
    from trinity_sync.explorer.rollout import FreeRollout, NoData, RolloutData
    from trinity_sync.explorer.validation import Validation, ValidationSettings, VersionValidations
    from trinity_sync.launch.actors import Preparation
    from trinity_sync.launch.row_scan import ScannedTask
    from trinity_sync.samples.advantages import GroupFilter, Judge
    from trinity_sync.samples.batch import PairBatch
    from trinity_sync.samples.journal import Journal
    from trinity_sync.samples.metrics import ValidationTimes
    from trinity_sync.samples.position import Numbering, SavedPosition
    from trinity_sync.samples.record import Prompt
    from trinity_sync.sync.base import Publisher
    from trinity_sync.tasks.encoding import PairEncoder
    from trinity_sync.trainer.group import TrainerGroup
    from trinity_sync.trainer.loop import Examples, PairsData
    from trinity_sync.trainer.steps import LossValidation

_LEAST_SLOTS = 2
"""Slots for the newest version and the next one. With more slots an older version can be kept."""


@dataclass(frozen=True)
class _Groups:
    """The keys of an algorithm that trains on groups of samples. A user's algorithm need not inherit ours, so its keys
    are read by name.
    """

    prompts_per_step: int
    samples_per_prompt: int
    judge: Judge
    group_filter: GroupFilter | None

    @classmethod
    def of(cls, cfg: Config) -> _Groups:
        from trinity_sync.samples.advantages import GroupFilter, LengthPenalty, group_advantages

        keys = vars(cfg.algorithm)
        overlong, group_filter = None, None
        if (given := keys.get("overlong")) is not None and (penalty := _section(given, OverlongConfig)).buffer:
            longest = cast(int, cfg.task["response_length"])
            overlong = LengthPenalty(longest=longest, buffer=penalty.buffer, penalty=penalty.penalty)
        if (given := keys.get("filter_groups")) is not None and (rules := _section(given, FilterGroupsConfig)).enable:
            group_filter = GroupFilter(
                wanted=keys["prompts_per_step"],
                metric=rules.metric,
                batches=rules.max_num_gen_batches,
                fill=rules.on_shortage == "fill",
                overlong=overlong,
            )
        return cls(
            prompts_per_step=keys["prompts_per_step"],
            samples_per_prompt=keys["samples_per_prompt"],
            judge=partial(group_advantages, normalise=keys["normalise_advantages"], overlong=overlong),
            group_filter=group_filter,
        )


S = TypeVar("S")


def _section(value: object, schema: type[S]) -> S:
    """Return a part of the configuration as its dataclass, also if a user's option file has no schema or further keys.

    The user's class gets the further keys itself.
    """
    if isinstance(value, schema):
        return value
    values = value if isinstance(value, Mapping) else vars(value)
    names = {one.name for one in fields(schema)}  # type: ignore[arg-type]
    return schema(**{name: found for name, found in values.items() if name in names})


def sample_journal(setup: Preparation, *, explores: bool) -> Journal | None:
    """Make the journal of a run's samples; None: it has none, and those of earlier attempts are removed."""
    from trinity_sync.samples.journal import Journal

    cfg, owner, folder = setup.cfg, setup.owner, setup.folder.path / "journal"
    if not explores or not cfg.samples.journal or cfg.workload.kind == "bytes" or owner is None:
        shutil.rmtree(folder, ignore_errors=True)  # this attempt is not in it
        return None
    return Journal(
        folder,
        run=owner.run,
        made_with=made_with(cfg, setup.samples_digest),
        attempt=setup.recorder.attempt,
        most_bytes=cfg.samples.journal_mb << 20,
        fault=setup.recorder.fault,
    )


def made_with(cfg: Config, settings: str) -> str:
    """Return a digest of settings, which have a digest, and of the user's code and files of task, explorer and
    algorithm: samples depend on them.
    """
    found = [settings]
    for values in (cfg.task, vars(cfg.explorer), vars(cfg.algorithm)):
        found += [text for key, value in _leaves(values) for text in _content(key, value)]
    return xxh3_128_hexdigest("\n".join(found).encode("utf-8", "surrogatepass"))


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _leaves(child, str(name))
    elif isinstance(value, Sequence):
        for child in value:
            yield from _leaves(child, key)


def _content(key: str, value: str) -> Iterator[str]:
    """Yield what changes with the code or the file that a setting names."""
    with contextlib.suppress(OSError, ValueError, ImportError, ConfigError):
        module = value.partition(".")[0]
        if key == "_target_" and module != "trinity_sync" and (spec := find_spec(module)) is not None:
            place = Path(spec.origin or "")
            if "site-packages" not in place.parts and (source := module_source(module)) is not None:
                yield f"{module} {source.digest}"
            yield from _stamps([place])
        files = matched_files(value) if key == "path" else [value]
        yield from _stamps(Path(os.path.expanduser(file)) for file in files)  # noqa: PTH111 - no such user


def _stamps(files: Iterable[Path]) -> Iterator[str]:
    """Yield name, size and time of files. A module counts with the modules beside it, which it may import."""
    for file in files:
        beside = sorted(file.parent.glob("*.py")) if file.suffix == ".py" and file.is_file() else [file]
        for one in beside:
            found = one.stat()
            if stat.S_ISREG(found.st_mode):
                yield f"{one} {found.st_size} {found.st_mtime_ns}"


def lockstep_data(
    cfg: Config,
    task: Any,
    start: Start,
    model_path: str,
    pool: ExplorerPool | None,
    publisher: Publisher,
    journal: Journal | None = None,
) -> NoData | PairsData | RolloutData:
    """Make the data of a run whose explorers and trainer take turns."""
    if cfg.workload.kind == "bytes" and pool is not None:
        from trinity_sync.explorer.rollout import NoData

        return NoData(pool, publisher)
    if pool is None:
        from trinity_sync.trainer.loop import PairsData

        numbering = _numbering(start, _batch_size(cfg), "algorithm.batch_size", task, "pairs_from")
        return PairsData(task, _pair_encoder(cfg, model_path), numbering)
    from trinity_sync.explorer.rollout import RolloutData

    groups, key = _Groups.of(cfg), "algorithm.prompts_per_step"
    return RolloutData(
        task,
        pool,
        publisher,
        numbering=_numbering(start, groups.prompts_per_step, key, task, "prompts_from"),
        samples_per_prompt=groups.samples_per_prompt,
        judge=groups.judge,
        group_filter=groups.group_filter,
        journal=journal,
    )


def _batch_size(cfg: Config) -> int:
    size: int = vars(cfg.algorithm)["batch_size"]
    return size


def validation_of(
    cfg: Config, scanned: ScannedTask, times: ValidationTimes, pool: ExplorerPool, publisher: Publisher
) -> Validation | None:
    """Make the validation in which explorers answer prompts between steps; None: there are no prompts."""
    if not scanned.validation:
        return None
    from trinity_sync.explorer.validation import Validation

    settings = _validation_settings(cfg, times)
    return Validation(cast("Sequence[Prompt]", scanned.validation), pool, publisher, settings)


def _validation_settings(cfg: Config, times: ValidationTimes) -> ValidationSettings:
    from trinity_sync.explorer.validation import ValidationSettings

    settings, groups = _section(cfg.task["validation"], FileValidationConfig), _Groups.of(cfg)
    return ValidationSettings(
        times=times,
        samples_per_prompt=settings.samples_per_prompt,
        temperature=settings.temperature,
        at_a_time=groups.prompts_per_step * groups.samples_per_prompt,
    )


def loss_validation_of(
    cfg: Config,
    scanned: ScannedTask,
    times: ValidationTimes,
    *,
    model_path: str,
    trainer: TrainerGroup,
    step_timeout_s: float,
) -> LossValidation | None:
    """Make the validation in which the trainer measures the loss of rows; None: there are no rows. `step_timeout_s`:
    timeout of a batch as large as a step's, seconds.
    """
    rows, most = cast("Examples", scanned.validation), _batch_size(cfg)
    if not rows:
        return None
    from trinity_sync.trainer.steps import LossValidation

    batches = partial(_pair_batches, _pair_encoder(cfg, model_path), rows, most)
    return LossValidation(batches, trainer, times, step_timeout_s)


def validation_times(cfg: Config, start: Start, metrics: Path, last_step: int) -> ValidationTimes | None:
    """Return when a run validates; None: never. A resumed run also validates its first version if that was due and its
    metrics file has no result of it.
    """
    from trinity_sync.config.model_checks import validates
    from trinity_sync.samples.metrics import ValidationTimes
    from trinity_sync.tracking.summary import was_validated

    if not validates(cfg.task):
        return None
    settings = _section(cfg.task["validation"], ValidationTimesConfig)
    times = ValidationTimes(interval=settings.interval, last=last_step, at_start=settings.at_start or not last_step)
    if not start.continued:
        return times
    return replace(times, at_start=times.due(start.step) and not was_validated(metrics, start.step))


def version_validations_of(
    cfg: Config,
    scanned: ScannedTask,
    times: ValidationTimes,
    *,
    start: Start,
    pool: ExplorerPool,
    synchronizer: SynchronizerClient,
    recorder: Recorder,
) -> VersionValidations | None:
    """Make the validation of versions by explorers, concurrent with training; None: there are no prompts."""
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
        explorer_timeout_s=pool.work_limit(cfg.cluster.start_timeout_s),
        on_load=partial(record_load, recorder),
        on_fault=recorder.fault,
    )


def free_data(
    cfg: Config,
    task: Any,
    start: Start,
    pool: ExplorerPool,
    recorder: Recorder,
    validations: VersionValidations | None = None,
    journal: Journal | None = None,
    *,
    outlives: bool = False,
) -> FreeRollout:
    """Make the source of samples of a run whose explorers run ahead of the trainer. `outlives`: it may go on after the
    attempt, if finished groups have a journal.
    """
    from trinity_sync.explorer.rollout import FreeRollout
    from trinity_sync.samples.queue import QueueRules
    from trinity_sync.trainer.steps import record_load

    groups, saved = _Groups.of(cfg), _saved(start)
    per_step, group_filter = groups.prompts_per_step, groups.group_filter
    if saved is not None and saved["groups_per_step"] != per_step and not hasattr(task, "prompts_from"):
        _tell_inexact(start, saved["groups_per_step"], "algorithm.prompts_per_step", task, "prompts_from")
        saved = None
    return FreeRollout(
        task,
        pool,
        QueueRules(
            groups_per_step=per_step,
            max_staleness=cfg.sync.max_staleness,
            wait=cfg.samples.over_stale == "wait",
            max_open=per_step * cfg.samples.buffer,
            overdue_s=pool.work_limit(),
            most_made=None if group_filter is None else group_filter.most,
        ),
        samples_per_prompt=groups.samples_per_prompt,
        judge=groups.judge,
        first=start.step + 1,
        position=saved,
        explorer_timeout_s=pool.work_limit(cfg.cluster.start_timeout_s),
        on_load=partial(record_load, recorder),
        on_fault=recorder.fault,
        group_filter=group_filter,
        validations=validations,
        journal=journal,
        outlives=outlives and journal is not None,
    )


def _pair_encoder(cfg: Config, model_path: str) -> PairEncoder:
    from trinity_sync.models.tokens import read_tokens
    from trinity_sync.tasks.encoding import PairEncoder

    tokens = read_tokens(model_path, trust_remote_code=cfg.model.trust_remote_code)
    return PairEncoder.of_task(cfg.task, tokens)


def _pair_batches(encoder: PairEncoder, rows: Examples, most: int) -> list[PairBatch]:
    """Return all rows as tokens, in batches of at most `most` rows."""
    from trinity_sync.trainer.loop import pair_batch

    return [pair_batch(encoder, rows[at : at + most]) for at in range(0, len(rows), most)]


def _numbering(start: Start, count: int, key: str, task: object, by_number: str) -> Numbering:
    """Return which of the task's prompts each step of a run in lockstep has."""
    from trinity_sync.samples.position import Position

    step, saved = start.step + 1, _saved(start)
    if saved is None:
        return Position.at(step, count).numbering
    found = Position.of_json(saved)
    going_on, missed, twice = found.in_step(step, count)
    if count != found.numbering.per_step and not hasattr(task, by_number):
        _tell_inexact(start, found.numbering.per_step, key, task, by_number)
    elif missed or twice:
        note(
            f"{start.folder} was saved with trainer.schedule=free, which trains on prompts as they become ready: in "
            f"lockstep {missed} prompts are missed and {twice} trained on twice"
        )
    return going_on.numbering


def _saved(start: Start) -> SavedPosition | None:
    """Return the position in the data that the first checkpoint of the run has saved, if any."""
    from trinity_sync.trainer.full_saves import driver_state

    return None if start.folder is None else cast("SavedPosition | None", driver_state(start.folder, "data"))


def _tell_inexact(start: Start, before: int, key: str, task: object, by_number: str) -> None:
    note(
        f"{start.folder} was saved with {key}={before}, and {type(task).__name__} has no {by_number}(): the run goes "
        f"on with what it gives for step {start.step + 1}, so some may be missed or repeated"
    )
