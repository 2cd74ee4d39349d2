"""How a run goes on in place, and what its own record says that it had."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trinity_sync.checkpoint.deletion_notes import noted_deletions
from trinity_sync.tracking import jsonl


@dataclass(frozen=True)
class Resume:
    """Go on in place from the newest checkpoint that verifies.

    Attributes:
        from_scratch: begin again at step 1, whatever was committed; what is there is set aside.
        skip_unreadable: go on from an older one though newer ones cannot be read now, or are gone.
        started_in: where the run was started first, from which its relative paths count.
    """

    from_scratch: bool = False
    skip_unreadable: bool = False
    started_in: Path = Path()


def committed_steps(events: Path, checkpoints: Path) -> list[int]:
    """Steps of the full checkpoints that a run committed and nobody has deleted since, as its events say, ascending.

    Args:
        checkpoints: its checkpoint folder, where deletions are noted that the run was not told of.

    Raises:
        RunError: the events cannot be read.
    """
    steps: set[int] = set()
    gone = noted_deletions(checkpoints)
    for event in jsonl.read(events):
        step = jsonl.event_step(event)
        if step is None:
            continue
        if event.get("event") == "commit" and event.get("kind") == "full":
            if (step, event.get("attempt")) not in gone:
                steps.add(step)
        elif event.get("event") == "prune":
            steps.discard(step)
    return sorted(steps)
