"""From a checked config to a finished run, with nothing left behind: the run's folder and record, Ray, and the `job`
in between.

The entry points call `run` once the config is known to be good. The driver loads neither torch nor verl.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trinity_sync.backends.platform import accelerator_count, platform_env
from trinity_sync.checkpoint.folder import recovery
from trinity_sync.checkpoint.folder.lock import has_no_monitor, locked
from trinity_sync.checkpoint.folder.owner import MARK, Owner, check, write_mark
from trinity_sync.checkpoint.mirror.run_mirror import RunMirror
from trinity_sync.config import config_digest, plain, typed
from trinity_sync.config.lora_settings import adapter_of
from trinity_sync.errors import ConfigError, RunError, TrinityError
from trinity_sync.host.child_process import own_names
from trinity_sync.host.interrupts import failing_of_it, interruptible, last_words, shielded, wait_until
from trinity_sync.host.locks import own_name
from trinity_sync.host.logs import make_room, story
from trinity_sync.host.masking import masked_override
from trinity_sync.host.references import shown_values
from trinity_sync.host.threads import deaths_told
from trinity_sync.launch.actors import Setup
from trinity_sync.launch.cluster import ClusterMetrics, cluster, has_gpus
from trinity_sync.launch.job import Job
from trinity_sync.launch.row_scan import Scanned, scanned_task
from trinity_sync.launch.start import (
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
from trinity_sync.models.characters import check_vocabulary
from trinity_sync.models.files import MAX_FILE_BYTES, ModelFiles, check_alone, check_code
from trinity_sync.models.hub import check_named
from trinity_sync.tracking.events import RowsEvent
from trinity_sync.tracking.recorder import Recorder
from trinity_sync.tracking.run_record import RunFolder, holds_run, run_id
from trinity_sync.tracking.trackers import Tracker, build_trackers
from trinity_sync.trainer.algorithms.base import Algorithm, algorithm_of
from trinity_sync.trainer.worker_spec import lora_fields
from trinity_sync.weights.lora import ALL_LINEAR, CONFIG_FILE
from trinity_sync.weights.slots import remove_stale

_MONITOR_LIMIT_S = 30.0
"""For the monitor's end. What it leaves after that is cleared by the next run in the folder."""
_TIDY_S = 1.0
"""Of the time after a signal, what is for the rest of the tidying."""


def run(
    cfg: DictConfig,
    run_dir: Path,
    *,
    resume: Resume | None = None,
    until: int | None = None,
    job: type[Job] | None = None,
    settings: AbstractContextManager[None] | None = None,
) -> int:
    """One run, from start to end.

    Args:
        cfg: composed and checked.
        run_dir: the run's folder.
        resume: go on in place, instead of starting in a new folder.
        until: end after this step, as if it were the last, but do one step at least; None: `trainer.steps`.
        job: builds and drives the run.
        settings: left when the run is over. Entered before the record of a new run begins, so that each run with a
            record can be resumed, and after that of a resume, which may be refused.

    Returns:
        The exit code: 0 done, 130 interrupted.

    Raises:
        ConfigError: an input turned out to be wrong before anything started.
        RunError: the run failed; the run's record says so too.
    """
    threads = _threads()
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.enter_context(interruptible(sigterm_saves=cfg.checkpoint.save_on_sigterm, limit_s=cfg.checkpoint.stop_s))
        check_beforehand(cfg)
        scanned = scanned_task(cfg)
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
        marks = stack.enter_context(contextlib.ExitStack())
        if resume is None:
            marks.callback(_take_back, folder, (checkpoints / MARK).unlink)
        recorded, copied = recorded_commits(folder.events), copied_to(folder.events)
        mirror = run_mirror(cfg, owner, folder.logs, resume=resume, copied=copied)
        if resume is None and mirror is not None:
            marks.callback(_take_back, folder, mirror.unmark)
        start = Start.find(cfg, checkpoints, resume=resume, committed=committed, mirror=mirror, recorded=recorded)
        last_step = min(cfg.trainer.steps, max(until or cfg.trainer.steps, start.step + 1))
        if resume is None and settings:
            stack.enter_context(settings)
        recorder = _recorder(cfg, folder, start, owner, threads, last_step)
        marks.pop_all()  # they are those of a run now
        try:
            stack.enter_context(last_words(partial(recorder.finish, "interrupted")))
            with recorder, deaths_told(recorder.fault), (resume and settings) or contextlib.nullcontext():
                if scanned.counts is not None:
                    recorder.event(RowsEvent(**scanned.counts._asdict()))
                with failing_of_it():
                    _run(job or Job, cfg, scanned, folder, start, owner, mirror, recorder, threads, last_step, stop)
        except KeyboardInterrupt:
            return 130
    return 0


def look(cfg: DictConfig, run_dir: Path) -> None:
    """Do all that a new run does before its record begins, and write nothing.

    Args:
        cfg: composed and checked.
        run_dir: the folder that the run would have.

    Raises:
        ConfigError: it could not begin.
    """
    _threads()
    if holds_run(run_dir):
        raise ConfigError(f"{run_dir} already holds a run; choose another folder by hydra.run.dir")
    check_beforehand(cfg)
    scanned_task(cfg)
    checkpoints = checkpoint_folder(cfg, run_dir.absolute())
    owner = Owner.new("", run_dir)
    check(checkpoints, owner, recorded=None)
    Start.first(cfg, checkpoints, None)
    if (mirror := run_mirror(cfg, owner)) is not None:
        mirror.look(checkpoints)
    run_trackers(cfg)


def _take_back(folder: RunFolder, unmark: Callable[[], None]) -> None:
    """Take back the mark of a start that was refused: the next one may be on another host, which cannot see its end."""
    with contextlib.suppress(OSError, RunError):
        if not holds_run(folder.path):
            unmark()


def _recorder(cfg: DictConfig, folder: RunFolder, start: Start, owner: Owner, threads: int, last_step: int) -> Recorder:
    from trinity_sync.report import write_report

    return Recorder.start(
        folder,
        command=[masked_override(text) for text in sys.argv],
        seed=cfg.seed,
        config_digest=config_digest(cfg),
        threads=threads,
        total_steps=last_step,
        name=cfg.name,
        subtitle=f"{cfg.backend.strategy} x {cfg.backend.ranks}, sync={cfg.sync.mode}",
        config=shown_values(cfg),
        reproducible=cfg.trainer.schedule == "lockstep" and (cfg.trainer.deterministic or _on_cpus(cfg)),
        resumed_from=start.step if start.resumed else None,
        id=owner.run,
        places=written_places(cfg, folder.path),
        view=cfg.live,
        trackers=run_trackers(cfg),
        report=write_report,
        resume=resume_command,
        checkpoints=start.checkpoints.absolute(),
    )


def _on_cpus(cfg: DictConfig) -> bool:
    """Whether no GPU takes part, as far as is known before Ray has started."""
    return cfg.cluster.address is None and accelerator_count() == 0


def run_trackers(cfg: DictConfig) -> list[Tracker]:
    """The trackers that the config names, and that of a cluster that runs already; errors as of `build_trackers`."""
    trackers = build_trackers(plain(cfg.tracker))
    if cfg.cluster.address is not None and cfg.cluster.metrics:
        trackers.append(ClusterMetrics())
    return trackers


def _threads() -> int:
    """Threads that each process computes with."""
    given = os.environ.get("OMP_NUM_THREADS", "").strip() or "1"
    if not given.isdecimal() or int(given) == 0:
        raise ConfigError(
            f"OMP_NUM_THREADS is {given!r}; set it to one whole number from 1, the threads of each process, or unset it"
        )
    return int(given)


def _run(
    job_class: type[Job],
    cfg: DictConfig,
    scanned: Scanned,
    folder: RunFolder,
    start: Start,
    owner: Owner,
    mirror: RunMirror | None,
    recorder: Recorder,
    threads: int,
    last_step: int,
    stop: threading.Event,
) -> None:
    use_gpu = accelerator_count() > 0 or (cfg.cluster.address is not None and has_gpus(cfg.cluster.address))
    env = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        # Tells the processes of this run from those of others, for whoever looks for what a run left behind.
        "TRINITY_SYNC_DRIVER": str(os.getpid()),
        **own_names(),
        **platform_env(use_gpu),
    }
    os.environ.update(env)
    _advise(algorithm_of(typed(cfg).algorithm), cfg)
    run_key = f"{os.getpid()}-{secrets.token_hex(4)}"
    recorder.phase("starting Ray")
    cpus = needed_processors(cfg) + 1
    try:
        lost = partial(recorder.finish, "failed")
        name = f"trinity-{run_key}"
        forked = cfg.cluster.forks and not use_gpu
        with cluster(cfg.cluster, namespace=name, cpus=cpus, env=env, forked=forked, lost=lost) as ray_cluster:
            setup = Setup(
                cfg=cfg,
                scanned=scanned,
                folder=folder,
                start=start,
                owner=owner,
                mirror=mirror,
                recorder=recorder,
                cluster=ray_cluster,
                run_key=run_key,
                use_gpu=use_gpu,
                last_step=last_step,
                stop=stop,
            )
            job = job_class(setup)
            peaks: dict[str, int] = {}
            # The record ends before Ray does: what then hangs in Ray could take this process with it.
            with recorder.ending(peaks):
                begun = False
                try:
                    with failing_of_it():
                        job.start()
                        begun = True
                        job.loop()
                finally:
                    with shielded():
                        with contextlib.suppress(Exception):
                            peaks.update(job.actors.peak_memory() if begun else {})
                        job.actors.close()
    finally:
        with shielded():
            _tidy(start.checkpoints, folder, cfg.sync.shm_dir)


def _advise(algorithm: Algorithm, cfg: DictConfig) -> None:
    """Tell, on the terminal and in the log, what the user may not mean."""
    for advise in algorithm.advice:
        for found in advise(partial(OmegaConf.select, cfg)):
            story.warning("%s", found)
            print(f"warning: {found}", file=sys.stderr)


def _tidy(checkpoints: Path, folder: RunFolder, shm_dir: str) -> None:
    """Remove what the end of the run has left. What cannot be is said, not raised: how the run went matters more.

    Whoever was writing is gone by now, or about to go in a cluster that goes on: what a save had staged when the run
    ended is of no use to anybody, nor are slots that an agent had no time to give back.
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


# What is looked at before Ray starts and after the configuration has passed its checks: whether this machine, and the
# model that is named, can do what is asked for.


_SOCKET_BYTES = 107
"""Longest path of a Unix socket."""
_SOCKET = "/{}-12345678/session_2026-01-31_14-05-00_123456_{}/sockets/plasma_store"
"""Where Ray has its longest one, in a folder for its sessions."""


def check_beforehand(cfg: DictConfig) -> None:
    """Check what needs more than the settings themselves. Called by the driver.

    Args:
        cfg: a configuration that has passed `check`.

    Raises:
        ConfigError: naming the key, and what would be right.
    """
    if cfg.cluster.address is None:
        _check_processors(cfg)
        _check_sockets(cfg)
        _check_transport(cfg)
        if cfg.model.path is not None:
            check_named(cfg.model.path)
    reference = algorithm_of(typed(cfg).algorithm).reference_path
    for key, path in (("model.path", cfg.model.path), ("algorithm.kl.reference", reference)):
        if path is not None and Path(path).is_dir():
            _check_folder(key, Path(path), trust_remote_code=cfg.model.trust_remote_code)
    if cfg.model.path is None and cfg.workload.kind != "bytes":
        size = (cfg.model.architecture or {}).get("vocab_size")
        if isinstance(size, int):
            check_vocabulary(size)
    if (adapter := adapter_of(typed(cfg).model.lora)) is not None:
        if adapter.dropout:
            _say(
                f"the adapter at model.lora.path has lora_dropout={adapter.dropout}: log-probs that are trained on "
                f"differ from those of the explorers; 0 in its {CONFIG_FILE} turns it off"
            )
        _check_adapter(cfg, lora_fields(adapter))


def needed_processors(cfg: DictConfig) -> int:
    """How many of Ray's CPUs a run reserves: one for each rank of the trainer and for each explorer."""
    return int(cfg.backend.ranks) + replicas(cfg)


def replicas(cfg: DictConfig) -> int:
    """How many explorers a run has."""
    return int(cfg.explorer.replicas) if algorithm_of(typed(cfg).algorithm).explores else 0


def _check_adapter(cfg: DictConfig, lora: Mapping[str, Any]) -> None:
    """Check that the model, which is made without weights, has the layers that are to get an adapter; say which
    `all-linear` leaves out. The libraries that this imports take seconds.
    """
    path = cfg.model.path
    if path is not None and cfg.cluster.address is not None and not Path(path).is_dir():
        return  # the ranks look where the model is
    import torch
    from transformers import AutoConfig

    from trinity_sync.backends.adapters import adapter_targets
    from trinity_sync.models.architecture import architecture_config, unfilled_model
    from trinity_sync.models.shapes import cut, model_config, read_shapes

    trusted = bool(cfg.model.trust_remote_code)
    try:
        if cfg.workload.kind == "bytes":
            config = model_config(cut(read_shapes(cfg.model.shapes), cfg.model.layers)[1])
        elif path is None:
            config = architecture_config(plain(cfg.model.architecture))
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
        model = unfilled_model(config, torch.bfloat16, "meta", attn_implementation="eager", trust_remote_code=trusted)
    except ConfigError:
        raise
    except Exception as error:  # of a config that means nothing, or of the model's own code
        what, reason = "model.architecture" if path is None else f"model.path={path}", " ".join(str(error).split())
        raise ConfigError(f"{what}: no model can be made of it: {type(error).__name__}: {reason}") from error
    layers = adapter_targets(model, lora, cfg.backend.strategy)
    if layers.left_out:
        _say(
            f"model.lora.targets={ALL_LINEAR} leaves out {'; '.join(layers.left_out)}; the adapter is for "
            f"{', '.join(layers.names)}"
        )


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _check_processors(cfg: DictConfig) -> None:
    given, needed = cfg.cluster.num_cpus, needed_processors(cfg)
    if given is not None and given < needed:
        explorers = replicas(cfg)
        parts = f"backend.ranks={cfg.backend.ranks}" + (f" and explorer.replicas={explorers}" if explorers else "")
        raise ConfigError(
            f"cluster.num_cpus is {given}, but the run reserves {needed}: {parts} take one each; set "
            f"cluster.num_cpus={needed} or more, or null (Ray counts them as a number; there need not be as many)"
        )


def _check_folder(key: str, folder: Path, *, trust_remote_code: bool) -> None:
    """Check that a model folder is one model, and that the files of the trained one can be kept with checkpoints."""
    try:
        check_alone(folder)
        if trust_remote_code:
            check_code(folder)
        too_large = ModelFiles.read(folder).too_large if key == "model.path" else ()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    if too_large:
        _say(f"{key}: checkpoints do not have {', '.join(too_large)} (over {MAX_FILE_BYTES >> 20} MB)")


def _check_sockets(cfg: DictConfig) -> None:
    folder = Path(cfg.cluster.temp_dir or tempfile.gettempdir()).absolute()
    room = _SOCKET_BYTES - len(_SOCKET.format(own_name("trinity-ray"), os.getpid()))
    length = len(str(folder).encode())
    if length > room:
        what = "cluster.temp_dir" if cfg.cluster.temp_dir else "the folder for temporary files"
        raise ConfigError(
            f"{what} is {folder}, of {length} bytes; Ray's sockets lie below it, whose whole path may have "
            f"{_SOCKET_BYTES}, so name a folder of at most {room} by cluster.temp_dir"
        )


def _check_transport(cfg: DictConfig) -> None:
    if cfg.sync.mode == "nccl" and cfg.sync.transport == "nccl" and accelerator_count() == 0:
        raise ConfigError(
            "sync.transport is nccl, but this machine has no GPU that this program may use; set sync.transport=auto or "
            "gloo"
        )
