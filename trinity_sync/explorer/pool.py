"""All explorers of a run: started together, given prompts by a fixed rule, restarted as often as the config allows.
Runs in the driver.

Samples depend on the seed, the step, the prompt and the version only, so a restarted explorer that loads the same
version gives the same samples.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import NamedTuple
from urllib.parse import urlsplit

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.calls import Call, DeathError, ended, results
from trinity_sync.actors.explorer_client import (
    Beside,
    ExplorerClient,
    ExplorerProcess,
    Generation,
    LoadError,
    LoadReport,
    Production,
)
from trinity_sync.actors.pending import failures_logged
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.errors import ConfigError, ProcessLoss, RunError, TrinityError, WaitTimeout, grown
from trinity_sync.explorer.actor import Explorer, ExplorerSpec
from trinity_sync.host.interrupts import REST_S, left
from trinity_sync.host.logs import story
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import LOAD_HOPS, Version
from trinity_sync.samples.batch import SampleBatch, assign
from trinity_sync.samples.journal import StepJournal
from trinity_sync.samples.record import FOR_TRAINING, Drawing, Prompt
from trinity_sync.sync.base import Delivery
from trinity_sync.weights.shards import listed

_CLOSE_S = 10.0
_ANSWERED_S = 60.0
"""Limit for an answer that is there, but may have been spilled to disk."""
_REJOIN_S = 10.0
"""Limit for explorers of the attempt before to end their calls and to join this one: a start takes about as long."""

Deliver = Callable[[dict[str, ExplorerClient], Version], Delivery]


class LiveExplorer(NamedTuple):
    """An explorer that outlives its pool."""

    handle: ActorHandle
    pid: int


class ExplorerPool:
    """The run's explorers by name.

    Args:
        num_gpus: GPUs reserved for each process of an explorer that holds weights.
        max_restarts: restarts of dead explorers, over the whole run.
        start_timeout_s: limit of an explorer's start, seconds.
        explorer_timeout_s: limit of a generation, seconds; a `WaitLimit` grows with a load in the same call.
        on_fault: called with each death that a restart repairs: (where, error).
        start_agent: starts the agent of a node that has explorers only, where the sync mode needs one.
        kept: explorers that the pool of the attempt before has handed over, with the same spec. One that does not join,
            or does not load its first version, is started anew, which does not count as a restart.
        on_kept: called with each of these that has joined, and True; with an explorer that ends, and False.
        present: names of the explorers; None: `replicas` of them. Prompts are divided into `replicas` shares all the
            same, as samples may depend on the batch in which they are made; some explorers then make several, in turn.
    """

    def __init__(
        self,
        spec: ExplorerSpec,
        *,
        replicas: int,
        synchronizer: SynchronizerClient,
        num_gpus: float,
        max_restarts: int,
        start_timeout_s: float,
        explorer_timeout_s: float,
        on_fault: Callable[[str, str], None],
        on_generated: Callable[[Generation], None],
        start_agent: Callable[[str], AgentClient | None] = lambda node: None,
        kept: Mapping[str, LiveExplorer] | None = None,
        on_kept: Callable[[str, bool], None] = lambda name, lives: None,
        present: Sequence[str] | None = None,
    ) -> None:
        self.spec = spec
        self.replicas = replicas
        self._synchronizer = synchronizer
        self._num_gpus = num_gpus
        self._restarts_left = max_restarts
        self._lock = threading.Lock()
        self._start_timeout_s = start_timeout_s
        self._timeout_s = explorer_timeout_s
        self._on_fault = on_fault
        self._on_generated = on_generated
        self._start_agent = start_agent
        self._on_kept = on_kept
        self._agents: dict[str, AgentClient] = {}
        self._base: str | None = None
        self._version_bytes = 0
        self._held: Version | None = None
        self._closes = False
        self._members: dict[str, RoundMember] = {}
        self._processes: dict[str, ExplorerProcess] = {}  # of connected explorers
        names = explorer_names(replicas) if present is None else present
        kept = kept or {}
        self._kept = {name for name in names if name in kept}  # that have not loaded a version in this attempt
        self.clients = {
            name: ExplorerClient(kept[name].handle, name, spec.processes) if name in kept else self._create(name)
            for name in names
        }
        self._starting: dict[str, Call[str]] = {}
        self._given: set[str] = set()

    def _create(self, name: str) -> ExplorerClient:
        self._members[name] = RoundMember.new(name)
        spec = self.spec.of(self._members[name])
        node = server_node(str(spec.engine["url"])) if spec.servers else None
        actor = ray.remote(failures_logged(Explorer)).options(
            num_cpus=1 if node is None else 0,  # the ranks may have all processors of the server's node
            num_gpus=self._num_gpus * spec.processes,
            scheduling_strategy="DEFAULT" if node is None else NodeAffinitySchedulingStrategy(node, soft=False),
        )
        handle = actor.remote(spec, self._synchronizer)
        client = ExplorerClient(handle, name, self.spec.processes)
        client.warm_up()
        return client

    def start(self) -> None:
        """Start all new engines, without waiting for them (`attach` waits). The model's folder must exist."""
        self._starting = {name: client.start() for name, client in self.clients.items() if name not in self._kept}

    def rejoin(self) -> None:
        """Have explorers of the previous attempt join. Waits up to `_REJOIN_S` for them."""
        self._members |= {name: RoundMember.new(name) for name in self._kept}
        joining = {
            name: self.clients[name].rejoin(self._members[name], self._synchronizer) for name in sorted(self._kept)
        }
        self._starting |= joining
        answered = ended(joining.values(), left(_REJOIN_S, REST_S))
        for name, call in joining.items():
            error = _error_of(call) if call in answered else WaitTimeout(name, call.what, _REJOIN_S)
            if error is None:
                self._on_kept(name, True)
            else:
                self._starting[name] = self._start_anew(name, error)

    def _start_anew(self, name: str, why: Exception) -> Call[str]:
        """Replace an explorer of the attempt before that cannot go on; return the call that builds its engine."""
        story.warning("%s does not live on: %s", name, why)
        self._kept.discard(name)
        self._forget(name)
        self.clients[name] = self._create(name)
        return self.clients[name].start()

    def hand_over(self, but: Callable[[str], bool]) -> dict[str, LiveExplorer]:
        """Give away the connected explorers, except those of some names, and those of the attempt before that have not
        loaded a version since. This pool calls them only for a rollout that goes on alone: `leave`, `go_on`, `end`.
        """
        names = [name for name in [*self._processes] if name not in self._kept and not but(name)]
        self._given |= {*names}
        self._on_generated = lambda generated: None  # the record of the attempt has ended
        return {name: LiveExplorer(self.clients[name].handle, self._processes.pop(name)["pid"]) for name in names}

    def leave(self, name: str) -> Version | None:
        """Have an explorer leave the attempt; return the version that it holds. Any thread; raises as `produce`."""
        return self.clients[name].leave().result(self.work_limit())

    def go_on(self, name: str, step: int, prompts: Sequence[Prompt], samples_per_prompt: int) -> SampleBatch:
        """Have an explorer generate with the version that it holds. Any thread; raises as `produce`."""
        return self.clients[name].generate(step, prompts, samples_per_prompt).result(self._timeout_s)

    def introduce(self, agents: dict[str, AgentClient], base: str | None = None, version_bytes: int = 0) -> None:
        """Set the node agents to which `join` connects explorers one by one, and the bytes of a version."""
        self._agents = dict(agents)
        self._base = base
        self._version_bytes = version_bytes

    def join(self, name: str) -> None:
        """Wait until one explorer is up and connect it to the node agents. Any thread."""
        self._connect({name: self._starting.pop(name)})

    def attach(self, agents: dict[str, AgentClient], base: str | None = None, version_bytes: int = 0) -> None:
        """Wait until all explorers are up and connect them to the node agents. Arguments as of `introduce`."""
        self.introduce(agents, base, version_bytes)
        starting, self._starting = self._starting, {}
        self._connect(starting)

    def _connect(self, starting: dict[str, Call[str]]) -> None:
        new = dict(starting)
        for name in sorted(self._kept & starting.keys()):
            try:
                self._connect_all({name: starting[name]}, left(_REJOIN_S, REST_S))
                del new[name]
            except TrinityError as error:
                new[name] = self._start_anew(name, error)
        self._connect_all(new, self._start_timeout_s)

    def _connect_all(self, starting: dict[str, Call[str]], limit_s: float) -> None:
        nodes = dict(zip(starting, results(list(starting.values()), limit_s), strict=True))
        attaching = [self.clients[name].attach(self._agents_of(node)) for name, node in nodes.items()]
        reserving = [self._agents[node].reserve() for node in {*nodes.values()} if node in self._agents]
        places = results(attaching, limit_s)
        results(reserving, self._start_timeout_s)
        for name, place in zip(starting, places, strict=True):
            how = "lives on" if name in self._kept else "is up"
            story.info("%s %s: pid %d on node %s", name, how, place["pid"], place["node"])
            self._processes[name] = place
            self._closes = place["closes"]
            if place["base"] != self._base:
                raise ConfigError(
                    f"model.path={self.spec.engine['model_path']}: {name} has an adapter's base with the digest "
                    f"{place['base']}, the trainer's has {self._base}; all nodes must see the same folder, and it "
                    "must not change during the run"
                )

    def work_limit(self, more_s: float = 0.0) -> float:
        """Return the limit, seconds, of a load and a generation in one call, and of `more_s` seconds besides."""
        return grown(self._timeout_s, LOAD_HOPS * self._version_bytes, more_s=more_s)

    def _agents_of(self, node: str) -> dict[str, AgentClient]:
        """Return the agents of the trainer's nodes and of an explorer's."""
        with self._lock:
            if node not in self._agents and (agent := self._start_agent(node)) is not None:
                self._agents[node] = agent
            return dict(self._agents)

    def places(self) -> dict[str, str]:
        """Return Ray's id of the node of each connected explorer, by name. Any thread."""
        return {name: place["node"] for name, place in dict(self._processes).items()}

    def load(self, version: Version, deliver: Deliver) -> list[LoadReport]:
        """Have all explorers load a version through the sync mode's `deliver`."""
        reports = self._load(dict(self.clients), version, deliver)
        self._held = version
        return sorted(reports, key=lambda report: report.explorer)

    def _load(self, missing: dict[str, ExplorerClient], version: Version, deliver: Deliver) -> list[LoadReport]:
        reports: list[LoadReport] = []
        while missing:
            began = time.time()
            try:
                delivery = deliver(missing, version)
            except DeathError as death:
                if death.who not in self.clients:
                    raise
                self._replace(death)
                missing = {name: self.clients[name] for name in missing}
                continue
            except RunError as error:
                doubtful = [name for name in sorted(self._kept & missing.keys()) if name in str(error)]
                if not doubtful:
                    raise
                self._connect({name: self._start_anew(name, error) for name in doubtful})
                missing = {name: self.clients[name] for name in missing}
                continue
            self._kept -= {report.explorer for report in delivery.reports}
            reports += [replace(report, began=began) for report in delivery.reports]
            for lost in delivery.lost.values():
                self._replace(lost)
            missing = {name: self.clients[name] for name in delivery.lost}
        return reports

    def generate(
        self,
        step: int,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        deliver: Deliver,
        drawing: Drawing = FOR_TRAINING,
        journal: StepJournal | None = None,
    ) -> SampleBatch:
        """Have all explorers generate for the prompts of a step; return the samples sorted by prompt and sample.
        `journal`: has the samples of shares that were finished before.
        """
        shares = [share for share in assign(len(prompts), self.replicas) if share]
        makers = dict(zip(shares, cycle(self.clients), strict=False))
        limit_s = self._timeout_s * -(-len(shares) // len(self.clients))
        finished: dict[range, SampleBatch] = {}
        for share in shares:
            found = journal.find([prompts[i].index for i in share]) if journal is not None else None
            if found is not None:
                finished[share] = found
        while True:
            calls = {
                self.clients[name].generate(step, [prompts[i] for i in share], samples_per_prompt, drawing): share
                for share, name in makers.items()
                if share not in finished
            }
            began = dict.fromkeys(self.clients, time.time())
            on_answer = partial(self._on_answer, step, began, finished, calls, journal)
            try:
                results([*calls], limit_s, on_answer=on_answer)
            except DeathError as death:
                if death.who not in self.clients:
                    raise
                self._replace(death)
                assert self._held is not None, "explorers load before they generate"
                # Only the restarted one: the others hold the version, and may still be generating.
                self._load({death.who: self.clients[death.who]}, self._held, deliver)
                continue
            return SampleBatch.concatenate([*finished.values()]).sorted()

    def produce(self, name: str, work: Sequence[tuple[int, Sequence[Prompt]]], samples_per_prompt: int) -> Production:
        """Have one explorer load the newest version and generate; see `Explorer.produce`. Any thread. Raises
        LoadError: it could not load the newest version. Raises DeathError if it is dead.
        """
        began = time.time()
        try:
            produced = self.clients[name].produce(work, samples_per_prompt).result(self.work_limit())
        except LoadError as error:
            raise error.after(*_timed(error.load, error.beside, began)[:2]) from error
        load, beside, loaded = _timed(produced.load, produced.beside, began)
        self._kept.discard(name)
        newest = int(produced.batch.spans.rows[:, 2].max())
        self._on_generated(_generated(name, work[0][0], newest, loaded, time.time()))
        return replace(produced, load=load, beside=beside)

    def take(self, name: str, version: Version) -> LoadReport:
        """Have one explorer load a version and hold it until its next `produce`. Any thread; raises as `produce`."""
        began = time.time()
        report = self.clients[name].load(version).result(self.work_limit())
        self._kept.discard(name)
        return replace(report, began=began)

    def answer(
        self, name: str, version: Version, prompts: Sequence[Prompt], samples_per_prompt: int, drawing: Drawing
    ) -> SampleBatch:
        """Have one explorer generate with the version of `take`. Any thread; raises as `produce`."""
        began = time.time()
        batch = self.clients[name].generate(version.step, prompts, samples_per_prompt, drawing).result(self._timeout_s)
        self._on_generated(_generated(name, version.step, version.step, began, time.time()))
        return batch

    def _on_answer(
        self,
        step: int,
        began: dict[str, float],
        finished: dict[range, SampleBatch],
        shares: Mapping[Call[SampleBatch], range],
        journal: StepJournal | None,
        call: Call[SampleBatch],
    ) -> None:
        batch = finished[shares[call]] = call.result(_ANSWERED_S)
        if journal is not None:
            journal.append(batch)
        assert self._held is not None, "explorers load before they generate"
        ended_at = time.time()
        self._on_generated(_generated(call.who, step, self._held.step, began[call.who], ended_at))
        began[call.who] = ended_at  # of its next share

    def replace(self, name: str, why: Exception) -> bool:
        """Restart an explorer that is dead, hangs or cannot load. Any thread; the others go on. Returns False if no
        restart is left, which ends the explorer.
        """
        while self._may_restart(name):
            self._on_fault(name, str(why))
            story.warning("starting %s again (%d restarts left)", name, self._restarts_left)
            self._forget(name)
            try:
                self._restart(name)
                return True
            except (DeathError, WaitTimeout) as error:
                why = error
        self._forget(name)
        return False

    def end(self, name: str) -> None:
        """Kill an explorer, and allow no more restarts."""
        with self._lock:
            self._restarts_left = 0
        self._kept.discard(name)
        self._processes.pop(name, None)
        ray.kill(self.clients[name].handle)

    def close(self) -> None:
        """Have engines release their outside resources. Ray's shutdown ends those that do not answer in time."""
        if self._closes:
            own = [client for name, client in self.clients.items() if name not in self._given]
            ended([client.close() for client in own], left(_CLOSE_S, REST_S))

    def _forget(self, name: str) -> None:
        """Remove an explorer's process, which may hang, and its leases."""
        ray.kill(self.clients[name].handle)
        self._end_leases(name)

    def _end_leases(self, name: str) -> None:
        self._on_kept(name, False)
        self._processes.pop(name, None)
        self._synchronizer.drop_reader(self._members[name]).result(self._synchronizer.timeout_s)

    def _may_restart(self, name: str) -> bool:
        with self._lock:
            if name in self._kept:
                self._kept.discard(name)
                return True
            self._restarts_left -= 1
            return self._restarts_left >= 0

    def _restart(self, name: str) -> None:
        try:
            self.clients[name] = self._create(name)
            self._connect({name: self.clients[name].start()})
        except ConfigError as error:  # the settings were good when the run began
            raise RunError(f"{name} cannot be started again: {error}") from error

    def _replace(self, death: Exception) -> None:
        assert isinstance(death, DeathError)
        if not self._may_restart(death.who):
            raise ProcessLoss(
                f"{death}. See logs/{death.who}.log. Set explorer.max_restarts above 0 to have explorers restarted"
            ) from death
        self._on_fault(death.who, str(death))
        story.warning("starting %s again (%d restarts left)", death.who, self._restarts_left)
        self._end_leases(death.who)
        self._restart(death.who)


def explorer_names(count: int) -> list[str]:
    """Return the names of so many explorers."""
    return [f"explorer-{index}" for index in range(count)]


def has_node(url: str) -> bool:
    """Return whether the server of an URL has a node of Ray's; see `server_node`."""
    try:
        server_node(url)
    except ConfigError:
        return False
    return True


def server_node(url: str) -> str | None:
    """Return Ray's id of the node on which a server runs; None: it is outside the cluster, or Ray has one node. Raises
    ConfigError: its node was lost, or no host has the name.
    """
    nodes = {node["NodeManagerAddress"]: str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}
    if len(nodes) == 1:
        return None
    host = str(urlsplit(url).hostname)
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        addresses = set()
    if found := sorted(nodes.keys() & addresses):
        return nodes[found[0]]
    if any(address == "::1" or address.startswith("127.") for address in addresses):
        return str(ray.get_runtime_context().get_node_id())
    if not addresses or addresses & {node["NodeManagerAddress"] for node in ray.nodes()}:
        told = "the node was lost" if addresses else "no host has this name"
        raise ConfigError(f"explorer.url: {host} cannot be reached: {told}; Ray's nodes are {listed(sorted(nodes))}")
    return None


def _error_of(call: Call[str]) -> TrinityError | None:
    """Return the error of a call that has ended, if it has failed."""
    try:
        call.result(0.0)
    except TrinityError as error:
        return error
    return None


def _generated(explorer: str, step: int, version: int, began: float, ended: float) -> Generation:
    total_s = max(0.0, ended - began)
    return Generation(explorer=explorer, step=step, version=version, began=began, total_s=total_s)


def _timed(load: LoadReport | None, beside: Beside, began: float) -> tuple[LoadReport | None, Beside, float]:
    """Add to each load when it began, in Unix seconds; also return when the first was done. `began`: of the call."""
    loaded = began + (load.total_s if load is not None else 0.0)
    timed = tuple((after, replace(one, began=loaded + after)) for after, one in beside)
    return None if load is None else replace(load, began=began), timed, loaded
