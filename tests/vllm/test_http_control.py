"""What the control of a server says to it, and makes of its answers; the server is made up."""

from __future__ import annotations

import http.server
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.stand_in_server import GUARDED, stand_in_server
from trinity_sync.actors.explorer_client import EngineDeathError
from trinity_sync.errors import ConfigError, RunError, WaitLimit, WaitTimeout
from trinity_sync.host.masking import EnvironmentSecret
from trinity_sync.integrations.vllm import server as server_module
from trinity_sync.integrations.vllm.server import HttpControl, ServerClient, lock_server

NBYTES = 1_000_000
CHANGES_WEIGHTS = ("/start_weight_update", "/update_weights", "/collective_rpc")


class LateServer:
    """Does what it is told, and may answer too late, or fail, or be given weights by somebody else.

    Attributes:
        labels: what it said that it holds, when its weights changed.
    """

    who = "the vLLM server at nowhere"

    def __init__(self) -> None:
        self.held = "default"
        self.late = False
        self.labels: list[str] = []
        self.moved: dict[str, int] = {}
        self.on: dict[str, Callable[[], None]] = {}

    def get(self, path: str, what: str) -> dict[str, Any]:
        return {"weight_version": self.held}

    def post(self, path: str, what: str, body: Any = None, params: Any = None, nbytes: int = 0) -> dict[str, Any]:
        self.moved[path] = nbytes
        if path in CHANGES_WEIGHTS:
            self.labels.append(self.held)
        self.on.get(path, lambda: None)()
        if path in ("/finish_weight_update", "/update_weight_version"):
            self.held = body.get("weight_version", body.get("new_version"))
        if self.late:
            raise WaitTimeout(self.who, what, 1.0)
        return {}

    def fails(self) -> None:
        raise RunError("planted")

    def taken_over(self) -> None:
        self.held = "0.7-of-somebody"


def by_workers(control: HttpControl, version: str) -> None:
    control.start_update(version)
    control.update(version, NBYTES)
    control.finish_update(version)


def by_file(control: HttpControl, version: str) -> None:
    control.reload(Path("/nowhere"), version, NBYTES)


WAYS = pytest.mark.parametrize("give", [by_workers, by_file])


@WAYS
def test_a_server_says_that_it_is_updated_from_before_its_weights_change_until_all_are_in(
    give: Callable[[HttpControl, str], None],
) -> None:
    server = LateServer()
    control = HttpControl(server)  # type: ignore[arg-type]
    for version in ("0.1", "0.2"):
        give(control, version)
        assert all(label.startswith(f"updating-{version}-") for label in server.labels)
        assert server.held.startswith(f"{version}-")
        server.labels.clear()


@pytest.mark.parametrize(
    ("give", "path"),
    [
        *((by_workers, path) for path in ("/start_weight_update", "/update_weights", "/finish_weight_update")),
        (by_file, "/collective_rpc"),
    ],
)
def test_a_server_whose_update_ended_half_way_says_that_it_is_updated_and_takes_the_next(
    give: Callable[[HttpControl, str], None], path: str
) -> None:
    server = LateServer()
    control = HttpControl(server)  # type: ignore[arg-type]
    give(control, "0.1")
    server.on[path] = server.fails
    with pytest.raises(RunError, match="planted"):
        give(control, "0.2")
    assert server.held.startswith("updating-0.2-")
    server.on.clear()
    control.pause("wait")
    give(control, "0.3")
    control.check()


@pytest.mark.parametrize(("give", "path"), [(by_workers, "/update_weights"), (by_file, "/collective_rpc")])
def test_weights_of_somebody_else_that_come_between_get_no_label_of_ours(
    give: Callable[[HttpControl, str], None], path: str
) -> None:
    server = LateServer()
    control = HttpControl(server)  # type: ignore[arg-type]
    server.on[path] = server.taken_over
    with pytest.raises(EngineDeathError, match=r"says that it holds 0\.7-of-somebody"):
        give(control, "0.1")
    assert server.held == "0.7-of-somebody"


def test_a_server_is_locked_by_its_port_until_its_holder_is_gone() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = (
        "import sys, time; from trinity_sync.integrations.vllm.server import lock_server\n"
        "lock = lock_server(sys.argv[1]); print('locked', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, f"http://127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        holder.send_signal(signal.SIGSTOP)  # alive, and no longer at work
        for _ in range(2):  # who was refused leaves nothing behind
            with pytest.raises(
                ConfigError, match=f"process {holder.pid} gives the vLLM server at http://localhost:{port}"
            ):
                lock_server(f"http://localhost:{port}", 0.0)
        lock_server(f"http://127.0.0.1:{port - 1}", 0.0).close()
        holder.kill()
    lock_server(f"http://localhost:{port}").close()


def test_an_own_name_whose_answer_came_too_late_is_nobody_elses() -> None:
    server = LateServer()
    control = HttpControl(server)  # type: ignore[arg-type]
    control.finish_update("0.1")
    server.late = True
    with pytest.raises(WaitTimeout):
        control.finish_update("0.2")
    server.late = False
    control.check()
    control.pause("wait")
    control.finish_update("0.3")
    control.check()
    server.held = "0.3-of-somebody"
    with pytest.raises(EngineDeathError, match=r"says that it holds 0\.3-of-somebody, but it was given 0\.3-"):
        control.check()


class ClosingHandler(http.server.BaseHTTPRequestHandler):
    """Closes each connection at its second request, as a server whose timer for idle connections has just ended."""

    protocol_version = "HTTP/1.1"
    requests = 0

    def do_GET(self) -> None:
        self.requests += 1
        if self.requests > 1:
            self.close_connection = True
            return
        self.answer()

    def do_POST(self) -> None:
        time.sleep(0.5)
        self.answer()

    def answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_closes_idle_connections_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_WATCH_S", 0.1)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ClosingHandler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        try:
            assert ServerClient(f"http://127.0.0.1:{made.server_port}", 20.0).post("/work", "work") == {}
        finally:
            made.shutdown()


@pytest.mark.parametrize(("give", "moves"), [(by_workers, "/update_weights"), (by_file, "/collective_rpc")])
def test_the_call_that_moves_a_version_waits_for_its_bytes(
    give: Callable[[HttpControl, str], None], moves: str
) -> None:
    server = LateServer()
    give(HttpControl(server), "0.1")  # type: ignore[arg-type]
    assert {path: nbytes for path, nbytes in server.moved.items() if nbytes} == {moves: NBYTES}


def test_a_server_may_take_as_long_as_its_bytes_at_the_slowest_rate() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ClosingHandler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        try:
            server = ServerClient(f"http://127.0.0.1:{made.server_port}", WaitLimit(0.1, 1.0))
            assert server.post("/work", "work", nbytes=NBYTES) == {}  # 8 s
        finally:
            made.shutdown()


KEY = EnvironmentSecret("SERVERS_KEY", "sk-of-this-server")


def called(url: str, key: EnvironmentSecret | None) -> None:
    server = ServerClient(url, 20.0, key)
    server.wait_up(20.0)
    server.facts()
    server.post_each("/v1/embeddings", "generate", [{}, {}], 2)


def test_each_request_has_the_key_also_where_vllm_asks_for_none() -> None:
    with stand_in_server(key=KEY.text) as server:
        called(server.url, KEY)
    assert {path for path, _ in server.heard} >= {"/health", "/server_info", "/v1/models", "/v1/embeddings"}
    assert {sent for _, sent in server.heard} == {f"Bearer {KEY.text}"}


@pytest.mark.parametrize("guarded", [GUARDED, ("/",)], ids=["vllm", "all"])
@pytest.mark.parametrize(
    ("key", "told"),
    [
        (None, "asks for a key; name the environment variable that has its --api-key"),
        (
            EnvironmentSecret("OTHER_KEY", "sk-of-another"),
            "refuses the key in the environment variable OTHER_KEY; it must be its --api-key",
        ),
    ],
    ids=["none", "another"],
)
def test_a_refused_key_names_the_setting_and_is_not_shown(
    guarded: tuple[str, ...], key: EnvironmentSecret | None, told: str
) -> None:
    with stand_in_server(key=KEY.text, guarded=guarded) as server, pytest.raises(ConfigError) as refused:
        called(server.url, key)
    assert str(refused.value) == f"explorer.key_env: the vLLM server at {server.url} {told} (status 401)"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_that_has_ended_is_reported_with_the_systems_reason(host: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EngineDeathError, match=rf"{host}:{port} disconnected \(.*refused.*\) before it could work"):
        ServerClient(f"http://{host}:{port}", 20.0).post("/work", "work")
