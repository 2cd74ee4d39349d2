"""Where weights and a model's config are read from, and where they may be written to. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from trinity_sync.checkpoint.layout import STEP_PREFIX, VERSIONS, step_of
from trinity_sync.errors import ConfigError
from trinity_sync.weights import lora

_CONFIG = "config.json"


def weights_folder(folder: Path) -> Path:
    """Return the folder that has the files of weights: ``actor`` of a step folder, else the folder itself."""
    return folder / "actor" if (folder / "actor").is_dir() else folder


def find_config(folder: Path) -> Path | None:
    """Find the folder with the model's config and tokenizer; None where there is none.

    Weights-only checkpoints have none of their own: then it is that of the nearest other step, or the model that the
    run made and started from.
    """
    place = weights_folder(folder).absolute()
    candidates = [place / "huggingface", place / "model" / "huggingface", place]
    run, others = _others(place)
    if run is not None:
        candidates += [other / below for other in others for below in ("huggingface", "model/huggingface")]
        candidates.append(run / "model")
    return next((path for path in candidates if (path / _CONFIG).is_file()), None)


def find_adapter_config(folder: Path) -> Path | None:
    """Find the ``adapter_config.json`` of a LoRA adapter: its own, or that of the nearest other step."""
    place = weights_folder(folder).absolute()
    candidates = [place, *_others(place)[1]]
    return next((path / lora.CONFIG_FILE for path in candidates if (path / lora.CONFIG_FILE).is_file()), None)


def _others(place: Path) -> tuple[Path | None, list[Path]]:
    """Return the folder of the run that has a step, and ``actor`` of its other steps, the nearest first.

    Args:
        place: the step's folder of weights. None, and none: it is in no step.
    """
    step = place.parent if place.name == "actor" else place
    number = step_of(step.name)
    if number is None:
        return None, []
    beside = step.parent.parent
    root = beside.parent if beside.name == VERSIONS else step.parent
    others = {of: path for path in root.glob(f"{STEP_PREFIX}*") if (of := step_of(path.name)) is not None}
    nearest = sorted(others, key=lambda of: (abs(of - number), of))
    return root.parent, [others[of] / "actor" for of in nearest]


def check_free(output: Path) -> None:
    """Check that a folder may be written at this place.

    Raises:
        ConfigError: something is there already, but for an empty folder, or the folder above may not be written to.
    """
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; name a folder that is not there yet")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file; name a folder that is not there yet")
    above = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.exists())
    if not above.is_dir():
        raise ConfigError(f"{output} cannot be made: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{output} cannot be made: nothing may be written to {above}")
