"""The adapter that a run trains (`model.lora`) and the part of it in each version (`sync.what`), from the configuration
and the ``adapter_config.json`` of an existing adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import ListConfig

from trinity_sync.config.model_checks import Get, Problem
from trinity_sync.config.schema import Config, LoraConfig
from trinity_sync.errors import ConfigError
from trinity_sync.weights.lora import ALL_LINEAR, CONFIG_FILE, WEIGHTS_FILE, not_plain, target_names, target_text

ALPHA = 16
"""Of a new adapter if `model.lora.alpha` is null: verl's default."""


@dataclass(frozen=True)
class Adapter:
    """The adapter that a run trains.

    Attributes:
        rank, alpha: the adapter is scaled by alpha / rank.
        targets: ends of names of linear layers, `ALL_LINEAR`, or a regular expression for whole names.
        path: of an existing adapter; None: a new one.
        rslora: the adapter is scaled by alpha / sqrt(rank) instead.
        dropout: share of its inputs that training drops.
    """

    rank: int
    alpha: int
    targets: str | tuple[str, ...]
    path: str | None
    rslora: bool = False
    dropout: float = 0.0

    @property
    def of_peft(self) -> str | list[str]:
        """The targets for peft and verl, which modify a list and reject tuples."""
        return self.targets if isinstance(self.targets, str) else list(self.targets)


def adapter_of(lora: LoraConfig) -> Adapter | None:
    """Return the adapter that is trained; None: all weights are trained."""
    if lora.path is None:
        if not lora.rank:
            return None
        targets = ALL_LINEAR if lora.targets is None else lora.targets
        return Adapter(lora.rank, ALPHA if lora.alpha is None else lora.alpha, _named(targets), None)
    found = _read(lora.path)
    for name, given, there in (("rank", lora.rank or None, found.rank), ("alpha", lora.alpha, found.alpha)):
        if given not in (None, there):
            raise ConfigError(f"model.lora.{name} is {given}, the adapter at model.lora.path has {there}; leave it out")
    if lora.targets is not None and target_names(lora.targets) != target_names(found.targets):
        raise ConfigError(
            f"model.lora.targets is {target_text(lora.targets)}, the adapter at model.lora.path is for "
            f"{target_text(found.targets)}; leave it out"
        )
    return found


def travels(cfg: Config) -> str:
    """Return the content of a version: ``full``, ``adapter`` or ``merged``."""
    if cfg.sync.what != "auto":
        return cfg.sync.what
    return "full" if adapter_of(cfg.model.lora) is None else "adapter"


def check_lora(get: Get) -> Iterator[Problem]:
    """Check that the adapter can be trained, and that `sync.what` fits it."""
    lora, what = get("model.lora"), get("sync.what")
    targets = lora.targets
    listed = isinstance(targets, list | tuple | ListConfig)
    fits = targets is None or isinstance(targets, str) or (listed and all(isinstance(one, str) for one in targets))
    if not fits or (targets is not None and not len(targets)):
        must = "must be all-linear, names such as [q_proj, v_proj], or a regular expression"
        yield Problem("model.lora.targets", f"{'names nothing' if fits else f'is {targets}'}; {must}")
        return
    try:
        adapter = adapter_of(lora)
    except ConfigError as error:
        key, _, text = str(error).partition(" ")
        yield Problem(key, text)
        return
    if adapter is None:
        for key in ("alpha", "targets"):
            if lora[key] is not None:
                yield Problem(f"model.lora.{key}", f"is {lora[key]}, but no adapter is trained; set model.lora.rank")
        if what in ("adapter", "merged"):
            yield Problem("sync.what", f"is {what}, but no adapter is trained; set model.lora.rank, or leave it out")
    elif what == "merged" and get("sync.mode") == "checkpoint":
        yield Problem(
            "sync.what",
            "is merged, which sync=checkpoint cannot: a checkpoint's folder would hold the adapter and the whole model "
            "at once; choose sync=memory or sync=nccl, or sync.what=adapter",
        )
    elif what == "full":
        yield Problem(
            "sync.what",
            f"is full, which sync={get('sync.mode')} cannot with an adapter: the model is the base and the adapter; "
            "choose adapter (the adapter alone) or merged (the whole model with the adapter added)",
        )


def _read(path: str) -> Adapter:
    """Read the adapter in a folder."""
    folder = Path(path)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ConfigError(f"model.lora.path is {path}, where there is no {name}; name a folder that peft saved")
    file = folder / CONFIG_FILE
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        kind, rank, alpha, targets = (body[key] for key in ("peft_type", "r", "lora_alpha", "target_modules"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.lora.path is {path}, whose {CONFIG_FILE} cannot be used: {error!r}") from error
    if kind != "LORA" or not all(type(one) is int and one > 0 for one in (rank, alpha)) or not targets:
        raise ConfigError(
            f"model.lora.path is {path}, whose {CONFIG_FILE} is not that of a LoRA adapter: peft_type {kind}, r "
            f"{rank}, lora_alpha {alpha}, target_modules {targets}"
        )
    if odd := not_plain(body):
        raise ConfigError(f"model.lora.path is {path}, an adapter with {', '.join(odd)}, which is not trained here")
    rslora, dropout = bool(body.get("use_rslora")), float(body.get("lora_dropout") or 0)
    return Adapter(rank, alpha, _named(targets), path, rslora=rslora, dropout=dropout)


def _named(targets: str | Iterable[str]) -> str | tuple[str, ...]:
    if not isinstance(targets, str):
        return tuple(targets)
    return ALL_LINEAR if targets.lower() == ALL_LINEAR else targets  # as in peft
