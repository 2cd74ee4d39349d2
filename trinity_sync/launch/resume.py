"""How a run goes on in place, and what its own record says that it had."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trinity_sync.checkpoint import owner
from trinity_sync.checkpoint.deletion_notes import noted_deletions
from trinity_sync.config import asked_again
from trinity_sync.errors import ConfigError
from trinity_sync.host.urls import absolute, shown
from trinity_sync.tracking import jsonl
from trinity_sync.tracking.record import read_record

_DIR, _MIRROR = "checkpoint.dir", "checkpoint.mirror"
PLACES = (_DIR, _MIRROR, "checkpoint.resume_from")


@dataclass(frozen=True)
class Resume:
    """Go on in place from the newest checkpoint that verifies.

    Attributes:
        from_scratch: begin again at step 1, whatever was committed; what is there is set aside.
        skip_unreadable: go on from an older one though newer ones cannot be read now, or are gone.
        started_in: where the run was started first, from which its relative paths count.
        given: those of `PLACES` that the user has just named for this run.
    """

    from_scratch: bool = False
    skip_unreadable: bool = False
    started_in: Path = Path()
    given: frozenset[str] = frozenset()


def written_places(cfg: DictConfig, run: Path) -> dict[str, str | None]:
    """Return the resolved places of checkpoints by config key, for run.json; not those with a password.

    Args:
        run: the run's folder. A place inside it is relative to it, so that it moves with the run.
    """
    found = {key: OmegaConf.select(cfg, key) for key in PLACES}
    if (place := found[_DIR]) is not None:
        folder = Path(place).absolute()
        found[_DIR] = str(folder.relative_to(run) if folder.is_relative_to(run) else folder)
    if (place := found[_MIRROR]) is not None:
        found[_MIRROR] = absolute(place)
    return {key: place for key, place in found.items() if place is None or shown(place) == place}


def used_places(run: Path) -> dict[str, str | None]:
    """Return the places of checkpoints by config key that a resume of a run uses, as its run.json names them.

    Args:
        run: the run's folder, absolute.

    Raises:
        ConfigError: run.json cannot be read.
    """
    recorded = read_record(run / "run.json").get("places") or {}
    found = {key: recorded[key] for key in PLACES if key in recorded}
    if (folder := found.get(_DIR)) is not None:
        found[_DIR] = str(run / folder)
    return found


def resume_command(run: Path, called: str) -> str:
    """Return the command line that goes on with a run, with all that it has to be given.

    Args:
        run: the run's folder, absolute.
        called: how its folder is shown.
    """
    try:
        asked = asked_again(run, used_places(run))
    except ConfigError:
        asked = []  # the resume itself says what is wrong
    return " ".join(["trinity-sync resume", shlex.quote(called), *asked])


def check_owned(run: Path, checkpoints: Path, *, named: bool = False) -> None:
    """Check that a checkpoint folder is that of the run in a folder. Writes nothing.

    Args:
        named: the user has just given `checkpoint.dir`.

    Raises:
        ConfigError: it belongs to another run, or that cannot be read now, or run.json cannot be read.
    """
    id = read_record(run / "run.json").get("id", "")  # of an earlier release there is none yet
    owner.check(checkpoints, owner.Owner.new(id, run), recorded=recorded_commits(run / "events.jsonl"), named=named)


def recorded_commits(path: Path) -> owner.Recorded:
    """Return the commits in a run's events.

    Raises:
        RunError: the events cannot be read.
    """
    events = [event for event in jsonl.read(path) if event.get("event") == "commit"]
    return {
        commit
        for commit in (
            (event.get("step"), event.get("attempt"), event.get("digest"), event.get("bytes")) for event in events
        )
        if all(isinstance(value, int | str | None) for value in commit)
    }


def copied_to(events: Path) -> set[str]:
    """Return the mirrors to which a run has copied checkpoints, as its events show them.

    Raises:
        RunError: the events cannot be read.
    """
    copies = [event for event in jsonl.read(events) if event.get("event") == "mirror"]
    return {str(event.get("url")) for event in copies if event.get("state") == "copied"}


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
