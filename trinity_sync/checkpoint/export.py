"""Writes a checkpoint as a Hugging Face folder: config, tokenizer, safetensors. Behind ``trinity-sync ckpt export``.

A LoRA run's adapter is written as a peft folder, or merged into its base. The folder is written under a temporary name
and renamed when it is complete and its digest is right; a failure leaves nothing.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from trinity_sync.checkpoint.folder.catalog import verify
from trinity_sync.checkpoint.folder.contents import BASE_NOTE, DELTAS, Base, read_manifest, step_of
from trinity_sync.checkpoint.folder.leases import check_free
from trinity_sync.checkpoint.reading import RestoredVersion, TensorInfo, Weights, WeightsError, open_weights
from trinity_sync.checkpoint.reading.verl_shards import (
    INDEX,
    StoredTensor,
    is_hugging_face,
    made_of,
    open_hugging_face,
    part_files,
)
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.durable import sync_folder, write_all
from trinity_sync.models.files import CONFIG, ModelFiles, is_weights
from trinity_sync.protocol.parts import HISTORY, Remainder, delta_file, version_folder
from trinity_sync.weights import shards
from trinity_sync.weights.delta import DeltaError
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.lora import CONFIG_FILE, WEIGHTS_FILE
from trinity_sync.weights.part_delta import Point, Step, VersionIndex, apply_steps, find_route
from trinity_sync.weights.shard_file import open_shard_file
from trinity_sync.weights.shards import is_floating, listed
from trinity_sync.weights.tensors import digest_entry, kept_by_class, saved_list, to_torch, tower
from trinity_sync.weights.wire import WireFormat, kept_names

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "as-saved": None}
"""Values of `dtype`, and their safetensors names."""

Form = Literal["adapter", "merged"]
"""Forms of an exported LoRA adapter."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of `export_checkpoint`.

    Attributes:
        output: the folder.
        source: the checkpoint.
        format: how its weights were stored, for people.
        dtypes: safetensors names of the dtypes written, the most frequent first.
        tensors, bytes: number of tensors, and their size.
        files: names of the files of weights.
        digest: version digest of the weights in the dtypes written.
        left_out: untrained tensors of the model's folder in these files, such as draft heads, unchanged since the run
            began; counted in `tensors` and `bytes`, in no digest.
        missing: such tensors that are gone from the model's folder or changed there, and so not exported.
        checked: the manifest's digest, which the weights have in wire dtype; None without one, and for merged weights.
    """

    output: Path
    source: Path
    format: str
    dtypes: tuple[str, ...]
    tensors: int
    bytes: int
    files: tuple[str, ...]
    digest: str
    checked: str | None
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def export_checkpoint(
    folder: Path,
    output: Path,
    *,
    dtype: str = "bf16",
    max_shard_bytes: int = 5 * 10**9,
    config: Path | None = None,
    form: Form | None = None,
    base: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    version: RestoredVersion | None = None,
) -> ExportReport:
    """Write the weights of a checkpoint as a folder that ``AutoModelForCausalLM.from_pretrained`` and vLLM load.

    Memory stays near one tensor. If the checkpoint's manifest has a digest, the weights are checked against it. A LoRA
    adapter is written as a folder that ``PeftModel.from_pretrained`` loads, or merged into its base.

    Args:
        folder: a step folder, its ``actor`` folder, or a Hugging Face folder (see `open_weights`).
        output: the folder to write; must be missing or empty.
        dtype: of floating tensors: ``bf16``, ``fp16``, ``fp32`` or ``as-saved``.
        max_shard_bytes: the largest size of a file of several tensors, bytes.
        config: folder with the model's config and tokenizer, if the checkpoint has none.
        form: how to write a LoRA adapter: ``adapter`` (as None) or ``merged``.
        base: folder of the adapter's base in Hugging Face format, with its draft heads; None: the base that the run
            began with.
        progress: called with (bytes written, bytes in all) after each tensor.
        version: written in place of the weights in `folder`, which is its base; see `restored`.

    Raises:
        ConfigError: `output` is taken, `dtype` is unknown, there is no config of the model or no base of the adapter,
            or `form` or `base` is given for a checkpoint without an adapter.
        WeightsError: the checkpoint cannot be read, or adapter and base do not fit.
        RunError: weights or base do not have the manifest's digest, a link leads out of the checkpoint, or the disk
            refused.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    if max_shard_bytes < 1:
        raise ConfigError(f"the maximal size of a file is {max_shard_bytes} bytes; expected at least one")
    if config is not None and not (config / CONFIG).is_file():
        raise ConfigError(f"{config} has no {CONFIG}; name a folder with a model's config and tokenizer")
    check_free(output)
    opened = weights = open_weights(folder, config, version)
    if not weights.adapter and (form is not None or base is not None):
        raise ConfigError(f"{folder} holds whole weights and no LoRA adapter: leave --adapter, --merged and --base out")
    if form == "merged":
        weights = weights.merged_into(open_base(weights, base))
        if config is not None:
            weights = replace(weights, config=config)
    elif base is not None:
        raise ConfigError(f"--base={base} is for --merged: an adapter is exported without its base")
    if weights.config is None and not weights.adapter:
        raise ConfigError(
            f"no {CONFIG} of the model was found in or next to {folder}; name the folder of the model that was trained"
        )
    if weights.adapter and weights.adapter_config is None:
        raise ConfigError(f"no {CONFIG_FILE} was found in or next to {folder}, without which peft cannot load it")
    wire = _wire(opened, weights)
    target = WireFormat(DTYPES[dtype], wire.keep_fp32 if DTYPES[dtype] else frozenset())
    infos = {name: TensorInfo(target.of(name, weights.info(name).dtype), weights.info(name).shape) for name in weights}
    manifest = opened.manifest
    note = manifest.left_out if manifest is not None and not weights.adapter else None
    untrained, missing = open_left_out(note, base)
    tower = frozenset(tower_in(weights)) if note is not None and note["tower"] else frozenset[str]()
    if note is not None and tower:
        untrained = {name: source for name, source in untrained.items() if name not in note["tower"]}
        missing = tuple(name for name in missing if name not in note["tower"])
    infos |= {name: source.info for name, source in untrained.items()}
    # peft reads one file
    files = {WEIGHTS_FILE: by_width(infos)} if weights.adapter else plan_files(infos, max_shard_bytes)
    output = output.absolute()
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _check_room(output, sum(map(nbytes, infos.values())))
        temporary.mkdir()
        if weights.adapter:
            _write_adapter_config(weights, temporary)
        elif weights.config is not None:
            if config is None:
                _check_links(weights.config, weights.config if weights is not opened else folder.absolute())
            dtype_name = _main_dtype(infos)
            files_beside = ModelFiles.read(weights.config)
            if dtype_name is not None:
                files_beside = files_beside.with_dtype(str(to_torch(dtype_name)).removeprefix("torch."))
            files_beside.write(temporary)
        digest, wire_digest = _write_weights(weights, wire, untrained, tower, infos, files, temporary, progress)
        checked = check_digest(weights.without(tower), wire_digest) if weights is opened else None
        sync_folder(temporary)
        temporary.rename(output)  # takes the place of an empty folder, and of nothing else
        sync_folder(output.parent)
    except OSError as error:
        raise RunError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ExportReport(
        output=output,
        source=folder,
        format=weights.format,
        dtypes=tuple(name for name, _ in Counter(info.dtype for info in infos.values()).most_common()),
        tensors=len(infos),
        bytes=sum(map(nbytes, infos.values())),
        files=tuple(files),
        digest=digest,
        checked=checked,
        left_out=tuple(untrained),
        missing=missing,
    )


def _check_room(output: Path, wanted: int) -> None:
    usage = shutil.disk_usage(output.parent)
    free = usage.free
    if usage.total and free < wanted:  # some file systems do not say
        told = f"{output} cannot be written: it would have {wanted} bytes, and {free} are free there"
        raise RunError(told) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _wire(opened: Weights, weights: Weights) -> WireFormat:
    """Return the dtypes of the digests; for a merged adapter those of its base."""
    noted_base = opened.manifest.base if opened.manifest is not None and weights is not opened else None
    return (noted_base.wire if noted_base is not None else None) or wires_of(weights)[0]


def _write_adapter_config(weights: Weights, folder: Path) -> None:
    """Write the adapter's config, which names its base."""
    assert weights.adapter_config is not None, "was checked"
    body = dict(weights.adapter_config)
    if weights.manifest is not None and weights.manifest.base is not None:
        body["base_model_name_or_path"] = weights.manifest.base.path
    body["inference_mode"] = True
    (folder / CONFIG_FILE).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_weights(
    weights: Weights,
    wire: WireFormat,
    untrained: Mapping[str, StoredTensor],
    tower: Container[str],
    infos: Mapping[str, TensorInfo],
    files: Mapping[str, Sequence[str]],
    folder: Path,
    progress: Callable[[int, int], None] | None,
) -> tuple[str, str]:
    """Write all files; return the digests of the weights as written and as on the wire, both without `untrained` and
    `tower`.
    """
    written, in_wire = [], []
    done, total = 0, sum(map(nbytes, infos.values()))

    def read(name: str) -> torch.Tensor:
        nonlocal done
        if name in untrained:
            done += nbytes(infos[name])
            return untrained[name].read()
        tensor = weights.read(name)
        if name not in tower:
            add(name, tensor)
        done += nbytes(infos[name])
        if progress is not None:
            progress(done, total)
        return tensor

    def add(name: str, tensor: torch.Tensor) -> None:
        written.append(digest_entry(name, tensor, infos[name].dtype if is_floating(infos[name].dtype) else None))
        same = infos[name].dtype == wire.of(name, infos[name].dtype)
        in_wire.append(written[-1] if same else digest_entry(name, tensor, wire))

    noted_base = weights.manifest.base if weights.manifest is not None else None
    notes = {BASE_NOTE: json.dumps(noted_base.to_json())} if noted_base is not None else {}
    for file, names in files.items():
        write_file(folder, file, {name: infos[name] for name in names}, read, notes)
    if len(files) > 1:
        write_index(folder, files, infos)
    return version_digest(written), version_digest(in_wire)


def _main_dtype(infos: Mapping[str, TensorInfo]) -> str | None:
    """Return the dtype of most floating elements."""
    elements: Counter[str] = Counter()
    for info in infos.values():
        if is_floating(info.dtype):
            elements[info.dtype] += info.numel
    return elements.most_common(1)[0][0] if elements else None


def _check_links(config: Path, opened: Path) -> None:
    """Check that files next to the weights are in the checkpoint, so that its maker cannot choose files to copy from
    here. A Hugging Face folder that the user named may consist of links, as its cache does.
    """
    step = next((place for place in (config, *config.parents) if step_of(place.name) is not None), None)
    if step is None and config == opened:
        return
    bounds = (step or config).resolve()
    for path in (config, *sorted(config.rglob("*"))):
        if is_weights(path.name) or not path.is_symlink():
            continue
        target = path.resolve()
        if target.is_dir() or not target.is_relative_to(bounds):
            raise RunError(
                f"{path} is a link to {target}, which is not followed out of a checkpoint; nothing was exported: name "
                "a folder with the model's config and tokenizer with --config"
            )


# Versions of a run's history: made from a base and deltas in a temporary folder, and exported from there.


@contextmanager
def restored(root: Path, version: Point, output: Path) -> Iterator[RestoredVersion]:
    """Make a version (attempt, step) of the history in a checkpoint folder for an export to `output`, next to which it
    lies meanwhile. Raises RunError: nothing leads to it any more, or the disk refused.
    """
    above = next(parent for parent in output.absolute().parents if parent.is_dir())
    try:
        with TemporaryDirectory(prefix=f".{output.name}.", suffix=".tmp", dir=above) as into:
            yield restore_version(root, version, Path(into))
    except OSError as error:  # of a file of the history, or of the disk of `output`
        raise RunError(f"{error.filename or output}: {error.strerror or error}; nothing was written") from error


def restore_version(root: Path, version: Point, into: Path) -> RestoredVersion:
    """Make a version of the history from the base and the deltas that lead to it with the fewest bytes. What is lost or
    damaged is left out, and another way tried. Raises RunError, OSError.
    """
    deltas, lost, faults = root / DELTAS, set[object](), list[str]()

    def index_of(at: Point) -> VersionIndex | None:
        try:
            index = VersionIndex.read(version_folder(deltas, at) / HISTORY)
        except DeltaError as error:
            faults.append(str(error))
            return None
        found = [one for one in index.deltas if (one[0], at) not in lost]
        return index._replace(full=None if at in lost else index.full, deltas=found)

    careful = False  # a second way is checked at each step: else nothing says which of them was wrong
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while (route := find_route(version, None, 0, index_of, math.inf)) is not None and route.full is not None:
            base = root / route.full[1]
            if not (report := verify(base)).ok:
                faults.append(report.problems[0])
                lost.add(route.full[0])
                continue
            digest = VersionIndex.read(version_folder(deltas, version) / HISTORY).digest
            manifest = replace(read_manifest(base), attempt=version[0], step=version[1], digest=digest)
            files = part_files(base / "actor")
            if not route.starts:
                return RestoredVersion(base, manifest, files)
            _check_room(into, 2 * manifest.bytes)
            files = [Path(shutil.copyfile(file, into / file.name)) for file in files]
            parts = [open_shard_file(file, writable=True) for file in files]
            at: Step | None = None
            try:
                delta_of = lambda part, step: version_folder(deltas, step[1]) / delta_file(part, step[0])  # noqa: E731
                for layout, data in parts:
                    for step in apply_steps(layout, data, route.steps(version), delta_of, pool, each=careful):
                        at = step
                return RestoredVersion(base, manifest, files)
            except DeltaError as error:
                faults.append(str(error))
                if careful:
                    lost.add(at)
                careful = True
    name = f"step {version[1]} of attempt {version[0]}"
    raise RunError(f"{name} cannot be restored: no base and deltas lead to it: {faults[0] if faults else deltas}")


# Checks of an export against the manifest: weights, an adapter's base, draft heads.


_WIRE_DTYPES = ("BF16", "F32", "F16")
"""Dtypes that a manifest's digest may be of, the usual one first."""


def wires_of(weights: Weights) -> list[WireFormat]:
    """Return the dtypes that the weights' version digest may have: the manifest's, or else the usual ones, with the
    tensors that the model's class keeps in fp32. Raises WeightsError if no model can be made of the config.
    """
    wire = weights.manifest.wire if weights.manifest is not None else None
    return [wire] if wire is not None else _usual(weights)


def _usual(weights: Weights) -> list[WireFormat]:
    plain = [WireFormat(dtype) for dtype in _WIRE_DTYPES]
    model = made_of(weights.config) if weights.config is not None and not weights.adapter else None
    kept = kept_names(kept_by_class(model, _WIRE_DTYPES[0]), list(weights)) if model is not None else frozenset[str]()
    return [WireFormat(_WIRE_DTYPES[0], kept), *plain] if kept else plain


def check_digest(weights: Weights, wire_digest: str) -> str | None:
    """Check that weights have the manifest's digest, in its dtypes or else in one of the wire dtypes. Raises RunError
    if the digest differs. Returns the manifest's digest; None if it has none.
    """
    expected = weights.manifest.digest if weights.manifest is not None else None
    if expected is None or expected == wire_digest:
        return expected
    wires = wires_of(weights)
    # Old manifests do not name the dtypes; other dtypes than the usual ones cost another pass over the weights.
    if any(weights.digest(other) == expected for other in wires[1:]):
        return expected
    if weights.manifest is not None and DELTAS in weights.folder.parts:
        raise RunError(
            f"the weights of step {weights.manifest.step} that were made from {weights.folder} have the digest "
            f"{wire_digest}, but the version had {expected}; nothing was written"
        )
    raise RunError(
        f"the weights in {weights.folder} have the digest {wire_digest} in {wires[0].dtype}, but its manifest "
        f"says {expected}: they differ from the committed ones, and nothing was exported; `trinity-sync ckpt verify` "
        "names the changed file"
    )


def open_base(adapter: Weights, given: Path | None) -> Weights:
    """Open the base of an adapter, without the draft heads in its manifest, and check it by its digest. For an adapter
    without such a manifest, as verl's, the whole folder is opened. Raises ConfigError, WeightsError, RunError. `given`:
    the folder that the user named; None: the manifest's.
    """
    check_digest(adapter, adapter.digest(wires_of(adapter)[0]))
    manifest = adapter.manifest
    noted = manifest.base if manifest is not None else None
    place = given or (Path(noted.path) if noted is not None else None)
    if place is None or not place.is_dir():
        what = "the manifest does not name it" if place is None else f"{place} is not a folder"
        digest = "" if noted is None else f" with the digest {noted.digest}"
        raise ConfigError(
            f"{adapter.folder} is to be merged into its base{digest}, but {what}; name it with --base DIR"
        )
    opened = open_weights(place)
    if noted is None:
        return _whole(opened)
    note = manifest.left_out if manifest is not None else None
    opened = _saved(opened).without(note["names"] if note is not None else ())
    _check_base(adapter, opened, noted)
    return opened


def _check_base(adapter: Weights, opened: Weights, known: Base) -> None:
    wires = [known.wire] if known.wire is not None else _usual(opened)
    found = opened.digest(wires[0])
    if found != known.digest and all(opened.digest(other) != known.digest for other in wires[1:]):
        raise RunError(
            f"{adapter.folder} was trained on a base with the digest {known.digest}, but {opened.folder} has {found}; "
            "nothing was exported: name the base that it was trained on with --base DIR"
        )


def _saved(weights: Weights) -> Weights:
    """Leave out what `save_pretrained` would not write, such as second names of tied tensors."""
    model = made_of(weights.config) if weights.config is not None else None
    return weights if model is None else weights.without(set(weights) - saved_list(model).keys())


def _whole(weights: Weights) -> Weights:
    """Leave out second names of tied tensors only: draft heads stay."""
    model = made_of(weights.config) if weights.config is not None else None
    if model is None:
        return weights
    saved = saved_list(model).keys()
    absent = sorted(saved - set(weights))
    if absent:
        raise WeightsError(
            f"{weights.folder} is not a whole {type(model).__name__}, which its config.json describes: it has no "
            f"{listed(absent)}; save the model with save_pretrained of this transformers, and name that folder"
        )
    return weights.without(model.state_dict().keys() - saved)


def digest_left_out(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> str:
    """Return the digest of untrained tensors of a model's folder, as they are stored; reads them."""
    return version_digest([digest_entry(name, tensors[name].read(), None) for name in names])


def tower_in(weights: Weights) -> list[str]:
    """Return the names that belong to a vision tower, which is in no version. Raises WeightsError if no model can be
    made of the config.
    """
    model = made_of(weights.config) if weights.config is not None else None
    if model is None:
        return []
    still, saved = tower(model), saved_list(model)
    return [name for name in weights if name in saved and saved[name].held in still]


def open_left_out(told: Remainder | None, given: Path | None) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Open the tensors that the model's folder has and the trained model has not, such as draft heads. Reads them.
    Raises WeightsError if a file of the folder is damaged.

    Args:
        told: the manifest's note of them; None: there are none.
        given: the folder that the user named; None: the manifest's.

    Returns:
        The tensors; and the names of those that are missing or changed. One digest is of all of them, so one of the two
        is empty.
    """
    if told is None:
        return {}, ()
    folder, names = given or Path(told["path"]), tuple(told["names"])
    tensors = open_hugging_face(folder) if folder.is_dir() and is_hugging_face(folder) else {}
    if not tensors.keys() >= set(names) or digest_left_out(tensors, names) != told["digest"]:
        return {}, names
    return {name: tensors[name] for name in names}, ()


# Writing Hugging Face safetensors files, tensor by tensor.


_CHUNK_BYTES = 4 << 20
_ALIGNMENT = 8


def nbytes(info: TensorInfo) -> int:
    """Return the size of a tensor, in bytes."""
    return info.numel * shards.itemsize(info.dtype)


def plan_files(infos: Mapping[str, TensorInfo], max_bytes: int) -> dict[str, list[str]]:
    """Divide tensors among files of at most so many bytes, in the given order; a larger tensor gets its own file.
    Returns file name -> names of its tensors in the order of their bytes: wider elements first, so that every tensor is
    aligned.
    """
    split = split_state_dict_into_shards_factory(
        dict(infos), get_storage_size=nbytes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_bytes
    )
    return {file: by_width({name: infos[name] for name in names}) for file, names in split.filename_to_tensors.items()}


def by_width(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names of a file's tensors in the order of their bytes: wider elements first."""
    return sorted(infos, key=lambda name: -shards.itemsize(infos[name].dtype))


def write_file(
    folder: Path,
    file: str,
    infos: Mapping[str, TensorInfo],
    read: Callable[[str], torch.Tensor],
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file, durably. `infos`: dtype and shape of each tensor in the file, in the order of their
    bytes. `read`: returns a tensor by name; a floating one is cast to the dtype in `infos`.
    """
    with (folder / file).open("wb", buffering=0) as opened:
        write_all(opened.fileno(), header(infos, notes))
        for name, info in infos.items():
            dtype = to_torch(info.dtype)
            # Small chunks, so that a cast stays in the cache.
            for chunk in read(name).reshape(-1).split(_CHUNK_BYTES // dtype.itemsize):
                write_all(opened.fileno(), chunk.to(dtype).contiguous().view(torch.uint8).numpy().data)
        os.fsync(opened.fileno())


def write_index(folder: Path, files: Mapping[str, Sequence[str]], infos: Mapping[str, TensorInfo]) -> None:
    """Write the index from tensors to files."""
    body = {
        "metadata": {
            "total_parameters": sum(info.numel for info in infos.values()),
            "total_size": sum(nbytes(info) for info in infos.values()),
        },
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / INDEX).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def header(infos: Mapping[str, TensorInfo], notes: Mapping[str, str] | None = None) -> bytes:
    """Return the first bytes of a safetensors file; the tensors' bytes follow, in the given order."""
    entries: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt", **(notes or {})}}
    end = 0
    for name, info in infos.items():
        start, end = end, end + nbytes(info)
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
