"""Parts of versions between nodes: pieces of 4 MiB over TCP, through a chain of node agents. Needs no Ray, no torch.

The agent of the node that staged a part is its owner. It lists the nodes that ask for the part, and names to each one
the node that asked before it; to the first one itself. A node serves a piece as soon as it has it and has checked its
digest, so a version passes several nodes in about the time of one, and leaves the owner's node once:

1. An explorer's node agent asks the owner for a source (`NodeChain.source`), connects to it, and names the part, the
   version and the first piece that it lacks (`PieceRequest`).
2. The source (`PieceServer`) sends each piece behind its length and its digest. While it waits for a piece itself it
   says so each second, so a timeout of the receiver covers one hop.
3. The receiver (`PieceFetcher`) reads a piece into its place in the slot, and checks it. On a wrong digest, a closed
   connection or a timeout it asks the owner for another source, which sends the rest, beginning with that piece.

With `sync.transport=nixl` a source says only which pieces it has, and the receiver reads them with NIXL from where the
source has told (`_PLACE`, `sync.memory_reads`). Where that fails, the source is asked to send them from then on.

A source stands always before its receiver in the list, so there is no circle. A late node takes a whole version from a
node that has it. Connections are those of `host.channel`: both sides prove the run's secret before anything else.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from xxhash import xxh3_128_digest

from trinity_sync.errors import ProcessLoss, RunError, WaitTimeout
from trinity_sync.host.channel import PROOF_S, Connection, ForeignPeerError, Listener, open_connection, pack
from trinity_sync.host.logs import story
from trinity_sync.host.threads import in_background
from trinity_sync.protocol.versions import Version
from trinity_sync.sync.memory_reads import MemoryReads, ReadError, ReadPlace, open_reads
from trinity_sync.weights.slots import SlotArena

if TYPE_CHECKING:
    from trinity_sync.actors.agent_client import AgentClient

PIECE_BYTES = 4 << 20
_CONNECT_S = 5.0
_TRIES = 3
_ALIVE_S = 1.0
"""A source that waits for a piece itself says so as often."""
_HEAD = struct.Struct("!BI16s")
"""Before each piece: what follows, its bytes, its digest (xxh3_128)."""
_PIECE, _WAITING, _GONE, _PLACE = range(4)


class PieceSource(NamedTuple):
    """A node that serves a part."""

    host: str
    port: int
    who: str  # for errors
    owner: bool = False  # it staged the part


class WantedPart(NamedTuple):
    """A part to bring to a node. The reader has a lease on the version."""

    version: Version
    slot: int
    part: str
    nbytes: int
    owner: AgentClient | None  # of the node that staged it; None: there is one source, see `DirectFetcher`
    again: bool = False  # a reader found its bytes damaged

    def __str__(self) -> str:
        return f"{self.part} of version {self.version}"


class PieceRequest(NamedTuple):
    """What a receiver sends first."""

    version: Version
    slot: int
    part: str
    piece_bytes: int
    first: int  # number of the first piece that it lacks
    reads: bool = False  # it reads the pieces with NIXL, where the source has that


class GoneError(RunError):
    """A node does not have a part of a version, or no longer."""


class UnreachableError(RunError):
    """The owner of a part accepts no connection from this node."""


class PartPieces:
    """The pieces of a part of a version in this node's memory. They arrive in order; each may be read once it is there.

    Args:
        memory: of the part.
        whole: all are there.
    """

    def __init__(self, version: Version, memory: memoryview, *, whole: bool, piece_bytes: int = PIECE_BYTES) -> None:
        self.version, self.piece_bytes = version, piece_bytes
        self.count = -(-len(memory) // piece_bytes)
        self._memory = memory
        self._digests: list[bytes | None] = [None] * self.count
        self._there = self.count if whole else 0
        self._changed = threading.Condition()
        self._ended: str | None = None
        self._arriving: Connection | None = None

    @property
    def there(self) -> int:
        """The number of pieces that have arrived."""
        return self._there

    def piece(self, number: int) -> memoryview:
        """Return the memory of a piece."""
        return self._memory[number * self.piece_bytes : (number + 1) * self.piece_bytes]

    def place(self, reads: MemoryReads) -> ReadPlace:
        """Return where other nodes read the pieces."""
        return reads.place(self._memory)

    def digest(self, number: int) -> bytes:
        """Return the digest of a piece that is there: the one that it arrived with, so later damage is noticed."""
        found = self._digests[number]
        if found is None:
            found = self._digests[number] = xxh3_128_digest(self.piece(number))
        return found

    def arrived(self, digest: bytes | None = None) -> None:
        """Note that the next piece is there and checked."""
        with self._changed:
            self._digests[self._there] = digest
            self._there += 1
            self._changed.notify_all()

    def fill(self, data: memoryview) -> None:
        """Copy the missing pieces from a copy of the part."""
        while self._there < self.count:
            start = self._there * self.piece_bytes
            self.check()
            self.piece(self._there)[:] = data[start : start + self.piece_bytes]
            self.arrived()

    def keep(self, before: PartPieces) -> None:
        """Take the first pieces of an earlier arrival in this memory that still have the digests of their arrival."""
        for number, digest in enumerate(before._digests):
            if xxh3_128_digest(self.piece(number)) != digest:
                break
            self.arrived(digest)

    def wait(self, number: int, seconds: float) -> bool:
        """Wait until a piece is there; return whether it is. GoneError: the memory is for another version now."""
        with self._changed:
            self._changed.wait_for(lambda: self._there > number or self._ended is not None, seconds)
            self.check()
            return self._there > number

    def check(self) -> None:
        """GoneError: see `wait`."""
        if self._ended is not None:
            raise GoneError(self._ended)

    def arrive_over(self, connection: Connection | None) -> None:
        """Note the connection that brings it, so that `end` ends it."""
        with self._changed:
            self.check()
            self._arriving = connection

    def end(self, why: str) -> None:
        """End its arrival and all waits for its pieces."""
        with self._changed:
            self._ended = self._ended or why
            if self._arriving is not None:
                self._arriving.end()
            self._changed.notify_all()


class NodeChain:
    """The nodes that take a part of a version, in the order in which they asked.

    Args:
        held: the part, where it was staged.
        owner: serves it.
    """

    def __init__(self, held: PartPieces, owner: PieceSource) -> None:
        self.held = held
        self._owner = owner._replace(owner=True)
        self._nodes: list[PieceSource] = []
        self._left: set[PieceSource] = set()

    def source(self, asker: PieceSource, failed: Collection[PieceSource]) -> PieceSource:
        """Return the source for a node: the one that asked before it. Those that have `failed` it are no sources any
        more, and take from the owner, so that no node ever waits for itself.
        """
        self._left.update(failed)
        if asker in self._left:
            return self._owner
        if asker not in self._nodes:
            self._nodes.append(asker)
        before = self._nodes[: self._nodes.index(asker)]
        return next((node for node in reversed(before) if node not in self._left), self._owner)


class PieceServer:
    """Serves the parts that this node has to nodes that know the secret; one thread each.

    Args:
        host: the node's address, where it listens.
        secret: of the run; None: it serves nothing.
        who: its name in errors.
        stall_s: timeout for a receiver to take something, seconds.
    """

    def __init__(self, host: str, secret: bytes | None, who: str, stall_s: float) -> None:
        self._host, self._secret, self._who, self._stall_s = host, secret, who, stall_s
        self._held: dict[tuple[int, str], PartPieces] = {}
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._closed = False
        self._listener: Listener | None = None

    @property
    def source(self) -> PieceSource:
        """The address. It listens from the first use on, as nothing does on a single node.

        Raises:
            UnreachableError: it is closed, or the address does not belong to this machine.
        """
        with self._lock:
            if self._closed or self._secret is None:
                raise UnreachableError(f"{self._who} serves no parts")
            if self._listener is None:
                try:
                    self._listener = Listener((self._host, 0), self._secret, self._serve, min(PROOF_S, self._stall_s))
                except OSError as error:
                    raise UnreachableError(f"{self._who} cannot listen at {self._host}: {error}") from error
            return PieceSource(self._host, int(self._listener.address[1]), self._who)

    def hold(self, slot: int, part: str, held: PartPieces) -> None:
        """Serve a part from now on, in place of that of another version in its slot."""
        with self._lock:
            self._held[slot, part] = held

    def close(self) -> None:
        """End all connections, and accept no others. May be called again."""
        with self._lock:
            self._closed = True
            if self._listener is not None:
                self._listener.close()
            self._held.clear()
            for connection in self._connections:
                connection.end()

    def _serve(self, connection: Connection) -> None:
        with closing(connection):
            with self._lock:
                if self._closed:
                    return
                self._connections.add(connection)
            try:
                self._send(connection, connection.receive(self._stall_s))
            except (EOFError, OSError):  # the receiver has ended, takes nothing or has found another source
                pass
            finally:
                with self._lock:
                    self._connections.discard(connection)

    def _send(self, connection: Connection, wanted: PieceRequest) -> None:
        held = self._held.get((wanted.slot, wanted.part))
        try:
            if held is None or (held.version, held.piece_bytes) != (wanted.version, wanted.piece_bytes):
                raise GoneError(f"{wanted.part} of version {wanted.version} is not here")
            place: ReadPlace | None = None
            if wanted.reads:
                placing = in_background(partial(_place, held), "nixl")  # at its first use NIXL takes seconds
                while not wait([placing], _ALIVE_S).done:
                    connection.send(_HEAD.pack(_WAITING, 0, b""), self._stall_s)
                place = placing.result()
            if place is not None:
                connection.send(_HEAD.pack(_PLACE, 0, b"") + pack(place), self._stall_s)
            for number in range(wanted.first, held.count):
                while not held.wait(number, _ALIVE_S):
                    connection.send(_HEAD.pack(_WAITING, 0, b""), self._stall_s)
                piece = held.piece(number)
                connection.send(_HEAD.pack(_PIECE, len(piece), held.digest(number)), self._stall_s)
                if place is None:
                    connection.send_data(piece, self._stall_s)
        except GoneError:
            connection.send(_HEAD.pack(_GONE, 0, b""), self._stall_s)


def _place(held: PartPieces) -> ReadPlace | None:
    """Return where a part can be read; None: NIXL does not work here, which this node says when it takes a part."""
    try:
        return held.place(open_reads())
    except ReadError as error:
        story.warning("%s", error)
        return None


# ---- the receiving side


class PartFetcher(Protocol):
    """A way for parts between nodes. Any thread."""

    def bring(self, wanted: WantedPart, into: PartPieces, tell: Callable[[str], None]) -> None:
        """Bring the pieces that `into` lacks.

        Args:
            tell: called with each error, before it goes on in another way.

        Raises:
            RunError: the part does not come.
        """
        ...


class PieceReader:
    """Takes pieces from a source over TCP, see the module.

    Args:
        secret: of the source.
        stall_s: timeout for a source to send something, seconds.
        reads: pieces are read with NIXL, where both sides have it.
    """

    def __init__(self, secret: bytes, stall_s: float, *, reads: bool = False) -> None:
        self._secret, self._stall_s, self._reads = secret, stall_s, reads
        self._sending: set[PieceSource] = set()  # sources whose memory cannot be read

    def _take(self, wanted: WantedPart, into: PartPieces, source: PieceSource) -> None:
        with closing(self._connect(source)) as connection:
            into.arrive_over(connection)
            try:
                reads = self._reads and source not in self._sending
                place: ReadPlace | None = None
                request = PieceRequest(wanted.version, wanted.slot, wanted.part, into.piece_bytes, into.there, reads)
                connection.send(pack(request), self._stall_s)
                while into.there < into.count:
                    place = self._take_piece(connection, into, place, reads)
            except TimeoutError:
                raise WaitTimeout(source.who, f"send piece {into.there} of {wanted}", self._stall_s) from None
            finally:
                with contextlib.suppress(GoneError):
                    into.arrive_over(None)

    def _connect(self, source: PieceSource) -> Connection:
        try:
            return open_connection((source.host, source.port), self._secret, min(_CONNECT_S, self._stall_s))
        except (ForeignPeerError, EOFError, OSError) as error:
            place = f"{source.who} at {source.host}:{source.port}"
            raise UnreachableError(f"{place} accepts no connection ({error or 'it was closed'})") from error

    def _take_piece(
        self, connection: Connection, into: PartPieces, place: ReadPlace | None, reads: bool
    ) -> ReadPlace | None:
        """Take what the source says next; return where its memory can be read, if it has said so."""
        head = bytearray(_HEAD.size)
        connection.receive_data(memoryview(head), self._stall_s)
        kind, nbytes, digest = _HEAD.unpack(head)
        if kind == _WAITING:
            return place
        if kind == _PLACE:
            return ReadPlace(*connection.receive(self._stall_s))
        if kind == _GONE:
            raise GoneError("it does not have it, or no longer")
        if reads and place is None:
            raise ReadError("its source has no NIXL")
        piece = into.piece(into.there)
        if kind != _PIECE or nbytes != len(piece):
            raise RunError(f"it sent {nbytes} bytes of kind {kind}, the piece has {len(piece)}")
        if place is None:
            connection.receive_data(piece, self._stall_s)
        else:
            open_reads().read(place, into.there * into.piece_bytes, piece, self._stall_s, into.check)
        if xxh3_128_digest(piece) != digest:
            raise RunError("its bytes do not have its digest")
        into.arrived(digest)
        return place


class PieceFetcher(PieceReader):
    """Over the chain of nodes, see the module.

    Args:
        server: of this node, which serves the pieces on.
        secret, stall_s, reads: as of `PieceReader`; the secret is that of the run.
    """

    def __init__(self, server: PieceServer, secret: bytes, stall_s: float, *, reads: bool = False) -> None:
        super().__init__(secret, stall_s, reads=reads)
        self._server = server
        self._unreachable: set[PieceSource] = set()  # which each version would try again for `_CONNECT_S`

    def bring(self, wanted: WantedPart, into: PartPieces, tell: Callable[[str], None]) -> None:
        assert wanted.owner is not None, "a part of a chain has an owner"
        asker = self._server.source
        self._server.hold(wanted.slot, wanted.part, into)
        failed = list(self._unreachable)
        self._open_reads(tell)
        while into.there < into.count:
            asking = wanted.owner.source(wanted.version, wanted.slot, wanted.part, asker, failed)
            source = asking.result(self._stall_s)
            try:
                self._take(wanted, into, source)
            except ReadError as error:
                into.check()
                self._sending.add(source)
                tell(f"piece {into.there} of {wanted}: {error}; so {source.who} sends its pieces from now on")
            except (RunError, EOFError, OSError) as error:
                into.check()
                why = f"piece {into.there} of {wanted}, from {source.who}: {str(error) or 'it closed the connection'}"
                unreachable = isinstance(error, UnreachableError)
                if source in failed:  # the owner itself, once more
                    if unreachable:
                        raise
                    raise (ProcessLoss if isinstance(error, ProcessLoss) else RunError)(why) from error
                tell(why)
                failed.append(source)
                if unreachable and not source.owner:
                    self._unreachable.add(source)

    def _open_reads(self, tell: Callable[[str], None]) -> None:
        if self._reads:
            try:
                open_reads()
            except ReadError as error:
                self._reads = False
                tell(f"{error}; so parts travel over TCP to this node")


class DirectFetcher(PieceReader):
    """From one source, to which no node agent leads; another try goes on with the piece that failed."""

    def __init__(self, source: PieceSource, secret: bytes, stall_s: float) -> None:
        super().__init__(secret, stall_s)
        self._source = source

    def bring(self, wanted: WantedPart, into: PartPieces, tell: Callable[[str], None]) -> None:
        for left in reversed(range(_TRIES)):
            try:
                self._take(wanted, into, self._source)
                return
            except (RunError, EOFError, OSError) as error:
                into.check()
                why = f"piece {into.there} of {wanted}: {str(error) or 'the connection was closed'}"
                if not left or isinstance(error, UnreachableError):
                    raise (ProcessLoss if isinstance(error, ProcessLoss) else RunError)(why) from error
                tell(why)


_AT_ONCE = 4
"""Parts that travel to a node at the same time. More would delay each piece at each hop."""


class BroughtPart(NamedTuple):
    """A part of another node, as the agent has it."""

    path: str
    errors: Sequence[str]  # that were overcome since the last answer, and a lack of shared memory


class BroughtParts:
    """Parts of other nodes in slots of this one, each brought once for all explorers of the node.

    A part lies in the slot of the same number as at its owner, which is filled again only when no lease on its version
    is left: then no explorer here and no next node needs the version before.

    Args:
        fetchers: the first is replaced by the next for good where an owner cannot be reached.
        make_arena: makes the slots of a part of so many bytes.
    """

    def __init__(
        self,
        fetchers: Sequence[PartFetcher],
        make_arena: Callable[[str, int], SlotArena],
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._fetchers = list(fetchers)
        self._make_arena = make_arena
        self._piece_bytes = piece_bytes
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="part")
        self._lock = threading.Lock()
        self._making = threading.Lock()  # held while memory is allocated
        self._telling = threading.Lock()  # the agent's event loop needs it
        self._arenas: dict[str, tuple[int, SlotArena]] = {}
        self._coming: dict[tuple[int, str], tuple[PartPieces, Future[str]]] = {}
        self._errors: list[str] = []
        self._closed = False

    def reserve(self, part: str, nbytes: int) -> SlotArena:
        """Return the slots of a part. They are made at the first call, which takes seconds for gigabytes; meanwhile
        other parts arrive.

        Raises:
            SegmentError: there is no room for them.
        """
        with self._making:
            size, arena = self._arenas.get(part, (None, None))
            if arena is not None and size == nbytes:
                return arena
            if arena is not None:
                arena.close()
            self._check_open()
            arena = self._make_arena(part, nbytes)
            with self._lock:
                self._arenas[part] = nbytes, arena
                closed = self._closed
        if closed:
            arena.close()
        for note in arena.notes:
            self._tell(note)
        return arena

    def bring(self, wanted: WantedPart) -> Future[str]:
        """Begin to bring a part, unless it is here or on its way; return its file, once it is there. A part that was
        damaged here comes again, from its first damaged piece on.

        Raises:
            GoneError: a newer version is in its slot.
            SegmentError: there is no room for it.
        """
        key = wanted.slot, wanted.part
        size, arena = self._arenas.get(wanted.part, (None, None))
        if arena is None or size != wanted.nbytes:
            arena = self.reserve(wanted.part, wanted.nbytes)
        with self._lock:
            self._check_open()
            held, coming = self._coming.get(key, (None, None))
            if held is not None and coming is not None:
                failed = coming.done() and coming.exception() is not None
                if held.version == wanted.version and not failed and not (wanted.again and coming.done()):
                    return coming
                if wanted.version < held.version:
                    raise GoneError(f"{wanted} is not brought: its slot is for version {held.version} now")
                held.end(f"its slot is for version {wanted.version} now")
            memory = memoryview(arena.map(*key))[: wanted.nbytes]
            fresh = PartPieces(wanted.version, memory, whole=False, piece_bytes=self._piece_bytes)
            begun = self._threads.submit(self._bring, wanted, fresh, str(arena.path(*key)), held, coming)
            self._coming[key] = fresh, begun
            return begun

    def _check_open(self) -> None:
        if self._closed:
            raise GoneError("the run ends")

    def take_errors(self) -> Sequence[str]:
        """Return the errors that were overcome since the last call."""
        with self._telling:
            errors, self._errors = self._errors, []
        return errors

    def close(self) -> None:
        """End all arrivals and free the memory."""
        with self._lock:
            self._closed = True
            for held, _ in self._coming.values():
                held.end("the run ends")
            self._threads.shutdown(wait=False, cancel_futures=True)
            for _, arena in self._arenas.values():
                arena.close()
            self._coming.clear()
            self._arenas.clear()

    def _bring(
        self, wanted: WantedPart, held: PartPieces, path: str, before: PartPieces | None, coming: Future[str] | None
    ) -> str:
        if coming is not None:
            wait([coming])
        try:
            if before is not None and before.version == wanted.version:
                held.keep(before)
                if before.there == held.count > held.there:
                    self._tell(f"piece {held.there} of {wanted} was damaged in memory, and is brought again")
            while True:
                held.check()
                fetcher = self._fetchers[0]
                try:
                    fetcher.bring(wanted, held, self._tell)
                    break
                except UnreachableError as error:
                    self._replace(fetcher, error)
        except BaseException as error:
            held.end(str(error))
            raise
        return path

    def _replace(self, fetcher: PartFetcher, error: UnreachableError) -> None:
        """Go on with the next fetcher; raise the error if there is none."""
        with self._lock:
            if self._fetchers[0] is fetcher:
                if len(self._fetchers) == 1:
                    raise error
                del self._fetchers[0]
                self._tell(f"{error}; so versions travel as Ray's objects from now on")

    def _tell(self, error: str) -> None:
        story.warning("%s", error)
        with self._telling:
            self._errors.append(error)
