"""What is looked at before Ray starts and after the configuration has passed its checks: whether this machine, and the
model that is named, can do what is asked for.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trinity_sync.backends.platform import accelerator_count
from trinity_sync.config import plain, typed
from trinity_sync.config.lora import adapter_of
from trinity_sync.errors import ConfigError
from trinity_sync.host.locks import own_name
from trinity_sync.models.characters import check_vocabulary
from trinity_sync.models.files import MAX_FILE_BYTES, ModelFiles, check_alone, check_code
from trinity_sync.models.hub import check_named
from trinity_sync.trainer.algorithms.base import algorithm_of
from trinity_sync.trainer.spec import lora_fields
from trinity_sync.weights.lora import ALL_LINEAR, CONFIG_FILE

_SOCKET_BYTES = 107
"""Longest path of a Unix socket."""
_SOCKET = "/{}-12345678/session_2026-01-31_14-05-00_123456_{}/sockets/plasma_store"
"""Where Ray has its longest one, in a folder for its sessions."""


def check_beforehand(cfg: DictConfig) -> None:
    """Check what needs more than the settings themselves. Called by the driver.

    Args:
        cfg: a configuration that has passed `check`.

    Raises:
        ConfigError: naming the key, and what would be right.
    """
    if cfg.cluster.address is None:
        _check_processors(cfg)
        _check_sockets(cfg)
        _check_transport(cfg)
        if cfg.model.path is not None:
            check_named(cfg.model.path)
    reference = algorithm_of(typed(cfg).algorithm).reference_path
    for key, path in (("model.path", cfg.model.path), ("algorithm.kl.reference", reference)):
        if path is not None and Path(path).is_dir():
            _check_folder(key, Path(path), trust_remote_code=cfg.model.trust_remote_code)
    if cfg.model.path is None and cfg.workload.kind != "bytes":
        size = (cfg.model.architecture or {}).get("vocab_size")
        if isinstance(size, int):
            check_vocabulary(size)
    if (adapter := adapter_of(typed(cfg).model.lora)) is not None:
        if adapter.dropout:
            _say(
                f"the adapter at model.lora.path has lora_dropout={adapter.dropout}: log-probs that are trained on "
                f"differ from those of the explorers; 0 in its {CONFIG_FILE} turns it off"
            )
        _check_adapter(cfg, lora_fields(adapter))


def needed_processors(cfg: DictConfig) -> int:
    """How many of Ray's CPUs a run reserves: one for each rank of the trainer and for each explorer."""
    return int(cfg.backend.ranks) + replicas(cfg)


def replicas(cfg: DictConfig) -> int:
    """How many explorers a run has."""
    return int(cfg.explorer.replicas) if algorithm_of(typed(cfg).algorithm).explores else 0


def _check_adapter(cfg: DictConfig, lora: Mapping[str, Any]) -> None:
    """Check that the model, which is made without weights, has the layers that are to get an adapter; say which
    `all-linear` leaves out. The libraries that this imports take seconds.
    """
    path = cfg.model.path
    if path is not None and cfg.cluster.address is not None and not Path(path).is_dir():
        return  # the ranks look where the model is
    import torch
    from transformers import AutoConfig

    from trinity_sync.backends.lora import adapter_targets
    from trinity_sync.models.architecture import architecture_config
    from trinity_sync.models.shapes import cut, model_config, read_shapes
    from trinity_sync.models.unfilled import unfilled_model

    trusted = bool(cfg.model.trust_remote_code)
    try:
        if cfg.workload.kind == "bytes":
            config = model_config(cut(read_shapes(cfg.model.shapes), cfg.model.layers)[1])
        elif path is None:
            config = architecture_config(plain(cfg.model.architecture))
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
        model = unfilled_model(config, torch.bfloat16, "meta", attn_implementation="eager", trust_remote_code=trusted)
    except ConfigError:
        raise
    except Exception as error:  # of a config that means nothing, or of the model's own code
        what, reason = "model.architecture" if path is None else f"model.path={path}", " ".join(str(error).split())
        raise ConfigError(f"{what}: no model can be made of it: {type(error).__name__}: {reason}") from error
    layers = adapter_targets(model, lora, cfg.backend.strategy)
    if layers.left_out:
        _say(
            f"model.lora.targets={ALL_LINEAR} leaves out {'; '.join(layers.left_out)}; the adapter is for "
            f"{', '.join(layers.names)}"
        )


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _check_processors(cfg: DictConfig) -> None:
    given, needed = cfg.cluster.num_cpus, needed_processors(cfg)
    if given is not None and given < needed:
        explorers = replicas(cfg)
        parts = f"backend.ranks={cfg.backend.ranks}" + (f" and explorer.replicas={explorers}" if explorers else "")
        raise ConfigError(
            f"cluster.num_cpus is {given}, but the run reserves {needed}: {parts} take one each; set "
            f"cluster.num_cpus={needed} or more, or null (Ray counts them as a number; there need not be as many)"
        )


def _check_folder(key: str, folder: Path, *, trust_remote_code: bool) -> None:
    """Check that a model folder is one model, and that the files of the trained one can be kept with checkpoints."""
    try:
        check_alone(folder)
        if trust_remote_code:
            check_code(folder)
        too_large = ModelFiles.read(folder).too_large if key == "model.path" else ()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    if too_large:
        _say(f"{key}: checkpoints do not have {', '.join(too_large)} (over {MAX_FILE_BYTES >> 20} MB)")


def _check_sockets(cfg: DictConfig) -> None:
    folder = Path(cfg.cluster.temp_dir or tempfile.gettempdir()).absolute()
    room = _SOCKET_BYTES - len(_SOCKET.format(own_name("trinity-ray"), os.getpid()))
    length = len(str(folder).encode())
    if length > room:
        what = "cluster.temp_dir" if cfg.cluster.temp_dir else "the folder for temporary files"
        raise ConfigError(
            f"{what} is {folder}, of {length} bytes; Ray's sockets lie below it, whose whole path may have "
            f"{_SOCKET_BYTES}, so name a folder of at most {room} by cluster.temp_dir"
        )


def _check_transport(cfg: DictConfig) -> None:
    if cfg.sync.mode == "nccl" and cfg.sync.transport == "nccl" and accelerator_count() == 0:
        raise ConfigError(
            "sync.transport is nccl, but this machine has no GPU that this program may use; set sync.transport=auto or "
            "gloo"
        )
