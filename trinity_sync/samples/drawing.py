"""How the samples that are asked for are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_sync.samples.keys import Purpose


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What may differ from one request for samples to the next.

    Attributes:
        purpose: what the random numbers are for, which keeps those of training and of validation apart.
        temperature: in place of `explorer.temperature`; None: that one.
    """

    purpose: Purpose = Purpose.SAMPLING
    temperature: float | None = None


FOR_TRAINING = Drawing()
"""As the keys of `explorer` say."""
