"""Facts about a library from its source, which is read and not imported: an import takes seconds."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None: it is not installed."""
    from importlib import metadata  # takes long to load

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def source_of(package: str, file: str) -> str | None:
    """Return the text of a file (by its path in the package) of an installed package; None: it is missing."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return None
    try:
        return (Path(found.origin).parent / file).read_text(encoding="utf-8")
    except OSError:
        return None


@cache
def dataclass_fields(package: str, file: str, name: str) -> frozenset[str] | None:
    """Return the public fields of a dataclass and of its bases in the same file; None: that file has no such class."""
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
