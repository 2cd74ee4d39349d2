"""The digest of a configuration, which ignores where a run lives, and the keys in which two configurations differ."""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

import xxhash
from omegaconf import DictConfig, OmegaConf

from trinity_sync.config.checks import check
from trinity_sync.config.composition import NAMED_BY_PATH, anchored, as_written, each_path, plain, rate_kind, section
from trinity_sync.config.lookup import TARGET, own_options, own_targets
from trinity_sync.config.schema import Config, typed
from trinity_sync.config.targets import check_inputs
from trinity_sync.host.masking import hide, masked
from trinity_sync.host.references import Settings, Value, resolved, shown_values, with_references

ABSENT = "(absent)"
"""In `config_diff`, marks a key that one of the two configurations does not have."""
LOCATIONS = (
    "checkpoint.dir",
    "checkpoint.mirror",
    "checkpoint.mirror_options",
    "checkpoint.mirror_keep",
    "checkpoint.mirror_tries",
    "checkpoint.mirror_backoff_s",
    "checkpoint.mirror_timeout_s",
    "checkpoint.mirror_wait_s",
    "checkpoint.memory_interval",
    "checkpoint.stop_s",
    "sync.min_rate_mbps",
    "sync.shm_dir",
    "sync.store",
    "trainer.max_restarts",
    "trainer.restart_window_s",
    "cluster",
    "hydra",
    "live",
    "tracker",
    "explorer.key_env",
    "explorer.url",
)
"""Keys of where a run lives and how it is shown. Not part of `config_digest`."""
_NOT_OF_SAMPLES = (
    *("checkpoint.interval", "checkpoint.timeout_s", "checkpoint.stop_s", "checkpoint.save_on_sigterm", "retention"),
    *("samples.journal_mb", "samples.record_interval", "samples.record_groups"),
)
EARLIER_LOCATIONS = LOCATIONS[:-1]
"""The same for the digests of earlier releases."""


def config_digest(cfg: DictConfig, *, places: Sequence[str] = LOCATIONS, lists: bool = True) -> str:
    """Return the digest of a configuration's content, independent of where it runs: xxh3_128 hex of canonical JSON.

    The configuration is resolved. `LOCATIONS` are left out, and our own classes, since they follow from the options.
    Local paths of `NAMED_BY_PATH` count by their last component, also those in lists (`lists`). Canonical JSON is UTF-8
    with sorted keys and no blanks.
    """

    def last_name(path: str) -> str:
        return Path(path).resolve().name if os.path.exists(path) else path  # noqa: PTH110 - where it may not be reached

    values = _plain_values(plain(cfg))
    _drop_places(values, places)
    for key in NAMED_BY_PATH:
        *parents, last = key.split(".")
        owner = section(values, *parents)
        if last in owner and (lists or isinstance(owner[last], str)):
            owner[last] = each_path(owner[last], last_name)
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def without_masked(values: Settings, shown: Settings | None = None) -> Settings:
    """Return settings without secrets. `shown`: the same settings, masked."""
    shown = masked(values) if shown is None else shown
    return {
        key: without_masked(value, section(shown, key)) if isinstance(value, dict) else value
        for key, value in values.items()
        if isinstance(value, dict) or value == shown[key]
    }


def is_place(key: str) -> bool:
    """Return whether a key is one of `LOCATIONS` or below one."""
    return any(key == place or key.startswith(f"{place}.") for place in LOCATIONS)


def _drop_places(values: Settings, places: Sequence[str] = LOCATIONS) -> None:
    for key in places:
        *parents, last = key.split(".")
        section(values, *parents).pop(last, None)


def _plain_values(cfg: Mapping[str, Value]) -> Settings:
    """Return a configuration's values without our own class names."""
    values = {key: _without_own_targets(value) for key, value in cfg.items()}
    saving = section(values, "checkpoint")
    for name in ("coordinator", "monitor"):
        if saving.get(name) == {}:
            del saving[name]
    training = section(values, "trainer")
    if training.get("total_epochs", 0) is None:  # as in each run that has started
        del training["total_epochs"]
    syncing = section(values, "sync")
    if syncing.get("encoding") in (None, "full"):
        syncing.pop("delta", None)
    return values


def _without_own_targets(value: Value) -> Value:
    if not isinstance(value, dict):
        return value
    return {
        key: _without_own_targets(inner)
        for key, inner in value.items()
        if not (key == TARGET and isinstance(inner, str) and inner in own_targets())
    }


class Difference(NamedTuple):
    """A key with two values; `ABSENT` stands for a missing key."""

    key: str
    old: object
    new: object


def config_diff(old: DictConfig, new: DictConfig) -> list[Difference]:
    """Return the keys with different resolved values, sorted by key; our own class names are ignored. Unresolvable
    values, such as a missing environment variable, count as written.
    """
    before, after = (dict(_plain_leaves(_plain_values(resolved(cfg)), "")) for cfg in (old, new))
    keys = sorted(before.keys() | after.keys())
    pairs = (Difference(key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys)
    return [pair for pair in pairs if pair.old != pair.new]


def _plain_leaves(value: object, prefix: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and (value or not prefix):
        for name, child in value.items():
            yield from _plain_leaves(child, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, value


@dataclass(frozen=True)
class RunConfig:
    """A composed configuration as the launcher and the command line handle it. Changes give a copy."""

    composed: DictConfig  # by Hydra; for the launcher checked, with all paths as the run uses them

    @cached_property
    def settings(self) -> Config:
        """The typed settings."""
        return typed(self.composed)

    @cached_property
    def digest(self) -> str:
        """See `config_digest`."""
        return config_digest(self.composed)

    @cached_property
    def samples_digest(self) -> str:
        """Digest of the settings on which samples may depend."""
        return config_digest(self.composed, places=(*LOCATIONS, *_NOT_OF_SAMPLES))

    def check(self, tasks: MutableMapping[str, object] | None = None) -> None:
        """Check everything that can be checked before a run, and hide its secrets in all output. See `config.check` and
        `config.check_inputs`. `tasks`: built before, by their settings; a task is built once.
        """
        self.check_values()
        hide(plain(self.composed))
        text, tasks = OmegaConf.to_yaml(self.composed.task, resolve=True), {} if tasks is None else tasks
        tasks[text] = check_inputs(self.composed, tasks.get(text))

    def check_values(self) -> None:
        """See `config.check`."""
        check(self.composed)

    def rate_text(self) -> str | None:
        """Return the learning rate of a model that was given, for display, and why it is that; None: the run makes the
        model.
        """
        if (kind := rate_kind(plain(self.composed))) == "new":
            return None
        default = self.updated({"trainer.lr": own_options("trainer")["default"]["lr"]})
        rate, named = self.select("trainer.lr"), {"lora": "LoRA", "grpo": "GRPO", "sft": "SFT"}.get(kind, kind)
        why = f" ({named} on a model of yours; trainer.lr=... changes it)"
        return f"rate {rate}{why if rate == default.select('trainer.lr') else ''}"

    def written(self) -> Settings:
        """Return the values with references as they are written."""
        return cast("Settings", as_written(self.composed))

    def shown(self) -> Settings:
        """Return the values for display, see `shown_values`."""
        return shown_values(self.composed)

    def select(self, key: str) -> object:
        """Return the value of a dotted key, None if there is no such key. A `Get` for checks."""
        return OmegaConf.select(self.composed, key)

    def has(self, key: str) -> bool:
        """Return whether the configuration has a dotted key, also one without a value."""
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(self.composed, parent) if parent else self.composed
        return isinstance(node, DictConfig) and name in node

    def anchored(self, folder: Path) -> RunConfig:
        """Return a copy with absolute paths, see `composition.anchored`."""
        return RunConfig(anchored(self.composed, folder))

    def updated(self, values: Mapping[str, object]) -> RunConfig:
        """Return a copy with other values of dotted keys."""
        copied = copy.deepcopy(self.composed)
        OmegaConf.set_readonly(copied, False)
        for key, value in values.items():
            OmegaConf.update(copied, key, value)
        return RunConfig(copied)

    def without_places(self) -> RunConfig:
        """Return a copy without `LOCATIONS`, resolved as far as possible."""
        values = resolved(self.composed)
        _drop_places(values)
        return RunConfig.of(values)

    def bundled(self) -> RunConfig:
        """Return a copy for another machine: like `shown`, but without secrets and `LOCATIONS`."""
        values = with_references(self.composed)
        _drop_places(values)
        return RunConfig.of(without_masked(values))

    @classmethod
    def of(cls, values: Mapping[str, object]) -> RunConfig:
        """Make it from plain values, which may hold references."""
        return cls(OmegaConf.create(dict(values)))

    def resolved(self) -> RunConfig:
        """Return a copy without references. Raises OmegaConfBaseException if one cannot be resolved."""
        copied = copy.deepcopy(self.composed)
        OmegaConf.resolve(copied)
        return RunConfig(copied)

    def has_digest(self, digest: str) -> bool:
        """Return whether this or an earlier release gives the configuration a digest."""
        ways = itertools.product((LOCATIONS, EARLIER_LOCATIONS), (True, False))  # lists were those of users' classes
        return any(config_digest(self.composed, places=places, lists=lists) == digest for places, lists in ways)

    def diff(self, new: RunConfig) -> list[Difference]:
        """See `config_diff`."""
        return config_diff(self.composed, new.composed)

    def shown_diff(self, new: RunConfig) -> list[Difference]:
        """Return `diff` with values for display, see `shown`."""
        before, after = (dict(_plain_leaves(_plain_values(cfg.shown()), "")) for cfg in (self, new))
        keys = (key for key, _, _ in self.diff(new))
        return [Difference(key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys]
