"""Programs that begin as forks of one process, which has imported what takes each of them seconds.

For tests of what the import of verl does, with a plug-in and without. What is imported beforehand is none of verl's and
none of this package's. Otherwise a program is one of its own: it has the environment that it is given, and ends as an
interpreter does.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEFOREHAND = (
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "transformers",
    "tensordict",
    "peft",
    "ray",
    "pandas",
)
_LIMIT_S = 300.0


def run(code: str, environment: Mapping[str, str], path: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program to its end.

    Args:
        code: in Python.
        environment: all variables that it has.
        path: where it looks for modules first.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("out", "err")]
        asked = {"code": code, "environment": dict(environment), "path": list(map(str, path)), "files": files}
        timer = threading.Timer(_LIMIT_S, server.kill)
        timer.start()
        try:
            server.stdin.write(json.dumps(asked) + "\n")
            server.stdin.flush()
            ended = server.stdout.readline()
        finally:
            timer.cancel()
        assert ended, f"the program did not end within {_LIMIT_S:.0f} s"
        return subprocess.CompletedProcess(code, int(ended), *(Path(file).read_text() for file in files))


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Of all tests of this process; the first program waits for its imports."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.programs"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    atexit.register(server.kill)
    return server


def _serve() -> dict[str, Any] | None:
    """Begin what is asked for, one program at a time. Returns in each program with what was asked, and in the server at
    its end.
    """
    for name in BEFOREHAND:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return dict(json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _become(asked: Mapping[str, Any]) -> None:
    for number, file in enumerate([os.devnull, *asked["files"]]):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[:0] = asked["path"]
    sys.argv[:] = ["-c"]
    warnings.simplefilter("ignore")


if __name__ == "__main__" and (asked := _serve()) is not None:
    _become(asked)
    exec(asked["code"], {"__name__": "__main__"})
