"""Stands in for Ray's `setup_worker.py`, which brings a worker's process into its environment and then starts it: has
the fork server begin it instead, see `trinity_sync.host.fork_server`.

Ray runs this file by its path; it imports nothing but a few modules of Python's own. Where the server is gone or
refuses, or the environment takes more than variables, Ray's own file does what it always does. One that does not answer
in time may still begin the worker, so that there must not be a second: Ray takes note of it, and asks again.
"""

import json
import os
import socket
import sys
from pathlib import Path

SOCKET, SETUP = "TRINITY_SYNC_FORK_SERVER", "TRINITY_SYNC_SETUP_WORKER"
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
_ANSWER_S = 60.0
"""For the server's answer: it may be importing."""


def _variables(arguments: list[str]) -> "dict[str, str] | None":
    """The variables of a worker's own environment; None: there is more to it."""
    context = next((a[len(_CONTEXT) :] for a in arguments if a.startswith(_CONTEXT)), "") or "{}"
    said = json.loads(context)
    more = said.get("command_prefix") or said.get("override_worker_entrypoint") or said.get("java_jars")
    if more or said.get("py_executable") not in (None, sys.executable):
        return None
    variables: dict[str, str] = said.get("env_vars") or {}
    return variables


def _forked(arguments: list[str]) -> bool:
    """Whether the server has begun the worker."""
    language = [a for a in arguments if a.startswith(_LANGUAGE)]
    if language != [_LANGUAGE + "PYTHON"] or (own := _variables(arguments)) is None:
        return False
    argv = [a for a in arguments if not a.startswith((_CONTEXT, _LANGUAGE))]
    base = {name: value for name, value in os.environ.items() if name not in (SOCKET, SETUP)}
    request = json.dumps({"argv": argv, "cwd": str(Path.cwd()), "base": base, "env": own})
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(_ANSWER_S)
            server.connect(os.environ[SOCKET])
            data = request.encode()
            sent = socket.send_fds(server, [data], [0, 1, 2])
            server.sendall(data[sent:])
            server.shutdown(socket.SHUT_WR)
            return int(server.recv(32) or b"0") > 0
    except TimeoutError:
        sys.exit(f"the fork server at {os.environ[SOCKET]} did not answer within {_ANSWER_S:.0f} s")
    except OSError:
        return False


if __name__ == "__main__" and not _forked(sys.argv[1:]):
    os.execv(sys.executable, [sys.executable, os.environ[SETUP], *sys.argv[1:]])
