"""What goes over a connection: first the proof that both sides know the secret, then messages, each with its length.

Nothing is unpickled of who has not proved it. What follows the proof is neither encrypted nor signed, as with
`multiprocessing.connection`.
"""

from __future__ import annotations

import asyncio
import hmac
import pickle
import secrets
import socket
import struct
import time
from typing import Any

from trinity_sync.errors import RunError

SECRET_BYTES = 32
#: Limit of the proof, seconds: who listens there and is no actor of ours says nothing, or something else.
PROOF_S = 10.0

_NONCE = 32
_PROOF = 32
_LENGTH = struct.Struct("!Q")

# Of a machine that is gone without a word, the end is noticed after so many seconds.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class ForeignPeerError(RunError):
    """Who is at the other end of a connection does not know the secret."""


def pack(message: object) -> bytes:
    """Return a message as it goes over a connection."""
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


def keep_alive(sock: socket.socket) -> None:
    """Have the death of the other machine noticed, and send small messages at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# ---- the side that calls, which blocks


def prove(sock: socket.socket, secret: bytes) -> None:
    """Prove to a server that this side knows the secret, and have it prove the same, within `PROOF_S`.

    Raises:
        ForeignPeerError: it does not know it, or does not take our word.
        OSError: the connection broke, or nothing came.
    """
    until = time.monotonic() + PROOF_S
    theirs = _read(sock, _NONCE, until)
    ours = secrets.token_bytes(_NONCE)
    sock.sendall(ours + _proof(secret, b"client", theirs, ours))
    try:
        proof = _read(sock, _PROOF, until)
    except EOFError:
        raise ForeignPeerError("it did not accept the secret") from None
    if not hmac.compare_digest(proof, _proof(secret, b"server", theirs, ours)):
        raise ForeignPeerError("it does not know the secret")


def receive(sock: socket.socket) -> Any:
    """Wait for the next message.

    Raises:
        EOFError: there will be none.
        OSError: the connection broke.
    """
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    return pickle.loads(_read(sock, length))


def _read(sock: socket.socket, length: int, until: float | None = None) -> bytes:
    data = bytearray()
    while len(data) < length:
        if until is not None:
            sock.settimeout(max(until - time.monotonic(), 0.001))
        piece = sock.recv(min(length - len(data), 1 << 20))
        if not piece:
            raise EOFError("the connection was closed")
        data += piece
    return bytes(data)


# ---- the side that answers, on an event loop


async def have_proved(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Have a caller prove that it knows the secret, and prove the same.

    Raises:
        ForeignPeerError: it does not know it.
        TimeoutError: it did not say anything in time.
        EOFError, OSError: the connection broke.
    """
    async with asyncio.timeout(PROOF_S):
        ours = secrets.token_bytes(_NONCE)
        writer.write(ours)
        theirs, proof = await reader.readexactly(_NONCE), await reader.readexactly(_PROOF)
        if not hmac.compare_digest(proof, _proof(secret, b"client", ours, theirs)):
            raise ForeignPeerError("it does not know the secret")
        writer.write(_proof(secret, b"server", ours, theirs))
        await writer.drain()


async def receive_next(reader: asyncio.StreamReader) -> Any:
    """As `receive`."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def _proof(secret: bytes, side: bytes, servers: bytes, clients: bytes) -> bytes:
    """What only who knows the secret can say of the two numbers; `side`: whose word it is, which the other cannot
    send back as its own.
    """
    return hmac.digest(secret, side + servers + clients, "sha256")
