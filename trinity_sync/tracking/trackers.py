"""Trackers copy the metrics to tools such as TensorBoard: their interface, and those that the config can name.

`tracker_feed.Trackers` runs them.
"""

from __future__ import annotations

import importlib
import json
import netrc
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol, get_args

from trinity_sync.errors import ConfigError
from trinity_sync.host.durable import replace_file
from trinity_sync.tracking.run_record import Status

_KNOWN = {
    "tensorboard": "trinity_sync.tracking.tensorboard.TensorBoardTracker",
    "wandb": "trinity_sync.tracking.wandb.WandbTracker",
    "mlflow": "trinity_sync.tracking.mlflow.MlflowTracker",
    "trackio": "trinity_sync.tracking.trackio.TrackioTracker",
    "swanlab": "trinity_sync.tracking.swanlab.SwanlabTracker",
}


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run as a tracker sees it.

    Attributes:
        folder: the run folder.
        name: the run's name.
        config: the config to show, see `host.masking.shown`.
        attempt: 0, or one more for each resume.
        resumed_from: the step from which a resume starts; later points of earlier attempts are abandoned.
    """

    folder: Path
    name: str
    config: Mapping[str, object] = field(default_factory=dict)
    attempt: int = 0
    resumed_from: int | None = None


class Tracker(Protocol):
    """Copies the metrics to another tool. `start` comes first, `close` last, all on one thread of the tracker's own.

    Optional methods:

    - ``check()``, before anything starts: raises ConfigError, without the network.
    - ``end(status)``, before `close`: ``completed``, ``failed`` or ``interrupted``.
    - ``event(event)``: takes one line of events.jsonl.
    - ``samples(step, rows)``: takes the lines of one step in samples.jsonl.
    - ``abandon()``, from another thread: the tracker missed its timeout and is no longer waited for.

    Optional attributes, of the class or the object:

    - ``timeout_s``: timeout of the start, and of the rest at the end of the run, in seconds.
    - ``names``: the names of its metrics, ``ours`` by default; `build_trackers` sets it by the config.
    - ``apart``: true for a process of its own (`tracker_feed.TrackerChild`); the tracker is pickled before it starts.
    """

    def start(self, run: TrackedRun) -> None:
        """Get ready; raise ConfigError if that fails, naming the package or setting that is missing."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the finite numbers of one step."""

    def close(self) -> None:
        """Deliver what is pending."""


def lacking(name: str) -> ConfigError:
    """Make the error for a tracker whose package of the same name is missing."""
    return ConfigError(f"tracker={name} needs the {name} package: pip install 'trinity-sync[trackers]'")


def has_login(file: str, host: str | None = None) -> bool:
    """Return whether a netrc file has a login, for this host."""
    with suppress(OSError, RuntimeError, netrc.NetrcParseError):
        found = netrc.netrc(Path(file).expanduser())
        return bool(found.hosts if host is None else found.authenticators(host))
    return False


class ProcessTracker:
    """The base of trackers that run in a process of their own, and tell their tool how the run has ended."""

    apart = True

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._status: Status = "completed"

    def end(self, status: Status) -> None:
        self._status = status


def build_trackers(settings: Mapping[str, Mapping[str, object] | None]) -> list[Tracker]:
    """Build the trackers that the config names, not started yet. `settings`: options by name. Unknown names need
    ``_target_``, the dotted name of a class with the methods of `Tracker`, called with the other options except
    ``names``. Raises ConfigError if a tracker's class or package cannot be found, does not take its options, or
    refuses them.
    """
    built = []
    for name, given in settings.items():
        options = {str(key): value for key, value in (given or {}).items()}
        target = options.pop("_target_", None) or _KNOWN.get(name)
        names = options.pop("names", "ours")
        if names not in CHOICES:
            raise ConfigError(f"tracker.{name}.names is {names}; must be one of {', '.join(CHOICES)}")
        if target is None:
            raise ConfigError(
                f"tracker.{name} is not one of {', '.join(_KNOWN)}; set tracker.{name}._target_ to the name of a class"
            )
        module, _, attribute = str(target).rpartition(".")
        try:
            tracker = getattr(importlib.import_module(module), attribute)(**options)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"tracker.{name}._target_={target} cannot be imported: {error}") from error
        except TypeError as error:
            raise ConfigError(f"tracker.{name}: {target} does not take these options: {error}") from error
        spec = find_spec(name) if target == _KNOWN.get(name) else None
        if target == _KNOWN.get(name) and (spec is None or spec.origin is None):  # a folder of that name has no origin
            raise lacking(name)
        getattr(tracker, "check", lambda: None)()
        if names != "ours":
            tracker.names = names
        built.append(tracker)
    return built


def call_end(tracker: Tracker, status: Status) -> None:
    """Call a tracker's `end`, if it has one."""
    end = getattr(tracker, "end", None)
    if end is not None:
        end(status)


def kept_id(run: TrackedRun, tracker: str) -> str:
    """Return the id of a tracker's own run: new at first, then read from ``<tracker>/run_id`` in the run's folder.
    Raises OSError if the folder takes no writes.
    """
    path = run.folder / tracker / "run_id"
    path.parent.mkdir(exist_ok=True)
    kept = read_id(path)
    if not kept:
        kept = uuid.uuid4().hex[:12]
        replace_file(path, kept + "\n")
    return kept


def read_id(path: Path) -> str:
    """Read a kept id; empty without one."""
    return path.read_text().strip() if path.exists() else ""


# Names of metrics: those of metrics.jsonl, or verl's.


Names = Literal["ours", "verl"]
"""Names of metrics.jsonl, or verl's."""

CHOICES: tuple[str, ...] = get_args(Names)

OF_VERL: Mapping[str, tuple[str, ...]] = {
    "grad_norm": ("actor/grad_norm",),
    "lr": ("actor/lr",),
    "mfu": ("perf/mfu/actor",),
    "reward/mean": ("critic/score/mean", "critic/rewards/mean"),
    "reward/max": ("critic/score/max", "critic/rewards/max"),
    "reward/min": ("critic/score/min", "critic/rewards/min"),
    "response_length/truncated": ("response_length/clip_ratio",),
    "timing/generate": ("timing_s/gen",),
    "timing/train": ("timing_s/update_actor",),
    "timing/validate": ("timing_s/testing",),
    "timing/save": ("timing_s/save_checkpoint",),
    "timing/step": ("timing_s/step", "perf/time_per_step"),
}
"""Our names -> verl's. Others stay; ``timing/`` becomes ``timing_s/``; those of validations depend on their size."""


def named(names: Names, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
    """Return the numbers of a step under the names that a tracker wants; verl has the step among its metrics."""
    if names == "ours":
        return values
    found = {"training/global_step": float(step)}
    validated = _of_validation(values)
    for name, value in values.items():
        for other in validated.get(name) or OF_VERL.get(name) or (re.sub("^timing/", "timing_s/", name),):
            found[other] = value
    return found


def _of_validation(values: Mapping[str, float]) -> Mapping[str, tuple[str, ...]]:
    """Return verl's names for the validation of a data set without a name; exact matches are the core if known."""
    if "val/prompts" not in values or values["val/failed"] == values["val/samples"]:
        return {}  # of the latter it is not known which is which
    mean = f"mean@{values['val/samples'] / values['val/prompts']:.0f}"
    reward = "val-aux" if "val/exact" in values else "val-core"
    return {"val/reward/mean": (f"{reward}/unknown/reward/{mean}",), "val/exact": (f"val-core/unknown/acc/{mean}",)}


# Samples of a step as a table.


COLUMNS = ("step", "text", "response", "reward", "exact", "advantage", "finished", "tokens", "version", "spans")
"""Keys of a line of samples.jsonl. `text` is the prompt."""


def name_of(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the name of the table of samples in every tracker; all are of training, or all of a validation."""
    return "validation_samples" if any(row.get("validation") for row in rows) else "samples"


def cells(rows: Sequence[Mapping[str, object]]) -> list[list[object]]:
    """Return the cells of each row by `COLUMNS`; spans as JSON."""
    return [[json.dumps(row[name]) if name == "spans" else row[name] for name in COLUMNS] for row in rows]


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the table as Markdown."""
    lines: list[list[object]] = [list(COLUMNS), ["---"] * len(COLUMNS), *cells(rows)]
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "<br>")
