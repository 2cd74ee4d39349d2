"""Which run is to be repeated, and what is known of it: from its folder, or from a bundle."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trinity_sync import config
from trinity_sync.cli.invocation import Invocation, explained, readable, saved_settings
from trinity_sync.config.comparison import LOCATIONS
from trinity_sync.config.overrides import as_numbers
from trinity_sync.config.saved import saved_references
from trinity_sync.errors import ConfigError
from trinity_sync.reproduction.bundle import read_bundle
from trinity_sync.reproduction.outcome import Outcome, read_outcome
from trinity_sync.tracking.record import RunJson, read_record
from trinity_sync.tracking.run_folder import RunFolderInUse, lock_owner

RESULT = "reproduction.json"
"""In the folder of a repetition: what it repeats, and how it compares."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A run that is to be repeated.

    Attributes:
        invocation: how it was started.
        record: of its run.json, as much as there is.
        config: all of its settings, as saved.
        outcome: what it computed.
    """

    invocation: Invocation
    record: RunJson
    config: DictConfig
    outcome: Outcome

    @property
    def place(self) -> Path:
        """Its folder, or the bundle."""
        return self.invocation.place


def find_source(name: str) -> Path:
    """The folder or file that is meant; the newest run of an experiment of that name."""
    if os.path.lexists(name):
        return Path(name).absolute()
    runs = [run for run in _runs_here() if _experiment_of(run) == name]
    if not runs and not (config.conf_dir() / "experiment" / f"{name}.yaml").is_file():
        raise ConfigError(f"{name} is no folder of a run, no bundle and no experiment; name the folder with run.json")
    if not runs:
        raise ConfigError(
            f"there is no run of experiment={name} below {Path.cwd()}/outputs or multirun; start one: "
            f"trinity-sync run experiment={name}"
        )
    return max(runs, key=lambda run: (run / "run.json").stat().st_mtime)


def _runs_here() -> Iterator[Path]:
    for pattern in ("outputs/*/*/run.json", "multirun/*/*/*/run.json"):
        found = (path.parent for path in Path.cwd().glob(pattern))
        yield from (run for run in found if not _is_repetition(run))  # what was repeated is not what to repeat


def _is_repetition(run: Path) -> bool:
    """Whether `reproduce` has made it, also where it was cut off and left no result."""
    if (run / RESULT).exists():
        return True
    try:
        record = read_record(run / "run.json")
        first = (record.get("attempts") or [record])[0]
        return shlex.split(str(first.get("command")))[1:2] == ["reproduce"]
    except (ConfigError, ValueError):
        return False


def _experiment_of(run: Path) -> object:
    try:
        return OmegaConf.load(run / ".hydra" / "hydra.yaml").hydra.runtime.choices.get("experiment")
    except Exception:
        return None  # whatever it is, it is not a run that can be told to be of an experiment


def read_source(place: Path, config_dir: Path | None, new: Sequence[str] = ()) -> Source:
    """Read a run from its folder, or from a bundle.

    Args:
        config_dir: folder of option files that the user has just given.
        new: overrides that the user has just given.

    Raises:
        ConfigError: it is neither, is being written, or cannot be read.
    """
    if place.is_dir():
        invocation = Invocation.read(place)
        if owner := lock_owner(place):
            raise RunFolderInUse(f"{place} is in use by {owner}: the run is not over; reproduce it when it is")
        record = read_record(place / "run.json")
        settings = _resolved(saved_settings(place), invocation, new)
        if config_dir is not None:
            invocation = replace(invocation, config_dir=config_dir)
        return Source(invocation=invocation, record=record, config=settings, outcome=read_outcome(place, record))
    bundle = read_bundle(place)
    invocation = Invocation(
        overrides=tuple(as_numbers(bundle.overrides)),
        config_name=bundle.config_name,
        config_dir=config_dir,
        started_in=Path.cwd(),
        place=place,
    )
    settings = _resolved(OmegaConf.create(dict(bundle.config)), invocation, new)
    return Source(invocation=invocation, record=bundle.record, config=settings, outcome=bundle.outcome)


def _resolved(settings: DictConfig, invocation: Invocation, new: Sequence[str]) -> DictConfig:
    """Return saved settings with what they refer to; places where the run lived, which are not used, need not be known.

    Raises:
        ConfigError: they read the environment of this user, who has not recorded that or given the value anew.
    """
    trust = invocation.trust(new, ())
    with explained():
        given = dict(trust.given)
    for doubt in list(saved_references(settings)):
        place = next((place for place in LOCATIONS if f"{doubt.key}.".startswith(f"{place}.")), None)
        if place is not None or doubt.key in given:
            OmegaConf.update(settings, place or doubt.key, given.get(doubt.key))
    trust.refuse(saved_references(settings))
    with readable(invocation.place):
        OmegaConf.resolve(settings)
    return settings
