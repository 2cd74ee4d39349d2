"""One trial from its seed to its outcome."""

from __future__ import annotations

import contextlib
import gc
import io
import random
import traceback
from dataclasses import dataclass, field

from tests.campaign.cluster import observed
from tests.campaign.ledger import ROOT
from tests.campaign.operations import Trial
from tests.campaign.world import Violation, World

#: Steps after which a trial ends; its last run and the tidying up come on top.
STEPS = 250


@dataclass
class Outcome:
    """What came of a trial.

    Attributes:
        failure: what did not hold; None: everything did.
        log: the last operations.
        steps: operations of the program: calls that arrived at an actor, actions of the driver, loads of explorers,
            commands of users, deaths and troubles.
        operations: file operations.
        checks: how often the folder had changed and was compared with what was promised.
        kinds: steps by their kind.
    """

    failure: str | None
    log: list[str]
    steps: int
    operations: int
    checks: int
    kinds: dict[str, int] = field(default_factory=dict)


def run_trial(seed: str, number: int, steps: int = STEPS, lines: int = 40) -> Outcome:
    """Run one; the same seed, number and length give the same outcome, in any process with the same hash seed."""
    world = World(random.Random(f"{seed}/{number}"), steps, lines)
    trial = Trial(world)
    failure: str | None = None
    with contextlib.redirect_stderr(io.StringIO()), observed(trial.ledger):
        try:
            with world.entered():
                ROOT.parent.parent.mkdir(exist_ok=True)
                ROOT.mkdir(parents=True)
                world.disk.make_durable()
                world.run(trial.main())
        except Violation as violation:
            failure = str(violation)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-3:][::-1]
            where = " < ".join(
                f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})" for frame in last[::-1]
            )
            failure = f"{type(error).__name__}: {error} in {where}"
    if not gc.isenabled():
        gc.collect()
    return Outcome(failure, list(world.log), world.steps, world.disk.operations, trial.ledger.checks, world.kinds)
