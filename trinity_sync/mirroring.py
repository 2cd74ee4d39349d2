"""The mirror of a run's checkpoints as the driver sees it: from the config, before the run and at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from trinity_sync.checkpoint.catalog import CheckpointInfo
from trinity_sync.checkpoint.fetch import check_place, fetch_newer
from trinity_sync.checkpoint.mirror_process import MirrorSettings
from trinity_sync.checkpoint.storage import absolute, shown
from trinity_sync.config import plain
from trinity_sync.errors import RunError

if TYPE_CHECKING:
    from trinity_sync.actors.monitor import MonitorClient

#: What the monitor may need beyond its own limit before it answers.
_ANSWER_S = 20.0


@dataclass(frozen=True)
class RunMirror:
    """Where committed checkpoints are copied to, and how.

    Attributes:
        place: an absolute path, or a URL that fsspec knows.
        settings: `checkpoint.mirror_*`.
        log: gets the words of the copying processes that the driver starts; None: they go to standard error.
    """

    place: str
    settings: MirrorSettings
    log: Path | None = None

    @classmethod
    def of(cls, cfg: DictConfig, logs: Path | None = None) -> RunMirror | None:
        """What the config asks for; None: there is no mirror."""
        node = cfg.checkpoint
        if node.mirror is None:
            return None
        settings = MirrorSettings(
            options=plain(node.mirror_options),
            keep=node.mirror_keep,
            tries=node.mirror_tries,
            backoff_s=node.mirror_backoff_s,
            timeout_s=node.mirror_timeout_s,
        )
        return cls(absolute(node.mirror), settings, logs / "mirror.log" if logs is not None else None)

    @property
    def name(self) -> str:
        """The place as it may be shown."""
        return shown(self.place)

    def check(self, checkpoints: Path) -> None:
        """See `fetch.check_place`."""
        check_place(self.place, self.settings, checkpoints, log=self.log)

    def fetch_newer(self, checkpoints: Path, best: CheckpointInfo | None, least: int = 0) -> int | None:
        """See `fetch.fetch_newer`; what the user should know goes to standard error."""
        return fetch_newer(self.place, self.settings, checkpoints, best, least=least, say=_say, log=self.log)

    def finish(self, monitor: MonitorClient, limit_s: float, fault: Callable[[str, str], None]) -> None:
        """Wait for the copies that are under way, and say on standard error and as a fault what did not get there.

        Args:
            monitor: the checkpoint monitor.
            limit_s: how long to wait, seconds.
        """
        try:
            left = monitor.wait_mirrored(limit_s).result(limit_s + _ANSWER_S)
            text = "; ".join(f"step {step} ({reason})" for step, reason in left.items())
        except RunError as error:
            text = f"not known: {error}"
        if text:
            _say(f"not copied to {self.name} within {limit_s:g} s: {text}")
            fault(f"mirror {self.name}", f"not copied at the end of the run: {text}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
