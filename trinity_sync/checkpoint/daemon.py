"""A checkpoint monitor without Ray, in a process that ends after its program. `connect` finds or starts it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import re
import secrets
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypedDict

from trinity_sync.actors.local import Link, LocalHandle, LocalHost, LocalServer, pickled_error
from trinity_sync.actors.pending import failures_logged
from trinity_sync.checkpoint import CheckpointMonitor
from trinity_sync.checkpoint.folder import recovery
from trinity_sync.checkpoint.folder.lock import FolderLock, InUseError, locked, word_of, writer_of
from trinity_sync.checkpoint.folder.resume_point import put_in_order
from trinity_sync.checkpoint.monitor import ACTOR_NAME, MonitorConfig
from trinity_sync.errors import ConfigError, RunError, TrinityError, WaitTimeout
from trinity_sync.host.channel import PROOF_S, SECRET_BYTES, ForeignPeerError, open_connection
from trinity_sync.host.child_process import KilledError, Report, start_detached
from trinity_sync.host.durable import replace_file
from trinity_sync.host.locks import ForeignFileError, open_lock
from trinity_sync.host.logs import flush_logs, log_failure, own_log, story
from trinity_sync.host.origin import error_text

_LOG = ".monitor"
_TERM_S = 21.0
"""Time after a SIGTERM for callers to finish a save and end, seconds: a batch system signals all processes of a job."""
_KILL_S = 28.0
"""Time after a SIGTERM for the whole end of the monitor, seconds: a batch system kills after 30 s."""
_ATTEMPT = re.compile(r"attempt (\d+)")


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """Waits of a monitor before it ends, seconds."""

    first_s: float = 15.0  # for the first caller
    grace_s: float = 2.0  # without a caller
    return_s: float = 15.0  # for the callers of a killed monitor that it replaces
    end_s: float = 14.0  # for the last commits; the process ends then even if a disk hangs


@dataclass(frozen=True, kw_only=True)
class DaemonSettings:
    """Settings of the process."""

    root: Path  # the checkpoint folder, absolute
    program: str = ""  # word that identifies the program; empty: a program without a monitor
    attempt: int | None = None  # the attempt to continue; None: any
    resume_step: int | None = None  # see `resume_point.put_in_order`
    save_strategy: str = "unrestricted"
    config: MonitorConfig = field(default_factory=MonitorConfig)  # `attempt` and `writer` are filled in
    address: str = ""  # where it listens
    lifetime: Lifetime = field(default_factory=Lifetime)


class DaemonHello(TypedDict):
    """The monitor's first message to a caller."""

    program: str
    root: str
    attempt: int
    members: int
    ending: bool


def serve(given: bytes, report: Report) -> None:
    """Run the monitor, from the folder's lock to the last commit."""
    settings: DaemonSettings = pickle.loads(given)
    monitor = _MonitorProcess(settings)
    try:
        with locked(settings.root, settings.root, word=monitor.sign) as lock:
            failures = _logged(settings)
            try:
                asyncio.run(monitor.run(lock, partial(report, pickle.dumps(None))))
            except Exception as error:
                log_failure("the checkpoint monitor", error)
                raise
            finally:
                _forget_log(settings, failures)
    except Exception as error:
        known = error if isinstance(error, TrinityError) else None
        report(pickled_error(known or RunError(f"the checkpoint monitor failed: {error_text(error)}")))


class _MonitorProcess:
    def __init__(self, settings: DaemonSettings) -> None:
        self._settings = settings
        self._attempt: int | None = None  # the attempt that continues
        self._ending = False

    def sign(self, before: str) -> str:
        """Return the word of the lock, given the one before. The word of this program's earlier monitor stays, and its
        attempt continues. RunError: the attempt is over, since another program has written here.
        """
        settings = self._settings
        program, _, rest = before.partition("\n")
        found = _ATTEMPT.fullmatch(rest)
        if program == settings.program and found is not None:
            self._attempt = int(found[1])
        if settings.attempt is not None and settings.attempt != self._attempt:
            raise RunError(
                f"another run has taken {settings.root} over; attempt {settings.attempt} cannot continue there"
            )
        return self._word(self._attempt)

    def _word(self, attempt: int | None) -> str:
        return self._settings.program if attempt is None else f"{self._settings.program}\nattempt {attempt}"

    async def run(self, lock: FolderLock, on_up: Callable[[], None]) -> None:
        """Serve until the last commit. `on_up` is called when the monitor answers callers."""
        settings = self._settings
        secret = secrets.token_bytes(SECRET_BYTES)
        server = LocalServer()
        try:
            port = server.listen(settings.address, secret)
        except OSError as error:
            raise RunError(f"the checkpoint monitor cannot listen at {settings.address}: {error.strerror}") from error
        said = publish(settings.root, settings.program, settings.address, port, secret)
        try:
            body, attempt = await self._open(lock)
            server.serve(body, partial(self._hello, server, attempt))
            on_up()
            left_s = await self._members_gone(server)
            _end_in(left_s)
            self._ending = True
            server.take_no_more()
            await body.end("all processes of the program have ended", left_s)
        finally:
            await server.close()
            withdraw(settings.root, said)
        await asyncio.to_thread(recovery.clean_versions, settings.root, now=time.time())
        story.info("all processes of the program have ended, and so does the checkpoint monitor")

    async def _open(self, lock: FolderLock) -> tuple[CheckpointMonitor, int]:
        settings = self._settings
        restarted, attempt = self._attempt is not None, self._attempt
        if attempt is None:
            start = await asyncio.to_thread(put_in_order, settings.root, settings.resume_step, settings.config.roles)
            attempt = max(start.attempt, settings.config.attempt)
            lock.sign(self._word(attempt))
        else:
            story.warning("continues with attempt %d, in place of a monitor that has ended", attempt)
        config = replace(settings.config, attempt=attempt, log_dir=None, writer=writer_of(settings.root))
        body = failures_logged(CheckpointMonitor)(
            settings.save_strategy, str(settings.root), None, config, host=LocalHost(restarted=restarted)
        )
        return body, attempt

    async def _members_gone(self, server: LocalServer) -> float:
        """Wait until no caller is left; return the limit for the end, seconds."""
        lifetime = self._settings.lifetime
        gone = asyncio.ensure_future(
            server.members_gone(
                first_s=lifetime.first_s,
                grace_s=lifetime.grace_s,
                least_s=0.0 if self._attempt is None else lifetime.return_s,
            )
        )
        told_to_end = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)
        told = asyncio.ensure_future(told_to_end.wait())
        await asyncio.wait([gone, told], return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if gone.done():
            return lifetime.end_s
        story.warning("ended by SIGTERM")
        gone.cancel()
        until = time.monotonic() + _KILL_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.members_gone(first_s=0.0, grace_s=0.0), _TERM_S)
        return min(lifetime.end_s, until - time.monotonic())

    def _hello(self, server: LocalServer, attempt: int) -> DaemonHello:
        return {
            "program": self._settings.program,
            "root": str(self._settings.root),
            "attempt": attempt,
            "members": server.members,
            "ending": self._ending,
        }


def _end_in(seconds: float) -> None:
    """End this process after a time: Python waits for threads, and a thread may wait for a disk."""

    def end() -> None:
        log_failure("the end of the checkpoint monitor", WaitTimeout("the checkpoint monitor", "end", seconds))
        flush_logs()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


class _Failures(logging.Handler):
    """Notes whether there was a warning or an error."""

    def __init__(self, before: bool) -> None:
        super().__init__(logging.WARNING)
        self.any = before

    def emit(self, record: logging.LogRecord) -> None:
        self.any = True


def _logged(settings: DaemonSettings) -> _Failures:
    """Start the log; return the handler that knows whether it has anything to read."""
    log_dir, path = settings.config.log_dir, _log(settings)
    before = path.is_file() and path.stat().st_size > 0
    own_log(log_dir or settings.root, ACTOR_NAME if log_dir else _LOG)
    failures = _Failures(before)
    logging.getLogger().addHandler(failures)
    return failures


def _forget_log(settings: DaemonSettings, failures: _Failures) -> None:
    flush_logs()
    if settings.config.log_dir is None and not failures.any:
        _log(settings).unlink(missing_ok=True)


def _log(settings: DaemonSettings) -> Path:
    return settings.root / f"{_LOG}.log"


# The program's side: find the monitor, or start it.


logger = logging.getLogger(__name__)

WHO = "the checkpoint monitor"

LOOK_S = 10.0
"""Wait for another program to end, or to show that it is ending, seconds."""
_POLL_S = 0.1
_START_AGAIN_S = 1.0
"""Pause between two starts while the folder is locked, seconds."""
_MOST_KILLED = 3
"""Starts that may be killed before the search fails."""
_SILENT_S = 1.0
"""A longer wait for another program's monitor is reported, seconds."""
_LEAST_S = 1.0
"""Shortest limit of a start, seconds."""


def connect(
    root: str | os.PathLike[str],
    *,
    program: str,
    may_start: bool,
    timeout_s: float,
    resume_step: int | None = None,
    save_strategy: str = "unrestricted",
    config: MonitorConfig | None = None,
    address: str = "127.0.0.1",
    lifetime: Lifetime | None = None,
) -> LocalHandle:
    """Connect to the checkpoint monitor of a program. The monitor ends after its last caller, when all complete steps
    are committed. If it is killed before, a caller with `may_start` starts another one, which continues the attempt,
    and all unanswered calls are repeated.

    Every rank calls this, rank 0 of each role with `may_start`. If it fails for rank 0, the other ranks would wait
    until their timeout, so they should call it after rank 0 has connected. `program`: a word that identifies the
    program, such as a random one that its ranks share. `timeout_s`: limit of each wait, seconds. `address`: of this
    machine, where a started monitor listens; all ranks have to reach it.
    """
    if not program or not program.isprintable():
        raise ConfigError(f"program={program!r} has to be a word on one line")
    place = Path(root).absolute()
    settings = DaemonSettings(
        root=place,
        program=program,
        resume_step=resume_step,
        save_strategy=save_strategy,
        config=config or MonitorConfig(),
        address=address,
        lifetime=lifetime or Lifetime(),
    )
    search = _Search(settings, may_start=may_start, timeout_s=timeout_s)
    link = search.link()
    hello: DaemonHello = link.hello
    search.settings = replace(settings, attempt=hello["attempt"])

    def again(why: str) -> Link:
        logger.warning("the connection to %s of %s has ended (%s); connecting again", WHO, place, why)
        return search.link()

    return LocalHandle(link, again)


def wait_until_ended(root: str | os.PathLike[str], *, timeout_s: float, on_wait: Callable[[str], None]) -> None:
    """Wait for the end of an earlier program's monitor that is ending, so that its saves are committed or deleted. A
    monitor with callers is not waited for. Called by a program without a monitor. `timeout_s`: limit of the wait,
    seconds.
    """
    place = Path(root).absolute()
    search = _Search(DaemonSettings(root=place), may_start=False, timeout_s=timeout_s)
    begun, told = time.monotonic(), False
    while (seen := search.look(timeout_s)).ending:
        waited = time.monotonic() - begun
        if waited > timeout_s:
            raise WaitTimeout(seen.what, f"end its work in {place}", timeout_s)
        if waited > _SILENT_S and not told:
            on_wait(f"waiting for {seen.what} to end its work in {place}")
            told = True
        time.sleep(_POLL_S)


@dataclass
class _Sighting:
    """The result of one look for a monitor."""

    what: str  # in words, for errors
    link: Link | None = None  # to the monitor of this program
    lives: bool = False  # another monitor runs
    ending: bool = False  # and ends after its last commits


@dataclass
class _Search:
    settings: DaemonSettings
    may_start: bool
    timeout_s: float
    _since: float | None = field(default=None, init=False)
    _not_before: float = field(default=0.0, init=False)
    _killed: int = field(default=0, init=False)

    def link(self) -> Link:
        """Look until a monitor answers; errors as for `connect`."""
        deadline, self._since, self._killed = time.monotonic() + self.timeout_s, None, 0
        while True:
            left = max(_LEAST_S, deadline - time.monotonic())
            seen = self.look(left)
            if seen.link is not None:
                return seen.link
            if self.may_start and self._makes_way(seen) and self._start(left):
                continue
            if time.monotonic() > deadline:
                raise self._late(seen)
            time.sleep(_POLL_S)

    def _makes_way(self, seen: _Sighting) -> bool:
        """Return whether no other monitor seems to run, and it is time for a start."""
        if seen.ending:
            self._since = None
        elif seen.lives:
            self._bear(InUseError(f"checkpoint.dir={self.settings.root} is in use by {seen.what}"))
        return not seen.lives and time.monotonic() > self._not_before

    def _bear(self, error: InUseError) -> None:
        """Tolerate another program for `LOOK_S`, in which it may end or show that it is ending."""
        now = time.monotonic()
        self._since = self._since or now
        if now > self._since + LOOK_S:
            raise error

    def _late(self, seen: _Sighting) -> WaitTimeout:
        root = self.settings.root
        if seen.ending:
            return WaitTimeout(seen.what, f"end its work in {root}", self.timeout_s)
        if self.may_start:
            return WaitTimeout(WHO, f"start for {root} ({seen.what})", self.timeout_s)
        return WaitTimeout("rank 0", f"have {WHO} of this program listen for {root} ({seen.what})", self.timeout_s)

    def look(self, left: float) -> _Sighting:
        """Look once. A running monitor has `left` seconds to be ready."""
        settings = self.settings
        found = find(settings.root)
        if found is None:
            return _Sighting("no monitor has written its address")
        try:
            link = Link(open_connection((found.address, found.port), bytes.fromhex(found.secret), PROOF_S), WHO, left)
        except (OSError, EOFError, ForeignPeerError) as error:
            return _Sighting(f"it does not answer ({found}): {error or type(error).__name__}")
        hello: DaemonHello = link.hello
        seen = self._judged(hello, found)
        if seen is None and settings.attempt in (None, hello["attempt"]):
            return _Sighting(str(found), link)
        link.connection.close()
        if seen is None:
            raise RunError(f"attempt {settings.attempt} is over: attempt {hello['attempt']} writes to {settings.root}")
        return seen

    def _judged(self, hello: DaemonHello, found: Rendezvous) -> _Sighting | None:
        """Judge a monitor that answers; None: it is this program's, and goes on."""
        if not _same(hello["root"], self.settings.root):  # the file was copied
            return _Sighting(f"the monitor that is named there ({found}) belongs to {hello['root']}")
        ours = hello["program"] == self.settings.program
        ending = hello["ending"] or (not ours and hello["members"] == 0)
        if ours and not ending:
            return None
        whose = "this program" if ours else "another program"
        return _Sighting(f"{WHO} of {whose} ({found})", lives=True, ending=ending)

    def _start(self, left: float) -> bool:
        """Start a monitor; return False if the folder is locked, or the process was killed."""
        given = pickle.dumps(self.settings)
        try:
            error = pickle.loads(start_detached(__name__, given, who=WHO, timeout_s=left))
        except KilledError:
            self._killed += 1
            if self._killed == _MOST_KILLED:
                raise
            return False
        if error is None:
            return True
        if not isinstance(error, InUseError):
            raise error
        self._not_before = time.monotonic() + _START_AGAIN_S
        if word_of(self.settings.root).partition("\n")[0] != self.settings.program:  # another rank 0 starts ours
            self._bear(error)
        return False


def _same(theirs: str, ours: Path) -> bool:
    try:
        return ours.samefile(theirs)
    except OSError:
        return False


# The file in the checkpoint folder with the monitor's address. It contains the secret, so only this user can read it.


_NAME = ".monitor.json"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The address of a monitor, which may have ended since."""

    program: str
    address: str
    port: int
    secret: str  # hex
    pid: int  # for messages, as is `host`
    host: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, at {self.address}:{self.port}"


def publish(root: Path, program: str, address: str, port: int, secret: bytes) -> Rendezvous:
    """Write this process's address. Its caller has locked the folder."""
    said = Rendezvous(
        program=program, address=address, port=port, secret=secret.hex(), pid=os.getpid(), host=socket.gethostname()
    )
    before = os.umask(0o077)
    try:
        replace_file(root / _NAME, json.dumps(asdict(said)), durable=False)
    finally:
        os.umask(before)
    if find(root) != said:
        raise ConfigError(f"{root / _NAME} was changed by another program just after it was written")
    return said


def find(root: Path) -> Rendezvous | None:
    """Read the address; None if there is none."""
    path = root / _NAME
    try:
        descriptor = open_lock(path, create=False, writable=False)
    except (ForeignFileError, PermissionError) as error:
        raise _refused(path, str(error)) from error
    except OSError:
        return None
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise _refused(path, f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise _refused(path, f"others may read or write it (mode {stat.S_IMODE(status.st_mode):o})")
        try:
            return _checked(json.load(file))
        except (OSError, ValueError, TypeError, KeyError):
            return None  # damaged; the next monitor overwrites it


def withdraw(root: Path, said: Rendezvous) -> None:
    """Delete the file if this process wrote it."""
    if find(root) == said:
        with contextlib.suppress(FileNotFoundError):
            (root / _NAME).unlink()


def _checked(read: Mapping[str, object]) -> Rendezvous:
    found = Rendezvous(**read)  # type: ignore[arg-type]
    texts = (found.program, found.address, found.secret, found.host)
    if not all(isinstance(text, str) for text in texts) or not all(type(n) is int for n in (found.port, found.pid)):
        raise ValueError("a field is of another type")
    bytes.fromhex(found.secret)
    return found


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} says where the checkpoint monitor listens, but cannot be trusted: {why}. Delete it; on a file system "
        "without owners or modes, name another checkpoint folder"
    )
