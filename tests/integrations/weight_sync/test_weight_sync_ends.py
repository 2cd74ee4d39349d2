"""How a sync ends where not all goes well: strangers, members that stop, calls that are cancelled or come again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.integrations.weight_sync.sync_members import LIMIT, MODES, Members, Named, receive, send, weights
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.channel import Connection
from trinity_sync.integrations.verl.weight_sync.checkpoint_engine import WeightSync
from trinity_sync.sync.broadcast_group import BroadcastGroup
from trinity_sync.sync.links import BucketReceipt, Heartbeat, Hub, SenderAddress, Spoke, VersionReceipt
from trinity_sync.weights.tensors import state_digest


def moves(members: Members, step: int) -> None:
    members.meet()
    *_, found = members.move(weights(step), step)
    assert not isinstance(found, BaseException), found
    assert state_digest(found, None) == state_digest(weights(step), None)


def test_strangers_keep_no_receiver_out(make: Callable[..., Members]) -> None:
    members = make("memory", receivers=1, timeout_s=LIMIT)
    everybody = [*members.ranks, *members.rollout]
    ready = [member.prepare() for member in everybody]
    assert ready[0].address is not None
    host, port, _ = ready[0].address
    strangers = [socket.create_connection((host, port)) for _ in range(4)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    of_ranks, of_rollout = WeightSync.build_topology(2, 1, ready)
    started = time.monotonic()
    meetings = [
        members.pool.submit(member.init_process_group, its)
        for member, its in zip(everybody, [*of_ranks["place"], *of_rollout["place"]], strict=True)
    ]
    for meeting in meetings:
        meeting.result(LIMIT)
    assert time.monotonic() - started < LIMIT / 2
    *_, found = members.move(weights(1), 1)
    assert state_digest(found, None) == state_digest(weights(1), None)
    for stranger in strangers:
        stranger.close()


class Slowly:
    """Weights of which one is waited for."""

    def __init__(self, step: int, at: int) -> None:
        self.state = {f"tensor {number}": torch.full((300,), float(step)) for number in range(8)}  # a bucket each
        self.at = at
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.gathered: list[str] = []

    def __iter__(self) -> Iterator[Named]:
        for number, (name, tensor) in enumerate(self.state.items()):
            if number == self.at:
                self.reached.set()
                assert self.go_on.wait(LIMIT)
            self.gathered.append(name)
            yield name, tensor


@pytest.mark.parametrize("mode", MODES)
def test_a_send_that_is_cancelled_is_no_whole_version(mode: str, make: Callable[..., Members]) -> None:
    members = make(mode, receivers=1)
    members.meet()
    slowly = Slowly(1, at=3)

    async def cancelled() -> None:
        task = asyncio.ensure_future(members.ranks[0].send_weights(iter(slowly), 1))
        await asyncio.to_thread(slowly.reached.wait, LIMIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        slowly.go_on.set()

    receiving = members.pool.submit(receive, members.rollout[0], 1)
    members.pool.submit(asyncio.run, cancelled()).result(LIMIT)
    error = receiving.exception(LIMIT)
    assert isinstance(error, RunError)
    assert "trainer rank 0" in str(error)
    assert "it was cancelled" in str(error)
    moves(members, 2)
    assert slowly.gathered == list(slowly.state)  # all the same: the other ranks wait for it


def test_a_receiver_that_is_cancelled_ends_it_for_all(make: Callable[..., Members]) -> None:
    members = make("memory", receivers=1)
    members.meet()
    slowly = Slowly(1, at=3)

    async def cancelled() -> None:
        async def all_of_them() -> None:
            async for _ in members.rollout[0].receive_weights(1):
                pass

        task = asyncio.ensure_future(all_of_them())
        await asyncio.to_thread(slowly.reached.wait, LIMIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    sending = members.pool.submit(send, members.ranks[0], iter(slowly), 1)
    members.pool.submit(asyncio.run, cancelled()).result(LIMIT)
    slowly.go_on.set()
    error = sending.exception(LIMIT)
    assert isinstance(error, RunError)
    assert "rollout worker 0" in str(error)
    assert "it was cancelled" in str(error)
    moves(members, 2)


def test_an_engine_that_asks_for_no_tensor_ends_it_at_once(make: Callable[..., Members]) -> None:
    members = make("memory", receivers=1)
    members.meet()
    sending = members.pool.submit(send, members.ranks[0], iter(weights(1).items()), 1)
    weights_of_nobody = members.rollout[0].receive_weights(1)
    started = time.monotonic()
    del weights_of_nobody
    gc.collect(1)
    error = sending.exception(LIMIT)
    assert not isinstance(error, WaitTimeout)
    assert isinstance(error, RunError)
    assert "its engine did not take the weights" in str(error)
    assert time.monotonic() - started < LIMIT / 2


@pytest.mark.parametrize("mode", MODES)
def test_a_sync_that_is_begun_anew_ends_the_one_before_and_not_itself(mode: str, make: Callable[..., Members]) -> None:
    members = make(mode, receivers=1)
    members.meet()
    slowly = Slowly(1, at=1)
    slowly.go_on.set()
    before = members.pool.submit(send, members.ranks[0], iter(slowly), 1)  # nobody receives
    assert slowly.reached.wait(LIMIT)
    started = time.monotonic()
    for step in (2, 3):
        moves(members, step)
    error = before.exception(LIMIT)
    assert isinstance(error, RunError)
    assert str(error) == "the sync was ended: a new sync begins"
    assert time.monotonic() - started < LIMIT


def test_a_sync_waits_for_the_gathers_of_the_one_before(make: Callable[..., Members]) -> None:
    members = make("memory", receivers=1)
    members.meet()
    slowly = Slowly(1, at=5)

    def stop(name: str) -> None:
        raise ValueError("no room on the device")

    sending = members.pool.submit(send, members.ranks[0], iter(slowly), 1)
    with pytest.raises(ValueError, match="no room"):
        receive(members.rollout[0], 1, stop)
    assert slowly.reached.wait(LIMIT)
    again = members.pool.submit(members.ranks[0].prepare)
    with pytest.raises(TimeoutError):
        again.exception(0.3)
    assert len(slowly.gathered) == 5
    slowly.go_on.set()
    assert again.exception(LIMIT) is None
    assert slowly.gathered == list(slowly.state)
    assert isinstance(sending.exception(LIMIT), RunError)


@pytest.mark.all
def test_receivers_are_read_as_long_as_they_are_told() -> None:
    """Else what they say of many buckets would fill the link, and they would wait for each other."""
    hub = Hub("127.0.0.1", 5.0)
    heard = [threading.Event() for _ in range(20)]
    failed: list[BaseException] = []

    def receiver() -> None:
        try:
            spoke = Spoke("the sender", hub.address, 0, 5.0)
            for number, event in enumerate(heard):
                spoke.receive("go on")
                event.set()
                for one in range(6000):
                    spoke.tell(BucketReceipt(6000 * number + one))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=receiver, daemon=True)
    thread.start()
    hub.meet(["receiver"])
    for event in heard:
        hub.tell(Heartbeat())
        assert event.wait(10.0), failed
    hub.wait_taken(6000 * len(heard) - 1)
    thread.join(LIMIT)
    assert not failed
    hub.close()


def test_a_group_whose_members_do_not_meet_is_waited_for_with_a_limit(
    make: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    members = make("nccl", receivers=1, timeout_s=1.0)
    release = threading.Event()
    monkeypatch.setattr(BroadcastGroup, "_begin", lambda *given: release.wait(LIMIT))  # as NCCL's first one
    members.meet()
    sender, _, receiver = members.move(weights(1), 1)
    assert isinstance(sender, RunError)
    assert isinstance(receiver, RunError)
    assert re.search(r"did not meet within 1\.0\d* s \(timeout_s=1, .* min_rate_mbps=100\)", f"{sender} {receiver}")
    release.set()
    monkeypatch.undo()
    moves(members, 2)


def test_an_address_that_is_not_of_this_node_is_told() -> None:
    with pytest.raises(RunError, match=r"receivers of the weights cannot connect to 192.0.2.1, which is this node"):
        Hub("192.0.2.1", 1.0)


def test_receivers_that_go_on_are_waited_for() -> None:
    """The limit is that of each wait, not of all that a receiver loads once everything was sent."""
    hub = Hub("127.0.0.1", 0.5)
    given_up = threading.Event()

    def receiver() -> None:
        spoke = Spoke("the sender", hub.address, 0, LIMIT)
        for number in range(4):
            given_up.wait(0.3)
            spoke.tell(BucketReceipt(number))
        spoke.tell(VersionReceipt("digest", 8))
        given_up.wait(LIMIT)
        spoke.close()

    thread = threading.Thread(target=receiver, daemon=True)
    thread.start()
    hub.meet(["receiver"])
    assert hub.wait_done() == [VersionReceipt("digest", 8)]
    given_up.set()
    thread.join(LIMIT)
    hub.close()


def test_who_comes_too_late_is_let_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    met, inside, real = threading.Event(), threading.Event(), Hub._take

    def slowly(hub: Hub, connection: Connection) -> None:
        inside.set()
        assert met.wait(LIMIT)
        real(hub, connection)

    monkeypatch.setattr(Hub, "_take", slowly)
    hub = Hub("127.0.0.1", 1.0)
    late: list[BaseException] = []

    def come() -> None:
        try:
            Spoke("the sender", hub.address, 0, LIMIT).receive("send a bucket")
        except RunError as error:
            late.append(error)

    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    with pytest.raises(WaitTimeout, match=r"receiver did not connect to the sender of the weights within 1 s"):
        hub.meet(["receiver"])
    assert inside.is_set()
    met.set()
    thread.join(LIMIT / 2)
    assert "the sender disconnected" in str(late)


def test_two_threads_that_refuse_the_same_late_receiver_both_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Emptied(queue.SimpleQueue[None]):
        """The other thread has taken its last item just now."""

        def empty(self) -> bool:
            return False

    hub = Hub("127.0.0.1", 1.0)
    monkeypatch.setattr(hub, "_connected", Emptied())
    closing = threading.Thread(target=hub.close, daemon=True)
    closing.start()
    closing.join(LIMIT / 4)
    assert not closing.is_alive()


def test_who_answers_in_another_language_is_no_sender() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = SenderAddress("127.0.0.1", other.getsockname()[1], b"key")

        def answer() -> None:
            connected, _ = other.accept()
            connected.sendall(struct.pack("!i", 20) + b"HTTP/1.1 400 Bad Req")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RunError, match=r"the sender cannot be reached .* takes part in another sync"):
            Spoke("the sender", address, 0, 5.0)


def test_a_receiver_gets_tensors_on_its_device(make: Callable[..., Members], monkeypatch: pytest.MonkeyPatch) -> None:
    members = make("memory", receivers=1)
    real = torch.device
    threads: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        threads.append((threading.current_thread().name, str(which)))
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(
        torch, "device", lambda kind, number=None: real("meta") if (kind, number) == ("cuda", 3) else real(kind)
    )
    members.meet()
    *_, found = members.move(weights(1), 1)
    assert {tensor.device.type for tensor in found.values()} == {"meta"}
    assert {which for _, which in threads} == {"meta"}  # in all threads, which else would work on the first GPU
    assert {name.split("_")[0] for name, _ in threads} >= {"asyncio"}
