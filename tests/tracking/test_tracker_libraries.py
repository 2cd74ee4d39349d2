"""The trackers with the libraries that they are for: a run and its resume, read back; without a network; and servers
that do not answer.
"""

from __future__ import annotations

import json
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.tracking import pretend
from trinity_sync.errors import ConfigError
from trinity_sync.tracking.mlflow import MlflowTracker, _database
from trinity_sync.tracking.tracker_feed import Trackers
from trinity_sync.tracking.trackers import TrackedRun, Tracker

LIMIT_S = 120.0
CONFIG = {"seed": 1, "trainer": {"steps": 4, "betas": [0.9, 0.95], "_target_": "a.B"}, "task": {"path": None}}


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def sample_line(step: int, exact: float | None) -> dict[str, object]:
    """A line of samples.jsonl."""
    numbers = {"for_step": step, "prompt": 0, "sample": 0, "reward": 0.5, "exact": exact, "advantage": -0.25}
    return numbers | {
        "attempt": 0,
        "step": step,
        "text": "12=",
        "response": f"a|b\nafter {step}",
        "finished": True,
        "tokens": 3,
        "version": step - 1,
        "spans": [[0, 3, step - 1]],
    }


def run_and_resume(folder: Path, tracker: Any, options: dict[str, Any]) -> None:
    """Three steps, interrupted; from the second on again, to the fourth."""
    for attempt, steps, resumed_from, status in ((0, (1, 2, 3), None, "interrupted"), (1, (3, 4), 2, "completed")):
        config = {**CONFIG, "seed": 1 + attempt}
        run = TrackedRun(folder=folder, name="copy", config=config, attempt=attempt, resumed_from=resumed_from)
        trackers = Trackers([tracker(**options, timeout_s=LIMIT_S)], run)
        told: list[str] = []
        trackers.report_faults(lambda where, error: told.append(error))  # noqa: B023
        for step in steps:
            trackers.log(step, {"reward/mean": 0.1 * step + attempt, "odd@name": 1.0})
        trackers.samples(steps[-1], [sample_line(steps[-1], exact) for exact in (1.0, None)])
        trackers.close(status)  # type: ignore[arg-type]
        assert told == []


@pytest.mark.parametrize("name", ["a?b", "a%20b", "a%3Fb", "a#b c", "plain"])
def test_the_url_of_mlflow_s_database_leads_to_the_folder_of_the_run(name: str, tmp_path: Path) -> None:
    engine = pytest.importorskip("sqlalchemy")
    path = tmp_path / name / "mlflow.db"
    path.parent.mkdir()
    with engine.create_engine(_database(str(path))).connect() as connection:
        connection.execute(engine.text("CREATE TABLE it (one INTEGER)"))
    assert path.is_file()


@pytest.mark.all
@pytest.mark.parametrize("name", ["run", "a?b%20c"])
def test_mlflow_has_one_run_with_all_points_its_config_and_its_end(tmp_path: Path, name: str) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    tmp_path /= name
    tmp_path.mkdir()
    run_and_resume(tmp_path, pretend.LonelyMlflowTracker, {"experiment": "digits"})
    with closing(sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")) as database:
        read = database.execute
        [run] = read("SELECT run_uuid, name, status FROM runs").fetchall()
        assert run == ((tmp_path / "mlflow" / "run_id").read_text().strip(), "copy", "FINISHED")
        assert ("digits",) in read("SELECT name FROM experiments").fetchall()
        points = read("SELECT step, value FROM metrics WHERE key = 'reward/mean' ORDER BY timestamp, step").fetchall()
        assert points == [(step, pytest.approx(value)) for step, value in zip((1, 2, 3, 3, 4), VALUES, strict=True)]
        assert read("SELECT count(*) FROM metrics WHERE key = 'odd_name'").fetchone() == (5,)
        params = dict(read("SELECT key, value FROM params").fetchall())
        assert params == {
            "seed": "1",
            "trainer.steps": "4",
            "trainer.betas": "[0.9, 0.95]",
            "trainer._target_": "a.B",
            "task.path": "null",
        }
        assert dict(read("SELECT key, value FROM tags").fetchall())["attempt"] == "1"
    [table] = (tmp_path / "mlflow" / "artifacts").rglob("samples.json")
    kept = json.loads(table.read_text())
    rows = [dict(zip(kept["columns"], row, strict=True)) for row in kept["data"]]
    assert [row["response"] for row in rows] == ["a|b\nafter 3"] * 2 + ["a|b\nafter 4"] * 2
    assert [row["exact"] for row in rows] == [1.0, None] * 2
    assert rows[0]["spans"] == "[[0, 3, 2]]"


VALUES = (0.1, 0.2, 0.3, 1.3, 1.4)


def test_trackio_has_one_run_with_all_points_and_does_not_ask_who_is_logged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("HF_TOKEN", "made up")
    run_and_resume(tmp_path, pretend.LonelyTrackioTracker, {"project": "digits"})
    with closing(sqlite3.connect(tmp_path / "trackio" / "digits.db")) as database:
        rows = database.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({run for run, _, _ in rows}) == 1
    points = [(step, json.loads(row)) for _, step, row in rows]
    tables = [(step, point["samples"]) for step, point in points if "samples" in point]
    assert [step for step, _ in tables] == [3, 4]
    assert "after 4" in json.dumps(tables[1][1])
    curves = [(step, point["reward/mean"]) for step, point in points if "samples" not in point]
    assert [step for step, _ in curves] == [1, 2, 3, 3, 4]
    assert [value for _, value in curves] == [pytest.approx(value) for value in VALUES]


def test_swanlab_keeps_all_points_for_its_site_under_one_id(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    run_and_resume(tmp_path, pretend.LonelySwanlabTracker, {"project": "digits"})
    kept = (tmp_path / "swanlab" / "run_id").read_text().strip()
    files = sorted((tmp_path / "swanlab").glob("run-*/run-*.swanlab"))
    assert {file.stem for file in files} == {f"run-{kept}"}
    assert sum(file.read_bytes().count(b"odd@name") for file in files) >= 5
    texts = [text.read_text() for text in (tmp_path / "swanlab").rglob("*.txt") if "after" in text.read_text()]
    assert sorted(text.count("a\\|b<br>after 4") for text in texts) == [0, 2]


@pytest.mark.all
def test_wandb_keeps_all_points_for_its_site_under_one_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from trinity_sync.tracking.wandb import WandbTracker

    run_and_resume(tmp_path, WandbTracker, {"project": "digits", "mode": "offline"})
    kept = (tmp_path / "wandb" / "run_id").read_text().strip()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [file.stem for file in files] == [f"run-{kept}"] * 2
    tables = [json.loads(table.read_text()) for table in (tmp_path / "wandb").rglob("*.table.json")]
    assert sorted(table["data"][1][2] for table in tables) == ["a|b\nafter 3", "a|b\nafter 4"]


# ---- servers


@contextmanager
def silent_server() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def refused(tracker: Tracker, folder: Path) -> str:
    began = time.monotonic()
    with pytest.raises(ConfigError) as found:
        Trackers([tracker], TrackedRun(folder=folder, name="copy"))
    assert time.monotonic() - began < LIMIT_S
    return str(found.value)


@pytest.mark.all
def test_an_mlflow_server_that_is_not_there_refuses_the_run_by_its_address(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    address = f"http://127.0.0.1:{unused_port()}"
    said = refused(MlflowTracker("digits", f"{address}/", timeout_s=LIMIT_S), tmp_path)
    assert said.startswith(f"tracker=mlflow cannot use {address}/: ")
    assert said.endswith("; see tracker.mlflow.uri")


@pytest.mark.all
def test_an_mlflow_server_that_never_answers_refuses_the_run_by_its_address(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    with silent_server() as port:
        said = refused(MlflowTracker("digits", f"http://127.0.0.1:{port}", timeout_s=15.0), tmp_path)
    assert f"127.0.0.1:{port}" in said or "did not start within 15 s" in said


class Stub(BaseHTTPRequestHandler):
    """Stands for MLflow's server, which is no part of mlflow-skinny: as much of it as a run asks for, until it is told
    to stop answering.
    """

    protocol_version = "HTTP/1.1"
    stopped = threading.Event()
    released = threading.Event()
    points: list[int] = []  # noqa: RUF012 - emptied by `mlflow_server`

    def do_GET(self) -> None:
        info = {"run_id": "r1", "run_uuid": "r1", "experiment_id": "1", "status": "RUNNING"}
        if "experiments" in self.path:
            self._answer({"experiment": {"experiment_id": "1", "name": "digits"}})
        elif "runs/get" in self.path:
            self._answer({"run": {"info": info, "data": {}}})
        else:
            self._answer({})

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path.endswith("log-batch"):
            if self.stopped.is_set():
                self.released.wait(LIMIT_S)
            self.points.extend(int(metric["step"]) for metric in sent.get("metrics", ()))
        info = {"run_id": "r1", "run_uuid": "r1", "experiment_id": "1", "status": "RUNNING"}
        self._answer({"run": {"info": info, "data": {}}, "run_info": info})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def mlflow_server() -> Iterator[str]:
    Stub.stopped.clear()
    Stub.released.clear()
    Stub.points.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        Stub.released.set()
        server.shutdown()
        server.server_close()


@pytest.mark.all
def test_an_mlflow_server_that_stops_answering_holds_up_neither_the_steps_nor_the_end(
    tmp_path: Path, mlflow_server: str
) -> None:
    pytest.importorskip("mlflow")
    tracker = MlflowTracker("digits", mlflow_server, timeout_s=LIMIT_S)
    trackers = Trackers([tracker], TrackedRun(folder=tmp_path, name="copy"))
    told: list[tuple[str, str]] = []
    trackers.report_faults(lambda where, error: told.append((where, error)))
    trackers.log(1, {"loss": 0.5})
    deadline = time.monotonic() + LIMIT_S
    while Stub.points != [1]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    trackers._feeds[0]._limit_s = 3.0
    Stub.stopped.set()
    began = time.monotonic()
    for step in range(2, 100):
        trackers.log(step, {"loss": 0.5})
    assert time.monotonic() - began < 3.0
    trackers.close("completed")
    assert time.monotonic() - began < 20.0
    [(where, error)] = told
    assert where == "tracker mlflow"
    assert "was not done 3 s after the end of the run, 97 calls behind" in error
