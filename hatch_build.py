"""Build the native library (trinity_sync/weights/native) with the package, where there is a C compiler.

hatchling calls the hook for wheels and editable installs; `python hatch_build.py` builds into this checkout. Without a
compiler the wheel is pure, and numpy does the work. TRINITY_SYNC_PURE=1 asks for that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a program, in an environment without hatchling
    BuildHookInterface = object  # type: ignore[assignment, misc]

LIBRARY = "trinity_sync/weights/native/native.so"
FLAGS = ("-O2", "-ftree-vectorize", "-fvisibility=hidden", "-shared", "-fPIC")


def sources_flag(folder: Path) -> str:
    """Return the flag with the checksum of the sources, by which the loader knows a library of other sources."""
    sources = b"".join(source.read_bytes() for source in sorted(folder.glob("*.[ch]")))
    return f"-DSOURCES={zlib.crc32(sources)}u"


def compile_library(root: Path) -> str | None:
    """Compile the library into the tree; return why there is none."""
    library = root / LIBRARY
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if os.environ.get("TRINITY_SYNC_PURE"):
        return "TRINITY_SYNC_PURE is set"
    if compiler is None:
        return "there is no C compiler"
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # others may build it, too
            made = Path(folder) / library.name
            sources = [sources_flag(library.parent), str(library.with_name("native.c"))]
            command = [*compiler.split(), *FLAGS, *sources, "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"{compiler} failed: {' '.join(done.stderr.split())[:300]}"
            made.replace(library)  # a program that has the old one loaded keeps it
    except OSError as error:
        return f"{compiler} cannot be run: {error}"
    return None


def told(reason: str) -> str:
    """Return the note to a build without the library."""
    return f"without the native library, as {reason}; numpy does its work"


def platform_tag() -> str:
    """Return the tag of a wheel with the library: any Python, this platform."""
    return f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the library to the wheel, and the platform to its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a build. Editable installs find the library in the checkout."""
        if self.target_name != "wheel":
            return
        reason = compile_library(Path(self.root))
        if reason is not None:
            self.app.display_warning(told(reason))
        elif version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = platform_tag()
            build_data["artifacts"].append(LIBRARY)


if __name__ == "__main__":
    missing = compile_library(Path(__file__).parent)
    print(told(missing) if missing else f"{LIBRARY}: built", file=sys.stderr)
