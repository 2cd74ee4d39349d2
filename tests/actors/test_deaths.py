"""Why a process is gone, as far as Ray knows it."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError

from tests import local_ray
from trinity_sync.actors import calls as module
from trinity_sync.actors.calls import Call, DeathError, ends_noted_in, why_gone

LIMIT = 60.0
ID = "91b9ed2c0ba909b7f13d67a1a0b5a6c4e2f8d0c9b7a6958473625140"
FIELDS = f"The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tactor_id: {ID}\n\tpid: 7\n"

cluster = local_ray.cluster


class Mortal:
    def pid(self) -> int:
        return os.getpid()

    def exit(self) -> None:
        os._exit(3)

    def hang(self) -> None:
        threading.Event().wait()


def exits(actor: Any) -> Any:
    return actor.exit.remote()


def is_killed_by_a_signal(actor: Any) -> Any:
    hanging = actor.hang.remote()
    os.kill(ray.get(actor.pid.remote(), timeout=LIMIT), signal.SIGKILL)
    return hanging


def is_killed_by_ray(actor: Any) -> Any:
    hanging = actor.hang.remote()
    ray.kill(actor)
    return hanging


@pytest.mark.parametrize(
    ("die", "why"),
    [
        (exits, "Worker unexpectedly exits with a connection error code 2. End of file"),
        (is_killed_by_a_signal, "Worker unexpectedly exits with a connection error code 2. End of file"),
        (is_killed_by_ray, "it was killed by `ray.kill`"),
    ],
)
@pytest.mark.few(1)
def test_a_death_is_told_with_what_ray_knows_of_it(cluster: None, die: Callable[[Any], Any], why: str) -> None:
    actor = ray.remote(Mortal).options(num_cpus=0, max_concurrency=2).remote()
    ray.get(actor.pid.remote(), timeout=LIMIT)
    with pytest.raises(DeathError) as caught:
        Call(die(actor), "explorer-1", "load version 3").result(LIMIT)
    assert str(caught.value) == f"explorer-1 died before it could load version 3 ({why})"
    assert isinstance(caught.value.__cause__, RayActorError)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            RayActorError(
                error_msg=f"{FIELDS}The actor is dead because its worker process has died. Worker exit type: "
                "SYSTEM_ERROR Worker exit detail: Worker exits unexpectedly. Worker exits with an exit code 4."
            ),
            "Worker exits unexpectedly. Worker exits with an exit code 4",
        ),
        (
            RayActorError(
                error_msg=f"{FIELDS}The actor died because its node has died. Node Id: {ID}\n"
                "\tthe actor's node was terminated unexpectedly: health check failed"
            ),
            "its node has died. the actor's node was terminated unexpectedly: health check failed",
        ),
        (
            OutOfMemoryError(
                f"Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1, ID: {ID}) "
                f"where the lease (lease ID: {ID}, name=load) was running was 29 GB. Ray killed this worker (ID: {ID})."
            ),
            "Task was killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1) where the lease "
            "(name=load) was running was 29 GB. Ray killed this worker",
        ),
        (RayActorError(error_msg=f"{FIELDS}{'because ' * 100}"), f"{'because ' * 37}beca ..."),
        (ActorDiedError(), ""),
    ],
)
def test_a_reason_is_one_short_line_without_ids(error: Exception, why: str) -> None:
    assert why_gone(error) == why


def test_how_the_system_ended_a_process_is_told_where_it_was_noted(tmp_path: Path) -> None:
    log, error = tmp_path / "forks.log", RayActorError(error_msg=f"{FIELDS}The actor is dead because it fell.")
    log.write_text("77 ended with exit code 1\n7 was ended by signal 9 (Killed)\n")
    with ends_noted_in(log):
        assert why_gone(error) == "it fell; its process was ended by signal 9 (Killed)"
        log.unlink()
        assert why_gone(error) == "it fell"
    log.write_text("7 ended with exit code 1\n")
    assert why_gone(error) == "it fell"


def test_what_is_noted_a_moment_after_ray_has_seen_the_end_is_waited_for(tmp_path: Path) -> None:
    log, error = tmp_path / "forks.log", RayActorError(error_msg=f"{FIELDS}The actor is dead because it fell.")
    late = threading.Timer(0.2, log.write_text, ["7 ended with exit code 1\n"])
    with ends_noted_in(log):
        late.start()
        assert why_gone(error) == "it fell; its process ended with exit code 1"


def test_who_was_ended_for_want_of_memory_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "wait", lambda references, **options: (references[:1], references[1:]))
    monkeypatch.setattr(module, "_failure", lambda call: (call, OutOfMemoryError("too much")))
    call: Call[None] = Call("reference", "explorer-1", "load")  # type: ignore[arg-type]
    with pytest.raises(DeathError, match=r"^explorer-1 died before it could load \(too much\)$"):
        call.result(LIMIT)


def test_a_death_travels_with_its_reason() -> None:
    told = pickle.loads(pickle.dumps(DeathError("explorer-1", "load", "it was killed")))
    assert (str(told), told.who) == ("explorer-1 died before it could load (it was killed)", "explorer-1")
