"""The server that begins processes as forks of itself, asked as Ray's raylet asks: by `launch/worker_fork.py`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from trinity_sync.host import fork_server
from trinity_sync.launch import local_ray, worker_fork

PROGRAM = """
import json, os, random, signal, sys
import numpy
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgrp(), "cwd": os.getcwd(), "argv": sys.argv[1:],
    "first": "colorsys" in sys.modules, "later": "wave" in sys.modules, "said": os.environ.get("SAID"),
    "own": os.environ.get("OWN"), "path": sys.path, "main": __name__,
    "oom": open("/proc/self/oom_score_adj").read(), "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "random": [random.random(), numpy.random.random()],
    "told": forked if (forked := os.environ.get("TRINITY_SYNC_FORK_SERVER")) else None,
}), flush=True)
"""


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}


def as_ray_does() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    Path("/proc/self/oom_score_adj").write_text("900")


class Server:
    """A server in a folder, and what was made there of its answers."""

    def __init__(self, folder: Path, later: str = "numpy,wave") -> None:
        self.folder = folder
        path = json.dumps([str(folder), *sys.path])  # where its starter finds modules
        command = [sys.executable, fork_server.__file__, str(folder / "s"), "colorsys", later, path]
        env = ENVIRONMENT
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
        return self._ask(subprocess.PIPE, *arguments, program=program, language=language, **env).stdout

    def ask_stopped(self) -> str:
        """Ask while it is stopped: it has the output open for as long."""
        with (self.folder / "output").open("w") as output:
            self._ask(output)
        return (self.folder / "output").read_text()

    def _ask(
        self, output: Any, *arguments: str, program: str = "program.py", language: str = "PYTHON", **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, worker_fork.__file__, str(self.folder / program), *arguments, f"--language={language}"],
            env={**ENVIRONMENT, "SAID": "x", worker_fork.SOCKET: str(self.folder / "s")}
            | {worker_fork.SETUP: str(self.folder / "setup.py"), **env},
            cwd=self.folder,
            stdout=output,
            timeout=60,
            check=True,
            text=True,
            preexec_fn=as_ray_does,
        )

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
        assert process["cwd"] == process["path"][0] == str(server.folder)
        assert process["group"] == process["pid"]  # Ray ends a worker's group
        assert process["told"] is None
        assert (process["oom"], process["blocked"]) == ("900\n", [signal.SIGINT])
    for mine, other in zip(first["random"], second["random"], strict=True):
        assert mine != other


@pytest.mark.parametrize(
    ("death", "told"),
    [("os._exit(3)", "ended with exit code 3"), ("os.kill(os.getpid(), 9)", "was ended by signal 9 (Killed)")],
)
def test_how_one_ended_that_did_not_end_well_is_in_the_log(server: Server, death: str, told: str) -> None:
    (server.folder / "dies.py").write_text(f"import os\nprint(os.getpid(), flush=True)\n{death}\n")
    pid = server.ask(program="dies.py").strip()
    deadline = time.monotonic() + 30
    while f"{pid} {told}\n" not in server.log:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.01)


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
        pytest.param([], {worker_fork.SOCKET: "/nowhere"}, id="no server"),
        pytest.param(['--serialized-runtime-env-context={"py_executable": "/other/python"}'], {}, id="another Python"),
        pytest.param(['--serialized-runtime-env-context={"command_prefix": ["nice"]}'], {}, id="a prefix"),
        pytest.param(['--serialized-runtime-env-context={"container": {"image": "x"}}'], {}, id="more"),
        pytest.param(['--serialized-runtime-env-context={"env_vars": {"OWN": "${SAID}"}}'], {}, id="a reference"),
    ],
)
@pytest.mark.few(2)
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


def test_it_imports_what_its_starter_would_and_its_forks_look_where_a_new_process_does(tmp_path: Path) -> None:
    (tmp_path / "wave.py").write_text("print('not the usual one')")  # as another checkout than the installed one
    fresh = tmp_path / "fresh.py"
    fresh.write_text("import sys; print(sys.path)")
    server = Server(tmp_path, later="wave")
    (tmp_path / "program.py").write_text("import sys, wave; print(wave.__file__, sys.path)")
    said = server.ask()
    path = subprocess.run(
        [sys.executable, fresh], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert said == f"{tmp_path / 'wave.py'} {path}"  # what an import printed is in no fork's output
    assert "not the usual one" in server.log
    server.end()


@pytest.mark.parametrize("error", ["OSError", "ValueError"])
def test_an_import_that_fails_is_not_tried_for_every_process(tmp_path: Path, error: str) -> None:
    (tmp_path / "broken.py").write_text(f"raise {error}('of broken')")
    server = Server(tmp_path, later="broken")
    assert server.ask().startswith("set up by Ray")
    assert server.process.wait(30) != 0
    assert "of broken" in server.log
    server.end()


def test_a_request_that_is_not_whole_leaves_no_file_open(tmp_path: Path) -> None:
    server = Server(tmp_path, later="wave")
    server.ask()
    before = psutil.Process(server.process.pid).num_fds()
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))
            socket.send_fds(client, [b"{"], [0, 1, 2])
            client.shutdown(socket.SHUT_WR)
            client.settimeout(30)
            assert client.recv(10) == b""
    server.ask()
    assert psutil.Process(server.process.pid).num_fds() == before
    server.end()


def test_what_it_began_goes_on_when_it_ends(tmp_path: Path) -> None:
    server = Server(tmp_path, later="wave")
    (tmp_path / "program.py").write_text("import sys; print('begun', flush=True); sys.stdin.read(); print('done')")
    asked = subprocess.Popen(
        [sys.executable, worker_fork.__file__, str(tmp_path / "program.py"), "--language=PYTHON"],
        env={**ENVIRONMENT, worker_fork.SOCKET: str(tmp_path / "s"), worker_fork.SETUP: "/nowhere"},
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


def test_a_server_that_was_stopped_holds_nobody_up_and_begins_nothing_afterwards(tmp_path: Path) -> None:
    server = Server(tmp_path, later="wave")
    server.ask()
    (tmp_path / "program.py").write_text("open('begun', 'a').write('x')")
    os.kill(server.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert server.ask_stopped().startswith("set up by Ray")
    assert time.monotonic() - began < 30
    os.kill(server.process.pid, signal.SIGCONT)
    server.ask()  # after what was asked before
    deadline = time.monotonic() + 30
    while psutil.Process(server.process.pid).children():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (tmp_path / "begun").read_text() == "x"
    server.end()


def test_a_request_that_comes_in_drops_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_REQUEST_S", 0.3)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.05):
                with contextlib.suppress(OSError):
                    ours.send(b" ")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            began = time.monotonic()
            assert fork_server._receive(theirs) is None
            assert time.monotonic() - began < 10
        finally:
            stop.set()
            dripping.join()


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


@pytest.mark.all
@pytest.mark.timeout(300)
def test_forks_of_what_a_run_imports_draw_ids_and_numbers_of_their_own(tmp_path: Path) -> None:
    server = Server(tmp_path, later=",".join(["torch", *local_ray.LATER]))
    (tmp_path / "program.py").write_text(
        """
import json, random, threading
import numpy, ray, torch
def draw():
    drawn.extend([ray.WorkerID.from_random().hex(), ray.ObjectRef.from_random().hex()])
    drawn.extend([random.random(), numpy.random.random(), torch.rand(1).item()])
drawn = []
draw()
beside = threading.Thread(target=draw)
beside.start()
beside.join()
print(json.dumps(drawn))
"""
    )
    mine, others = (json.loads(server.ask()) for _ in range(2))
    assert len(mine) == 10
    assert not set(mine) & set(others)
    server.end()


def test_a_server_that_takes_nothing_begins_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        monkeypatch.setenv(worker_fork.SOCKET, str(tmp_path / "s"))
        monkeypatch.setenv("LARGE", "x" * 3_000_000)  # more than the socket holds
        monkeypatch.setattr(worker_fork, "_ANSWER_S", 0.2)
        assert worker_fork._forked(["--language=PYTHON"]) is False


def test_a_worker_of_another_language_is_none_of_the_servers() -> None:
    assert worker_fork._forked(["--language=JAVA"]) is False
