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
FATAL = ("rank", "agent", "synchronizer", "explorer", "raylet", "driver", ALL)
PAUSED = ("rank", "agent", "monitor", "synchronizer", "explorer", "raylet", "driver")
HUNG = ("rank", "agent", "monitor", "synchronizer", "explorer", "raylet")
DAMAGES = ("flip", "cut", "delete", "empty")

START_S = 30.0
"""About how long a run takes to its first step."""


@dataclass(frozen=True)
class Setup:
    """The run of a chain.

    Attributes:
        restarts: `explorer.max_restarts`.
        small_disk: its checkpoints lie on a small file system of their own, which blows fill up.
        pinned: the first checkpoint is pinned, and has to stay.
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

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.sync}-{self.schedule}"

    @property
    def free(self) -> bool:
        return self.schedule == "free"

    @property
    def explorers(self) -> int:
        return 2 if self.free else 1

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
            f"trainer.schedule={self.schedule}",
            f"checkpoint.snapshot={self.snapshot}",
            f"retention=[{self.retention}]",
            f"explorer.max_restarts={self.restarts}",
            f"explorer.replicas={self.explorers}",
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
        kind: ``kill``, ``pause`` (stopped for a while), ``hang`` (stopped until somebody notices), ``full disk``.
        victim: a role; empty where no process is meant.
        draw: 0 to 1, which one where there are several.
        seconds: how long, for a pause and a full disk.
    """

    kind: str
    victim: str
    instant: Instant
    draw: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Damage:
    """What befalls the checkpoint folder between a blow and the resume.

    Attributes:
        how: ``flip`` a byte, ``cut`` in half, ``delete``, ``empty``.
        target: ``newest`` committed full checkpoint, an ``older`` one, ``every`` one, or the ``tracker``.
        draw: 0 to 1, which file.
    """

    how: str
    target: str
    draw: float


@dataclass(frozen=True)
class Life:
    """From a start to the next: blows, of which the last ends it, and then perhaps a damage."""

    blows: tuple[Blow, ...]
    damage: Damage | None


@dataclass(frozen=True)
class Plan:
    """A chain."""

    seed: int
    chain: int
    setup: Setup
    lives: tuple[Life, ...]


def draw_plan(seed: int, chain: int, *, mounts: bool = True) -> Plan:
    """The chain of this number. Consecutive numbers go through all configurations.

    Args:
        mounts: a small disk can be mounted.
    """
    rng = random.Random(f"{seed}/{chain}")
    order = random.Random(seed).sample(CONFIGS, len(CONFIGS))
    setup = _draw_setup(rng, *order[chain % len(order)])
    setup = replace(setup, small_disk=setup.small_disk and mounts)
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
        target = rng.choice(("newest", "newest", "newest", "older", "tracker"))
        damage = Damage(rng.choice(DAMAGES), target, rng.random())
    return Life(tuple(blows), damage)


def _draw_instant(rng: random.Random, *, resumed: bool) -> Instant:
    if resumed and rng.random() < 0.2:
        return Instant("restoring", 1, rng.uniform(0.0, 2.0))
    after = rng.choice(("publish", "load", "commit", "begin", "begin", "begin", "visible", "visible"))
    return Instant(after, rng.randint(1, 5), rng.choice((rng.uniform(0.0, 0.3), rng.uniform(0.0, 0.05))))


def _draw_survivable(rng: random.Random, setup: Setup, instant: Instant) -> Blow:
    choices = ["monitor", "monitor", "pause", "pause"]
    if setup.restarts or setup.free:
        choices.append("explorer")
    if setup.small_disk:
        choices += ["disk"] * 3
    choice = rng.choice(choices)
    if choice == "pause":
        return Blow("pause", rng.choice(PAUSED), instant, rng.random(), rng.uniform(0.2, 5.0))
    if choice == "disk":
        return Blow("full disk", "", instant, 0.0, rng.uniform(0.3, 3.0))
    return Blow("kill", choice, instant, rng.random())


def _draw_end(rng: random.Random, setup: Setup, instant: Instant) -> Blow:
    if instant.after != "start" and rng.random() < 0.2:
        # The peers of a rank notice that it hangs; of a single one nobody does before the limit of a step.
        return Blow("hang", rng.choice(HUNG if setup.ranks > 1 else HUNG[1:]), instant, rng.random())
    return Blow("kill", rng.choice(FATAL), instant, rng.random())
