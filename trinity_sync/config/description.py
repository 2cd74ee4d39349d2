"""Describes every setting from its option file and the schema: comment, default and type. `trinity-sync explain`, shell
completion and the tests of the docs read it.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path

import yaml

from trinity_sync.config.composition import conf_dir
from trinity_sync.config.schema import LONGEST_S, SCHEMA

_HEADER = "# @package "
_NOT_OPTIONS = ("base", "experiment", "hydra/help", "hydra/job_logging")
_KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "mapping", list: "list"}
_BOUNDS = {"at_least": "at least", "more_than": "more than", "at_most": "at most"}
_UNASKED = "a an can change do does for from how i in is it me my of on set the to use what when where which with"


@dataclass(frozen=True, kw_only=True)
class SettingDescription:
    """A setting of one option."""

    key: str  # dotted
    comment: str  # its purpose, one line
    type: str  # of its value, in words; empty if no schema types it
    default: str  # YAML, one line; ``???`` if it is required
    file: Path  # of comment and default
    option: str  # the option with this setting, such as ``sync=nccl``; empty for settings outside groups


@cache
def described() -> tuple[SettingDescription, ...]:
    """Return all settings of our options, in the order of their files."""
    found: list[SettingDescription] = []
    for file in sorted(conf_dir().rglob("*.yaml")):
        group = file.relative_to(conf_dir()).parent.as_posix()
        if not group.startswith(_NOT_OPTIONS):
            found += _of_option(file, "" if group == "." else group)
    return tuple(found)


def group_comments(group: str) -> dict[str, str]:
    """Return the options of a group with the first comment line of each file; empty for an unknown group."""
    return {file.stem: _title(file) for file in sorted((conf_dir() / group).glob("*.yaml"))}


def meant(typed: str) -> list[str]:
    """Return the settings that an unknown key may mean, the likeliest first: by another program's name, by its last
    part, or by its words.
    """
    dotted = typed.replace("/", ".")
    named = [key for key, names in _other_names().items() if any(f".{dotted}".endswith(f".{name}") for name in names)]
    keys = sorted({one.key for one in described() if not one.key.startswith("hydra.launcher.")}, key=len)
    shared = {key: len({*key.split(".")} & {*dotted.split(".")}) for key in keys if _last(key) == _last(dotted)}
    near = [key for key, parts in shared.items() if parts == max(shared.values())]
    return [*dict.fromkeys([*named, *near])] or [key for key in answers(dotted) if key in keys]


def answers(question: str) -> list[str]:
    """Return the settings, commands and pages with the most words of a question, if more than half of them."""
    asked = _stems(question) - _stems(_UNASKED)
    texts = {
        answer: " ".join([answer, *(name for name in names if "_" not in name)])
        for answer, names in _other_names().items()
    }
    for one in described():
        texts[one.key] = f"{texts.get(one.key, one.key)} {one.comment}"
    hits = {answer: len(asked & _stems(text)) for answer, text in texts.items() if _last(answer) != "_target_"}
    return [answer for answer, hit in hits.items() if hit == max(hits.values()) and 2 * hit > len(asked)]


@cache
def _other_names() -> Mapping[str, list[str]]:
    lines = [line.partition(": ") for line in (conf_dir() / "other_names.txt").read_text().splitlines()]
    return {answer: names.split() for answer, _, names in lines if not answer.startswith("#")}


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _stems(text: str) -> set[str]:
    return {word.rstrip("s") for word in re.findall(r"[^\W_]+", text.lower())}


def _of_option(file: Path, group: str) -> Iterator[SettingDescription]:
    types_of: dict[str, type] = {}
    settings = list(_read(file, _package(file, group), types_of))
    option = f"{group}={file.stem}" if group else ""
    for key, comment, default, place in settings:
        kind = _kind(key, types_of)
        yield SettingDescription(key=key, comment=comment, type=kind, default=default, file=place, option=option)


def _read(file: Path, package: str, types_of: dict[str, type]) -> Iterator[tuple[str, str, str, Path]]:
    """Yield key, comment, default and file of each setting of an option file and of the base files in its defaults.
    Adds the schema of each key prefix to `types_of`.
    """
    text = file.read_text()
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    for listed in yaml.safe_load(text).get("defaults") or ():
        name, _, below = listed.partition("@") if isinstance(listed, str) else ("", "", "")
        inner = package if below == "_here_" else _joined(package, below)
        if name.startswith("/schema/") or name.startswith("schema/"):
            schema = SCHEMA.get(name.rpartition("/")[2])
            if schema is not None:
                types_of[inner] = schema
        elif name.startswith("/base/"):
            yield from _read(conf_dir() / f"{name.strip('/')}.yaml", inner, types_of)
    lines = text.splitlines()
    for key, node, line in _leaves(root, package):
        default = " ".join(text[node.start_mark.index : node.end_mark.index].split()) or "null"
        yield key, _comment(lines, line), default, file


def _leaves(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, yaml.Node, int]]:
    for name, value in node.value:
        key = _joined(prefix, name.value)
        if name.value == "defaults" and name.start_mark.column == 0:
            continue
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _leaves(value, key)
        else:
            yield key, value, name.start_mark.line


def _comment(lines: list[str], line: int) -> str:
    above: list[str] = []
    while line > 0 and (text := lines[line - 1].strip()).startswith("#"):
        above.append(text.lstrip("# "))
        line -= 1
    return " ".join(reversed(above))


def _title(file: Path) -> str:
    comments = (line for line in file.read_text().splitlines() if line.startswith("#"))
    return next((line.lstrip("# ") for line in comments if not line.startswith(_HEADER)), "")


def _package(file: Path, group: str) -> str:
    first = file.read_text().partition("\n")[0]
    named = first.removeprefix(_HEADER).strip() if first.startswith(_HEADER) else group.replace("/", ".")
    return "" if named == "_global_" else named


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


# -- types


def _kind(key: str, types_of: Mapping[str, type]) -> str:
    """Return the type of a setting in words, from the nearest schema above it."""
    above = [place for place in types_of if not place or key.startswith(f"{place}.")]
    if not above:
        return ""
    place = max(above, key=len)
    owner: object = types_of[place]
    field: Field[object] | None = None
    hint: object = None
    for name in key.removeprefix(place).lstrip(".").split("."):
        field = next((found for found in fields(owner) if found.name == name), None) if is_dataclass(owner) else None
        if field is None:
            return ""
        hint = owner = typing.get_type_hints(owner, include_extras=True)[name]
    return _words(hint, field.metadata if field else {})


def _words(hint: object, metadata: Mapping[str, object]) -> str:
    if typing.get_origin(hint) is typing.Annotated:
        return str(typing.get_args(hint)[1])
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(choices := metadata.get("choices"), tuple):
        told = " | ".join(map(str, choices))
    else:
        kinds = [typing.get_origin(part) or part for part in parts if part is not types.NoneType]
        told = " or ".join(_KINDS.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds)
        bounds = ((text, metadata.get(bound)) for bound, text in _BOUNDS.items())
        told += "".join(f", {text} {bound}" for text, bound in bounds if bound not in (None, LONGEST_S))
    return told + (", or null" if types.NoneType in parts else "")
