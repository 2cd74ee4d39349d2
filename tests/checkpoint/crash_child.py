"""Does one piece of checkpoint work again and again, and is killed (SIGKILL) one system call later each time.

Run as ``python -m tests.checkpoint.crash_child BASE SCENARIO`` by `test_crash`: folder ``BASE/<n>`` is what the n-th
death left behind; the last one was not killed.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoint.helpers import commit, stage
from trinity_sync.checkpoint.folder import commits, contents, deletion, recovery, resume_point
from trinity_sync.checkpoint.folder.contents import Manifest, step_dir, write_tracker
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.protocol.retention import KeepLast

CALLS = ("rename", "replace", "link", "fsync", "mkdir", "rmdir", "unlink", "open")
FULL_FILES = {"actor/model.pt": "weights 20", "actor/optim.pt": "state", "huggingface/config.json": "{}"}


def trackers(root: Path, step: int, *kinds: Any) -> None:
    for kind in kinds or (STATE_DICT, FULL):
        write_tracker(root, kind, step)


def prepare_first(root: Path) -> None:
    commit(root, 10)
    trackers(root, 10)
    stage(root, 20, FULL_FILES)


def do_first(root: Path) -> None:
    commits.commit_folder(root, Manifest(step=20, attempt=0, kind=FULL))
    trackers(root, 20)
    deletion.prune(root, deletion.prune_plan(root, [KeepLast(1)], now=0.0), now=0.0)


def prepare_upgrade(root: Path) -> None:
    commit(root, 10)
    commit(root, 20, {"actor/model.pt": "weights 20"}, kind=STATE_DICT)
    trackers(root, 10)
    trackers(root, 20, STATE_DICT)
    stage(root, 20, {name: text for name, text in FULL_FILES.items() if "model" not in name})


def do_upgrade_by_renames(root: Path) -> None:
    contents.exchange = lambda first, second: False
    do_first(root)


def prepare_partial(root: Path) -> None:
    commit(root, 10)
    trackers(root, 10)
    stage(root, 20, FULL_FILES)


def do_partial(root: Path) -> None:
    files = stage(root, 20, {"actor/model.pt": "weights 20"})
    commits.commit_folder(root, Manifest(step=20, attempt=0, kind=STATE_DICT, files=tuple(files)), partial=True)
    trackers(root, 20, STATE_DICT)
    do_first(root)


def prepare_in_place(root: Path) -> None:
    commit(root, 10)
    trackers(root, 10)
    folder = step_dir(root, 20) / "actor"
    folder.mkdir(parents=True)
    (folder / "model.pt").write_text("weights 20")


def prepare_resume(root: Path) -> None:
    for step in (10, 20, 30):
        commit(root, step)
    trackers(root, 30)
    stage(root, 40, FULL_FILES)


def do_resume(root: Path) -> None:
    resume_point.set_start(root, 10, 1)


def prepare_replace(root: Path) -> None:
    commit(root, 20)
    trackers(root, 20)
    stage(root, 20, FULL_FILES, attempt=1)


def do_replace(root: Path) -> None:
    commits.commit_folder(root, Manifest(step=20, attempt=1, kind=FULL), durable=False)


def do_replace_by_renames(root: Path) -> None:
    contents.exchange = lambda first, second: False
    do_replace(root)


def do_beside(root: Path) -> None:
    files = stage(root, 20, {"actor/weights_rank-00000.safetensors": "version 20"}, attempt=1)
    draft = Manifest(step=20, attempt=1, kind=STATE_DICT, files=tuple(files))
    commits.commit_folder(root, draft, beside=True, durable=False)
    recovery.clean_versions(root, now=0.0)


SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "first": (prepare_first, do_first),
    "upgrade": (prepare_upgrade, do_first),
    "upgrade_by_renames": (prepare_upgrade, do_upgrade_by_renames),
    "partial": (prepare_partial, do_partial),
    "in_place": (prepare_in_place, do_first),
    "resume": (prepare_resume, do_resume),
    "replace": (prepare_replace, do_replace),
    "replace_by_renames": (prepare_replace, do_replace_by_renames),
    "beside": (prepare_replace, do_beside),
}


def kill_at(call: int) -> None:
    """Die just before the system call of this number."""
    counter = itertools.count()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    contents.exchange = counted(contents.exchange)


def main(base: Path, scenario: str) -> None:
    prepare, work = SCENARIOS[scenario]
    for call in itertools.count():
        root = base / str(call)
        prepare(root)
        child = os.fork()
        if child == 0:
            kill_at(call)
            work(root)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
