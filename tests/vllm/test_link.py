"""The wire between who gives versions and workers, which here are threads, or nobody."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from trinity_sync.actors import local
from trinity_sync.actors.client import RemoteMethod
from trinity_sync.actors.explorer_client import EngineDeathError
from trinity_sync.actors.local import ANSWER
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.channel import Connection, ForeignPeerError, open_connection, pack
from trinity_sync.integrations.vllm import worker_link as link_module
from trinity_sync.integrations.vllm.worker_link import WorkerAddress, WorkerHello, WorkerLink, serve
from trinity_sync.weights.apply import ChecksumError

LIMIT = 20.0


@pytest.fixture
def link() -> Iterator[WorkerLink]:
    made = WorkerLink("vLLM of explorer-0", 2)
    yield made
    made.close()


def worker(link: WorkerLink, rank: int, **methods: Callable[..., object]) -> None:
    serve(link.address, rank, {}, SimpleNamespace(**methods), lambda: None, lambda: None)


def method(name: str) -> RemoteMethod[..., object]:
    return RemoteMethod(cast("Callable[..., object]", name), name)


def nobody(link: WorkerLink, rank: int) -> Connection:
    """A worker that connects and answers nothing."""
    connection = open_connection(link.address.path, bytes.fromhex(link.address.key), LIMIT)
    connection.send(pack(WorkerHello(rank, 4711, {})), LIMIT)
    return connection


def test_all_workers_are_asked_side_by_side_and_answer_in_order(link: WorkerLink) -> None:
    both = threading.Barrier(2, timeout=LIMIT)
    for rank in (1, 0):
        worker(link, rank, double=lambda number, rank=rank: (both.wait() >= 0, 2 * number, rank))
    link.wait(LIMIT)
    assert link.ask(method("double"), LIMIT, 7) == [(True, 14, 0), (True, 14, 1)]
    assert not Path(link.address.path).parent.exists(), "nobody else is to connect"


def test_a_worker_hears_that_the_asking_end_is_gone(link: WorkerLink) -> None:
    gone = threading.Event()
    for rank in (0, 1):
        serve(link.address, rank, {}, object(), lambda: None, gone.set if rank else lambda: None)
    link.wait(LIMIT)
    assert not gone.is_set()
    link.close()
    assert gone.wait(LIMIT)


def test_an_error_of_a_worker_is_raised_as_what_it_is(link: WorkerLink) -> None:
    def damaged() -> None:
        raise ChecksumError("bucket 3 is damaged")

    def odd() -> None:
        raise OSError("no such device")

    worker(link, 0, damaged=lambda: 1, odd=odd)
    worker(link, 1, damaged=damaged, odd=lambda: 1)
    link.wait(LIMIT)
    with pytest.raises(ChecksumError, match="bucket 3 is damaged"):
        link.ask(method("damaged"), LIMIT)
    with pytest.raises(RunError, match=r"^worker 0 of vLLM of explorer-0 could not odd: OSError: no such device"):
        link.ask(method("odd"), LIMIT)


def test_what_cannot_be_sent_is_told_and_the_worker_lives(link: WorkerLink) -> None:
    for rank in range(2):
        worker(link, rank, make=lambda: threading.Lock(), count=lambda: 7)
    link.wait(LIMIT)
    with pytest.raises(RunError, match=r"^worker 0 .* could not make: TypeError: cannot pickle"):
        link.ask(method("make"), LIMIT)
    assert link.ask(method("count"), LIMIT) == [7, 7]


def test_a_worker_that_dies_is_told_at_once_though_another_one_is_busy(link: WorkerLink) -> None:
    release = threading.Event()
    worker(link, 0, work=lambda: release.wait(LIMIT))
    dying = nobody(link, 1)
    link.wait(LIMIT)
    threading.Timer(0.2, dying.close).start()
    began = time.monotonic()
    with pytest.raises(EngineDeathError, match=r"worker 1 of vLLM of explorer-0 \(pid 4711\) has died"):
        link.ask(method("work"), LIMIT)
    assert time.monotonic() - began < LIMIT / 2
    release.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_whose_thread_fails_at_its_start_is_dead_at_once(link: WorkerLink) -> None:
    def fail() -> None:
        raise OSError("no such device")

    worker(link, 0, work=len)
    serve(link.address, 1, {}, SimpleNamespace(work=len), fail, lambda: None)
    link.wait(LIMIT / 4)
    with pytest.raises(EngineDeathError, match="worker 1 of vLLM of explorer-0"):
        link.ask(method("work"), LIMIT, b"")


def test_a_worker_that_is_late_is_named_and_its_late_answer_is_no_answer_to_the_next_question(link: WorkerLink) -> None:
    release = threading.Event()
    worker(link, 0, work=lambda word: word)
    worker(link, 1, work=lambda word: (release.wait(LIMIT), word)[1])
    link.wait(LIMIT)
    with pytest.raises(WaitTimeout, match=r"worker 1 of vLLM of explorer-0 did not work within 0.2 s"):
        link.ask(method("work"), 0.2, "first")
    release.set()
    assert link.ask(method("work"), LIMIT, "second") == ["second", "second"]


def test_a_worker_that_does_not_listen_is_named(link: WorkerLink) -> None:
    worker(link, 0, work=len)
    stopped = nobody(link, 1)
    link.wait(LIMIT)
    with pytest.raises(
        WaitTimeout, match=r"worker 1 of vLLM of explorer-0 did not read the request to work within 2 s"
    ):
        link.ask(method("work"), 2.0, b"." * (4 << 20))
    stopped.close()


def test_a_worker_that_is_busy_for_long_is_not_taken_for_dead(
    link: WorkerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_SEND_S", 0.3)
    release = threading.Event()
    for rank in (0, 1):
        worker(link, rank, work=lambda: release.wait(LIMIT), count=len)
    link.wait(LIMIT)
    with pytest.raises(WaitTimeout):
        link.ask(method("work"), 0.1)
    threading.Timer(1.0, release.set).start()
    assert link.ask(method("count"), LIMIT, b"." * (4 << 20)) == [4 << 20, 4 << 20]


def test_a_link_closes_at_once_though_a_worker_does_not_read(link: WorkerLink) -> None:
    worker(link, 0, count=len)
    stopped = nobody(link, 1)
    link.wait(LIMIT)
    with pytest.raises(WaitTimeout):
        link.ask(method("count"), 0.1, b"." * (4 << 20))
    began = time.monotonic()
    link.close()
    assert time.monotonic() - began < LIMIT / 4
    stopped.close()


def test_who_does_not_belong_to_it_is_not_taken_for_a_worker(link: WorkerLink) -> None:
    with socket.socket(socket.AF_UNIX) as passing:
        passing.connect(link.address.path)
    with pytest.raises(ForeignPeerError):
        open_connection(link.address.path, b"wrong", LIMIT)
    with closing(nobody(link, 7)):
        worker(link, 0, work=lambda: 0)
        worker(link, 1, work=lambda: 1)
        link.wait(LIMIT)
        assert link.ask(method("work"), LIMIT) == [0, 1]


def test_a_peer_that_connects_and_says_nothing_keeps_no_worker_out(
    link: WorkerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_CONNECT_S", 10.0)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(link.address.path)
        for rank in (0, 1):
            worker(link, rank, work=lambda rank=rank: rank)
        link.wait(LIMIT)
        assert link.ask(method("work"), LIMIT) == [0, 1]


def test_an_answer_may_pause_for_longer_than_a_connection_may_take(
    link: WorkerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_CONNECT_S", 0.2)
    worker(link, 0, work=lambda: 0)
    slow = nobody(link, 1)

    def answer() -> None:
        number, *_ = slow.receive(LIMIT)
        frame = pack((number, ANSWER, pickle.dumps("late")))
        slow.send(frame[:20], LIMIT)
        time.sleep(0.5)
        slow.send(frame[20:], LIMIT)

    threading.Thread(target=answer).start()
    link.wait(LIMIT)
    assert link.ask(method("work"), LIMIT) == [0, "late"]
    slow.close()


@pytest.mark.parametrize("path", [None, "/nowhere/workers"], ids=["here", "elsewhere"])
def test_workers_that_do_not_find_the_socket_connect_over_tcp(path: str | None) -> None:
    with closing(WorkerLink("vLLM of explorer-0", 1, "127.0.0.1")) as made:
        address = made.address if path is None else made.address._replace(path=path)
        serve(address, 0, {}, SimpleNamespace(work=lambda: 7), lambda: None, lambda: None)
        made.wait(LIMIT)
        assert made.remote is (path is not None)
        assert made.ask(method("work"), LIMIT) == [7]
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address.host, address.port), LIMIT)  # type: ignore[arg-type]


def test_a_peer_without_the_key_is_refused_over_tcp_too() -> None:
    with closing(WorkerLink("vLLM of explorer-0", 1, "127.0.0.1")) as made:
        wrong = made.address._replace(path="/nowhere/workers", key="00" * 32)
        with pytest.raises(ForeignPeerError):
            serve(wrong, 0, {}, object(), lambda: None, lambda: None)


def test_workers_that_do_not_come_are_waited_for_no_longer_than_that() -> None:
    made = WorkerLink("vLLM of explorer-0", 1)
    with pytest.raises(WaitTimeout, match=r"vLLM of explorer-0 did not have 1 workers connect within 0.1 s"):
        made.wait(0.1)
    made.close()
    assert not Path(made.address.path).parent.exists()


def test_a_worker_waits_for_a_process_that_listens_and_does_not_answer_no_longer_than_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_CONNECT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        with pytest.raises(WaitTimeout, match=f"listens at {tmp_path}/silent did not take the connection within 0.1 s"):
            serve(WorkerAddress(str(tmp_path / "silent"), "00"), 0, {}, object(), lambda: None, lambda: None)
