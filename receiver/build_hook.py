"""Build the wheel of the receiving side: the modules that vLLM's workers import, and the native library.

The modules are found by their import statements, so that the list is never out of date. `tests/test_receiver.py` checks
that the wheel has all that it imports, and little else.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[1]
# The second has what an explorer sends to the workers; the third is imported where they have a GPU.
BEGIN = ("trinity_sync.integrations.vllm.transfer", "trinity_sync.sync.maps", "trinity_sync.weights.cuda_digests")

_spec = importlib.util.spec_from_file_location("native_build", ROOT / "hatch_build.py")
assert _spec is not None
assert _spec.loader is not None
native_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native_build)


def files() -> set[str]:
    """Return the files of the modules, with those of their packages, by their paths in the checkout."""
    found: set[str] = set()
    left = list(BEGIN)
    while left:
        words = left.pop().split(".")  # the last one may be of a class
        places = ["/".join(words[:depth]) for depth in range(1, len(words) + 1) if words[0] == "trinity_sync"]
        for file in (f"{place}{end}" for place in places for end in ("/__init__.py", ".py")):
            if (ROOT / file).is_file() and file not in found:
                found.add(file)
                left += _imports(ast.parse((ROOT / file).read_text()))
    return found


def _imports(node: ast.AST) -> Iterator[str]:
    """Yield the names that a module imports when it is imported itself."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ImportFrom):
            yield from (f"{inner.module}.{alias.name}" for alias in inner.names)
        elif isinstance(inner, ast.If) and ast.unparse(inner.test) == "TYPE_CHECKING":
            yield from (name for one in inner.orelse for name in _imports(one))
        elif not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(inner)


class ReceiverBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the files, and the platform to the wheel's tag where there is a library."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a build."""
        if version == "editable":
            raise RuntimeError("the receiver has no editable install: install trinity-sync itself, or the wheel")
        reason = native_build.compile_library(ROOT)
        if reason is not None:
            self.app.display_warning(native_build.told(reason))
        else:
            build_data["pure_python"] = False
            build_data["tag"] = native_build.platform_tag()
        library = ROOT / native_build.LIBRARY
        compiled = [] if reason else [library, *library.parent.glob("*.[ch]")]  # it is loaded beside its sources only
        found = [*(ROOT / file for file in files()), *compiled]
        build_data["force_include"] |= {str(file): str(file.relative_to(ROOT)) for file in found}
