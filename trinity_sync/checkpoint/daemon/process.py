"""The process of a checkpoint monitor without Ray. `connecting` starts it, and it ends when the program has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypedDict

from trinity_sync.actors.failures import failures_logged
from trinity_sync.actors.local.frames import SECRET_BYTES
from trinity_sync.actors.local.server import LocalHost, LocalServer
from trinity_sync.checkpoint import CheckpointMonitor, recovery
from trinity_sync.checkpoint.daemon import rendezvous
from trinity_sync.checkpoint.lock import Held, locked, writer_of
from trinity_sync.checkpoint.monitor import ACTOR_NAME, MonitorConfig
from trinity_sync.checkpoint.resume_point import put_in_order
from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.host.detached import Report
from trinity_sync.host.logs import flush_logs, log_failure, own_log, story
from trinity_sync.host.origin import told

_LOG = ".monitor"
#: After a SIGTERM callers have so long to finish a save and end, as a batch system signals all processes of a job.
_TERM_S = 21.0
#: From then on, the monitor has so long for everything. A batch system kills after 30 s.
_KILL_S = 28.0
_ATTEMPT = re.compile(r"attempt (\d+)")


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """When a monitor ends.

    Attributes:
        first_s: so long it waits for its first caller, seconds.
        grace_s: for so long nobody has been connected, seconds.
        return_s: one that goes on in the place of another waits so long for the callers of that one, seconds.
        end_s: then the last commits have so long, seconds. The process ends after that, also where a disk hangs.
    """

    first_s: float = 15.0
    grace_s: float = 2.0
    return_s: float = 15.0
    end_s: float = 14.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the process is started with.

    Attributes:
        root: the checkpoint folder, absolute.
        program: word of the program whose monitor it is.
        attempt: which attempt it is to go on with; None: whichever it is.
        resume_step: see `resume_point.put_in_order`.
        save_strategy, config: of the monitor. `attempt` and `writer` are filled in.
        address: where it listens.
        lifetime: when it ends.
    """

    root: Path
    program: str
    attempt: int | None
    resume_step: int | None
    save_strategy: str
    config: MonitorConfig
    address: str
    lifetime: Lifetime = field(default_factory=Lifetime)


class Hello(TypedDict):
    """What a caller is told first."""

    program: str
    root: str
    attempt: int
    members: int
    ending: bool


def serve(given: bytes, report: Report) -> None:
    """Be the monitor, from the folder's lock to the last commit.

    Args:
        given: the pickled `Settings`.
        report: gets the pickled error, or None when callers are answered.
    """
    settings: Settings = pickle.loads(given)
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
        report(_pickled(error))


class _MonitorProcess:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._attempt: int | None = None  # that goes on
        self._ending = False

    def sign(self, before: str) -> str:
        """Return the word of the lock. That of this program's own monitor, killed or at its end, stays: its attempt
        goes on.

        Raises:
            RunError: that attempt is over, for another program has written here since.
        """
        settings = self._settings
        program, _, rest = before.partition("\n")
        found = _ATTEMPT.fullmatch(rest)
        if program == settings.program and found is not None:
            self._attempt = int(found[1])
        if settings.attempt is not None and settings.attempt != self._attempt:
            raise RunError(
                f"{settings.root} has been taken over by another run since; attempt {settings.attempt} does not go on"
            )
        return self._word(self._attempt)

    def _word(self, attempt: int | None) -> str:
        return self._settings.program if attempt is None else f"{self._settings.program}\nattempt {attempt}"

    async def run(self, lock: Held, on_up: Callable[[], None]) -> None:
        """Serve from here to the last commit.

        Args:
            lock: the folder's.
            on_up: called when callers are answered.
        """
        settings = self._settings
        secret = secrets.token_bytes(SECRET_BYTES)
        server = LocalServer(secret)
        try:
            port = await server.listen(settings.address)
        except OSError as error:
            raise RunError(f"the checkpoint monitor cannot listen at {settings.address}: {error.strerror}") from error
        said = rendezvous.publish(settings.root, settings.program, settings.address, port, secret)
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
            rendezvous.withdraw(settings.root, said)
        await asyncio.to_thread(recovery.clean_versions, settings.root, now=time.time())
        story.info("all processes of the program have ended, and so does the checkpoint monitor")

    async def _open(self, lock: Held) -> tuple[CheckpointMonitor, int]:
        settings = self._settings
        restarted, attempt = self._attempt is not None, self._attempt
        if attempt is None:
            start = await asyncio.to_thread(put_in_order, settings.root, settings.resume_step, settings.config.roles)
            attempt = start.attempt
            lock.sign(self._word(attempt))
        else:
            story.warning("goes on with attempt %d, in the place of a monitor that is gone", attempt)
        config = replace(settings.config, attempt=attempt, log_dir=None, writer=writer_of(settings.root))
        body = failures_logged(CheckpointMonitor)(
            settings.save_strategy, str(settings.root), None, config, host=LocalHost(restarted=restarted)
        )
        return body, attempt

    async def _members_gone(self, server: LocalServer) -> float:
        """Return when no caller is left: how long the end may take, seconds."""
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
        story.warning("told to end (SIGTERM)")
        gone.cancel()
        until = time.monotonic() + _KILL_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.members_gone(first_s=0.0, grace_s=0.0), _TERM_S)
        return min(lifetime.end_s, until - time.monotonic())

    def _hello(self, server: LocalServer, attempt: int) -> Hello:
        return {
            "program": self._settings.program,
            "root": str(self._settings.root),
            "attempt": attempt,
            "members": server.members,
            "ending": self._ending,
        }


def _end_in(seconds: float) -> None:
    """End this process then, whatever it does: Python waits for threads, and a thread may wait for a disk."""

    def end() -> None:
        log_failure("the end of the checkpoint monitor", WaitTimeout("the checkpoint monitor", "end", seconds))
        flush_logs()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


class _Failures(logging.Handler):
    """Counts what went wrong."""

    def __init__(self, before: bool) -> None:
        super().__init__(logging.WARNING)
        self.any = before

    def emit(self, record: logging.LogRecord) -> None:
        self.any = True


def _logged(settings: Settings) -> _Failures:
    """Log from now on; return what knows whether there is anything in the log that somebody has to read."""
    log_dir, path = settings.config.log_dir, _log(settings)
    before = path.is_file() and path.stat().st_size > 0
    own_log(log_dir or settings.root, ACTOR_NAME if log_dir else _LOG)
    failures = _Failures(before)
    logging.getLogger().addHandler(failures)
    return failures


def _forget_log(settings: Settings, failures: _Failures) -> None:
    flush_logs()
    if settings.config.log_dir is None and not failures.any:
        _log(settings).unlink(missing_ok=True)


def _log(settings: Settings) -> Path:
    return settings.root / f"{_LOG}.log"


def _pickled(error: Exception) -> bytes:
    foreseen = error if isinstance(error, TrinityError) else RunError(f"the checkpoint monitor failed: {told(error)}")
    try:
        data = pickle.dumps(foreseen)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(RunError(str(foreseen)))
    return data
