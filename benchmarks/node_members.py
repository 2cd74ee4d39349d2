"""A node agent without Ray, in a namespace of `nodes.py --pieces`. The first is the owner of the parts: it answers who
takes from whom, and has all nodes begin a version at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

from xxhash import xxh3_128_hexdigest

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.host.channel import Connection, Listener, open_connection, pack
from trinity_sync.protocol.versions import Version
from trinity_sync.sync.pieces import (
    BroughtParts,
    NodeChain,
    PartPieces,
    PieceFetcher,
    PieceServer,
    PieceSource,
    WantedPart,
)
from trinity_sync.weights.slots import SlotArena

KEY = b"k" * 32
PORT = 7000
LIMIT_S = 600.0
_MIB = 1 << 20
_STAMP = struct.Struct("!QQ")


def owner(host: str, others: int, parts: int, nbytes: int, versions: int, root: str) -> None:
    """Print of each version the seconds from the word to begin to the last node that has it, processor seconds, and how
    many nodes took it. One that dies is left out, and may join again.
    """
    server, chains = PieceServer(host, KEY, "the owner", LIMIT_S), dict[tuple[int, str], NodeChain]()
    sizes = {f"part-{number}": nbytes // parts for number in range(parts)}
    ready: SimpleQueue[Connection] = SimpleQueue()

    def answer(connection: Connection) -> None:
        """Answer a node's questions, or let it join."""
        if connection.receive(LIMIT_S) == "join":
            ready.put(connection)
            return
        while True:
            slot, part, asker, failed = connection.receive(LIMIT_S)
            connection.send(pack(chains[slot, part].source(asker, failed)), LIMIT_S)

    with SlotArena.create(f"owner-{os.getpid()}", 2, sizes, root=root, fallback=root) as arena:  # type: ignore[arg-type]
        for slot in range(2):
            for part, size in sizes.items():
                arena.map(slot, part)[:size] = secrets.token_bytes(_MIB) * (size // _MIB)
        listener = Listener((host, PORT), KEY, answer)
        joined = [ready.get(timeout=LIMIT_S) for _ in range(others)]
        found = []
        for step in range(versions):
            version, slot = Version(0, step), step % 2
            while not ready.empty() or (step == versions - 1 and len(joined) < others):
                joined.append(ready.get(timeout=LIMIT_S))
            digests = {}
            for part, size in sizes.items():
                for at in range(0, size, _MIB):  # no two versions, and no two pieces, are the same
                    arena.map(slot, part)[at : at + _STAMP.size] = _STAMP.pack(step, at)
                digests[part] = xxh3_128_hexdigest(arena.map(slot, part)[:size])
                held = PartPieces(version, memoryview(arena.map(slot, part))[:size], whole=True)
                server.hold(slot, part, held)
                chains[slot, part] = NodeChain(held, server.source)
            print(f"version {step}", flush=True)
            began, used = time.perf_counter(), time.process_time()
            theirs = answers({connection: (version, slot, sizes) for connection in joined})
            took, owners = time.perf_counter() - began, time.process_time() - used
            arrived = answers(dict.fromkeys(theirs, "digests"))
            if any(one != digests for one in arrived.values()):
                raise SystemExit(f"other bytes than those of version {step}: {[*arrived.values()]}, {digests}")
            joined = list(arrived)
            found.append({"s": took, "owner_cpu_s": owners, "cpu_s": list(theirs.values()), "nodes": len(joined)})
        for connection in joined:
            connection.send(pack(None), LIMIT_S)
        listener.close()
        server.close()
    print(json.dumps(found))


def answers(told: dict[Connection, object]) -> dict[Connection, Any]:
    """Tell each node something, and return the answers of those that live."""
    for connection, words in told.items():
        with contextlib.suppress(OSError):
            connection.send(pack(words), LIMIT_S)
    found = {}
    for connection in told:
        with contextlib.suppress(EOFError, OSError):
            found[connection] = connection.receive(LIMIT_S)
    return found


class RemoteOwner:
    """The owner, as a transport asks it."""

    who = "the owner"

    def __init__(self, host: str) -> None:
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        for _ in range(8):
            connection = connect(host)
            connection.send(pack("ask"), LIMIT_S)
            self._idle.put(connection)

    def source(self, version: Version, slot: int, part: str, asker: PieceSource, failed: list[PieceSource]) -> Any:
        connection = self._idle.get()
        connection.send(pack((slot, part, asker, failed)), LIMIT_S)
        answer = connection.receive(LIMIT_S)
        self._idle.put(connection)
        return SimpleNamespace(result=lambda timeout_s: answer)


def connect(host: str) -> Connection:
    """Connect to the owner, which may still be starting."""
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            return open_connection((host, PORT), KEY, LIMIT_S)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def node(host: str, owner_host: str, root: str) -> None:
    """Take versions until the owner has no more."""
    server = PieceServer(host, KEY, f"node {host}", LIMIT_S)

    def make(part: str, nbytes: int) -> SlotArena:
        return SlotArena.create(f"{host}-{part}-{os.getpid()}", 2, {part: nbytes}, root=root, fallback=root)  # type: ignore[arg-type]

    brought = BroughtParts([PieceFetcher(server, KEY, LIMIT_S)], make)
    asked, words = cast(AgentClient, RemoteOwner(owner_host)), connect(owner_host)
    words.send(pack("join"), LIMIT_S)
    while (given := words.receive(LIMIT_S)) is not None:
        version, slot, sizes = given
        used = time.process_time()
        coming: list[Future[str]] = [
            brought.bring(WantedPart(version, slot, part, size, asked)) for part, size in sizes.items()
        ]
        paths = {part: one.result(LIMIT_S) for part, one in zip(sizes, coming, strict=True)}
        words.send(pack(time.process_time() - used), LIMIT_S)
        assert words.receive(LIMIT_S) == "digests"
        found = {part: xxh3_128_hexdigest(Path(path).read_bytes()[: sizes[part]]) for part, path in paths.items()}
        words.send(pack(found), LIMIT_S)
    server.close()
    brought.close()


if __name__ == "__main__":
    role, *given = sys.argv[1:]
    if role == "owner":
        others, parts, nbytes, versions = map(int, given[1:5])
        owner(given[0], others, parts, nbytes, versions, given[5])
    else:
        node(*given)
