"""Which program this process belongs to, and by which address its other processes reach this machine."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.ranks import together

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Program:
    """What `checkpoint.daemon.connecting.connect` is told of the program.

    Attributes:
        word: tells it from all others, also from an earlier start of the same job.
        address: where a server on this machine is to listen, so that all processes of the program reach it.
    """

    word: str
    address: str


def this_program() -> Program:
    """Name the program. Collective where there is a default group.

    Under Ray, it is Ray's job, of which a process without a group may ask, too, such as the driver. Else the group is
    the program, and its rank 0 draws the word: the ids of a launcher come again when it starts its processes again.

    Raises:
        RunError: on every rank, where a rank is gone; there is neither a group nor Ray; or no address is known.
    """
    grouped = dist.is_available() and dist.is_initialized()
    mine = (_drawn(os.getpid()), _machine(), socket.gethostname(), _job())
    said = together("name the program", lambda: mine) if grouped else [mine]
    job = said[0][3]
    if job is not None and all(other == job for *_, other in said):  # not where some use Ray for things of their own
        return Program(word=job, address=sys.modules["ray"].util.get_node_ip_address())
    if not grouped:
        raise RunError("this process belongs to no program: it has no process group, and does not run under Ray")
    elsewhere = [host for _, machine, host, _ in said if machine != _machine()]
    master = os.environ.get("MASTER_ADDR")
    address = _reached_by([*([master] if master else []), *elsewhere]) if elsewhere else _LOOPBACK
    return Program(word=said[0][0], address=address)


def under_ray() -> bool:
    """Whether Ray runs in this process; it is not imported for that."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _job() -> str | None:
    """Ray's job that this process belongs to; None: Ray does not run in it."""
    if not under_ray():
        return None
    context = sys.modules["ray"].get_runtime_context()
    return f"{context.get_session_name()}-{context.get_job_id()}"


@functools.cache
def _drawn(pid: int) -> str:
    """Draw the word of one process; a fork, which inherits the drawn ones, has another number."""
    return secrets.token_hex(16)


def _machine() -> str:
    """Tell what shares a loopback from what does not: the machine's start, and the network of the container."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/net').readlink()}"


def _reached_by(others: Sequence[str]) -> str:
    """Return the address of this machine from which packets go to one of the others.

    Args:
        others: names or addresses; the first that is reached by more than a loopback counts.
    """
    for other in dict.fromkeys(others):
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as looking:  # nothing is sent
                looking.connect(place)
                address: str = looking.getsockname()[0]
        except OSError:
            continue
        if not address.startswith("127.") and address != "::1":
            return address
    raise RunError(
        f"no address is known by which {', '.join(dict.fromkeys(others))} reach {socket.gethostname()}; set MASTER_ADDR"
    )
