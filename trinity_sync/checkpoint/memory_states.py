"""The states of a run in shared memory (`checkpoint.memory_interval`), from which it heals without an older checkpoint.

Each attempt writes to a folder of its own, which is laid out as the checkpoint folder and has a monitor, so states are
saved, checked and read as checkpoints are. The next attempt copies the newest state to the checkpoint folder, as it
does with a checkpoint at a mirror.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.catalog import CheckpointInfo
from trinity_sync.checkpoint.folder.contents import STAGING
from trinity_sync.checkpoint.folder.lock import has_no_monitor, locked
from trinity_sync.checkpoint.folder.owner import Owner, read_mark, write_mark
from trinity_sync.checkpoint.mirror.run_mirror import MirrorSettings, RunMirror
from trinity_sync.errors import ConfigError, RunError, TrinityError, WaitTimeout
from trinity_sync.host.interrupts import wait_until
from trinity_sync.weights.slots import KeptFolder, SegmentError, kept_folder, kept_path

if TYPE_CHECKING:
    from trinity_sync.config import Config

KEY = "checkpoint.memory_interval"
_MONITOR_S, _REST_S = 10.0, 1.0
_NAME, _ATTEMPT = "states-", "attempt-"


class MemoryStates:
    """The states of a run, over the attempts of a program. `key`: the setting by which it keeps them.

    Attributes:
        owner: the run.
        is_recorded: whether the run's record has a step of an attempt; it has not if the run went on from elsewhere.
        begun: an attempt of this program has begun. Until then the states are those of a driver that was killed.
        brought: a state was copied to the checkpoint folder.
        root: the folder of the attempt under way.
    """

    def __init__(self, kept: KeptFolder, owner: Owner | None = None, key: str = KEY) -> None:
        self._kept, self._key = kept, key
        self.owner = owner
        self.is_recorded: Callable[[int, int], bool] = lambda step, attempt: True
        self.begun = self.brought = False
        self.root = kept.path

    def bring(self, checkpoints: Path, newest: CheckpointInfo | None) -> int | None:
        """Copy the newest state to the checkpoint folder if it is newer than the newest checkpoint there; return its
        step. A state that is damaged, or of another run, is told and left out. Raises RunError: it is sound and cannot
        be copied; it stays.
        """
        for root in self._folders():
            # a monitor of the attempt before may still commit
            wait_until(partial(has_no_monitor, root), _MONITOR_S, _REST_S)
            shutil.rmtree(root / STAGING, ignore_errors=True)  # of a killed program; it takes room
            mark, newest_state = read_mark(root), max(catalog.scan(root), key=lambda info: info.step, default=None)
            if self.owner is None or mark is None or mark.run != self.owner.run:
                named = "none" if mark is None else f"{mark.run}, {mark}"
                print(f"the states in {root} are not used: their run is {named}", file=sys.stderr)
            elif newest_state is None:
                continue
            elif not self.is_recorded(newest_state.step, newest_state.attempt or 0):
                print(
                    f"the state of step {newest_state.step} in memory is not used: the run went on without it",
                    file=sys.stderr,
                )
            elif (step := _bring(root, checkpoints, newest, self.owner, self._key)) is not None:
                print(f"the state of step {step} was in memory ({self._key})", file=sys.stderr)
                self.brought = True
                return step
        return None

    def rescue(self, checkpoints: Path) -> None:
        """Bring the newest state of a run that ends by an error. It stays in memory if that fails."""
        try:
            self.bring(checkpoints, catalog.newest_good(checkpoints))
            self._kept.stays = False
        except (TrinityError, OSError) as error:
            print(f"{error}; `trinity-sync resume` tries it again", file=sys.stderr)

    @contextmanager
    def attempt(self, number: int) -> Iterator[None]:
        """Give an attempt its folder, and delete those of the attempts before. Its own goes with an orderly end of the
        program; an error leaves it to `rescue`, or to the next program.
        """
        assert self.owner is not None, "the launcher has set it"
        for folder in self._folders():
            shutil.rmtree(folder, ignore_errors=True)
        self.root = self._kept.path / _attempt_name(number)
        self.root.mkdir(exist_ok=True)
        self.begun = self._kept.stays = True
        with locked(self.root, Path(self.owner.folder)):
            write_mark(self.root, self.owner)
            yield
        self._kept.stays = False

    def discard(self) -> None:
        """Delete the states at the end of the program if they are its own, not those of a driver that was killed."""
        self._kept.stays = not self.begun

    def _folders(self) -> list[Path]:
        """Return those of all attempts, the newest first."""
        found = [path for path in self._kept.path.glob(f"{_ATTEMPT}*") if path.is_dir()]
        return sorted(found, key=lambda path: int(path.name.removeprefix(_ATTEMPT)), reverse=True)


def _bring(root: Path, checkpoints: Path, newest: CheckpointInfo | None, owner: Owner, key: str) -> int | None:
    told: list[str] = []
    place = RunMirror(str(root), MirrorSettings(key=key, tries=2), owner, say=told.append)
    try:
        step = place.fetch_newer(checkpoints, newest)
        cause = "; ".join(told)
    except (TrinityError, OSError) as error:
        step, cause = None, str(error)
    sound = catalog.newest_good(root) if step is None else None
    if sound is not None and (newest is None or (sound.attempt or 0, sound.step) > (newest.attempt or 0, newest.step)):
        raise RunError(
            f"the state of step {sound.step} is in memory and cannot be copied to {checkpoints}: {cause}. It stays "
            f"there; {key}=0 goes on without it"
        )
    for text in told if step is None else ():
        print(f"the states in memory: {text}", file=sys.stderr)
    return step


@contextmanager
def memory_states(cfg: Config, run: Path) -> Iterator[MemoryStates | None]:
    """Keep a folder for a run's states during the block, or take that of a killed driver; None: the run has none, or
    there is no shared memory, which is told. The folder stays if no attempt has begun in it. Raises ConfigError:
    another program uses it.
    """
    with contextlib.ExitStack() as stack:
        states = None
        if cfg.checkpoint.memory_interval:
            try:
                states = MemoryStates(stack.enter_context(states_folder(run, Path(cfg.sync.shm_dir).absolute())))
            except SegmentError as error:
                raise ConfigError(f"{KEY}: {error}") from error
            except (OSError, WaitTimeout) as error:
                print(f"no state is kept in memory ({KEY}): {error}", file=sys.stderr)
        yield states


def states_folder(place: Path, root: Path) -> AbstractContextManager[KeptFolder]:
    """Lock the folder of the states of one place under `root` for a block; see `kept_folder`."""
    return kept_folder(root, _name_of(place))


def states_path(place: Path, root: Path) -> Path:
    """Return the folder of the first attempt of `states_folder`."""
    return kept_path(root, _name_of(place)) / _attempt_name(0)


def holds_states(root: Path) -> bool:
    """Return whether a checkpoint folder is one of states."""
    folder = root.parent
    return folder.name.startswith(_NAME) and folder == kept_path(folder.parent.parent, folder.name)


def _attempt_name(number: int) -> str:
    return f"{_ATTEMPT}{number}"


def _name_of(place: Path) -> str:
    key = f"{socket.gethostname()} {place.resolve()}"  # containers may share the memory and have the same paths
    return f"{_NAME}{hashlib.sha256(key.encode()).hexdigest()[:16]}"
