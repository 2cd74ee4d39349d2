"""Versions that are handed to the synchronizer as a whole: a state dict in the object store, or a checkpoint on disk.

A pure book of them; the `Synchronizer` actor is a shell over it. What a reader gets is one record, so a version and its
tensors cannot be mixed up. The newest state dict is kept, and beside it the newest checkpoint that is known: when the
tensors are lost with the process that owned them, the checkpoint serves.
"""

from __future__ import annotations

from dataclasses import dataclass

from trinity_sync.protocol.versions import Version, VersionError


@dataclass(frozen=True)
class Handed:
    """A version as it is handed out.

    Attributes:
        version: the version that is handed out.
        state: what the trainer's side left for readers to get the tensors by (opaque here); None: they are on disk.
        location: folder of its checkpoint; None: there is none, or none that is known.
    """

    version: Version
    state: object = None
    location: str | None = None


class HandedVersions:
    """The newest state dict and the newest checkpoint."""

    def __init__(self) -> None:
        self._state: Handed | None = None
        self._saved: Handed | None = None

    @property
    def newest(self) -> Version | None:
        """The newest version of which anything was handed over."""
        return max((held.version for held in (self._state, self._saved) if held is not None), default=None)

    def publish(self, version: Version, state: object) -> None:
        """The tensors of a version are there; those of the version before are let go.

        Raises:
            VersionError: it is not newer than the last state dict, or older than the newest checkpoint.
        """
        newest = self.newest
        if newest is not None and (version < newest or (self._state is not None and version <= self._state.version)):
            raise VersionError(f"version {version} cannot be published after version {newest}")
        self._state = Handed(version, state)

    def announce(self, version: Version, location: str | None) -> None:
        """A version is on disk. An older one than the newest known is no news; saves may end out of order."""
        if self._saved is None or version >= self._saved.version:
            self._saved = Handed(version, location=location)

    def get(self) -> Handed | None:
        """The newest version with all that is known of it; None before the first."""
        state, saved = self._state, self._saved
        if state is None or (saved is not None and saved.version > state.version):
            return saved
        location = saved.location if saved is not None and saved.version == state.version else None
        return Handed(state.version, state.state, location)

    @property
    def location(self) -> str | None:
        """The folder of the newest checkpoint."""
        return self._saved.location if self._saved is not None else None

    def lost(self, version: Version) -> Handed | None:
        """The tensors of this version cannot be had any more. What serves in its place; None: nothing does."""
        if self._state is not None and self._state.version == version:
            self._state = None
        return self.get()
