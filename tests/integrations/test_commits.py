"""Who waits for a commit, of a monitor in a process of its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.integrations.ranks import LIMIT
from trinity_sync.actors.monitor import MonitorClient
from trinity_sync.checkpoint.daemon.connecting import connect
from trinity_sync.checkpoint.daemon.process import Lifetime
from trinity_sync.errors import WaitTimeout
from trinity_sync.integrations.verl.commits import Commits
from trinity_sync.protocol.parts import FULL


def test_what_follows_a_commit_waits_for_the_trainer_as_long_as_that_takes_and_for_others_so_long(
    tmp_path: Path,
) -> None:
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
    handle.close()
