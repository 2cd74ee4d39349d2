"""Finding the checkpoint monitor of a program without Ray, and starting it where it is not there."""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from trinity_sync.actors.local.frames import ForeignPeerError
from trinity_sync.actors.local.handle import Link, LocalHandle
from trinity_sync.checkpoint.daemon import process, rendezvous
from trinity_sync.checkpoint.daemon.process import Hello, Lifetime, Settings
from trinity_sync.checkpoint.daemon.rendezvous import Rendezvous
from trinity_sync.checkpoint.lock import InUseError, word_of
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.host.detached import KilledError, start_detached

logger = logging.getLogger(__name__)

WHO = "the checkpoint monitor"

#: Another program has so long to be gone, or to show that it is ending, seconds.
LOOK_S = 10.0
_POLL_S = 0.1
#: Where the folder is held, that is how often a process is started to look again.
_START_AGAIN_S = 1.0
#: One that is killed while it starts is started so often.
_MOST_KILLED = 3
#: A wait for the end of another program's is said when it has lasted so long, seconds.
_SILENT_S = 1.0
#: A start that has begun has so long at least.
_LEAST_S = 1.0


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
    """Connect to the checkpoint monitor of a program. It lives until nobody is connected to it any more, and what is
    whole is committed. Where it is killed before that, one of those that may start it starts another one, which goes on
    where it was, and all calls are made again.

    Every rank calls this; rank 0 of each role with `may_start`. Where this fails for rank 0, others wait for the whole
    time: let them call it when rank 0 is connected.

    Args:
        root: the checkpoint folder, by the same path on all nodes.
        program: a word that tells the program from all others, such as a random one that its ranks share.
        may_start: start it where there is none. Else it is waited for.
        timeout_s: limit of each wait, seconds.
        resume_step: the step whose checkpoint the program has loaded, 0: none; see `resume_point.put_in_order`. For
            the first one who starts a monitor of this program; later steps are set aside then. None: the newest.
        save_strategy, config: of a monitor that is started; attempt and writer are filled in.
        address: of this machine, where a monitor that is started listens: one by which all ranks reach it.
        lifetime: when a monitor that is started ends.

    Raises:
        ConfigError: the folder cannot be written, or another program that lives writes in it, or what is said there of
            a monitor cannot be trusted.
        RunError: the step to go on from is not a full checkpoint, or what was committed cannot be seen.
        WaitTimeout: there is none, after all this time; or that of a program before does not end.
    """
    if not program or not program.isprintable():
        raise ConfigError(f"program={program!r} has to be a word on one line")
    place = Path(root).absolute()
    settings = Settings(
        root=place,
        program=program,
        attempt=None,
        resume_step=resume_step,
        save_strategy=save_strategy,
        config=config or MonitorConfig(),
        address=address,
        lifetime=lifetime or Lifetime(),
    )
    search = _Search(settings, may_start=may_start, timeout_s=timeout_s)
    link = search.link()
    hello: Hello = link.hello
    search.settings = replace(settings, attempt=hello["attempt"])

    def again(why: str) -> Link:
        logger.warning("%s of %s is gone (%s); it is looked for again", WHO, place, why)
        return search.link()

    return LocalHandle(link, again)


def wait_until_ended(root: str | os.PathLike[str], *, timeout_s: float, on_wait: Callable[[str], None]) -> None:
    """Return when no monitor that listens for a checkpoint folder is ending, so that what an earlier program has
    written is committed, or gone. One that is at work is not waited for. For a process of a program without a monitor.

    Args:
        root: the checkpoint folder.
        timeout_s: limit of the wait, seconds.
        on_wait: gets a sentence, once, where it lasts.

    Raises:
        ConfigError: what is said there of a monitor cannot be trusted.
        WaitTimeout: it does not end.
    """
    place = Path(root).absolute()
    nobody = Settings(
        root=place,
        program="",
        attempt=None,
        resume_step=None,
        save_strategy="unrestricted",
        config=MonitorConfig(),
        address="",
    )
    search = _Search(nobody, may_start=False, timeout_s=timeout_s)
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
class _Seen:
    """What is there.

    Attributes:
        what: in words, for who waits.
        link: to the monitor of this program.
        lives: somebody is at work there.
        ending: they will be gone when they have done what is left.
    """

    what: str
    link: Link | None = None
    lives: bool = False
    ending: bool = False


@dataclass
class _Search:
    settings: Settings
    may_start: bool
    timeout_s: float
    _since: float | None = field(default=None, init=False)
    _not_before: float = field(default=0.0, init=False)
    _killed: int = field(default=0, init=False)

    def link(self) -> Link:
        """Look until there is one; errors as for `connect`."""
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

    def _makes_way(self, seen: _Seen) -> bool:
        """Whether nobody is at work there, as far as one sees, and it is time to try."""
        if seen.ending:
            self._since = None
        elif seen.lives:
            self._bear(InUseError(f"checkpoint.dir={self.settings.root} is in use by {seen.what}"))
        return not seen.lives and time.monotonic() > self._not_before

    def _bear(self, error: InUseError) -> None:
        """Another program is at work: it has a little time to be gone, or to show that it is ending."""
        now = time.monotonic()
        self._since = self._since or now
        if now > self._since + LOOK_S:
            raise error

    def _late(self, seen: _Seen) -> WaitTimeout:
        root = self.settings.root
        if seen.ending:
            return WaitTimeout(seen.what, f"end its work in {root}", self.timeout_s)
        if self.may_start:
            return WaitTimeout(WHO, f"start for {root} ({seen.what})", self.timeout_s)
        return WaitTimeout("rank 0", f"have {WHO} of this program listen for {root} ({seen.what})", self.timeout_s)

    def look(self, left: float) -> _Seen:
        """Look once. A monitor that is there has `left` seconds to get ready."""
        settings = self.settings
        found = rendezvous.find(settings.root)
        if found is None:
            return _Seen("nobody has said that it listens")
        try:
            link = Link(found.address, found.port, bytes.fromhex(found.secret), WHO, left)
        except (OSError, EOFError, ForeignPeerError) as error:
            return _Seen(f"it does not answer ({found}): {error or type(error).__name__}")
        hello: Hello = link.hello
        seen = self._judged(hello, found)
        if seen is None and settings.attempt in (None, hello["attempt"]):
            return _Seen(str(found), link)
        link.end()
        link.close()
        if seen is None:
            raise RunError(f"attempt {settings.attempt} is over: attempt {hello['attempt']} writes to {settings.root}")
        return seen

    def _judged(self, hello: Hello, found: Rendezvous) -> _Seen | None:
        """What a monitor is that answers; None: that of this program, at work."""
        if not _same(hello["root"], self.settings.root):  # the file was copied
            return _Seen(f"the one that is named there ({found}) is that of {hello['root']}")
        ours = hello["program"] == self.settings.program
        ending = hello["ending"] or (not ours and hello["members"] == 0)
        if ours and not ending:
            return None
        whose = "this program" if ours else "another program"
        return _Seen(f"{WHO} of {whose} ({found})", lives=True, ending=ending)

    def _start(self, left: float) -> bool:
        """Start one; False: somebody holds the folder, or has killed it."""
        given = pickle.dumps(self.settings)
        try:
            error = pickle.loads(start_detached(process.__name__, given, who=WHO, timeout_s=left))
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
