"""A run's actors: how they are built and connected, the loop that drives them, and their end.

The order of the build is that of the start-up's longest path: explorers and trainer ranks load side by side; the agents
come when the ranks know what they hold.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from trinity_sync.backends.option import backend_option
from trinity_sync.checkpoint import rollback
from trinity_sync.checkpoint.mirror.process import MirrorSettings
from trinity_sync.config import build, config_digest, plain, retention_policies, typed
from trinity_sync.errors import ConfigError
from trinity_sync.host import interrupts
from trinity_sync.launch.agents import close_agents, start_agents
from trinity_sync.launch.cluster import Cluster
from trinity_sync.launch.data import free_data, lockstep_data
from trinity_sync.launch.start import Start, run_mirror
from trinity_sync.tracking.recorder import Recorder
from trinity_sync.tracking.run_folder import RunFolder
from trinity_sync.trainer.algorithms.base import algorithm_of

if TYPE_CHECKING:
    from trinity_sync.actors.agent import AgentClient

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
            self._model_path = str(start.taken_weights(folder.model))
        self._synchronizer: Any = None
        self._monitor: Any = None
        self._relay: Any = None
        self._mirror = run_mirror(cfg)
        self._agents: dict[str, AgentClient] = {}
        self._trainer: Any = None
        self._pool: Any = None

    # -- build

    def start(self) -> None:
        from trinity_sync.actors.monitor import MonitorClient
        from trinity_sync.checkpoint.monitor import MonitorConfig
        from trinity_sync.checkpoint.option import coordinator_option, monitor_option
        from trinity_sync.checkpoint.relay import EventRelay
        from trinity_sync.sync import Synchronizer, SynchronizerConfig
        from trinity_sync.trainer.spec import check_whole

        cfg, recorder, mirror = self._cfg, self._recorder, self._mirror
        self._phase("starting the coordinators")
        self._trainer = self._make_trainer()  # first: what the ranks import takes longest
        kept = self._start.step if self._start.continued else 0
        rollback.set_start(self._start.checkpoints, kept, recorder.attempt)
        config = SynchronizerConfig(
            slots=cfg.sync.slots, lease_s=cfg.sync.lease_s, timeout_s=cfg.sync.timeout_s, log_dir=self._logs
        )
        self._synchronizer = Synchronizer.get_actor(config, self._cluster.namespace).client
        monitor, own = monitor_option(typed(cfg).checkpoint)
        handle = monitor.get_actor(
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
            own=own,
        )
        self._monitor = MonitorClient(handle)
        self._relay = EventRelay(self._monitor, recorder.event)
        if self._with_explorers:
            self._pool = self._make_pool()
        self._phase("importing the engines, making the model")
        self._make_model()
        self._phase("loading trainer and explorers")
        if self._pool is not None:
            self._pool.start()
        self._infos = self._trainer.initialise()
        interrupts.check()
        check_whole(self._infos, cfg.backend.strategy)
        self._check_shared_folder()
        self._agents = start_agents(
            cfg,
            self._infos,
            self._trainer,
            synchronizer=self._synchronizer,
            make_coordinator=coordinator_option(typed(cfg).checkpoint, handle, recorder.attempt),
            run_key=self._run_key,
            fallback=self._folder.slots,
            log_dir=self._logs,
        )
        if self._pool is not None:
            # in a free run each explorer joins when it is up, and keeps nobody waiting
            (self._pool.introduce if self._free else self._pool.attach)(self._agents)
        if self._start.weights_only:
            self._trainer.all(lambda rank: rank.begin_at(self._start.step), cfg.cluster.start_timeout_s)
        elif self._start.folder is not None:
            self._phase(f"restoring step {self._start.step}")
            folder = str(self._start.folder)
            self._trainer.all(lambda rank: rank.load(folder), cfg.checkpoint.timeout_s)

    def _phase(self, what: str) -> None:
        """Show what the run is at. Starting takes long, and an interrupt that was lost meanwhile is raised here."""
        interrupts.check()
        self._recorder.phase(what)

    @property
    def _free(self) -> bool:
        return self._cfg.trainer.schedule == "free"

    @property
    def _with_explorers(self) -> bool:
        return algorithm_of(typed(self._cfg).algorithm).explores

    def _make_pool(self) -> Any:
        from trinity_sync.explorer.pool import ExplorerPool
        from trinity_sync.explorer.spec import explorer_spec

        cfg = self._cfg
        spec = explorer_spec(typed(cfg), self._model_path, self._logs)
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
            worker_spec(typed(cfg), self._model_path, self._logs),
            worker=self.worker,
            process_on_nodes=_placement(cfg.backend.ranks, self._cluster.gpus_per_node if self._use_gpu else 0),
            use_gpu=self._use_gpu,
            start_timeout_s=cfg.cluster.start_timeout_s,
        )

    def _make_model(self) -> None:
        """Make the model that ranks and explorers begin with, where there is none yet."""
        cfg, made = self._cfg, self._folder.model
        if cfg.model.path is None and not (made / "config.json").exists():
            self._trainer.make_model(plain(cfg.model.architecture), cfg.seed, str(made))
        if self._start.weights_only:
            from trinity_sync.checkpoint.export import export_checkpoint

            assert self._start.folder is not None, "weights are taken from a checkpoint"
            taken = self._start.taken_weights(made)
            shutil.rmtree(taken, ignore_errors=True)
            given = Path(cfg.model.path) if cfg.model.path else made
            export_checkpoint(self._start.folder, taken, dtype="as-saved", config=given if given.is_dir() else None)

    def _check_shared_folder(self) -> None:
        folder, token = str(self._start.checkpoints), secrets.token_hex(8)
        limit = self._cfg.cluster.start_timeout_s
        self._trainer.ranks[0].write_token(folder, token).result(limit)
        seen = self._trainer.all(lambda rank: rank.read_token(folder, token), limit)
        (self._start.checkpoints / f".token-{token}").unlink(missing_ok=True)
        blind = [rank.who for rank, sees in zip(self._trainer.ranks, seen, strict=True) if not sees]
        if blind:
            raise ConfigError(
                f"checkpoint.dir: {', '.join(blind)} cannot see what rank 0 writes to {folder}; "
                f"it must be a folder that all nodes share"
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
        mode = self._publisher(saves)
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
            loop = FreeLoop(settings, source=free_data(cfg, self._start, self._pool, self._recorder), **common)
        else:
            restored = self._restored(published, parts)
            loop = TrainingLoop(
                settings, data=lockstep_data(cfg, self._model_path, self._pool, mode), restored=restored, **common
            )
        self._phase("sending the first version")
        try:
            completed = loop.run()
        except BaseException as error:
            with contextlib.suppress(Exception):
                full_saves.settle(_SETTLE_S)
            with contextlib.suppress(Exception):
                self._finish_copies(at_once=isinstance(error, KeyboardInterrupt))
            raise
        self._synchronizer.notify_no_new_model_state_dict().result(self._synchronizer.timeout_s)
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
        moved = self._start.weights_only or backend_option(typed(self._cfg).backend).moved(folder)
        step = None if moved else published_step(folder, parts)
        if step is None:
            print(
                f"note: {folder} was saved by other trainer ranks, so the explorers begin with its own weights: "
                f"the resumed run is not bit for bit the same",
                file=sys.stderr,
            )
            return None
        return step, partial(published.restore, folder)

    def _publisher(self, saves: Any) -> Any:
        from trinity_sync.sync.base import SyncMode, TrainerSide
        from trinity_sync.trainer.saves import WeightSaves

        cfg = self._cfg.sync
        side = TrainerSide(
            synchronizer=self._synchronizer,
            agents=self._agents,
            ranks=self._trainer.ranks,
            timeout_s=cfg.timeout_s,
            use_gpu=self._use_gpu,
            store=WeightSaves(self._monitor, saves, self._recorder, cfg.durable),
        )
        return build("sync", plain(cfg), SyncMode).publisher(side)  # type: ignore[type-abstract]

    def peak_memory(self) -> dict[str, int]:
        """Peak resident bytes per role, the largest where there are several. What does not answer is left out."""
        import ray

        members = {
            "synchronizer": self._synchronizer and self._synchronizer.handle,
            "checkpoint_monitor": self._monitor and self._monitor.handle,
        }
        calls = {role: [actor.memory.remote()] for role, actor in members.items() if actor is not None}
        calls["node_agent"] = [agent.memory().reference for agent in self._agents.values()]
        if self._trainer is not None:
            calls["trainer"] = [rank.memory().reference for rank in self._trainer.ranks]
        if self._pool is not None:
            calls["explorer"] = [client.memory().reference for client in self._pool.clients.values()]
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
        """Give shared memory back while the agents live."""
        if self._relay is not None:
            with contextlib.suppress(Exception):
                self._relay.close()
        close_agents(self._agents)


def _placement(ranks: int, gpus_per_node: int) -> list[int]:
    """Ranks per node: all on one where they fit (always on CPUs), else full nodes."""
    if gpus_per_node == 0 or ranks <= gpus_per_node:
        return [ranks]
    if ranks % gpus_per_node:
        raise ConfigError(
            f"backend.ranks={ranks} does not fill nodes of {gpus_per_node} GPUs; use a multiple of that, or fewer"
        )
    return [gpus_per_node] * (ranks // gpus_per_node)
