"""`backend=bytes`: ranks with weights that train nothing, part of `workload=bytes`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypedDict, cast

from trinity_sync.backends.option import BackendOption, ConfigFields
from trinity_sync.config import Check, Get, Problem
from trinity_sync.config.lora_settings import adapter_of
from trinity_sync.config.schema import BackendConfig, BytesConfig, Config
from trinity_sync.errors import ConfigError
from trinity_sync.host.hardware import available_memory
from trinity_sync.models.shapes import SIZES, LoraShape, bytes_by_layers, cut, read_shapes, saved_shapes

if TYPE_CHECKING:
    from trinity_sync.backends.base import Engine, View

_NO_ENGINE = "backend=bytes has no engine; choose workload=bytes, or another backend"


def _check_engine_keys(get: Get) -> Iterator[Problem]:
    for key in ("param_offload", "optimizer_offload", "overrides"):
        if get(f"backend.{key}"):
            yield Problem(f"backend.{key}", "is set, but workload=bytes has no engine; leave it out")
    if get("model.lora.path"):
        yield Problem("model.lora.path", "is set, but workload=bytes reads no weights; leave it out")
    if get("sync.what") == "merged":
        yield Problem("sync.what", "is merged, but workload=bytes holds no base of the adapter; leave it out")
    if get("checkpoint.format") != "verl":
        yield Problem("checkpoint.format", "must be verl with workload=bytes")


def _check_shapes(get: Get) -> Iterator[Problem]:
    if (shapes := get("model.shapes")) is None:
        return
    try:
        fields = read_shapes(shapes)
    except ConfigError as error:
        key, _, why = str(error).partition(" ")
        yield Problem(key.rstrip(":"), why)
        return
    # for families with another name of the field `cut` raises the error, in a rank
    text = fields.get("text_config", fields)
    layers, count = get("model.layers"), text.get("num_hidden_layers") if isinstance(text, dict) else None
    if layers is not None and isinstance(count, int) and layers > count:
        yield Problem("model.layers", f"is {layers}, but the model has {count}; give at most that")


class BytesFields(TypedDict):
    """The result of `BytesOption.engine_fields`."""

    shapes: Mapping[str, object]
    layers: int | None
    lora: LoraShape | None
    changed: float
    master_dtype: str
    optimizer: bool
    ranks: int
    slots: int
    replicas: int


@dataclass(kw_only=True)
class BytesOption(BackendConfig, BackendOption):
    """Rows of each tensor on each rank, as FSDP2 would cut them."""

    checks: ClassVar[tuple[Check, ...]] = (_check_engine_keys, _check_shapes)
    reads: ClassVar[frozenset[str]] = frozenset({"bytes"})
    takes_weights: ClassVar[bool] = False
    trains_adapters: ClassVar[bool] = True
    worker: ClassVar[str] = "trinity_sync.trainer.bytes_worker.BytesWorker"

    def engine_fields(self, cfg: Config) -> ConfigFields:
        workload = cfg.workload
        if not isinstance(workload, BytesConfig) or cfg.model.shapes is None:
            raise ConfigError("backend is bytes, a part of workload=bytes; choose that")
        adapter = adapter_of(cfg.model.lora)
        fields = BytesFields(
            shapes=read_shapes(cfg.model.shapes),
            layers=cfg.model.layers,
            lora=None if adapter is None else LoraShape(rank=adapter.rank, targets=adapter.of_peft),
            changed=workload.changed,
            master_dtype=workload.master_dtype,
            optimizer=workload.optimizer,
            ranks=self.ranks,
            slots=cfg.sync.slots,
            replicas=cfg.explorer.replicas,
        )
        return {**fields}

    def optimizer_fields(self, cfg: Config) -> ConfigFields:
        return {}

    def check_resume(self, checkpoint: Path, saved_by: str, ranks: int) -> str | None:
        if ranks == self.ranks:
            return None
        raise ConfigError(
            f"{checkpoint} was saved by backend.ranks={ranks}, this run asks for {self.ranks}; "
            "workload=bytes resumes on as many as before"
        )

    def make_model(
        self, engine: Mapping[str, object], architecture: Mapping[str, object], seed: int, folder: Path
    ) -> None:
        fields = cast(BytesFields, engine)
        whole, left = cut(fields["shapes"], fields["layers"])
        all_bytes = bytes_by_layers(saved_shapes(whole))
        count = len(all_bytes) - 1
        sums = bytes_by_layers(saved_shapes(whole, fields["lora"]), count) if fields["lora"] else all_bytes
        layers = count if fields["layers"] is None else fields["layers"]
        _check_memory(fields, sums, layers)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(left, indent=2, sort_keys=True) + "\n")
        made_of = {key: engine[key] for key in ("shapes", "layers", "lora")}
        sizes = {"bytes": sums[layers], "bytes_whole": all_bytes[-1], **made_of}
        (folder / SIZES).write_text(json.dumps(sizes) + "\n")

    def engine_configs(self, engine: Mapping[str, object], optimizer: Mapping[str, object]) -> tuple[object, object]:
        raise ConfigError(_NO_ENGINE)

    def view(self, engine: Engine, wire_dtype: str, keep_fp32: Sequence[str] | None, *, merged: bool = False) -> View:
        raise ConfigError(_NO_ENGINE)


def copies(engine: BytesFields) -> float:
    """Return how many copies of the bf16 weights a run has on this node, its checkpoint in shared memory included."""
    state = (2.0 if engine["master_dtype"] == "fp32" else 1.0) + (4.0 if engine["optimizer"] else 0.0)
    return 2 * state + engine["slots"] + engine["replicas"]


def _check_memory(engine: BytesFields, sums: list[int], layers: int) -> None:
    free, times = available_memory(), copies(engine)
    if free is None or sums[layers] * times <= free:
        return
    fits = max((count for count, size in enumerate(sums) if count and size * times <= free), default=0)
    raise ConfigError(
        f"model.layers={layers} has {sums[layers] / 1e9:.1f} GB of weights in bf16, and this run holds "
        f"{times:.0f} copies (ranks, their checkpoint, sync.slots, explorers): {sums[layers] * times / 1e9:.1f} GB, "
        f"and {free / 1e9:.1f} GB are free; "
        + (f"model.layers={fits} is the most that fits" if fits else "not even one layer fits")
    )
