"""The figures of the package's structure: ``python -m tests.house`` prints them; `test_house.py` checks `LIMITS`.

A limit that lies above its aim has its reason in docs/decisions.md.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trinity_sync"

AIMS = {
    "lines": 57_000,
    "modules": 300,
    "docstring lines / code lines": 0.26,
    "import lines / code lines": 0.09,
    "modules on the path of a full save": 20,
    "duplicates": 0,
    "class names that occur twice": 0,
    "class names that are no nouns": 0,
    "uses of Any": 100,
    "uses of dict[str, Any] or dict[str, object]": 60,
}
"""The figures to reach; at most so many of each."""

LIMITS = {
    "lines": 75_738,
    "modules": 297,
    "docstring lines / code lines": 0.21,
    "import lines / code lines": 0.1,
    "modules on the path of a full save": 13,
    "duplicates": 0,
    "class names that occur twice": 0,
    "class names that are no nouns": 0,
    "uses of Any": 60,
    "uses of dict[str, Any] or dict[str, object]": 18,
}
"""The figures that a change must not exceed."""

NOUNS = {"Drawing", "Feed", "Finding", "Meeting", "Numbering", "Published", "Sighting"}
"""Words that look like participles and are nouns; `Published` is a name that pages give to users."""

NO_NOUNS = {
    *("Alive", "Apart", "Clean", "Fail", "Of", "Out", "Overlong", "Plain", "Small", "Unequal"),
    *("Chosen", "Died", "Done", "Drawn", "Gone", "Held", "Kept", "Left", "Lost", "Made"),
    *("Read", "Seen", "Sent", "Taken", "Written"),
}
"""Other words that a class name does not end in."""

RUN = 6
"""Lines of code that two places share, from which on they are duplicates."""


def modules() -> dict[str, str]:
    """Return the text of each module of the package, by its path below the package."""
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def figures() -> dict[str, float]:
    """Measure the package. Ratios have two decimals."""
    texts = modules()
    docstrings = sum(len(_docstring_lines(text)) for text in texts.values())
    imports = sum(len(_import_lines(text)) for text in texts.values())
    code = sum(len(code_lines(text)) for text in texts.values())
    nodes = [node for text in texts.values() for node in _nodes(text)]
    return {
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "modules": len(texts),
        "docstring lines / code lines": round(docstrings / code, 2),
        "import lines / code lines": round(imports / code, 2),
        "modules on the path of a full save": len({hop.path for hop in walk("A full save")}),
        "duplicates": len(list(duplicates(texts))),
        "class names that occur twice": len(repeated_classes(texts)),
        "class names that are no nouns": len(no_nouns(texts)),
        "uses of Any": sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
        "uses of dict[str, Any] or dict[str, object]": sum(
            isinstance(node, ast.Subscript)
            and ast.unparse(node.value) == "dict"
            and ast.unparse(node.slice) in ("(str, Any)", "(str, object)")
            for node in nodes
        ),
    }


class Hop(NamedTuple):
    """A place that a walk of docs/architecture.md names: a module below the package, and a function or class in it."""

    path: str
    name: str


def walk(title: str, page: str = "architecture.md") -> list[Hop]:
    """Return the places of a walk: those written as `path.py::name` below a heading of a page of docs/."""
    return [Hop(path, name) for path, name in re.findall(r"`([\w/]+\.py)::([\w.]+)`", section(title, page))]


def section(title: str, page: str = "architecture.md") -> str:
    """Return the text below a heading of a page of docs/."""
    text = (ROOT / "docs" / page).read_text()
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"docs/{page} has no section {title!r}")
    return found[1]


@cache
def code_lines(text: str) -> dict[int, str]:
    """Return the lines of a module that hold code, by number: no blank line, comment or docstring."""
    documented = _docstring_lines(text)
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return {number: line for number, line in enumerate(text.splitlines(), 1) if number in held - documented}


def duplicates(texts: Mapping[str, str]) -> Iterator[str]:
    """Name each pair of places with the same run of code, line by line. Imports and the headers of functions do not
    count: an override has to repeat the parameters of its interface.
    """
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path, text in texts.items():
        left_out = _import_lines(text) | _header_lines(text)
        lines = [
            (number, line.strip())
            for number, line in code_lines(text).items()
            if number not in left_out and re.search(r"\w", line)
        ]
        for first in range(len(lines) - RUN + 1):
            run = lines[first : first + RUN]
            places[tuple(line for _, line in run)].append((path, run[0][0]))
    seen: set[tuple[str, str, int]] = set()
    for found in places.values():
        for (path, line), (other, other_line) in pairwise(found):
            # The next line of the same run is the same pair.
            if (path, other, other_line - line) not in seen and (path != other or other_line - line >= RUN):
                yield f"{path}:{line} and {other}:{other_line}"
            seen.add((path, other, other_line - line))


def repeated_classes(texts: Mapping[str, str]) -> list[str]:
    """Return the names of classes that occur in more than one place. A leading underscore does not tell two apart."""
    count = Counter(name.lstrip("_") for name in _class_names(texts))
    return sorted(name for name, times in count.items() if times > 1)


def no_nouns(texts: Mapping[str, str]) -> list[str]:
    """Return the names of classes whose last word is a participle, an adverb or a verb."""
    last = {name: re.findall(r"[A-Z]*[a-z0-9]*", name.lstrip("_"))[-2] for name in _class_names(texts)}
    return sorted(
        name for name, word in last.items() if word in NO_NOUNS or (word.endswith(("ed", "ing")) and word not in NOUNS)
    )


def _class_names(texts: Mapping[str, str]) -> Iterator[str]:
    return (node.name for text in texts.values() for node in _nodes(text) if isinstance(node, ast.ClassDef))


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@cache
def _nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def _docstring_lines(text: str) -> set[int]:
    """Lines of docstrings, those below attributes and constants among them."""
    texts = (node for node in _nodes(text) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return {
        line
        for node in texts
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _import_lines(text: str) -> set[int]:
    found = (node for node in _nodes(text) if isinstance(node, ast.Import | ast.ImportFrom))
    return {line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _header_lines(text: str) -> set[int]:
    """Lines of functions before their bodies."""
    functions = (node for node in _nodes(text) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {line for node in functions for line in range(node.lineno, node.body[0].lineno)}


def main() -> None:
    """Print each figure with its limit and its aim, then the duplicates and the names to change."""
    for name, value in figures().items():
        print(f"{name:45} {value:>9,} (limit {LIMITS[name]:,}, aim {AIMS[name]:,})")
    texts = modules()
    for place in duplicates(texts):
        print(f"duplicate: {place}")
    for name in repeated_classes(texts):
        print(f"class in more than one place: {name}")
    for name in no_nouns(texts):
        print(f"class without a noun: {name}")


if __name__ == "__main__":
    main()
