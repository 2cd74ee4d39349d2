"""Builds and connects a run's actors, and ends them. Explorers and trainer ranks load in parallel, as that is the
longest part of the start; node agents follow once the ranks know their shards. Heavy imports happen in the functions.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trinity_sync.actors.agent_client import FolderCoordinators
from trinity_sync.actors.monitor_client import EventLine, MonitorClient
from trinity_sync.actors.pending import PendingCall
from trinity_sync.checkpoint import CheckpointCoordinator, CheckpointMonitor
from trinity_sync.checkpoint.folder import resume_point
from trinity_sync.checkpoint.folder.contents import Base, read_manifest
from trinity_sync.checkpoint.folder.lock import writer_of
from trinity_sync.checkpoint.folder.owner import Owner
from trinity_sync.checkpoint.folder.resume_point import OF_ADAPTER, check_base, check_same, noted_base
from trinity_sync.checkpoint.memory_states import MemoryStates
from trinity_sync.checkpoint.mirror.run_mirror import MirrorSettings, RunMirror
from trinity_sync.config import TARGET, Config, load_class, retention_policies
from trinity_sync.config.lora_settings import travels
from trinity_sync.config.schema import CheckpointConfig
from trinity_sync.errors import ConfigError, RunError, WaitLimit, WaitTimeout
from trinity_sync.host import interrupts
from trinity_sync.host.channel import SECRET_BYTES
from trinity_sync.host.interrupts import REST_S, interrupted, left, shielded
from trinity_sync.host.logs import log_failure, story
from trinity_sync.host.threads import comes_true
from trinity_sync.launch.cluster import Cluster, room_for
from trinity_sync.launch.kept_explorers import KeptExplorers
from trinity_sync.launch.row_scan import NOTHING, ScannedTask
from trinity_sync.launch.start import Start
from trinity_sync.protocol.parts import MANIFEST, VersionBytes
from trinity_sync.tracking.events import Event, FaultEvent, OtherEvent, parse_event
from trinity_sync.tracking.recorder import Recorder
from trinity_sync.tracking.run_record import RunFolder
from trinity_sync.tracking.units import plural
from trinity_sync.trainer.algorithms.base import algorithm_of

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from trinity_sync.actors.agent_client import AgentClient
    from trinity_sync.actors.calls import Call
    from trinity_sync.actors.rank_client import RankClient, RankInfo
    from trinity_sync.actors.synchronizer_client import SynchronizerClient
    from trinity_sync.explorer.actor import ExplorerSpec
    from trinity_sync.explorer.pool import ExplorerPool
    from trinity_sync.explorer.rollout import FreeRollout
    from trinity_sync.protocol.parts import Reference, Remainder
    from trinity_sync.sync.node_agent import AgentConfig
    from trinity_sync.trainer.group import TrainerGroup
    from trinity_sync.trainer.worker_spec import WorkerSpec
    from trinity_sync.weights.layout import PartLayout


_PEAK_MEMORY_S = 5.0
"""Timeout for the actors' memory figures at the end of a run."""
_FREED_S = 10.0
"""Time for Ray to end the processes of the attempt before, whose room the explorers need."""
_LOOK_S = 1.0


class _MemoryReporter(Protocol):
    """A client of an actor that reports its memory."""

    def memory(self) -> PendingCall[Mapping[str, object]]: ...


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Everything that is known of a run before Ray starts."""

    cfg: Config
    config_digest: str
    samples_digest: str = ""  # `RunConfig.samples_digest`
    folder: RunFolder
    start: Start
    recorder: Recorder
    last_step: int
    stop: threading.Event  # once set, the current step is the last
    scanned: ScannedTask = NOTHING
    owner: Owner | None = None
    mirror: RunMirror | None = None
    store: RunMirror | None = None
    kept: KeptExplorers | None = None  # None: explorers end with the attempt
    states: MemoryStates | None = None  # None: there are none in memory
    heals: bool = False  # the attempt before has lost a process


@dataclass(frozen=True, kw_only=True)
class Setup(Preparation):
    """Everything that a run's actors and its training loop are built from."""

    cluster: Cluster
    run_key: str  # unique to the run
    use_gpu: bool  # one GPU for each rank and each explorer


class Actors:
    """The actors of a run; `start` sets the attributes one after another.

    Args:
        setup: of the run.
        worker: class of the trainer's ranks; None: `TrinityWorker`.

    Attributes:
        infos: what each rank holds, in rank order.
        agents: node agents by Ray node id.
        pool: the explorers; None: the algorithm has none.
        rollout: generates with them in a free run; None before its loop.
        model_path: absolute folder or hub id of the initial model of ranks and explorers.
    """

    trainer: TrainerGroup
    _spec: WorkerSpec
    synchronizer: SynchronizerClient
    monitor: MonitorClient
    memory_monitor: MonitorClient | None
    infos: list[RankInfo]

    def __init__(self, setup: Setup, worker: type | None = None) -> None:
        cfg, folder, start = setup.cfg, setup.folder, setup.start
        self._cfg = cfg
        self._folder = folder
        self._start = start
        self._recorder = setup.recorder
        self._owner = setup.owner
        self._mirror = setup.mirror
        self._states = setup.states
        self._cluster = setup.cluster
        self._run_key = setup.run_key
        self._use_gpu = setup.use_gpu
        self._heals = setup.heals
        self._kept = setup.kept if cfg.cluster.address is None else None
        self._worker = worker
        self._logs = str(folder.logs)
        self._relays: list[EventRelay] = []
        self._reference_before: Reference | None = None
        self._roles: dict[str, Callable[[], Iterable[_MemoryReporter]]] = {}
        self.explores = algorithm_of(self._cfg.algorithm).explores
        self.free = cfg.trainer.schedule == "free"
        self.pool: ExplorerPool | None = None
        self.rollout: FreeRollout | None = None
        self.agents: Mapping[str, AgentClient] = {}
        self._bringing: dict[str, AgentClient] = {}  # agents of nodes that have explorers only
        self.model_path = str(cfg.model.path or folder.model)
        self._given = _absolute(self.model_path)
        if start.weights_only:
            self.model_path = str(start.taken_weights(folder.model))
        self.model_path = _absolute(self.model_path)

    def start(self) -> None:
        """Build and connect them, and restore the checkpoint that the run starts from."""
        from trinity_sync.sync import Synchronizer, SynchronizerConfig
        from trinity_sync.trainer.worker_spec import check_whole
        from trinity_sync.weights.shards import listed

        cfg, start = self._cfg, self._start
        self._phase("starting the coordinators")
        self.trainer = self._make_trainer()  # first: the ranks' imports take longest
        self._roles["trainer"] = lambda: self.trainer.ranks
        resume_point.set_start(start.checkpoints, start.step if start.continued else 0, self._recorder.attempt)
        config = SynchronizerConfig(
            slots=cfg.sync.slots,
            lease_s=cfg.sync.lease_s,
            timeout_s=cfg.sync.timeout_s,
            min_rate_mbps=cfg.sync.min_rate_mbps,
            log_dir=self._logs,
        )
        self.synchronizer = Synchronizer.get_actor(config, self._cluster.namespace).client
        self._roles["synchronizer"] = lambda: [self.synchronizer]
        self.monitor = self._make_monitor()
        self.memory_monitor = self._make_memory_monitor()
        self._roles["checkpoint_monitor"] = lambda: [one for one in (self.monitor, self.memory_monitor) if one]
        if self.explores:
            self.pool = pool = self._make_pool()
            self._roles["explorer"] = lambda: pool.clients.values()
        self._phase("importing the engines, making the model")
        self._make_model()
        self._phase("loading trainer and explorers")
        if self.pool is not None:
            self.pool.start()
            if self._kept is None or not self._kept.generates:
                self.pool.rejoin()
        self.infos = self.trainer.initialise()
        for info in self.infos:
            story.info("trainer rank %d is up: pid %d on node %s", info.rank, info.pid, info.node)
        interrupts.check()
        check_whole(self.infos, cfg.backend.strategy)
        self._check_base()
        self._check_reference()
        if (left_out := self.left_out) and (drafts := sorted(set(left_out["names"]) - set(left_out["tower"]))):
            print(
                f"note: {len(drafts)} tensors of {self.model_path} are no part of the model, such as draft heads: "
                f"{listed(drafts, 2)}; they are not trained and in no version or checkpoint, but go into exports",
                file=sys.stderr,
            )
        self._check_shared_folder()
        self._agent_config = agent_config(cfg, self.infos, self._run_key, self._folder.slots, self._logs)
        self.agents = start_agents(
            cfg,
            self._agent_config,
            self.infos,
            self.trainer,
            synchronizer=self.synchronizer,
            make_coordinators=self._coordinators(),
        )
        self._roles["node_agent"] = lambda: [*self.agents.values(), *self._bringing.values()]
        for agent in self.agents.values():
            story.info("%s is up", agent.who)
        if self.pool is not None:
            # in a free run each explorer joins when it is up
            connect = self.pool.introduce if self.free else self.pool.attach
            connect(self.agents, self.published_base, self.version_bytes.whole)
        self._restore()
        if self.pool is not None and self._kept is not None and self._kept.generates:
            self._phase("taking over the explorers")
            self._recorder.made_meanwhile(self._kept.end_rollout())
            self.pool.rejoin()

    def _coordinators(self) -> Callable[..., FolderCoordinators[CheckpointCoordinator]]:
        monitor, attempt, states = self.monitor, self._recorder.attempt, self._states
        make = coordinator_option(self._cfg.checkpoint, monitor.handle, attempt)
        if self.memory_monitor is None or states is None:
            return partial(_coordinators, make, None, "")
        make_memory = coordinator_option(self._cfg.checkpoint, self.memory_monitor.handle, attempt)
        return partial(_coordinators, make, make_memory, str(states.root))

    def _bring_to(self, node: str) -> AgentClient | None:
        """Start the agent of a node that has explorers only, which brings parts there; None: the mode needs none."""
        if not self._agent_config.brings:
            return None
        named = replace(self._agent_config, log_name=f"node-agent-{len(self.agents) + len(self._bringing)}")
        # what it has can be brought again
        self._bringing[node] = agent_on(node, named, max_restarts=3, max_task_retries=3)
        return self._bringing[node]

    @property
    def keeps(self) -> bool:
        """Whether explorers may live on after this attempt."""
        return self._kept is not None and self._cfg.trainer.max_restarts > 0

    @property
    def version_bytes(self) -> VersionBytes:
        """The bytes of each version."""
        return VersionBytes.of((info.node, info.layout.nbytes) for info in self.infos if info.layout is not None)

    @property
    def base(self) -> Base | None:
        """The base of the trained adapter; None: the whole model is trained."""
        read, adapter = self.infos[0].base, self.infos[0].adapter
        return None if read is None else Base(read.digest, self.model_path, wire=read.wire, adapter=adapter)

    @property
    def left_out(self) -> Remainder | None:
        """Tensors that exports take from the model's folder, as the engine does not use them, if there are any."""
        found = self.infos[0].left_out
        if found is None:
            return None
        return {"path": found.folder, "names": found.names, "digest": found.digest, "tower": found.tower}

    @property
    def reference(self) -> Reference | None:
        """The reference model of the policy, now or in an earlier attempt, if there is one."""
        return self._reference or self._reference_before

    @property
    def _reference(self) -> Reference | None:
        digest, path, base = self.infos[0].reference, self._spec.reference, self.base
        if digest is not None and path is not None:
            return {"path": _absolute(path), "digest": digest}
        if base is None or not self._spec.algorithm.needs_reference:
            return None
        return {"path": _absolute(base.path), "digest": OF_ADAPTER}

    @property
    def published_base(self) -> str | None:
        """Digest of the base of published adapters; None: versions are whole."""
        return self.base.digest if self.base is not None and travels(self._cfg) == "adapter" else None

    def peak_memory(self) -> dict[str, int]:
        """Return peak resident bytes per role, the largest of several. Actors that do not answer are left out."""
        from trinity_sync.actors.calls import ended

        asked = [(role, client.memory()) for role, clients in self._roles.items() for client in clients()]
        ended([call for _, call in asked], interrupts.left(_PEAK_MEMORY_S, interrupts.REST_S))
        peaks: dict[str, int] = {}
        for role, call in asked:
            with contextlib.suppress(Exception):
                peak = call.result(0.0)["peak_rss"]
                peaks[role] = max(peaks.get(role, 0), int(str(peak)))
        return peaks

    def close(self) -> None:
        """Record the last events, and release shared memory while the agents live."""
        for relay in self._relays:
            with contextlib.suppress(Exception):
                relay.close()
        close_agents({**self.agents, **self._bringing})

    @contextmanager
    def explorers_ended(self) -> Iterator[None]:
        """End the explorers after the block, except those that the next attempt of the run gets."""
        try:
            yield
        except Exception as error:
            if self._kept is not None and self.pool is not None:
                try:
                    self._kept.keep(self.pool, error, self.rollout)
                except Exception as failure:
                    log_failure("the hand-over of explorers", failure)
            raise
        finally:
            if self.rollout is not None and not self.rollout.alone:
                with shielded(), contextlib.suppress(Exception):
                    self.rollout.close()
            if self.pool is not None:
                with shielded(), contextlib.suppress(Exception):
                    self.pool.close()

    # -- building

    def _phase(self, what: str) -> None:
        """Show the start's current phase, and raise an interrupt that was lost in it."""
        interrupts.check()
        self._recorder.phase(what)

    def _make_trainer(self) -> TrainerGroup:
        from trinity_sync.trainer.group import TrainerGroup
        from trinity_sync.trainer.worker_spec import worker_spec

        cfg = self._cfg
        self._spec = worker_spec(self._cfg, self.model_path, self._logs, self._given)
        return TrainerGroup(
            self._spec,
            worker=self._worker,
            process_on_nodes=_placement(cfg.backend.ranks, self._cluster.gpus_per_node if self._use_gpu else 0),
            use_gpu=self._use_gpu,
            start_timeout_s=cfg.cluster.start_timeout_s,
        )

    def _make_monitor(self) -> MonitorClient:
        from trinity_sync.checkpoint.monitor import MonitorConfig

        cfg, mirror = self._cfg, self._mirror
        chosen, own = monitor_option(self._cfg.checkpoint)
        handle = chosen.get_actor(
            self._cluster.namespace,
            cfg.checkpoint.save_strategy,
            str(self._start.checkpoints),
            mirror.place if mirror is not None else None,
            config=MonitorConfig(
                attempt=self._recorder.attempt,
                policies=retention_policies(cfg),
                fsync=cfg.checkpoint.fsync,
                timeout_s=cfg.checkpoint.timeout_s,
                mirror=mirror.settings if mirror is not None else MirrorSettings(),
                log_dir=self._logs,
                owner=self._owner,
            ),
            own=own,
        )
        client = MonitorClient(handle)
        self._relays.append(EventRelay(client, self._recorder.event))
        return client

    def _make_memory_monitor(self) -> MonitorClient | None:
        """Make the monitor of the states in memory, which tells faults alone."""
        from trinity_sync.checkpoint.monitor import MonitorConfig

        cfg, states, recorder = self._cfg, self._states, self._recorder
        if states is None:
            return None
        chosen, own = monitor_option(cfg.checkpoint)
        handle = chosen.get_actor(
            f"{self._cluster.namespace}-memory",
            cfg.checkpoint.save_strategy,
            str(states.root),
            config=MonitorConfig(
                attempt=recorder.attempt,
                policies={"keep_last": {"n": 1}},
                fsync=False,
                timeout_s=cfg.checkpoint.timeout_s,
                log_dir=self._logs,
                log_name="state_monitor",
                owner=states.owner,
            ),
            own=own,
        )
        client = MonitorClient(handle)

        def tell(event: Event) -> None:
            if isinstance(event, FaultEvent):
                recorder.event(event)

        self._relays.append(EventRelay(client, tell))
        return client

    def _make_pool(self) -> ExplorerPool:
        from trinity_sync.explorer.actor import explorer_spec
        from trinity_sync.explorer.pool import ExplorerPool
        from trinity_sync.trainer.steps import record_generated

        cfg = self._cfg
        spec = explorer_spec(self._cfg, self.model_path, self._logs)
        return ExplorerPool(
            spec,
            replicas=cfg.explorer.replicas,
            present=self._explorers_with_room(spec),
            synchronizer=self.synchronizer,
            num_gpus=1.0 if self._use_gpu else 0.0,
            max_restarts=cfg.explorer.max_restarts,
            start_timeout_s=cfg.cluster.start_timeout_s,
            explorer_timeout_s=WaitLimit(
                cfg.explorer.timeout_s, cfg.sync.min_rate_mbps, ("explorer.timeout_s", "sync.min_rate_mbps")
            ),
            on_fault=self._recorder.fault,
            on_generated=partial(record_generated, self._recorder),
            start_agent=self._bring_to,
            kept=None if self._kept is None else self._kept.take(spec),
            on_kept=self._recorder.lives_on,
        )

    def _explorers_with_room(self, spec: ExplorerSpec) -> Sequence[str]:
        """Return the explorers to start; fewer than the settings' where a node of an existing cluster was lost, and
        does not come back in time. The ranks have their room by now. Raises WaitTimeout: no server's node is there.
        """
        from trinity_sync.explorer.pool import explorer_names, has_node

        cluster, wanted, ranks = self._cfg.cluster, self._cfg.explorer.replicas, self._cfg.backend.ranks
        names = explorer_names(wanted)
        if cluster.address is None or not self._heals:
            return names
        limit_s, explorers = max(cluster.rejoin_s, _FREED_S), plural(wanted, "explorer")
        self._phase(f"waiting at most {limit_s:g} s for room for {explorers} (cluster.rejoin_s)")
        if spec.servers:
            comes_true(lambda: all(map(has_node, spec.servers)), interrupts.left(limit_s, REST_S), _LOOK_S)
            present = [name for name, url in zip(names, spec.servers, strict=True) if has_node(url)]
            if not present:
                raise WaitTimeout("Ray's cluster", "have a node with a server of explorer.url", limit_s)
            there, later = f"the nodes of {len(present)} of {wanted} servers", ""
        else:
            gpus = spec.processes if self._use_gpu else 0
            found = room_for(wanted, {"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {})}, limit_s)
            present = names[: max(found, 1)]
            there = f"{ranks + found} of {ranks + wanted} processors"
            if gpus:
                there += f" and {ranks + gpus * found} of {ranks + gpus * wanted} GPUs"
            later = "" if found else f" once it has room, within cluster.start_timeout_s={cluster.start_timeout_s:g}"
        if later or len(present) < wanted:
            self._recorder.fault(
                "the cluster",
                f"it has room for {0 if later else len(present)} of {explorers} after {limit_s:g} s "
                f"(cluster.rejoin_s): {there} that the run needs. The run goes on with "
                f"{plural(len(present), 'explorer')}{later}; if it has to go on once more, it asks for all again",
            )
        return present

    def _make_model(self) -> None:
        """Make the initial model of ranks and explorers. A resumed run has it already, but one that starts again may
        have another seed or architecture.
        """
        cfg, made, start = self._cfg, self._folder.model, self._start
        if cfg.model.path is None and not (start.continued and (made / "config.json").exists()):
            shutil.rmtree(made, ignore_errors=True)
            self.trainer.make_model(cfg.model.architecture or {}, cfg.seed, str(made))
        if start.weights_only:
            from trinity_sync.checkpoint.export import export_checkpoint
            from trinity_sync.weights.shards import listed

            assert start.folder is not None, "weights are taken from a checkpoint"
            taken = start.taken_weights(made)
            shutil.rmtree(taken, ignore_errors=True)
            given = Path(cfg.model.path) if cfg.model.path else made
            done = export_checkpoint(start.folder, taken, dtype="as-saved", config=given if given.is_dir() else None)
            if done.missing:
                shutil.rmtree(taken, ignore_errors=True)
                left_out = read_manifest(start.folder).left_out
                assert left_out is not None, "it names the missing tensors"
                raise ConfigError(
                    f"{start.folder} goes on with another engine, which would lose {listed(done.missing)} of the "
                    f"model's folder, such as draft heads: {left_out['path']} does not hold them as they were any "
                    "more; put them back, or go on without them by model.path at an export of the checkpoint"
                )

    def _check_base(self) -> None:
        """Check that a resumed adapter was trained on this base."""
        if self.base is None:
            return
        folder, given = self._start.folder, self._cfg.model.lora.path
        if folder is not None and (folder / MANIFEST).exists():
            check_base(folder, read_manifest(folder).base, self.base)
        if given is not None:
            check_base(Path(given), noted_base(Path(given)), self.base)

    def _check_reference(self) -> None:
        """Check that a resumed run has the same reference."""
        folder = self._start.folder
        if self._start.continued and folder is not None and (folder / MANIFEST).exists():
            self._reference_before = read_manifest(folder).reference
            check_same(folder, self._reference_before, self._reference)

    def _check_shared_folder(self) -> None:
        """Check that all writers of checkpoints see the lock of this run."""
        folder, limit = self._start.checkpoints, self._cfg.cluster.start_timeout_s
        locked = writer_of(folder)
        seen = self.trainer.all(lambda rank: rank.writer_of(str(folder)), limit)
        blind = [rank.who for rank, writer in zip(self.trainer.ranks, seen, strict=True) if writer != locked]
        if blind:
            raise ConfigError(
                f"checkpoint.dir: {', '.join(blind)} cannot see what the driver wrote to {folder}; "
                f"it must be a folder that all nodes share"
            )
        self.monitor.describe().result(limit)  # the monitor checks this itself before it starts
        if self.memory_monitor is not None:
            self.memory_monitor.describe().result(limit)

    def _restore(self) -> None:
        """Restore the ranks from the checkpoint that the run starts from."""
        cfg, step = self._cfg, self._start.step
        if self._start.weights_only:
            self.trainer.all(lambda rank: rank.begin_at(step), cfg.cluster.start_timeout_s)
        elif self._start.folder is not None:
            self._phase(f"restoring step {step}")
            folder = str(self._start.folder)
            self.trainer.all(lambda rank: rank.load(folder), cfg.checkpoint.timeout_s)


def _absolute(model: str) -> str:
    """Return a model's folder as an absolute path, since manifests are read from other folders; a hub id stays."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def _placement(ranks: int, gpus_per_node: int) -> list[int]:
    """Return ranks per node: all on one node if they fit (always on CPUs), else full nodes."""
    if gpus_per_node == 0 or ranks <= gpus_per_node:
        return [ranks]
    if ranks % gpus_per_node:
        raise ConfigError(
            f"backend.ranks={ranks} does not fill nodes of {gpus_per_node} GPUs; use a multiple of that, or fewer"
        )
    return [gpus_per_node] * (ranks // gpus_per_node)


# -- the classes that `checkpoint.monitor` and `checkpoint.coordinator` name: ours, or subclasses


def monitor_option(cfg: CheckpointConfig) -> tuple[type[CheckpointMonitor], Mapping[str, object]]:
    """Return the monitor's class and the user's own arguments of it. Raises ConfigError if the class cannot be used."""
    own = dict(cfg.monitor)
    return load_class(f"checkpoint.monitor.{TARGET}", str(own.pop(TARGET)), CheckpointMonitor), own


def coordinator_option(cfg: CheckpointConfig, monitor: ActorHandle, attempt: int) -> partial[CheckpointCoordinator]:
    """Return the maker of coordinators, called in each rank and node agent with `node_id` and `job_id`. Raises
    ConfigError if the class cannot be used.
    """
    own = dict(cfg.coordinator)
    found = load_class(f"checkpoint.coordinator.{TARGET}", str(own.pop(TARGET)), CheckpointCoordinator)
    return partial(found, monitor, timeout_s=cfg.timeout_s, attempt=attempt, **own)  # type: ignore[arg-type]


def _coordinators(
    make: Callable[..., CheckpointCoordinator],
    make_memory: Callable[..., CheckpointCoordinator] | None,
    memory_root: str,
    *,
    node_id: str,
    job_id: str,
) -> FolderCoordinators[CheckpointCoordinator]:
    """Make those of a process, in it."""
    named = {"node_id": node_id, "job_id": job_id}
    return FolderCoordinators(make(**named), None if make_memory is None else make_memory(**named), memory_root)


# -- the monitor's events, copied to the run's record


_INTERVAL_S = 1.0
_CALL_S = 10.0


class EventRelay:
    """Fetches the monitor's events (faults, copies to the mirror, late prunes) about once a second. `monitor`: the
    checkpoint monitor. `sink`: gets each event, called in the relay's thread and in that of `close`. Unknown or damaged
    events arrive as faults; an event that the disk refuses (RunError) is retried.
    """

    def __init__(self, monitor: MonitorClient, sink: Callable[[Event], None]) -> None:
        self._monitor, self._sink = monitor, sink
        self._asked: PendingCall[list[EventLine]] | None = None
        self._fetched: deque[EventLine] = deque()
        self._answered = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Fetch the remaining events and stop. Events of a monitor that does not answer are lost."""
        self._closed.set()
        if interrupted() and not self._answered:
            return  # the monitor is still starting
        self._thread.join(left(_CALL_S + _INTERVAL_S, REST_S))
        if self._asked is not None:
            self._fetch()  # first the answer under way, then a new one
        self._fetch()
        for event in self._fetched:
            print(f"not recorded: {event}", file=sys.stderr)

    def _run(self) -> None:
        while not self._closed.wait(_INTERVAL_S):
            self._fetch()

    def _fetch(self) -> None:
        try:
            self._asked = self._asked or self._monitor.drain_events()
            self._fetched += self._asked.result(left(_CALL_S, REST_S))
            self._asked = None
            self._answered = True
        except WaitTimeout:
            pass  # the monitor gives these events only once: wait for the same answer next time
        except RunError:
            self._asked = None  # restarting or dead: callers that need it get their own error
        while self._fetched:
            try:
                self._tell(self._fetched[0])
            except RunError:
                return  # a full disk ends the run elsewhere
            self._fetched.popleft()

    def _tell(self, line: EventLine) -> None:
        event = parse_event(line)
        if isinstance(event, OtherEvent):
            event = FaultEvent(where="an event of the checkpoint monitor", error=f"unknown or damaged: {line}")
        self._sink(event)


# -- node agents: one on each node with trainer ranks, with the slots of these ranks, or with explorers


_CLOSE_S = 10.0
_RAY_S = 4.0
"""Share of the time after an interrupt that is reserved for Ray's end."""


def agent_config(cfg: Config, infos: Sequence[RankInfo], run_key: str, fallback: Path, log_dir: str) -> AgentConfig:
    """Return the settings of a run's node agents."""
    from trinity_sync.sync.base import SyncMode
    from trinity_sync.sync.node_agent import AgentConfig

    mode = load_class(f"sync.{TARGET}", str(cfg.sync._target_), SyncMode)  # type: ignore[type-abstract]
    sizes = {info.part: info.layout.nbytes for info in infos if info.layout is not None}
    return AgentConfig(
        run_key=run_key,
        slots=cfg.sync.slots,
        root=cfg.sync.shm_dir,
        fallback=str(fallback),
        verify=cfg.sync.verify,
        nodes=len({info.node for info in infos if info.layout is not None}),
        threads=max(1, (os.cpu_count() or 2) // 2),
        durable=cfg.checkpoint.fsync,
        save_timeout_s=cfg.checkpoint.timeout_s,
        log_dir=log_dir,
        transport=cfg.sync.transport,
        secret=secrets.token_bytes(SECRET_BYTES),
        sync_timeout_s=cfg.sync.limit_s,
        brings=sizes if mode.agents_bring_parts else {},
    )


def agent_on(
    node: str,
    config: AgentConfig,
    synchronizer: SynchronizerClient | None = None,
    lead: AgentClient | None = None,
    **options: int,
) -> AgentClient:
    """Start an agent on a node, with further `options` for Ray. Does not wait."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from trinity_sync.actors.agent_client import AgentClient
    from trinity_sync.actors.pending import failures_logged
    from trinity_sync.sync.node_agent import NodeAgent

    there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    actor = ray.remote(failures_logged(NodeAgent)).options(
        num_cpus=0, scheduling_strategy=there, max_concurrency=1000, **options
    )
    return AgentClient(actor.remote(config, synchronizer, lead), node)


def start_agents(
    cfg: Config,
    config: AgentConfig,
    infos: Sequence[RankInfo],
    trainer: TrainerGroup,
    *,
    synchronizer: SynchronizerClient,
    make_coordinators: Callable[..., FolderCoordinators[CheckpointCoordinator]],
) -> dict[str, AgentClient]:
    """Start the node agents, have them make their slots, and attach the trainer's ranks. Returns agents by Ray node id.
    Raises RunError, WaitTimeout: an agent or a rank does not answer, or has no room.
    """
    from trinity_sync.actors.calls import results

    layouts: dict[str, dict[str, PartLayout]] = {}
    for info in infos:
        held = layouts.setdefault(info.node, {})
        if info.layout is not None:
            held[info.part] = info.layout
    agents: dict[str, AgentClient] = {}
    lead: AgentClient | None = None
    for node in layouts:
        named = replace(config, log_name=f"node-agent-{len(agents)}" if agents else "node-agent")
        agents[node] = agent_on(node, named, synchronizer, lead)
        lead = lead or agents[node]

    try:
        calls = [
            agents[node].register(layouts[node], partial(make_coordinators, node_id=node, job_id="node-agent"))
            for node in layouts
        ]
        slots = dict(zip(layouts, results(calls, cfg.cluster.start_timeout_s), strict=True))
        for made in slots.values():
            for note in made.notes:
                print(note, file=sys.stderr)

        def attach(rank: RankClient) -> Call[None]:
            info = infos[rank.rank]
            paths = {slot: parts[info.part] for slot, parts in slots[info.node].paths.items() if info.part in parts}
            return rank.attach(agents[info.node], paths, synchronizer, make_coordinators, cfg.checkpoint.timeout_s)

        trainer.all(attach, cfg.cluster.start_timeout_s)
    except BaseException:
        close_agents(agents)
        raise
    return agents


def close_agents(agents: Mapping[str, AgentClient]) -> None:
    """Make agents release their shared memory. The end of the run, or the next run's agent, removes leftovers."""
    from trinity_sync.actors.calls import ended

    with suppress(Exception):
        ended([agent.close() for agent in agents.values()], left(_CLOSE_S, _RAY_S))
