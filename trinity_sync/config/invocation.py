"""How a run was started, and its settings composed again with new overrides: `resume` continues with them, `reproduce`
starts again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_sync.config.comparison import ABSENT, RunConfig
from trinity_sync.config.composition import compose, fitted, from_here, override_texts, section, texts_of
from trinity_sync.config.lookup import chosen_by_option
from trinity_sync.config.messages import explain
from trinity_sync.config.overrides import as_numbers, as_value, quote
from trinity_sync.config.saved_config import Places, Trust, only_trusted, only_trusted_places
from trinity_sync.config.user_record import NOTHING, FolderRecord
from trinity_sync.errors import ConfigError, in_one_line
from trinity_sync.host.hardware import own_modules_found
from trinity_sync.host.references import Value

_WRONG = (HydraException, OmegaConfBaseException, ValueError, AttributeError, AssertionError)
"""Exceptions of a composition of invalid settings."""


@contextmanager
def explained() -> Iterator[None]:
    """Within the block, turn an unparsable override into a `ConfigError`."""
    try:
        yield
    except OverrideParseException as error:
        raise ConfigError(explain(error)) from error


@contextmanager
def readable(path: Path) -> Iterator[Path]:
    """Within the block, turn any error of reading a run's file into a `ConfigError` that names it."""
    try:
        yield path
    except Exception as error:
        told = in_one_line(error)
        raise ConfigError(
            f"{path} cannot be read: {told}; it was cut off or changed, name the folder of a whole run"
        ) from error


def saved_settings(run: Path) -> RunConfig:
    """Return all settings that a run has saved in its folder. Raises ConfigError if they cannot be read."""
    with readable(run / ".hydra" / "config.yaml") as path:
        found = OmegaConf.load(path)
        if not isinstance(found, DictConfig):
            raise ValueError("it holds no settings")
        return RunConfig(found)


def saved_setting(run: Path, key: str) -> tuple[Value, str]:
    """Return a saved setting of a run, None if it has none, and the directory in which the run was started."""
    try:
        value: object = OmegaConf.select(cast(DictConfig, OmegaConf.load(run / ".hydra" / "config.yaml")), key)
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        started_in = OmegaConf.load(run / ".hydra" / "hydra.yaml").hydra.runtime.cwd
    except Exception as error:
        raise ConfigError(
            f"{run / '.hydra'} cannot be read: {error}; name the folder of the checkpoints instead"
        ) from error
    return cast("Value", value), str(started_in)


def experiment_of(run: Path) -> object:
    """Return the experiment of a run; None if it has none or cannot be read."""
    try:
        return OmegaConf.load(run / ".hydra" / "hydra.yaml").hydra.runtime.choices.get("experiment")
    except Exception:
        return None


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """How a run was started."""

    overrides: tuple[str, ...]  # of the command line, as text
    config_name: str  # the primary config
    config_dir: Path | None  # folder of further options, if there was one
    started_in: Path  # the folder from which relative paths count
    place: Path  # the run's folder or a bundle, for errors
    recorded: FolderRecord = NOTHING  # this user's record of it on this host

    @classmethod
    def read(cls, folder: Path) -> Invocation:
        """Read the invocation of the run in a folder. Raises ConfigError if there is no run."""
        if (folder / "multirun.yaml").is_file():
            raise ConfigError(f"{folder} is a sweep; name one of its jobs, such as {folder / '0'}")
        saved = folder / ".hydra"
        lacking = [
            path for path in (folder / "run.json", saved / "overrides.yaml", saved / "hydra.yaml") if not path.is_file()
        ]
        if lacking:
            raise ConfigError(
                f"{folder} is not the folder of a run: {lacking[0]} is missing; name the folder that has run.json"
            )
        with readable(saved / "overrides.yaml") as path:
            # unresolved: references point into the composed configuration
            texts = texts_of(OmegaConf.load(path))
        with readable(saved / "hydra.yaml") as path:
            return cls.of_hydra(OmegaConf.load(path).hydra, texts, folder)

    @classmethod
    def of_resume(cls, folder: Path, used_places: Callable[[Path], Mapping[str, str | None]]) -> Invocation:
        """Read it like `read`, with the places of checkpoints in run.json instead of those in the settings."""
        found, saved = cls.read(folder), saved_settings(folder).written()
        moved = {}
        for key, place in used_places(folder).items():
            group, _, name = key.partition(".")
            if section(saved, group).get(name) != place:
                moved[key] = place
        used = [f"{key}={'null' if place is None else quote(place)}" for key, place in moved.items()]
        return found.of([*found.overrides, *used])

    @classmethod
    def of_hydra(cls, settings: DictConfig, overrides: Sequence[str], place: Path) -> Invocation:
        """Make it from Hydra's own saved settings of a run or a sweep."""
        extra = [source.path for source in settings.runtime.config_sources if source.provider == "command-line"]
        given = override_texts(settings, "hydra")
        searched = [text for text in given if text.startswith("hydra.searchpath=")]
        return cls(
            overrides=(*as_numbers(overrides), *searched),
            config_name=str(settings.job.config_name),
            config_dir=Path(extra[0]) if extra else None,
            started_in=Path(settings.runtime.cwd),
            place=place,
            recorded=FolderRecord.read(place),
        )

    def of(self, overrides: Sequence[str]) -> Invocation:
        """Return a copy with other overrides."""
        return replace(self, overrides=tuple(overrides))

    def trust(self, new: Sequence[str], allowed: Sequence[str], places: Places = "all") -> Trust:
        """Return what the user vouches for; see `recompose`."""
        return Trust(
            where=self.place,
            started_in=self.started_in,
            new=tuple(new),
            allowed=tuple(allowed),
            recorded=self.recorded,
            places=places,
        )

    @contextmanager
    def modules_found(self, new: Sequence[str], allowed: Sequence[str]) -> Iterator[None]:
        """Within the block, imports find trusted modules and no others; see `recompose`."""
        with explained():
            folders = self.trust(new, allowed).module_folders()
        for name, folder in folders.items():
            if folder != self.recorded.folder_of(name):
                print(f"note: {name} is imported from {folder}", file=sys.stderr)
        with own_modules_found(*dict.fromkeys(folders.values())):
            yield

    def recompose(
        self, new: Sequence[str], allowed: Sequence[str], *, places: Places = "all", given: Sequence[str] = ()
    ) -> Recomposition:
        """Compose the settings again, with new overrides after the old ones."""
        saved = chosen_by_option(self.overrides)
        try:
            merge_overrides(saved, ())
        except ConfigError as error:
            raise self._misfit(str(error)) from error
        try:
            new = from_here(new, self.started_in)
            merge_overrides(saved, new)
            trust = self.trust((*new, *given), allowed, places)
            with only_trusted_places(trust):
                overrides = without_foreign_keys(saved, new, lambda choice: self._compose([choice]))
            overrides = merge_overrides(overrides, new)
            with only_trusted(overrides, trust):
                cfg = self._compose(overrides)
        except _WRONG as error:
            if new and self._composes(saved, self.trust((), allowed, places)):
                raise ConfigError(explain(error)) from error
            raise self._misfit(explain(error)) from error
        return Recomposition(invocation=self.of(overrides), trust=trust, config=RunConfig(cfg))

    def _misfit(self, told: str) -> ConfigError:
        return ConfigError(
            f"the saved settings of {self.place} do not fit this version: {' '.join(told.split())}; install the "
            "version that the run was made with (packages in run.json), or give the setting again"
        )

    def _composes(self, overrides: Sequence[str], trust: Trust) -> bool:
        try:
            with only_trusted(overrides, trust):
                self._compose(overrides)
        except (*_WRONG, ConfigError):
            return False
        return True

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        return compose(overrides, config_name=self.config_name, config_dir=self.config_dir)


@dataclass(frozen=True, kw_only=True)
class Recomposition:
    """Settings composed again."""

    invocation: Invocation  # with all overrides, old and new
    trust: Trust  # what the user vouches for in them
    config: RunConfig  # the composed settings; relative paths stay

    def also(self, new: Sequence[str]) -> Recomposition:
        """Compose again with further overrides; errors as of `Invocation.recompose`."""
        trust = self.trust
        return self.invocation.recompose([*trust.new, *new], trust.allowed, places=trust.places)

    def keeping(self, saved: RunConfig) -> Recomposition:
        """Compose again with the run's own values of settings whose default depends on others, unless they are given:
        an earlier release had other defaults, and the model may have moved.
        """
        defaults = fitted(self.config.composed)
        kept = [one for one in saved.diff(self.config) if one.key in defaults and one.old != ABSENT]
        return self.also([f"{one.key}={as_value(one.old)}" for one in kept]) if kept else self

    def command_line(self, folder: Path) -> list[str]:
        """Return the arguments with which Hydra composes the same for one run in a folder, even from a sweep's
        settings.
        """
        name, options = self.invocation.config_name, self.invocation.config_dir
        one = [f"hydra.run.dir={quote(str(folder))}", "hydra.mode=RUN"]
        line = [*self.invocation.overrides, *one, f"--config-name={name}"]
        return [*line, *([f"--config-dir={options}"] if options else [])]

    def only_trusted(self) -> AbstractContextManager[None]:
        """Within the block, Hydra refuses to compose untrusted settings."""
        return only_trusted(self.invocation.overrides, self.trust)


def without_foreign_keys(old: Sequence[str], new: Sequence[str], compose: Callable[[str], DictConfig]) -> list[str]:
    """Drop old overrides of keys that the newly chosen option of their group does not have. Example: a run with
    ``backend=megatron backend.tp=2``, resumed with ``backend=fsdp2``, has no `backend.tp`.
    """
    kept = list(old)
    for choice in new:
        group, found, _ = choice.partition("=")
        below = [text for text in kept if text.lstrip("+").startswith(f"{group}.")]
        if not found or "." in group or not below:
            continue
        chosen = compose(choice)
        for text in below:
            key = text.lstrip("+").partition("=")[0]
            node = OmegaConf.select(chosen, key.rpartition(".")[0])
            if not text.startswith("+") and (node is None or key.rpartition(".")[2] not in node):
                kept.remove(text)
    return kept


def merge_overrides(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Append new overrides to old ones, and drop old ones that a new one replaces, so that they do not pile up over
    many resumes.

    An override is replaced by a later one of the same type and key. `+key=1` therefore stays before a plain `key=2`,
    which needs the key to exist.
    """
    with explained():
        parsed = OverridesParser.create().parse_overrides([*old, *new])
    # a dict keeps the place of a key that is set again, and the last override must be last
    kept: dict[tuple[object, ...], str] = {}
    for override, text in zip(parsed, [*old, *new], strict=True):
        key = (override.type, override.get_key_element().lstrip("+~"))
        kept.pop(key, None)
        kept[key] = text
    return list(kept.values())
