"""The driver's part of `--supervise`. The command replaces itself with a supervisor (`host.supervisor`), which starts
the command again as a child. The child writes down how to resume its run if it dies.
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
from trinity_sync.tracking.run_record import read_record

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
        self._run: Path | None = None

    def begun(self, run: Path, *, most: int, restarts: Sequence[tuple[float, int]], story: Sequence[str]) -> None:
        """Note that an attempt has begun: from now on the run is resumed where this process dies. A further run of this
        program is not.
        """
        if self._run not in (None, run):
            self._notes.append(Note(over=True))
            return
        self._run = run
        if self._arguments is None:
            self._arguments = [str(run), *shlex.split(" ".join(asked_again(run, used_places(run))))]
        attempt = read_record(run / "run.json")["attempt"]
        told = Note(run=str(run / "run.json"), attempt=attempt, arguments=self._arguments, most=most)
        self._notes.append({**told, "restarts": [*restarts], "story": [*story]})

    def over(self) -> None:
        """Note that the run ends in order; not in a fork of this process."""
        if os.getpid() == self._pid:
            self._notes.append(Note(over=True))


_driver: SupervisedDriver | None = None
_has_run = False


def driver() -> SupervisedDriver | None:
    """Return this process, which begins a run, as a supervised driver; None: it is not supervised."""
    global _has_run
    _has_run = True
    return _driver


def supervised(*, resumes: bool, others: Mapping[str, object]) -> None:
    """Continue as a supervised driver. In the first process this does not return: the process becomes the supervisor,
    which starts the command again. `resumes`: the command is a resume, so it is repeated after a death. `others`:
    arguments that exclude `--supervise`. Raises ConfigError: one of these is given, or this program has had a run.
    """
    global _driver
    if _has_run or _driver is not None:  # a supervisor would start this program again, and with it the run before
        raise ConfigError(
            f"{SUPERVISE} is for the first run of a program, and this is another; start it as a program of its own"
        )
    if refused := [name for name, value in others.items() if value]:
        raise ConfigError(f"{SUPERVISE} resumes one run where its driver dies; it cannot be given with {refused[0]}")
    if (number := os.environ.pop(NOTES, None)) is not None:
        os.set_inheritable(int(number), False)
        _driver = SupervisedDriver(Notes(int(number)), resumes=resumes)
        atexit.register(_driver.over)
        return
    command = [sys.executable, *sys.orig_argv[1:]]
    supervisor.become(command, command if resumes else [*python(_RESUME), "resume", SUPERVISE])
