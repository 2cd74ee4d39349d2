"""`trinity-sync follow`: what it prints, its exit codes, and what it tells an engine."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoint.stores import PretendRun, calls_here
from trinity_sync.checkpoint.folder.catalog import bytes_in
from trinity_sync.checkpoint.mirror import follower
from trinity_sync.checkpoint.mirror.copies import Storage
from trinity_sync.cli import main as cli
from trinity_sync.cli import weights_commands
from trinity_sync.integrations.vllm.server import ServerClient

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """Work at the store is done in this process, and folders are not locked until its end."""
    with calls_here() as patch:
        patch.setattr(follower, "try_lock", lambda descriptor: True)
        yield


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, here: None) -> Path:
    folder = tmp_path_factory.mktemp("template")
    PretendRun(folder / "run", str(folder / "store")).publish_all(1, 2)
    return folder / "store"


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "store"))


class Engine(http.server.ThreadingHTTPServer):
    """A server that speaks what SGLang and vLLM answer to, and notes it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []
        self.refuses = ""  # this path

        class Handler(http.server.BaseHTTPRequestHandler):
            server: Engine

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.server.asked.append((self.path, json.loads(body or b"null")))
                refused = self.path == self.server.refuses
                self._answer(400 if refused else 200, {"success": not refused, "message": "no such model"})

            def do_GET(self) -> None:
                self._answer(200, {})

            def _answer(self, status: int, body: object) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def follow(store: Path, *arguments: object) -> int:
    return cli.main(["follow", str(store), "--once", *map(str, arguments)])


def folder_of(into: Path) -> str:
    """The folder of the version, by its own name: the link soon leads to another one."""
    return str(into / (into / "current").readlink())


def test_sglang_is_told_of_the_folder_after_the_link_has_moved(
    store: Path, tmp_path: Path, engine: Engine, capsys: Capture
) -> None:
    assert follow(store, "--into", tmp_path / "into", "--notify", engine.url) == 0
    assert engine.asked == [("/update_weights_from_disk", {"model_path": folder_of(tmp_path / "into")})]
    out, err = capsys.readouterr()
    assert "version 2 in" in out
    assert f"version 2 loaded by {engine.url}" in out
    assert err == ""


def test_the_limit_of_a_load_grows_with_the_bytes_of_the_version(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = list[float]()

    def post(server: ServerClient, *given: object) -> dict[str, object]:
        limits.append(server.timeout_s)
        return {}

    monkeypatch.setattr(ServerClient, "post", post)
    monkeypatch.setattr(weights_commands, "_LOAD_RATE", 100.0)
    assert follow(store, "--into", tmp_path / "into", "--notify", "http://127.0.0.1:1") == 0
    assert limits == [600 + bytes_in(Path(folder_of(tmp_path / "into"))) / 100]


def test_vllm_is_paused_while_it_loads(store: Path, tmp_path: Path, engine: Engine) -> None:
    assert follow(store, "--into", tmp_path / "into", "--notify", engine.url, "--engine", "vllm") == 0
    load = {"method": "reload_weights", "kwargs": {"weights_path": folder_of(tmp_path / "into")}}
    assert engine.asked == [("/pause?mode=wait", None), ("/collective_rpc", load), ("/resume", None)]


def test_an_engine_that_refuses_is_reported_and_asked_again(
    store: Path, tmp_path: Path, engine: Engine, capsys: Capture
) -> None:
    engine.refuses = "/update_weights_from_disk"
    arguments = ("--into", tmp_path / "into", "--notify", engine.url)
    assert follow(store, *arguments) == 1
    assert "failed to load version 2: " in capsys.readouterr().err
    assert (tmp_path / "into" / "current" / "config.json").is_file()
    engine.refuses = ""
    assert follow(store, *arguments) == 0
    assert len(engine.asked) == 2


def test_an_engine_that_comes_later_loads_the_version_at_the_next_look(
    store: Path, tmp_path: Path, engine: Engine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.refuses = "/update_weights_from_disk"
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            engine.refuses = ""
        if len(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(weights_commands, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    command = ["follow", str(store), "--into", str(tmp_path / "into"), "--notify", engine.url]
    assert cli.main(command) == 130
    assert len(engine.asked) == 3
    out, err = capsys.readouterr()
    assert err.count("it is asked again at each look") == 1
    assert out.count(f"version 2 loaded by {engine.url}") == 1


def test_an_engine_that_is_away_does_not_hinder_the_folder(store: Path, tmp_path: Path, capsys: Capture) -> None:
    with Engine() as gone:
        url = gone.url
    assert follow(store, "--into", tmp_path / "into", "--notify", url) == 1
    assert f"the SGLang server at {url}" in capsys.readouterr().err
    assert (tmp_path / "into" / "current" / "config.json").is_file()


def test_what_had_arrived_when_the_connection_broke_is_not_fetched_again(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = list[str]()

    def get(storage: Storage, name: str, path: Path, of: Callable[..., None] = Storage.get) -> None:
        fetched.append(name)
        if len(fetched) == 4:
            raise ConnectionResetError("the connection was reset")
        of(storage, name, path)

    monkeypatch.setattr(Storage, "get", get)
    assert follow(store, "--into", tmp_path / "into") == 1
    begun = fetched.copy()
    assert follow(store, "--into", tmp_path / "into") == 0
    again = set(begun) & set(fetched[len(begun) :])
    assert 1 <= len(again) <= 2, "the file at which it broke, and perhaps one beside it"


def test_a_store_without_a_version_is_told(tmp_path: Path, capsys: Capture) -> None:
    assert follow(tmp_path / "nothing", "--into", tmp_path / "into") == 1
    assert "there is no version yet; there is none here yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["s4://bucket/run", "--into", "into"], "URL is s4://bucket/run, but fsspec knows no s4://"),
        (["store", "--into", "taken"], "/taken is not empty"),
        (["store", "--into", "into", "--notify", "localhost:30000"], "--notify localhost:30000 is no address"),
        (["store", "--into", "into", "--every", "0"], "'0' is not a number of seconds"),
        (["store"], "--into"),
    ],
)
def test_a_wrong_command_line_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, arguments: list[str], right: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert cli.main(["follow", *arguments]) == 2
    assert right in capsys.readouterr().err
    assert not (tmp_path / "into").exists()
