"""The command line of a run as people type it, made into one that Hydra takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hydra.errors import HydraException

from trinity_sync.config.overrides import as_typed, parse, quote
from trinity_sync.errors import ConfigError

DRY_RUN = "--dry-run"
_PATH, _DIR = ("--config-path", "-cp"), ("--config-dir", "-cd")
_GRAMMAR = "'\"\\[]{}()$"
"""A value with one of these says something to Hydra by it."""


class CommandLine(NamedTuple):
    """What a command line asks for.

    Attributes:
        arguments: for Hydra, without the program.
        dry_run: only look whether the run could begin.
    """

    arguments: list[str]
    dry_run: bool

    @classmethod
    def read(cls, given: Sequence[str]) -> CommandLine:
        """Take apart what the user gave.

        Raises:
            ConfigError: there are two folders of option files.
        """
        arguments = [text for text in given if text != DRY_RUN]
        return cls(list(map(plain_override, _with_own_options(arguments))), len(arguments) < len(given))


def plain_override(text: str) -> str:
    """An override with its value quoted where it is text that looks like a number (see `as_typed`), or where Hydra's
    grammar has no word for it: a path from one's home (``~/x``), which a shell does not fill in behind ``=``, and
    letters of any language. All others as they are, and flags, too.
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
    """``--config-path`` would have Hydra look there in place of our option files, without which nothing can be
    composed: it is taken for ``--config-dir``, which has it look there first.
    """
    names = [text.partition("=")[0] for text in arguments]
    if len([name for name in names if name in (*_PATH, *_DIR)]) > 1:
        raise ConfigError(
            "--config-path and --config-dir are the same here, and can be given once; for more folders "
            "give hydra.searchpath=[file:///...,file:///...]"
        )
    for text, name in zip(arguments, names, strict=True):
        yield f"{_DIR[0]}{text.removeprefix(name)}" if name in _PATH else text
