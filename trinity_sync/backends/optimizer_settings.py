"""What the configuration says of an optimizer, kept where a checkpoint is loaded, which says what another run was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_STATE = frozenset({"params", "step"})
"""Of a group, what belongs to the training state. Some optimizers count the steps of a group, not of a parameter."""


class HasGroups(Protocol):
    """Any optimizer."""

    param_groups: list[dict[str, Any]]


@contextmanager
def settings_kept(optimizer: HasGroups) -> Iterator[None]:
    """Inside, a state is loaded into an optimizer: its groups have the settings of before afterwards (learning rate,
    betas, weight decay and all others).

    Args:
        optimizer: its groups are as many, and in the same order, before and after.
    """
    kept = [{name: value for name, value in group.items() if name not in _STATE} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, kept, strict=True):
        group.update(settings)
