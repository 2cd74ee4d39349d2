"""Explains errors in one paragraph (what is wrong, which key or file, what to do), and turns a typed command line into
one for Hydra. `launch.app` and the command line use it.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_sync.config.composition import conf_dir
from trinity_sync.config.description import described, meant
from trinity_sync.config.overrides import as_typed, parse, quote
from trinity_sync.config.schema import SCHEMA
from trinity_sync.errors import ConfigError, TrinityError, near


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
    lines = [line.strip() for line in text.split("Config search path:")[0].splitlines()] or [""]
    file = re.match(r"In '([^']+)'", text)
    where = f"{file[1]}.yaml: " if file and file[1] not in ("config", "trinity_sync") else ""
    named = re.search(r"full_key: (\S+)", text)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return where + _explain_missing_option(error)
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error)
    if several := re.match(
        r"(?:Ambiguous value for argument|Sweep parameters) '(.*)'(?: requires --multirun)?$", lines[0]
    ):
        return _explain_several(several[1])
    if file and re.fullmatch(r"Key 'experiment' not in 'Config'", lines[1]):
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
    told = " ".join(line for line in lines if line and not line.startswith(("reference_type=", "object_type=")))
    if "Config group override must be" in told:
        return _explain_not_an_option(error)
    return told if isinstance(error, HydraException | OmegaConfBaseException) else f"{told} ({type(error).__name__})"


def _below_null(error: AssertionError) -> tuple[str, str] | None:
    """Return the key that was to be set and its null parent. OmegaConf has no error for this."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is OmegaConf.update.__code__:
            key, cfg = frame.f_locals["key"], frame.f_locals["cfg"]
            above = [key[: dot.start()] for dot in re.finditer(r"\.", key)]
            return next(((key, parent) for parent in above if OmegaConf.select(cfg, parent) is None), None)
    return None


def _explain_syntax(error: OverrideParseException) -> str:
    text, cause = error.override, error.__context__ or error
    key, found, value = (part.strip() for part in text.partition("="))
    column = _local(cause, "column")  # of the parser's own error
    if not found:
        return f"{text} has no value; write key=value or group=option, without blanks around '='"
    if not isinstance(column, int):
        return f"{text} cannot be read: {' '.join(str(cause).split())}"
    place = f"from {text[column:]!r} on" if column < len(text) else "as its end is missing"
    quoted = f"{key}={quote(value.strip(_QUOTES))}"
    right = next(filter(_parses, (f"{key}={value}", quoted)), "key=value")
    remedy = "quote the value, for the shell too" if right == quoted else "write"
    in_shell = shlex.quote(right) if re.search(r'["$`!\\]', right) else f'"{right}"'
    return f"{text} cannot be read {place}; {remedy}: {in_shell}"


def _explain_several(override: str) -> str:
    key, _, value = override.partition("=")
    told = f"{override} has several values; add -m to run a sweep: -m {override}"
    if "(" in value or _takes_one(key):
        return told
    return f"{told}; or write a list as {key}=[{value}], and a text with commas in quotes, \"{key}='{value}'\""


def _explain_not_an_option(error: Exception) -> str:
    override = _local(error, "override")
    assert isinstance(override, Override)
    group, value = override.get_key_element(), override.value()
    told = f"{group} cannot be null" if value is None else f"{override.input_line} is not an option"
    return f"{told}; it has {', '.join(_options(group))}{'; for none: tracker=[]' if group == 'tracker' else ''}"


def _local(error: BaseException, name: str) -> object:
    """Return a variable of the innermost function with that name that an error went through."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((names[name] for names in reversed(frames) if name in names), None)


def _takes_one(group: str) -> bool:
    """Return whether a key is a group of which one option is chosen."""
    return group.startswith("hydra/") or (group not in _OF_SEVERAL and bool(_options(group)))


def _options(group: str) -> list[str]:
    return sorted(found.stem for found in (conf_dir() / group).glob("*.yaml"))


def _explain_missing_option(error: MissingConfigException) -> str:
    if needed := _OF_LAUNCHERS.get(str(error.missing_cfg_file)):
        return f"{needed} is not installed; install it by: pip install 'trinity-sync[launchers]'"
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    known = list(error.options or [])
    if not group:
        return f"there is no configuration {option}.yaml in {conf_dir()}"
    if group.startswith("model/"):  # a hub id
        group, option, known = (
            "model",
            f"{group.removeprefix('model/')}/{option}",
            [*known, f"path model.path={option}"],
        )
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
    typed = re.search(r"Could not override '([^']+)'", text)
    if not difflib.get_close_matches(last, known, n=1, cutoff=0.85) and (
        told := _explain_by_others(typed[1] if typed else key)
    ):
        return told
    told = f"{key} is not a setting"
    if known:
        told += f"; {parent or 'the configuration'} has {', '.join(known)}{near(last, known)}"
    return told + ("" if schema else f"; to add a key of your own, write +{key}=...")


def _explain_by_others(key: str) -> str:
    """Say which settings and options an unknown key may mean; empty if there are none."""
    group, _, last = key.partition(".")
    if options := [one.option for one in described() if one.key == key]:
        return f"{key} is not a setting here; it needs {' or '.join(options)}"
    found = [f"{group}={last}"] if last in _options(group) else meant(key)
    return f"{key} is not a setting; did you mean {' or '.join(found[:3])}?" if found else ""


# -- the command line as typed, made into one for Hydra


DRY_RUN, SUPERVISE = "--dry-run", "--supervise"
_PATH, _DIR = ("--config-path", "-cp"), ("--config-dir", "-cd")
_GROUPS_OF_HYDRA = ("hydra.launcher", "hydra.sweeper", "hydra.job_logging", "hydra.hydra_logging", "hydra.help")
_OF_SEVERAL = ("experiment", "retention", "tracker")
"""Groups of which several options may be chosen together."""
_QUOTES = "'\""
_GRAMMAR = "'\"\\[]{}()$"
"""Values with these characters use Hydra's grammar."""


class CommandLine(NamedTuple):
    """A parsed command line."""

    arguments: list[str]  # for Hydra, without the program
    dry_run: bool = False  # only check whether the run could start
    supervised: bool = False  # start the run again where its driver dies

    @classmethod
    def read(cls, given: Sequence[str], *, typed: bool = False) -> CommandLine:
        """Parse a command line. Raises ConfigError if there are two folders of option files; of one that the user has
        just typed, also if an argument has no effect or another one than it seems.
        """
        arguments = [text for text in given if text not in (DRY_RUN, SUPERVISE)]
        line = list(map(plain_override, _with_own_options(arguments)))
        if typed:
            known, rest = get_args_parser().parse_known_args(line)
            overrides = [*known.overrides, *rest]
            check_overrides(overrides)
            line = [*overrides, *(text for text in line if text not in overrides)]  # for `sync=nccl -m seed=0,1`
        return cls(line, DRY_RUN in given, SUPERVISE in given)


def check_overrides(typed: Iterable[str]) -> None:
    """Refuse what Hydra takes for something else: a setting with dashes, a list for a group of which one option is
    chosen, a group written as a key. Raises ConfigError, OverrideParseException.
    """
    for text in typed:
        if text.startswith("-"):
            key, _, value = text.lstrip("-").partition("=")
            key = key if _options(key) else (meant(key) or ["key"])[0]
            raise ConfigError(f"{text} is not an option (see --help); a setting has no dashes: {key}={value or '...'}")
        override = parse(text)
        key, given = override.key_or_group, override._value
        values = given.list if isinstance(given, ChoiceSweep) else [given]
        if _takes_one(key) and any(isinstance(one, list) for one in values):
            several = re.sub(r"[][ ]", "", text)
            raise ConfigError(f"{text}: {key} takes one option, not a list; several are a sweep: -m {several}")
        if key in _GROUPS_OF_HYDRA and any(isinstance(one, str | QuotedString) for one in values):
            right = text.replace(key, key.replace(".", "/"), 1)
            raise ConfigError(f"{text}: {key} is a group, which is written with a slash: {right}")


def plain_override(text: str) -> str:
    """Quote the value of an override if it is text that looks like a number (see `as_typed`), or if Hydra's grammar
    cannot parse it: a path from the home folder (``~/x``), which the shell does not expand after ``=``, and letters of
    any language. Other overrides and flags stay.
    """
    text = as_typed(text)
    key, found, value = text.partition("=")
    opened, inner, closed = ("[", value[1:-1], "]") if value[:1] + value[-1:] == "[]" else ("", value, "")
    if text.startswith("-") or not found or not value or any(sign in inner for sign in _GRAMMAR) or _parses(text):
        return text
    quoted = f"{key}={opened}{','.join(_plain_value(part.strip()) for part in inner.split(','))}{closed}"
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
