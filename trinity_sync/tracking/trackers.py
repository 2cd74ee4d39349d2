"""Trackers: copies of the metrics for tools such as TensorBoard. What one is, and those that the config can name.

`feeding.Trackers` runs them.
"""

from __future__ import annotations

import importlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
        config: the config, to be shown beside the curves; see `host.references.shown`.
        attempt: 0, or one more for each resume.
        resumed_from: the step a resume starts from; later points of earlier attempts are abandoned.
    """

    folder: Path
    name: str
    config: Mapping[str, object] = field(default_factory=dict)
    attempt: int = 0
    resumed_from: int | None = None


class Tracker(Protocol):
    """Takes the metrics elsewhere. `start` comes first, `close` last, all on one thread, which is no one else's.

    It may have more than these methods, which are then called, too:

    - ``end(status)``, before `close`: ``completed``, ``failed`` or ``interrupted``.
    - ``event(event)``: takes one line of events.jsonl.
    - ``samples(step, rows)``: takes the lines that one step has in samples.jsonl.
    - ``abandon()``, from another thread: it has not come back in time, and nobody waits for it any longer.

    And it may say, as attributes of its class or its own:

    - ``timeout_s``: how long its start, and what is left at the end of the run, may take, in seconds.
    - ``names``: what it calls metrics (`names`), ``ours`` where it does not say; `build_trackers` sets it where the
      configuration asks for others.
    - ``apart``: true where it is to run in a process of its own (`apart.Apart`); it is pickled before it starts.
    """

    def start(self, run: TrackedRun) -> None:
        """Get ready; raise ConfigError where that cannot work, naming what to install or set."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the finite numbers of one step."""

    def close(self) -> None:
        """Deliver what is pending."""


def build_trackers(settings: Mapping[str, Mapping[str, object] | None]) -> list[Tracker]:
    """Build the trackers that the config names, not started yet.

    Args:
        settings: options by name. Any other name than those that are known needs ``_target_``, the dotted name of a
            class with the methods of `Tracker`, which is called with the other options; but ``names``, which every
            tracker may have, is for who feeds it.

    Raises:
        ConfigError: a tracker's class cannot be found, or does not take its options.
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
                f"tracker.{name} is none of {', '.join(_KNOWN)} and names no class; give tracker.{name}._target_"
            )
        module, _, attribute = str(target).rpartition(".")
        try:
            tracker = getattr(importlib.import_module(module), attribute)(**options)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"tracker.{name}._target_={target} cannot be imported: {error}") from error
        except TypeError as error:
            raise ConfigError(f"tracker.{name}: {target} does not take these options: {error}") from error
        if names != "ours":
            tracker.names = names
        built.append(tracker)
    return built


def tell_end(tracker: Tracker, status: Status) -> None:
    """Tell a tracker that wants to know it how the run has ended; its `close` follows."""
    end = getattr(tracker, "end", None)
    if end is not None:
        end(status)


def kept_id(run: TrackedRun, tracker: str) -> str:
    """The name by which a tracker's own run is found again: made up at first, and kept in ``<tracker>/run_id`` of the
    run's folder, where a resume reads it.

    Raises:
        OSError: the folder takes no writes.
    """
    path = run.folder / tracker / "run_id"
    path.parent.mkdir(exist_ok=True)
    kept = read_id(path)
    if not kept:
        kept = uuid.uuid4().hex[:12]
        replace_file(path, kept + "\n")
    return kept


def read_id(path: Path) -> str:
    """Read what was kept; empty where there is none."""
    return path.read_text().strip() if path.exists() else ""


# What metrics are called for a tracker: as in metrics.jsonl, or as verl's dashboards expect them.


Names = Literal["ours", "verl"]
"""Whose names."""

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
"""Ours to verl's. Of any other name the beginning ``timing/`` becomes ``timing_s/``; what a validation's are depends on
its size. What is verl's name already, or of nothing that verl measures, stays.
"""


def named(names: Names, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
    """The numbers of a step by the names that a tracker wants.

    Args:
        names: whose.
        step: the trainer step, which verl has among its metrics.
        values: by the names of metrics.jsonl.
    """
    if names == "ours":
        return values
    found = {"training/global_step": float(step)}
    validated = _of_validation(values)
    for name, value in values.items():
        for other in validated.get(name) or OF_VERL.get(name) or (_timing(name),):
            found[other] = value
    return found


def _timing(name: str) -> str:
    return f"timing_s/{name.removeprefix('timing/')}" if name.startswith("timing/") else name


def _of_validation(values: Mapping[str, float]) -> Mapping[str, tuple[str, ...]]:
    """With the samples of each prompt, of a data set without a name. Where it is told, what is right is the core."""
    if "val/prompts" not in values or values["val/failed"] == values["val/samples"]:
        return {}  # of the latter it is not known which is which
    mean = f"mean@{values['val/samples'] / values['val/prompts']:.0f}"
    reward = "val-aux" if "val/exact" in values else "val-core"
    return {
        "val/reward/mean": (f"{reward}/unknown/reward/{mean}",),
        "val/exact": (f"val-core/unknown/acc/{mean}",),
    }


# Samples of a step as trackers show them: a table, in the columns that people read.


COLUMNS = ("step", "text", "response", "reward", "exact", "advantage", "finished", "tokens", "version", "spans")
"""Keys of a line of samples.jsonl. `text` is the prompt."""


def name_of(rows: Sequence[Mapping[str, object]]) -> str:
    """What the table of these samples, all of training or all of a validation, is called in every tracker."""
    return "validation_samples" if any(row.get("validation") for row in rows) else "samples"


def cells(rows: Sequence[Mapping[str, object]]) -> list[list[object]]:
    """The cells of each row by `COLUMNS`; spans as JSON."""
    return [[json.dumps(row[name]) if name == "spans" else row[name] for name in COLUMNS] for row in rows]


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """The table as Markdown."""
    lines: list[list[object]] = [list(COLUMNS), ["---"] * len(COLUMNS), *cells(rows)]
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "<br>")
