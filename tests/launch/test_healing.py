"""Which failures a run goes on after by itself, how often, and what is told of them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity_sync import config
from trinity_sync.actors.explorer_client import EngineDeathError, LoadError
from trinity_sync.actors.pending import DeathError, NoAnswerError
from trinity_sync.config import RunConfig
from trinity_sync.errors import ConfigError, ProcessLoss, RunError, WaitTimeout
from trinity_sync.host.origin import Origin, give_origin
from trinity_sync.host.supervisor import Note, Notes
from trinity_sync.launch import healing, launcher
from trinity_sync.launch.healing import AttemptProgress, RestartPolicy
from trinity_sync.launch.start import Resume, Start
from trinity_sync.launch.supervision import SupervisedDriver
from trinity_sync.tracking.events import CommitEvent, event_line
from trinity_sync.tracking.run_record import RunFolder, lock_owner, unlock_run_folder

LAST = 20
DEATH = DeathError("trainer rank 1", "train step 7")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def a_healing(clock: Clock, most: int = 3) -> RestartPolicy:
    return RestartPolicy(most, 100.0, 25.0, clock)


def at(step: int, began: int = 0, committed: int = 0, attempt: int = 0) -> AttemptProgress:
    return AttemptProgress(attempt=attempt, began=began, step=step, committed=committed, last=LAST)


def by_user(error: Exception) -> Exception:
    give_origin(error, Origin("/home/me/my_monitor.py:3", "Traceback of theirs"))
    return error


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (DEATH, True),
        (EngineDeathError("worker 0 has died"), True),
        (WaitTimeout("the synchronizer", "answer", 5), True),
        (NoAnswerError("trainer rank 0 could not train (no answer from trainer rank 1)", 25.0), True),
        (NoAnswerError("trainer rank 0 could not train (no answer from trainer rank 1)", 1.0), False),
        (ProcessLoss("explorer-0 died, and no other explorer is left"), True),
        (LoadError("version 3 is damaged"), False),
        (RunError("the reward function failed"), False),
        (RunError("the newest checkpoint could not be saved: No space left on device"), False),
        (ConfigError("no such key"), False),
        (AssertionError("of an algorithm"), False),
        (by_user(DeathError("the checkpoint monitor", "begin step 4")), False),
        (by_user(WaitTimeout("the reward", "answer", 5)), False),
    ],
    ids=lambda value: value if isinstance(value, bool) else type(value).__name__,
)
def test_a_run_goes_on_after_a_death_or_a_timeout_and_nothing_else(
    clock: Clock, error: Exception, goes_on: bool
) -> None:
    judged = a_healing(clock)
    assert (judged.judge(error, at(7)) is not None) is goes_on
    assert judged.heals(error) is goes_on
    assert not judged.heals(RunError("another one"))


def test_a_death_before_the_first_step_is_healed_but_a_timeout_is_not(clock: Clock) -> None:
    assert a_healing(clock).judge(DEATH, at(0)) is not None
    assert a_healing(clock).judge(WaitTimeout("Ray", "find a node", 5), at(0)) is None


def test_a_timeout_while_it_heals_counts_as_another_death(clock: Clock) -> None:
    judged = a_healing(clock)
    assert judged.judge(DEATH, at(7)) is not None
    assert judged.judge(WaitTimeout("trainer rank 0", "build its engine", 5), at(4, began=4, attempt=1)) is not None


def test_a_run_whose_last_checkpoint_is_committed_has_nothing_to_go_on_with(clock: Clock) -> None:
    assert a_healing(clock).judge(DEATH, at(LAST, committed=LAST)) is None
    assert a_healing(clock).judge(DEATH, at(LAST, committed=LAST - 2)) is not None


def test_restarts_count_within_the_window(clock: Clock) -> None:
    judged = a_healing(clock, most=2)
    told = []
    for committed, seconds in enumerate((0, 60, 50, 10)):
        clock.now += seconds
        told.append(judged.judge(DEATH, at(7, committed=committed)))
    assert [text and text.partition("(")[2].partition(" within")[0] for text in told] == [
        "restart 1 of 2",
        "restart 2 of 2",
        "restart 2 of 2",  # the first was 110 s ago
        None,
    ]


def test_a_run_without_a_new_checkpoint_uses_its_restarts_up_however_long_each_attempt_takes(clock: Clock) -> None:
    judged = a_healing(clock, most=2)
    told = []
    for _ in range(3):
        clock.now += 1000
        told.append(judged.judge(DEATH, at(7, began=4, committed=4)))
    assert [text is None for text in told] == [False, False, True]


def test_number_and_window_are_those_of_the_settings() -> None:
    cfg = RunConfig(config.compose(["trainer.max_restarts=1", "trainer.restart_window_s=5", "backend.timeout_s=7"]))
    judged = RestartPolicy.of(cfg.settings)
    told = judged.judge(NoAnswerError("no answer", 7.0), at(7))
    assert told is not None
    assert "restart 1 of 1 within 5 s" in told


def test_the_error_of_a_run_with_no_restart_left_tells_each_attempt(clock: Clock) -> None:
    judged = a_healing(clock, most=1)
    judged.judge(DEATH, at(7))
    last = DeathError("the synchronizer", "commit version 9")
    judged.judge(last, at(9, began=4, attempt=1))
    assert judged.story(last) == (
        "the synchronizer died before it could commit version 9. The restarts are used up (trainer.max_restarts=1 "
        "within trainer.restart_window_s=100); before that, attempt 0: trainer rank 1 died before it could train step 7"
    )


def test_the_error_of_a_user_after_a_restart_is_told_as_it_is(clock: Clock) -> None:
    judged = a_healing(clock)
    judged.judge(DEATH, at(7))
    assert judged.story(RunError("the reward function failed")) is None


def test_a_death_that_cannot_be_healed_at_once_is_told_as_it_is(clock: Clock) -> None:
    judged = a_healing(clock)
    assert judged.judge(DEATH, at(LAST, committed=LAST)) is None
    assert judged.story(DEATH) is None


def test_memory_that_runs_out_twice_at_a_step_ends_the_run(clock: Clock) -> None:
    def full() -> DeathError:
        return DeathError("explorer-0", "generate for step 8", of_memory=True)

    def wrapped() -> ProcessLoss:
        lost = ProcessLoss("explorer-0 died, and no other explorer is left")
        lost.__cause__ = full()
        return lost

    judged = a_healing(clock)
    assert judged.judge(full(), at(7)) is not None
    assert judged.judge(full(), at(9, began=4)) is not None
    assert judged.judge(wrapped(), at(9, began=8)) is None


def test_a_death_keeps_its_fields_on_the_way_between_processes() -> None:
    death = pickle.loads(pickle.dumps(DeathError("a", "b", "c", True)))
    assert (death.who, death.what, death.why, death.of_memory) == ("a", "b", "c", True)
    silent = pickle.loads(pickle.dumps(NoAnswerError("a did not", 3.0)))
    assert (str(silent), silent.seconds) == ("a did not", 3.0)


def test_the_event_of_a_healing_tells_all_deaths_since_the_last_step(clock: Clock) -> None:
    judged = a_healing(clock)
    assert judged.event(0) is None
    judged.judge(DEATH, at(7), since=990.0)
    clock.now += 5
    judged.judge(DeathError("explorer-0", "start"), at(4, began=4, attempt=1))
    event = judged.event(4)
    assert event is not None
    died = "trainer rank 1 died before it could train step 7; then explorer-0 died before it could start"
    assert (event.died, event.resumed_from, event.lost, event.time) == (died, 4, 3, 990.0)
    judged.judge(DeathError("explorer-0", "load version 9"), at(9, began=4, attempt=2))
    event = judged.event(8)
    assert event is not None
    assert (event.died, event.lost) == ("explorer-0 died before it could load version 9", 1)


def test_what_a_resume_was_asked_holds_until_it_has_a_checkpoint(clock: Clock) -> None:
    judged, asked = a_healing(clock), Resume(from_scratch=True, skip_unreadable=True, given=frozenset({"sync.store"}))
    judged.judge(DEATH, at(5))
    assert judged.next(asked) == asked
    judged.judge(DEATH, at(7, committed=6))
    assert judged.next(asked) == Resume(given=frozenset({"sync.store"}))
    assert not judged.heals(DEATH)


# -- the attempts of a run


class Attempts:
    """In place of `launcher.run`: each attempt does three steps and ends as given."""

    def __init__(self, *ends: object) -> None:
        self.ends, self.seen = list(ends), list[dict[str, Any]]()

    def run(self, cfg: RunConfig, folder: Path, *, healing: RestartPolicy, **given: Any) -> int:
        self.seen.append({"cfg": cfg, **given})
        end, began = self.ends.pop(0), 2 * len(self.seen)
        if given["settings"] is not None:
            given["settings"](cfg.updated({"trainer.steps": LAST}))
        with RunFolder.open(folder, resume=(folder / "run.json").exists()) as held:
            end = end() if callable(end) else end
            if not isinstance(end, BaseException):
                assert isinstance(end, int)
                return end
            if isinstance(end, Exception) and not isinstance(end, ConfigError):  # which comes before the record
                healing.judge(end, at(began + 3, began=began, attempt=len(self.seen) - 1))
                if healing.heals(end):
                    held.pass_on()
            raise end


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    def run(*ends: object, most: int = 3) -> tuple[int, Attempts]:
        made = Attempts(*ends)
        monkeypatch.setattr(launcher, "run", made.run)
        cfg = RunConfig(config.compose([f"trainer.max_restarts={most}", "trainer.total_epochs=1"]))
        saved: list[RunConfig] = []

        def settings(counted: RunConfig) -> contextlib.AbstractContextManager[None]:
            saved.append(counted)
            return contextlib.nullcontext()

        code = healing.run(cfg, tmp_path, started_in=tmp_path, resume=None, until=9, settings=settings)
        assert len(saved) == 1
        return code, made

    yield run
    assert lock_owner(tmp_path) is None


def test_the_next_attempt_resumes_with_the_settings_of_the_first(attempts: Any, tmp_path: Path) -> None:
    code, made = attempts(DEATH, DeathError("the synchronizer", "commit"), 0)
    assert code == 0
    assert [one["resume"] for one in made.seen] == [None, *[Resume(started_in=tmp_path)] * 2]
    assert [one["cfg"].settings.trainer.steps for one in made.seen[1:]] == [LAST, LAST]
    assert [one["settings"] is None for one in made.seen] == [False, True, True]
    assert {one["until"] for one in made.seen} == {9}


def test_without_restarts_a_death_ends_the_run_as_it_is(attempts: Any) -> None:
    with pytest.raises(DeathError):
        attempts(DEATH, most=0)


def test_an_interrupt_is_no_death(attempts: Any) -> None:
    assert attempts(DEATH, 130)[0] == 130
    with pytest.raises(KeyboardInterrupt):
        attempts(DEATH, KeyboardInterrupt())


def test_an_attempt_that_cannot_resume_ends_the_run_as_a_failure_with_what_came_before(attempts: Any) -> None:
    told = "^attempt 0: trainer rank 1 died .* step 7. The run cannot go on: step 4 cannot be read$"
    with pytest.raises(RunError, match=told):
        attempts(DEATH, ConfigError("step 4 cannot be read"))


@pytest.mark.parametrize(
    ("end", "status"), [(ConfigError("step 4 cannot be read"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_the_record_has_the_end_of_a_run_whose_next_attempt_did_not_begin(
    attempts: Any, tmp_path: Path, end: BaseException, status: str
) -> None:
    line = {"attempt": 0, "status": "failed", "error": str(DEATH)}

    def first() -> DeathError:
        (tmp_path / "run.json").write_text(json.dumps({**line, "attempts": [line]}))
        return DeathError("trainer rank 1", "train step 7")

    with pytest.raises((RunError, KeyboardInterrupt)):
        attempts(first, end)
    record = json.loads((tmp_path / "run.json").read_text())
    assert {record["status"], record["attempts"][0]["status"]} == {status}
    assert record["error"] != str(DEATH)


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("raised", [True, False])
def test_a_signal_after_the_record_of_a_failed_attempt_ends_a_run_that_was_to_go_on_as_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: bool, goes_on: bool
) -> None:
    error, discarded = DEATH if goes_on else RunError("the reward function failed"), list[int]()

    def ended(cfg: RunConfig, folder: Path, *, healing: RestartPolicy, **_: object) -> int:
        line = {"attempt": 0, "status": "failed", "error": str(error)}
        (folder / "run.json").write_text(json.dumps({**line, "attempts": [line]}))
        healing.judge(error, at(3))
        if raised:
            raise KeyboardInterrupt
        return 130

    states = SimpleNamespace(discard=lambda: discarded.append(1))
    monkeypatch.setattr(launcher, "run", ended)
    monkeypatch.setattr(healing, "memory_states", lambda cfg, run: contextlib.nullcontext(states))
    cfg = RunConfig(config.compose([]))
    with contextlib.suppress(KeyboardInterrupt):
        healing.run(
            cfg, tmp_path, started_in=tmp_path, resume=None, until=None, settings=lambda _: contextlib.nullcontext()
        )
    record = record_of(tmp_path)
    wanted = "interrupted" if goes_on else "failed"
    assert [record["status"], record["attempts"][0]["status"], len(discarded)] == [wanted, wanted, int(goes_on)]


def test_restarts_do_not_change_the_digest_of_the_settings() -> None:
    digests = {RunConfig(config.compose([f"trainer.max_restarts={most}"])).digest for most in (0, 5)}
    assert len(digests) == 1


# -- a driver that a supervisor has started again


KILLED = "the driver was killed by signal 9"


@pytest.fixture
def notes() -> Iterator[Notes]:
    with open(os.memfd_create("notes"), "r+b", buffering=0) as file:
        yield Notes(file.fileno())


@pytest.fixture
def died(tmp_path: Path, notes: Notes) -> Iterator[Any]:
    """Leaves a run whose driver has died in an attempt, and returns how the next one judges that."""

    def leave(
        *deaths: float,
        step: int = 7,
        committed: int = 4,
        began: int | None = None,
        error: str | None = None,
        restarts: Sequence[tuple[float, int]] = (),
        most: int = 3,
        noted: int = 1,
        worked: bool = False,
    ) -> tuple[RestartPolicy, RunConfig]:
        attempt = {"attempt": 1, "status": "failed" if error else "running", "resumed_from": began, "error": error}
        record = {**attempt, "host": "here", "total_steps": LAST, "attempts": [attempt]}
        (tmp_path / "run.json").write_text(json.dumps(record))
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": step, "attempt": 1}) + "\n")
        commit = CommitEvent(attempt=1, step=committed, kind="full", digest=None, bytes=1, total_s=1.0)
        (tmp_path / "events.jsonl").write_text(json.dumps(event_line(commit)) + "\n")
        report = Note(run=str(tmp_path / "run.json"), attempt=noted, arguments=["run"], most=most)
        story = ["attempt 0: of before"] if restarts else []
        notes.append({**report, "restarts": [*restarts], "story": story, "worked": worked, "gpus_per_node": 8})
        for at in deaths:
            notes.append(Note(died=KILLED, time=at))
        cfg = RunConfig(config.compose([f"trainer.max_restarts={most}"]))
        return RestartPolicy(most, 100.0, 25.0, Clock(), SupervisedDriver(notes, resumes=True)), cfg

    yield leave
    unlock_run_folder(tmp_path)


def record_of(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())


def test_a_driver_judges_the_death_of_the_one_before_as_any_death(
    died: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged, cfg = died(990.0)
    assert judged.after_deaths(cfg, tmp_path, Resume(from_scratch=True)) == Resume()
    event = judged.event(4)
    assert event is not None
    assert (event.died, event.resumed_from, event.lost, event.time) == (KILLED, 4, 3, 990.0)
    assert capsys.readouterr().err.startswith(f"{KILLED}; the run goes on from its newest checkpoint (restart 1 of 3 ")
    record = record_of(tmp_path)
    assert [(one["status"], one["error"]) for one in (record, record["attempts"][0])] == [("failed", KILLED)] * 2
    assert lock_owner(tmp_path) is not None


def test_an_attempt_of_another_command_is_left_alone(died: Any, tmp_path: Path) -> None:
    judged, cfg = died(990.0, noted=0)
    before = record_of(tmp_path)
    with pytest.raises(ConfigError, match=r"has been resumed by another command .*: attempt 1 on here, running"):
        judged.after_deaths(cfg, tmp_path, Resume())
    assert record_of(tmp_path) == before


def test_an_attempt_that_a_driver_began_before_it_could_note_it_is_its_own(died: Any, tmp_path: Path) -> None:
    judged, cfg = died(990.0, 995.0, noted=0)
    assert judged.after_deaths(cfg, tmp_path, Resume()) == Resume()


def test_an_attempt_that_a_heal_began_is_the_driver_s_own_also_where_it_died_before_the_note(
    died: Any, notes: Notes, tmp_path: Path
) -> None:
    """The next attempt is in run.json seconds before it is noted, as the logs of a long run are read in between."""
    judged, cfg = died(noted=0)
    second = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(second.replace('"attempt": 1', '"attempt": 0'))
    with RunFolder.open(tmp_path, resume=True) as folder:
        start = Start(0, True, tmp_path / "checkpoints", None)
        assert judged.goes_on(folder, start, LAST, DEATH, 0, 990.0) is not None
    (tmp_path / "run.json").write_text(second)
    notes.append(Note(died=KILLED, time=995.0))
    again = RestartPolicy(3, 100.0, 25.0, Clock(), SupervisedDriver(notes, resumes=True))
    assert again.after_deaths(cfg, tmp_path, Resume()) == Resume()


def test_the_deaths_of_a_run_are_not_charged_to_another_one_that_the_program_resumes(died: Any, tmp_path: Path) -> None:
    judged, cfg = died(990.0)
    another = tmp_path / "another"
    another.mkdir()
    before = (tmp_path / "run.json").read_text()
    (another / "run.json").write_text(before)
    asked = Resume(from_scratch=True)
    assert judged.after_deaths(cfg, another, asked) == asked
    assert (another / "run.json").read_text() == before
    assert judged.event(4) is None
    assert lock_owner(another) is None


def test_a_heal_does_not_depend_on_a_record_that_cannot_be_read_now(died: Any, notes: Notes, tmp_path: Path) -> None:
    judged, _ = died()
    with RunFolder.open(tmp_path, resume=True) as folder:
        (tmp_path / "run.json").write_text("")
        start = Start(0, True, tmp_path / "checkpoints", None)
        assert judged.goes_on(folder, start, LAST, DEATH, 1, 990.0) is not None
    assert notes.read()[-1]["attempt"] == 2


def test_restarts_count_over_drivers_and_the_last_error_tells_each(died: Any, tmp_path: Path) -> None:
    judged, cfg = died(990.0, restarts=[(950.0, 4), (960.0, 4), (970.0, 4)])
    told = "The restarts are used up .*; before that, attempt 0: of before$"
    with pytest.raises(RunError, match=f"^{KILLED}. {told}"):
        judged.after_deaths(cfg, tmp_path, Resume())
    assert record_of(tmp_path)["status"] == "failed"
    assert "used up" in record_of(tmp_path)["error"]
    assert (tmp_path / "report.html").exists()


def test_restarts_before_a_newer_checkpoint_and_the_window_no_longer_count(died: Any, tmp_path: Path) -> None:
    judged, cfg = died(990.0, restarts=[(850.0, 0), (860.0, 0), (870.0, 0)])
    assert judged.after_deaths(cfg, tmp_path, Resume()) == Resume()


def test_each_death_of_a_driver_counts_and_what_a_resume_was_asked_holds_until_there_is_a_checkpoint(
    died: Any, tmp_path: Path
) -> None:
    asked = Resume(from_scratch=True)
    judged, cfg = died(990.0, 995.0, committed=0)
    assert judged.after_deaths(cfg, tmp_path, asked) == asked
    event = judged.event(0)
    assert event is not None
    assert (event.died, event.lost, event.time) == (f"{KILLED}; then {KILLED}", 7, 990.0)
    unlock_run_folder(tmp_path)
    judged, cfg = died(990.0, 995.0, most=1)
    with pytest.raises(RunError, match="used up"):
        judged.after_deaths(cfg, tmp_path, asked)


def test_a_driver_that_ended_with_its_node_is_told_with_the_reason(died: Any, tmp_path: Path) -> None:
    judged, cfg = died(990.0, error="Ray's GCS has not answered for 60 s")
    judged.after_deaths(cfg, tmp_path, Resume())
    assert judged.event(4).died == f"{KILLED} (Ray's GCS has not answered for 60 s)"


def test_a_run_whose_last_checkpoint_is_committed_is_not_resumed_after_its_driver(died: Any, tmp_path: Path) -> None:
    judged, cfg = died(990.0, step=LAST, committed=LAST)
    with pytest.raises(RunError, match=f"^{KILLED}$"):
        judged.after_deaths(cfg, tmp_path, Resume())


def test_a_driver_notes_what_the_next_one_needs(died: Any, notes: Notes, tmp_path: Path) -> None:
    judged, cfg = died(990.0)
    judged.after_deaths(cfg, tmp_path, Resume())
    judged.begun(tmp_path, 2)
    report = notes.read()[-1]
    assert report == {
        "run": str(tmp_path / "run.json"),
        "attempt": 2,
        "arguments": ["run"],
        "most": 3,
        "restarts": [[1000.0, 4]],
        "story": [f"attempt 1: {KILLED}"],
        "worked": True,
        "gpus_per_node": 8,
    }
    assert SupervisedDriver(notes, resumes=True).deaths == []


@pytest.mark.parametrize("worked", [True, False])
def test_a_driver_waits_for_lost_nodes_as_the_one_before_that_died_in_such_a_wait(
    died: Any, tmp_path: Path, worked: bool
) -> None:
    judged, cfg = died(990.0, step=4, began=4, worked=worked)
    assert judged.after_deaths(cfg, tmp_path, Resume()) == Resume()
    assert judged.gpus_per_node == 8
    no_room = WaitTimeout("Ray", "find a node with a processor and a GPU", 300)
    assert (judged.judge(no_room, at(4, began=4, committed=4, attempt=2)) is not None) is worked


def test_the_gpus_of_a_node_are_noted_as_soon_as_they_are_known(died: Any, notes: Notes, tmp_path: Path) -> None:
    judged, cfg = died(990.0)
    judged.after_deaths(cfg, tmp_path, Resume())
    before = len(notes.read())
    assert [judged.most_gpus(tmp_path, 2, there) for there in (0, 16, 4)] == [8, 16, 16]
    (noted,) = notes.read()[before:]
    assert (noted["attempt"], noted["gpus_per_node"]) == (2, 16)


def test_a_driver_notes_that_its_run_fails_before_ray_ends(died: Any, notes: Notes, tmp_path: Path) -> None:
    judged, _ = died()
    with RunFolder.open(tmp_path, resume=True) as folder:
        start = Start(0, True, tmp_path / "checkpoints", None)
        assert judged.goes_on(folder, start, LAST, DEATH, 1, 990.0) is not None
        assert "restarts" in notes.read()[-1]
        assert judged.goes_on(folder, start, LAST, RunError("the reward function failed"), 1, 990.0) is None
    assert notes.read()[-1] == {"over": True}
