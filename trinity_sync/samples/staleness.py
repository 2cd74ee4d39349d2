"""How old a sample is when it is trained on. Called by the driver before each update."""

from __future__ import annotations


def staleness(version_step: int, update_step: int) -> int:
    """Count the steps completed before an update, minus the step whose version made the sample; 0 is on-policy.

    Args:
        version_step: step of the sample's version.
        update_step: the step that trains on the sample.

    Raises:
        ValueError: the version cannot exist before the update.
    """
    if version_step >= update_step:
        raise ValueError(f"version {version_step} cannot exist before the update of step {update_step}")
    return update_step - 1 - version_step
