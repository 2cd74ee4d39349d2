"""From a checked config to a finished run: builds the actors, connects them, drives the loop, and leaves nothing
behind.

The entry points call `run` once the config is known to be good. The order of the build is that of the start-up's
longest path: Ray starts while the driver imports verl; explorers and trainer ranks load side by side; the agents come
when the ranks know what they hold.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trinity_sync.backends.megatron.resume import check_layout
from trinity_sync.backends.platform import accelerator_count, platform_env
from trinity_sync.checkpoint import store
from trinity_sync.checkpoint.lock import locked
from trinity_sync.checkpoint.mirror_process import MirrorSettings
from trinity_sync.cluster import Cluster, check_reachable, cluster
from trinity_sync.config import build_task, config_digest, plain, retention_policies
from trinity_sync.errors import ConfigError, RunError, TrinityError, WaitTimeout
from trinity_sync.interrupts import interruptible
from trinity_sync.mirroring import RunMirror
from trinity_sync.starting import Start
from trinity_sync.tracking.recorder import Recorder
from trinity_sync.tracking.run_folder import RunFolder
from trinity_sync.weights.slots import DEFAULT_ROOT, remove_stale


def run(cfg: DictConfig, run_dir: Path, *, resume: bool = False, job: type[Job] | None = None) -> int:
    """One run, from start to end.

    Args:
        cfg: composed and checked.
        run_dir: the run's folder.
        resume: go on in place from the newest checkpoint that verifies, instead of starting in a new folder.
        job: builds and drives the run.

    Returns:
        The exit code: 0 done, 130 interrupted.

    Raises:
        ConfigError: an input turned out to be wrong before anything started.
        RunError: the run failed; the run's record says so too.
    """
    stop = threading.Event() if cfg.checkpoint.save_on_sigterm else None
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(RunFolder.open(run_dir, resume=resume))
        stack.enter_context(interruptible(stop))
        checkpoints = Path(cfg.checkpoint.dir) if cfg.checkpoint.dir else folder.checkpoints
        stack.enter_context(locked(checkpoints, folder.path))
        start = Start.find(cfg, checkpoints, resume=resume, logs=folder.logs)
        recorder = _recorder(cfg, folder, start)
        peaks: dict[str, int] = {}
        with recorder:
            try:
                _run(job or Job, cfg, folder, start, recorder, peaks, stop)
            except KeyboardInterrupt:
                recorder.finish("interrupted", peak_memory=peaks)
                return 130
            except TrinityError as error:
                recorder.finish("failed", str(error), peak_memory=peaks)
                raise
            recorder.finish("completed", peak_memory=peaks)
    return 0


def _recorder(cfg: DictConfig, folder: RunFolder, start: Start) -> Recorder:
    from trinity_sync.report import write_report
    from trinity_sync.tracking.trackers import build_trackers

    return Recorder.start(
        folder,
        command=" ".join(sys.argv),
        seed=cfg.seed,
        config_digest=config_digest(cfg),
        threads=_threads(),
        total_steps=cfg.trainer.steps,
        name=cfg.name,
        subtitle=f"{cfg.backend.strategy} x {cfg.backend.ranks}, sync={cfg.sync.mode}",
        config=plain(cfg),
        reproducible=cfg.trainer.schedule == "lockstep",
        resumed_from=start.step if start.resumed else None,
        view=cfg.live,
        trackers=build_trackers(plain(cfg.tracker)),
        report=write_report,
    )


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


def _run(
    job_class: type[Job],
    cfg: DictConfig,
    folder: RunFolder,
    start: Start,
    recorder: Recorder,
    peaks: dict[str, int],
    stop: threading.Event | None,
) -> None:
    use_gpu = accelerator_count() > 0 or (cfg.cluster.address is not None and _cluster_has_gpus(cfg.cluster.address))
    env = {
        "OMP_NUM_THREADS": str(_threads()),
        "TOKENIZERS_PARALLELISM": "false",
        # Tells the processes of this run from those of others, for whoever looks for what a run left behind.
        "TRINITY_SYNC_DRIVER": str(os.getpid()),
        **platform_env(use_gpu),
    }
    os.environ.update(env)
    preparing = _in_background(lambda: _prepare(cfg, folder.model, start))
    replicas = 0 if cfg.algorithm.kind == "sft" else cfg.explorer.replicas
    run_key = f"{os.getpid()}-{secrets.token_hex(4)}"
    recorder.phase("starting Ray")
    cpus = cfg.backend.ranks + replicas + 1
    try:
        with cluster(cfg.cluster, namespace=f"trinity-{run_key}", cpus=cpus, env=env) as ray_cluster:
            job = job_class(cfg, folder, start, recorder, ray_cluster, run_key, use_gpu, stop)
            try:
                job.start(preparing)
                job.loop()
            finally:
                with contextlib.suppress(Exception):
                    peaks.update(job.peak_memory())
                job.close()
    finally:
        # Whoever was writing is gone by now: what a save had staged when the run ended is of no use to anybody, nor are
        # slots that an agent had no time to give back.
        store.recover(start.checkpoints)
        for root in (DEFAULT_ROOT, folder.slots):
            remove_stale(root)
        with contextlib.suppress(OSError):
            folder.slots.rmdir()


def _prepare(cfg: DictConfig, model_folder: Path, start: Start) -> None:
    """While Ray starts: make the initial model, or one of another engine's weights, import verl."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if cfg.model.path is None and not (model_folder / "config.json").exists():
        from trinity_sync.explorer.model_factory import make_model

        make_model(plain(cfg.model.architecture), cfg.seed, model_folder)
    if start.weights_only:
        from trinity_sync.checkpoint.export import export_checkpoint

        assert start.folder is not None, "weights are taken from a checkpoint"
        taken = _taken_weights(model_folder, start)
        shutil.rmtree(taken, ignore_errors=True)
        given = Path(cfg.model.path) if cfg.model.path else model_folder
        export_checkpoint(start.folder, taken, dtype="as-saved", config=given if given.is_dir() else None)
    with _quiet_imports():
        import trinity_sync.trainer.worker  # noqa: F401


def _taken_weights(model_folder: Path, start: Start) -> Path:
    """Where the weights of another engine's checkpoint lie while the run starts, in Hugging Face format."""
    return model_folder.with_name(f"model-of-step-{start.step}")


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """verl warns of each engine that is not installed; this run has chosen its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _in_background(function: Callable[[], None]) -> Future[None]:
    """Run a function in a thread that does not keep the process alive."""
    future: Future[None] = Future()

    def body() -> None:
        try:
            function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=body, name="prepare", daemon=True).start()
    return future


def _cluster_has_gpus(address: str) -> bool:
    import ray

    check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError):
        return False  # the real connection attempt reports it
    try:
        return ray.cluster_resources().get("GPU", 0) > 0
    finally:
        ray.shutdown()


# How long a run that ends early waits for a save that is on its way to the disk.
_SETTLE_S = 20.0

# How long the actors may take to say how much memory they used, when the run is over.
_PEAK_MEMORY_S = 5.0


class Job:
    """The actors of a run and how they are connected. Benchmarks replace its `loop` and its `worker`.

    Attributes:
        worker: class of the trainer's ranks; None: `TrinityWorker`.
    """

    worker: type | None = None

    def __init__(
        self,
        cfg: DictConfig,
        folder: RunFolder,
        start: Start,
        recorder: Recorder,
        ray_cluster: Cluster,
        run_key: str,
        use_gpu: bool,
        stop: threading.Event | None,
    ) -> None:
        self._stop = stop
        self._cfg = cfg
        self._folder = folder
        self._start = start
        self._recorder = recorder
        self._cluster = ray_cluster
        self._run_key = run_key
        self._use_gpu = use_gpu
        self._logs = str(folder.logs)
        self._model_path = str(cfg.model.path or folder.model)
        if start.weights_only:
            self._model_path = str(_taken_weights(folder.model, start))
        self._synchronizer: Any = None
        self._monitor: Any = None
        self._relay: Any = None
        self._mirror = RunMirror.of(cfg)
        self._agents: dict[str, Any] = {}
        self._trainer: Any = None
        self._pool: Any = None

    # -- build

    def start(self, preparing: Future[None]) -> None:
        from trinity_sync.checkpoint import CheckpointMonitor
        from trinity_sync.checkpoint.monitor import MonitorConfig
        from trinity_sync.checkpoint.relay import EventRelay
        from trinity_sync.sync import Synchronizer, SynchronizerConfig

        cfg, recorder, mirror = self._cfg, self._recorder, self._mirror
        recorder.phase("starting the coordinators")
        store.set_start(self._start.checkpoints, self._start.step, recorder.attempt)
        config = SynchronizerConfig(
            slots=cfg.sync.slots, lease_s=cfg.sync.lease_s, timeout_s=cfg.sync.timeout_s, log_dir=self._logs
        )
        self._synchronizer = Synchronizer.get_actor(config, self._cluster.namespace)
        self._monitor = CheckpointMonitor.get_actor(
            self._cluster.namespace,
            cfg.checkpoint.save_strategy,
            str(self._start.checkpoints),
            mirror.place if mirror is not None else None,
            config=MonitorConfig(
                attempt=recorder.attempt,
                policies=retention_policies(cfg),
                fsync=cfg.checkpoint.fsync,
                timeout_s=cfg.checkpoint.timeout_s,
                mirror=mirror.settings if mirror is not None else MirrorSettings(),
                log_dir=self._logs,
            ),
        )
        self._relay = EventRelay(self._monitor, recorder.event)
        recorder.phase("making the model, importing verl")
        if self._with_explorers:
            self._pool = self._make_pool()
        _prepared(preparing, cfg.cluster.start_timeout_s)
        recorder.phase("loading trainer and explorers")
        self._trainer = self._make_trainer()
        if self._pool is not None:
            self._pool.start()
        self._infos = self._trainer.initialise()
        self._check_shared_folder()
        self._start_agents()
        if self._pool is not None:
            # in a free run each explorer joins when it is up, and keeps nobody waiting
            (self._pool.introduce if self._free else self._pool.attach)(self._agents)
        if self._start.weights_only:
            self._trainer.call(
                "begin_at", self._start.step, what="set the schedule", timeout_s=cfg.cluster.start_timeout_s
            )
        elif self._start.folder is not None:
            recorder.phase(f"restoring step {self._start.step}")
            self._trainer.call(
                "load", str(self._start.folder), what=f"load {self._start.folder}", timeout_s=cfg.checkpoint.timeout_s
            )

    @property
    def _free(self) -> bool:
        return self._cfg.trainer.schedule == "free"

    @property
    def _with_explorers(self) -> bool:
        return self._cfg.algorithm.kind != "sft"

    def _make_pool(self) -> Any:
        from trinity_sync.explorer.pool import ExplorerPool
        from trinity_sync.explorer.spec import explorer_spec

        cfg = self._cfg
        spec = explorer_spec(cfg, self._model_path, self._logs)
        return ExplorerPool(
            spec,
            replicas=cfg.explorer.replicas,
            synchronizer=self._synchronizer,
            num_gpus=1.0 if self._use_gpu else 0.0,
            max_restarts=cfg.explorer.max_restarts,
            start_timeout_s=cfg.cluster.start_timeout_s,
            timeout_s=cfg.explorer.timeout_s,
            on_fault=self._recorder.fault,
        )

    def _make_trainer(self) -> Any:
        from trinity_sync.trainer.group import TrainerGroup
        from trinity_sync.trainer.spec import worker_spec

        cfg = self._cfg
        return TrainerGroup(
            worker_spec(cfg, self._model_path, self._logs),
            worker=self.worker,
            process_on_nodes=_placement(cfg.backend.ranks, self._cluster.gpus_per_node if self._use_gpu else 0),
            use_gpu=self._use_gpu,
            on_this_node=cfg.cluster.address is None,
            start_timeout_s=cfg.cluster.start_timeout_s,
        )

    def _check_shared_folder(self) -> None:
        folder, token = str(self._start.checkpoints), secrets.token_hex(8)
        limit = self._cfg.cluster.start_timeout_s
        first = next(iter(self._trainer.ranks.values()))
        from trinity_sync.sync.remote import resolve_one

        resolve_one(first.write_token.remote(folder, token), "trainer rank 0", f"write to {folder}", limit)
        seen = self._trainer.call("read_token", folder, token, what=f"read {folder}", timeout_s=limit)
        (self._start.checkpoints / f".token-{token}").unlink(missing_ok=True)
        blind = [name for name, sees in zip(self._trainer.ranks, seen, strict=True) if not sees]
        if blind:
            raise ConfigError(
                f"checkpoint.dir: {', '.join(blind)} cannot see what rank 0 writes to {folder}; "
                f"it must be a folder that all nodes share"
            )

    def _start_agents(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from trinity_sync.sync.agent import AgentConfig, NodeAgent
        from trinity_sync.sync.remote import resolve

        cfg = self._cfg
        layouts: dict[str, dict[str, Any]] = {}
        for info in self._infos:
            held = layouts.setdefault(info.node, {})
            if info.layout is not None:
                held[info.part] = info.layout
        config = AgentConfig(
            run_key=self._run_key,
            slots=cfg.sync.slots,
            root=cfg.sync.shm_dir,
            fallback=str(self._folder.slots),
            verify=cfg.sync.verify,
            nodes=sum(bool(held) for held in layouts.values()),
            threads=max(1, (os.cpu_count() or 2) // 2),
            durable=cfg.checkpoint.fsync,
            save_timeout_s=cfg.checkpoint.timeout_s,
            log_dir=self._logs,
        )
        lead = None
        for node in layouts:
            strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            actor = ray.remote(NodeAgent).options(num_cpus=0, scheduling_strategy=strategy, max_concurrency=1000)
            self._agents[node] = actor.remote(config, self._synchronizer.actor, lead)
            lead = lead or self._agents[node]
        calls = {
            f"the agent of node {node}": self._agents[node].register.remote(layouts[node], self._coordinator_of(node))
            for node in layouts
        }
        slots = resolve(calls, "make its slots", cfg.cluster.start_timeout_s)
        for arena in slots.values():
            for note in arena["notes"]:
                print(note, file=sys.stderr)
        paths = dict(zip(layouts, (arena["paths"] for arena in slots.values()), strict=True))
        arguments = []
        for info in self._infos:
            mine = {slot: parts[info.part] for slot, parts in paths.get(info.node, {}).items() if info.part in parts}
            arguments.append(
                (
                    self._agents.get(info.node),
                    mine,
                    self._synchronizer.actor,
                    self._monitor,
                    self._recorder.attempt,
                    cfg.checkpoint.timeout_s,
                )
            )
        self._trainer.call_each("attach", arguments, "attach to its node agent", cfg.cluster.start_timeout_s)

    def _coordinator_of(self, node: str) -> Any:
        """Makes the coordinator through which a node's agent saves; passed in, as the agent knows no checkpoints."""
        from functools import partial

        from trinity_sync.checkpoint import CheckpointCoordinator

        return partial(
            CheckpointCoordinator,
            self._monitor,
            node_id=node,
            job_id="node-agent",
            timeout_s=self._cfg.checkpoint.timeout_s,
            attempt=self._recorder.attempt,
        )

    # -- run

    def loop(self) -> None:
        from trinity_sync.trainer.free import FreeLoop
        from trinity_sync.trainer.loop import LoopSettings, TrainingLoop
        from trinity_sync.trainer.published import PublishedState
        from trinity_sync.trainer.saves import FullSaves, SaveSettings

        cfg = self._cfg
        parts = [info.part for info in self._infos if info.layout is not None]
        saves = SaveSettings(
            attempt=self._recorder.attempt,
            seed=cfg.seed,
            meta={
                "backend": cfg.backend.strategy,
                "world_size": cfg.backend.ranks,
                "config_digest": config_digest(cfg),
            },
            ranks=[info.part for info in self._infos],
            timeout_s=cfg.checkpoint.timeout_s,
        )
        holders = {info.node for info in self._infos if info.layout is not None}
        published = PublishedState(
            self._synchronizer,
            {node: self._agents[node] for node in self._agents if node in holders},
            cfg.sync.timeout_s,
        )
        full_saves = FullSaves(
            self._monitor,
            self._trainer,
            saves,
            self._recorder,
            # free explorers begin a resumed run with the trainer's weights
            published if self._with_explorers and not self._free else None,
        )
        mode = self._mode(saves)
        settings = LoopSettings(
            steps=cfg.trainer.steps,
            first=self._start.step + 1,
            attempt=self._recorder.attempt,
            sync_interval=cfg.sync.interval,
            max_staleness=cfg.sync.max_staleness,
            save_interval=cfg.checkpoint.interval,
            sync_timeout_s=cfg.sync.timeout_s,
            step_timeout_s=max(cfg.backend.timeout_s * 4, 600),
        )
        common: dict[str, Any] = {
            "trainer": self._trainer,
            "mode": mode,
            "synchronizer": self._synchronizer,
            "parts": parts,
            "saves": full_saves,
            "log": self._recorder,
            "stop": self._stop,
        }
        loop: FreeLoop | TrainingLoop
        if self._free:
            loop = FreeLoop(settings, source=self._source(), **common)
        else:
            restored = self._restored(published, parts)
            loop = TrainingLoop(settings, data=self._data(mode), restored=restored, **common)
        self._recorder.phase("sending the first version")
        try:
            completed = loop.run()
        except BaseException as error:
            with contextlib.suppress(Exception):
                full_saves.settle(_SETTLE_S)
            with contextlib.suppress(Exception):
                self._finish_copies(at_once=isinstance(error, KeyboardInterrupt))
            raise
        self._synchronizer.notify_no_new_model_state_dict()
        self._finish_copies(at_once=not completed)
        if not completed:
            raise KeyboardInterrupt

    def _finish_copies(self, *, at_once: bool) -> None:
        """Wait for the copies to the mirror that are under way; `at_once`: the run was told to stop."""
        if self._mirror is not None:
            self._recorder.phase(f"copying checkpoints to {self._mirror.name}")
            limit = self._cfg.checkpoint.mirror_wait_s
            self._mirror.finish(self._monitor, min(limit, _SETTLE_S) if at_once else limit, self._recorder.fault)

    def _restored(self, published: Any, parts: list[str]) -> Any:
        """What explorers held when the checkpoint was saved from which this run goes on, if that can be restored."""
        from functools import partial

        from trinity_sync.trainer.published import EXPLORER, published_step

        folder = self._start.folder
        if folder is None or not self._with_explorers or not (folder / EXPLORER).is_dir():
            return None
        moved = self._start.weights_only or (
            self._cfg.backend.strategy == "megatron" and check_layout(self._cfg, folder) is not None
        )
        step = None if moved else published_step(folder, parts)
        if step is None:
            print(
                f"note: {folder} was saved by other trainer ranks, so the explorers begin with its own weights: "
                f"the resumed run is not bit for bit the same",
                file=sys.stderr,
            )
            return None
        return step, partial(published.restore, folder)

    def _mode(self, saves: Any) -> Any:
        from trinity_sync.sync.base import TrainerSide
        from trinity_sync.sync.checkpoint import CheckpointMode
        from trinity_sync.sync.memory import MemoryMode
        from trinity_sync.sync.nccl import NcclMode
        from trinity_sync.trainer.saves import WeightSaves

        cfg = self._cfg.sync
        side = TrainerSide(
            synchronizer=self._synchronizer, agents=self._agents, ranks=self._trainer.ranks, timeout_s=cfg.timeout_s
        )
        if cfg.mode == "memory":
            return MemoryMode(side)
        if cfg.mode == "checkpoint":
            return CheckpointMode(side, WeightSaves(self._monitor, saves, self._recorder, cfg.durable), cfg.durable)
        transport = cfg.transport if cfg.transport != "auto" else ("nccl" if self._use_gpu else "gloo")
        return NcclMode(side, transport)

    def _data(self, mode: Any) -> Any:
        cfg = self._cfg
        task = build_task(cfg.task, cfg.seed)
        if not self._with_explorers:
            from trinity_sync.trainer.sft import PairsData

            return PairsData(
                task,
                self._model_path,
                batch_size=cfg.algorithm.batch_size,
                max_length=cfg.task.max_length,
                trust_remote_code=cfg.model.trust_remote_code,
            )
        from trinity_sync.explorer.rollout import RolloutData

        return RolloutData(
            task,
            self._pool,
            mode,
            prompts_per_step=cfg.algorithm.prompts_per_step,
            samples_per_prompt=cfg.algorithm.samples_per_prompt,
            normalise=cfg.algorithm.normalise_advantages,
        )

    def _source(self) -> Any:
        """Where a free run's samples come from."""
        from functools import partial

        from trinity_sync.explorer.free import FreeRollout
        from trinity_sync.samples.queue import QueueRules
        from trinity_sync.trainer.saves import data_position
        from trinity_sync.trainer.steps import record_load

        cfg = self._cfg
        groups = cfg.algorithm.prompts_per_step
        position = data_position(self._start.folder) if self._start.resumed and self._start.folder else None
        if position is not None and position["groups_per_step"] != groups:
            before = position["groups_per_step"]
            print(
                f"note: {self._start.folder} was saved with algorithm.prompts_per_step={before}, so "
                f"the run goes on with the prompts of step {self._start.step + 1}: a few may be missed or repeated",
                file=sys.stderr,
            )
        return FreeRollout(
            build_task(cfg.task, cfg.seed),
            self._pool,
            QueueRules(
                groups_per_step=groups,
                max_staleness=cfg.sync.max_staleness,
                wait=cfg.samples.over_stale == "wait",
                room=groups * cfg.samples.buffer,
                overdue_s=cfg.explorer.timeout_s,
            ),
            samples_per_prompt=cfg.algorithm.samples_per_prompt,
            normalise=cfg.algorithm.normalise_advantages,
            first=self._start.step + 1,
            position=position,
            timeout_s=cfg.explorer.timeout_s + cfg.cluster.start_timeout_s,
            on_load=partial(record_load, self._recorder),
            on_fault=self._recorder.fault,
        )

    def peak_memory(self) -> dict[str, int]:
        """Peak resident bytes per role, the largest where there are several. What does not answer is left out."""
        import ray

        members = {"synchronizer": self._synchronizer and self._synchronizer.actor, "checkpoint_monitor": self._monitor}
        calls = {role: [actor.memory.remote()] for role, actor in members.items() if actor is not None}
        calls["node_agent"] = [agent.memory.remote() for agent in self._agents.values()]
        if self._trainer is not None:
            calls["trainer"] = [rank.memory.remote() for rank in self._trainer.ranks.values()]
        if self._pool is not None:
            calls["explorer"] = [handle.memory.remote() for handle in self._pool.handles.values()]
        everything = [reference for references in calls.values() for reference in references]
        if everything:
            ray.wait(everything, num_returns=len(everything), timeout=_PEAK_MEMORY_S)
        peaks: dict[str, int] = {}
        for role, references in calls.items():
            for reference in references:
                with contextlib.suppress(Exception):
                    peaks[role] = max(peaks.get(role, 0), ray.get(reference, timeout=0)["peak_rss"])
        return peaks

    # -- end

    def close(self) -> None:
        """Give shared memory back while the agents live; what they no longer can, the next run's agent removes."""
        import ray

        if self._relay is not None:
            with contextlib.suppress(Exception):
                self._relay.close()
        with contextlib.suppress(Exception):
            ray.get([agent.close.remote() for agent in self._agents.values()], timeout=10)


def _prepared(preparing: Future[None], timeout_s: float) -> None:
    try:
        preparing.result(timeout=timeout_s)
    except TimeoutError:
        raise WaitTimeout("the driver", "import verl (cluster.start_timeout_s)", timeout_s) from None
    except ImportError as error:
        raise RunError(f"verl cannot be imported: {error}") from error


def _placement(ranks: int, gpus_per_node: int) -> list[int]:
    """Ranks per node: all on one where they fit (always on CPUs), else full nodes."""
    if gpus_per_node == 0 or ranks <= gpus_per_node:
        return [ranks]
    if ranks % gpus_per_node:
        raise ConfigError(
            f"backend.ranks={ranks} does not fill nodes of {gpus_per_node} GPUs; use a multiple of that, or fewer"
        )
    return [gpus_per_node] * (ranks // gpus_per_node)
