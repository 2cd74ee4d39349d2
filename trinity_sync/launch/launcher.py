"""Does one run: opens its folder and record, starts Ray, drives the `Job`, and cleans up. `launch.app` calls `run` with
a checked configuration. The driver imports neither torch nor verl.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from trinity_sync.backends.option import accelerator_count, platform_env
from trinity_sync.checkpoint.folder import recovery
from trinity_sync.checkpoint.folder.lock import has_no_monitor, locked
from trinity_sync.checkpoint.folder.owner import MARK, Owner, check, write_mark
from trinity_sync.checkpoint.memory_states import MemoryStates
from trinity_sync.config import Config, RunConfig
from trinity_sync.config.composition import section
from trinity_sync.config.lora_settings import Adapter, adapter_of
from trinity_sync.errors import ConfigError, RunError, TrinityError, in_one_line
from trinity_sync.host.child_process import own_names
from trinity_sync.host.interrupts import failing_of_it, interruptible, last_words, shielded, wait_until
from trinity_sync.host.logs import make_room, story
from trinity_sync.host.masking import masked_override
from trinity_sync.host.threads import deaths_told
from trinity_sync.launch.actors import Preparation, Setup
from trinity_sync.launch.cluster import ClusterMetrics, cluster, has_gpus
from trinity_sync.launch.job import Job
from trinity_sync.launch.kept_explorers import KeptExplorers
from trinity_sync.launch.machine import SOCKET_BYTES, check_room, socket_room
from trinity_sync.launch.row_scan import ScannedTask, note, scanned_task
from trinity_sync.launch.start import (
    STORE,
    Resume,
    Start,
    check_owned,
    checkpoint_folder,
    committed_steps,
    copied_to,
    look_before_resume,
    recorded_commits,
    resume_command,
    run_mirror,
    written_places,
)
from trinity_sync.models.files import MAX_FILE_BYTES, ModelFiles, check_alone, check_code, check_named
from trinity_sync.models.tokens import check_vocabulary
from trinity_sync.tracking import json_lines
from trinity_sync.tracking.events import HealEvent, RowsEvent
from trinity_sync.tracking.recorder import Recorder
from trinity_sync.tracking.run_record import RunFolder, holds_run, run_id
from trinity_sync.tracking.trackers import Tracker, build_trackers
from trinity_sync.trainer.algorithms.base import algorithm_of
from trinity_sync.weights.lora import ALL_LINEAR, CONFIG_FILE
from trinity_sync.weights.slots import remove_stale

if TYPE_CHECKING:
    from trinity_sync.tracking.live import Mode

_MONITOR_LIMIT_S = 30.0
"""Timeout for the monitor's end. The next run in the folder removes later leftovers."""
_TIDY_S = 1.0
"""Share of the time after a signal that is reserved for the rest of the clean-up."""


class Healer(Protocol):
    """Decides whether an attempt follows a failed one; `healing.RestartPolicy`. `kept`: explorers kept until then.
    `gpus_per_node`: the most that an attempt had on a node.
    """

    kept: KeptExplorers
    gpus_per_node: int

    def heals(self, error: BaseException | None) -> bool: ...

    def goes_on(
        self, folder: RunFolder, start: Start, last: int, error: BaseException, attempt: int, since: float
    ) -> str | None: ...

    def begun(self, run_dir: Path, attempt: int) -> None: ...

    def most_gpus(self, run_dir: Path, attempt: int, gpus_per_node: int) -> int: ...

    def event(self, step: int) -> HealEvent | None: ...


def run(
    config: RunConfig,
    run_dir: Path,
    *,
    resume: Resume | None = None,
    until: int | None = None,
    job: type[Job] | None = None,
    settings: Callable[[RunConfig], AbstractContextManager[None]] | None = None,
    healing: Healer | None = None,
    states: MemoryStates | None = None,
) -> int:
    """Do one attempt of a run, from start to end. `settings`: saves the settings that it is called with. `healing`:
    decides whether another attempt follows a failure, in this process. `states`: those in memory. Returns the exit
    code: 0 done, 130 interrupted.
    """
    cfg = config.settings
    threads = _threads()
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.enter_context(interruptible(sigterm_saves=cfg.checkpoint.save_on_sigterm, limit_s=cfg.checkpoint.stop_s))
        looked = look(config, run_dir, new=resume is None)
        scanned, config = looked.scanned, looked.config
        cfg, saving = config.settings, settings(config) if settings else contextlib.nullcontext()
        folder = stack.enter_context(RunFolder.open(run_dir, resume=resume is not None))
        checkpoints = checkpoint_folder(cfg, folder.path)
        committed: list[int] = []
        check_place = partial(check, checkpoints, Owner.new("", folder.path), recorded=None)
        if resume is not None:
            check_place = partial(check_owned, folder.path, checkpoints, named="checkpoint.dir" in resume.given)
        check_place()  # before the lock says who writes there
        if resume is not None:
            committed = committed_steps(folder.events, checkpoints)
            look_before_resume(cfg, checkpoints, resume, committed)
        stack.enter_context(locked(checkpoints, folder.path))
        check_place()
        owner = Owner.new(run_id(folder.run_json), folder.path)
        write_mark(checkpoints, owner)
        if states is not None:
            states.owner, states.is_recorded = owner, partial(_has_step, folder.metrics)
        marks = stack.enter_context(contextlib.ExitStack())
        if resume is None:
            marks.callback(_take_back, folder, (checkpoints / MARK).unlink)
        recorded, copied = recorded_commits(folder.events), copied_to(folder.events)
        mirror = run_mirror(cfg, owner, folder.logs, resume=resume, copied=copied)
        store = run_mirror(cfg, owner, folder.logs, resume=resume, copied=copied, key=STORE)
        for place in (mirror, store):
            if resume is None and place is not None:
                marks.callback(_take_back, folder, place.unmark)
        start = Start.find(
            cfg,
            checkpoints,
            looked.start,
            resume=resume,
            committed=committed,
            mirror=mirror,
            recorded=recorded,
            states=states,
        )
        if store is not None:
            store.check(checkpoints, recorded, required=resume is None)
        last_step = min(cfg.trainer.steps, max(until or cfg.trainer.steps, start.step + 1))
        if resume is None:
            stack.enter_context(saving)
        recorder = _recorder(config, folder, start, owner, threads, last_step, looked.trackers, healing)
        marks.pop_all()  # the run has begun: its marks stay
        try:
            stack.enter_context(last_words(partial(recorder.finish, "interrupted")))
            with recorder, deaths_told(recorder.fault), saving if resume else contextlib.nullcontext():
                if healing is not None:
                    healing.begun(folder.path, recorder.attempt)
                if states is not None:
                    stack.enter_context(states.attempt(recorder.attempt))
                if scanned.counts is not None:
                    recorder.event(RowsEvent(**scanned.counts._asdict()))
                prepared = Preparation(
                    cfg=cfg,
                    config_digest=config.digest,
                    samples_digest=config.samples_digest,
                    scanned=scanned,
                    folder=folder,
                    start=start,
                    owner=owner,
                    mirror=mirror,
                    store=store,
                    recorder=recorder,
                    last_step=last_step,
                    stop=stop,
                    kept=None if healing is None else healing.kept,
                    states=states,
                    heals=healing is not None and healing.event(start.step) is not None,
                )
                with failing_of_it():
                    _run(job or Job, config, prepared, threads, healing)
        except KeyboardInterrupt:
            return 130
        except Exception as error:
            if healing is not None and healing.heals(error):
                folder.pass_on()
            elif states is not None:
                states.rescue(checkpoints)
            raise
    return 0


def _has_step(metrics: Path, step: int, attempt: int) -> bool:
    return any((line.get("step"), line.get("attempt")) == (step, attempt) for line in json_lines.read(metrics))


class LookResult(NamedTuple):
    """What the checks before a start have made."""

    config: RunConfig  # with the number of steps
    scanned: ScannedTask
    trackers: Sequence[Tracker]
    start: Start | None  # of a new run


def look(config: RunConfig, run_dir: Path, *, new: bool = True) -> LookResult:
    """Check whether a run could start in a folder; write nothing. A dry run consists of these checks, and a launch
    begins with them.
    """
    cfg = config.settings
    _threads()
    if new and holds_run(run_dir):
        raise ConfigError(f"{run_dir} already holds a run; choose another folder by hydra.run.dir")
    check_beforehand(cfg)
    trackers, scanned = run_trackers(cfg), scanned_task(cfg)
    config = _with_steps(config, scanned.task)
    cfg = config.settings
    if not new:
        return LookResult(config, scanned, trackers, None)
    checkpoints = checkpoint_folder(cfg, run_dir.absolute())
    owner = Owner.new("", run_dir)
    check(checkpoints, owner, recorded=None)
    start = Start.first(cfg, checkpoints, None)
    for warning in check_room(cfg, run_dir, checkpoints, start.step):
        note(warning)
    for place in (run_mirror(cfg, owner), run_mirror(cfg, owner, key=STORE)):
        if place is not None:
            place.look(checkpoints)
    return LookResult(config, scanned, trackers, start)


def _with_steps(config: RunConfig, task: object) -> RunConfig:
    """Return a copy with `trainer.steps` for `trainer.total_epochs` passes over the rows of a task, checked again."""
    cfg, epochs = config.settings, config.settings.trainer.total_epochs
    if epochs is None:
        return config
    all_rows: Callable[[], Sequence[object]] | None = getattr(task, "all_rows", None)
    if all_rows is None:
        raise ConfigError(
            f"trainer.total_epochs is {epochs}, but task={cfg.task.get('_target_')} has no all_rows() to count; give "
            "trainer.steps"
        )
    key = "algorithm.prompts_per_step" if algorithm_of(cfg.algorithm).explores else "algorithm.batch_size"
    rows, per_step = len(all_rows()), int(str(config.select(key)))
    steps = -(-rows * epochs // per_step)
    note(f"trainer.total_epochs={epochs}: {steps} steps for {rows} rows, {per_step} a step ({key})")
    counted = config.updated({"trainer.steps": steps, "trainer.total_epochs": None})
    counted.check_values()
    return counted


def _take_back(folder: RunFolder, unmark: Callable[[], None]) -> None:
    """Remove the mark of a refused start: a next start on another host cannot see that this one has ended."""
    with contextlib.suppress(OSError, RunError):
        if not holds_run(folder.path):
            unmark()


def _recorder(
    config: RunConfig,
    folder: RunFolder,
    start: Start,
    owner: Owner,
    threads: int,
    last_step: int,
    trackers: Sequence[Tracker],
    healing: Healer | None,
) -> Recorder:
    from trinity_sync.report import write_report

    cfg = config.settings

    on_cpus = cfg.cluster.address is None and accelerator_count() == 0  # as far as is known before Ray starts
    return Recorder.start(
        folder,
        command=[masked_override(text) for text in sys.argv],
        seed=cfg.seed,
        config_digest=config.digest,
        threads=threads,
        total_steps=last_step,
        name=cfg.name,
        subtitle=f"{cfg.backend.strategy} x {cfg.backend.ranks}, sync={cfg.sync.mode}",
        config=config.shown(),
        reproducible=cfg.trainer.schedule == "lockstep" and (cfg.trainer.deterministic or on_cpus),
        resumed_from=start.step if start.resumed else None,
        id=owner.run,
        places=written_places(cfg, folder.path),
        view=cast("Mode", cfg.live),
        trackers=trackers,
        report=write_report,
        resume=resume_command,
        checkpoints=start.checkpoints.absolute(),
        goes_on=None if healing is None else partial(healing.goes_on, folder, start, last_step),
        healed=None if healing is None else healing.event(start.step),
    )


def run_trackers(cfg: Config) -> list[Tracker]:
    """Build the trackers of the config, and that of an existing cluster; errors as of `build_trackers`."""
    trackers = build_trackers({name: section(cfg.tracker, name) for name in cfg.tracker})
    if cfg.cluster.address is not None and cfg.cluster.metrics:
        trackers.append(ClusterMetrics())
    return trackers


def _threads() -> int:
    """Return the number of compute threads of each process."""
    given = os.environ.get("OMP_NUM_THREADS", "").strip() or "1"
    if not given.isdecimal() or int(given) == 0:
        raise ConfigError(
            f"OMP_NUM_THREADS is {given!r}; set it to one whole number from 1, the threads of each process, or unset it"
        )
    return int(given)


def _uses_gpu(cfg: Config, healing: Healer | None) -> bool:
    """Return whether an attempt uses GPUs: one that follows another stays on them where their nodes are lost."""
    address, before = cfg.cluster.address, healing is not None and healing.gpus_per_node > 0
    return accelerator_count() > 0 or (address is not None and (before or has_gpus(address)))


def _run(job_class: type[Job], config: RunConfig, prepared: Preparation, threads: int, healing: Healer | None) -> None:
    cfg, recorder = config.settings, prepared.recorder
    use_gpu = _uses_gpu(cfg, healing)
    env = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        # marks the processes of this run, so that leftover processes can be found
        "TRINITY_SYNC_DRIVER": str(os.getpid()),
        **own_names(),
        **platform_env(use_gpu),
    }
    os.environ.update(env)
    for advise in algorithm_of(cfg.algorithm).advice:  # settings that are valid but probably not meant
        for found in advise(config.select):
            story.warning("%s", found)
            print(f"warning: {found}", file=sys.stderr)
    run_key = f"{os.getpid()}-{secrets.token_hex(4)}"
    recorder.phase("starting Ray")
    cpus = needed_processors(cfg) + 1
    try:
        lost = partial(recorder.finish, "failed")
        name = f"trinity-{run_key}"
        forked = cfg.cluster.forks and not use_gpu
        with cluster(cfg.cluster, namespace=name, cpus=cpus, env=env, forked=forked, lost=lost) as ray_cluster:
            if healing is not None and use_gpu:
                most = healing.most_gpus(prepared.folder.path, recorder.attempt, ray_cluster.gpus_per_node)
                ray_cluster = replace(ray_cluster, gpus_per_node=most)
            setup = Setup(**vars(prepared), cluster=ray_cluster, run_key=run_key, use_gpu=use_gpu)
            job = job_class(setup)
            peaks: dict[str, int] = {}
            # The record ends before Ray does: a hanging Ray can kill this process.
            with job.actors.explorers_ended(), recorder.ending(peaks):
                started = False
                try:
                    with failing_of_it():
                        job.start()
                        started = True
                        job.loop()
                finally:
                    with shielded():
                        with contextlib.suppress(Exception):
                            peaks.update(job.actors.peak_memory() if started else {})
                        job.actors.close()
    finally:
        with shielded():
            _tidy(prepared.start.checkpoints, prepared.folder, cfg.sync.shm_dir)


def _tidy(checkpoints: Path, folder: RunFolder, shm_dir: str) -> None:
    """Remove unfinished saves and slots that the run has left. Failures are printed, so that they never hide the run's
    result.

    The writers have ended by now, or are about to in an existing cluster: staged saves and open slots are useless.
    """
    try:
        if wait_until(partial(has_no_monitor, checkpoints), _MONITOR_LIMIT_S, _TIDY_S):
            recovery.recover(checkpoints)
        else:
            raise RunError("the checkpoint monitor still writes there")
    except (TrinityError, OSError) as error:
        print(f"{checkpoints} was not tidied up ({error}); the next run there does it", file=sys.stderr)
    for root in (shm_dir, folder.slots):
        try:
            remove_stale(root)
        except (TrinityError, OSError) as error:
            print(f"{root} was not tidied up ({error}); the next run there does it", file=sys.stderr)
    for log in folder.logs.glob("*.log"):
        make_room(log)
    with contextlib.suppress(OSError):
        folder.slots.rmdir()


# -- checks of machine and model, before Ray starts


def check_beforehand(cfg: Config) -> None:
    """Check that this machine and the named model can do what checked settings ask for."""
    if cfg.cluster.address is None:
        _check_processors(cfg)
        _check_sockets(cfg)
        if cfg.sync.mode == "nccl" and cfg.sync.transport == "nccl" and accelerator_count() == 0:
            raise ConfigError(
                "sync.transport is nccl, but this machine has no GPU that this program may use; set "
                "sync.transport=auto or gloo"
            )
        if cfg.model.path is not None:
            check_named(cfg.model.path)
    reference = algorithm_of(cfg.algorithm).reference_path
    for key, path in (("model.path", cfg.model.path), ("algorithm.kl.reference", reference)):
        if path is not None and Path(path).is_dir():
            _check_folder(key, Path(path), trust_remote_code=cfg.model.trust_remote_code)
    if cfg.model.path is None and cfg.workload.kind != "bytes":
        size = (cfg.model.architecture or {}).get("vocab_size")
        if isinstance(size, int):
            check_vocabulary(size)
    if (adapter := adapter_of(cfg.model.lora)) is not None:
        if adapter.dropout:
            note(
                f"the adapter at model.lora.path has lora_dropout={adapter.dropout}: log-probs that are trained on "
                f"differ from those of the explorers; 0 in its {CONFIG_FILE} turns it off"
            )
        _check_adapter(cfg, adapter)


def needed_processors(cfg: Config) -> int:
    """Return how many of Ray's CPUs a run reserves: one for each trainer rank and for each explorer."""
    return cfg.backend.ranks + _replicas(cfg)


def _replicas(cfg: Config) -> int:
    return cfg.explorer.replicas if algorithm_of(cfg.algorithm).explores else 0


def _check_adapter(cfg: Config, adapter: Adapter) -> None:
    """Check that the model, made without weights, has the layers for the adapter; print the layers that `all-linear`
    leaves out. Imports libraries that take seconds to load.
    """
    path, shapes = cfg.model.path, cfg.model.shapes
    if path is not None and cfg.cluster.address is not None and not Path(path).is_dir():
        return  # the ranks check it where the model is
    import torch
    from transformers import AutoConfig

    from trinity_sync.backends.adapters import adapter_targets
    from trinity_sync.models.architecture import architecture_config, unfilled_model
    from trinity_sync.models.shapes import cut, model_config, read_shapes

    trusted = cfg.model.trust_remote_code
    try:
        if shapes is not None:
            config = model_config(cut(read_shapes(shapes), cfg.model.layers)[1])
        elif path is None:
            config = architecture_config(cfg.model.architecture or {})
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
        model = unfilled_model(config, torch.bfloat16, "meta", attn_implementation="eager", trust_remote_code=trusted)
    except ConfigError:
        raise
    except Exception as error:  # the config makes no sense, or the model's own code fails
        what, reason = "model.architecture" if path is None else f"model.path={path}", in_one_line(error)
        raise ConfigError(f"{what}: no model can be made of it: {type(error).__name__}: {reason}") from error
    layers = adapter_targets(model, adapter, cfg.backend.strategy)
    if layers.left_out:
        note(
            f"model.lora.targets={ALL_LINEAR} leaves out {'; '.join(layers.left_out)}; the adapter is for "
            f"{', '.join(layers.names)}"
        )


def _check_processors(cfg: Config) -> None:
    given, needed = cfg.cluster.num_cpus, needed_processors(cfg)
    if given is not None and given < needed:
        explorers = _replicas(cfg)
        parts = f"backend.ranks={cfg.backend.ranks}" + (f" and explorer.replicas={explorers}" if explorers else "")
        raise ConfigError(
            f"cluster.num_cpus is {given}, but the run reserves {needed}: {parts} take one each; set "
            f"cluster.num_cpus={needed} or more, or null (Ray counts them as a number; there need not be as many)"
        )


def _check_folder(key: str, folder: Path, *, trust_remote_code: bool) -> None:
    """Check that a folder holds one model, and that checkpoints can keep the files of the trained model."""
    try:
        check_alone(folder)
        if trust_remote_code:
            check_code(folder)
        too_large = ModelFiles.read(folder).too_large if key == "model.path" else ()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    if too_large:
        note(f"{key}: checkpoints do not have {', '.join(too_large)} (over {MAX_FILE_BYTES >> 20} MB)")


def _check_sockets(cfg: Config) -> None:
    folder = Path(cfg.cluster.temp_dir or tempfile.gettempdir()).absolute()
    room, length = socket_room(), len(str(folder).encode())
    if length > room:
        what = "cluster.temp_dir" if cfg.cluster.temp_dir else "the folder for temporary files"
        raise ConfigError(
            f"{what} is {folder}, of {length} bytes; Ray's sockets lie below it, whose whole path may have "
            f"{SOCKET_BYTES}, so name a folder of at most {room} by cluster.temp_dir"
        )
