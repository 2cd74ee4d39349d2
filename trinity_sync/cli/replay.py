"""The settings with which a run is repeated: its saved settings whatever today's defaults are, without the places where
it lived, and the user's new overrides. `reproduce` calls `find_source`, `read_source` and `replay`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trinity_sync import config
from trinity_sync.config import RunConfig
from trinity_sync.config.comparison import ABSENT, LOCATIONS, is_place, without_masked
from trinity_sync.config.composition import NAMED_BY_PATH, fitted
from trinity_sync.config.invocation import (
    Invocation,
    Recomposition,
    experiment_of,
    explained,
    merge_overrides,
    readable,
    saved_settings,
)
from trinity_sync.config.overrides import as_numbers, as_value, parse
from trinity_sync.config.saved_config import saved_references
from trinity_sync.errors import ConfigError
from trinity_sync.host.masking import masked_override
from trinity_sync.host.references import path_list
from trinity_sync.reproduction.outcome import Outcome, read_bundle, read_outcome
from trinity_sync.tracking.run_record import RunFolderInUse, RunJson, lock_owner, read_record

_WRITTEN_TO = ("checkpoint.dir", "checkpoint.mirror", "sync.shm_dir", "sync.store", "cluster.")
_BEGAN_WITH = "checkpoint.resume_from"
_RUNS_HERE = ("outputs/*/*/run.json", "multirun/*/*/*/run.json")


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Settings of the repetition."""

    recomposed: Recomposition  # all of them
    left_out: list[str]  # overrides of the places where the run lived
    changed: list[config.Difference]  # settings that differ from the run's

    @property
    def config(self) -> RunConfig:
        return self.recomposed.config


def replay(source: ReplaySource, new: Sequence[str], allowed: Sequence[str]) -> Replay:
    """Compose the settings of the repetition."""
    invocation = source.invocation
    kept, left_out = split_places(invocation.overrides)
    saved = _anchored(source.config.without_places(), invocation.started_in)
    today = invocation.of(kept).recompose((), allowed, places="none", given=new)
    places = [*_own_places(today.config, new)]
    kept = [key for key in fitted(today.config.composed) if new and saved.has(key)]  # the user may move the model
    pins = [*_pins(saved, today.config, source.place), *(f"{key}={as_value(saved.select(key))}" for key in kept)]
    pins += [pin for pin, _ in places]
    recomposed = invocation.of(merge_overrides(today.invocation.overrides, pins)).recompose(
        new, allowed, places="written"
    )
    check_digest(source, recomposed.config)
    changed = [one for one in saved.shown_diff(recomposed.config) if not is_place(one.key)]
    return Replay(recomposed=recomposed, left_out=left_out + [text for _, text in places], changed=changed)


def split_places(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split overrides into those of the run's content and those of its places."""
    where = [text for text in overrides if _says_where(text)]
    return [text for text in overrides if text not in where], where


def _pins(saved: RunConfig, today: RunConfig, place: Path) -> Iterator[str]:
    """Yield overrides that restore values that differ today, because a default has changed or a path was relative."""
    for key, old, _ in saved.diff(today):
        if is_place(key) or old == ABSENT:  # a setting added since then keeps its default
            continue
        if not today.has(key):
            raise ConfigError(
                f"{key} is {old} in the saved settings of {place}, and is not a setting of this version; install the "
                "version that the run was made with: see packages in its run.json"
            )
        yield f"{key}={as_value(old)}"


def _own_places(cfg: RunConfig, new: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield overrides against places in users' options, each with the text that it leaves out."""
    if not any(text.lstrip("+~").startswith("tracker") for text in new):
        tracker = cfg.select("tracker")
        for name in tracker if isinstance(tracker, Mapping) else ():
            yield f"~tracker.{name}", f"tracker={name}"
    for key, ours, here in RunConfig(config.compose()).diff(cfg):
        if key.startswith(_WRITTEN_TO) and ABSENT not in (ours, here):
            yield f"{key}={as_value(ours)}", masked_override(f"{key}={here}")


def _anchored(saved: RunConfig, folder: Path) -> RunConfig:
    """Return settings with absolute paths, also of the checkpoint that the run started from."""
    found = saved.anchored(folder)
    begun = found.select(_BEGAN_WITH)
    return found.updated({_BEGAN_WITH: str(folder / begun)}) if isinstance(begun, str) else found


def without_secret(override: str) -> str | None:
    """Return an override without its secrets; None: nothing is left of it."""
    if masked_override(override) == override:
        return override
    key, value = override.partition("=")[0], parse(override).value()
    kept = without_masked({key.lstrip("+"): value}) if isinstance(value, dict) else {}
    return f"{key}={as_value(kept.popitem()[1])}" if kept else None


def _says_where(override: str) -> bool:
    key, _, value = override.strip().lstrip("+~").partition("=")
    holds_some = value.startswith("{") and any(place.startswith(f"{key}.") for place in LOCATIONS)
    return holds_some or (is_place(key) and key != "hydra.searchpath")


def check_digest(source: ReplaySource, cfg: RunConfig) -> None:
    """Refuse settings that do not have the digest of the run's record: their result is unknown."""
    expected = source.record.get("config_digest")
    saved = source.config.anchored(source.invocation.started_in)
    if expected is None or saved.has_digest(expected):
        return
    missing, renamed = [], {}
    for key in NAMED_BY_PATH:  # only the name of a file counted
        old, new = saved.select(key), cfg.select(key)
        paths = [] if old is None else path_list(old)
        gone = [path for path in paths if not os.path.exists(path)]  # noqa: PTH110 - also where it may not be reached
        if gone:
            missing += [f"{key} is {gone[0]}, which does not exist here: give it again"] if old == new else []
            # a file under another name: the old name counted
            same = [Path(path).name for path in path_list(new)] == [Path(path).name for path in paths]
            names = [Path(path).name if path in gone else path for path in paths]
            renamed[key] = new if same else names[0] if isinstance(old, str) else names
    if not saved.updated(renamed).has_digest(expected):
        raise ConfigError(
            f"the settings of {source.place} are not those of its record, which has config_digest {expected}: "
            f"{'; or '.join([*missing, 'they were changed since'])}"
        )


# -- the run to repeat: from its folder, or from a bundle


RESULT = "reproduction.json"
"""In the folder of a repetition: its source, and the comparison."""


@dataclass(frozen=True, kw_only=True)
class ReplaySource:
    """A run to repeat."""

    invocation: Invocation  # how it was started
    record: RunJson  # its run.json, as far as it exists
    config: RunConfig  # all of its saved settings
    outcome: Outcome  # its results

    @property
    def place(self) -> Path:
        return self.invocation.place


def find_source(name: str) -> Path:
    """Return the folder or file of a name: a path, or the newest run of that experiment."""
    if os.path.lexists(name):
        return Path(name).absolute()
    found = (path.parent for pattern in _RUNS_HERE for path in Path.cwd().glob(pattern))
    runs = [run for run in found if not _is_repetition(run) and experiment_of(run) == name]
    if not runs and not (config.conf_dir() / "experiment" / f"{name}.yaml").is_file():
        raise ConfigError(
            f"{name} is not the folder of a run, a bundle or an experiment; name the folder with run.json"
        )
    if not runs:
        raise ConfigError(
            f"there is no run of experiment={name} below {Path.cwd()}/outputs or multirun; start one: "
            f"trinity-sync run experiment={name}"
        )
    return max(runs, key=lambda run: (run / "run.json").stat().st_mtime)


def _is_repetition(run: Path) -> bool:
    """Return whether `reproduce` has made a run, even if it was interrupted and has no result."""
    if (run / RESULT).exists():
        return True
    try:
        record = read_record(run / "run.json")
        first = (record.get("attempts") or [record])[0]
        return shlex.split(str(first.get("command")))[1:2] == ["reproduce"]
    except (ConfigError, ValueError):
        return False


def read_source(place: Path, config_dir: Path | None, new: Sequence[str] = ()) -> ReplaySource:
    """Read a run from its folder, or from a bundle."""
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
    settings = _resolved(RunConfig.of(bundle.config), invocation, new)
    return ReplaySource(invocation=invocation, record=bundle.record, config=settings, outcome=bundle.outcome)


def _resolved(settings: RunConfig, invocation: Invocation, new: Sequence[str]) -> RunConfig:
    """Return saved settings with references resolved; unused places where the run lived may stay unresolvable."""
    trust = invocation.trust(new, ())
    with explained():
        given = dict(trust.given)
    new_values = {}
    for doubt in saved_references(settings.composed):
        place = next((place for place in LOCATIONS if f"{doubt.key}.".startswith(f"{place}.")), None)
        if place is not None or doubt.key in given:
            new_values[place or doubt.key] = given.get(doubt.key)
    settings = settings.updated(new_values)
    trust.refuse(saved_references(settings.composed))
    with readable(invocation.place):
        return settings.resolved()
