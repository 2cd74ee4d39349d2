"""The server that begins processes as forks of itself, asked as Ray's raylet asks: by `forked_worker.py`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from trinity_sync.launch import forked_worker

PROGRAM = """
import json, os, random, sys
import numpy
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgrp(), "cwd": os.getcwd(), "argv": sys.argv[1:],
    "first": "colorsys" in sys.modules, "later": "wave" in sys.modules, "said": os.environ.get("SAID"),
    "own": os.environ.get("OWN"), "path": sys.path[0], "main": __name__,
    "random": [random.random(), numpy.random.random()],
    "told": forked if (forked := os.environ.get("TRINITY_SYNC_FORK_SERVER")) else None,
}), flush=True)
"""


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}


class Server:
    """A server in a folder, and what was made there of its answers."""

    def __init__(self, folder: Path, later: str = "numpy,wave") -> None:
        self.folder = folder
        command = [sys.executable, "-m", "trinity_sync.host.fork_server", str(folder / "s"), "colorsys", later]
        env = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env)
        (folder / "program.py").write_text(PROGRAM)
        (folder / "setup.py").write_text("import sys; print('set up by Ray', *sys.argv[1:])")
        while not (folder / "s").exists():
            assert self.process.poll() is None, self.log
            time.sleep(0.01)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def ask(self, *arguments: str, program: str = "program.py", language: str = "PYTHON", **env: str) -> str:
        """Ask, and wait until nobody has the output open any more."""
        done = subprocess.run(
            [sys.executable, forked_worker.__file__, str(self.folder / program), *arguments, f"--language={language}"],
            env={**ENVIRONMENT, "SAID": "x", forked_worker.SOCKET: str(self.folder / "s")}
            | {forked_worker.SETUP: str(self.folder / "setup.py"), **env},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            timeout=60,
            check=True,
            text=True,
        )
        return done.stdout

    def end(self) -> None:
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("forks"))
    yield server
    server.end()


def test_a_process_begins_with_what_the_server_has_imported(server: Server) -> None:
    context = json.dumps({"env_vars": {"OWN": "mine"}, "py_executable": sys.executable})
    first = json.loads(server.ask("--a=1", f"--serialized-runtime-env-context={context}", "b c"))
    second = json.loads(server.ask("--a=2"))
    assert first["parent"] == second["parent"] == server.process.pid
    assert first["pid"] != second["pid"]
    assert (first["argv"], second["argv"]) == (["--a=1", "b c"], ["--a=2"])
    assert (first["own"], second["own"]) == ("mine", None)
    for process in (first, second):
        assert process["first"]
        assert process["later"]
        assert process["said"] == "x"
        assert process["main"] == "__main__"
        assert process["cwd"] == process["path"] == str(server.folder)
        assert process["group"] == process["pid"]  # Ray ends a worker's group
        assert process["told"] is None
    for mine, other in zip(first["random"], second["random"], strict=True):
        assert mine != other


def test_who_was_begun_leaves_no_zombie(server: Server) -> None:
    pid = json.loads(server.ask())["pid"]
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        pytest.param([], {"SAID": "y"}, id="another environment"),
        pytest.param([], {"MORE": "1"}, id="a variable more"),
        pytest.param([], {forked_worker.SOCKET: "/nowhere"}, id="no server"),
        pytest.param(['--serialized-runtime-env-context={"py_executable": "/other/python"}'], {}, id="another Python"),
        pytest.param(['--serialized-runtime-env-context={"command_prefix": ["nice"]}'], {}, id="a prefix"),
    ],
)
def test_ray_sets_up_itself_what_cannot_be_a_fork(server: Server, arguments: list[str], asked: Any) -> None:
    server.ask()  # so that there is an environment
    said = server.ask("--a", *arguments, **asked)
    assert said.split() == ["set", "up", "by", "Ray", str(server.folder / "program.py"), "--a", *" ".join(arguments).split(), "--language=PYTHON"]  # fmt: skip # noqa: E501


def test_a_program_of_another_language_is_none_of_its_business(server: Server) -> None:
    assert server.ask(language="JAVA").startswith("set up by Ray")


def test_a_refusal_says_what_differs(server: Server) -> None:
    server.ask()
    server.ask(SAID="z", MORE="1")
    assert "refused: the environment is another one: MORE, SAID" in server.log


def test_threads_that_an_import_has_started_forbid_forks(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True, name='of busy').start()"
    )
    server = Server(tmp_path, later="busy")
    assert server.ask().startswith("set up by Ray")
    assert "refused: an import has started threads" in server.log
    assert "of busy" in server.log
    server.end()


def test_a_module_that_cannot_be_imported_leaves_it_to_ray(tmp_path: Path) -> None:
    server = Server(tmp_path, later="no_such_module")
    assert server.ask().startswith("set up by Ray")
    assert server.process.wait(30) != 0
    assert "no_such_module" in server.log
    assert server.ask().startswith("set up by Ray")
    server.end()


def test_what_it_began_goes_on_when_it_ends(tmp_path: Path) -> None:
    server = Server(tmp_path, later="wave")
    (tmp_path / "program.py").write_text("import sys; print('begun', flush=True); sys.stdin.read(); print('done')")
    asked = subprocess.Popen(
        [sys.executable, forked_worker.__file__, str(tmp_path / "program.py"), "--language=PYTHON"],
        env={**ENVIRONMENT, forked_worker.SOCKET: str(tmp_path / "s"), forked_worker.SETUP: "/nowhere"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asked.stdout is not None
    assert asked.stdout.readline() == "begun\n"
    assert asked.wait(30) == 0
    server.end()
    assert server.process.returncode == 0
    assert asked.communicate("", timeout=30)[0] == "done\n"


def test_half_a_request_begins_nothing_and_harms_nobody(tmp_path: Path) -> None:
    server = Server(tmp_path, later="wave,numpy")
    for sent in (b"", b"{", b"[]", b'{"argv": []}'):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            client.settimeout(30)
            assert client.recv(10) == b""
    assert json.loads(server.ask())["parent"] == server.process.pid
    server.end()
