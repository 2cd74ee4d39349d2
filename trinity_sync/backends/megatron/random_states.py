"""The states of all random generators of a rank."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NotRequired, TypedDict

import numpy as np
import torch
from megatron.core import tensor_parallel

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RngState(TypedDict):
    """The states of a rank's random generators: Python's, numpy's, torch's, megatron-core's, and the device's."""

    python: tuple[object, ...]
    numpy: dict[str, object] | tuple[str, NDArray[np.uint32], int, int, float]
    torch: torch.Tensor
    tracker: dict[str, torch.Tensor]
    cuda: NotRequired[torch.Tensor]


def rng_state() -> RngState:
    """Return the states of all random generators of this rank."""
    state: RngState = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: RngState) -> None:
    """Set all random generators of this rank to what `rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
