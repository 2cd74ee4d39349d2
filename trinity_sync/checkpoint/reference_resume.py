"""Whether a run may go on from a checkpoint, as far as the reference is concerned that its policy is held near to."""

from __future__ import annotations

from pathlib import Path

from trinity_sync.errors import ConfigError
from trinity_sync.protocol.decisions import Compared

OF_ADAPTER = "base"
"""In place of the digest where the reference is the base of the adapter, which has a check of its own."""


def check_same(folder: Path, before: Compared | None, now: Compared | None) -> None:
    """Check that a policy is held near to what it was held near to. One that was held near to nothing may begin with
    it, and one may go on without.

    Args:
        folder: the step folder.
        before: what its manifest says.
        now: of the run that goes on.

    Raises:
        ConfigError: it is another one.
    """
    if before is None or now is None or before["digest"] == now["digest"]:
        return
    raise ConfigError(
        f"algorithm.kl.reference: {folder} was trained near {before['path']} (digest {before['digest']}), this resume "
        f"has {now['path']} (digest {now['digest']}); a run goes on with the reference that it had, a new run may "
        "begin from its checkpoint with another (checkpoint.resume_from)"
    )
