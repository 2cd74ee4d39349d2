"""The command `trinity-sync explain`: what a setting does, its type, its default, and the file that says so."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from trinity_sync.errors import ConfigError

if TYPE_CHECKING:
    from trinity_sync.config.described import Described


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the parser of `trinity-sync`."""
    explain = commands.add_parser("explain", help="what a setting does, its type and its default; or what a group has")
    explain.add_argument("key", metavar="KEY", help="a setting such as sync.interval, or a group such as sync")
    explain.set_defaults(command=_explain)


def _explain(options: argparse.Namespace) -> int:
    from trinity_sync.config.described import described, group_comments

    key = options.key.lstrip("+~").partition("=")[0].rstrip(".").replace("/", ".")
    settings = described()
    exact = [one for one in settings if one.key == key]
    below = list(dict.fromkeys(one.key for one in settings if one.key.startswith(f"{key}.")))
    if exact:
        print(_of_setting(key, exact))
    elif below:
        print(_of_group(key, group_comments(key), [one for one in settings if one.key in below]))
    else:
        raise ConfigError(_unknown(key, [one.key for one in settings]))
    return 0


def _of_setting(key: str, found: Sequence[Described]) -> str:
    lines = [key]
    for one in {(one.comment, one.default, one.file): one for one in found}.values():
        options = sorted(other.option for other in found if (other.file, other.default) == (one.file, one.default))
        with_options = f" (with {', '.join(options)})" if any(options) else ""
        lines += [f"  {one.comment}", f"  type     {one.type or 'any'}", f"  default  {one.default}"]
        lines += [f"  file     {one.file}{with_options}"]
    return "\n".join(lines)


def _of_group(key: str, options: dict[str, str], found: Iterable[Described]) -> str:
    lines = [key, *(f"  {key}={name:<20} {comment}" for name, comment in options.items())]
    comments = {one.key: one.comment for one in reversed(list(found))}
    width = max(map(len, comments))
    return "\n".join([*lines, *(f"  {name:<{width}}  {comments[name]}" for name in sorted(comments))])


def _unknown(key: str, known: Sequence[str]) -> str:
    last = key.rpartition(".")[2]
    groups = [name.partition(".")[0] for name in known]
    near = [name for name in known if name.rpartition(".")[2] == last]
    near += difflib.get_close_matches(key, [*known, *groups], n=3)
    by_last = {name.rpartition(".")[2]: name for name in known}
    near += [by_last[name] for name in difflib.get_close_matches(last, by_last, n=2)]
    names = list(dict.fromkeys(near))[:4]
    told = f"near to it: {', '.join(names)}" if names else "the groups are in `trinity-sync run --help`"
    return f"{key} is no setting; {told}"
