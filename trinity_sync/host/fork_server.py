"""A process that has imported others' modules, and starts them as forks of itself.

A Python process of a run needs seconds to import torch, transformers and verl; a fork starts at once, and shares the
memory of the imports. The server has one thread, and calls nothing of its imports.

``python .../fork_server.py SOCKET FIRST,... THEN,... PATH`` listens at once, and imports the first modules, all of them
from its starter's places: PATH is the starter's `sys.path`, as JSON. The others are imported at the first request, in
the environment of the request: native libraries keep the environment of their load. A request with another environment
is refused. The server ends when its standard input does, that is with its starter; its forks continue.

`trinity_sync/launch/worker_fork.py` sends the requests, see `_ForkRequest`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_REQUEST_S = 10.0
"""For a request to be whole: whoever asks sends it at once."""


@dataclass(frozen=True)
class _ForkRequest:
    """The request for a fork."""

    argv: Sequence[str]  # of the process: a Python file, and its arguments
    cwd: str  # where it works
    base: Mapping[str, str]  # the environment to import in, the same for all
    env: Mapping[str, str]  # variables of this process alone, which come on top
    blocked: Sequence[int]  # signals that do not reach it
    # How willingly the kernel ends it where memory is short, `oom_score_adj`; None: as it does the server.
    oom: str | None
    files: Sequence[int]  # its standard input, output and error

    def become(self) -> None:
        """Make this process, a fork, the one that was asked for, up to its first line."""
        os.setpgid(0, 0)  # Ray ends workers by their group
        for number, file in enumerate(self.files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(self.base)
        os.environ.update(self.env)
        os.chdir(self.cwd)
        sys.argv = list(self.argv)
        sys.path[:] = [*_added_path, str(Path(self.argv[0]).parent), *_own_path]
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        if self.oom is not None:
            with contextlib.suppress(OSError):  # a smaller one is not for everybody
                Path("/proc/self/oom_score_adj").write_text(self.oom)
        _draw_own_numbers()


class ForkServer:
    """Serves until its standard input ends. `listening`: the socket for requests. `later`: modules to import at the
    first request.
    """

    def __init__(self, listening: socket.socket, later: Sequence[str]) -> None:
        self._listening = listening
        self._later = later
        self._base: Mapping[str, str] | None = None
        self._ended, woken = os.pipe()
        for end in (self._ended, woken):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self._woken = woken

    def serve(self) -> _ForkRequest | None:
        """Serve requests. Returns the request in each fork, and None in the server at its end."""
        while True:
            ready, _, _ = select.select([self._listening, self._ended, sys.stdin], [], [])
            if self._ended in ready:
                self._take_note_of_ends()
            if sys.stdin in ready:
                return None
            if self._listening in ready:
                connection, _ = self._listening.accept()
                with connection:
                    request = _receive(connection)
                    if request is not None and self._begins(connection, request):
                        return request

    def _begins(self, connection: socket.socket, request: _ForkRequest) -> bool:
        """Answer one request with the pid of its fork, or 0 for a refusal; return whether this process is the fork."""
        answer = b"0"
        if self._base is None:
            self._import(request.base)
        if request.base != self._base or threading.active_count() > 1:
            print(f"refused: {self._refusal(request)}", flush=True)
        elif (pid := _fork()) == 0:
            self._leave()
            if not _is_wanted(connection):
                os._exit(0)
            return True
        elif pid is not None:
            answer = b"%d" % pid
        _close(request.files)
        with contextlib.suppress(OSError):
            connection.sendall(answer)
        return False

    def _import(self, base: Mapping[str, str]) -> None:
        os.environ.clear()
        os.environ.update(base)
        before = list(sys.path)
        _load(self._later)
        _added_path.extend(place for place in sys.path if place not in before)
        sys.stdout.flush()  # or each fork prints it again
        self._base = dict(base)
        gc.collect()
        gc.freeze()  # so that a collection in a fork does not copy shared memory

    def _refusal(self, request: _ForkRequest) -> str:
        base, asked = dict(self._base or {}), dict(request.base)
        differ = sorted(name for name in {*base, *asked} if base.get(name) != asked.get(name))
        if differ:
            return f"the environment is another one: {', '.join(differ)}"
        return f"an import has started threads, which a fork lacks: {threading.enumerate()[1:]}"

    def _leave(self) -> None:
        """Release the server's resources in a fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._listening.close()
        os.close(self._ended)
        os.close(self._woken)

    def _take_note_of_ends(self) -> None:
        os.read(self._ended, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if status:  # Ray sees only a closed connection
                    print(f"{pid} {_how(status)}", flush=True)


_own_path: Sequence[str] = ()
"""`sys.path` of a Python process of this environment."""
_added_path: list[str] = []
"""Entries that imports have put before it."""


def _receive(connection: socket.socket) -> _ForkRequest | None:
    """Return the request; None: it is not whole."""
    until = time.monotonic() + _REQUEST_S
    connection.settimeout(_REQUEST_S)
    files: Sequence[int] = ()
    try:
        text, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        while not text.endswith(b"\n") and (part := connection.recv(1 << 16)):
            text += part
            connection.settimeout(max(until - time.monotonic(), 0.001))
        said = json.loads(text)
        return _ForkRequest(**said, files=files)
    except (OSError, ValueError, TypeError, KeyError):
        _close(files)
        return None


def _is_wanted(connection: socket.socket) -> bool:
    """Return in a fork whether its requester still takes it."""
    connection.settimeout(_REQUEST_S)
    with contextlib.suppress(OSError):
        return bool(connection.recv(1))
    return False


def _draw_own_numbers() -> None:
    """Give this fork random numbers of its own; Python's own generator does so itself."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _how(status: int) -> str:
    """Describe the end of a process from the status of `waitpid`."""
    code = os.waitstatus_to_exitcode(status)
    return f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"


def _fork() -> int | None:
    try:
        return os.fork()
    except OSError as error:
        print(f"refused: {error}", flush=True)
        return None


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def _load(modules: Sequence[str]) -> None:
    from trinity_sync.host.process import without_collections  # after `main` has set the path

    with without_collections():
        for module in modules:
            importlib.import_module(module)


def main() -> None:
    """Run the server, and in its forks the requested programs."""
    global _own_path
    path, first, later, starters = sys.argv[1:]
    _own_path = [place for place in sys.path if place != str(Path(__file__).parent)]
    sys.path[:] = json.loads(starters)
    from trinity_sync.host.process import end_with_driver

    end_with_driver()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{path}~")
        listening.listen(128)
        Path(f"{path}~").rename(path)  # who sees it can connect
        _load(first.split(","))
        request = ForkServer(listening, later.split(",")).serve()
    if request is not None:
        request.become()
        runpy.run_path(request.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
