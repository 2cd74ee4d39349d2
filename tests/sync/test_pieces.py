"""Parts that travel through a chain of nodes, which are plain objects of this process. Pieces have 64 bytes."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.errors import ProcessLoss, RunError
from trinity_sync.host.channel import Connection, Listener, open_connection
from trinity_sync.protocol.versions import Version
from trinity_sync.sync.pieces import (
    BroughtParts,
    DirectFetcher,
    GoneError,
    NodeChain,
    PartFetcher,
    PartPieces,
    PieceFetcher,
    PieceRequest,
    PieceServer,
    PieceSource,
    UnreachableError,
    WantedPart,
)
from trinity_sync.weights.slots import SegmentError, SlotArena

LIMIT = 10.0
SECRET = b"s" * 32
PIECE = 64
SLOT, PART, VERSION = 1, "rank-00000", Version(0, 7)
HERE = "127.0.0.1"


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class WatchedServer(PieceServer):
    """Notes the requests."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.requests: list[PieceRequest] = []

    def _send(self, connection: Connection, wanted: PieceRequest) -> None:
        self.requests.append(wanted)
        super()._send(connection, wanted)


class Owner:
    """The node that staged the part. Its pieces are there as far as the test lets them."""

    who = "the owner"

    def __init__(self, data: bytes, *, whole: bool = True) -> None:
        self.data = data
        self.server = WatchedServer(HERE, SECRET, self.who, LIMIT)
        self.held = PartPieces(VERSION, memoryview(bytearray(data)), whole=whole, piece_bytes=PIECE)
        self.chain = NodeChain(self.held, self.server.source)
        self.server.hold(SLOT, PART, self.held)

    def source(
        self, version: Version, slot: int, part: str, asker: PieceSource, failed: Collection[PieceSource]
    ) -> Any:
        return SimpleNamespace(result=lambda timeout_s: self.chain.source(asker, failed))

    def let(self, pieces: int) -> None:
        for _ in range(pieces):
            self.held.arrived()

    def wanted(self, version: Version = VERSION) -> WantedPart:
        return WantedPart(version, SLOT, PART, len(self.data), cast(AgentClient, self))


class Node:
    """A node that takes the part."""

    def __init__(self, name: str, *, stall_s: float = LIMIT, secret: bytes = SECRET) -> None:
        self.server = WatchedServer(HERE, secret, name, LIMIT)
        self.fetcher = PieceFetcher(self.server, secret, stall_s)
        self.held: PartPieces
        self.memory = b""

    def bring(self, owner: Owner) -> list[str]:
        self.memory = bytearray(len(owner.data))
        self.held = PartPieces(VERSION, memoryview(self.memory), whole=False, piece_bytes=PIECE)
        told: list[str] = []
        self.fetcher.bring(owner.wanted(), self.held, told.append)
        return told

    def begin(self, owner: Owner) -> Begun:
        """Bring it in a thread, which has asked for its source on return."""
        asked = len(owner.chain._nodes)
        begun = Begun(lambda: self.bring(owner))
        wait_until(lambda: len(owner.chain._nodes) > asked or begun.done)
        return begun


class Begun:
    def __init__(self, work: Callable[[], list[str]]) -> None:
        self._found: list[str] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], list[str]]) -> None:
        try:
            self._found = work()
        except Exception as error:
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> list[str]:
        self._thread.join(LIMIT)
        assert self.done
        if self._error is not None:
            raise self._error
        return self._found


def random_bytes(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def makers(kind: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    made = []

    def make(*given: Any, **settings: Any) -> Any:
        made.append(kind(*given, **settings))
        return made[-1]

    yield make
    for one in made:
        one.server.close()


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    yield from makers(Node)


@pytest.fixture
def make_owner() -> Iterator[Callable[..., Owner]]:
    yield from makers(Owner)


MakeNode, MakeOwner = Callable[..., Node], Callable[..., Owner]

# ---- the chain


@pytest.mark.parametrize("nbytes", [0, 1, PIECE - 1, PIECE, PIECE + 1, 20 * PIECE + 3])
def test_every_node_of_a_chain_gets_all_bytes(make_owner: MakeOwner, make_node: MakeNode, nbytes: int) -> None:
    owner, nodes = make_owner(random_bytes(nbytes)), [make_node(f"node {n}") for n in range(4)]
    begun = [node.begin(owner) for node in nodes]
    assert [one.result() for one in begun] == [[]] * 4
    assert {bytes(node.memory) for node in nodes} == {owner.data}


def test_a_node_passes_on_a_piece_before_it_has_the_next_one(make_owner: MakeOwner, make_node: MakeNode) -> None:
    owner, nodes = make_owner(random_bytes(4 * PIECE), whole=False), [make_node(f"node {n}") for n in range(3)]
    begun = [node.begin(owner) for node in nodes]
    for piece in range(1, 4):
        owner.let(1)
        wait_until(lambda: nodes[2].held.there == piece)  # noqa: B023
        assert [node.held.there for node in nodes] == [piece] * 3
    owner.let(1)
    assert [one.result() for one in begun] == [[]] * 3


def test_the_owner_serves_the_first_node_and_a_late_one_takes_from_the_last(
    make_owner: MakeOwner, make_node: MakeNode
) -> None:
    owner, nodes = make_owner(random_bytes(3 * PIECE)), [make_node(f"node {n}") for n in range(3)]
    for node in nodes:
        node.begin(owner).result()
    assert [len(one.server.requests) for one in (owner, *nodes)] == [1, 1, 1, 0]


def test_no_node_ever_waits_for_itself() -> None:
    """Nodes that have failed others take from the owner, so sources are always earlier ones."""
    owner = PieceSource(HERE, 1, "owner")
    chain = NodeChain(PartPieces(VERSION, memoryview(b""), whole=True), owner)
    first, second, third = (PieceSource(HERE, port, f"node {port}") for port in (2, 3, 4))
    assert [chain.source(one, []) for one in (first, second, third)] == [owner._replace(owner=True), first, second]
    assert chain.source(third, [second]) == first
    assert chain.source(second, [first]).owner
    assert chain.source(third, [second, first]).owner


# ---- faults


def test_when_a_node_dies_the_next_one_goes_on_with_the_piece_that_it_lacks(
    make_owner: MakeOwner, make_node: MakeNode
) -> None:
    owner, (first, second, third) = (
        make_owner(random_bytes(9 * PIECE), whole=False),
        [make_node(f"n{n}") for n in "123"],
    )
    begun = [node.begin(owner) for node in (first, second, third)]
    owner.let(4)
    wait_until(lambda: third.held.there == 4)
    second.server.close()
    second.held.end("it is dead")
    wait_until(lambda: len(first.server.requests) == 2)
    owner.let(5)
    assert begun[0].result() == []
    [error] = begun[2].result()
    assert error.startswith(f"piece 4 of {PART} of version 7, from n2: ")
    assert bytes(third.memory) == owner.data
    assert [one.first for one in first.server.requests] == [0, 4]


def test_a_piece_that_arrives_flipped_is_asked_of_another_node(make_owner: MakeOwner, make_node: MakeNode) -> None:
    owner, (first, second, third) = make_owner(random_bytes(6 * PIECE)), [make_node(f"n{n}") for n in "123"]
    for node in (first, second):
        node.bring(owner)
    second.held.piece(3)[5] ^= 1
    assert third.bring(owner) == [f"piece 3 of {PART} of version 7, from n2: its bytes do not have its digest"]
    assert bytes(third.memory) == owner.data
    assert [one.first for one in first.server.requests] == [0, 3]


def test_a_piece_that_is_flipped_at_its_owner_too_is_never_used(make_owner: MakeOwner, make_node: MakeNode) -> None:
    owner, node = make_owner(random_bytes(6 * PIECE)), make_node("node")
    owner.held.digest(3)
    owner.held.piece(3)[5] ^= 1
    with pytest.raises(RunError, match=r"^piece 3 .* from the owner: its bytes do not have its digest"):
        node.bring(owner)
    assert node.held.there == 3
    assert [one.first for one in owner.server.requests] == [0, 3]


def say(*frames: bytes) -> Callable[[Connection], None]:
    """A source that says this, and then nothing."""

    def take(connection: Connection) -> None:
        connection.receive(LIMIT)
        for frame in frames:
            connection.send(frame, LIMIT)

    return take


PIECES_OF_A_GIGABYTE = struct.pack("!BI16s", 0, 1 << 30, b"")


@pytest.mark.parametrize(
    ("frames", "why"),
    [((), r"n1 did not send piece 0 of .* of version 7 within 0\.1 s"), ((PIECES_OF_A_GIGABYTE,), "sent 1073741824")],
    ids=["stalls", "too much"],
)
def test_a_source_that_stalls_or_sends_anything_else_is_left(
    make_owner: MakeOwner, make_node: MakeNode, frames: tuple[bytes, ...], why: str
) -> None:
    owner, node = make_owner(random_bytes(6 * PIECE)), make_node("node", stall_s=0.1)
    silent = Listener((HERE, 0), SECRET, say(*frames))
    owner.chain.source(PieceSource(HERE, int(silent.address[1]), "n1"), [])
    [error] = node.bring(owner)
    silent.close()
    assert error.startswith(f"piece 0 of {PART}")
    np.testing.assert_equal(why.split()[0] in error, True)
    assert bytes(node.memory) == owner.data


def test_an_owner_that_stalls_twice_is_a_process_that_hangs(make_owner: MakeOwner, make_node: MakeNode) -> None:
    owner, node = make_owner(random_bytes(6 * PIECE)), make_node("node", stall_s=0.4)
    silent = Listener((HERE, 0), SECRET, say())
    stuck = PieceSource(HERE, int(silent.address[1]), "the owner", owner=True)
    owner.chain = NodeChain(owner.held, stuck)
    with pytest.raises(ProcessLoss, match=r"^piece 0 .*, from the owner: the owner did not send .* within 0\.4 s"):
        node.bring(owner)
    silent.close()


def direct(owner: Owner, told: list[str]) -> bytes:
    """What arrives from the owner without a chain."""
    memory = bytearray(len(owner.data))
    into = PartPieces(VERSION, memoryview(memory), whole=False, piece_bytes=PIECE)
    DirectFetcher(owner.server.source, SECRET, LIMIT).bring(owner.wanted()._replace(owner=None), into, told.append)
    return bytes(memory)


def test_a_part_comes_from_one_source_without_a_chain_and_goes_on_after_a_broken_connection(
    make_owner: MakeOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, told = make_owner(random_bytes(6 * PIECE)), list[str]()
    send = Connection.send_data

    def break_once(self: Connection, data: memoryview, idle_s: float) -> None:
        if data.obj is owner.held.piece(3).obj and bytes(data) == bytes(owner.held.piece(3)) and not told:
            self.end()
        send(self, data, idle_s)

    monkeypatch.setattr(Connection, "send_data", break_once)
    assert direct(owner, told) == owner.data
    assert [one.first for one in owner.server.requests] == [0, 3]
    assert [one.split(":")[0] for one in told] == [f"piece 3 of {PART} of version 7"]


def test_a_piece_that_is_flipped_at_the_only_source_is_never_used(make_owner: MakeOwner) -> None:
    owner, told = make_owner(random_bytes(6 * PIECE)), list[str]()
    owner.held.digest(3)
    owner.held.piece(3)[5] ^= 1
    with pytest.raises(RunError, match=r"^piece 3 of rank-00000 of version 7: its bytes do not have its digest"):
        direct(owner, told)
    assert [one.first for one in owner.server.requests] == [0, 3, 3]


def test_a_node_that_waits_for_its_own_source_is_not_taken_for_a_stalled_one(
    make_owner: MakeOwner, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.sync.pieces._ALIVE_S", 0.02)
    owner, nodes = make_owner(random_bytes(2 * PIECE), whole=False), [make_node(n, stall_s=0.3) for n in ("n1", "n2")]
    begun = [node.begin(owner) for node in nodes]
    time.sleep(0.5)
    owner.let(2)
    assert [one.result() for one in begun] == [[], []]


def test_a_node_that_cannot_be_reached_is_tried_for_one_version_only(
    make_owner: MakeOwner, make_node: MakeNode
) -> None:
    node, silent = make_node("node"), Listener((HERE, 0), SECRET, say())
    silent.close()
    errors = []
    for seed in (1, 2):
        owner = make_owner(random_bytes(2 * PIECE, seed))
        owner.chain.source(PieceSource(HERE, int(silent.address[1]), "n1"), [])
        errors.append(node.bring(owner))
        assert bytes(node.memory) == owner.data
    assert [len(one) for one in errors] == [1, 0]


def test_an_owner_that_accepts_no_connection_once_is_asked_again(
    make_owner: MakeOwner, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, node, tries = make_owner(random_bytes(2 * PIECE)), make_node("node"), []

    def connect(*given: Any) -> Connection:
        tries.append(given)
        if len(tries) == 1:
            raise ConnectionResetError("reset")
        return open_connection(*given)

    monkeypatch.setattr("trinity_sync.sync.pieces.open_connection", connect)
    [error] = node.bring(owner)
    assert "accepts no connection (reset)" in error
    assert bytes(node.memory) == owner.data


def test_a_stranger_is_refused_and_delays_nobody(make_owner: MakeOwner, make_node: MakeNode) -> None:
    owner, stranger, node = make_owner(random_bytes(PIECE)), make_node("n1", secret=b"x" * 32), make_node("n2")
    with pytest.raises(UnreachableError, match="did not accept the secret"):
        stranger.bring(owner)
    [error] = node.bring(owner)  # the stranger had asked before
    assert "accepts no connection" in error
    assert bytes(node.memory) == owner.data
    assert len(owner.server.requests) == 1


def test_a_version_that_is_no_longer_in_its_slot_is_not_sent(make_owner: MakeOwner, make_node: MakeNode) -> None:
    owner, node = make_owner(random_bytes(4 * PIECE), whole=False), make_node("node")
    begun = node.begin(owner)
    owner.let(2)
    wait_until(lambda: node.held.there == 2)
    owner.held.end("its slot has version 8 now")
    with pytest.raises(RunError, match=r"^piece 2 .* from the owner: it does not have it, or no longer"):
        begun.result()


def test_a_closed_server_ends_its_connections_and_threads(make_owner: MakeOwner, make_node: MakeNode) -> None:
    before = threading.active_count()
    owner, node = make_owner(random_bytes(4 * PIECE), whole=False), make_node("node")
    begun = node.begin(owner)
    owner.server.close()
    with pytest.raises(RunError):
        begun.result()
    node.server.close()
    owner.held.end("the run ends")
    wait_until(lambda: threading.active_count() <= before)
    with pytest.raises(UnreachableError):
        owner.server.source  # noqa: B018


# ---- the slots of a node


class Parts(BroughtParts):
    """Those of a node, in a folder of the test."""

    def __init__(self, folder: Path, *fetchers: PartFetcher, root: str = "") -> None:
        def make(part: str, nbytes: int) -> SlotArena:
            self.made.append(part)
            assert self.may_make.wait(LIMIT)
            return SlotArena.create(f"run-{part}", 2, {part: nbytes}, root=folder / root, fallback=folder / "fallback")

        super().__init__(fetchers, make, PIECE)
        self.made: list[str] = []
        self.may_make = threading.Event()
        self.may_make.set()


@pytest.fixture
def make_parts(tmp_path: Path) -> Iterator[Callable[..., Parts]]:
    made = []

    def make(*fetchers: PartFetcher, **settings: Any) -> Parts:
        made.append(Parts(tmp_path, *fetchers, **settings))
        return made[-1]

    yield make
    for parts in made:
        parts.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


MakeParts = Callable[..., Parts]


def test_all_explorers_of_a_node_share_one_arrival(
    make_owner: MakeOwner, make_node: MakeNode, make_parts: MakeParts
) -> None:
    owner, parts = make_owner(random_bytes(5 * PIECE)), make_parts(make_node("node").fetcher)
    paths = {parts.bring(owner.wanted()).result(LIMIT) for _ in range(3)}
    assert [Path(path).read_bytes()[: 5 * PIECE] for path in paths] == [owner.data]
    assert len(owner.server.requests) == 1


def test_the_next_version_of_a_slot_ends_the_one_before(
    make_owner: MakeOwner, make_node: MakeNode, make_parts: MakeParts
) -> None:
    parts, late = make_parts(make_node("node").fetcher), make_owner(random_bytes(5 * PIECE), whole=False)
    before = parts.bring(late.wanted())
    wait_until(lambda: len(late.server.requests) == 1)
    late.held.version = newer = Version(0, 8)
    after = parts.bring(late.wanted(newer))
    with pytest.raises(RunError, match="its slot is for version 8 now"):
        before.result(LIMIT)
    late.let(5)
    assert Path(after.result(LIMIT)).read_bytes()[: 5 * PIECE] == late.data


def test_a_part_that_did_not_come_is_brought_again(
    make_owner: MakeOwner, make_node: MakeNode, make_parts: MakeParts
) -> None:
    owner, parts = make_owner(random_bytes(5 * PIECE)), make_parts(make_node("node").fetcher)
    owner.held.piece(2)[0] ^= owner.held.digest(2)[0] | 1
    with pytest.raises(RunError, match="piece 2"):
        parts.bring(owner.wanted()).result(LIMIT)
    owner.held.piece(2)[:] = owner.data[2 * PIECE : 3 * PIECE]
    assert Path(parts.bring(owner.wanted()).result(LIMIT)).read_bytes()[: 5 * PIECE] == owner.data


def test_a_part_that_was_damaged_in_memory_comes_again_from_the_damaged_piece_on(
    make_owner: MakeOwner, make_node: MakeNode, make_parts: MakeParts
) -> None:
    owner, parts = make_owner(random_bytes(5 * PIECE)), make_parts(make_node("node").fetcher)
    path = Path(parts.bring(owner.wanted()).result(LIMIT))
    with path.open("r+b") as file:
        file.seek(3 * PIECE)
        file.write(bytes([owner.data[3 * PIECE] ^ 1]))
    for _ in range(2):
        parts.bring(owner.wanted()._replace(again=True)).result(LIMIT)
        assert path.read_bytes()[: 5 * PIECE] == owner.data
    assert [one.first for one in owner.server.requests] == [0, 3]
    assert parts.take_errors() == [f"piece 3 of {PART} of version 7 was damaged in memory, and is brought again"]


def test_parts_of_different_ranks_travel_at_the_same_time(
    make_owner: MakeOwner, make_node: MakeNode, make_parts: MakeParts
) -> None:
    late, owner = make_owner(random_bytes(5 * PIECE), whole=False), make_owner(random_bytes(5 * PIECE, 1))
    owner.server.hold(SLOT, "another", owner.held)
    parts = make_parts(make_node("node").fetcher)
    coming = parts.bring(late.wanted())
    wait_until(lambda: len(late.server.requests) == 1)
    path = parts.bring(owner.wanted()._replace(part="another")).result(LIMIT)
    assert Path(path).read_bytes()[: 5 * PIECE] == owner.data
    assert not coming.done()
    late.let(5)
    coming.result(LIMIT)


class Copying:
    """The next fetcher."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def bring(self, wanted: WantedPart, into: PartPieces, tell: Callable[[str], None]) -> None:
        into.fill(memoryview(self._data))


def test_where_an_owner_cannot_be_reached_the_next_fetcher_is_used_from_then_on(
    make_owner: MakeOwner, make_node: MakeNode, make_parts: MakeParts, caplog: pytest.LogCaptureFixture
) -> None:
    owner = make_owner(random_bytes(5 * PIECE))
    parts = make_parts(make_node("node", secret=b"x" * 32).fetcher, Copying(owner.data))
    for step in (7, 8):
        path = parts.bring(owner.wanted(Version(0, step))).result(LIMIT)
        assert Path(path).read_bytes()[: 5 * PIECE] == owner.data
    _, error = parts.take_errors()  # the owner is asked twice
    assert "the owner at 127.0.0.1" in error
    assert "as Ray's objects" in error
    assert parts.take_errors() == []


def test_without_another_fetcher_that_is_an_error(
    make_owner: MakeOwner, make_node: MakeNode, make_parts: MakeParts
) -> None:
    parts = make_parts(make_node("node", secret=b"x" * 32).fetcher)
    with pytest.raises(UnreachableError, match="accepts no connection"):
        parts.bring(make_owner(b"1234").wanted()).result(LIMIT)


def test_a_node_with_less_shared_memory_than_a_version_takes_it_into_a_file_and_says_so(
    make_owner: MakeOwner, make_parts: MakeParts
) -> None:
    owner = make_owner(random_bytes(5 * PIECE))
    parts = make_parts(Copying(owner.data), root="no such place")
    path = Path(parts.bring(owner.wanted()).result(LIMIT))
    assert path.read_bytes()[: 5 * PIECE] == owner.data
    [note] = parts.take_errors()
    assert "no such place cannot hold the 2 slots" in note


def test_a_node_without_room_for_a_part_says_so(make_parts: MakeParts, make_owner: MakeOwner) -> None:
    with pytest.raises(SegmentError, match="no room for 2 slots"):
        make_parts().bring(make_owner(b"").wanted()._replace(nbytes=1 << 60))


def test_what_is_there_and_what_is_to_be_told_waits_for_no_allocation(
    make_owner: MakeOwner, make_parts: MakeParts
) -> None:
    owner = make_owner(random_bytes(5 * PIECE))
    parts = make_parts(Copying(owner.data))
    parts.bring(owner.wanted()).result(LIMIT)
    parts.may_make.clear()
    begun = Begun(lambda: [parts.bring(owner.wanted()._replace(part="rank-00001")).result(LIMIT)])
    wait_until(lambda: len(parts.made) == 2)
    meanwhile = Begun(lambda: [*parts.take_errors(), parts.bring(owner.wanted()).result(LIMIT)])
    meanwhile._thread.join(0.5)
    waited, _ = not meanwhile.done, parts.may_make.set()
    assert not waited
    assert [Path(path).name for path in (*meanwhile.result(), *begun.result())] == [PART, "rank-00001"]


def test_after_the_end_no_memory_is_allocated(make_owner: MakeOwner, make_parts: MakeParts) -> None:
    owner = make_owner(random_bytes(5 * PIECE))
    parts = make_parts(Copying(owner.data))
    parts.close()
    with pytest.raises(GoneError, match="the run ends"):
        parts.bring(owner.wanted())
    assert parts.made == []


def test_memory_that_is_allocated_when_the_run_ends_is_given_back(
    make_owner: MakeOwner, make_parts: MakeParts, tmp_path: Path
) -> None:
    owner = make_owner(random_bytes(5 * PIECE))
    parts = make_parts(Copying(owner.data))
    parts.may_make.clear()
    begun = Begun(lambda: [parts.bring(owner.wanted()).result(LIMIT)])
    wait_until(lambda: parts.made == [PART])
    parts.close()
    parts.may_make.set()
    with pytest.raises(GoneError, match="the run ends"):
        begun.result()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_slots_are_made_once_for_each_size_of_a_part(make_parts: MakeParts) -> None:
    parts = make_parts()
    first, again, larger = (parts.reserve(PART, nbytes) for nbytes in (5, 5, 6))
    assert (again is first, larger is first) == (True, False)
    assert parts.made == [PART, PART]


def test_a_late_request_for_an_older_version_ends_no_newer_one(make_owner: MakeOwner, make_parts: MakeParts) -> None:
    owner = make_owner(random_bytes(5 * PIECE))
    parts = make_parts(Copying(owner.data))
    newer = parts.bring(owner.wanted(Version(0, 8)))
    with pytest.raises(GoneError, match="its slot is for version 8 now"):
        parts.bring(owner.wanted())
    assert parts.bring(owner.wanted(Version(0, 8))) is newer


def test_a_part_whose_slots_are_reserved_waits_for_no_allocation(make_owner: MakeOwner, make_parts: MakeParts) -> None:
    owner = make_owner(random_bytes(5 * PIECE))
    parts = make_parts(Copying(owner.data))
    parts.reserve(PART, len(owner.data))
    parts.may_make.clear()
    assert Path(parts.bring(owner.wanted()).result(LIMIT)).read_bytes()[: 5 * PIECE] == owner.data


def test_an_error_on_the_way_is_told_though_the_part_does_not_come(
    make_owner: MakeOwner, make_node: MakeNode, make_parts: MakeParts
) -> None:
    owner, parts = make_owner(random_bytes(5 * PIECE)), make_parts(make_node("node").fetcher)
    owner.held.piece(2)[0] ^= owner.held.digest(2)[0] | 1
    with pytest.raises(RunError, match="piece 2"):
        parts.bring(owner.wanted()).result(LIMIT)
    [error] = parts.take_errors()
    assert error.startswith("piece 2 of")
