"""Trackers: copies of the metrics for tools such as TensorBoard. The recorder starts those that the config names.

A tracker that cannot start is a mistake in the setup and stops the run before it begins. Once started it is a
convenience: an error in it is warned about once and never reaches the training loop.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trinity_sync.errors import ConfigError, TrinityError

logger = logging.getLogger(__name__)

_KNOWN = {
    "tensorboard": "trinity_sync.tracking.tensorboard.TensorBoardTracker",
    "wandb": "trinity_sync.tracking.wandb.WandbTracker",
}


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run as a tracker sees it.

    Attributes:
        folder: the run folder.
        name: the run's name.
        config: the resolved config, to be shown beside the curves.
        attempt: 0, or one more for each resume.
        resumed_from: the step a resume starts from; later points of earlier attempts are abandoned.
    """

    folder: Path
    name: str
    config: Mapping[str, object] = field(default_factory=dict)
    attempt: int = 0
    resumed_from: int | None = None


class Tracker(Protocol):
    """Takes the metrics elsewhere. `start` comes first, `close` last, all from the driver."""

    def start(self, run: TrackedRun) -> None:
        """Get ready; raise ConfigError where that cannot work, naming what to install or set."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the finite numbers of one step."""

    def close(self) -> None:
        """Deliver what is pending."""


def build_trackers(settings: Mapping[str, Mapping[str, object] | None]) -> list[Tracker]:
    """Build the trackers that the config names, not started yet.

    Args:
        settings: options by name. `tensorboard` and `wandb` are known; any other name needs ``_target_``, the dotted
            name of a class with the methods of `Tracker`, which is called with the other options.

    Raises:
        ConfigError: a tracker's class cannot be found, or does not take its options.
    """
    built = []
    for name, given in settings.items():
        options = {str(key): value for key, value in (given or {}).items()}
        target = options.pop("_target_", None) or _KNOWN.get(name)
        if target is None:
            raise ConfigError(
                f"tracker.{name} is none of {', '.join(_KNOWN)} and names no class; give tracker.{name}._target_"
            )
        module, _, attribute = str(target).rpartition(".")
        try:
            built.append(getattr(importlib.import_module(module), attribute)(**options))
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"tracker.{name}._target_={target} cannot be imported: {error}") from error
        except TypeError as error:
            raise ConfigError(f"tracker.{name}: {target} does not take these options: {error}") from error
    return built


class Trackers:
    """All trackers of a run behind one that never raises after the start.

    Args:
        trackers: those to run.
        run: what they are told about the run.

    Raises:
        ConfigError: one of them cannot start; those before it are closed again.
    """

    def __init__(self, trackers: Iterable[Tracker], run: TrackedRun) -> None:
        self._started: list[Tracker] = []
        self._warned: set[int] = set()
        for tracker in trackers:
            try:
                tracker.start(run)
            except Exception as error:
                self.close()
                if isinstance(error, TrinityError):
                    raise
                name = type(tracker).__name__
                raise ConfigError(f"tracker {name} cannot start: {error or type(error).__name__}") from error
            self._started.append(tracker)

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Hand the finite numbers among `values` to every tracker."""
        numbers = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        for tracker in self._started:
            try:
                tracker.log(step, numbers)
            except Exception as error:
                self._warn(tracker, error)

    def close(self) -> None:
        """Close every tracker; closing twice is fine."""
        started, self._started = self._started, []
        for tracker in started:
            try:
                tracker.close()
            except Exception as error:
                self._warn(tracker, error)

    def _warn(self, tracker: Tracker, error: Exception) -> None:
        if id(tracker) not in self._warned:
            self._warned.add(id(tracker))
            logger.warning("%s does not take the metrics, the run goes on without: %s", type(tracker).__name__, error)
