"""Explains errors in one paragraph (what is wrong, which key or file, what to do), and turns a typed command line into
one for Hydra. `launch.app` and the command line use it.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_sync.config.composition import conf_dir
from trinity_sync.config.overrides import as_typed, parse, quote
from trinity_sync.config.schema import SCHEMA
from trinity_sync.errors import ConfigError, TrinityError


def print_error(text: str) -> None:
    """Print an error as one paragraph on stderr; with HYDRA_FULL_ERROR=1 the traceback comes first."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1" and sys.exc_info()[0] is not None:
        traceback.print_exc()
    print(f"error: {text}", file=sys.stderr, flush=True)


_OF_LAUNCHERS = {
    "hydra/launcher/joblib": "joblib",
    "hydra/launcher/submitit_local": "submitit",
    "hydra/launcher/submitit_slurm": "submitit",
    "hydra/sweeper/optuna": "Optuna",
}
"""Options that need the extra `launchers`, with the product of each."""
_KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def explain(error: Exception) -> str:
    """Say in one paragraph why Hydra could not compose a configuration: file, key, and what to do."""
    if isinstance(error, TrinityError):
        return str(error)
    cause = error.__cause__
    text = f"{error}\n{cause}" if isinstance(cause, OmegaConfBaseException) else str(error)
    file = re.match(r"In '([^']+)'", text)
    where = f"{file[1]}.yaml: " if file and file[1] not in ("config", "trinity_sync") else ""
    named = re.search(r"full_key: (\S+)", text)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return where + _explain_missing_option(error)
    if isinstance(error, OverrideParseException):
        told = " ".join(line for line in text.splitlines()[:2] if not line.startswith("See http"))
        told = told if error.override in told else f"Error parsing override '{error.override}' {told}"
        return f"{told}; write key=value, and quote a value with special characters: key='a,b'"
    if file and re.fullmatch(r"Key 'experiment' not in 'Config'", text.splitlines()[1].strip()):
        return f"{file[1]}.yaml: its first line has to be '# @package _global_'; else all is put below experiment"
    if named and re.search(r"Key '[^']*' (?:is )?not in", text):
        return where + _explain_unknown_key(named[1], text, cause)
    if named and "is not Optional" in text:
        return f"{where}{named[1]} is null; it needs a value"
    if named and (
        wrong := re.search(r"Value '(.*)' (?:of type '.*' could not be converted to|is not a valid) (\w+)", text)
    ):
        return f"{where}{named[1]} is {wrong[1] or 'empty'}; must be {_KINDS.get(wrong[2], wrong[2])}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; choose a folder that can be written, hydra.run.dir=..."
    if isinstance(error, AssertionError) and (below := _below_null(error)):
        return f"{below[0]} cannot be set: {below[1]} is null; give all of it, {below[1]}={{...}}, or leave it out"
    lines = [line.strip() for line in text.split("Config search path:")[0].splitlines()]
    told = " ".join(line for line in lines if line and not line.startswith(("reference_type=", "object_type=")))
    if "Config group override must be" in told:
        return _explain_null_group(error)
    return told if isinstance(error, HydraException | OmegaConfBaseException) else f"{told} ({type(error).__name__})"


def _below_null(error: AssertionError) -> tuple[str, str] | None:
    """Return the key that was to be set and its null parent. OmegaConf has no error for this."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is OmegaConf.update.__code__:
            key, cfg = frame.f_locals["key"], frame.f_locals["cfg"]
            above = [key[: dot.start()] for dot in re.finditer(r"\.", key)]
            return next(((key, parent) for parent in above if OmegaConf.select(cfg, parent) is None), None)
    return None


def _explain_null_group(error: Exception) -> str:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        override = frame.f_locals.get("override")
        if isinstance(override, Override):
            group = override.get_key_element()
            none = "; for none: tracker=[]" if group == "tracker" else ""
            return f"{group} cannot be null; it has {', '.join(_options(group))}{none}"
    return "a group cannot be null; choose one of its options, group=option"


def _options(group: str) -> list[str]:
    return sorted(found.stem for found in (conf_dir() / group).glob("*.yaml"))


def _explain_missing_option(error: MissingConfigException) -> str:
    if needed := _OF_LAUNCHERS.get(str(error.missing_cfg_file)):
        return f"{needed} is not installed; install it by: pip install 'trinity-sync[launchers]'"
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    known = list(error.options or [])
    if not group:
        return f"there is no configuration {option}.yaml in {conf_dir()}"
    if not known:
        known = _options(group)
    return f"{group}={option} is not an option; {group} has {', '.join(known)}{near(option, known)}"


def _explain_unknown_key(key: str, text: str, cause: BaseException | None) -> str:
    parent, _, last = key.rpartition(".")
    kind = re.search(r"object_type=(\w+)", text)
    schema = next((node for node in SCHEMA.values() if kind and node.__name__ == kind[1]), None)
    node = getattr(cause, "parent_node", None)
    known = [str(name) for name in node] if isinstance(node, DictConfig) else []
    if schema:  # a user's option may have more keys
        known = [name for name in dict.fromkeys([*(f.name for f in fields(schema)), *known]) if name != "_target_"]
        known += [] if parent else ["experiment"]
    told = f"{key} is not a setting"
    if known:
        told += f"; {parent or 'the configuration'} has {', '.join(known)}{near(last, known)}"
    return told + ("" if schema else f"; to add a key of your own, write +{key}=...")


def near(word: str, known: Sequence[str]) -> str:
    """Return " (did you mean ...?)" for the nearest of some words; empty if none is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


# -- the command line as typed, made into one for Hydra


DRY_RUN = "--dry-run"
_PATH, _DIR = ("--config-path", "-cp"), ("--config-dir", "-cd")
_GRAMMAR = "'\"\\[]{}()$"
"""Values with these characters use Hydra's grammar."""


class CommandLine(NamedTuple):
    """A parsed command line."""

    arguments: list[str]  # for Hydra, without the program
    dry_run: bool  # only check whether the run could start

    @classmethod
    def read(cls, given: Sequence[str]) -> CommandLine:
        """Parse a command line. Raises ConfigError if there are two folders of option files."""
        arguments = [text for text in given if text != DRY_RUN]
        return cls(list(map(plain_override, _with_own_options(arguments))), len(arguments) < len(given))


def plain_override(text: str) -> str:
    """Quote the value of an override if it is text that looks like a number (see `as_typed`), or if Hydra's grammar
    cannot parse it: a path from the home folder (``~/x``), which the shell does not expand after ``=``, and letters of
    any language. Other overrides and flags stay.
    """
    text = as_typed(text)
    key, found, value = text.partition("=")
    if text.startswith("-") or not found or not value or any(sign in value for sign in _GRAMMAR) or _parses(text):
        return text
    quoted = f"{key}={','.join(_plain_value(part) for part in value.split(','))}"
    return quoted if _parses(quoted) else text


def _plain_value(value: str) -> str:
    if value == "~" or value.startswith("~/"):
        return quote(str(Path(value).expanduser()))
    return value if _parses(f"key={value}") else quote(value)


def _parses(override: str) -> bool:
    try:
        parse(override)
    except HydraException:
        return False
    return True


def _with_own_options(arguments: Sequence[str]) -> Iterator[str]:
    """Turn ``--config-path`` into ``--config-dir``: with the former Hydra would not find our option files."""
    names = [text.partition("=")[0] for text in arguments]
    if len([name for name in names if name in (*_PATH, *_DIR)]) > 1:
        raise ConfigError(
            "--config-path and --config-dir are the same here, and can be given once; for more folders "
            "give hydra.searchpath=[file:///...,file:///...]"
        )
    for text, name in zip(arguments, names, strict=True):
        yield f"{_DIR[0]}{text.removeprefix(name)}" if name in _PATH else text
