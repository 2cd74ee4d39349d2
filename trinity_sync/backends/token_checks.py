"""Checks of how sequences are batched: by how many tokens, and whether without padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trinity_sync.backends.packing import unpackable
from trinity_sync.config import Get, Problem
from trinity_sync.config.model_checks import model_fields


def check_max_tokens(get: Get) -> Iterator[Problem]:
    """That the longest sequence fits, where the task has keys for lengths."""
    most, task, sharing = get("trainer.max_tokens"), get("task"), get("backend").get("sp", 1)
    if most is None or not isinstance(task, Mapping):
        return
    names = ("max_length",) if "max_length" in task else ("prompt_length", "response_length")
    lengths = [get(f"task.{name}") for name in names if name in task]
    if len(lengths) == len(names) and all(isinstance(length, int) for length in lengths):
        longest = sum(lengths)
        if longest > most * sharing:
            named = " + ".join(f"task.{name}" for name in names)
            yield Problem(
                "trainer.max_tokens",
                f"is {most}, but a sequence may have {longest} tokens ({named}), and none is cut; set it to "
                f"{-(-longest // sharing)} or more",
            )


def check_unpadded(backend: str, get: Get) -> Iterator[Problem]:
    """Of an engine that pads: that nobody asks for more."""
    if get("trainer.remove_padding") == "always":
        yield Problem(
            "trainer.remove_padding",
            f"is always, but backend={backend} pads sequences to the longest of a micro-batch; set it to auto, or use "
            "backend=fsdp2 or backend=fsdp",
        )


def check_packing(get: Get) -> Iterator[Problem]:
    """Of an engine that packs: that the model, where it is at hand, takes what is asked for."""
    wanted, sharing, model = get("trainer.remove_padding"), get("backend.sp"), model_fields(get)
    if sharing > 1 and wanted == "never":
        yield Problem(
            "trainer.remove_padding", f"is never, but ranks share sequences (backend.sp={sharing}); set it to auto"
        )
    if model and (text := refused(wanted, sharing, model, get("model.attn_implementation"))):
        yield Problem(*text)


def refused(wanted: str, sharing: int, model: Mapping[str, Any], attention: str) -> tuple[str, str] | None:
    """Which key asks for packed sequences that the model does not take, and what is to be said of it.

    Args:
        wanted: `trainer.remove_padding`.
        sharing: `backend.sp`.
        model: fields of its Hugging Face config.
        attention: `model.attn_implementation`.
    """
    why = unpackable(model, attention)
    if why is None or (wanted != "always" and sharing == 1):
        return None
    if sharing > 1:
        return "backend.sp", f"is {sharing}, for which sequences are packed without padding, but {why}; set it to 1"
    return "trainer.remove_padding", f"is always, but {why}; set it to auto"


def check_sharing(get: Get) -> Iterator[Problem]:
    """That ranks can share a sequence."""
    ranks, sharing, model = get("backend.ranks"), get("backend.sp"), model_fields(get)
    if ranks % sharing:
        yield Problem("backend.sp", f"is {sharing}; must divide backend.ranks ({ranks})")
    heads, pairs = model.get("num_attention_heads"), model.get("num_key_value_heads")
    if isinstance(heads, int) and heads % sharing:
        yield Problem("backend.sp", f"is {sharing}; it must divide the model's num_attention_heads ({heads})")
    elif isinstance(pairs, int) and pairs % sharing and sharing % pairs:
        yield Problem(
            "backend.sp", f"is {sharing}; it must divide the model's num_key_value_heads ({pairs}), or be a multiple"
        )
