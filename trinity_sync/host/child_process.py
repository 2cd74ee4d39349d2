"""A process of one's own program for work that must not be felt here: a library that hangs, leaves threads behind, or
changes what belongs to the whole process. Used for mirrors, trackers and rewards.

It is no `multiprocessing.Process`: that would begin with the program of its parent, once more.
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
from typing import IO, Any, NoReturn

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.interrupts import leave_to_driver, left_to_driver
from trinity_sync.host.logs import keep_short
from trinity_sync.host.terminal import open_missing

OWN_NAMES = "TRINITY_SYNC_OWN_NAMES"
"""Variable with the names of variables, between blanks, that look like Ray's and are the user's."""
_PIECE = 1 << 16
_CREDENTIALS = struct.Struct("iII")
_CONTROL = socket.CMSG_SPACE(_CREDENTIALS.size)  # no room for file descriptors, which would be open here then


class Channel:
    """Our end of the connection to a child, whose end is a `multiprocessing.connection.Connection`.

    The kernel names the sender of each piece, and only those of one process count: a fork of it, which has the
    connection open as well, can neither answer for it nor break its messages.

    Attributes:
        sender: that process; None: the next one that sends something.
        most_bytes: limit of one message; a longer one ends the connection.
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
        """File descriptors to wait for: one of them can be read when `poll` may have news."""
        return self._end.fileno(), self._pidfd

    def ended(self, within_s: float) -> bool:
        """Wait until the child has ended; tell whether it has."""
        return _readable((self._pidfd,), within_s)

    def send(self, message: object, limit_s: float | None = None) -> None:
        """Send a message.

        Args:
            limit_s: for the child to take it, seconds; None: the usual.

        Raises:
            TimeoutError: the child has not taken all of it within the limit; nothing can be sent any more.
            OSError: the connection is closed.
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
        """Wait until `recv` returns or raises at once; tell whether it does.

        Args:
            within_s: limit, seconds; None: there is none.
        """
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
        """Return the next message; without `poll` first, wait for it.

        Raises:
            EOFError: there is none, as the child has ended or closed the connection.
        """
        return pickle.loads(self.recv_bytes())

    def recv_bytes(self) -> bytes:
        """As `recv`, of bytes."""
        self.poll(None)
        if (whole := self._whole()) is None:
            raise EOFError("the connection was closed")
        message = bytes(self._data[whole])
        del self._data[: whole.stop]
        return message

    def close(self) -> None:
        """Close our end."""
        self._end.close()
        self._close_pidfd()

    def _whole(self) -> slice | None:
        """Where the first message is; None: there is no whole one."""
        if len(self._data) < 4:
            return None
        length = struct.unpack_from("!I", self._data)[0]
        self._over = self._over or length > self.most_bytes
        return slice(4, 4 + length) if length <= min(len(self._data) - 4, self.most_bytes) else None

    def _read(self) -> bool:
        """Take a piece; tell whether there was one."""
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


def start_child(
    module: str, log: Path | None, message_s: float = 10, further: Sequence[int] = (), with_driver: bool = True
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start ``serve(descriptor)`` of a module in a process of its own, which leaves signals to the driver. It finds
    modules where this process does, and its environment is the user's.

    Args:
        module: dotted name; its `serve` gets the file descriptor of its end of the connection, and must end when that
            is closed, that is, with this process.
        log: the child's own words are appended to it, and it is kept short; None: they go to this process's standard
            error.
        message_s: limit for the child to take a message, in seconds; see `Channel`.
        further: file descriptors that `serve` is given after its own.
        with_driver: whether the kernel kills it at once when the driver is gone.

    Returns:
        The process, and our end of the connection.

    Raises:
        OSError: it could not be started.
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
            # Ctrl-C is for the run, which lets a copy finish. Not a session of its own: Linux may share the processors
            # out between sessions first, and there it would yield to nobody.
            process_group=0,
        )
        channel = Channel(ours, child.pid, message_s)
        on_error.pop_all()
        return child, channel


def python(code: str) -> list[str]:
    """Return the command that runs code where this process's modules are found. Programs that it starts do not inherit
    that, as they would a PYTHONPATH.
    """
    # others are names of import hooks, such as that of packages that are installed as editable, or cannot be reached
    path = [str(Path(place).absolute()) if os.path.exists(place or ".") else place for place in sys.path]  # noqa: PTH110
    return [sys.executable, "-u", "-P", "-c", f"import sys; sys.path[:] = {path!r}; {code}"]


def own_names() -> dict[str, str]:
    """Return a variable that has `users_environment` keep what the user has set, for the processes of a run."""
    started = Path("/proc/self/environ").read_text(errors="replace").split("\0")
    return {OWN_NAMES: " ".join(filter(_looks_like_rays, (line.partition("=")[0] for line in started)))}


def users_environment() -> dict[str, str]:
    """Return the environment without the variables that Ray has added for its own processes."""
    own = os.environ.get(OWN_NAMES, "").split()
    return {name: value for name, value in os.environ.items() if name in own or not _looks_like_rays(name)}


def _looks_like_rays(name: str) -> bool:
    return name.startswith(("RAY_", "__RAY_", "PYTHONBREAKPOINT", "SPT_NOENV"))


def _readable(descriptors: Sequence[int], within_s: float) -> bool:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if within_s == math.inf else within_s * 1000))


# A process that outlives the one that starts it: of a session of its own, nobody's child, without anything that its
# starter has open.


#: Says what came of the start; once. Who started the process goes on then.
Report = Callable[[bytes], None]


class KilledError(RunError):
    """A process ended before it said anything: somebody has killed it."""


def start_detached(module: str, given: bytes, *, who: str, timeout_s: float) -> bytes:
    """Start ``serve(given, report)`` of a module in a process of its own, and wait for its report.

    It is begun anew and not forked, so it has none of this process's sockets, threads or contexts of a GPU. The
    terminal's signals do not reach it, and it holds none of this process's output.

    Args:
        module: dotted name. Its `serve` gets a `Report` besides.
        who: what errors call it.
        timeout_s: limit for the report, seconds. A process that is late is left alone.

    Returns:
        What it reported.

    Raises:
        KilledError: it ended without a report, and without a word.
        RunError: it ended without a report; says what it printed.
        WaitTimeout: there is no report.
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
    """Be that process; its first line."""
    given = sys.stdin.buffer.read()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    to_starter = os.dup(1)
    os.dup2(2, 1)  # a library that prints does not report

    def report(said: bytes) -> None:
        nonlocal to_starter
        if to_starter >= 0:
            _let_go_of_output()
            try:
                with os.fdopen(to_starter, "wb") as pipe:
                    pipe.write(said)
            except OSError:  # the starter is gone
                pass
            to_starter = -1

    importlib.import_module(module).serve(given, report)


def _let_go_of_output() -> None:
    """What is the starter's, that is a pipe, becomes ``/dev/null``; what is a log by now stays."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        if _is_pipe(number):
            os.dup2(nothing, number)
    os.close(nothing)


def _is_pipe(number: int) -> bool:
    return stat.S_ISFIFO(os.fstat(number).st_mode)


# The end of a process together with all that it has started, in sessions of their own, too. Its keeper sees to it,
# the parent of the process, which calls nobody's code.


_PDEATHSIG, _CHILD_SUBREAPER = 1, 36
_END_S = 20
"""For the kernel to end what is killed; a keeper waits no longer."""


def go_on_kept(lifeline: int, forwarded: signal.Signals, not_kept: Sequence[int]) -> None:
    """Go on in a fork of this process, which becomes its keeper. The fork leaves signals to the driver.

    The keeper ends as the fork does, after all that the fork has started. It ends everything at once when the other end
    of the pipe is closed, as it is when the process that holds it has ended, however it did.

    Args:
        lifeline: file descriptor of the reading end.
        forwarded: a signal that the keeper hands on.
        not_kept: file descriptors that the keeper closes.
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
    signal.signal(forwarded, signal.SIG_IGN)  # from now on the child may be no more
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
    """The children of a process, and theirs, as far as their parents live."""
    children: dict[int, set[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, set()).add(int(entry.name))
    found: set[int] = set()
    new = children.get(pid, set())
    while new:
        found |= new
        new = set().union(*(children.get(one, set()) for one in new)) - found
    return found
