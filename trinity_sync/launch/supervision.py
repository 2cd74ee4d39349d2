"""The driver's part in `--supervise`: the command becomes a supervisor (`host.supervisor`) that starts it again as its
child, which notes how its run goes on where it dies.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
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

    def begun(self, run: Path, *, most: int, restarts: Sequence[tuple[float, int]], story: Sequence[str]) -> None:
        """Note that an attempt has begun: from now on the run is resumed where this process dies."""
        if self._arguments is None:
            self._arguments = [str(run), *shlex.split(" ".join(asked_again(run, used_places(run))))]
        told = Note(run=str(run / "run.json"), arguments=self._arguments, most=most)
        self._notes.append({**told, "restarts": [*restarts], "story": [*story]})

    def over(self) -> None:
        """Note that the run ends in order; not in a fork of this process."""
        if os.getpid() == self._pid:
            self._notes.append(Note(over=True))


_driver: SupervisedDriver | None = None


def driver() -> SupervisedDriver | None:
    """Return this process as a supervised driver; None: it is not supervised."""
    return _driver


def supervised(*, resumes: bool, others: Mapping[str, object]) -> None:
    """Go on as a supervised driver, which the supervisor that this process becomes starts. `resumes`: the command is a
    resume, so that the same command goes on after a death. `others`: values of arguments with which there is nothing to
    go on with. Raises ConfigError: one of these is given.
    """
    global _driver
    if refused := [name for name, value in others.items() if value]:
        raise ConfigError(f"{SUPERVISE} resumes one run where its driver dies; it cannot be given with {refused[0]}")
    if (number := os.environ.pop(NOTES, None)) is not None:
        os.set_inheritable(int(number), False)
        _driver = SupervisedDriver(Notes(int(number)), resumes=resumes)
        atexit.register(_driver.over)
        return
    command = [sys.executable, *sys.orig_argv[1:]]
    supervisor.become(command, command if resumes else [*python(_RESUME), "resume", SUPERVISE])
