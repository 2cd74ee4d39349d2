"""The queue of checkpoints on their way to a mirror, with its real processes and, at length, a real SFTP server."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.helpers import commit, unreadable
from tests.checkpoint.mirror_places import LIMIT_S, OTHER, OWNER, Events, SftpServer, asked, loaded, marked, quick
from trinity_sync.actors.calls import DeathError
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.contents import LEASES, MANIFEST, step_dir
from trinity_sync.checkpoint.folder.leases import leased
from trinity_sync.checkpoint.folder.owner import MARK
from trinity_sync.checkpoint.mirror import run_mirror
from trinity_sync.checkpoint.mirror.copies import Mirror
from trinity_sync.checkpoint.mirror.run_mirror import MirrorError, RunMirror, Uploads
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.protocol.retention import KeepLast

BIG = {"actor/model.pt": "w" * 300_000, "actor/optim.pt": "o" * 600_000, "actor/config.json": "{}"}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def uploads(here: Path, there: Path, events: Events) -> Iterator[Callable[..., Uploads]]:
    made = []

    def make(place: str = str(there), policies: tuple[Any, ...] = (), **settings: Any) -> Uploads:
        queue = Uploads(
            here,
            place,
            quick(**settings),
            owner=OWNER,
            policies=policies,
            start=None,
            report=events.report,
            on_idle=events.idle.set,
        )
        made.append(queue)
        return queue

    yield make
    for queue in made:
        queue.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SftpServer]:
    server = SftpServer(tmp_path / "server")
    yield server
    server.kill()


def steps(root: Path) -> list[int]:
    return [info.step for info in catalog.scan(root) if info.manifest is not None]


# ---- the queue


def test_what_is_committed_is_copied_in_the_background_and_retention_holds_there(
    uploads: Callable[..., Uploads], here: Path, there: Path, events: Events
) -> None:
    for step in (10, 20):
        commit(here, step)
    queue = uploads(policies=(KeepLast(1),), options={})
    queue.catch_up([10])
    queue.add(20)
    told = events.wait_for("mirror", 2)
    assert [(event["step"], event["state"], event["bytes"]) for event in told] == [
        (10, "copied", 10),
        (20, "copied", 10),
    ]
    assert events.idle.wait(LIMIT_S)
    assert (queue.busy, queue.left()) == (False, {})
    assert steps(there) == [20]
    assert catalog.verify(step_dir(there, 20)).ok
    assert leased(here, now=0.0) == set()


@pytest.mark.all
def test_a_place_that_another_start_takes_over_between_two_copies_is_left_to_it(
    uploads: Callable[..., Uploads], here: Path, there: Path, events: Events
) -> None:
    for step in (10, 20):
        commit(here, step)
    queue = uploads()
    queue.add(10)
    events.wait_for("mirror", 1)
    (there / MARK).write_text(replace(OWNER, session="later").to_text(), encoding="utf-8")
    queue.add(20)
    (fault,) = events.wait_for("fault")
    assert "taken over by" in fault["error"]
    assert steps(there) == [10]


def test_a_queue_says_once_that_it_is_idle_and_only_after_work(
    uploads: Callable[..., Uploads], here: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle: list[None] = []
    told = events.idle.set
    monkeypatch.setattr(events.idle, "set", lambda: (idle.append(None), told()))
    here.mkdir()
    queue = uploads()
    queue.add(10)
    assert events.idle.wait(LIMIT_S)
    assert (len(idle), queue.busy) == (1, False)


def test_a_checkpoint_that_retention_took_first_is_skipped_with_a_word(
    uploads: Callable[..., Uploads], here: Path, events: Events
) -> None:
    here.mkdir()
    queue = uploads()
    queue.add(10)
    (event,) = events.wait_for("mirror")
    assert (event["step"], event["state"]) == (10, "skipped")
    assert "retention deleted it" in event["reason"]
    assert queue.left() == {}


def test_a_copy_that_fails_is_told_each_time_and_put_off(
    uploads: Callable[..., Uploads], here: Path, there: Path, events: Events
) -> None:
    commit(here, 10)
    there.write_text("a file where the folder should be")
    queue = uploads(options={})
    queue.add(10)
    faults = events.wait_for("fault", 2)
    assert {fault["where"] for fault in faults} == {f"copy of step 10 to {there}"}
    assert faults[0]["error"].startswith("try 1 of 2 failed: ")
    assert faults[1]["error"].startswith("given up after 2 tries: ")
    assert events.idle.wait(LIMIT_S)
    assert list(queue.left()) == [10]
    there.unlink()
    commit(here, 20)
    queue.add(20)
    assert [event["step"] for event in events.wait_for("mirror", 2)] == [20, 10], (
        "what was put off had no second chance"
    )


def test_a_checkpoint_that_is_damaged_here_is_tried_once(
    uploads: Callable[..., Uploads], here: Path, there: Path, events: Events
) -> None:
    commit(here, 10)
    (step_dir(here, 10) / "actor/model.pt").write_text("WEIGHTS 10")
    queue = uploads(options={})
    queue.add(10)
    (fault,) = events.wait_for("fault")
    assert "given up: the checkpoint of step 10 is damaged here" in fault["error"]
    assert events.idle.wait(LIMIT_S)
    assert "damaged" in queue.left()[10]
    assert steps(there) == []


@pytest.mark.all
def test_a_checkpoint_that_cannot_be_read_now_is_tried_again(
    uploads: Callable[..., Uploads], here: Path, events: Events
) -> None:
    commit(here, 10)
    manifest = step_dir(here, 10) / MANIFEST
    text = manifest.read_text()
    unreadable(manifest)
    queue = uploads(options={}, tries=1000)
    queue.add(10)
    fault = events.wait_for("fault")[0]
    assert fault["error"].startswith("try 1 of 1000 failed: ")
    assert "cannot be read now" in fault["error"]
    manifest.unlink()
    manifest.write_text(text)
    (event,) = events.wait_for("mirror")
    assert (event["step"], event["state"]) == (10, "copied")
    assert events.idle.wait(LIMIT_S)
    assert queue.left() == {}


def test_the_lease_of_a_copy_is_renewed_in_the_pause_between_its_tries(
    uploads: Callable[..., Uploads], here: Path, there: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_mirror, "_RENEW_S", 0.1)
    commit(here, 10)
    there.write_text("a file where the folder should be")
    uploads(options={}, backoff_s=1000.0).add(10)
    assert "the next is in 1000 s" in events.wait_for("fault")[0]["error"]
    (lease,) = (here / LEASES).glob("*.json")

    def expires() -> float:
        return float(json.loads(lease.read_text())["expires"])

    first, deadline = expires(), time.monotonic() + LIMIT_S
    while expires() == first:
        assert time.monotonic() < deadline, "it was not renewed"
        time.sleep(0.1)


def test_a_copy_that_is_under_way_when_the_run_ends_is_given_up_and_lets_go(
    uploads: Callable[..., Uploads], here: Path, events: Events
) -> None:
    commit(here, 10)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        queue = uploads(f"sftp://tester@127.0.0.1:{silent.getsockname()[1]}/run", tries=8)
        queue.add(10)
        silent.settimeout(LIMIT_S)
        connection, _ = silent.accept()
        with connection:
            assert leased(here, now=0.0) == {(10, 0)}
            queue.stop()
            (fault,) = events.wait_for("fault")
    assert fault["error"] == "given up: the run ended meanwhile"
    assert events.idle.wait(LIMIT_S)
    assert leased(here, now=0.0) == set()
    assert queue.left() == {10: "the run ended meanwhile"}


def test_a_copy_does_not_begin_where_the_mark_of_the_driver_is_gone(
    uploads: Callable[..., Uploads], here: Path, there: Path, events: Events
) -> None:
    commit(here, 10)
    uploads(options={}, marked=True).add(10)
    assert "is the place mounted?" in events.wait_for("fault")[0]["error"]
    assert not there.exists()


# ---- one process per try


def test_a_place_that_does_not_answer_is_broken_off(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"sftp://tester@127.0.0.1:{silent.getsockname()[1]}/run"
        with pytest.raises(MirrorError, match=r"nothing moved for 0\.5 s"):
            asked(place, quick(timeout_s=0.5), Mirror.claim)


def test_the_program_that_asks_for_a_copy_is_not_run_once_more(there: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "print('begun', flush=True)\n"
        "from trinity_sync.checkpoint.mirror.copies import Mirror\n"
        "from trinity_sync.checkpoint.mirror.run_mirror import MirrorSettings, call\n"
        "from trinity_sync.checkpoint.folder.owner import Owner\n"
        f"print(call({str(there)!r}, MirrorSettings(), {OWNER!r}, Mirror.claim))\n"
    )
    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "begun\nNone\n", "")


def test_the_process_of_a_copy_is_small(there: Path) -> None:
    heavy = {"torch", "ray", "verl", "transformers", "pyarrow", "numpy", "hydra", "omegaconf"}
    assert not heavy & asked(str(there), quick(options={}), loaded)


@pytest.mark.all
def test_a_copy_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"sftp://tester@127.0.0.1:{silent.getsockname()[1]}/run"
        asking = (
            "from trinity_sync.checkpoint.mirror.copies import Mirror\n"
            "from trinity_sync.checkpoint.mirror.run_mirror import MirrorSettings, call\n"
            "from trinity_sync.checkpoint.folder.owner import Owner\n"
            f"call({place!r}, MirrorSettings(), {OWNER!r}, Mirror.claim)"
        )
        parent = subprocess.Popen([sys.executable, "-c", asking])
        silent.settimeout(LIMIT_S)
        connection, _ = silent.accept()
        parent.kill()
        parent.wait()
        connection.settimeout(LIMIT_S)
        while connection.recv(1 << 12):
            pass  # the client's greeting; the end of the connection is the end of the child


# ---- the driver's side


def test_a_run_starts_with_a_place_of_its_own_only(here: Path, there: Path) -> None:
    RunMirror(str(there), quick(options={}), OWNER).look(here)
    commit(there, 10)
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror=.* holds checkpoints of another run"):
        RunMirror(str(there), quick(options={}), OWNER).look(here)
    with pytest.raises(ConfigError, match="is the checkpoint folder itself"):
        RunMirror(str(there), quick(), OWNER).look(there)


def test_a_start_puts_the_mark_there_and_a_first_look_writes_nothing(here: Path, there: Path) -> None:
    mirror = RunMirror(str(there), quick(options={}), OWNER)
    mirror.look(here)
    assert not there.exists()
    assert not mirror.settings.marked
    mirror.check(here)
    assert (there / MARK).exists()
    assert mirror.settings.marked


def test_a_place_of_another_run_is_refused_by_the_driver_and_by_the_queue(
    uploads: Callable[..., Uploads], here: Path, there: Path, events: Events
) -> None:
    commit(here, 10)
    marked(str(there), OTHER)
    mirror = RunMirror(str(there), quick(options={}), OWNER)
    with pytest.raises(ConfigError, match=rf"checkpoint\.mirror={there} cannot be used: it belongs to another run"):
        mirror.check(here)
    with pytest.raises(ConfigError, match="belongs to another run"):
        mirror.fetch_newer(here, catalog.newest_good(here))
    queue = uploads(options={})
    queue.add(10)
    (fault,) = events.wait_for("fault")
    assert fault["error"].startswith("given up: it belongs to another run")
    assert events.idle.wait(LIMIT_S)
    assert list(queue.left()) == [10]
    assert [path.name for path in there.iterdir()] == [MARK]


def test_a_resume_marks_a_place_that_its_record_or_its_folder_knows(here: Path, there: Path, tmp_path: Path) -> None:
    manifest = commit(here, 10)
    shutil.copytree(step_dir(here, 10), step_dir(there, 10))
    mirror, back = RunMirror(str(there), quick(options={}), OWNER), tmp_path / "back"
    with pytest.raises(ConfigError, match="holds checkpoints of another run"):
        mirror.fetch_newer(back, None)
    commits = [(10, 0, manifest.digest, manifest.bytes)]
    assert mirror.fetch_newer(back, None, recorded=commits) == 10
    assert (there / MARK).read_text() == OWNER.to_text()
    (there / MARK).unlink()
    assert mirror.fetch_newer(here, catalog.newest_good(here)) is None
    assert (there / MARK).read_text() == OWNER.to_text()


@pytest.mark.all
def test_without_the_mirror_a_resume_goes_on_from_what_is_here_or_not_at_all(here: Path, there: Path) -> None:
    there.write_text("a file where the folder should be")
    said: list[str] = []
    mirror = RunMirror(str(there / "run"), quick(tries=1, options={}, named=True), OWNER, say=said.append)
    with pytest.raises(RunError, match=r"cannot be asked for one.*--from-scratch"):
        mirror.fetch_newer(here, None)
    commit(here, 10)
    best = catalog.newest_good(here)
    assert mirror.fetch_newer(here, best) is None
    assert "resuming from local step 10" in said[-1]
    assert not mirror.settings.marked
    there.unlink()
    assert mirror.fetch_newer(here, best) is None
    assert mirror.settings.marked


@pytest.mark.parametrize("error", [WaitTimeout("it", "answer", 25.0), DeathError("it", "answer")])
def test_of_a_monitor_that_does_not_answer_nothing_more_is_told(there: Path, error: RunError) -> None:
    class Silent:
        def result(self, timeout_s: float) -> dict[int, str]:
            raise error

    monitor: Any = SimpleNamespace(wait_mirrored=lambda limit_s: Silent())
    said: list[str] = []
    faults: list[tuple[str, str]] = []
    RunMirror(str(there), quick(), OWNER, say=said.append).finish(
        monitor, 5.0, lambda where, text: faults.append((where, text))
    )
    unknown = f"not known, for the checkpoint monitor does not answer ({type(error).__name__})"
    assert said == [f"not copied to {there} within 5 s: {unknown}"]
    assert faults == [(f"mirror {there}", f"not copied at the end of the run: {unknown}")]


# ---- a real server


@pytest.mark.all
def test_a_checkpoint_goes_to_an_sftp_server_and_comes_back(
    uploads: Callable[..., Uploads], server: SftpServer, here: Path, events: Events, tmp_path: Path
) -> None:
    server.start()
    for step in (10, 20, 30):
        commit(here, step, BIG)
    queue = uploads(server.url, policies=(KeepLast(2),))
    for step in (10, 20, 30):
        queue.add(step)
    events.wait_for("mirror", 3)
    assert events.idle.wait(LIMIT_S)
    assert events.of("fault") == []
    assert steps(server.folder / "run") == [20, 30]
    assert all(catalog.verify(step_dir(server.folder / "run", step)).ok for step in (20, 30))
    (server.folder / "run/global_step_30/actor/model.pt").write_text("W" * 300_000)
    said: list[str] = []
    seen: list[tuple[int, int]] = []
    back = RunMirror(server.url, quick(), OWNER, say=said.append)
    assert back.fetch_newer(tmp_path / "back", None, progress=lambda *amount: seen.append(amount)) == 20
    (total,) = {total for _, total in seen}
    assert seen[-1] == (total, total)
    assert any("copy of step 30 is skipped" in text for text in said)
    assert catalog.verify(step_dir(tmp_path / "back", 20)).ok


@pytest.mark.all
@pytest.mark.parametrize("hold_after", [0, 100, 100_000, 500_000, 899_000])
def test_a_server_that_dies_in_the_middle_and_comes_back_gets_the_rest(
    uploads: Callable[..., Uploads], server: SftpServer, here: Path, events: Events, hold_after: int
) -> None:
    server.start(hold_after)
    commit(here, 10, BIG)
    uploads(server.url, tries=50, backoff_s=0.1).add(10)
    server.wait_until_holding()
    assert leased(here, now=0.0) == {(10, 0)}
    server.kill()
    assert steps(server.folder / "run") == []
    first = events.wait_for("fault")[0]
    assert first["where"] == f"copy of step 10 to {server.url}"
    assert first["error"].startswith("try 1 of 50 failed: ")
    server.start()
    (event,) = events.wait_for("mirror")
    assert event["state"] == "copied"
    assert catalog.verify(step_dir(server.folder / "run", 10)).ok
    assert leased(here, now=0.0) == set()


@pytest.mark.all
def test_a_server_that_is_gone_for_good_leaves_nothing_torn(
    uploads: Callable[..., Uploads], server: SftpServer, here: Path, events: Events, tmp_path: Path
) -> None:
    server.start()
    commit(here, 10, BIG)
    queue = uploads(server.url, tries=2)
    queue.add(10)
    events.wait_for("mirror")
    assert events.idle.wait(LIMIT_S)
    events.idle.clear()
    server.kill()
    server.start(hold_after=400_000)
    commit(here, 20, BIG)
    queue.add(20)
    server.wait_until_holding()
    server.kill()
    events.wait_for("fault", 2)
    assert events.idle.wait(LIMIT_S)
    assert list(queue.left()) == [20]
    assert steps(server.folder / "run") == [10]
    server.start()
    assert RunMirror(server.url, quick(), OWNER).fetch_newer(tmp_path / "back", None) == 10
