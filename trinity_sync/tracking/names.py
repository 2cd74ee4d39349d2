"""What metrics are called for a tracker: as in metrics.jsonl, or as verl's dashboards expect them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

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
