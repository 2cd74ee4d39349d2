"""The settings with which a run is repeated: those it was saved with, whatever the defaults are today, without where it
lived, and then what the user gives anew.
"""

from __future__ import annotations

import copy
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trinity_sync import config
from trinity_sync.cli.invocation import Invocation, Recomposed, explained, merge_overrides, readable, saved_settings
from trinity_sync.config.comparison import (
    ABSENT,
    EARLIER_LOCATIONS,
    LOCATIONS,
    NAMED_BY_PATH,
    is_place,
    without_masked,
    without_places,
)
from trinity_sync.config.overrides import as_numbers, parse
from trinity_sync.config.saved_config import saved_references
from trinity_sync.errors import ConfigError
from trinity_sync.host.masking import masked_override
from trinity_sync.reproduction.bundle import read_bundle
from trinity_sync.reproduction.outcome import Outcome, read_outcome
from trinity_sync.tracking.run_record import RunFolderInUse, RunJson, lock_owner, read_record

_WRITTEN_TO = ("checkpoint.dir", "checkpoint.mirror", "sync.shm_dir", "cluster.")
_BEGAN_WITH = "checkpoint.resume_from"


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Settings of the repetition.

    Attributes:
        recomposed: all of them.
        left_out: overrides that said where the run lived.
        changed: settings that differ from the run's.
    """

    recomposed: Recomposed
    left_out: list[str]
    changed: list[config.Difference]

    @property
    def cfg(self) -> DictConfig:
        """All settings."""
        return self.recomposed.cfg


def replay(source: ReplaySource, new: Sequence[str], allowed: Sequence[str]) -> Replay:
    """Work out the settings of the repetition.

    Args:
        source: the run.
        new: overrides that the user has just given, without those of Hydra itself.
        allowed: packages of which the run's settings may name classes.

    Raises:
        ConfigError: the settings name what may not be run or is not here any more, or are not those of the record.
    """
    invocation = source.invocation
    kept, left_out = split_places(invocation.overrides)
    saved = _anchored(without_places(source.config), invocation.started_in)
    today = invocation.of(kept).recompose((), allowed, places="none", given=new)
    places = [*_own_places(today.cfg, new)]
    pins = [*_pins(saved, today.cfg, source.place), *(pin for pin, _ in places)]
    recomposed = invocation.of(merge_overrides(today.invocation.overrides, pins)).recompose(
        new, allowed, places="written"
    )
    check_digest(source, recomposed.cfg)
    changed = [one for one in config.shown_diff(saved, recomposed.cfg) if not is_place(one.key)]
    return Replay(recomposed=recomposed, left_out=left_out + [text for _, text in places], changed=changed)


def split_places(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part overrides into those of what was run, and those of where it lived."""
    where = [text for text in overrides if _says_where(text)]
    return [text for text in overrides if text not in where], where


def _pins(saved: DictConfig, today: DictConfig, place: Path) -> Iterator[str]:
    """Overrides that put back what comes out otherwise today, since defaults have changed or a path was relative."""
    for key, old, _ in config.config_diff(saved, today):
        if is_place(key) or old == ABSENT:  # a setting that is new since then has its default
            continue
        node = OmegaConf.select(today, key.rpartition(".")[0]) if "." in key else today
        if not isinstance(node, DictConfig) or key.rpartition(".")[2] not in node:
            raise ConfigError(
                f"{key} is {old} in the saved settings of {place}, and is no setting of this version; install the one "
                "that the run was made with: see packages in its run.json"
            )
        yield f"{key}={_as_value(old)}"


def _own_places(cfg: DictConfig, new: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Overrides against places that options of the user's own name, each with what is left out thereby."""
    if not any(text.lstrip("+~").startswith("tracker") for text in new):
        for name in OmegaConf.select(cfg, "tracker") or ():
            yield f"~tracker.{name}", f"tracker={name}"
    for key, ours, here in config.config_diff(config.compose(), cfg):
        if key.startswith(_WRITTEN_TO) and ABSENT not in (ours, here):
            yield f"{key}={_as_value(ours)}", masked_override(f"{key}={here}")


def _anchored(saved: DictConfig, folder: Path) -> DictConfig:
    """Settings with all paths as they were meant, also of the checkpoint that the run began with."""
    found = config.anchored(saved, folder)
    begun = OmegaConf.select(found, _BEGAN_WITH)
    if isinstance(begun, str) and found is not saved:
        OmegaConf.update(found, _BEGAN_WITH, str(folder / begun))
    return found


def _as_value(value: object) -> str:
    """A value as Hydra's override grammar has it."""
    if isinstance(value, str):
        return config.quote(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_as_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_as_value, value)) + "]"
    return json.dumps(value)


def without_secret(override: str) -> str | None:
    """Return an override without its secrets; None where nothing is left of it."""
    if masked_override(override) == override:
        return override
    key, value = override.partition("=")[0], parse(override).value()
    kept = without_masked({key.lstrip("+"): value})
    return f"{key}={_as_value(kept.popitem()[1])}" if isinstance(value, dict) and kept else None


def _says_where(override: str) -> bool:
    key, _, value = override.strip().lstrip("+~").partition("=")
    holds_some = value.startswith("{") and any(place.startswith(f"{key}.") for place in LOCATIONS)
    return holds_some or (is_place(key) and key != "hydra.searchpath")


def check_digest(source: ReplaySource, cfg: DictConfig) -> None:
    """Refuse settings that are not those of the record: of others nobody knows what they come to.

    Args:
        cfg: those with which the run is repeated: they say where files lie that the run found elsewhere.

    Raises:
        ConfigError: they are not.
    """
    expected = source.record.get("config_digest")

    def is_expected() -> bool:
        return any(config.config_digest(saved, places=places) == expected for places in (LOCATIONS, EARLIER_LOCATIONS))

    saved = copy.deepcopy(config.anchored(source.config, source.invocation.started_in))
    OmegaConf.set_readonly(saved, False)
    if expected is None or is_expected():
        return
    missing = []
    for key in NAMED_BY_PATH:  # of what was a file only the name counted
        old, new = OmegaConf.select(saved, key), OmegaConf.select(cfg, key)
        if isinstance(old, str) and not os.path.exists(old):  # noqa: PTH110 - also where it may not be reached
            missing += [f"{key} is {old}, which is not here: give it anew"] if old == new else []
            # found where it lies now; given anew under another name, it is the old name that counted
            same = isinstance(new, str) and Path(new).name == Path(old).name
            OmegaConf.update(saved, key, new if same else Path(old).name)
    if not is_expected():
        raise ConfigError(
            f"the settings of {source.place} are not those of its record, which has config_digest {expected}: "
            f"{'; or '.join([*missing, 'they were changed since'])}"
        )


# Which run is to be repeated, and what is known of it: from its folder, or from a bundle.


RESULT = "reproduction.json"
"""In the folder of a repetition: what it repeats, and how it compares."""


@dataclass(frozen=True, kw_only=True)
class ReplaySource:
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


def read_source(place: Path, config_dir: Path | None, new: Sequence[str] = ()) -> ReplaySource:
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
        return ReplaySource(invocation=invocation, record=record, config=settings, outcome=read_outcome(place, record))
    bundle = read_bundle(place)
    invocation = Invocation(
        overrides=tuple(as_numbers(bundle.overrides)),
        config_name=bundle.config_name,
        config_dir=config_dir,
        started_in=Path.cwd(),
        place=place,
    )
    settings = _resolved(OmegaConf.create(dict(bundle.config)), invocation, new)
    return ReplaySource(invocation=invocation, record=bundle.record, config=settings, outcome=bundle.outcome)


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
