"""The pool: who generates what, and what becomes of a run when an explorer dies.

Explorers are stand-ins without a model: `Explorer` itself needs a trainer and seconds per process, and is tested as a
whole in tests/e2e. Deaths are real.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import ray

from tests import local_ray
from tests.explorer.stand_in import NEWEST, StandIn
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.calls import Call, DeathError, results
from trinity_sync.actors.explorer_client import ExplorerClient, Generation
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.explorer import pool as pool_module
from trinity_sync.explorer.actor import Explorer, ExplorerSpec
from trinity_sync.explorer.pool import ExplorerPool, LiveExplorer, server_node
from trinity_sync.explorer.validation import Validation, ValidationSettings
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.journal import Journal
from trinity_sync.samples.metrics import ValidationTimes
from trinity_sync.samples.record import Prompt
from trinity_sync.sync import Synchronizer, SynchronizerConfig
from trinity_sync.sync.base import Delivery

LIMIT = 60.0
PROMPTS = [Prompt(index=index, text=str(index)) for index in range(5)]
FIRST, SECOND = Version(0, 0), Version(0, 1)
HERE = PartInfo(part="rank-00000", node="node", path="", nbytes=0, layout="", buckets=None)

cluster = local_ray.cluster


def deliver(explorers: dict[str, ExplorerClient], version: Version) -> Delivery:
    """As modes do in which a death ends the delivery."""
    return Delivery(reports=results([explorer.load(version) for explorer in explorers.values()], LIMIT))


def deliver_to_the_living(explorers: dict[str, ExplorerClient], version: Version) -> Delivery:
    """As rounds do, which go on without the dead."""
    delivery = Delivery()
    for name, explorer in explorers.items():
        try:
            delivery.reports += deliver({name: explorer}, version).reports
        except DeathError as death:
            delivery.lost[name] = death
    return delivery


@pytest.fixture(scope="module")
def synchronizer(cluster: None) -> Synchronizer:
    return Synchronizer.get_actor(
        SynchronizerConfig(slots=2, lease_s=600.0, timeout_s=LIMIT), namespace=local_ray.new_name()
    )


class PretendAgent(AgentClient):
    """An agent that notes that it makes its slots."""

    reserved: ClassVar[list[str]] = []

    def reserve(self) -> Call[None]:  # type: ignore[override]
        self.reserved.append(self.node)
        return Call(ray.put(None), self.who, "make slots")


class Pools:
    """Makes pools of stand-ins, attached, and tells their explorers to die."""

    def __init__(self, synchronizer: Synchronizer, folder: Path) -> None:
        self._synchronizer = synchronizer
        self._folder = folder
        self.faults: list[tuple[str, str]] = []
        self.generated: list[Generation] = []
        self.lived_on: set[str] = set()
        self.made: list[ExplorerPool] = []
        self.agents_of: dict[ExplorerPool, list[str]] = {}  # nodes for which agents were started

    def make(
        self,
        *,
        replicas: int,
        max_restarts: int,
        free: bool = False,
        base: str | None = None,
        engine: Mapping[str, Any] | None = None,
        kept: Mapping[str, LiveExplorer] | None = None,
        present: Sequence[str] | None = None,
    ) -> ExplorerPool:
        fixed: dict[str, Any] = {
            "engine": dict(engine or {}),
            "task": {},
            "seed": 0,
            "deterministic": False,
            "sync": {},
            "verify": "full",
        }
        nodes: list[str] = []

        def start_agent(node: str) -> AgentClient:
            nodes.append(node)
            return PretendAgent("agent", node)

        spec = ExplorerSpec(member=RoundMember.new(""), sync_timeout_s=LIMIT, log_dir=str(self._folder), **fixed)
        pool = ExplorerPool(
            spec,
            replicas=replicas,
            synchronizer=self._synchronizer.client,
            num_gpus=0.0,
            max_restarts=max_restarts,
            start_timeout_s=LIMIT,
            explorer_timeout_s=LIMIT,
            on_fault=lambda where, error: self.faults.append((where, error)),
            on_generated=self.generated.append,
            start_agent=start_agent,
            kept=kept,
            present=present,
            on_kept=lambda name, lives: (self.lived_on.add if lives else self.lived_on.discard)(name),
        )
        self.made.append(pool)
        self.agents_of[pool] = nodes
        pool.start()
        pool.rejoin()
        (pool.introduce if free else pool.attach)({}, base)
        return pool

    def end(self, first: int) -> None:
        """End those from this one on: each of their explorers holds one of the cluster's processors."""
        while len(self.made) > first:
            for client in self.made.pop().clients.values():
                ray.kill(client.handle)

    def tell_to_die(self, name: str, *methods: str) -> None:
        """In its next call of the first method, and its successors in theirs of the others."""
        (self._folder / name).write_text("\n".join(methods))


@pytest.fixture(scope="module")
def all_pools(synchronizer: Synchronizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "Explorer", StandIn)
        pools = Pools(synchronizer, tmp_path_factory.mktemp("orders"))
        yield pools
        pools.end(0)


@pytest.fixture
def pools(all_pools: Pools) -> Iterator[Pools]:
    all_pools.faults.clear()
    all_pools.generated.clear()
    all_pools.lived_on.clear()
    before = len(all_pools.made)
    yield all_pools
    all_pools.end(before)


@pytest.fixture(scope="module")
def pool(all_pools: Pools) -> ExplorerPool:
    """Two explorers that are restarted as often as they die."""
    return all_pools.make(replicas=2, max_restarts=100)


def test_explorers_have_the_base_that_the_trainer_has(all_pools: Pools) -> None:
    engine = {"model_path": "models/seven", "base": "cd"}
    all_pools.make(replicas=1, max_restarts=1, base="cd", engine=engine)
    with pytest.raises(ConfigError, match=r"models/seven: explorer-0 has .* the digest cd, the trainer's has ab"):
        all_pools.make(replicas=1, max_restarts=0, base="ab", engine=engine)
    good = all_pools.made[-2]
    good.spec = replace(good.spec, engine={**engine, "base": "ef"})
    with pytest.raises(RunError, match=r"^explorer-0 cannot be started again: .* the digest ef, the trainer's has cd"):
        good.replace("explorer-0", RunError("it hangs"))
    for pool in (all_pools.made.pop(), all_pools.made.pop()):  # the pools of the other tests need the processors
        for client in pool.clients.values():
            ray.kill(client.handle)


def test_a_node_that_has_explorers_only_gets_one_agent(pool: ExplorerPool, all_pools: Pools) -> None:
    assert all_pools.agents_of[pool] == ["node"]


def test_an_explorers_node_has_its_slots_before_the_first_load(pool: ExplorerPool) -> None:
    assert "node" in PretendAgent.reserved


def test_all_prompts_are_answered_once_by_the_version_that_was_loaded_and_in_order(pool: ExplorerPool) -> None:
    for version in (FIRST, SECOND):
        reports = pool.load(version, deliver)
        assert [(report.explorer, report.version) for report in reports] == [
            ("explorer-0", version),
            ("explorer-1", version),
        ]
        batch = pool.generate(7, PROMPTS, 2, deliver)
        assert [(item.step, item.prompt, item.sample) for item in batch] == [
            (7, prompt, number) for prompt in range(5) for number in range(2)
        ]
        assert {item.version for item in batch} == {version}


def test_it_is_told_when_each_explorer_loaded_and_made_samples(pool: ExplorerPool, pools: Pools) -> None:
    before = time.time()
    reports = pool.load(SECOND, deliver)
    loaded = time.time()
    pool.generate(7, PROMPTS, 2, deliver)
    assert all(report.began is not None and before <= report.began <= loaded for report in reports)
    assert sorted((one.explorer, one.step, one.version) for one in pools.generated) == [
        ("explorer-0", 7, SECOND.step),
        ("explorer-1", 7, SECOND.step),
    ]
    for one in pools.generated:
        assert loaded <= one.began <= one.began + one.total_s <= time.time()


def test_an_explorer_without_a_prompt_is_not_asked(pool: ExplorerPool, pools: Pools) -> None:
    pool.load(FIRST, deliver)
    pools.tell_to_die("explorer-1", "generate")
    assert [item.prompt for item in pool.generate(1, PROMPTS[:1], 1, deliver)] == [0]
    pools.tell_to_die("explorer-1")


def test_a_death_while_generating_changes_no_sample_where_restarts_are_allowed(
    pool: ExplorerPool, pools: Pools
) -> None:
    pool.load(FIRST, deliver)
    undisturbed = list(pool.generate(7, PROMPTS, 2, deliver))
    pools.tell_to_die("explorer-1", "generate")
    loaded: list[str] = []

    def watched(explorers: dict[str, ExplorerClient], version: Version) -> Delivery:
        loaded.extend(explorers)
        return deliver(explorers, version)

    assert list(pool.generate(7, PROMPTS, 2, watched)) == undisturbed
    ((where, error),) = pools.faults
    assert where == "explorer-1"
    assert re.search(r"^explorer-1 died before it could generate for step 7 \(Worker .+\)$", error)
    # The other one holds the version, and may still be busy with what it was asked for.
    assert loaded == ["explorer-1"]


def test_a_share_that_was_finished_before_is_taken_from_the_journal_and_the_other_one_made(
    pool: ExplorerPool, pools: Pools, tmp_path: Path
) -> None:
    def journal(attempt: int) -> Journal:
        keys = {"run": "run", "made_with": "settings", "most_bytes": 1 << 20}
        return Journal(tmp_path / "journal", attempt=attempt, fault=lambda *_: None, **keys)  # type: ignore[arg-type]

    pool.load(FIRST, deliver)
    whole = pool.generate(7, PROMPTS, 2, deliver)
    journal(0).of_step(7, "digest").append(whole.take(np.flatnonzero(whole.prompts < 3)))  # those of explorer-0
    for attempt, asked in ((1, ["explorer-1"]), (2, [])):
        pools.generated.clear()
        found = pool.generate(7, PROMPTS, 2, deliver, journal=journal(attempt).of_step(7, "digest"))
        assert list(found) == list(whole)
        assert [one.explorer for one in pools.generated] == asked


def test_fewer_explorers_make_the_samples_that_all_would_make_share_by_share(pool: ExplorerPool, pools: Pools) -> None:
    fewer = pools.make(replicas=2, present=["explorer-0"], max_restarts=1)
    for one in (pool, fewer):
        one.load(FIRST, deliver)
    expected = list(pool.generate(7, PROMPTS, 2, deliver))
    pools.generated.clear()
    pools.tell_to_die("explorer-0", "generate")
    assert list(fewer.generate(7, PROMPTS, 2, deliver)) == expected
    first, second = pools.generated
    assert {one.explorer for one in (first, second)} == {"explorer-0"}
    assert first.began + first.total_s <= second.began, "it makes one share after the other"


def test_explorers_that_make_several_shares_have_the_time_for_each(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = pools.make(replicas=3, present=["explorer-0", "explorer-2"], max_restarts=0)
    fewer.load(FIRST, deliver)
    limits: list[float] = []

    def watched(calls: list[Call[Any]], limit_s: float, **given: Any) -> list[Any]:
        limits.append(limit_s)
        return results(calls, limit_s, **given)

    monkeypatch.setattr(pool_module, "results", watched)
    fewer.generate(7, PROMPTS, 1, deliver)
    fewer.generate(7, PROMPTS[:2], 1, deliver)
    assert limits == [2 * LIMIT, LIMIT]


@pytest.mark.parametrize("how", [deliver, deliver_to_the_living], ids=["each by itself", "in rounds"])
def test_a_death_while_loading_is_made_good_and_all_have_the_version(
    pool: ExplorerPool, pools: Pools, how: Any
) -> None:
    pool.load(FIRST, deliver)
    pools.tell_to_die("explorer-0", "load")
    reports = pool.load(SECOND, how)
    assert [report.explorer for report in reports] == ["explorer-0", "explorer-1"]
    assert {item.version for item in pool.generate(7, PROMPTS, 1, deliver)} == {SECOND}
    ((where, error),) = pools.faults
    assert where == "explorer-0"
    assert re.search(rf"^explorer-0 died before it could load version {SECOND} \(Worker .+\)$", error)


def test_the_leases_of_a_dead_explorer_end_and_those_of_the_one_in_its_place_stay(
    pool: ExplorerPool, pools: Pools, synchronizer: Synchronizer
) -> None:
    parts, before = ["rank-00000"], pool.clients["explorer-0"].handle
    for version in (FIRST, SECOND):
        synchronizer.client.begin(version, parts, LIMIT).result(LIMIT)
        synchronizer.client.staged(version, dict.fromkeys(parts, HERE)).result(LIMIT)
        synchronizer.client.digested(version, None).result(LIMIT)
        synchronizer.client.commit(version).result(LIMIT)
        dead = ray.get(before.lease.remote(version), timeout=LIMIT)
    pool.load(FIRST, deliver)
    pools.tell_to_die("explorer-0", "generate")
    pool.generate(7, PROMPTS, 1, deliver)
    # Both slots were held by leases of the dead; the older one's is free again.
    assert synchronizer.client.begin(Version(0, 2), parts, LIMIT).result(LIMIT) == 0
    # What it asked for before it died may come late: nobody would ever release that lease.
    with pytest.raises(RunError, match="explorer-0 was given up for dead"):
        synchronizer.client.lease(dead).result(LIMIT)
    in_its_place = ray.get(pool.clients["explorer-0"].handle.lease.remote(SECOND), timeout=LIMIT)
    assert in_its_place.name == dead.name
    synchronizer.client.discard(Version(0, 2)).result(LIMIT)


def test_a_death_ends_the_run_where_no_restart_is_left_and_says_what_would_allow_one(pools: Pools) -> None:
    pool = pools.make(replicas=1, max_restarts=0)
    pool.load(FIRST, deliver)
    pools.tell_to_die("explorer-0", "generate")
    expected = (
        r"^explorer-0 died before it could generate for step 3 \(Worker .+\)\. "
        r"See logs/explorer-0\.log\..*explorer\.max_restarts"
    )
    with pytest.raises(RunError, match=expected):
        pool.generate(3, PROMPTS, 1, deliver)
    assert pools.faults == []


def test_an_explorer_that_dies_again_while_it_starts_ends_the_run_with_its_name(pools: Pools) -> None:
    pool = pools.make(replicas=1, max_restarts=1)
    pool.load(FIRST, deliver)
    pools.tell_to_die("explorer-0", "generate", "start")
    with pytest.raises(RunError, match=r"^explorer-0 died before it could start \(Worker .+\)$"):
        pool.generate(3, PROMPTS, 1, deliver)
    assert [where for where, _ in pools.faults] == ["explorer-0"]


def test_each_explorer_joins_by_itself_takes_the_newest_version_and_is_replaced_without_the_others(
    pools: Pools,
) -> None:
    pool = pools.make(replicas=2, max_restarts=2, free=True)
    pool.join("explorer-1")
    assert pool.places() == {"explorer-1": "node"}
    work = [(3, PROMPTS[:2]), (4, PROMPTS[2:3])]
    before = time.time()
    produced = pool.produce("explorer-1", work, 1)
    assert [(item.step, item.prompt, item.version) for item in produced.batch.sorted()] == [
        (3, 0, NEWEST),
        (3, 1, NEWEST),
        (4, 2, NEWEST),
    ]
    assert produced.load is not None
    assert produced.load.began is not None
    (told,) = pools.generated
    assert (told.explorer, told.step, told.version) == ("explorer-1", 3, NEWEST.step)
    assert before <= produced.load.began <= told.began <= told.began + told.total_s <= time.time()
    assert pool.produce("explorer-1", work, 1).load is None

    pool.join("explorer-0")
    pools.tell_to_die("explorer-0", "produce", "start")
    with pytest.raises(DeathError) as death:
        pool.produce("explorer-0", work, 1)
    # The first restart dies, too, and costs one of those that are left.
    assert pool.replace("explorer-0", death.value)
    again = pool.produce("explorer-0", work, 1)
    assert again.load is not None
    assert list(again.batch) == list(produced.batch)
    assert [where for where, _ in pools.faults] == ["explorer-0", "explorer-0"]
    assert not pool.replace("explorer-1", death.value)
    assert pool.places().keys() == {"explorer-0"}
    assert len(pools.faults) == 2
    with pytest.raises(DeathError):  # nothing is left of it
        produce_for(30, pool, work)


def produce_for(seconds: float, pool: ExplorerPool, work: list[tuple[int, list[Prompt]]]) -> None:
    """Ask again and again: Ray ends a process a little after it is told to."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pool.produce("explorer-1", work, 1)


def test_an_explorer_that_dies_in_a_validation_is_started_again_and_asked_again(pools: Pools) -> None:
    pool = pools.make(replicas=2, max_restarts=1)
    pool.load(FIRST, deliver)
    times = ValidationTimes(interval=1, last=1, at_start=True)
    settings = ValidationSettings(times=times, samples_per_prompt=2, temperature=0.0, at_a_time=100)
    validation = Validation(PROMPTS, pool, Mode(), settings)  # type: ignore[arg-type]
    before = validation.run(FIRST.step)
    pools.tell_to_die("explorer-1", "generate")
    assert validation.run(FIRST.step) == before
    assert [where for where, _ in pools.faults] == ["explorer-1"]


# Explorers that live on in the pool of the next attempt.


def handed_over(pool: ExplorerPool, but: str = "") -> dict[str, LiveExplorer]:
    return pool.hand_over(lambda name: name == but)


def test_explorers_live_on_in_the_next_attempt_and_hold_nothing_of_the_one_before(pools: Pools) -> None:
    first = pools.make(replicas=2, max_restarts=0)
    first.load(FIRST, deliver)
    before = list(first.generate(7, PROMPTS, 2, deliver))
    members = dict(first._members)
    kept = handed_over(first)
    assert first.places() == {}
    first.close()
    second = pools.make(replicas=2, max_restarts=0, kept=kept)
    assert handed_over(second) == {}, "one that has not loaded a version since may be ill"
    with pytest.raises(RunError):
        results([client.generate(7, PROMPTS, 2) for client in second.clients.values()], LIMIT)
    assert pools.lived_on == {"explorer-0", "explorer-1"}
    second.load(again := Version(1, 0), deliver)
    after = list(second.generate(7, PROMPTS, 2, deliver))
    assert [replace(item, version=FIRST) for item in after] == before
    assert {item.version for item in after} == {again}
    assert pools.faults == []
    assert all(second._members[name].life != members[name].life for name in members), "others tell them apart"
    assert handed_over(second, but="explorer-1") == {"explorer-0": kept["explorer-0"]}


@pytest.mark.parametrize(
    "how", ["hangs", "load", *(pytest.param(one, marks=pytest.mark.all) for one in ("rejoin", "attach", "refuses"))]
)
def test_one_that_cannot_live_on_is_started_anew_and_costs_no_restart(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    first = pools.make(replicas=2, max_restarts=0)
    first.load(FIRST, deliver)
    before = list(first.generate(7, PROMPTS, 2, deliver))
    kept = handed_over(first)
    if how == "hangs":
        monkeypatch.setattr(pool_module, "_REJOIN_S", 1.0)
        kept["explorer-0"].handle.sleep.remote(600)
    elif how != "refuses":
        pools.tell_to_die("explorer-0", how)

    def refused(explorers: dict[str, ExplorerClient], version: Version) -> Delivery:
        if how == "refuses" and explorers["explorer-0"].handle is kept["explorer-0"].handle:
            raise RunError("explorer-0 cannot load version 0: its engine is ill")
        return deliver(explorers, version)

    second = pools.make(replicas=2, max_restarts=0, kept=kept)
    reports = second.load(FIRST, refused)
    assert sorted({report.explorer for report in reports}) == ["explorer-0", "explorer-1"]
    assert list(second.generate(7, PROMPTS, 2, deliver)) == before
    alive = handed_over(second)
    assert alive["explorer-1"] == kept["explorer-1"]
    assert alive["explorer-0"].pid != kept["explorer-0"].pid
    assert [where for where, _ in pools.faults] == (["explorer-0"] if how == "load" else [])
    assert pools.lived_on == {"explorer-1"}


def test_one_that_lives_on_joins_a_free_run_by_itself(pools: Pools) -> None:
    first = pools.make(replicas=2, max_restarts=0, free=True)
    work = [(3, PROMPTS)]
    for name in first.clients:
        first.join(name)
    made = [list(first.produce(name, work, 1).batch) for name in first.clients]
    kept = handed_over(first)
    pools.tell_to_die("explorer-1", "produce")
    second = pools.make(replicas=2, max_restarts=0, free=True, kept=kept)
    for name in second.clients:
        second.join(name)
    produced = second.produce("explorer-0", work, 1)
    assert (list(produced.batch), produced.load is not None) == (made[0], True)
    with pytest.raises(DeathError) as death:
        second.produce("explorer-1", work, 1)
    assert pools.lived_on == {"explorer-0", "explorer-1"}
    assert second.replace("explorer-1", death.value), "its first load has not succeeded"
    assert pools.lived_on == {"explorer-0"}
    assert list(second.produce("explorer-1", work, 1).batch) == made[1]
    assert not second.replace("explorer-0", death.value)


def test_one_that_was_handed_over_generates_with_its_version_for_the_pool_before(pools: Pools) -> None:
    first = pools.make(replicas=2, max_restarts=0, free=True)
    for name in first.clients:
        first.join(name)
    made = list(first.produce("explorer-0", [(3, PROMPTS)], 2).batch)
    kept, told = handed_over(first), len(pools.generated)
    assert first.leave("explorer-0") == NEWEST
    assert list(first.go_on("explorer-0", 3, PROMPTS, 2)) == made
    assert len(pools.generated) == told, "the record of the attempt has ended"
    pools.tell_to_die("explorer-0", "generate")
    with pytest.raises(DeathError):
        first.go_on("explorer-0", 3, PROMPTS, 2)
    first.end("explorer-1")
    assert kept.keys() == {"explorer-0", "explorer-1"}
    second = pools.make(replicas=2, max_restarts=0, free=True, kept=kept)
    for name in second.clients:
        second.join(name)
    assert list(second.produce("explorer-0", [(3, PROMPTS)], 2).batch) == made
    assert pools.lived_on == set()


def test_what_an_explorer_knows_of_an_attempt_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one; its process is not needed."""
    fixed: dict[str, Any] = {"engine": {}, "task": {}, "seed": 0, "deterministic": False, "sync": {}, "verify": "full"}
    spec = ExplorerSpec(member=RoundMember.new("explorer-0"), sync_timeout_s=LIMIT, log_dir=None, **fixed)
    explorer = Explorer(spec, None)  # type: ignore[arg-type]
    explorer._loader = SimpleNamespace(held=FIRST)  # type: ignore[assignment]
    assert explorer.leave() == FIRST
    assert explorer._held_for(3) == FIRST, "it goes on generating"
    member, synchronizer = RoundMember.new("explorer-0"), SimpleNamespace()
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    assert explorer.rejoin(member, synchronizer) == "here"  # type: ignore[arg-type]
    assert explorer._spec == replace(spec, member=member)
    assert explorer._synchronizer is synchronizer
    with pytest.raises(RunError, match="holds no version"):
        explorer.generate(3, PROMPTS, 1)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray says of its nodes; this process is on the first."""
    names = {"10.0.0.1": "first", "10.0.0.2": "second", "10.0.0.3": "dead"}
    found = [{"NodeManagerAddress": at, "NodeID": node, "Alive": node != "dead"} for at, node in names.items()]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "first"))
    return found


@pytest.mark.parametrize(
    ("host", "node"), [("10.0.0.2", "second"), ("10.0.0.1", "first"), ("localhost", "first"), ("[::1]", "first")]
)
def test_an_explorer_belongs_on_the_node_of_its_server(nodes: list[dict[str, Any]], host: str, node: str) -> None:
    assert server_node(f"http://{host}:8000") == node


@pytest.mark.parametrize(("host", "why"), [("10.0.0.3", "the node was lost"), ("nobody.invalid", "no host has")])
def test_a_server_on_a_lost_node_or_an_unknown_host_is_refused(
    nodes: list[dict[str, Any]], host: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{host} cannot be reached: {why}.* 10\.0\.0\.1, 10\.0\.0\.2$"):
        server_node(f"http://{host}:8000")


def test_an_explorer_of_a_server_outside_the_cluster_runs_on_any_node(nodes: list[dict[str, Any]]) -> None:
    assert server_node("http://10.9.9.9:8000") is None


def test_where_ray_has_one_node_any_name_of_it_is_taken(nodes: list[dict[str, Any]]) -> None:
    del nodes[1:]
    assert server_node("http://my-alias:8000") is None


class Mode:
    """A sync mode of which only the delivery is asked."""

    deliver = staticmethod(deliver)


def test_an_error_that_is_no_death_is_passed_on(pool: ExplorerPool, pools: Pools) -> None:
    def refuse(explorers: dict[str, ExplorerClient], version: Version) -> Delivery:
        raise RunError("explorer-1 cannot load version 1: bucket 3 arrived damaged")

    with pytest.raises(RunError, match="bucket 3 arrived damaged"):
        pool.load(SECOND, refuse)
    with pytest.raises(DeathError, match="trainer rank 0"):
        pool.load(SECOND, lambda *_: (_ for _ in ()).throw(DeathError("trainer rank 0", "send")))
    assert pools.faults == []


def test_an_explorer_that_holds_no_version_refuses_to_generate() -> None:
    """The real one, before its first load."""
    fixed: dict[str, Any] = {"engine": {}, "task": {}, "seed": 0, "deterministic": False, "sync": {}, "verify": "full"}
    spec = ExplorerSpec(member=RoundMember.new("explorer-0"), sync_timeout_s=LIMIT, log_dir=None, **fixed)
    with pytest.raises(RunError, match=r"^explorer-0 holds no version, so it cannot generate for step 3$"):
        Explorer(spec, None).generate(3, PROMPTS, 1)  # type: ignore[arg-type]
