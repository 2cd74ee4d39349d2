"""The page of all settings, from the option files under `conf/`: key, type, default, and the comment above it."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from trinity_sync import config

PAGE = Path(__file__).with_name("settings.md")
CONF = config.conf_dir()
LISTS = ("retention", "tracker")
"""Groups of which several options may be chosen."""
LAUNCHERS = ("hydra/launcher", "hydra/sweeper")
LONGEST_S = 10**9
"""The bound of all times, which says nothing."""
_BOUNDS = {"at_least": "≥", "more_than": ">", "at_most": "≤"}
_HEAD = """# All settings

Every key of every option: its type and range, its default, and what it does. The page is written from the comments in
`conf/` by `make docs`; how settings are given, and what goes together, is told in [configuration](configuration.md).

`null` is no value. A default that reads `???` has to be given.
"""


@dataclass(frozen=True)
class Setting:
    """A key as its option file has it.

    Attributes:
        name: with dots, below the file's package.
        default: as it is written there.
        comment: the line above it.
    """

    name: str
    default: str
    comment: str


@dataclass(frozen=True)
class OptionFile:
    """A file of `conf/`.

    Attributes:
        package: where its keys belong; empty for the root.
        about: what it says of itself first.
        bases: files that it takes keys from, and where below its package those belong.
        schemas: what types the keys, by the place below its package.
    """

    path: Path
    package: str
    about: str
    bases: tuple[tuple[Path, str], ...]
    schemas: Mapping[str, type]
    settings: tuple[Setting, ...]


@functools.cache
def read(path: Path) -> OptionFile:
    """Read an option file. The package is that of its header, or else its folder."""
    text = path.read_text()
    lines = text.splitlines()
    header = re.match(r"# @package (\S+)\n", text)
    group = str(path.parent.relative_to(CONF)).replace("/", ".")
    package = header[1].replace("_global_", "") if header else group.removeprefix(".")
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    defaults = yaml.safe_load(text).get("defaults", [])
    taken = [re.fullmatch(r"/?(base|schema)/(\w+)@([\w.]+)", entry) for entry in defaults if isinstance(entry, str)]
    named = [(found[1], found[2], found[3].replace("_here_", "")) for found in taken if found]
    bases = tuple((CONF / kind / f"{name}.yaml", place) for kind, name, place in named if kind == "base")
    schemas = {place: config.SCHEMA[name] for kind, name, place in named if kind == "schema" and name in config.SCHEMA}
    about = [line.removeprefix("# ") for line in lines if re.match("# (?!@package)", line)]
    return OptionFile(path, package, about[0], bases, schemas, tuple(_settings(root, lines)))


def _settings(node: yaml.MappingNode, lines: list[str], above: str = "") -> Iterator[Setting]:
    for key, value in node.value:
        name = f"{above}{key.value}"
        if name == "defaults" or name == "hydra":
            continue
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _settings(value, lines, f"{name}.")
        else:
            default = lines[value.start_mark.line][value.start_mark.column :].partition("  #")[0].strip()
            yield Setting(name, default, lines[key.start_mark.line - 1].strip().removeprefix("# "))


def type_of(name: str, default: str, schemas: Mapping[str, type]) -> str:
    """What a key takes: its type and range in the schema; of one that no schema has, the type of its default."""
    words = name.split(".")
    for length in range(len(words) - 1, -1, -1):
        schema = schemas.get(".".join(words[:length]))
        if schema is not None:
            field = _field(schema, words[length:])
            return _kind(default) if field is None else _in_words(field)
    return _kind(default)


def _field(schema: type, words: list[str]) -> dataclasses.Field[object] | None:
    for word in words[:-1]:
        schema = typing.get_type_hints(schema).get(word, object)
    fields = dataclasses.fields(schema) if dataclasses.is_dataclass(schema) else ()
    return next((field for field in fields if field.name == words[-1]), None)


def _in_words(field: dataclasses.Field[object]) -> str:
    annotation = str(field.type).removeprefix("<class '").removesuffix("'>")
    kind = "choice" if "choices" in field.metadata else annotation.partition("[")[0].removesuffix(" | None").lower()
    ranges = [f"{sign} {field.metadata[key]}" for key, sign in _BOUNDS.items() if key in field.metadata]
    ranges = [text for text in ranges if text != f"≤ {LONGEST_S}"]
    return " ".join([kind, ", ".join(ranges)]).strip() + " or null" * annotation.endswith("| None")


def _kind(default: str) -> str:
    value = yaml.safe_load(default)
    return "any" if value is None else type(value).__name__


def page() -> str:
    """The whole page."""
    chosen = {
        key: value
        for entry in yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
        if isinstance(entry, dict)
        for key, value in entry.items()
    }
    groups = [key for key in chosen if not key.startswith(("override", "experiment"))]
    root = read(CONF / "config.yaml")
    parts = [_HEAD, "## The run\n", _table(root.settings, "", root.schemas)]
    for group in groups:
        parts += _group(group, chosen[group])
    parts += [
        "## Launchers and sweepers of Hydra\n",
        "For `-m`; see [sweeps](sweeps.md). They need the extra `launchers`.\n",
    ]
    for group in LAUNCHERS:
        for path in sorted((CONF / group).glob("*.yaml")):
            file = read(path)
            parts += [f"### {group}={path.stem}\n", f"{file.about}\n"]
            parts.append(_table(file.settings, file.package, {}))
    return "\n".join(parts)


def _group(group: str, chosen: object) -> Iterator[str]:
    files = [read(path) for path in sorted((CONF / group).glob("*.yaml"))]
    yield f"## {group}\n"
    usual = chosen if isinstance(chosen, list) else [chosen]
    rows = [
        (
            f"`{group}={'[' * listed}{file.path.stem}{']' * listed}`" + " (default)" * (file.path.stem in usual),
            file.about,
        )
        for file in files
        for listed in [group in LISTS]
    ]
    yield "| option | |\n|---|---|\n" + "".join(f"| {name} | {_cell(about)} |\n" for name, about in rows)
    users: dict[tuple[Path, str], list[OptionFile]] = {}
    for file in files:
        for base in _bases(file):
            users.setdefault(base, []).append(file)
    for (base, within), using in users.items():
        names = "all options" if len(using) == len(files) else ", ".join(file.path.stem for file in using)
        if len(files) > 1:
            yield f"### {group}: {names}\n" if not within else f"### {group}.{within}: {names}\n"
        yield _table(read(base).settings, _join(using[0].package, within), _schemas(using[0]))
    for file in files:
        if file.settings:
            if len(files) > 1:
                yield f"### {group}={file.path.stem}\n"
            yield _table(file.settings, file.package, _schemas(file))


def _bases(file: OptionFile) -> Iterator[tuple[Path, str]]:
    """Those of its bases first."""
    for path, within in file.bases:
        yield from _bases(read(path))
        yield path, within


def _schemas(file: OptionFile) -> dict[str, type]:
    """By the place in the whole configuration; those of the file itself say more than those of its bases."""
    found: dict[str, type] = {}
    for path, within in file.bases:
        below = _schemas(read(path))
        base = read(path).package
        found |= {
            _join(file.package, within, place.removeprefix(base).strip(".")): kind for place, kind in below.items()
        }
    return found | {_join(file.package, place): kind for place, kind in file.schemas.items()}


def _join(*places: str) -> str:
    return ".".join(filter(None, places))


def _table(settings: tuple[Setting, ...], package: str, schemas: Mapping[str, type]) -> str:
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for setting in settings:
        name = _join(package, setting.name)
        kind = type_of(name, setting.default, schemas)
        lines.append(f"| `{name}` | {_cell(kind)} | `{_cell(setting.default)}` | {_cell(setting.comment)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
