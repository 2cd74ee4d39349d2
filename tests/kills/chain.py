"""A chain: one run, struck and resumed until it is allowed to end."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.runs import ROOT
from tests.kills import checks, places
from tests.kills.checks import Kept, Ledger, Owner
from tests.kills.places import Places
from tests.kills.plan import ALL, ORPHANED, SIGNALS, Blow, Damage, Instant, Life, Plan, Visit
from tests.kills.processes import Member, own_mark
from tests.kills.running import SMALL, Launch
from tests.kills.sharing import Stranger, Visits
from tests.kills.trial import LEFT, LOSS, LOST, REFUSED, RESUMED, SURVIVED, Trial
from trinity_sync.checkpoint.folder import catalog, leases
from trinity_sync.checkpoint.folder.contents import MANIFEST, read_manifest, step_dir, tracker_path
from trinity_sync.protocol.parts import FULL

STEPS = 320
"""Of the undisturbed run, with which digests are compared. A chain is let go to its end before that."""
_ENOUGH = STEPS - 60
_LAST_STEPS = 8

_START_S = 900.0
# A death is noticed at once; what hangs, within the limits of `running.SMALL`. The longest is that of the ranks when
# they begin a save: three times `checkpoint.timeout_s`, and 30 s. Until then it may be two steps; then the saves under
# way have 20 s, the monitor and the record some seconds each.
_NOTICED_S = 60.0
_HANG_S = 105.0 + 40.0
# So many steps without somebody who hangs, and the run does not need it.
_NOT_NEEDED = 40
# For the end of whatever is left when the driver has ended; of Ray's helpers, which look for their raylet now and then.
_GONE_S = 40.0
# As promised: the end after a signal, and that of those whose driver and raylet are gone. Where a process stands still,
# it is given half a minute before it is killed.
_SIGNALLED_S = 30.0
_ORPHANED_S = 30.0
_STANDS_STILL_S = 30.0
_HELPERS_GONE_S = 120.0
_GOES_ON_S = 300.0
_END_S = 400.0

_NAMES = {"agent": "agent", "monitor": "checkpoint monitor", "synchronizer": "synchronizer"}
"""What an error or a fault calls who died or hangs; a rank and an explorer have numbers."""


INTERRUPTED = 130
_RAYLET = "error: Ray's raylet on this node"
"""What is said at once when it has died: Ray may end the driver on the spot then."""
_STARTING = "while Ray was starting"
_FULL = "No space left"
_GIVEN_UP = "Ray has given up this node"
"""What is said where Ray has not: then there is little time to clear up."""


class Interrupted(Exception):  # noqa: N818 - it says what happened
    """The campaign is to end."""


class Chain:
    """Does what a plan says.

    Args:
        plan: see `draw_plan`.
        home: a folder of its own, which is not there yet. It stays where a trial has failed.
        reference: digests of the undisturbed run; None where no two runs are the same.
        stop: set when the campaign is to end.
        stranger: another run.
        machine: folders for shared memory and for Ray that chains share.
        server: overrides for a run that uses the server; empty: it uses none.
    """

    def __init__(
        self,
        plan: Plan,
        home: Path,
        reference: dict[int, str] | None,
        stop: threading.Event,
        *,
        stranger: Stranger,
        machine: tuple[Path, Path],
        server: Sequence[str] = (),
    ) -> None:
        self._plan, self._setup, self._home, self._stop, self._server = plan, plan.setup, home, stop, server
        self._mark = own_mark(f"{plan.seed}-{plan.chain}")
        self._ledger = Ledger(plan.setup.keeps, reference)
        self._owner = Owner(stranger.digests)
        shared = machine if plan.setup.shared_machine else None
        self._places = Places.make(home, small_disk=plan.setup.small_disk, machine=shared)
        self._visits = Visits(self._places, plan.setup, stranger, server, stop)
        self._trials: list[Trial] = []
        self._lives = 0
        self._drivers: set[int] = set()
        self._gone_by: float | None = None  # when the promised limit for the end of all processes is over
        self._signalled: tuple[int, bool] | None = None  # attempts before, and whether the step is saved
        self._insist: list[str] = []  # arguments of the next resume
        self._fetchable: dict[int, Kept] = {}  # what the mirror had before this start
        self._in_order = True  # the driver had the time to clear up
        self._raylet_struck = False
        # Those whose run has ended, and of which the next resume decides.
        self._open: list[Trial] = []
        self._expected: int | None = None  # after which step the resume under way has to begin
        self._passed_over: int | None = None  # which one it has to name

    def run(self) -> list[Trial]:
        """The trials; without those that were not decided when it was interrupted."""
        try:
            for life in self._plan.lives:
                if not self._live(life):
                    break
                if max(self._ledger.full, default=0) > _ENOUGH:
                    break
            if not any(trial.outcome == LOST or trial.outcome == REFUSED for trial in self._trials):
                self._finish()
        except Interrupted:
            pass
        except Exception as error:  # what nobody foresaw is a finding, and the other chains go on
            if not self._trials:
                raise
            self._trials[-1].outcome = self._trials[-1].outcome or LOST
            self._trials[-1].problems.append(f"{type(error).__name__}: {error}")
        finally:
            failed = any(trial.problems for trial in self._trials)
            if failed:
                self._places.keep()
            self._places.close(remove=not failed)
        return [trial for trial in self._trials if trial.outcome]

    # -- lives

    def _live(self, life: Life) -> bool:
        """From a start to the blow that ends it. False: the run cannot be resumed any more."""
        self._in_order, self._raylet_struck, self._gone_by, self._signalled = True, False, None, None
        with self._start() as launch:
            for blow in life.blows:
                if blow.instant.after not in ("start", "restoring") and not self._comes_up(launch):
                    return False
                trial = self._trial(blow.kind, blow.victim, str(blow.instant))
                began = time.monotonic()
                goes_on = self._strike(launch, blow, trial)
                trial.seconds = round(time.monotonic() - began, 1)
                if trial.outcome != SURVIVED:
                    self._open.append(trial)
                if not goes_on:
                    break
            else:  # it has survived them all
                trial = self._trial("kill", ALL, "at once")
                self._open.append(trial)
                self._kill_all(launch, trial)
            last = self._trials[-1]
            if self._gone_by is not None:
                left = launch.wait_gone(max(self._gone_by - time.monotonic(), 1.0))
            else:
                left = launch.wait_gone(_GONE_S)
                if {one.role for one in left} == {"other"}:
                    left = launch.wait_gone(_HELPERS_GONE_S)
            if left:
                last.problems.append(f"{LEFT}: when the limit was over there were {_names(left)}")
            if _RAYLET in launch.text and not self._raylet_struck:
                last.problems.append("it was said that Ray's raylet has died, and it had not")
            ended_in_order = self._in_order and launch.code is not None and launch.code >= 0 and not left
        self._look(last, launch)
        if ended_in_order:
            self._look_for_leftovers(last)
        for visit in life.visits if (self._places.run / "run.json").exists() else ():
            self._receive(visit)
        if life.damage is not None:
            self._do_damage(life.damage)
        return True

    def _start(self, *more: str) -> Launch:
        if self._stop.is_set():
            raise Interrupted
        run = self._places.run
        if (run / "run.json").exists():
            command = ["-m", "trinity_sync.cli", "resume", str(run), *self._insist, *more]
            self._fetchable = checks.whole_in(self._places.mirror)
            self._expected = max([*self._ledger.good, *self._fetchable], default=0)
            environment = self._visits.elsewhere
        else:
            setup, environment = self._setup, self._places.environment()
            overrides = [*SMALL, *setup.overrides(), *self._server]
            overrides += self._places.overrides(mirrored=setup.mirrored, by_environment=setup.by_environment)
            command = [str(ROOT / "launch.py"), *overrides, *(more or [f"trainer.steps={STEPS}"])]
        self._lives += 1
        self._insist = []
        launch = Launch(
            command,
            mark=self._mark,
            output=self._home / f"output-{self._lives}.txt",
            run=run,
            checkpoints=self._places.checkpoints,
            stop=self._stop,
            environment=environment,
            before=["nohup"] if self._setup.nohup else [],
        )
        self._drivers.add(launch.pid)
        return launch

    def _comes_up(self, launch: Launch) -> bool:
        """Wait until the run trains, which decides what befell it before."""
        if not self._open and self._lives > 1:
            return True
        up = launch.wait_steps(1, _START_S)
        if self._stop.is_set():
            raise Interrupted
        self._check_start(launch)
        if up:
            if self._nothing_left:
                self._open[-1].problems.append(f"the run begins anew, though {list(self._ledger.damaged)} are damaged")
            for trial in self._open:
                trial.outcome = RESUMED
            self._open = []
            return True
        said = checks.error_of(launch.text) or launch.text[-300:]
        # A resume also refuses where the mirror has older ones only, and nothing else is left.
        lacks = self._ledger.nothing_left and max(self._fetchable, default=-1) < max(self._ledger.damaged)
        refused = launch.code in (1, 2) and lacks
        if not self._open:
            self._open.append(self._trial("none", "", "start"))
        for trial in self._open:
            trial.outcome = REFUSED if refused else LOST
            trial.noticed = trial.noticed or said
        gone = set(self._ledger.damaged) - {info.step for info in catalog.scan(self._places.checkpoints)}
        if refused and gone:
            self._open[-1].problems.append(f"the resume refused, and put away the checkpoints of {sorted(gone)}")
        if not refused:
            how = f"ended with {launch.code}" if launch.code is not None else f"trained no step in {_START_S:.0f} s"
            self._open[-1].problems.append(f"the run {how}: {said}")
        return False

    @property
    def _nothing_left(self) -> bool:
        return self._ledger.nothing_left and not self._fetchable

    def _check_start(self, launch: Launch) -> None:
        """Once an attempt is recorded: has it begun where it should?"""
        run = self._places.run
        if self._expected is None or len(recorded := checks.attempts(run)) <= self._attempts_before:
            return
        start = recorded[-1][1] or 0
        trial = self._open[-1] if self._open else self._trials[-1]
        if start != self._expected:
            trial.problems.append(
                f"{LOSS}: the resume began after step {start}; the newest that is whole is {self._expected}"
            )
        if (self._passed_over or 0) > start and f"step {self._passed_over} is skipped" not in launch.text:
            trial.problems.append(f"the resume did not say that it passed over step {self._passed_over}")
        self._ledger.began = start
        self._expected = self._passed_over = None

    # -- blows

    def _strike(self, launch: Launch, blow: Blow, trial: Trial) -> bool:
        """Deal a blow and see what comes of it. False: the run has ended."""
        if not launch.wait_for(blow.instant, _START_S):
            if self._stop.is_set():
                raise Interrupted
            if launch.code == 0:  # it came to its good end before
                trial.kind, trial.victim, trial.outcome = "none", "", SURVIVED
                return False
            if launch.code is not None:
                said = checks.error_of(launch.text) or launch.text[-300:]
                trial.problems.append(f"the run ended before the blow (exit {launch.code}): {said}")
                return False
            trial.instant += " (did not come)"
        if self._stop.is_set():
            raise Interrupted
        if blow.kind == "full disk":
            self._places.fill()
            self._stop.wait(blow.seconds)
            self._places.free()
            # A version that the explorers cannot be given ends the run.
            return self._goes_on(launch, trial, may_end=self._setup.sync == "checkpoint", said=_FULL)
        if blow.kind == "intrusion":
            trial.victim = self._visits.possible(blow.victim)
            trial.problems += self._visits.visit(trial.victim, blow.draw, launch)
            trial.noticed = self._visits.said
            return self._goes_on(launch, trial)
        if blow.kind in SIGNALS:
            return self._signal(launch, blow, trial)
        if blow.kind == "pause" and blow.victim == ALL:
            launch.strike_all(signal.SIGSTOP)
            self._stop.wait(blow.seconds)
            launch.strike_all(signal.SIGCONT)
            return self._goes_on(launch, trial)
        if blow.victim == ALL:
            return self._kill_all(launch, trial)
        if blow.victim == ORPHANED:
            return self._kill_driver_and_raylet(launch, trial)
        member = self._victim(launch, blow, trial)
        if blow.kind == "kill":
            struck = launch.strike(member, signal.SIGKILL) and member.role == "raylet"
            self._raylet_struck = self._raylet_struck or struck
            goes_on = self._after_kill(launch, blow.instant, member, trial)
            if struck:
                self._in_order = self._in_order and goes_on
                if _RAYLET not in launch.text:
                    trial.problems.append("it was not said that Ray's raylet has died")
            return goes_on
        launch.new_events()
        launch.strike(member, signal.SIGSTOP)
        if blow.kind == "hang":
            return self._after_hang(launch, member, trial)
        self._stop.wait(blow.seconds)
        launch.strike(member, signal.SIGCONT)
        return self._goes_on(launch, trial)

    def _kill_all(self, launch: Launch, trial: Trial) -> bool:
        """As a machine that goes down."""
        launch.kill_all()
        launch.wait_end(_GONE_S)
        return self._has_ended(launch, trial, -signal.SIGKILL)

    def _kill_driver_and_raylet(self, launch: Launch, trial: Trial) -> bool:
        """Together: all that is left has to end by itself."""
        members = [member for member in launch.members() if member.role in ("driver", "raylet")]
        for member in members:
            launch.strike(member, signal.SIGSTOP)
        for member in members:
            launch.strike(member, signal.SIGKILL)
        self._gone_by = time.monotonic() + _ORPHANED_S
        self._raylet_struck = True
        launch.wait_end(_GONE_S)
        return self._has_ended(launch, trial, -signal.SIGKILL)

    def _signal(self, launch: Launch, blow: Blow, trial: Trial) -> bool:
        """The driver ends the run in order; all others leave a signal to it."""
        number = signal.Signals[blow.kind]
        member = None if blow.victim == ALL else self._victim(launch, blow, trial)
        silent, starting = not launch.text, launch.is_starting
        if blow.stopped and (still := self._of_role(launch, blow.stopped, blow.draw)):
            trial.victim += f", {blow.stopped} stopped"
            launch.strike(still, signal.SIGSTOP)
        began = time.monotonic()
        self._send(launch, member, number)
        if (member is not None and member.role != "driver") or (number == signal.SIGHUP and self._setup.nohup):
            return self._goes_on(launch, trial)
        if blow.seconds:
            trial.victim += ", twice"
            self._stop.wait(blow.seconds)
            self._send(launch, member, number)
        limit = _SIGNALLED_S + (_STANDS_STILL_S if blow.stopped else 0.0)
        self._gone_by = began + limit
        if not launch.wait_end(limit):
            left = f"{LEFT}: {limit:.0f} s after {blow.kind} there were {_names(launch.members())}"
            trial.problems.append(f"{left}; the run said: {launch.text[-200:]}")
            launch.kill_all()
            return False
        if silent and launch.code == -number:
            return False  # Python had not come to our code
        saves = self._setup.saves_at_sigterm and not (starting or blow.seconds or blow.stopped)
        self._signalled = (self._attempts_before, saves)
        return self._has_ended(launch, trial, INTERRUPTED)

    def _send(self, launch: Launch, member: Member | None, number: int) -> None:
        if member is None:
            launch.strike_all(number)
        else:
            launch.strike(member, number)

    def _of_role(self, launch: Launch, role: str, draw: float) -> Member | None:
        choices = sorted((one for one in launch.members() if one.role == role), key=lambda one: one.name)
        return choices[int(draw * len(choices))] if choices else None

    def _victim(self, launch: Launch, blow: Blow, trial: Trial) -> Member:
        """A process of the role; the driver where there is none yet."""
        if (found := self._of_role(launch, blow.victim, blow.draw)) is not None:
            return found
        trial.victim = "driver"
        return Member(launch.pid, "driver", "driver")

    def _after_kill(self, launch: Launch, instant: Instant, member: Member, trial: Trial) -> bool:
        starting = instant.after in ("start", "restoring")
        others = [one for one in launch.members() if one.role == "explorer" and one.pid != member.pid]
        replaced = member.role == "explorer" and (self._setup.restarts or (self._setup.free and others))
        if member.role != "driver" and (starting or replaced or member.role == "monitor"):
            # Ray's processes are started again while it starts.
            return self._goes_on(launch, trial, may_end=starting)
        if not launch.wait_end(_NOTICED_S):
            trial.problems.append(f"the death of {member.name} did not end the run within {_NOTICED_S:.0f} s")
            launch.kill_all()
            return False
        if member.role == "driver":
            return self._has_ended(launch, trial, -signal.SIGKILL)
        return self._has_ended(launch, trial, 1, named=_name(member))

    def _after_hang(self, launch: Launch, member: Member, trial: Trial) -> bool:
        """It ends the run or is reported as a fault; then what hung goes on, if it is still there."""
        # Who hangs in a save leaves parts: a rank its own, an agent those that it was to write for its ranks. What the
        # other ranks tell of a rank says no more than its number.
        number = member.name.removeprefix("trainer-rank-")
        names = {"rank": (f"part 'rank-{number:0>5}'", f"rank {number}"), "agent": ("part 'rank-",)}
        began = time.monotonic()
        launch.new_steps()
        fault, steps = "", 0
        while time.monotonic() - began < _HANG_S and launch.code is None and not fault and steps < _NOT_NEEDED:
            if self._stop.wait(0.1):
                raise Interrupted
            said = [f"{event['where']}: {event['error']}" for event in launch.new_events() if event["event"] == "fault"]
            fault = next((one for one in said if _FULL not in one), "")  # that is of an earlier blow
            steps += launch.new_steps()
        took = f"after {time.monotonic() - began:.0f} s"
        if launch.code is not None:
            trial.noticed = f"{took}: {checks.error_of(launch.text)}"
            return self._has_ended(launch, trial, 1, named=_name(member))
        launch.strike(member, signal.SIGCONT)
        if fault:
            trial.noticed = f"{took}: {fault}"
            if not any(name in fault for name in (_name(member) or "?", *names.get(member.role, ()))):
                trial.problems.append(f"the fault does not name {member.name}: {trial.noticed}")
        elif steps >= _NOT_NEEDED:
            trial.noticed = f"the run trained {steps} steps meanwhile"
        else:
            trial.problems.append(f"{member.name} hung for {_HANG_S:.0f} s, and nobody noticed")
        return self._goes_on(launch, trial, may_end=True)

    def _goes_on(self, launch: Launch, trial: Trial, *, may_end: bool = False, said: str = "") -> bool:
        """The run is expected to train on, or to end in order where it may."""
        if launch.wait_steps(2, _START_S if launch.is_starting else _GOES_ON_S):
            trial.outcome = SURVIVED
            return launch.code is None
        if self._stop.is_set():
            raise Interrupted
        if launch.code is None:
            trial.problems.append(f"the run does not go on: no step in {_GOES_ON_S:.0f} s")
            launch.kill_all()
            return False
        if not may_end:
            trial.problems.append("it should have survived this")
        return self._has_ended(launch, trial, 1, named=said)

    def _has_ended(self, launch: Launch, trial: Trial, expected: int, *, named: str = "") -> bool:
        """The run has ended: look at how."""
        code, text = launch.code, launch.text
        error = checks.error_of(text)
        if _STARTING in error and not launch.is_starting:
            error = ""  # which it survived
        trial.noticed = trial.noticed or error
        if _GIVEN_UP in text:
            self._in_order = False
        if code != expected:
            trial.problems.append(f"exit code {code} instead of {expected}: {error or text[-300:]}")
        if code is not None and code >= 0:
            if expected == INTERRUPTED:
                if "interrupted" not in text:
                    trial.problems.append(f"the run did not say that it was interrupted: {text[-300:]}")
            elif not error:
                trial.problems.append(f"the run ended without an error that says why: {text[-300:]}")
            elif named not in error:
                trial.problems.append(f"the error does not name {named.strip('-')}: {error}")
            if "Traceback" in text:
                trial.problems.append("the run printed a traceback")
        return False

    # -- between two lives

    def _look(self, trial: Trial, launch: Launch) -> None:
        run, root = self._places.run, self._places.checkpoints
        if not (run / "run.json").exists():
            return
        self._check_start(launch)
        trial.problems += self._ledger.look(run, root)
        trial.problems += checks.metrics_problems(run)
        trial.problems += self._owner.look(run, (root, self._places.mirror), self._ledger.published)
        trial.problems += checks.mirror_problems(self._places.mirror)
        trial.problems += self._visits.elsewhere_problems()
        if self._signalled is not None:
            before, saves = self._signalled
            trial.problems += checks.signal_problems(run, before, max(self._ledger.good, default=0), saves=saves)
        if self._setup.pinned and self._ledger.pinned is None and self._ledger.good:
            self._ledger.pinned = self._ledger.good[0]
            leases.pin(root, self._ledger.pinned, note="campaign")
        self._attempts_before = len(checks.attempts(run))

    _attempts_before = 0

    def _look_for_leftovers(self, trial: Trial) -> None:
        trial.problems += [f"{LEFT}: {name}" for name in self._places.left_in_memory(self._drivers)]
        died = self._setup.mirrored and any(one.kind == "kill" for one in self._trials)
        trial.problems += checks.left_behind(self._places.checkpoints, copier_died=died)

    def _receive(self, visit: Visit) -> None:
        """Let a program use the places while the run does not live."""
        trial = self._trial("intrusion", self._visits.possible(visit.name, alone=True), "between two lives")
        began = time.monotonic()
        trial.outcome = SURVIVED
        trial.problems += self._visits.visit(trial.victim, visit.draw)
        trial.noticed, trial.seconds = self._visits.said, round(time.monotonic() - began, 1)
        trial.problems += self._ledger.look(self._places.run, self._places.checkpoints)

    def _lose_folder(self) -> None:
        """Everything in the checkpoint folder is lost, and the mirror has a checkpoint."""
        there = checks.whole_in(self._places.mirror)
        if not there:
            return
        newest, committed = max(there), max(self._ledger.full, default=0)
        places.lose(self._places.checkpoints)
        trial = self._trial("damage", "checkpoint folder", f"lost; the mirror has steps {sorted(there)}")
        self._open.append(trial)
        if newest < committed:
            self._insist = ["--skip-unreadable"]
        self._ledger.fetched(there[newest])

    def _do_damage(self, damage: Damage) -> None:
        """To one of several checkpoints, so that something is left to go on with."""
        root, ledger = self._places.checkpoints, self._ledger
        if damage.target == "folder":
            self._lose_folder()
            return
        good = ledger.good
        if len(good) < 2:
            return
        if damage.target == "every":
            for one in good[:-1]:
                places.damage(step_dir(root, one) / MANIFEST, damage.how, damage.draw)
                ledger.damage(one)
        if damage.target == "tracker":
            step, path = None, tracker_path(root, FULL)
            ledger.tracker_damaged = ledger.attempt
        else:
            step = good[-1] if damage.target in ("newest", "every") else random.Random(damage.draw).choice(good[:-1])
            files = [MANIFEST, *(entry.path for entry in read_manifest(step_dir(root, step)).files if entry.bytes)]
            path = step_dir(root, step) / files[int(damage.draw * len(files))]
        if not path.exists():
            return
        places.damage(path, damage.how, damage.draw)
        trial = self._trial("damage", _victim_of(path, damage), f"{damage.how} {path.relative_to(root)}")
        self._open.append(trial)
        if step is not None:
            assert not catalog.verify(step_dir(root, step)).ok, f"{path} was damaged and verifies"
            ledger.damage(step)
            if step == good[-1] and ledger.good:
                self._passed_over = step

    # -- the end

    def _finish(self) -> None:
        """The last resume runs to its end, and everything is compared."""
        # What a resume was struck before it fetched is in the mirror alone.
        until = max([*self._ledger.full, *checks.whole_in(self._places.mirror)], default=0) + _LAST_STEPS
        trial = self._trials[-1]
        with self._start(f"trainer.steps={until}") as launch:
            if not self._comes_up(launch):
                return
            if not launch.wait_end(_END_S):
                trial.problems.append(f"the last resume did not end within {_END_S:.0f} s")
            elif launch.code != 0:
                trial.problems.append(f"the last resume ended with {launch.code}: {checks.error_of(launch.text)}")
            if left := launch.wait_gone(_GONE_S):
                trial.problems.append(f"{LEFT}: {_GONE_S:.0f} s after the end there were {_names(left)}")
        self._signalled = None
        self._look(trial, launch)
        self._look_for_leftovers(trial)
        if max(self._ledger.good, default=0) != until:
            trial.problems.append(f"{LOSS}: the newest checkpoint is not {until}: {self._ledger.good}")
        there = [info.step for info in catalog.scan(self._places.mirror) if info.manifest is not None]
        if self._setup.mirrored and max(there, default=0) != until:
            trial.problems.append(f"{LOSS}: the newest checkpoint of the mirror is not {until}: {there}")
        if not self._ledger.damaged:
            trial.problems += self._verified()

    def _verified(self) -> list[str]:
        """What the command line says of all that is listed."""
        done = subprocess.run(
            [sys.executable, "-m", "trinity_sync.cli", "ckpt", "verify", str(self._places.checkpoints)],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        return [f"ckpt verify: {done.stdout[-200:]}{done.stderr[-200:]}"] if done.returncode else []

    def _trial(self, kind: str, victim: str, instant: str) -> Trial:
        trial = Trial.of(self._plan, self._lives, kind, victim, instant, str(self._home))
        self._trials.append(trial)
        return trial


def _victim_of(path: Path, damage: Damage) -> str:
    if damage.target in ("every", "tracker"):
        return {"every": "every checkpoint", "tracker": "tracker"}[damage.target]
    if path.name == MANIFEST:
        return "manifest"
    return "tensors" if path.suffix in (".pt", ".distcp", ".safetensors") else "small file"


def _name(member: Member) -> str:
    """What an error or a fault calls it."""
    numbered = {"rank": ("trainer-rank-", "trainer rank "), "explorer": ("explorer-", "explorer-")}
    if member.role not in numbered:
        return _NAMES.get(member.role, "")
    log, name = numbered[member.role]
    return name + member.name.removeprefix(log) if member.name.startswith(log) else name.strip()  # it has no log yet


def _names(members: list[Member]) -> str:
    return ", ".join(f"{member.name} (pid {member.pid})" for member in members)
