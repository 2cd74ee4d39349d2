"""What a save of verl's consists of: its contents by name, who writes each, to which file, and as which part."""

from __future__ import annotations

MODEL, METADATA, OPTIMIZER, EXTRA, EXPORT = "model", "metadata", "optim", "extra_state", "hf_model"
STATE = "state"
"""All that the ranks of a Megatron engine write together, but for the model where it is saved already."""
DESCRIPTION = "description"
"""Beside the weights of a Megatron engine: the metadata of a save of the weights alone."""
WEIGHTS = (MODEL, METADATA, DESCRIPTION)
OF_FIRST_RANK = (METADATA, EXPORT, DESCRIPTION)


def writers(name: str, world_size: int) -> range:
    """The ranks that write this content."""
    return range(1 if name in OF_FIRST_RANK else world_size)


def part(name: str, rank: int) -> str:
    """The name of the part that this content of a rank is."""
    return name if name in OF_FIRST_RANK else f"{name}-rank-{rank:05d}"


def file(name: str, world_size: int, rank: int) -> str:
    """The name of the file in which verl keeps this content of a rank."""
    return f"{name}_world_size_{world_size}_rank_{rank}.pt"


def announcement(role: str) -> str:
    """A part without files: that the parts of this role are known. A full checkpoint waits for that of each role."""
    return f"{role}/announced"
