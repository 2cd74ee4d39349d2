"""The driver's part of `--supervise`. The command replaces itself with a supervisor (`host.supervisor`), which starts
the command again as a child. The child writes down how to resume its run if it dies.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trinity_sync.config import asked_again
from trinity_sync.config.messages import SUPERVISE
from trinity_sync.errors import ConfigError
from trinity_sync.host import supervisor
from trinity_sync.host.child_process import python
from trinity_sync.host.supervisor import NOTES, Note, Notes, last_report
from trinity_sync.launch.start import used_places

_RESUME = "import sys; sys.argv[0] = 'trinity-sync'; from trinity_sync.cli.main import main; sys.exit(main())"


class SupervisedDriver:
    """This process, as the child of a supervisor.

    Attributes:
        before: what an earlier driver noted when its last attempt began; empty: there was none.
        deaths: those of drivers since.
    """

    def __init__(self, notes: Notes, *, resumes: bool) -> None:
        self._notes, self._pid = notes, os.getpid()
        self.before, self.deaths = last_report(notes.read())
        self._arguments = self.before.get("arguments", [] if resumes else None)

    def begun(self, run: Path, attempt: int, policy: Note) -> None:
        """Note that an attempt has begun, or is about to, and the policy of restarts: from now on the run is resumed
        where this process dies.
        """
        if self._arguments is None:
            self._arguments = [str(run), *shlex.split(" ".join(asked_again(run, used_places(run))))]
        self._notes.append({**policy, "run": str(run / "run.json"), "attempt": attempt, "arguments": self._arguments})

    def over(self) -> None:
        """Note that the run ends in order; not in a fork of this process."""
        if os.getpid() == self._pid:
            self._notes.append(Note(over=True))


_driver: SupervisedDriver | None = None
_has_run = False


def driver() -> SupervisedDriver | None:
    """Return this process, which begins a run, as a supervised driver; None: its command is not supervised."""
    global _has_run
    _has_run = True
    return _driver


@contextmanager
def supervised(*, resumes: bool, others: Mapping[str, object]) -> Iterator[None]:
    """Do the command of the block as a supervised driver. In the first process this does not return: the process
    becomes the supervisor, which starts the command again. Later runs of the program are not supervised. `resumes`: the
    command is a resume, so it is repeated after a death. `others`: arguments that exclude `--supervise`. Raises
    ConfigError: one of these is given, or this program has had a run.
    """
    global _driver, _has_run
    if _has_run:  # a supervisor would start this program again, and with it the run before
        raise ConfigError(
            f"{SUPERVISE} is for the first run of a program, and this is another; start it as a program of its own"
        )
    if refused := [name for name, value in others.items() if value]:
        raise ConfigError(f"{SUPERVISE} resumes one run where its driver dies; it cannot be given with {refused[0]}")
    if (number := os.environ.pop(NOTES, None)) is None:
        command = [sys.executable, *sys.orig_argv[1:]]
        supervisor.become(command, command if resumes else [*python(_RESUME), "resume", SUPERVISE])
    os.set_inheritable(int(number), False)
    made = _driver = SupervisedDriver(Notes(int(number)), resumes=resumes)
    _has_run = True
    try:
        yield
    finally:
        made.over()
        _driver = None
