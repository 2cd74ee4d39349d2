"""Facts about a library from its source, which is read and not imported: an import takes seconds."""

from __future__ import annotations

import ast
import sys
import zlib
from collections.abc import Iterable
from contextlib import suppress
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


def loaded_modules(package: str) -> list[str]:
    """Return the names of a package's modules that this process has imported."""
    return sorted(name for name in list(sys.modules) if name == package or name.startswith(f"{package}."))


def source_checksums(modules: Iterable[str]) -> dict[str, int]:
    """Return the checksum of each module's file; a module without one is left out. Imports only their packages."""
    found = {}
    for name in modules:
        with suppress(ImportError, OSError):
            if (spec := find_spec(name)) is not None and spec.origin is not None:
                found[name] = zlib.crc32(Path(spec.origin).read_bytes())
    return found


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
