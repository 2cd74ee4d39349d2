"""The element types that travel, under the names safetensors gives them.

Lowest module of the data plane: sizes only, no torch and no numpy, so that the node agent and the control plane can
reason about bytes. `tensors.py` maps the names to torch.
"""

from __future__ import annotations

_ITEMSIZES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}

NAMES = tuple(_ITEMSIZES)


def itemsize(name: str) -> int:
    """Bytes of one element.

    Args:
        name: a safetensors dtype name, such as ``"BF16"``.

    Raises:
        ValueError: the name is not one of `NAMES`.
    """
    try:
        return _ITEMSIZES[name]
    except KeyError:
        raise ValueError(f"unknown dtype {name!r}: expected one of {', '.join(NAMES)}") from None


def is_floating(name: str) -> bool:
    """Whether a dtype is a floating one, and so is cast to the wire dtype. Raises ValueError for an unknown name."""
    itemsize(name)
    return name.startswith(("F", "BF"))
