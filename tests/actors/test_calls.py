"""What a wait for actors says when something goes wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import state
from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfDiskError,
    OwnerDiedError,
    RayError,
    RaySystemError,
    RayTaskError,
    WorkerCrashedError,
)

from tests import local_ray
from tests.sync.light import Member, Stillborn
from trinity_sync.actors import calls as module
from trinity_sync.actors.calls import Call, DeathError, ended, results
from trinity_sync.errors import ConfigError, ProcessLoss, RunError, TrinityError, WaitTimeout
from trinity_sync.host import interrupts
from trinity_sync.host.origin import _KEPT, Origin, origin

LIMIT = 60.0

cluster = local_ray.cluster


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
    call = member.hang.remote()
    ray.get(member.wait_for_hang.remote(), timeout=LIMIT)
    yield call
    ray.get(member.release.remote(), timeout=LIMIT)


def named(references: Mapping[str, Any], what: str) -> list[Call[Any]]:
    """Calls by who was asked, all to do the same."""
    return [Call(reference, who, what) for who, reference in references.items()]


def touch_when_done(reference: Any, path: Path) -> None:
    def wait() -> None:
        ray.wait([reference], timeout=LIMIT)
        path.touch()

    threading.Thread(target=wait, daemon=True).start()


def test_results_come_in_the_order_of_the_calls(member: Any) -> None:
    calls: list[Call[str]] = [Call(member.answer.remote(name.upper()), name, "answer") for name in ("b", "a", "c")]
    assert results(calls, LIMIT) == ["B", "A", "C"]
    assert Call(member.answer.remote(None), "a", "answer").result(LIMIT) is None


def test_each_answer_is_told_when_it_is_there_while_others_are_awaited(member: Any, hanging: Any) -> None:
    told: list[str] = []

    def tell(call: Call[Any]) -> None:
        told.append(call.who)
        member.release.remote()

    results(named({"hangs": hanging, "a": member.answer.remote("A")}, "answer"), LIMIT, on_answer=tell)
    assert told == ["a", "hangs"]


def test_after_a_signal_one_who_stands_still_leaves_time_for_the_rest(
    hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_deadline", time.monotonic() + interrupts.REST_S + 0.2)
    began = time.monotonic()
    with pytest.raises(WaitTimeout):
        Call(hanging, "rank 0", "train step 2").result(LIMIT)
    assert time.monotonic() - began < LIMIT


def test_nobody_to_wait_for_is_no_wait(cluster: None) -> None:
    assert results([], 0.0) == []
    assert ended([]) == []


def test_a_timeout_names_those_who_are_late_what_they_were_to_do_and_the_limit(member: Any, hanging: Any) -> None:
    prompt = member.answer.remote(1)
    ray.wait([prompt], timeout=LIMIT)
    calls = named({"prompt": prompt, "late 2": hanging, "late 1": member.hang.remote()}, "load version 3")
    with pytest.raises(WaitTimeout, match=r"^late 1, late 2 did not load version 3 within 0.2 s$"):
        results(calls, 0.2)
    with pytest.raises(WaitTimeout, match=r"^late 1, late 2 did not exchange version 3 within 0.2 s$"):
        results(calls, 0.2, "exchange version 3")


def test_a_death_is_told_with_name_and_task_whether_the_call_came_before_it_or_after(
    mortal: Any, tmp_path: Path
) -> None:
    dying = mortal.die_when.remote(tmp_path)
    for call in (lambda: dying, lambda: mortal.answer.remote(1)):
        with pytest.raises(DeathError, match=r"^explorer-1 died before it could load version 3 \(Worker") as caught:
            Call(call(), "explorer-1", "load version 3").result(LIMIT)
        assert (caught.value.who, caught.value.what) == ("explorer-1", "load version 3")


def test_a_death_is_told_before_the_errors_that_peers_saw_of_it(member: Any, mortal: Any, tmp_path: Path) -> None:
    error = member.fail.remote(RuntimeError("connection closed by peer"))
    touch_when_done(error, tmp_path / "after the error")
    calls = {"rank 0": error, "rank 1": mortal.die_when.remote(tmp_path / "after the error")}
    with pytest.raises(DeathError, match=r"^rank 1 died"):
        results(named(calls, "train step 2"), LIMIT)


def test_what_a_member_raised_is_told_with_its_name_and_the_task(member: Any) -> None:
    call: Call[None] = Call(member.fail.remote(ValueError("no such tensor")), "rank 0", "train step 2")
    with pytest.raises(RunError, match=r"^rank 0 could not train step 2: ValueError: no such tensor$") as caught:
        call.result(LIMIT)
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_the_user_s_code_raised_is_told_with_its_place_there(member: Any) -> None:
    problem, place = ValueError("no such tensor"), Origin("/home/me/my_loss.py:3", "Traceback of theirs")
    setattr(problem, _KEPT, place)
    call: Call[None] = Call(member.fail.remote(problem), "rank 0", "train step 2")
    told = r"^rank 0 could not train step 2: ValueError: no such tensor \(/home/me/my_loss\.py:3\)$"
    with pytest.raises(RunError, match=told) as caught:
        call.result(LIMIT)
    assert origin(caught.value) == place


def test_an_error_that_a_silent_peer_may_have_caused_names_that_peer_too(
    member: Any, hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.2)
    calls = {"rank 0": member.fail.remote(RuntimeError("timed out")), "explorer-1": hanging}
    told = r"^rank 0 could not exchange .*: RuntimeError: timed out \(no answer from explorer-1\)$"
    with pytest.raises(RunError, match=told):
        results(named(calls, "load version 3"), LIMIT, "exchange version 3")


@pytest.mark.parametrize(
    "error",
    [
        RunError("bucket 3 is damaged"),
        ConfigError("no such task"),
        WaitTimeout("the trainer", "publish", 2.5),
        DeathError("explorer-0", "load"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_expected_errors_come_through_as_they_are(member: Any, hanging: Any, error: TrinityError) -> None:
    with pytest.raises(type(error)) as caught:
        results(named({"a": member.fail.remote(error), "hangs": hanging}, "load"), LIMIT)
    assert (type(caught.value), str(caught.value), vars(caught.value)) == (type(error), str(error), vars(error))


def test_a_constructor_that_fails_is_told_with_what_it_raised(cluster: None) -> None:
    actor = ray.remote(Stillborn).options(num_cpus=0).remote(OSError("no space left"))
    with pytest.raises(RunError, match=r"^node agent could not start: .*OSError: no space left$"):
        Call(actor.answer.remote(), "node agent", "make its slots").result(LIMIT)


def test_who_has_ended_is_told_well_or_not_and_only_who_ended_well_has_answered(member: Any, hanging: Any) -> None:
    answered, failed = member.answer.remote(1), member.fail.remote(RuntimeError("no"))
    calls = named({"answered": answered, "late": hanging, "failed": failed}, "load version 3")
    ray.wait([answered, failed], num_returns=2, timeout=LIMIT)
    assert {call.who for call in ended(calls)} == {"answered", "failed"}
    assert [call.who for call in calls if call.is_answered()] == ["answered"]


def test_on_an_event_loop_a_call_says_the_same(member: Any, hanging: Any, mortal: Any, tmp_path: Path) -> None:
    def answer(reference: Any, limit: float = LIMIT) -> Any:
        return asyncio.run(Call(reference, "rank 0", "train step 2").answer(limit))

    assert answer(member.answer.remote(7)) == 7
    with pytest.raises(WaitTimeout, match=r"^rank 0 did not train step 2 within 0.2 s$"):
        answer(hanging, 0.2)
    with pytest.raises(RunError, match=r"^rank 0 could not train step 2: ValueError: no such tensor$"):
        answer(member.fail.remote(ValueError("no such tensor")))
    with pytest.raises(ConfigError, match=r"^no such task$"):
        answer(member.fail.remote(ConfigError("no such task")))
    with pytest.raises(RunError, match=r"^rank 0 could not train step 2: TimeoutError: the disk") as told:
        answer(member.fail.remote(TimeoutError("the disk")))  # its own, not that of our wait
    assert isinstance(told.value.__cause__, RayTaskError)
    with pytest.raises(RunError, match=r"^rank 0 could not train step 2: GetTimeoutError: "):
        Call(member.fail.remote(GetTimeoutError("of a peer")), "rank 0", "train step 2").result(LIMIT)
    (tmp_path / "now").touch()
    with pytest.raises(DeathError, match=r"^rank 0 died before it could train step 2 \(Worker .+\)$"):
        answer(mortal.die_when.remote(tmp_path / "now"))


def test_answers_that_are_there_take_two_waits_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []

    def wait(references: Any, *, num_returns: int, timeout: float) -> Any:
        waits.append(num_returns)
        return references[:num_returns], references[num_returns:]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda references, timeout: references)
    calls: list[Call[Any]] = [Call(number, "a rank", "stage") for number in range(512)]  # type: ignore[arg-type]
    told: list[Call[Any]] = []
    assert results(calls, LIMIT, on_answer=told.append) == list(range(512))
    assert (told, waits) == (calls, [1, 511])


def test_of_answers_that_come_together_those_before_a_failure_are_told_and_a_death_is_its_cause(
    member: Any, mortal: Any, tmp_path: Path
) -> None:
    (tmp_path / "now").touch()
    told: list[str] = []
    calls = {"a": member.answer.remote(1), "b": member.fail.remote(RuntimeError("connection closed"))}
    calls["c"] = mortal.die_when.remote(tmp_path / "now")
    ray.wait(list(calls.values()), num_returns=3, timeout=LIMIT)
    with pytest.raises(DeathError, match=r"^c died"):
        results(named(calls, "load"), LIMIT, on_answer=lambda call: told.append(call.who))
    assert told == ["a"]


def lost(*args: Any, **kwargs: Any) -> Any:
    raise RaySystemError("broken pipe")


@pytest.mark.parametrize("where", ["wait", "get"])
def test_a_wait_that_ray_itself_breaks_off_names_who_and_what(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(ray, "wait", lambda references, **options: (references[:1], references[1:]))
    monkeypatch.setattr(module, "_failure", lambda *calls: None)
    monkeypatch.setattr(ray, where, lost)
    calls: list[Call[Any]] = [Call(object(), who, "load version 3") for who in ("b", "a")]  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"^a, b could not load version 3: RaySystemError: .*broken pipe") as caught:
        results(calls, LIMIT)
    assert isinstance(caught.value.__cause__, RaySystemError)
    with pytest.raises(RunError, match=r"^a, b could not exchange version 3: RaySystemError: .*broken pipe"):
        results(calls, LIMIT, "exchange version 3")


def test_answers_that_ray_does_not_hand_over_are_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(references: Any, *, timeout: float) -> Any:
        assert module.ANSWER_S <= timeout <= LIMIT
        raise GetTimeoutError

    monkeypatch.setattr(ray, "wait", lambda references, **options: (references[:1], references[1:]))
    monkeypatch.setattr(module, "_failure", lambda *calls: None)
    monkeypatch.setattr(ray, "get", late)
    calls: list[Call[Any]] = [Call(object(), who, "load version 3") for who in ("b", "a")]  # type: ignore[arg-type]
    for limit in (LIMIT, 0.0):
        with pytest.raises(WaitTimeout, match=rf"^a, b did not load version 3 within {limit:g} s$"):
            results(calls, limit)


def test_to_look_who_has_ended_names_who_and_what_where_ray_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "wait", lost)
    with pytest.raises(RunError, match=r"^a could not load version 3: RaySystemError: .*broken pipe"):
        ended([Call(object(), "a", "load version 3")])  # type: ignore[arg-type]


def gone(*args: Any, **kwargs: Any) -> Any:
    """As Ray's library where the raylet has died."""
    raise OSError("Connection reset by peer")


@pytest.mark.parametrize(("broken", "place"), [(lost, "wait"), (gone, "wait"), (gone, "get")])
def test_the_search_for_a_cause_that_ray_breaks_off_tells_what_is_known(
    monkeypatch: pytest.MonkeyPatch, broken: Any, place: str
) -> None:
    monkeypatch.setattr(ray, "wait", lambda references, **how: (references, []))
    monkeypatch.setattr(ray, place, broken)
    calls: list[Call[Any]] = [Call(object(), who, "load version 3") for who in ("a", "b")]  # type: ignore[arg-type]
    cause = module._cause(calls[0], RuntimeError("connection closed"), calls[1:], None)
    told = "a could not load version 3: RuntimeError: connection closed"
    assert str(cause) == (f"{told} (no answer from b)" if place == "wait" else told)
    assert not isinstance(cause, ProcessLoss)


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (ObjectLostError("ab", None, ""), True),
        (OwnerDiedError("ab", None, ""), True),
        (NodeDiedError("its node"), True),
        (LocalRayletDiedError(), True),
        (WorkerCrashedError(), True),
        (OutOfDiskError("no room to spill"), False),
        (RuntimeError("no such tensor"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_answer_that_is_lost_with_its_node_is_the_loss_of_a_process(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_lost: bool
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.0)
    calls: list[Call[Any]] = [Call(object(), who, "generate for step 3") for who in ("a", "b")]  # type: ignore[arg-type]
    for pending in ([], calls[1:]):
        assert isinstance(module._cause(calls[0], error, pending, None), ProcessLoss) is is_lost
    if not isinstance(error, RayError):
        return

    def fails(*given: object, **how: object) -> None:
        raise error

    monkeypatch.setattr(ray, "wait", fails)
    with pytest.raises(RunError, match=r"^a could not generate for step 3: ") as caught:
        calls[0].result(LIMIT)
    assert isinstance(caught.value, ProcessLoss) is is_lost


def test_on_an_event_loop_a_wait_that_ray_itself_breaks_off_names_who_and_what() -> None:
    class Lost:
        def __await__(self) -> Iterator[Any]:
            return lost()

    call: Call[Any] = Call(Lost(), "a", "load version 3")  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"^a could not load version 3: RaySystemError: .*broken pipe"):
        asyncio.run(call.answer(LIMIT))


@pytest.mark.all
def test_ray_keeps_no_record_of_calls(member: Any) -> None:
    """Ray's own interval of these records is a second."""
    ray.get([member.answer.remote(number) for number in range(10)], timeout=LIMIT)
    time.sleep(3.0)
    assert state._get_all_task_events() == []


@pytest.mark.parametrize("place", ["wait", "get"])
def test_a_raylet_that_is_gone_is_the_loss_of_a_process(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Ray's library says OSError; an actor's own OSError stays the actor's failure."""
    monkeypatch.setattr(ray, "wait", lambda references, **how: (references, []))
    monkeypatch.setattr(ray, place, gone)
    with pytest.raises(
        ProcessLoss, match=r"does not reach Ray's raylet on its node any more: Connection reset by peer"
    ):
        results([Call(object(), "explorer-0", "load version 1")], 5.0)  # type: ignore[arg-type]
