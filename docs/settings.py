"""The page of all settings: key, type, default and meaning of each, as `trinity-sync explain` has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml

from trinity_sync import config
from trinity_sync.config.description import SettingDescription, described, group_comments

PAGE = Path(__file__).with_name("settings.md")
LISTS = ("retention", "tracker")
"""Groups of which several options may be chosen."""
LAUNCHERS = ("hydra/launcher", "hydra/sweeper")
_HEAD = """# All settings

Every key of every option: its type and range, its default, and what it does. The page is written from the comments in
`conf/` by `make docs`; how settings are given, and what goes together, is told in [configuration](configuration.md).
`trinity-sync explain KEY` prints the same on a terminal.

`null` is no value. A default that reads `???` has to be given.
"""


def page() -> str:
    """The whole page."""
    root = [setting for setting in described() if not setting.option and not setting.key.startswith("hydra.")]
    parts = [_HEAD, "## The run\n", _table(root)]
    for group, usual in _groups():
        parts += [f"## {group}\n", _options(group, usual), *_keys(group)]
    parts += [
        "## Launchers and sweepers of Hydra\n",
        "For `-m`, with the extra `launchers`: see [sweeps](sweeps.md).\n",
    ]
    for group in LAUNCHERS:
        parts += [_options(group, ()), *_keys(group)]
    return "\n".join(parts)


def _groups() -> Iterator[tuple[str, Sequence[str]]]:
    """The groups in the order of the composition, each with what is chosen where nothing is said."""
    for entry in yaml.safe_load((config.conf_dir() / "trinity_sync.yaml").read_text())["defaults"]:
        for group, chosen in entry.items() if isinstance(entry, dict) else ():
            if not group.startswith(("override", "experiment")):
                yield group, chosen if isinstance(chosen, list) else [chosen]


def _options(group: str, usual: Sequence[str]) -> str:
    lines = ["| option | |", "|---|---|"]
    for name, about in group_comments(group).items():
        value = f"[{name}]" if group in LISTS else name
        lines.append(f"| `{group}={value}`{' (default)' if name in usual else ''} | {_cell(about)} |")
    return "\n".join(lines) + "\n"


def _keys(group: str) -> Iterator[str]:
    """A table for each file, those first from which several options take keys."""
    settings: dict[Path, dict[str, SettingDescription]] = {}
    users: dict[Path, dict[str, None]] = {}
    for setting in described():
        of_group, _, name = setting.option.partition("=")
        if of_group == group:
            settings.setdefault(setting.file, {})[setting.key] = setting
            users.setdefault(setting.file, {})[name] = None
    options = group_comments(group)
    for file in sorted(settings, key=lambda file: (-len(users[file]), str(file))):
        if len(options) > 1:
            shared = "all options" if len(users[file]) == len(options) else ", ".join(users[file])
            own = file.parent == config.conf_dir() / group
            yield f"### {group}={file.stem}\n" if own else f"### {group}: {shared}\n"
        yield _table(settings[file].values())


def _table(settings: Iterable[SettingDescription]) -> str:
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for setting in settings:
        kind, default, comment = map(_cell, (setting.type, setting.default, setting.comment))
        lines.append(f"| `{setting.key}` | {kind} | `{default}` | {comment} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
