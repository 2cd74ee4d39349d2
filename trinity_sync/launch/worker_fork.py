"""Replaces Ray's `setup_worker.py`, which starts a worker: asks the fork server to start it, see
`trinity_sync.host.fork_server`. Ray runs this file by its path, so it imports only standard modules. If the server is
gone, refuses, hangs or times out, or if the environment needs more than variables, Ray's own file runs instead. Never
starts two workers: a fork waits for the reply that it is accepted.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path

SOCKET, SETUP = "TRINITY_SYNC_FORK_SERVER", "TRINITY_SYNC_SETUP_WORKER"
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
_ANSWER_S, _LOOK_S = 60.0, 1.0
"""Timeout of the server's answer: it may be importing."""


def _variables(arguments: list[str]) -> "dict[str, str] | None":
    """Return the variables of a worker's own environment; None: it needs more than variables."""
    context = next((a[len(_CONTEXT) :] for a in arguments if a.startswith(_CONTEXT)), "") or "{}"
    said = json.loads(context)
    variables: dict[str, str] = said.pop("env_vars", None) or {}
    python = said.pop("py_executable", None) or sys.executable
    if any(said.values()) or python != sys.executable or any("$" in value for value in variables.values()):
        return None
    return variables


def _oom() -> "str | None":
    """Return the OOM score that Ray has set for its workers; None: the system has none."""
    try:
        return Path("/proc/self/oom_score_adj").read_text()
    except OSError:
        return None


def _forked(arguments: list[str]) -> bool:
    """Return whether the server has started the worker."""
    language = [a for a in arguments if a.startswith(_LANGUAGE)]
    if language != [_LANGUAGE + "PYTHON"] or (own := _variables(arguments)) is None:
        return False
    argv = [a for a in arguments if not a.startswith((_CONTEXT, _LANGUAGE))]
    base = {name: value for name, value in os.environ.items() if name not in (SOCKET, SETUP)}
    blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    asked = {"argv": argv, "cwd": str(Path.cwd()), "base": base, "env": own, "blocked": blocked, "oom": _oom()}
    request = json.dumps(asked) + "\n"
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(_ANSWER_S)
            server.connect(os.environ[SOCKET])
            data = request.encode()
            sent = socket.send_fds(server, [data], [0, 1, 2])
            server.sendall(data[sent:])
            begun = _has_answered(server) and int(server.recv(32) or b"0") > 0
            return begun and server.send(b"+") > 0
    except OSError:
        return False


def _has_answered(server: socket.socket) -> bool:
    """Wait for an answer and return whether it came. A stopped server does not answer."""
    pid = struct.unpack("iII", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    until = time.monotonic() + _ANSWER_S
    while not select.select([server], [], [], _LOOK_S)[0]:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        if state == b"T" or time.monotonic() > until:
            return False
    return True


if __name__ == "__main__" and not _forked(sys.argv[1:]):
    os.execv(sys.executable, [sys.executable, os.environ[SETUP], *sys.argv[1:]])
