"""With which reference a run may go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_sync.checkpoint.folder.resume_point import OF_ADAPTER, check_same
from trinity_sync.errors import ConfigError
from trinity_sync.protocol.parts import Reference

FOLDER = Path("checkpoints/global_step_2")
FIRST: Reference = {"path": "/models/first", "digest": "aa"}
MOVED: Reference = {"path": "/elsewhere/first", "digest": "aa"}
SECOND: Reference = {"path": "/models/second", "digest": "bb"}
BASE: Reference = {"path": "/models/base", "digest": OF_ADAPTER}


@pytest.mark.parametrize(
    ("before", "now"), [(None, None), (None, FIRST), (FIRST, None), (FIRST, FIRST), (FIRST, MOVED), (BASE, BASE)]
)
def test_a_run_goes_on_with_what_it_had_or_begins_or_ends_with_it(
    before: Reference | None, now: Reference | None
) -> None:
    check_same(FOLDER, before, now)


@pytest.mark.parametrize(("before", "now"), [(FIRST, SECOND), (BASE, FIRST), (FIRST, BASE)])
def test_a_run_does_not_go_on_with_another(before: Reference, now: Reference) -> None:
    with pytest.raises(ConfigError, match=f"global_step_2 was trained near {before['path']}.*has {now['path']}"):
        check_same(FOLDER, before, now)
