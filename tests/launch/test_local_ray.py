"""A Ray of the program's own: kept for the next run of a sweep, without anything of the one before; and its forks."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._private.node import Node
from ray.util.placement_group import placement_group

from tests.launch.test_cluster import lives, marked, remove_when_left, settings
from tests.patience import until
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.interrupts import ENDING
from trinity_sync.host.process import driver_lifeline
from trinity_sync.launch import local_ray, worker_fork
from trinity_sync.launch.cluster import cluster
from trinity_sync.launch.local_ray import ray_kept

MARK = "TRINITY_TEST_MARK"


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="to-", dir="/tmp"))
    yield folder
    remove_when_left(folder)


SETTINGS: Any = SimpleNamespace(address=None)
REQUEST: Any = None


@contextmanager
def a_run(root: Path, *, cpus: int = 4, mark: str = "first", **changes: Any) -> Iterator[int]:
    """One run's Ray; its raylet."""
    node = settings(temp_dir=str(root), **changes)
    with cluster(node, namespace="run", cpus=cpus, env={MARK: f"{mark}-{root.name}"}, forked=True):
        yield raylet(root)


def raylet(root: Path) -> int:
    ours = [p for p in psutil.Process().children() if p.name() == "raylet" and lives(p)]
    return next(p.pid for p in ours if str(root) in str(p.cmdline()))


@ray.remote(num_cpus=1)
class Actor:
    def look(self) -> dict[str, Any]:
        """A process of its own, which takes no notice of the actor's end."""
        import sys

        left = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return {
            "pid": os.getpid(),
            "left": left.pid,
            "parent": " ".join(psutil.Process().parent().cmdline()),
            "torch": "torch" in sys.modules,
        }

    def value(self) -> int:
        return 1


@ray.remote(num_cpus=0)
def of_a_task() -> int:
    return os.getpid()


@ray.remote(num_cpus=0)
def value_of(name: str) -> str | None:
    return os.environ.get(name)


@pytest.mark.all
@pytest.mark.timeout(300)
def test_one_that_is_kept_holds_nothing_of_the_run_before(root: Path) -> None:
    with ray_kept():
        with a_run(root) as first:
            actors = [Actor.options(name=name, max_restarts=-1, max_task_retries=-1).remote() for name in ("a", "b")]
            seen = ray.get([actor.look.remote() for actor in actors], timeout=100)
            idle = ray.get(of_a_task.remote(), timeout=60)
            group = placement_group([{"CPU": 1}])
            ray.get(group.ready(), timeout=60)
            os.kill(seen[0]["pid"], signal.SIGSTOP)
        assert all("fork_server.py" in one["parent"] and one["torch"] for one in seen)
        left = [one[what] for one in seen for what in ("pid", "left")] + [idle]
        assert not [pid for pid in left if psutil.pid_exists(pid) and lives(psutil.Process(pid))]
        with a_run(root) as second:
            assert second == first
            everything = placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
            ray.get(everything.ready(), timeout=60)
            again = Actor.options(name="a", num_cpus=0).remote()
            assert ray.get(again.look.remote(), timeout=60)["pid"] not in left
        with a_run(root, mark="other") as third:
            assert third != first
        processes = marked(f"other-{root.name}")
        assert processes
    assert not [process for process in (*marked(f"first-{root.name}"), *marked(f"other-{root.name}")) if lives(process)]
    assert not ray.is_initialized()
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("change", ["nothing", "environment", "folder", "env", "cpus", "forked", "error", "death"])
def test_one_is_kept_for_a_run_that_wants_the_same(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    ended: list[Path] = []
    alive = [True]

    def start(request: Any, cpus: int, options: object) -> local_ray.LocalRay:
        folder = tmp_path / str(len(started))
        started.append(folder)
        return local_ray.LocalRay(folder, request, cpus, frozenset(), lambda: ended.append(folder))

    monkeypatch.setattr(local_ray, "_start_local", start)
    monkeypatch.setattr(local_ray.LocalRay, "clear", lambda self, spared: True)
    monkeypatch.setattr(local_ray.LocalRay, "lives", lambda self: alive[0])
    with ray_kept():
        with contextlib.suppress(ZeroDivisionError), local_ray.local_ray(SETTINGS, 2, {}, False, {}):
            if change == "error":
                1 / 0  # noqa: B018
        assert ended == ([started[0]] if change == "error" else [])
        if change == "environment":
            monkeypatch.setenv("OF_A_REWARD", "1")  # as hydra.job.env_set does
        if change == "folder":
            monkeypatch.chdir(tmp_path)  # as hydra.job.chdir does
        alive[0] = change != "death"
        env = {"NAME": "1"} if change == "env" else {}
        with local_ray.local_ray(SETTINGS, 3 if change == "cpus" else 1, env, change == "forked", {}):
            pass
        assert len(started) == (1 if change == "nothing" else 2)
        assert ended == started[:-1]
    assert ended == started


@pytest.mark.parametrize("swept", [False, True])
def test_one_is_kept_after_a_failure_that_another_attempt_follows(
    swept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    ended: list[int] = []

    def start(request: Any, cpus: int, options: object) -> local_ray.LocalRay:
        number = len(started)
        started.append(number)
        return local_ray.LocalRay(tmp_path, request, cpus, frozenset(), lambda: ended.append(number))

    def attempt(error: Exception | None) -> None:
        with contextlib.suppress(ArithmeticError), local_ray.local_ray(SETTINGS, 2, {}, False, {}):
            if error is not None:
                raise error

    monkeypatch.setattr(local_ray, "_start_local", start)
    monkeypatch.setattr(local_ray.LocalRay, "clear", lambda self, spared: True)
    monkeypatch.setattr(local_ray.LocalRay, "lives", lambda self: True)
    with ray_kept() if swept else contextlib.nullcontext():
        with ray_kept(after=lambda error: isinstance(error, ZeroDivisionError)):
            attempt(ZeroDivisionError())
            attempt(None)
            assert (len(started), ended) == (1, [] if swept else [0])
            attempt(OverflowError())
            assert len(ended) == len(started)
        attempt(ZeroDivisionError())
        assert len(ended) == len(started)  # the outer block does not go on after it


@pytest.mark.parametrize("error", [ZeroDivisionError(), OverflowError(), KeyboardInterrupt()])
def test_what_calls_ray_between_two_attempts_ends_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    ended: list[str] = []
    request = local_ray._RayRequest(SETTINGS, {}, False, {}, tmp_path)
    ray = local_ray.LocalRay(tmp_path, request, 2, frozenset(), lambda: ended.append("Ray"))
    monkeypatch.setattr(local_ray, "_start_local", lambda *given: ray)
    monkeypatch.setattr(local_ray.LocalRay, "clear", lambda self, spared: True)
    with ray_kept(after=lambda one: isinstance(one, ZeroDivisionError), ends=lambda: ended.append("calls")):
        with contextlib.suppress(type(error)), local_ray.local_ray(SETTINGS, 2, {}, False, {}):
            raise error
        assert ended == ([] if isinstance(error, ZeroDivisionError) else ["calls", "Ray"])
    assert ended == ["calls", "Ray"]


def test_one_that_does_not_live_is_not_asked_to_clear_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = local_ray._RayRequest(SETTINGS, {}, False, {}, tmp_path)
    monkeypatch.setattr(local_ray.LocalRay, "lives", lambda self: False)
    monkeypatch.setattr(local_ray.LocalRay, "_workers", lambda self, spared: pytest.fail("Ray was asked"))
    assert not local_ray.LocalRay(tmp_path, request, 1, frozenset(), lambda: None).clear()


def test_what_a_process_of_rays_prints_without_end_is_cut(tmp_path: Path) -> None:
    printed = tmp_path / "raylet.err"
    printed.write_text("before\n" + "x" * 10_000)
    assert local_ray._end_of(3, printed) == "ended with exit code 3: " + "x" * 300


def test_what_is_left_of_a_start_that_fails_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**options: object) -> None:
        raise ValueError("no")

    ended: list[None] = []
    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(None))
    with pytest.raises(RunError, match="Ray did not start: no"):
        local_ray.start_ray(10.0)
    assert ended == [None]


def test_the_end_of_an_interrupted_start_is_no_death_of_its_raylet(monkeypatch: pytest.MonkeyPatch) -> None:
    over: list[str] = []

    def until(name: str) -> Any:
        @contextmanager
        def block(*_: object) -> Iterator[None]:
            try:
                yield
            finally:
                over.append(name)

        return block

    def interrupted(**options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_ray, "starting_raylets_watched", until("the raylet is watched"))
    monkeypatch.setattr(local_ray, "_processes_looked_after", until("the raylet may live"))
    monkeypatch.setattr(ray, "init", interrupted)
    with pytest.raises(KeyboardInterrupt):
        local_ray.start_ray(10.0, _temp_dir="/nowhere")
    assert over == ["the raylet is watched", "the raylet may live"]


def test_actors_of_the_run_before_end_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.state import state
    from ray._private.worker import global_worker

    groups = importlib.import_module("ray.util.placement_group")
    ids = [ray.ActorID(bytes([number] * 16)).hex() for number in (1, 2, 3)]
    killed: list[tuple[str, bool]] = []
    core = SimpleNamespace(kill_actor=lambda actor, no_restart: killed.append((actor.hex(), no_restart)))
    monkeypatch.setattr(type(global_worker), "current_job_id", property(lambda self: None))
    monkeypatch.setattr(global_worker, "core_worker", core, raising=False)
    said = [{"State": "ALIVE", "Pid": 7}, {"State": "DEAD", "Pid": 8}, {"State": "ALIVE", "Pid": 9}]
    states = dict(zip(ids, said, strict=True))
    monkeypatch.setattr(state, "actor_table", lambda *asked: states)
    monkeypatch.setattr(state, "workers", lambda: ["of 9"])
    monkeypatch.setattr(groups, "placement_group_table", dict)
    monkeypatch.setattr(local_ray, "processes_of", lambda folder: [])
    monkeypatch.setattr(local_ray.LocalRay, "lives", lambda self: True)
    assert local_ray.LocalRay(tmp_path, REQUEST, 1, frozenset(), lambda: None).clear([9])
    assert killed == [(ids[0], True)], "one that is started again is in the way of the next run"


def test_an_actor_that_lives_on_keeps_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])"]
    alive, left = (subprocess.Popen(one) for one in (command, ["sleep", "60"]))
    parent, other = psutil.Process(alive.pid), psutil.Process(left.pid)
    until(parent.children)
    (child,) = parent.children()
    monkeypatch.setattr(local_ray, "processes_of", lambda folder: [parent, child, other])
    kept = local_ray.LocalRay(tmp_path, REQUEST, 1, frozenset(), lambda: None)
    assert kept._workers(()) == [parent, child, other]
    assert kept._workers([parent.pid]) == [other]
    for process in (child, parent, other):
        process.kill()
    alive.wait()
    left.wait()
    assert kept._workers([parent.pid]) == [], "one that dies meanwhile is none of its own"


@pytest.mark.parametrize(("looks", "left", "cleared"), [(3, 0, True), (10**6, 0, False), (0, 1, False)])
def test_one_is_clear_when_workers_have_ended_and_ray_has_noticed(
    looks: int, left: int, cleared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private.state import state
    from ray._private.worker import global_worker

    groups = importlib.import_module("ray.util.placement_group")  # which a function of that name hides

    workers = iter(range(looks))
    stubborn = [subprocess.Popen(["sleep", "60"]) for _ in range(left)]
    monkeypatch.setattr(type(global_worker), "current_job_id", property(lambda self: None))
    monkeypatch.setattr(state, "actor_table", lambda *asked: {})
    monkeypatch.setattr(state, "workers", lambda: [] if next(workers, None) is None else ["left"])
    monkeypatch.setattr(groups, "placement_group_table", dict)
    monkeypatch.setattr(local_ray, "kill_all", lambda processes: None)
    monkeypatch.setattr(local_ray, "processes_of", lambda folder: [psutil.Process(one.pid) for one in stubborn])
    monkeypatch.setattr(local_ray, "_KILLED_S", 0.1)
    monkeypatch.setattr(local_ray, "_END_S", 30.0 if cleared else 0.3)
    monkeypatch.setattr(local_ray.LocalRay, "lives", lambda self: True)
    assert local_ray.LocalRay(tmp_path, REQUEST, 1, frozenset(), lambda: None).clear() is cleared
    for one in stubborn:
        one.kill()
        one.wait()


def test_one_lives_while_the_program_is_connected_and_none_of_its_processes_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen(["sleep", "60"])
    base = frozenset({psutil.Process(), psutil.Process(gone.pid)})
    one = local_ray.LocalRay(tmp_path, REQUEST, 1, base, lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert one.lives()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert not one.lives()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    gone.kill()
    gone.wait()
    assert not one.lives()


@pytest.mark.all
@pytest.mark.timeout(300)
def test_one_that_a_run_has_failed_in_is_not_kept_nor_one_that_is_too_small(root: Path) -> None:
    with ray_kept():
        with pytest.raises(ZeroDivisionError), a_run(root) as first:
            1 / 0  # noqa: B018
        assert not ray.is_initialized()
        with a_run(root) as second:
            cpus = int(ray.cluster_resources()["CPU"])
        assert ray.is_initialized()
        with a_run(root, cpus=cpus + 1) as third:
            assert ray.cluster_resources()["CPU"] == cpus + 1
    assert len({first, second, third}) == 3
    assert list(root.iterdir()) == []


@pytest.mark.all
@pytest.mark.timeout(300)
def test_one_that_cannot_be_cleared_is_not_kept_and_the_run_has_ended_well(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: local_ray.LocalRay) -> bool:
        raise RuntimeError("GCS")

    monkeypatch.setattr(local_ray.LocalRay, "clear", fails)
    with ray_kept():
        with a_run(root):
            pass
        assert not ray.is_initialized()
        assert list(root.iterdir()) == []


@pytest.mark.all
@pytest.mark.timeout(300)
def test_one_of_another_environment_or_folder_is_another_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ray_kept():
        with a_run(root) as first:
            pass
        monkeypatch.setenv("OF_A_REWARD", "1")  # as hydra.job.env_set does
        with a_run(root) as second:
            assert ray.get(value_of.remote("OF_A_REWARD"), timeout=100) == "1"
        monkeypatch.chdir(tmp_path)  # as hydra.job.chdir does
        with a_run(root) as third:
            pass
    assert len({first, second, third}) == 3
    assert list(root.iterdir()) == []


@pytest.mark.all
@pytest.mark.timeout(300)
def test_one_whose_raylet_dies_between_two_runs_is_replaced(root: Path) -> None:
    with ray_kept():
        with a_run(root) as first:
            pass
        os.kill(first, signal.SIGKILL)
        until(lambda: not lives(psutil.Process(first)))
        with a_run(root) as second:
            assert ray.get(of_a_task.remote(), timeout=100)
    assert first != second
    assert list(root.iterdir()) == []


@pytest.mark.all
@pytest.mark.timeout(300)
def test_forks_whose_server_has_gone_are_found(root: Path) -> None:
    with ray_kept():
        with a_run(root) as first:
            (server,) = [p for p in psutil.Process().children() if lives(p) and "fork_server.py" in str(p.cmdline())]
            fork = ray.get(Actor.remote().look.remote(), timeout=100)
            server.kill()
            server.wait(30)
            os.kill(fork["pid"], signal.SIGSTOP)  # it will not end by itself
        assert not ray.is_initialized()  # without a server it is not kept
        assert not [pid for pid in (fork["pid"], fork["left"]) if psutil.pid_exists(pid) and lives(psutil.Process(pid))]
        with a_run(root) as second:
            pass
    assert first != second
    assert list(root.iterdir()) == []


@pytest.mark.all
@pytest.mark.timeout(300)
def test_one_that_is_kept_makes_way_for_a_cluster_that_runs_already(root: Path) -> None:
    with ray_kept():
        with a_run(root):
            pass
        with pytest.raises(ConfigError, match="there is no answer"), a_run(root, address="127.0.0.1:1"):
            pass
        assert not ray.is_initialized()
        assert list(root.iterdir()) == []


def test_sigterm_between_two_runs_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), ray_kept():
        signal.raise_signal(signal.SIGTERM)


def test_a_ray_that_is_started_begins_its_workers_as_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SimpleNamespace(_ray_params=SimpleNamespace(setup_worker_path=None))
    monkeypatch.setattr(Node, "start_raylet", lambda self: "started")
    with local_ray.workers_forked():
        assert Node.start_raylet(node) == "started"  # type: ignore[arg-type]
    assert node._ray_params.setup_worker_path == worker_fork.__file__


def test_a_server_that_is_importing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(local_ray, "FIRST", ("slow",))
    with local_ray.fork_server(tmp_path):
        began = time.monotonic()
    assert time.monotonic() - began < 60


def test_a_server_that_cannot_be_started_is_an_error_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Ray did not start"), local_ray.fork_server(tmp_path / "gone"):
        pass


@pytest.mark.all
@pytest.mark.timeout(300)
def test_without_the_server_ray_starts_processes_itself(root: Path) -> None:
    with a_run(root):
        (server,) = [p for p in psutil.Process().children() if lives(p) and "fork_server.py" in str(p.cmdline())]
        actor = Actor.remote()
        assert "fork_server" in ray.get(actor.look.remote(), timeout=100)["parent"]
        server.kill()
        server.wait(30)
        assert ray.get(actor.value.remote(), timeout=30) == 1  # who has begun goes on
        other = ray.get(Actor.remote().look.remote(), timeout=100)
        assert "raylet" in other["parent"]
    assert not [process for process in marked(f"first-{root.name}") if lives(process)]
    assert list(root.iterdir()) == []


def started(monkeypatch: pytest.MonkeyPatch, *script: str) -> tuple[str, float, list[int]]:
    """Start a Ray whose raylet is a script, which gets the path of what it is to print: the error, the seconds that it
    took, and the GCSs.
    """
    from ray._private import services

    start, gcs = services.start_ray_process, []

    def start_process(command: list[str], kind: str, *args: Any, **kwargs: Any) -> Any:
        if kind == "raylet":
            printed = next(text for text in command if text.startswith("--stderr_filepath="))
            command = [*(script if len(script) > 1 else ("sh", "-c", *script, "raylet")), printed.partition("=")[2]]
        info = start(command, kind, *args, **kwargs)
        if kind == "gcs_server":
            gcs.append(info.process.pid)
        return info

    monkeypatch.setattr(services, "start_ray_process", start_process)
    began = time.monotonic()
    with pytest.raises(RunError) as failed:
        local_ray.start_ray(60.0, num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)
    assert services.start_ray_process is start_process
    return str(failed.value), time.monotonic() - began, gcs


CHECK = (
    "[2026-11-25 C 1 1] (raylet) memory.cc:7:  Unexpected. Check failed: there is no room\n*** StackTrace ***\nmain()"
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"echo '{CHECK}' > $1; exit 7", "ended with exit code 7: there is no room"),
        ("echo 'a port is taken' > $1; kill -9 $$", "was ended by signal 9: a port is taken"),
        ("exit 3", "ended with exit code 3"),
    ],
)
@pytest.mark.few(1)
def test_a_raylet_that_cannot_live_is_started_twice_and_ends_the_start_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    error, seconds, gcs = started(monkeypatch, script)
    assert error == f"Ray did not start: its raylet {why}"
    assert seconds < 20
    assert len(gcs) == 2
    assert not any(psutil.pid_exists(pid) for pid in gcs)


@pytest.mark.timeout(120)
def test_a_gcs_that_cannot_live_ends_the_start_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_storage", "nonsense")
    error, seconds, _ = started(monkeypatch, "sleep 600")
    assert error.startswith("Ray did not start: its gcs_server ended with exit code 1: ")
    assert "nonsense" in error
    assert seconds < 20


def test_signals_that_end_a_run_do_not_reach_rays_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import signal, sys; print(sorted(signal.pthread_sigmask(0, ())), file=open(sys.argv[1], 'w')); exit(1)"
    error, _, _ = started(monkeypatch, sys.executable, "-c", script)
    assert error.endswith(f": {sorted(ENDING)}")


AGENT = 'import time; print("up", flush=True); time.sleep(600)'


def test_rays_agents_end_with_the_driver(tmp_path: Path) -> None:
    """They do not notice the end of their raylet where the GCS is gone, too."""
    assert local_ray._with_driver("--node_id=1") == "--node_id=1"
    for name in ("--dashboard_agent_command", "--runtime_env_agent_command"):
        argument = local_ray._with_driver(f"{name}={sys.executable} -c '{AGENT}'")
        command = shlex.split(argument.removeprefix(f"{name}="))
        with driver_lifeline(tmp_path / name) as env:
            agent = subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, start_new_session=True)
            assert agent.stdout is not None
            assert agent.stdout.readline() == b"up\n"
        agent.communicate(timeout=60)
        assert agent.returncode == -signal.SIGKILL
