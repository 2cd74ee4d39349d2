"""What a chain is going to do, drawn from a seed: which run, and which blows at which instants."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

SYNCS = ("memory", "checkpoint", "nccl")
BACKENDS = ("fsdp", "fsdp2", "megatron")

# A run with sync=nccl has no free schedule: the config refuses it.
CONFIGS = [
    (backend, sync, schedule)
    for schedule, sync, backend in itertools.product(("lockstep", "free"), SYNCS, BACKENDS)
    if (sync, schedule) != ("nccl", "free")
]

ALL = "all"
ORPHANED = "driver and raylet"
FATAL = ("rank", "agent", "synchronizer", "explorer", "raylet", "driver", ORPHANED, ALL)
PAUSED = ("rank", "agent", "monitor", "synchronizer", "explorer", "raylet", "driver", ALL)
HUNG = ("rank", "agent", "monitor", "synchronizer", "explorer", "raylet")
DAMAGES = ("flip", "cut", "delete", "empty")
SIGNALS = ("SIGTERM", "SIGTERM", "SIGHUP")
"""SIGTERM is the more frequent one."""
SIGNALLED = ("rank", "agent", "monitor", "synchronizer", "explorer")
"""Roles that leave a signal to the driver."""

CHECKPOINTS, MIRROR, FOLDER = "checkpoint folder", "mirror", "run folder"
RESUMED_HERE, AT_ONCE, SWEEP, SERVER = "resume of another run", "two runs at once", "sweep", "vLLM server"
FOREIGN_MIRROR, VERL_MIRROR = "mirror of another run", "mirror of verl"
EDITED, SECOND_USER, ENVIRONMENT = "edited folder", "second user", "environment"
WHILE_IT_RUNS = (CHECKPOINTS, MIRROR, FOLDER, RESUMED_HERE, RESUMED_HERE)
"""Programs that may start while the run of the chain is alive. The run must not notice them."""
BETWEEN_LIVES = (*WHILE_IT_RUNS, FOREIGN_MIRROR, VERL_MIRROR, EDITED, EDITED, SECOND_USER, ENVIRONMENT, AT_ONCE, SWEEP)
"""Programs that may start after the end of the run and before its resume."""

_SERVED = 5
START_S = 30.0
"""About how long a run takes to its first step."""


@dataclass(frozen=True)
class Setup:
    """The run of a chain.

    Attributes:
        restarts: `explorer.max_restarts`.
        small_disk: its checkpoints lie on a small file system of their own, which blows fill up.
        pinned: the first checkpoint is pinned, and has to stay.
        mirrored: the run has a mirror.
        by_environment: `checkpoint.dir` and `checkpoint.mirror` are references to environment variables. A resume finds
            other values there.
        shared_machine: the run shares `sync.shm_dir` and `cluster.temp_dir` with other chains.
        saves_at_sigterm: `checkpoint.save_on_sigterm`.
        nohup: the run is started with SIGHUP ignored.
        served: the explorer uses the vLLM server of the campaign.
        encoding: `sync.encoding`.
    """

    backend: str
    sync: str
    schedule: str
    ranks: int
    format: str
    snapshot: str
    retention: str
    restarts: int
    small_disk: bool
    pinned: bool
    mirrored: bool
    by_environment: bool
    shared_machine: bool
    saves_at_sigterm: bool
    nohup: bool
    served: bool
    encoding: str

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.sync}-{self.schedule}" + ("-vllm_server" if self.served else "")

    @property
    def free(self) -> bool:
        return self.schedule == "free"

    @property
    def explorers(self) -> int:
        return 2 if self.free and not self.served else 1

    @property
    def keeps(self) -> int | None:
        """How many full checkpoints the retention leaves at least; None: all."""
        return None if self.retention == "keep_all" else 2

    def overrides(self) -> list[str]:
        """For `launch.py`."""
        return [
            f"backend={self.backend}",
            f"backend.ranks={self.ranks}",
            f"sync={self.sync}",
            f"sync.encoding={self.encoding}",
            f"trainer.schedule={self.schedule}",
            f"checkpoint.snapshot={self.snapshot}",
            f"retention=[{self.retention}]",
            f"explorer.max_restarts={self.restarts}",
            f"explorer.replicas={self.explorers}",
            f"checkpoint.save_on_sigterm={str(self.saves_at_sigterm).lower()}",
            *([f"checkpoint.format={self.format}"] if self.backend != "megatron" else []),
            *(["sync.max_staleness=1"] if self.free else []),
        ]


@dataclass(frozen=True)
class Instant:
    """When a blow falls: so many seconds after the n-th of something since the blow before.

    Attributes:
        after: ``start`` (of the process), ``restoring``, ``begin`` (of a save), ``visible`` (a step folder), or the
            name of an event: ``publish``, ``load``, ``commit``.
    """

    after: str
    count: int
    delay: float

    def __str__(self) -> str:
        return f"{self.after}#{self.count}+{self.delay:.3f}s" if self.after != "start" else f"start+{self.delay:.1f}s"


@dataclass(frozen=True)
class Blow:
    """What befalls a run.

    Attributes:
        kind: ``kill``, ``pause`` (stopped for a while), ``hang`` (stopped until somebody notices), ``full disk``, a
            signal, ``intrusion`` (another program uses a place of the run).
        victim: a role; the name of an intrusion; empty where no process is meant.
        draw: 0 to 1, which one where there are several.
        seconds: how long, for a pause and a full disk; of a signal the time to a second one, 0: there is none.
        stopped: a role that has stood still (SIGSTOP) since just before a signal; empty: none.
    """

    kind: str
    victim: str
    instant: Instant
    draw: float
    seconds: float = 0.0
    stopped: str = ""


@dataclass(frozen=True)
class Damage:
    """What befalls the checkpoint folder between a blow and the resume.

    Attributes:
        how: ``flip`` a byte, ``cut`` in half, ``delete``, ``empty``.
        target: ``newest`` committed full checkpoint, an ``older`` one, ``every`` one, the ``tracker``, or the whole
            ``folder`` where there is a mirror.
        draw: 0 to 1, which file.
    """

    how: str
    target: str
    draw: float


@dataclass(frozen=True)
class Visit:
    """A program that uses a place of the run between two lives.

    Attributes:
        name: one of `BETWEEN_LIVES`.
        draw: 0 to 1, which variant.
    """

    name: str
    draw: float


@dataclass(frozen=True)
class Life:
    """From a start to the next: blows, of which the last ends it, and then perhaps a damage and visits."""

    blows: tuple[Blow, ...]
    damage: Damage | None
    visits: tuple[Visit, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A chain."""

    seed: int
    chain: int
    setup: Setup
    lives: tuple[Life, ...]


def draw_plan(seed: int, chain: int, *, mounts: bool = True, serves: bool = True) -> Plan:
    """The chain of this number. Consecutive numbers go through all configurations.

    Args:
        mounts: a small disk can be mounted.
        serves: there is a vLLM server. One chain in five uses it, in a mode that can.
    """
    rng = random.Random(f"{seed}/{chain}")
    order = random.Random(seed).sample(CONFIGS, len(CONFIGS))
    setup = _draw_setup(rng, *order[chain % len(order)])
    setup = replace(setup, small_disk=setup.small_disk and mounts)
    if serves and chain % _SERVED == _SERVED // 2:
        setup = replace(setup, served=True, encoding="auto", sync="memory" if setup.sync == "nccl" else setup.sync)
    lives = [_draw_life(rng, setup, number) for number in range(rng.randint(3, 5))]
    if rng.random() < 0.15:
        lives[-1] = replace(lives[-1], damage=Damage(rng.choice(DAMAGES), "every", rng.random()))
    return Plan(seed, chain, setup, tuple(lives))


def _draw_setup(rng: random.Random, backend: str, sync: str, schedule: str) -> Setup:
    small_disk = rng.random() < 0.3
    return Setup(
        backend=backend,
        sync=sync,
        schedule=schedule,
        ranks=2 if schedule == "lockstep" else rng.choice((1, 2)),
        format=rng.choice(("verl", "verl", "dcp")),
        snapshot=rng.choice(("lazy", "eager")),
        retention="keep_last" if small_disk else rng.choice(("keep_all", "keep_last")),
        restarts=rng.choice((0, 0, 9)),
        small_disk=small_disk,
        pinned=rng.random() < 0.3,
        mirrored=rng.random() < 0.6,
        by_environment=rng.random() < 0.4,
        shared_machine=rng.random() < 0.6,
        saves_at_sigterm=rng.random() < 0.5,
        nohup=rng.random() < 0.2,
        served=False,
        encoding=rng.choice(("auto", "delta")),
    )


def _draw_life(rng: random.Random, setup: Setup, number: int) -> Life:
    blows = []
    if early := rng.random() < 0.15:
        blows.append(_draw_end(rng, setup, Instant("start", 1, rng.uniform(0.0, START_S))))
    else:
        for index in range(rng.choice((0, 1, 1, 2, 3))):
            blows.append(_draw_survivable(rng, setup, _draw_instant(rng, resumed=number > 0 and index == 0)))
        blows.append(_draw_end(rng, setup, _draw_instant(rng, resumed=number > 0 and not blows)))
    damage = None
    if not early and rng.random() < 0.35:
        target = rng.choice(("newest", "newest", "newest", "older", "tracker", *(["folder"] * 3 * setup.mirrored)))
        damage = Damage(rng.choice(DAMAGES), target, rng.random())
    visits = [Visit(rng.choice(BETWEEN_LIVES), rng.random()) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    return Life(tuple(blows), damage, tuple(visits))


def _draw_instant(rng: random.Random, *, resumed: bool) -> Instant:
    if resumed and rng.random() < 0.2:
        return Instant("restoring", 1, rng.uniform(0.0, 2.0))
    after = rng.choice(("publish", "load", "commit", "begin", "begin", "begin", "visible", "visible"))
    return Instant(after, rng.randint(1, 5), rng.choice((rng.uniform(0.0, 0.3), rng.uniform(0.0, 0.05))))


def _draw_survivable(rng: random.Random, setup: Setup, instant: Instant) -> Blow:
    choices = ["monitor", "monitor", "pause", "pause", "signal", "signal", "intrusion", "intrusion"]
    if setup.restarts or setup.free:
        choices.append("explorer")
    if setup.small_disk:
        choices += ["disk"] * 3
    if setup.served and rng.random() < 0.5:
        return Blow("intrusion", SERVER, instant, rng.random())
    choice = rng.choice(choices)
    if choice == "pause":
        return Blow("pause", rng.choice(PAUSED), instant, rng.random(), rng.uniform(0.2, 5.0))
    if choice == "signal":
        kind = rng.choice(SIGNALS)
        everyone = ("driver", ALL) if setup.nohup and kind == "SIGHUP" else ()
        return Blow(kind, rng.choice((*SIGNALLED, *everyone)), instant, rng.random())
    if choice == "intrusion":
        return Blow("intrusion", rng.choice(WHILE_IT_RUNS), instant, rng.random())
    if choice == "disk":
        return Blow("full disk", "", instant, 0.0, rng.uniform(0.3, 3.0))
    return Blow("kill", choice, instant, rng.random())


def _draw_end(rng: random.Random, setup: Setup, instant: Instant) -> Blow:
    if instant.after != "start" and rng.random() < 0.2:
        # The peers of a rank notice that it hangs; of a single one nobody does before the limit of a step.
        return Blow("hang", rng.choice(HUNG if setup.ranks > 1 else HUNG[1:]), instant, rng.random())
    if rng.random() < 0.4:
        return _draw_signal(rng, setup, instant)
    return Blow("kill", rng.choice(FATAL), instant, rng.random())


def _draw_signal(rng: random.Random, setup: Setup, instant: Instant) -> Blow:
    kind = rng.choice(SIGNALS) if not setup.nohup else "SIGTERM"
    again = rng.uniform(0.05, 3.0) if rng.random() < 0.2 else 0.0
    stopped = rng.choice(("", "", "", "", rng.choice(SIGNALLED))) if instant.after != "start" else ""
    return Blow(kind, rng.choice(("driver", ALL)), instant, rng.random(), again, stopped)
