"""Dtype names, digests and model tensors in torch. Used by backends (sources), explorers (destinations), tests.

`version_list` fixes the tensors of a version; `state_digest` is the version digest of whole tensors, computed on their
device: the digest of an explorer's tensors equals the one that the trainer's ranks published row by row.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from xxhash import xxh3_128, xxh3_128_digest

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.weights import shards
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.saved_views import SavedTensor, by_held, is_rectangular, row_major
from trinity_sync.weights.shards import is_floating, listed, matrix_view
from trinity_sync.weights.tensor_rows import rows_digest
from trinity_sync.weights.wire import WireFormat, as_wire, kept_names

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
"""Bytes in wire dtype that are cast at a time: bounds temporary memory, and stays in the cache on a CPU."""

_TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}


def to_torch(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors name, or raise a ValueError."""
    shards.itemsize(name)
    return _TORCH[name]


def from_torch(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype, or raise a ValueError if tensors of it do not travel."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(f"{dtype} cannot travel: expected one of {', '.join(map(str, _NAMES))}") from None


def torch_dtype(text: str) -> torch.dtype:
    """Return the dtype that torch prints as this text, such as ``torch.bfloat16``."""
    dtype: torch.dtype = getattr(torch, text.removeprefix("torch."))
    return dtype


def wire_name(dtype_name: str, wire: str | None) -> str:
    """Return the dtype in which a tensor travels: `wire` for a floating one, else its own; always its own for None."""
    return WireFormat(wire).of("", dtype_name)


def castable(source: str, target: str) -> bool:
    """Return whether values may be cast from one dtype to the other: between floating ones, or to the same."""
    return source == target or (shards.is_floating(source) and shards.is_floating(target))


def rounds(source: str, target: str) -> bool:
    """Return whether a cast loses digits: floating ones to another dtype that is not wider."""
    return source != target and castable(source, target) and shards.itemsize(target) <= shards.itemsize(source)


def byte_tensor(view: memoryview) -> torch.Tensor:
    """Return a uint8 tensor on the bytes of a view, without a copy. Bytes of a read-only view must not be written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=torch.uint8) if len(view) else torch.empty(0, dtype=torch.uint8)


def loading_fault(error: BaseException) -> str:
    """Return the message of torch's weights-only loader about a file, without its advice to trust the file."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = next((line for line in lines if "WeightsUnpickler error:" in line), lines[0])
    return line.rpartition("WeightsUnpickler error:")[2].partition(" Please use ")[0].strip()


def saved_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the live tensors that ``save_pretrained`` would write, under its names, detached: writes change the model.

    One of tied tensors; no non-persistent buffers; where transformers keeps a checkpoint's tensors fused (experts),
    views of them. Follows transformers 5 ``PreTrainedModel.save_pretrained``, whose own function would clone tensors
    that share a storage. The model may be on the meta device.
    """
    live = _kept(model)
    saved = saved_list(model)
    copies = sorted(name for name, tensor in saved.items() if tensor.held is None)
    if copies:
        raise RunError(
            f"the saved form of {type(model).__name__} is not made of views of its weights, so they cannot be read or "
            f"written in place: {listed(copies)}"
        )
    return {name: _view(live, tensor) for name, tensor in saved.items()}


def saved_list(model: torch.nn.Module) -> dict[str, SavedTensor]:
    """Return by name the tensors that ``save_pretrained`` would write, as views of the model's. No tensor is read."""
    live = _kept(model)
    # stand-ins for the model's tensors: each alone in its storage, and contiguous
    held = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in live.items()}
    names = {storage_of(tensor): name for name, tensor in held.items()}
    return {name: _saved(tensor, names) for name, tensor in _saved_form(model, held).items()}


def version_list(model: torch.nn.Module) -> dict[str, SavedTensor]:
    """Return the tensors of a version of a model: those of `saved_list` outside of the `tower`."""
    frozen = tower(model)
    return {name: saved for name, saved in saved_list(model).items() if saved.held not in frozen}


def version_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the live tensors of `version_list`, as `saved_tensors` does."""
    names = version_list(model)
    return {name: tensor for name, tensor in saved_tensors(model).items() if name in names}


def tower(model: torch.nn.Module) -> frozenset[str]:
    """Return the model's names of the tensors outside the language model, in a model for images and text.

    Training on texts does not change them. Other models have none. `model` as for `saved_list`.
    """
    text_config = getattr(getattr(model, "config", None), "get_text_config", None)
    text = None if text_config is None else text_config()
    if text is None:
        return frozenset()
    language = next((part for part in model.modules() if getattr(part, "config", None) is text), model)
    if language is model:
        return frozenset()
    parts = (language, model.get_output_embeddings())  # type: ignore[operator]
    trained = {id(one) for part in parts if part is not None for one in part.state_dict(keep_vars=True).values()}
    return frozenset(name for name, one in model.state_dict(keep_vars=True).items() if id(one) not in trained)


def _saved(tensor: torch.Tensor, held: Mapping[int, str]) -> SavedTensor:
    """Describe a tensor of the saved form; `held`: the model's names by their storage."""
    dtype, shape = from_torch(tensor.dtype), tuple(tensor.shape)
    strides = zip(shape, tensor.stride(), row_major(shape), strict=True)
    stride = tuple(plain if size == 1 else step for size, step, plain in strides)
    view = SavedTensor(dtype, shape, held.get(storage_of(tensor)), stride, int(tensor.storage_offset()))
    return view if view.held is not None and is_rectangular(view) else SavedTensor(dtype, shape, None)


def _view(live: Mapping[str, torch.Tensor], saved: SavedTensor) -> torch.Tensor:
    assert saved.held is not None, "the caller has checked"
    held = live[saved.held]
    if tuple(held.shape) == saved.shape and saved.stride == row_major(saved.shape):
        return held
    if not held.is_contiguous():
        raise RunError(f"{saved.held} is not contiguous, so its saved form cannot be read or written in place")
    return held.as_strided(saved.shape, saved.stride, held.storage_offset() + saved.offset)


def _kept(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    for name in _tied_duplicates(model, state):
        del state[name]
    return {name: tensor.detach() for name, tensor in state.items()}


def _tied_duplicates(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names to leave out: of tensors with the same bytes, those declared as tied, but not all of them."""
    declared = [
        re.compile(f"{prefix}.{pattern}" if prefix else pattern)
        for prefix, module in model.named_modules()
        for pattern in getattr(module, "_tied_weights_keys", None) or ()
    ]
    dropped: set[str] = set()
    for names in _sharing(state):
        if len(names) == 1:
            continue
        tied = [name for name in names if any(pattern.search(name) for pattern in declared)]
        surplus = tied[: len(names) - 1]
        spans = {_span(state[name]) for name in names}
        if len(spans) > 1 or len(names) - len(surplus) > 1:
            raise RunError(
                f"{', '.join(names)} share memory but are not declared as tied: save_pretrained could not write them"
            )
        dropped.update(surplus)
    return dropped


def _sharing(state: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yield groups of names whose tensors overlap, names sorted. Tensors that only share a storage are groups of 1."""
    storages: dict[int, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        storages[storage_of(tensor)].append(name)
    for names in storages.values():
        group: list[str] = []
        end = 0
        for name in sorted(names, key=lambda name: (*_span(state[name]), name)):
            start, stop = _span(state[name])
            if group and start >= end:
                yield sorted(group)
                group = []
            group.append(name)
            end = max(end, stop)
        yield sorted(group)


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number of its storage; unlike data_ptr, unique on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset())
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((int(size) - 1) * int(stride) for size, stride in strides) if tensor.numel() else 0
    return start * tensor.element_size(), (start + extent) * tensor.element_size()


def _saved_form(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not hasattr(model, "save_pretrained"):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(state))
    return saved


def state_digest(named: Mapping[str, torch.Tensor], wire: WireFormat | str | None) -> str:
    """Return the version digest (hex) of whole tensors, on any device, by Hugging Face name, cast a few MiB at a time.

    `wire`: the dtypes, or the one dtype of all floating tensors, or None for their own.
    """
    return version_digest(digest_entry(name, tensor, wire) for name, tensor in named.items())


def digest_entry(
    name: str, tensor: torch.Tensor, wire: WireFormat | str | None
) -> tuple[str, str, tuple[int, ...], bytes]:
    """Return (name, dtype, shape, 16-byte digest) of one whole tensor, for `version_digest`.

    For weights that are not all in memory at a time; arguments and errors as of `state_digest`.
    """
    dtype = as_wire(wire).of(name, from_torch(tensor.dtype))
    return name, dtype, tuple(tensor.shape), xxh3_128_digest(row_digests(tensor.detach(), dtype))


def row_digests(tensor: torch.Tensor, dtype: str) -> bytes:
    """Return 16 bytes for each row of a detached tensor (a slice along dim 0; below two dimensions: one row), cast to
    `dtype`.
    """
    (digests,) = each_row_digests([(tensor, dtype)])
    return digests


def each_row_digests(tensors: Iterable[tuple[torch.Tensor, str]]) -> list[bytes]:
    """Return the `row_digests` of several (tensor, dtype). Those that a GPU computes are read from it together."""
    tensors = [(tensor.reshape(1, -1) if tensor.ndim < 2 else tensor, dtype) for tensor, dtype in tensors]
    found: dict[int, bytes] = {}
    by_device: dict[torch.device, list[int]] = {}
    for number, (tensor, _) in enumerate(tensors):
        if tensor.is_cuda:
            by_device.setdefault(tensor.device, []).append(number)
    for numbers in by_device.values():
        found |= _digests_on_gpu({number: tensors[number] for number in numbers})
    return [found[number] if number in found else _digests_here(*one) for number, one in enumerate(tensors)]


def _digests_here(tensor: torch.Tensor, dtype: str) -> bytes:
    rows, cols = matrix_view(tensor.shape)
    row_bytes = cols * shards.itemsize(dtype)
    if row_bytes > CHUNK_BYTES:
        return b"".join(_long_row_digest(tensor[row], dtype) for row in range(rows))
    step = CHUNK_BYTES // row_bytes if row_bytes else max(rows, 1)
    return b"".join(
        rows_digest(_wire_bytes(chunk, dtype).reshape(len(chunk), row_bytes)) for chunk in tensor.split(step) if rows
    )


def _digests_on_gpu(matrices: Mapping[int, tuple[torch.Tensor, str]]) -> dict[int, bytes]:
    """Return the digests of rows on one GPU, by number. Matrices that are left out have to be copied to be digested."""
    if (gpu := _gpu_digests()) is None:
        return {}
    try:
        queued = {
            number: gpu.queue(matrix, to_torch(dtype))
            for number, (matrix, dtype) in matrices.items()
            if len(matrix) and gpu.takes(matrix[0].numel() * shards.itemsize(dtype))
        }
        return dict(zip(queued, gpu.read(list(queued.values())), strict=True)) if queued else {}
    except Exception as error:  # Triton compiles for other lengths later, which may fail, too
        _warn_once(f"{type(error).__name__}: {error}")
        return {}


@cache
def _gpu_digests() -> ModuleType | None:
    """Return the digests of rows on GPUs; None: they do not work here."""
    try:
        from trinity_sync.weights import cuda_digests

        for cols in (160, 512, 1028):  # below one block, the most of one, and more
            matrix = torch.arange(3 * cols, dtype=torch.int16).view(3, cols).bfloat16()
            right = rows_digest(matrix.view(torch.uint8).numpy())
            if cuda_digests.row_digests(matrix.cuda(), torch.bfloat16) != right:
                raise RuntimeError("a digest was wrong")
    except Exception as error:  # without Triton, a C compiler for it, or a GPU that it knows
        _warn_once(f"{type(error).__name__}: {error}")
        return None
    return cuda_digests


@cache
def _warn_once(reason: str) -> None:
    logger.warning("digests are not computed on the GPU: %s", reason)


def _long_row_digest(row: torch.Tensor, dtype: str) -> bytes:
    hasher = xxh3_128()
    for chunk in row.reshape(-1).split(CHUNK_BYTES // shards.itemsize(dtype)):
        hasher.update(_wire_bytes(chunk, dtype).data)
    return hasher.digest()


def _wire_bytes(tensor: torch.Tensor, dtype: str) -> NDArray[np.uint8]:
    """Return the bytes of a tensor in a dtype, uint8 and flat; a view of the tensor if possible."""
    flat = tensor.to(to_torch(dtype)).cpu().contiguous().view(-1)
    view: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return view


# Tensors that stay in fp32, as with `from_pretrained` of transformers.


def kept_by_class(model: torch.nn.Module, dtype: str) -> tuple[str, ...]:
    """Return name patterns of the tensors that `from_pretrained` keeps in fp32 when asked for another dtype.

    Those of `_keep_in_fp32_modules_strict`, in fp16 also those of `_keep_in_fp32_modules`; none for models that are not
    of transformers. The model may be on the meta device.
    """
    plan = getattr(model, "_get_dtype_plan", None)
    return () if plan is None else tuple(sorted(plan(to_torch(dtype))))


def hold_fp32(model: torch.nn.Module, patterns: Iterable[str]) -> list[str]:
    """Cast the tensors of a model that the patterns (see `kept_names`) match to fp32, in place; return their saved
    names.
    """
    names, kept = _kept_tensors(model, patterns)
    for tensor in kept:
        tensor.data = tensor.data.to(torch.float32)
    return names


def cast_model(model: torch.nn.Module, dtype: torch.dtype, keep: Iterable[str]) -> None:
    """Cast the floating tensors of a model's state dict in place, except those that the patterns `keep` match.

    Computed buffers, such as rotary frequencies, stay as they are, as with `from_pretrained`. Errors as of `hold_fp32`.
    """
    kept = {id(tensor) for tensor in _kept_tensors(model, keep)[1]}
    for tensor in model.state_dict(keep_vars=True).values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and id(tensor) not in kept:
            tensor.data = tensor.data.to(dtype)


def _kept_tensors(model: torch.nn.Module, patterns: Iterable[str]) -> tuple[list[str], list[torch.Tensor]]:
    """Return the saved names of the floating tensors that the patterns match, and the model's tensors that contain
    them.
    """
    saved, live = saved_list(model), model.state_dict(keep_vars=True)
    floating = {name: tensor for name, tensor in saved.items() if is_floating(tensor.dtype)}
    matched = kept_names(patterns, floating)
    tensors = []
    for held, names in by_held(floating).items():
        others = [name for name in names if name not in matched]
        if not others:
            tensors.append(live[held])
        elif len(others) < len(names):
            kept = next(name for name in names if name in matched)
            raise ConfigError(
                f"sync.keep_fp32 keeps {kept} in fp32 and not {others[0]}, which the model holds as one tensor, "
                f"{held}, of one dtype; keep all of it, or nothing"
            )
    return sorted(matched), tensors
