"""What can be told of a library by its source, which is read and not imported: that takes seconds."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def source_of(package: str, file: str) -> str | None:
    """The text of a file of an installed package; None: there is no such package, or it has no such file.

    Args:
        package: its name, without dots.
        file: path within the package.
    """
    found = find_spec(package)
    if found is None or found.origin is None:
        return None
    try:
        return (Path(found.origin).parent / file).read_text(encoding="utf-8")
    except OSError:
        return None


@cache
def dataclass_fields(package: str, file: str, name: str) -> frozenset[str] | None:
    """The public fields of a dataclass and of its bases in the same file; None where that file has no such class."""
    source = source_of(package, file)
    classes = {node.name: node for node in ast.parse(source or "").body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return None
    found: set[str] = set()
    left = [name]
    while left:
        body = classes[left.pop()]
        named = (node.target for node in body.body if isinstance(node, ast.AnnAssign))
        found |= {target.id for target in named if isinstance(target, ast.Name) and not target.id.startswith("_")}
        left += [base.id for base in body.bases if isinstance(base, ast.Name) and base.id in classes]
    return frozenset(found)
