"""Parts that are read with NIXL. In `make test` a stand-in copies the bytes; `make test-all` fetches NIXL itself."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import psutil
import pytest

from tests.extra_packages import fetch
from tests.patience import until
from tests.sync.test_pieces import PIECE, Node, Owner, make_node, make_owner, random_bytes
from trinity_sync.errors import RunError
from trinity_sync.sync import memory_reads
from trinity_sync.sync.memory_reads import MemoryReads, ReadError, open_reads
from trinity_sync.sync.pieces import GoneError, PartPieces, PieceFetcher

__all__ = ["make_node", "make_owner"]  # fixtures

NIXL = find_spec("nixl") is not None
os.environ.setdefault("UCX_TLS", "tcp")  # as between nodes; processes of one host would read each other's memory
HERE = Path(__file__)
DATA = random_bytes(PIECE * 9 + 17)
MakeNode, MakeOwner = Callable[..., Node], Callable[..., Owner]


class StandIn:
    """An agent of NIXL that copies within this process. `states`: of each read; then it is done."""

    states: ClassVar[list[str]] = []
    reads = 0

    def __init__(self, name: str, config: object) -> None:
        self.name, self.registered = name, list[range]()

    def register_memory(self, of: list[tuple[int, int, int, str]], kind: str) -> None:
        self.registered += [range(address, address + nbytes) for address, nbytes, _, _ in of]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def get_xfer_descs(self, of: list[tuple[int, int, int]], kind: str) -> range:
        [(address, nbytes, _)] = of
        assert any(address in held and address + nbytes <= held.stop for held in self.registered)
        return range(address, address + nbytes)

    def initialize_xfer(self, operation: str, here: range, there: range, name: str) -> Any:
        assert operation == "READ"
        return SimpleNamespace(here=here, there=there, states=list(self.states))

    def transfer(self, read: Any) -> str:
        return self.check_xfer_state(read)

    def check_xfer_state(self, read: Any) -> str:
        if read.states:
            return str(read.states.pop(0) if len(read.states) > 1 or read.states[0] != "PROC" else "PROC")
        ctypes.memmove(read.here.start, read.there.start, len(read.here))
        StandIn.reads += 1
        return "DONE"

    def release_xfer_handle(self, read: Any) -> None:
        pass


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    module = SimpleNamespace(nixl_agent=StandIn, nixl_agent_config=lambda backends: None)
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_api=module))
    monkeypatch.setitem(sys.modules, "nixl._api", module)
    monkeypatch.setattr(memory_reads, "_opened", None)
    monkeypatch.setattr(StandIn, "reads", 0)
    return StandIn


def reading(node: Node, stall_s: float = 10.0) -> Node:
    node.fetcher = PieceFetcher(node.server, b"s" * 32, stall_s, reads=True)
    return node


def test_all_bytes_are_read_also_from_the_next_node(
    nixl: type[StandIn], make_owner: MakeOwner, make_node: MakeNode
) -> None:
    owner, first, second = make_owner(DATA), reading(make_node("first")), reading(make_node("second"))
    assert (first.bring(owner), second.bring(owner)) == ([], [])
    assert bytes(first.memory) == bytes(second.memory) == DATA
    assert nixl.reads == 20, "ten pieces for each node"
    assert [len(node.server.requests) for node in (owner, first)] == [1, 1]


def test_a_node_that_does_not_read_takes_what_is_sent(
    nixl: type[StandIn], make_owner: MakeOwner, make_node: MakeNode
) -> None:
    owner, node = make_owner(DATA), make_node("one")
    assert node.bring(owner) == []
    assert (bytes(node.memory), nixl.reads) == (DATA, 0)


@pytest.mark.parametrize("states", [["ERR"], ["PROC"]], ids=["an error", "no end"])
def test_a_source_whose_memory_cannot_be_read_sends_its_pieces(
    nixl: type[StandIn], make_owner: MakeOwner, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, states: list[str]
) -> None:
    owner, node = make_owner(DATA), reading(make_node("one"), 0.3)
    monkeypatch.setattr(nixl, "states", states)
    [told] = node.bring(owner)
    assert told.startswith("piece 0 of rank-00000 of version 7: NIXL")
    assert told.endswith("so the owner sends its pieces from now on")
    assert bytes(node.memory) == DATA
    assert node.bring(owner) == [], "it is asked so at once the next time"


def test_memory_of_a_read_that_was_given_up_is_not_used_again(
    nixl: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes may still arrive."""
    reads, source, into = MemoryReads(), memoryview(bytearray(b"a" * 64)), memoryview(bytearray(64))
    place = reads.place(source)
    reads.read(place, 0, into, 1.0)
    [used] = reads._rooms
    monkeypatch.setattr(nixl, "states", ["PROC"])
    with pytest.raises(ReadError, match=r"has not read 64 bytes within 0\.05 s"):
        reads.read(place, 0, into, 0.05)
    monkeypatch.setattr(nixl, "states", [])
    reads.read(place, 0, into, 1.0)
    assert reads._rooms[0] is not used


def test_a_read_takes_new_memory_only_where_none_is_large_enough(nixl: type[StandIn]) -> None:
    """Parts of several sizes are read at the same time, and give their memory back in any order."""
    reads, into = MemoryReads(), memoryview(bytearray(64))
    place = reads.place(memoryview(bytearray(64)))
    reads.read(place, 0, into, 1.0)
    large = reads._rooms.pop()
    reads.read(place, 0, into[:8], 1.0)
    reads._rooms.insert(0, large)
    reads.read(place, 0, into, 1.0)
    assert len(reads._rooms) == 2


def test_a_read_for_a_slot_that_has_another_version_now_is_given_up(
    nixl: type[StandIn], make_owner: MakeOwner, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "states", ["PROC"])
    owner, node = make_owner(DATA), reading(make_node("one"), 60.0)
    begun = node.begin(owner)
    time.sleep(0.1)
    node.held.end("its slot is for version 8 now")
    with pytest.raises(GoneError, match="for version 8 now"):
        begun.result()
    assert not any(node.memory)


@pytest.mark.parametrize("why", ["missing", "of another version"])
def test_without_nixl_parts_travel_over_tcp_and_that_is_told(
    nixl: type[StandIn], make_owner: MakeOwner, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None if why == "missing" else SimpleNamespace())
    owner, node = make_owner(DATA), reading(make_node("one"))
    [told] = node.bring(owner)
    assert told.startswith("NIXL does not work here (")
    assert told.endswith("; so parts travel over TCP to this node")
    assert bytes(node.memory) == DATA


def test_a_source_whose_memory_nixl_does_not_take_sends_its_pieces(
    nixl: type[StandIn], make_owner: MakeOwner, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "register_memory", Mock(side_effect=MemoryError("no more keys")))
    owner, node = make_owner(DATA), reading(make_node("one"))
    [told] = node.bring(owner)
    assert "its source has no NIXL; so the owner sends" in told
    assert bytes(node.memory) == DATA


# ---- NIXL itself


def serve() -> None:
    """Serve DATA to the process that started this one, until it ends."""
    owner = Owner(DATA)
    port, _ = owner.server.source.port, open_reads()
    print(port, flush=True)
    sys.stdin.read()


@pytest.fixture
def elsewhere() -> Iterator[tuple[subprocess.Popen[str], Owner]]:
    """A process that serves DATA, and an owner here that names it as the source."""
    command = [sys.executable, "-c", "from tests.sync import test_memory_reads as here; here.serve()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    owner = Owner(DATA)
    source = owner.chain._owner._replace(port=int(process.stdout.readline()))
    owner.chain._owner = source
    try:
        yield process, owner
    finally:
        process.kill()
        process.wait()
        owner.server.close()


@pytest.mark.skipif(not NIXL, reason="needs NIXL")
def test_nixl_reads_the_memory_of_another_process(
    elsewhere: tuple[subprocess.Popen[str], Owner], make_node: MakeNode
) -> None:
    _, owner = elsewhere
    node = reading(make_node("one"))
    for _ in range(2):
        assert node.bring(owner) == []
        assert bytes(node.memory) == DATA


@pytest.mark.skipif(not NIXL, reason="needs NIXL")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_dies_or_stalls_within_a_read_of_nixl_is_an_error_in_time(
    elsewhere: tuple[subprocess.Popen[str], Owner], make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    process, owner = elsewhere
    node = reading(make_node("one"), 2.0)
    arrived = PartPieces.arrived

    def end_it(self: PartPieces, digest: bytes | None = None) -> None:
        arrived(self, digest)
        if self.there == 3:
            process.send_signal(signum)
            until(lambda: psutil.Process(process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))

    monkeypatch.setattr(PartPieces, "arrived", end_it)
    began = time.monotonic()
    with pytest.raises((RunError, EOFError, OSError)):
        node.bring(owner)
    assert time.monotonic() - began < 30
    assert bytes(node.memory[: node.held.there * PIECE]) == DATA[: node.held.there * PIECE]


@pytest.mark.all
@pytest.mark.skipif(NIXL, reason="it is installed")
def test_nixl_itself_brings_the_same_bytes(tmp_path: Path) -> None:
    """These tests, and a version over two raylets, in an environment that has it."""
    fetch(tmp_path, "nixl", "nixl-cu12")
    nodes = HERE.parents[1] / "nodes" / "test_nodes.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "nixl", "-m", "not all"]
    ended = subprocess.run(
        [*command, str(HERE), str(nodes)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout
