"""A trial: one line of the campaign's JSONL."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tests.kills.plan import Plan

SURVIVED, RESUMED, REFUSED, LOST = "survived", "resumed", "refused", "lost"

LOSS, LABEL, TAKEN, LEFT = "lost", "mislabelled", "of another run", "left behind"
KINDS = (LOSS, LABEL, TAKEN, LEFT)
"""What a problem is about stands before it, as in ``lost: ...``; a problem without one of these is of another kind."""


def kind_of(problem: str) -> str:
    """Return the kind of a problem, or ``other``."""
    kind = problem.partition(": ")[0]
    return kind if kind in KINDS else "other"


@dataclass
class Trial:
    """What befell a run, and what became of it.

    Attributes:
        outcome: ``survived``: the run went on, or was not there; ``resumed``: it ended, and the resume trained on;
            ``refused``: it was right that the resume said no; ``lost``: the resume did not come to train. Empty: not
            decided.
        noticed: what the run said about it.
        problems: promises that were not kept; a trial without any has passed.
    """

    seed: int
    chain: int
    config: str
    life: int
    kind: str
    victim: str
    instant: str
    outcome: str = ""
    noticed: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    folder: str = ""

    @classmethod
    def of(cls, plan: Plan, life: int, kind: str, victim: str, instant: str, folder: str) -> Trial:
        """One that has not begun."""
        settings = asdict(plan.setup)
        return cls(
            plan.seed, plan.chain, plan.setup.name, life, kind, victim, instant, settings=settings, folder=folder
        )
