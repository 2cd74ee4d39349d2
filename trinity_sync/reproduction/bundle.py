"""The bundle of a run: one JSON file with its settings, its outcome, its environment and pip constraints, and a digest.

Folders, addresses, options of mirrors and trackers (they may hold secrets) and the command line stay out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import xxhash

from trinity_sync.errors import ConfigError
from trinity_sync.reproduction.outcome import Number, Outcome
from trinity_sync.tracking.json_lines import plain, write_json
from trinity_sync.tracking.run_record import RunJson, check_shape

FORMAT = 1
_KEYS = {"bundle", "run", "config_name", "overrides", "config", "digests", "metrics", "constraints", "self"}
_OF_RUN = ("seed", "git", "packages", "threads", "hardware", "config_digest", "reproducible", "status")
_NOT_A_DISTRIBUTION = ("python", "trinity-sync")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A run for another machine."""

    record: RunJson  # the environment, from its run.json
    config_name: str  # the primary config
    overrides: tuple[str, ...]  # of the command line, as text
    config: Mapping[str, object]  # all settings, resolved
    outcome: Outcome  # digests and metrics

    def write(self, path: Path) -> None:
        """Write the file; raises RunError if the disk refuses."""
        packages = self.record.get("packages") or {}
        content = {
            "bundle": FORMAT,
            "run": {key: value for key, value in self.record.items() if key in _OF_RUN},
            "config_name": self.config_name,
            "overrides": list(self.overrides),
            "config": self.config,
            "digests": {str(step): digest for step, digest in self.outcome.digests.items()},
            "metrics": {str(step): values for step, values in self.outcome.metrics.items()},
            "constraints": [
                f"{name}=={version}" for name, version in packages.items() if name not in _NOT_A_DISTRIBUTION
            ],
        }
        text = {name: plain(value) for name, value in content.items()}
        write_json(path, {**text, "self": _digest(text)})


def read_bundle(path: Path) -> Bundle:
    """Read a file of `Bundle.write`."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a bundle of a run: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("bundle"), int):
        raise ConfigError(f"{path} is not a bundle of a run; write one with `trinity-sync reproduce --bundle RUN_DIR`")
    if content["bundle"] > FORMAT:
        raise ConfigError(
            f"{path} has format {content['bundle']}, written by a newer version; this one reads up to {FORMAT}"
        )
    expected = content.pop("self", None)
    if content.keys() != _KEYS - {"self"} or expected != _digest(content):
        raise ConfigError(f"{path} was changed after it was written: its digest differs; get a new copy")
    try:
        check_shape(_mapping(content["run"]), path)
        return Bundle(
            record=cast(RunJson, _mapping(content["run"])),
            config_name=str(content["config_name"]),
            overrides=tuple(map(str, content["overrides"])),
            config=_mapping(content["config"]),
            outcome=Outcome(
                digests={_step(step): str(digest) for step, digest in _mapping(content["digests"]).items()},
                metrics={_step(step): _numbers(values) for step, values in _mapping(content["metrics"]).items()},
            ),
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as a bundle of a run: {error}") from error


def _digest(content: Mapping[str, object]) -> str:
    """xxh3_128 hex of canonical JSON: UTF-8, sorted keys, no blanks."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.60} is not a mapping")
    return value


def _step(text: str) -> int:
    step = int(text)
    if not 0 <= step < 2**53:
        raise ValueError(f"{text:.60} is not a step")
    return step


def _numbers(value: object) -> dict[str, Number]:
    values: dict[str, Number] = {}
    for name, number in _mapping(value).items():
        if not isinstance(number, int | float | None):
            raise TypeError(f"{name} is {number!r:.60}, not a number")
        values[name] = number
    return values
