"""Ray's life: what `cluster` leaves behind, which is nothing, and what it says when there is no Ray to be had."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray import cluster_utils
from ray.exceptions import AuthenticationError

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.hardware import RAYS_HOOK, for_workers, own_modules_found
from trinity_sync.host.interrupts import ENDING
from trinity_sync.launch import cluster as module
from trinity_sync.launch import local_ray, node_watch
from trinity_sync.launch.cluster import Cluster, cluster

MARK = "TRINITY_TEST_MARK"
KILLED, LIVING = (f"trinity-ray-{os.geteuid()}-{state}" for state in ("killed", "living"))


def settings(**changes: Any) -> Any:
    usual = {
        "address": None,
        "num_cpus": None,
        "object_store_mb": 80,
        "start_timeout_s": 120.0,
        "temp_dir": None,
    }
    return SimpleNamespace(**(usual | changes))


def marked(mark: str) -> list[psutil.Process]:
    """Processes that were started with the mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                found.append(psutil.Process(int(entry.name)))
        except (OSError, psutil.NoSuchProcess):
            continue
    return found


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A short path: the names of Ray's sockets may have 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="tc-", dir="/tmp"))
    yield folder
    remove_when_left(folder)


def remove_when_left(folder: Path) -> None:
    """Remove a folder for Ray's sessions. What a killed raylet had started writes in it until it ends by itself: it is
    killed.
    """
    deadline = time.monotonic() + 60.0
    while left := [process for process in psutil.process_iter() if names(process, folder) and lives(process)]:
        assert time.monotonic() < deadline, left
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.1)
    shutil.rmtree(folder)


def names(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(str(folder) in argument for argument in process.cmdline())
    except psutil.Error:
        return False


@dataclass
class Seen:
    """What was there while a local cluster was up, and what after it."""

    inside: Cluster
    cpus: float
    mark: str
    mark_of_an_actor: str | None
    folders: list[Path]
    processes: list[psutil.Process]
    surviving: list[psutil.Process]
    folders_after: list[Path]
    environment_before: dict[str, str]
    environment_after: dict[str, str]
    path_of_an_actor: list[str]
    variables_of_an_actor: list[str]
    ends_of_its_programs: list[int]
    told: list[str]


@pytest.fixture(scope="module")
def seen(root: Path) -> Iterator[Seen]:
    """One life of a local cluster, where a killed run left a folder and a living one has one. An actor hangs, and has a
    process of its own that takes no notice of its end.
    """
    mark = uuid.uuid4().hex
    (root / KILLED / "session").mkdir(parents=True)
    (root / KILLED / "owner.lock").touch()
    (root / LIVING).mkdir()
    with (root / LIVING / "owner.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        patch.setattr(local_ray, "_PROCESS_END_S", 2.0)
        told: list[str] = []
        patch.setattr(module.story, "info", lambda text, *values: told.append(text % values))
        before = dict(os.environ)
        with (
            own_modules_found(root / "started"),
            cluster(settings(temp_dir=str(root)), namespace="run-1", cpus=3, env={MARK: mark}) as inside,
        ):

            @ray.remote(num_cpus=0)
            class Actor:
                def pid(self) -> int:
                    return os.getpid()

                def look(self) -> tuple[str | None, list[str], list[str], list[int]]:
                    subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    return os.environ.get(MARK), sys.path, list(os.environ), list(map(self.end_of_a_program, ENDING))

                def end_of_a_program(self, signum: int) -> int:
                    with subprocess.Popen(["sleep", "20"]) as program:
                        program.send_signal(signum)
                    return program.returncode

            actor = Actor.remote()
            pid = ray.get(actor.pid.remote(), timeout=60)
            for signum in ENDING:
                os.kill(pid, signum)
            mark_of_an_actor, path, variables, ends = ray.get(actor.look.remote(), timeout=100)
            os.kill(pid, signal.SIGSTOP)
            facts: dict[str, Any] = {
                "inside": inside,
                "told": told,
                "mark": mark,
                "cpus": ray.cluster_resources()["CPU"],
                "mark_of_an_actor": mark_of_an_actor,
                "folders": sorted(root.iterdir()),
                "processes": marked(mark),
                "path_of_an_actor": path,
                "variables_of_an_actor": variables,
                "ends_of_its_programs": ends,
            }
        surviving = [process for process in facts["processes"] if lives(process)]
        yield Seen(
            **facts,
            surviving=surviving,
            folders_after=sorted(root.iterdir()),
            environment_before=before,
            environment_after=dict(os.environ),
        )


def join(address: str) -> str:
    """Join a cluster from a process of its own; what that process says."""
    program = f"""
from types import SimpleNamespace
import ray
from trinity_sync.launch.cluster import cluster
with cluster(SimpleNamespace(address={address!r}), namespace="run-2", cpus=1, env={{"{MARK}": "joined"}}) as joined:
    task = ray.remote(num_cpus=0)(lambda: __import__("os").environ["{MARK}"])
    print(joined.namespace, ray.get(task.remote(), timeout=60), ray.get_runtime_context().gcs_address)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    return done.stdout.strip() or done.stderr


def test_a_local_cluster_has_the_namespace_and_the_room_that_the_run_needs(seen: Seen) -> None:
    assert (seen.inside.namespace, seen.inside.gpus) == ("run-1", 0)
    assert seen.cpus == max(3, os.cpu_count() or 1)


def test_the_log_tells_which_node_has_which_name(seen: Seen) -> None:
    assert any(re.fullmatch(r"node [0-9a-f]{56} is \S+ \([0-9.]+\)", text) for text in seen.told)


def test_processes_of_the_run_have_its_environment(seen: Seen) -> None:
    assert seen.mark_of_an_actor == seen.mark


def test_processes_of_the_run_look_for_modules_in_the_folder_of_its_start_last_of_all(seen: Seen, root: Path) -> None:
    assert seen.path_of_an_actor.index(str(root / "started")) == len(seen.path_of_an_actor) - 1


def test_what_says_so_is_not_inherited_by_their_programs(seen: Seen) -> None:
    assert not {RAYS_HOOK, *for_workers()}.intersection(seen.variables_of_an_actor)


def test_an_actor_leaves_signals_to_the_driver_and_its_programs_do_not(seen: Seen) -> None:
    assert seen.ends_of_its_programs == [-signum for signum in ENDING]


def test_nothing_of_it_is_left_afterwards(seen: Seen, root: Path) -> None:
    assert seen.processes
    assert seen.surviving == []
    assert not ray.is_initialized()
    assert len(seen.folders) == 2
    assert seen.folders_after == [root / LIVING]


def test_the_drivers_environment_is_as_it_was(seen: Seen) -> None:
    assert seen.environment_after == {**seen.environment_before, "RAY_AUTH_MODE": "token"}


@pytest.mark.all
def test_another_ray_of_the_program_takes_it_for_its_own_afterwards(seen: Seen) -> None:
    """What was one Ray's alone would keep it out: Ray holds on to its way of authentication for a program's life."""
    other = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        ray.init(address=other.address, log_to_driver=False, logging_level="ERROR")

        @ray.remote(num_cpus=0)
        class Actor:
            def look(self) -> str:
                return "here"

        assert ray.get(Actor.remote().look.remote(), timeout=60) == "here"
    finally:
        ray.shutdown()
        other.shutdown()


def test_a_folder_that_a_killed_run_left_is_removed_and_that_of_a_living_one_is_not(seen: Seen, root: Path) -> None:
    assert root / KILLED not in seen.folders
    assert root / LIVING in seen.folders


@pytest.mark.all
def test_a_cluster_that_runs_already_is_joined_and_left_running(root: Path) -> None:
    with cluster(settings(temp_dir=str(root)), namespace="run-1", cpus=1, env={}):
        address = ray.get_runtime_context().gcs_address
        assert join(address).split() == ["run-2", "joined", address]
        assert ray.cluster_resources()["CPU"] > 0


def test_a_folder_that_another_run_took_for_a_stale_one_is_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making its folder and locking it a run has nothing that shows that it lives."""
    make = tempfile.mkdtemp
    made: list[str] = []

    def make_and_lose_the_first(**place: Any) -> str:
        made.append(make(**place))
        if len(made) == 1:
            shutil.rmtree(made[0])
        return made[-1]

    monkeypatch.setattr(local_ray.tempfile, "mkdtemp", make_and_lose_the_first)
    with local_ray._own_folder(str(root)) as folder:
        assert str(folder) == made[1]
        assert (folder / "owner.lock").exists()
    assert not folder.exists()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("pattern", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "no-such-host.invalid:{}", "rubbish"])
def test_an_address_without_a_cluster_is_a_mistake_in_the_configuration(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = dict(os.environ)
    address = pattern.format(closed_port())
    joining = cluster(settings(address=address), namespace="run-3", cpus=1, env={MARK: "x"})
    with pytest.raises(ConfigError, match=rf"^cluster\.address={address}: "), joining:
        pass
    assert not ray.is_initialized()
    assert dict(os.environ) == before


@pytest.mark.parametrize("how", ["none was found", "a wrong one"])
def test_a_cluster_that_refuses_the_token_is_not_called_a_missing_one(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        """As Ray 2.60 tells of a token."""
        if how == "none was found":
            raise AuthenticationError("no authentication token was found")
        try:
            raise RuntimeError(
                "Failed to connect to GCS. Last connection error: ... AuthenticationError: InvalidAuthToken"
            )
        except RuntimeError as error:
            raise ConnectionError("Failed to connect to Ray cluster") from error

    monkeypatch.setattr(ray, "init", init)
    joining = cluster(settings(address="auto"), namespace="run-3", cpus=1, env={})
    with (
        pytest.raises(ConfigError, match=r"^cluster\.address=auto: .* token; set RAY_AUTH_MODE=token, .*PATH to"),
        joining,
    ):
        pass


def test_a_local_cluster_that_cannot_start_is_told_and_leaves_nothing(root: Path) -> None:
    deep = root / ("d" * 100)
    deep.mkdir()
    before = dict(os.environ)
    starting = cluster(settings(temp_dir=str(deep)), namespace="run-4", cpus=1, env={MARK: "x"})
    with pytest.raises(RunError, match=r"^Ray did not start: .*107"), starting:
        pass
    assert list(deep.iterdir()) == []
    assert not ray.is_initialized()
    assert dict(os.environ) == {**before, "RAY_AUTH_MODE": "token"}


def test_a_folder_for_ray_is_made_or_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_ray._own_folder(str(root / "new" / "one")) as folder:
        assert folder.parent == root / "new" / "one"
    shutil.rmtree(root / "new")
    (root / "file").touch()
    starting = cluster(settings(temp_dir=str(root / "file")), namespace="run-5", cpus=1, env={})
    with (
        pytest.raises(ConfigError, match=rf"^cluster\.temp_dir={root}/file: no folder can be made there \(.+\); "),
        starting,
    ):
        pass
    (root / "file").unlink()


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_program_that_is_connected_already_stays_connected(
    root: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.delattr(ray, "init")
    monkeypatch.delattr(ray, "shutdown")
    refusal = r"^this program is connected to Ray already, .* ray\.shutdown\(\) first$"
    starting = cluster(settings(address=address, temp_dir=str(root)), namespace="run-5", cpus=1, env={})
    with pytest.raises(RunError, match=refusal), starting:
        pass
    with pytest.raises(RunError, match=refusal):
        local_ray.start_ray(1.0)
    with pytest.raises(RunError, match=refusal):
        module.has_gpus("auto")


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_sigterm_while_ray_starts_interrupts(
    root: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    def init(**_: Any) -> None:
        """As `ray.init` does first of all."""
        signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(signum))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    starting = cluster(settings(address=address, temp_dir=str(root)), namespace="run-5", cpus=1, env={})
    with pytest.raises(KeyboardInterrupt), starting:
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def struck(root: Path, blow: str, work: str, victim: str = "raylet") -> subprocess.CompletedProcess[str]:
    """A program of whose Ray a process gets a signal, in a process of its own: what came of it."""
    program = f"""
import signal
from types import SimpleNamespace
import psutil, ray
from trinity_sync.host.hardware import for_workers, own_modules_found
from trinity_sync.launch import cluster as module
from trinity_sync.launch import node_watch, local_ray
local_ray._SHUTDOWN_S, node_watch._ASK_S, node_watch._END_S = 1.0, 0.2, 1.0
settings = SimpleNamespace(
    address=None, num_cpus=None, object_store_mb=80, start_timeout_s=120.0, temp_dir={str(root)!r}
)
with module.cluster(settings, namespace="run-1", cpus=1, env={{}}, lost=lambda error: print("recorded:", error)):
    victim = next(process for process in psutil.Process().children() if process.name() == {victim!r})
    victim.send_signal(signal.{blow})
    {work}
print("the end")
"""
    quick = {"initial_delay_ms": "0", "timeout_ms": "500", "period_ms": "200", "failure_threshold": "2"}
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {MARK: mark} | {f"RAY_health_check_{name}": value for name, value in quick.items()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    deadline = time.monotonic() + 60.0
    while left := [process for process in marked(mark) if lives(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    return done


@pytest.mark.parametrize(
    ("victim", "work", "why"),
    [
        ("raylet", 'ray.put(b"x" * 10_000_000)', "Ray has given up this node"),
        pytest.param(
            "gcs_server", "while True: ray.nodes()", "Ray's GCS has not answered for 2.4 s", marks=pytest.mark.all
        ),
    ],
)
def test_what_stands_still_of_ray_ends_the_run_and_is_named_and_recorded(
    root: Path, victim: str, work: str, why: str
) -> None:
    done = struck(root, "SIGSTOP", work, victim)
    assert done.returncode == 1
    [said] = re.findall("^error: (.*)", done.stderr, re.MULTILINE)
    assert said.startswith(why)
    assert f"recorded: {said}\n" in done.stdout


def test_who_ends_the_program_at_once_ends_its_ray_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Any] = []
    ended: list[Path | None] = []
    node = SimpleNamespace(get_node_id=lambda: "a node")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: node)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(module.local_ray, "local_ray", lambda *given: nullcontext(root))
    monkeypatch.setattr(module, "raylet_watched", lambda *given, ours: nullcontext(threading.Event()))
    for name in ("ended_with_its_node", "last_words"):
        monkeypatch.setattr(module, name, lambda end: nullcontext(ends.append(end)))
    monkeypatch.setattr(module.local_ray, "give_up", ended.append)
    with cluster(settings(), namespace="run-6", cpus=1, env={}):
        of_a_node, of_an_interrupt = ends
        of_a_node("the node is gone")
        assert ended == [root]
        of_an_interrupt()
        assert ended == [root, root]


@pytest.mark.all
@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_what_stands_still_of_ray_does_not_keep_a_run_from_its_end(root: Path, victim: str) -> None:
    done = struck(root, "SIGSTOP", "pass", victim)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


@pytest.mark.parametrize(
    "work", ['ray.put(b"x" * 10_000_000)', pytest.param("import time; time.sleep(100.0)", marks=pytest.mark.all)]
)
@pytest.mark.all
def test_a_raylet_that_dies_ends_the_run_and_is_named(root: Path, work: str) -> None:
    """Whether Ray ends the program, at its next call, or Ray gives up the node."""
    done = struck(root, "SIGKILL", work)
    assert done.returncode == 1
    said = re.findall("^error: .*", done.stderr, re.MULTILINE)
    assert re.match(r"error: Ray's raylet on this node \(pid \d+\) has died and the run ends", said[0])


@pytest.mark.all
def test_the_end_of_a_raylet_at_the_end_of_a_run_is_not_called_its_death(root: Path) -> None:
    done = struck(root, "SIGCONT", "pass")
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
    assert "error" not in done.stderr


@pytest.mark.timeout(120)
def test_a_raylet_that_dies_while_ray_starts_is_named(root: Path) -> None:
    """Ray ends its program, or starts a raylet again after a while: which of them depends on the moment."""
    program = f"""
import threading, time
from types import SimpleNamespace
import psutil
from trinity_sync.host.hardware import for_workers, own_modules_found
from trinity_sync.launch import cluster as module

def kill():
    while True:
        for process in psutil.Process().children():
            if process.name() == "raylet" and any("raylet_socket_name" in one for one in process.cmdline()):
                time.sleep(0.5)
                process.kill()
                return
        time.sleep(0.01)

threading.Thread(target=kill, daemon=True).start()
settings = SimpleNamespace(
    address=None, num_cpus=None, object_store_mb=80, start_timeout_s=120.0, temp_dir={str(root)!r}
)
with module.cluster(settings, namespace="run-1", cpus=1, env={{}}):
    pass
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        named = r"error: Ray's raylet on this node \(pid \d+\) has died while Ray was starting\n"
        assert any(re.fullmatch(named, line) for line in process.stderr)
    finally:
        for left in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            with suppress(psutil.NoSuchProcess):  # they end with their parents
                left.kill()
        process.communicate()


def test_without_descriptors_of_processes_a_raylet_is_not_watched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with node_watch.starting_raylets_watched("nowhere"), node_watch.raylet_watched("none", ours=False):
        pass
    assert capsys.readouterr().err == ""


def test_a_raylet_of_ours_that_is_gone_already_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with node_watch.raylet_watched("none", ours=True):
        pass
    assert "Ray's raylet on this node has died" in capsys.readouterr().err
