"""Child processes that isolate the caller from a library that hangs, leaves threads behind or changes the whole
process. Used for mirrors, trackers, rewards, tokenizers and digests.

`multiprocessing.Process` does not serve here: it runs the parent's main module again.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import pickle
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, Self

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.interrupts import leave_to_driver, left_to_driver
from trinity_sync.host.logs import keep_short
from trinity_sync.host.terminal import open_missing

OWN_NAMES = "TRINITY_SYNC_OWN_NAMES"
"""Environment variable that lists, separated by blanks, the user's own variables that look like Ray's."""
_PIECE = 1 << 16
_CREDENTIALS = struct.Struct("iII")
_CONTROL = socket.CMSG_SPACE(_CREDENTIALS.size)  # no room for file descriptors, which would be open here then


class ChildPipe:
    """The parent's end of the connection to a child, whose end is a `multiprocessing.connection.Connection`.

    The kernel names the sender of each piece, and pieces of other processes are dropped: a fork of the child, which has
    the connection open as well, can neither answer for it nor damage its messages. `sender`: pid of the child; None:
    the first process that sends. `most_bytes`: limit of one message; a longer one ends the connection.
    """

    def __init__(self, end: socket.socket, pid: int, message_s: float) -> None:
        self.sender: int | None = pid
        self.most_bytes = (1 << 31) - 1
        self._end, self._message_s = end, message_s
        self._end.setblocking(False)
        self._pidfd = os.pidfd_open(pid)
        self._close_pidfd = weakref.finalize(self, os.close, self._pidfd)
        self._data = bytearray()
        self._over = False

    @property
    def descriptors(self) -> tuple[int, int]:
        """File descriptors that become readable before `poll` returns True."""
        return self._end.fileno(), self._pidfd

    def ended(self, within_s: float) -> bool:
        """Wait until the child has ended; return False at the timeout."""
        return _readable((self._pidfd,), within_s)

    def send(self, message: object, limit_s: float | None = None) -> None:
        """Send a message. `limit_s`: for the child to read it, seconds; None: the pipe's limit. Raises TimeoutError:
        the child has not read all of it in time; the connection cannot send any more.
        """
        data = pickle.dumps(message)
        head = struct.pack("!i", len(data)) if len(data) < 1 << 31 else struct.pack("!iQ", -1, len(data))
        self._end.settimeout(limit_s or self._message_s)  # for all of it
        try:
            self._end.sendall(head + data)
        except TimeoutError:
            self._end.shutdown(socket.SHUT_RDWR)
            raise
        finally:
            self._end.setblocking(False)

    def poll(self, within_s: float | None) -> bool:
        """Wait until `recv` would not block; return False at the timeout (seconds; None: no limit)."""
        until = math.inf if within_s is None else time.monotonic() + within_s
        while True:
            gone = self.ended(0.0)  # before the rest is read: nothing comes after
            while not self._over and self._whole() is None and self._read() and time.monotonic() < until:
                pass
            self._over = self._over or gone
            if self._over or self._whole() is not None:
                return True
            if (left := until - time.monotonic()) <= 0:
                return False
            _readable(self.descriptors, left)

    def recv(self) -> Any:
        """Wait for the next message. EOFError: the child has ended or closed the connection."""
        return pickle.loads(self.recv_bytes())

    def recv_bytes(self) -> bytes:
        self.poll(None)
        if (whole := self._whole()) is None:
            raise EOFError("the connection was closed")
        message = bytes(self._data[whole])
        del self._data[: whole.stop]
        return message

    def close(self) -> None:
        self._end.close()
        self._close_pidfd()

    def _whole(self) -> slice | None:
        """Return the place of the first message in the data, None if it is incomplete."""
        if len(self._data) < 4:
            return None
        length = struct.unpack_from("!I", self._data)[0]
        self._over = self._over or length > self.most_bytes
        return slice(4, 4 + length) if length <= min(len(self._data) - 4, self.most_bytes) else None

    def _read(self) -> bool:
        """Read a piece; return whether there was one."""
        try:
            data, control, _, _ = self._end.recvmsg(_PIECE, _CONTROL)
        except BlockingIOError:
            return False
        except OSError:
            data, control = b"", []
        self._over = not data
        for _, _, said in control:
            sender = _CREDENTIALS.unpack(said)[0]
            self.sender = self.sender or sender
            if sender == self.sender:
                self._data += data
        return bool(data)


class Child(NamedTuple):
    """A child process and the connection to it. As a context it ends with the block."""

    process: subprocess.Popen[bytes]
    pipe: ChildPipe

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.pipe.close()

    def status(self, within_s: float) -> int | None:
        """Wait for the exit status; return None at the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(within_s)
        return None

    def end(self) -> None:
        """Kill the process; any thread. A hung network disk can block the exit for ever, so the wait has a limit."""
        self.process.kill()
        self.status(_END_S)


def start_child(
    module: str, log: Path | None, message_s: float = 10, further: Sequence[int] = (), with_driver: bool = True
) -> Child:
    """Start ``serve(descriptor)`` of a module in a child process, which ignores the signals that end a run. It has this
    process's module path and the user's environment. `message_s`: limit for the child to read a message, seconds.
    """
    open_missing()
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    theirs.setblocking(True)  # whatever `socket.setdefaulttimeout` says
    with theirs, contextlib.ExitStack() as opened:
        on_error = opened.enter_context(contextlib.ExitStack())
        on_error.push(ours)
        output: int | IO[bytes] = 2
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = opened.enter_context(open(log, "ab"))
            keep_short(log)
        given = [theirs.fileno(), *further]
        end = "from trinity_sync.host.process import end_with_driver; end_with_driver(); " if with_driver else ""
        program = (
            f"from trinity_sync.host.interrupts import leave_to_driver; leave_to_driver(); {end}"
            f"from {module} import serve; serve({', '.join(map(str, given))})"
        )
        opened.enter_context(left_to_driver())
        child = subprocess.Popen(
            python(program),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=given,
            env=users_environment(),
            # Ctrl-C is for the run, which lets a copy finish. The child stays in the session: Linux may share the
            # processors between sessions first, so a low priority would not yield to the run.
            process_group=0,
        )
        pipe = ChildPipe(ours, child.pid, message_s)
        on_error.pop_all()
        return Child(child, pipe)


def python(code: str) -> list[str]:
    """Return the command that runs code with this process's module path. Unlike PYTHONPATH, its own children do not
    inherit the path.
    """
    # entries that do not exist are names of import hooks, such as those of editable packages
    path = [str(Path(place).absolute()) if os.path.exists(place or ".") else place for place in sys.path]  # noqa: PTH110
    return [sys.executable, "-u", "-P", "-c", f"import sys; sys.path[:] = {path!r}; {code}"]


def own_names() -> dict[str, str]:
    """Return the variable by which `users_environment` keeps the user's own settings in the processes of a run."""
    started = Path("/proc/self/environ").read_text(errors="replace").split("\0")
    return {OWN_NAMES: " ".join(filter(_looks_like_rays, (line.partition("=")[0] for line in started)))}


def users_environment() -> dict[str, str]:
    """Return the environment without the variables that Ray adds for its own processes."""
    own = os.environ.get(OWN_NAMES, "").split()
    return {name: value for name, value in os.environ.items() if name in own or not _looks_like_rays(name)}


def _looks_like_rays(name: str) -> bool:
    return name.startswith(("RAY_", "__RAY_", "PYTHONBREAKPOINT", "SPT_NOENV"))


def _readable(descriptors: Sequence[int], within_s: float) -> bool:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if within_s == math.inf else within_s * 1000))


# Detached processes, which outlive the one that starts them, in a session of their own.


Report = Callable[[bytes], None]
"""Reports the result of the start, once, to the waiting starter."""


class KilledError(RunError):
    """A process ended without a report or any output: it was killed."""


def start_detached(module: str, given: bytes, *, who: str, timeout_s: float) -> bytes:
    """Start ``serve(given, report)`` of a module in a detached process, and return its report.

    The process is not a fork: it has none of this process's sockets, threads or GPU contexts, does not keep its output
    open, and gets no signals of the terminal. `timeout_s`: limit for the report, seconds. A late process is not killed.
    Raises KilledError: it ended without a report and without output.
    """
    try:
        child = subprocess.Popen(
            python(f"from {__name__} import become; become({module!r})"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise RunError(f"{who} could not be started: {error}") from error
    try:
        reported, printed = child.communicate(given, timeout_s)
    except subprocess.TimeoutExpired:
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        raise WaitTimeout(who, "start", timeout_s) from None
    if not reported:
        lines = printed.decode(errors="replace").strip().splitlines()
        if not lines:
            raise KilledError(f"{who} could not start: it was killed")
        raise RunError(f"{who} could not start: {lines[-1]}")
    return reported


def become(module: str) -> None:
    """Run the detached process; called by its first line."""
    given = sys.stdin.buffer.read()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    to_starter = os.dup(1)
    os.dup2(2, 1)  # a library's output is not a report

    def report(said: bytes) -> None:
        nonlocal to_starter
        if to_starter >= 0:
            _let_go_of_output()
            try:
                with os.fdopen(to_starter, "wb") as pipe:
                    pipe.write(said)
            except OSError:  # the starter has ended
                pass
            to_starter = -1

    importlib.import_module(module).serve(given, report)


def _let_go_of_output() -> None:
    """Replace the starter's pipes by ``/dev/null``; an output that is a log by now stays."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        if stat.S_ISFIFO(os.fstat(number).st_mode):
            os.dup2(nothing, number)
    os.close(nothing)


# A process that ends with all of its descendants, whatever their sessions. Its parent, the keeper, ends them.


_PDEATHSIG, _CHILD_SUBREAPER = 1, 36
_END_S = 20
"""Limit for the end of a killed process, seconds."""


def go_on_kept(lifeline: int, forwarded: signal.Signals, not_kept: Sequence[int]) -> None:
    """Continue in a fork of this process, which becomes its keeper. The fork ignores signals that end a run.

    The keeper ends with the fork's exit status, after all descendants of the fork. It kills all of them when the other
    end of the lifeline is closed, as by the end of the process that holds it.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = os.getpid()
    with left_to_driver():
        child = os.fork()
        if not child:
            leave_to_driver()
    if child:
        for descriptor in not_kept:
            os.close(descriptor)
        _keep(child, lifeline, forwarded)
    os.setpgid(0, 0)  # a signal to its own group does not reach the keeper
    prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.close(lifeline)
    if os.getppid() != keeper:
        os._exit(1)


def _keep(child: int, lifeline: int, forwarded: signal.Signals) -> NoReturn:
    signal.signal(forwarded, lambda signum, frame: os.kill(child, signum))
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.register(lifeline, select.POLLHUP)
    poll.poll()
    signal.signal(forwarded, signal.SIG_IGN)  # the child may have ended
    signal.alarm(_END_S)
    status = 0
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            for pid in _descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            ended, how = os.waitpid(-1, 0)
            status = how if ended == child else status
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    with contextlib.suppress(OSError):  # SIGKILL has no other
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def _descendants(pid: int) -> set[int]:
    """Return the children of a process and theirs, except for those whose parents have died."""
    children: dict[int, set[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, set()).add(int(entry.name))
    found: set[int] = set()
    new = children.get(pid, set())
    while new:
        found |= new
        new = set().union(*(children.get(one, set()) for one in new)) - found
    return found
