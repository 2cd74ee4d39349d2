"""Checks that a run may continue from a checkpoint or an exported adapter: the same kind of weights, the same base and
reference. The launcher calls it before anything starts.

It reads manifests, ``adapter_config.json`` and the header of an adapter's file, and needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from trinity_sync.checkpoint.folder.contents import BASE_NOTE, Base, Manifest
from trinity_sync.errors import ConfigError
from trinity_sync.protocol.parts import Compared
from trinity_sync.weights.lora import CONFIG_FILE, WEIGHTS_FILE, target_names, target_text
from trinity_sync.weights.shards import listed
from trinity_sync.weights.wire import WireFormat


def check_kind(folder: Path, manifest: Manifest, *, lora: bool) -> None:
    """Check that a run with an adapter resumes from one, and any other run from whole weights. Raises ConfigError."""
    if lora and manifest.base is None:
        raise ConfigError(
            f"{folder} is a checkpoint of a whole model, this run trains a LoRA adapter (model.lora); leave it out, or "
            "begin a run with model.path at an export of that checkpoint"
        )
    if not lora and manifest.base is not None:
        raise ConfigError(
            f"{folder} is of a LoRA adapter on {manifest.base.path}, this run trains the whole model; set "
            "model.lora.rank, or begin a run with model.path at `trinity-sync ckpt export --merged`"
        )


def check_adapter(
    folder: Path, rank: int, alpha: float, targets: str | Collection[str] | None, *, rslora: bool = False
) -> None:
    """Check that the adapter in a full checkpoint has the rank, scale and targets of the run's adapter. Raises
    ConfigError if they differ, or are not known.
    """
    path = folder / "actor" / CONFIG_FILE
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        found, counted, modules = int(saved["r"]), float(saved["lora_alpha"]), target_names(saved["target_modules"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read, so the adapter cannot be checked: {error}") from error
    if found != rank:
        raise ConfigError(f"{folder} holds an adapter of rank {found}, this run asks for model.lora.rank={rank}")
    if counted != alpha:
        raise ConfigError(
            f"{folder} holds an adapter with alpha {counted:g}, this run asks for model.lora.alpha={alpha:g}: the same "
            "tensors would be another policy"
        )
    if (by_root := bool(saved.get("use_rslora"))) != rslora:
        raise ConfigError(
            f"{folder} holds an adapter that is scaled by {_scale(by_root)}, that of this run by {_scale(rslora)}; go "
            "on with the same model.lora.path, or without one, as the run that saved it"
        )
    if targets is not None and not _alike(modules, target_names(targets)):
        raise ConfigError(
            f"{folder} holds an adapter for {target_text(saved['target_modules'])}, this run asks for "
            f"model.lora.targets={target_text(targets)}"
        )


def _alike(saved: Collection[str], asked: Collection[str]) -> bool:
    """Return whether each name is the end of one on the other side: with vision towers, longer names are saved."""
    met = [(a, b) for a in saved for b in asked if f".{a}".endswith(f".{b}") or f".{b}".endswith(f".{a}")]
    return {a for a, _ in met} == set(saved) and {b for _, b in met} == set(asked)


def noted_base(folder: Path) -> Base | None:
    """Return the base noted in an adapter that was exported here; None: peft saved it, without a note. Raises
    ConfigError if the file or its note cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS_FILE
    try:
        with safe_open(path, "np") as opened:
            note = (opened.metadata() or {}).get(BASE_NOTE)
        return Base.from_json(json.loads(note)) if note is not None else None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model.lora.path={folder}: the base that {path} was trained on cannot be determined: {error}"
        ) from error


def check_base(folder: Path, known: Base | None, base: Base) -> None:
    """Check that an adapter continues on the base on which it was trained. Raises ConfigError if it is another one, or
    that cannot be told.
    """
    if known is None or known.digest == base.digest:
        return
    if known.wire is not None and known.wire != base.wire:
        raise ConfigError(
            f"{folder} knows its adapter's base by a digest of other dtypes than those of this run: go on with the "
            f"sync.wire_dtype and sync.keep_fp32 of the run that saved it ({_dtypes(known.wire)})"
        )
    raise ConfigError(
        f"{folder} was trained on a base with the digest {known.digest} (model.path={known.path}), the base of this "
        f"run has {base.digest}; an adapter continues on its own base only"
    )


def _dtypes(wire: WireFormat) -> str:
    return f"{wire.dtype}, in fp32 {listed(sorted(wire.keep_fp32)) or 'none'}"


def _scale(rslora: bool) -> str:
    return "alpha / sqrt(rank)" if rslora else "alpha / rank"


# The reference model.


OF_ADAPTER = "base"
"""Stands for the digest if the reference is the base of the adapter, which `check_base` checks."""


def check_same(folder: Path, before: Compared | None, now: Compared | None) -> None:
    """Check that a policy keeps its reference model. A policy without one may get one, and one with a reference may
    drop it. Raises ConfigError if it is another one.
    """
    if before is None or now is None or before["digest"] == now["digest"]:
        return
    raise ConfigError(
        f"algorithm.kl.reference: {folder} was trained near {before['path']} (digest {before['digest']}), this resume "
        f"has {now['path']} (digest {now['digest']}); a run keeps its reference, a new run may "
        "begin from its checkpoint with another (checkpoint.resume_from)"
    )
