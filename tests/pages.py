"""The pages of the documentation: their blocks, the commands in those, and what is shown of what they print. Shared by
the tests of the documentation.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from trinity_sync import config

ROOT = config.conf_dir().parent
OWN_MODEL = ROOT / "docs" / "own-model.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED_COMMAND = re.compile(r"^# {3}((?:python|trinity-sync) .*)$", re.MULTILINE)
# words that begin with a number, with their units, digests, the marks of a table and its ruler
_VARYING = r"(?:\b[0-9a-f]{32}\b|(?<!\S)[*=(]?\d\S*(?: (?:us|ms|s|min|h|d|kB|MB|GB)\b)?|-{2,})"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, empty where it names none, what it holds, and where it is in the page's text."""

    language: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Command:
    """A command as it is written, on one line and with its comment.

    Attributes:
        page: where it stands.
        output: what the page shows of what its block prints, ``...`` for what it leaves out. Empty: nothing is shown.
    """

    page: str
    text: str
    output: str = ""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def refused(self) -> bool:
        """Whether it is an example of a mistake."""
        return self.output.startswith("error: ")

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def blocks(page: Path) -> list[Block]:
    return [Block(found[1], found[2], found.start(), found.end()) for found in _FENCE.finditer(page.read_text())]


def sessions(page: Path) -> list[list[Command]]:
    """The commands of a page, block by block, in the order in which they stand there."""
    text = page.read_text()
    nothing = Block("", "", len(text), len(text))
    found = []
    for block, after in pairwise([*blocks(page), nothing]):
        if block.language != "bash":
            continue
        shown = after.text if not after.language and not text[block.end : after.start].strip() else ""
        lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]
        found.append([Command(page.name, line, shown) for line in lines if not line.startswith("#")])
    return found


def commands(page: Path) -> list[Command]:
    return [command for session in sessions(page) for command in session]


def saved_commands() -> Iterator[Command]:
    """The commands in the first lines of the saved experiments."""
    for path in sorted(config.conf_dir().glob("experiment/*.yaml")):
        for text in _SAVED_COMMAND.findall(path.read_text()):
            # what is said of a command stands behind it, two blanks or more away
            yield Command(path.name, re.split(r" {2,}", text)[0])


def missing(shown: str, output: str) -> str | None:
    """The first part of what a page shows that an output lacks, numbers and the layout of lines aside; None: it has all
    of them, in their order.
    """
    rest = _plain(output)
    for part in filter(None, map(_plain, shown.split("..."))):
        before, found, rest = rest.partition(part)
        if not found:
            return f"{part}\nis not in\n{before}"
    return None


def _plain(text: str) -> str:
    return " ".join(re.sub(rf"(?:{_VARYING}\s*)+", "# ", text).split())


def settings_named(page: Path) -> set[str]:
    """Keys of the configuration that a page names in code, such as ``trainer.steps``."""
    named = rf"(?<![\w./-])(?:{'|'.join(_groups())})\.[a-z_]+(?:\.[a-z_]+)*(?![\w/(*])"
    text = _FENCE.sub("", page.read_text())
    return {key for code in re.findall(r"`([^`\n]+)`", text) for key in re.findall(named, code)}


_WITHIN = dict.fromkeys(("validation", "loss_validation", "validation_times"), "task.validation")
"""Where the keys of a file of `conf/base` stand that are of no group alone."""


def settings() -> set[str]:
    """Every key of every option; those of a mapping in it, too."""
    found = set()
    for path in config.conf_dir().glob("*/*.yaml"):
        group = path.parent.name
        if group == "base":
            group = _WITHIN.get(path.stem, path.stem if path.stem in _groups() else "backend")
        if group.partition(".")[0] in _groups():
            package = re.match(r"# @package ([\w.]+)$", path.read_text(), re.MULTILINE)
            found |= set(_keys(yaml.safe_load(path.read_text()), package[1] if package else group))
    return {key.removeprefix("_global_.") for key in found}


def _groups() -> list[str]:
    return [path.name for path in config.conf_dir().iterdir() if path.is_dir() and path.name not in ("hydra", "base")]


def _keys(values: object, above: str) -> Iterator[str]:
    for key, value in values.items() if isinstance(values, dict) else ():
        yield f"{above}.{key}"
        yield from _keys(value, f"{above}.{key}")


def example_files() -> dict[str, str]:
    """The files of the guide to extending by name: modules and option files of a user's own."""
    return files_of(sorted(ROOT.glob("docs/extending*.md")))


def files_of(pages: list[Path]) -> dict[str, str]:
    """The files that pages write out, by name; those of one name are put together."""
    found: dict[str, str] = {}
    for page in pages:
        written = r"^`([\w/]+\.(?:py|yaml|jsonl))`:\n\n```\w+\n(.*?)^```"
        for name, text in re.findall(written, page.read_text(), re.MULTILINE | re.DOTALL):
            found[name] = found.get(name, "") + text
    return found


def write_examples(folder: Path, *pages: Path) -> None:
    """Write the files of these pages; without one, of the guide to extending."""
    for name, content in (files_of(list(pages)) if pages else example_files()).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
