"""An explorer, the synchronizer or the node agent is killed at a random instant of a publication or a load.

Whatever dies: nobody waits beyond a limit, nobody holds a wrong or a torn version, and what is not dead goes on.
Whoever waited for the synchronizer, dead or hanging, says for what.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests import local_ray
from tests.sync.helpers import LIMIT, WIRE, PretendTrainer, empty, make_loader, node_id, random_weights
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.calls import Call, DeathError
from trinity_sync.actors.explorer_client import ExplorerClient
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Version
from trinity_sync.sync import Synchronizer
from trinity_sync.sync.base import TrainerSide
from trinity_sync.sync.memory import MemoryPublisher

SHAPES = {"embed.weight": (3000, 512), "layers.0.mlp.weight": (512, 512), "layers.0.norm.weight": (512,)}
VERSIONS = 6
ALL_SEEDS, SEEDS = 20, 1
# What a wait for somebody who is dead may take at most: deaths are noticed, and not waited for.
NOTICED_S = 20.0


class Explorer:
    """An explorer's half, without an engine."""

    def __init__(self) -> None:
        self._tensors = empty(random_weights(0, SHAPES))

    def attach(self, agents: dict[str, AgentClient], synchronizer: SynchronizerClient, member: RoundMember) -> int:
        side = TrainerSide(synchronizer=synchronizer, agents=agents, ranks=[], timeout_s=LIMIT)
        self._loader = make_loader(side, self._tensors, member=member)
        return os.getpid()

    def load(self, version: Version, broadcast: None = None) -> str | None:
        return self._loader.load(version).digest

    def held(self) -> tuple[Version | None, str]:
        """What it says that it holds, and what it does hold."""
        from trinity_sync.weights.tensors import state_digest

        return self._loader.held, state_digest(self._tensors, WIRE)


@pytest.fixture(scope="module")
def explorers(cluster: None) -> Iterator[dict[str, Any]]:
    """Two, whose processes serve one trial after another; those that were killed are started again."""
    found = {name: ray.remote(Explorer).options(num_cpus=0).remote() for name in ("explorer-0", "explorer-1")}
    yield found
    for explorer in found.values():
        ray.kill(explorer)


def seeds() -> list[Any]:
    return [
        pytest.param(seed, marks=() if seed < SEEDS else pytest.mark.all, id=str(seed)) for seed in range(ALL_SEEDS)
    ]


@pytest.mark.parametrize("victim", ["explorer", "synchronizer", "agent"])
@pytest.mark.parametrize("seed", seeds())
def test_whoever_is_killed_nobody_hangs_and_nobody_holds_a_wrong_version(
    make_synchronizer: Callable[..., Synchronizer],
    make_agent: Callable[..., AgentClient],
    explorers: dict[str, Any],
    tmp_path: Path,
    victim: str,
    seed: int,
) -> None:
    draw = random.Random(f"{victim} {seed}")
    synchronizer = make_synchronizer()
    agent = make_agent(synchronizer.client, run_key="killed", root=str(tmp_path), fallback=str(tmp_path / "fallback"))
    trainer = PretendTrainer(
        synchronizer.client, {node_id(): agent}, weights=random_weights(0, SHAPES), bucket_bytes=1 << 20
    )
    members = {name: RoundMember.new(name) for name in explorers}
    attached = {
        name: explorer.attach.remote(trainer.agents, synchronizer.client, members[name])
        for name, explorer in explorers.items()
    }
    pids = {name: ray.get(call, timeout=LIMIT) for name, call in attached.items()}
    pid = {
        "explorer": pids["explorer-0"],
        "synchronizer": synchronizer.client.memory().result(LIMIT)["pid"],
        "agent": agent.memory().result(LIMIT)["pid"],
    }[victim]
    contents = [random_weights(100 + number, SHAPES) for number in range(VERSIONS)]

    published: dict[Version, str] = {}
    killed = threading.Event()

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        killed.set()

    # One version takes about this long, so that the instant is anywhere in the second one or the third.
    began = time.monotonic()
    publish(trainer, contents[0], published, explorers, members)
    usual = time.monotonic() - began
    timer = threading.Timer(draw.uniform(0.0, 2 * usual), kill)
    timer.start()
    told: list[str] = []
    for weights in contents[1:]:
        began = time.monotonic()
        alive = {name: explorer for name, explorer in explorers.items() if not any(name in one for one in told)}
        try:
            told += publish(trainer, weights, published, alive, members)
        except WaitTimeout:
            raise
        except (RunError, ray.exceptions.RayActorError):
            if victim == "explorer":
                raise
            break
        finally:
            assert time.monotonic() - began < NOTICED_S, "a death was waited for"
    timer.join()
    assert killed.wait(LIMIT)
    if victim == "explorer":
        assert len(published) == VERSIONS, "a dead explorer held the trainer up"
        explorers["explorer-0"] = ray.remote(Explorer).options(num_cpus=0).remote()
    else:
        with pytest.raises((RunError, ray.exceptions.RayActorError)):  # also where it died after the last version
            trainer.publish(contents[0])

    newest = max(published)
    for name, explorer in explorers.items():
        if victim == "explorer" and name == "explorer-0":
            continue
        held, digest = ray.get(explorer.held.remote(), timeout=LIMIT)
        assert held is None or digest == published[held], f"{name} holds something else than it says"
        assert victim != "explorer" or held == newest

    if victim == "agent":  # what it left is removed by the next one
        left = files(tmp_path)
        assert left
        following = make_agent(
            make_synchronizer().client, run_key="next", root=str(tmp_path), fallback=str(tmp_path / "f")
        )
        following.register({}).result(LIMIT)
        assert not left & files(tmp_path)


@pytest.mark.parametrize("how", ["dies", pytest.param("hangs", marks=pytest.mark.all)])
def test_who_waits_for_the_synchronizer_in_vain_says_for_what_and_a_timeout_says_how_long(
    make_synchronizer: Callable[..., Synchronizer],
    make_agent: Callable[..., AgentClient],
    explorers: dict[str, Any],
    how: str,
) -> None:
    synchronizer = make_synchronizer()
    trainer = PretendTrainer(
        synchronizer.client, {node_id(): make_agent(synchronizer.client)}, weights=random_weights(0, SHAPES)
    )
    sealed = trainer.seal(random_weights(1, SHAPES))
    pid = synchronizer.client.memory().result(LIMIT)["pid"]
    limit = 1.0 if how == "hangs" else LIMIT
    impatient = SynchronizerClient(synchronizer.actor, limit)
    clients = {name: ExplorerClient(explorer, name) for name, explorer in explorers.items()}
    for name, explorer in explorers.items():
        ray.get(explorer.attach.remote(trainer.agents, impatient, RoundMember.new(name)), timeout=LIMIT)
    mode = MemoryPublisher(TrainerSide(synchronizer=impatient, agents=trainer.agents, ranks=[], timeout_s=limit))
    told, error = {
        "dies": (r"died before it could answer {} \(it was killed by `ray\.kill`\)", DeathError),
        "hangs": ("did not answer {} within 1 s", WaitTimeout),
    }[how]
    if how == "dies":
        local_ray.kill(synchronizer.actor)
    else:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(error, match=f"^the synchronizer {told.format('commit')}$"):
            mode.publish(sealed)
        with pytest.raises(error, match=f"^the synchronizer {told.format('lease')}$"):  # not that explorers are late
            mode.deliver(clients, sealed.version)
        if how == "hangs":  # while an explorer has its lease, whose own limit begins when it gives that back
            with pytest.raises(
                WaitTimeout, match=r"^the synchronizer did not answer while explorer-7 tried to load version"
            ):
                mode.deliver({"explorer-7": ExplorerClient(ray.remote(Loading).remote(), "explorer-7")}, sealed.version)
    finally:
        if how == "hangs":
            os.kill(pid, signal.SIGCONT)


class Loading:
    """An explorer in the midst of a long load."""

    def load(self, version: Version, broadcast: None = None) -> None:
        threading.Event().wait()


def files(folder: Path) -> set[Path]:
    """All files below a folder."""
    return {path for path in folder.rglob("*") if path.is_file()}


def publish(
    trainer: PretendTrainer,
    weights: Any,
    published: dict[Version, str],
    explorers: dict[str, Any],
    members: dict[str, RoundMember],
) -> list[str]:
    """Publish a version and have the explorers load it; the names of those that are dead, whose leases end."""
    sealed = trainer.seal(weights)
    published[sealed.version] = sealed.digest or ""
    trainer.synchronizer.commit(sealed.version).result(LIMIT)
    what = f"load version {sealed.version}"
    calls: list[Call[str | None]] = [
        Call(explorer.load.remote(sealed.version), name, what) for name, explorer in explorers.items()
    ]
    dead = []
    for call in calls:
        try:
            assert call.result(NOTICED_S) == sealed.digest
        except DeathError as death:
            if death.who != call.who:
                raise
            dead.append(call.who)
            with contextlib.suppress(DeathError):
                trainer.synchronizer.drop_reader(members[call.who]).result(LIMIT)
    return dead
