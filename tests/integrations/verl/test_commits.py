"""Who waits for a commit, of a monitor in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.integrations.real_engines.ranks import LIMIT
from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.checkpoint.daemon import Lifetime, connect
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.integrations.verl import committed_saves
from trinity_sync.integrations.verl.committed_saves import Commits
from trinity_sync.protocol.parts import FULL


def test_what_follows_a_commit_waits_for_the_trainer_as_long_as_that_takes_and_for_others_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committed_saves, "ANSWER_S", LIMIT)  # a busy machine answers late
    lifetime = Lifetime(first_s=LIMIT, grace_s=0.1)
    handle = connect(tmp_path, program="one", may_start=True, timeout_s=LIMIT, lifetime=lifetime)
    client = MonitorClient(handle)
    for step in (1, 2):
        client.begin(step, 0, FULL, ["model", "beside"], {}).result(LIMIT)
    client.notify_finished(1, part="model", attempt=0, files=[]).result(LIMIT)
    commits, followed = Commits(client, 0, 0.3), threading.Event()
    commits.follow(1, FULL, lambda _: followed.set())
    commits.follow(2, FULL, lambda _: None)
    late = next(thread for thread in threading.enumerate() if thread.name == "commit-full-2")
    assert all(thread.daemon for thread in commits.following()), "the end of the program decides how long it waits"
    late.join(LIMIT)
    with pytest.raises(WaitTimeout, match="part 'model'"):
        commits.raise_failures()
    assert not followed.is_set()
    client.notify_beside(1, attempt=0).result(LIMIT)
    assert followed.wait(LIMIT)
    commits.raise_failures()
    assert [client.status(step).result(LIMIT)["own"] for step in (1, 2)] == [FULL, None]
    handle.close()


@pytest.fixture
def commits() -> Commits:
    """Of a monitor to which all steps are committed."""
    return Commits(MagicMock(), 0, LIMIT)


@pytest.fixture
def may_end() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_what_follows_a_commit_and_does_not_end_is_told(may_end: threading.Event) -> None:
    commits = Commits(MagicMock(), 0, 0.1)
    commits.follow(1, FULL, lambda _: may_end.wait(LIMIT) and None)
    with pytest.raises(WaitTimeout, match=r"the work after a commit .*0\.1 s"):
        commits.wait()


def test_a_commit_that_comes_as_its_wait_ends_is_followed() -> None:
    monitor = MagicMock()
    late = WaitTimeout("step 1", "be committed", 0.3)
    monitor.wait_committed.return_value.result.side_effect = [late, {"path": "here"}]
    monitor.status.return_value.result.return_value = {"awaited": [], "own": FULL}
    commits, followed = Commits(monitor, 0, LIMIT), list[str | None]()
    commits.follow(1, FULL, followed.append)
    commits.wait()
    assert followed == ["here"]


def test_the_commit_of_an_earlier_attempt_puts_no_limit_to_the_wait_for_the_trainer() -> None:
    monitor = MagicMock()
    late = WaitTimeout("step 1", "be committed", 0.3)
    monitor.wait_committed.return_value.result.side_effect = [late, late, late, {"path": "here"}]
    monitor.status.return_value.result.return_value = {"awaited": ["beside"], "committed": FULL, "own": None}
    commits, followed = Commits(monitor, 0, LIMIT), list[str | None]()
    commits.follow(1, FULL, followed.append)
    commits.wait()
    assert followed == ["here"]


def test_of_commits_that_fail_the_first_is_raised() -> None:
    monitor = MagicMock()
    monitor.wait_committed.side_effect = lambda step, *_, **__: (_ for _ in ()).throw(RunError(f"step {step}"))
    commits = Commits(monitor, 0, LIMIT)
    for step in (1, 2):
        commits.expect(step, FULL)
    with pytest.raises(RunError, match="step 1"):
        commits.wait()


def test_a_failure_is_raised_once(commits: Commits) -> None:
    commits.follow(1, FULL, lambda _: 1 / 0 and None)
    with pytest.raises(ZeroDivisionError):
        commits.wait()
    commits.raise_failures()
    assert commits.following() == []


def test_of_what_is_dropped_nothing_is_raised_also_when_it_fails_later(
    commits: Commits, may_end: threading.Event
) -> None:
    def fail(_: object) -> None:
        may_end.wait(LIMIT)
        raise RunError("its folder is gone")

    commits.expect(1, FULL)
    commits.follow(1, FULL, fail)
    (thread,) = commits.following()
    threading.Timer(0.2, may_end.set).start()
    commits.drop()
    thread.join(LIMIT)
    commits._monitor.wait_committed.side_effect = RunError("was asked for")  # type: ignore[attr-defined]
    commits.wait()
    assert commits.following() == []


@pytest.mark.parametrize("earlier", [None, FULL])
def test_a_commit_that_takes_long_though_all_is_written_is_told(earlier: str | None) -> None:
    monitor = MagicMock()
    monitor.wait_committed.side_effect = [WaitTimeout("step 1", "be committed", LIMIT), RunError("asked again")]
    monitor.status.return_value.result.return_value = {"awaited": [], "committed": earlier, "own": None}
    commits = Commits(monitor, 0, LIMIT)
    commits.follow(1, FULL, lambda _: None)
    with pytest.raises(WaitTimeout, match="step 1"):
        commits.wait()
