"""What a wait for actors says when something goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.sync.helpers import LIMIT
from tests.sync.light import Member, Stillborn
from trinity_sync.actors.calls import MemberDied, resolve, resolve_one
from trinity_sync.errors import ConfigError, RunError, TrinityError, WaitTimeout
from trinity_sync.sync import remote


def start() -> Any:
    actor = ray.remote(Member).options(num_cpus=0, max_concurrency=8).remote()
    ray.get(actor.answer.remote(None), timeout=LIMIT)
    return actor


@pytest.fixture(scope="module")
def member(cluster: None) -> Any:
    """One that lives."""
    return start()


@pytest.fixture
def mortal(cluster: None) -> Any:
    """One that a test may kill."""
    return start()


@pytest.fixture
def hanging(member: Any) -> Iterator[Any]:
    """A call that does not return."""
    yield member.hang.remote()
    ray.get(member.release.remote(), timeout=LIMIT)


def touch_when_done(reference: Any, path: Path) -> None:
    def wait() -> None:
        ray.wait([reference], timeout=LIMIT)
        path.touch()

    threading.Thread(target=wait, daemon=True).start()


def test_results_come_by_name_in_the_order_of_the_calls(member: Any) -> None:
    results = resolve({name: member.answer.remote(name.upper()) for name in ("b", "a", "c")}, "answer", LIMIT)
    assert list(results.items()) == [("b", "B"), ("a", "A"), ("c", "C")]
    assert resolve_one(member.answer.remote(None), "a", "answer", LIMIT) is None


def test_nobody_to_wait_for_is_no_wait(cluster: None) -> None:
    assert resolve({}, "answer", 0.0) == {}


def test_a_timeout_names_those_who_are_late_what_they_were_to_do_and_the_limit(member: Any, hanging: Any) -> None:
    prompt = member.answer.remote(1)
    ray.wait([prompt], timeout=LIMIT)
    calls = {"prompt": prompt, "late 2": hanging, "late 1": member.hang.remote()}
    with pytest.raises(WaitTimeout, match=r"^late 1, late 2 did not load version 3 within 0.2 s$"):
        resolve(calls, "load version 3", 0.2)


def test_a_death_is_told_with_name_and_task_whether_the_call_came_before_it_or_after(
    mortal: Any, tmp_path: Path
) -> None:
    dying = mortal.die_when.remote(tmp_path)
    for call in (lambda: dying, lambda: mortal.answer.remote(1)):
        with pytest.raises(MemberDied, match=r"^explorer-1 died while it was to load version 3$") as caught:
            resolve({"explorer-1": call()}, "load version 3", LIMIT)
        assert (caught.value.who, caught.value.what) == ("explorer-1", "load version 3")


def test_a_death_is_told_before_the_errors_that_peers_saw_of_it(member: Any, mortal: Any, tmp_path: Path) -> None:
    error = member.fail.remote(RuntimeError("connection closed by peer"))
    touch_when_done(error, tmp_path / "after the error")
    calls = {"rank 0": error, "rank 1": mortal.die_when.remote(tmp_path / "after the error")}
    with pytest.raises(MemberDied, match=r"^rank 1 died"):
        resolve(calls, "train step 2", LIMIT)


def test_what_a_member_raised_is_told_with_its_name_and_the_task(member: Any) -> None:
    call = member.fail.remote(ValueError("no such tensor"))
    with pytest.raises(RunError, match=r"^rank 0 could not train step 2: ValueError: no such tensor$") as caught:
        resolve({"rank 0": call}, "train step 2", LIMIT)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_that_a_silent_peer_may_have_caused_names_that_peer_too(
    member: Any, hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_GRACE_S", 0.2)
    calls = {"rank 0": member.fail.remote(RuntimeError("timed out")), "explorer-1": hanging}
    with pytest.raises(RunError, match=r"^rank 0 could not .*: RuntimeError: timed out \(no answer from explorer-1\)$"):
        resolve(calls, "exchange version 3", LIMIT)


@pytest.mark.parametrize(
    "error",
    [
        RunError("bucket 3 is damaged"),
        ConfigError("no such task"),
        WaitTimeout("the trainer", "publish", 2.5),
        MemberDied("explorer-0", "load"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_expected_errors_come_through_as_they_are(member: Any, hanging: Any, error: TrinityError) -> None:
    with pytest.raises(type(error)) as caught:
        resolve({"a": member.fail.remote(error), "hangs": hanging}, "load", LIMIT)
    assert (type(caught.value), str(caught.value), vars(caught.value)) == (type(error), str(error), vars(error))


def test_a_constructor_that_fails_is_told_with_what_it_raised(cluster: None) -> None:
    actor = ray.remote(Stillborn).options(num_cpus=0).remote(OSError("no space left"))
    with pytest.raises(RunError, match=r"^node agent could not start: .*OSError: no space left$"):
        resolve({"node agent": actor.answer.remote()}, "make its slots", LIMIT)
