"""The life of a version between the trainer's snapshot and the last reader: its place, its readers, the newest one.

A pure state machine with an injected clock; the `Synchronizer` actor is a shell over it. A version in a slot goes

    opened (has a slot) -> sealed (all parts staged, digest known) -> committed (visible) -> retired (slot free)

and to failed from each of the first two. Readers have leases on committed versions. A slot is reused only when its
version is neither the newest committed, nor leased, nor still on its way. Other versions have no slot: a state dict in
the object store, a checkpoint on disk, or one that was sent to every explorer.
"""

from __future__ import annotations

import enum
import itertools
import pickle
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from trinity_sync.protocol.parts import PartInfo


class Version(NamedTuple):
    """The weights after a step: ordered, attempts first."""

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"{self.step}" if not self.attempt else f"{self.step} (attempt {self.attempt})"


class VersionError(Exception):
    """A call that does not fit the version's state; the message names the version, its state and the call."""


class State(enum.Enum):
    """Where a version stands."""

    OPENED = "opened"
    SEALED = "sealed"
    COMMITTED = "committed"
    FAILED = "failed"


class Place(enum.Enum):
    """The places of a committed version's weights."""

    SLOT = "slot"
    STORE = "object store"
    DISK = "disk"
    SENT = "sent"


@dataclass(frozen=True)
class VersionPlace:
    """A version and the place of its weights, in one record, so that no version gets another one's tensors."""

    version: Version
    # Gives readers the tensors; two of one version are equal where the tensors are. None: there are none.
    state: object = None
    location: str | None = None  # folder of its checkpoint; None: there is none, or it is unknown


LOAD_HOPS = 2
"""A load moves each byte over so many hops that may be slow: out of the slot to the reader, and into its engine. Waits
for a load, and its lease, last as long as both take.
"""


class SealedParts(dict[str, PartInfo]):
    """The parts of a sealed version, which no longer change: pickled once, however many readers they are sent to."""

    @cached_property
    def _pickled(self) -> bytes:
        return pickle.dumps(dict(self))

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A reader's lease on a version, until `expires` (clock of the book)."""

    id: int
    reader: Hashable  # names a process
    version: Version
    slot: int
    expires: float
    parts: dict[str, PartInfo]
    digest: str | None
    location: str | None  # the folder that the mode published, or None for the slot
    again: bool = False  # the reader found its bytes damaged

    @property
    def nbytes(self) -> int:
        """Bytes of the version."""
        return sum(info.nbytes for info in self.parts.values())


@dataclass(kw_only=True)
class _VersionRecord:
    version: Version
    slot: int
    expected: frozenset[str]
    state: State = State.OPENED
    parts: dict[str, PartInfo] = field(default_factory=dict)
    digested: bool = False
    digest: str | None = None
    location: str | None = None
    error: str | None = None
    leases: dict[int, Lease] = field(default_factory=dict)


class VersionBook:
    """All versions that still have a slot, and the newest one in each other place.

    The newest checkpoint replaces a state dict whose tensors are lost with the process that owned them. `slots`: the
    number of snapshots in each node's shared memory. `clock`: seconds, monotonic, for the expiry of leases.
    """

    def __init__(self, slots: int, clock: Callable[[], float]) -> None:
        if slots < 2:
            raise ValueError(
                f"at least 2 slots are needed, one for the newest version and one for the next; got {slots}"
            )
        self._slots = slots
        self._clock = clock
        self._records: dict[Version, _VersionRecord] = {}
        self._ids = itertools.count(1)
        self._newest: dict[Place, VersionPlace] = {}
        # The last state dict, even when its tensors are lost: explorers may have loaded them.
        self._published: VersionPlace | None = None
        self._dropped: set[Hashable] = set()

    @property
    def newest(self) -> Version | None:
        """The newest committed version in any place."""
        return max((known.version for known in self._newest.values()), default=None)

    @property
    def latest(self) -> Version | None:
        """The newest version so far, even if its tensors are lost."""
        known = [self.newest, self._published.version if self._published is not None else None]
        return max(filter(None, known), default=None)

    def find(self) -> VersionPlace | None:
        """Return the newest version with its state and its location as far as known; None before the first."""
        found: VersionPlace | None = None
        for known in self._newest.values():
            if found is None or known.version > found.version:
                found = known
            elif known.version == found.version:
                found = replace(found, state=found.state or known.state, location=found.location or known.location)
        return found

    def newest_in(self, place: Place) -> VersionPlace | None:
        return self._newest.get(place)

    @property
    def location(self) -> str | None:
        """The folder of the newest version that was staged or saved, if it has one."""
        known = [self._newest[place] for place in (Place.SLOT, Place.DISK) if place in self._newest]
        return max(known, key=lambda one: (one.version, one.location is not None)).location if known else None

    # -- versions without a slot

    def publish(self, version: Version, state: object) -> None:
        """Note that a version's tensors are in the object store; those of the version before are released.

        A version may be published again: its tensors are those of the last call. Raises VersionError: it is older than
        the last state dict or checkpoint, or was published with another state.
        """
        stored, saved = self._published, self._newest.get(Place.DISK)
        for before in filter(None, (stored, saved)):
            if version < before.version:
                raise VersionError(f"version {version} cannot be published after version {before.version}")
        if stored is not None and version == stored.version and state != stored.state:
            raise VersionError(f"version {version} was published with other weights; a version never changes")
        self._newest[Place.STORE] = self._published = VersionPlace(version, state)

    def follow(self, version: Version, location: str, *, always: bool = False) -> None:
        """Note a commit that was not announced.

        Where versions are checkpoints (`always`) it makes one. Otherwise it counts only up to the newest version that
        was handed over.
        """
        newest = self.newest
        if newest is not None and version.step > newest.step:
            version = Version(max(version.attempt, newest.attempt), version.step)
        handed = [self._newest[place].version for place in (Place.STORE, Place.SENT) if place in self._newest]
        if always or not handed or version <= max(handed):
            self.announce(version, location)

    def lost(self, version: Version) -> VersionPlace | None:
        """Note that a version's tensors are lost; return the newest version that is left."""
        stored = self._newest.get(Place.STORE)
        if stored is not None and stored.version == version:
            del self._newest[Place.STORE]
        return self.find()

    def announce(self, version: Version, location: str | None = None, place: Place = Place.DISK) -> None:
        """Note that a version is on disk, or was sent. An older one than the newest is ignored: saves may end out of
        order.
        """
        before = self._newest.get(place)
        if before is None or version >= before.version:
            self._newest[place] = VersionPlace(version, location=location)

    # -- versions in slots

    def open(self, version: Version, parts: Iterable[str]) -> int | None:
        """Begin a version, and return its slot, or None while all slots are in use. Raises VersionError: it is not
        newer than all before it, or has no parts.
        """
        expected = frozenset(parts)
        if not expected:
            raise VersionError(f"version {version} was opened with no parts")
        alive = [record.version for record in self._records.values() if record.state is not State.FAILED]
        latest = max(alive, default=None)
        if latest is not None and version <= latest:
            raise VersionError(f"version {version} cannot be opened after version {latest}")
        slot = self._free_slot()
        if slot is None:
            return None
        self._records[version] = _VersionRecord(version=version, slot=slot, expected=expected)
        return slot

    def stage(self, version: Version, parts: dict[str, PartInfo]) -> bool:
        """Record staged parts, and return whether this seals the version. A repeated report counts once."""
        record = self._require(version, State.OPENED, "stage", also=State.SEALED)
        unknown = parts.keys() - record.expected
        if unknown:
            raise VersionError(f"version {version} expects no part {', '.join(sorted(unknown))}")
        if record.state is State.SEALED:
            return False
        record.parts.update(parts)
        return self._seal(record)

    def digest(self, version: Version, digest: str | None) -> bool:
        """Record the version's digest (None where none is computed), and return whether this seals the version."""
        record = self._require(version, State.OPENED, "digest", also=State.SEALED)
        if record.state is State.SEALED:
            if digest != record.digest:
                raise VersionError(
                    f"version {version} was sealed with digest {record.digest}, now reported as {digest}"
                )
            return False
        record.digested, record.digest = True, digest
        return self._seal(record)

    def commit(self, version: Version, location: str | None = None) -> None:
        """Make a sealed version visible to readers. A version older than the newest is refused."""
        record = self._require(version, State.SEALED, "commit")
        newest = self._newest_staged
        if newest is not None and version < newest:
            raise VersionError(f"version {version} cannot be committed after version {newest}")
        record.state, record.location = State.COMMITTED, location
        self._newest[Place.SLOT] = VersionPlace(version, location=location)

    def discard(self, version: Version) -> None:
        """Release the slot of a staged version that will not be published."""
        record = self._require(version, State.OPENED, "discard", also=State.SEALED)
        del self._records[record.version]

    def fail(self, version: Version, error: str) -> bool:
        """Fail a version whose part could not be staged or digested, and return False if it had already ended."""
        record = self._records.get(version)
        if record is None or record.state not in (State.OPENED, State.SEALED):
            return False
        record.state, record.error = State.FAILED, error
        return True

    def state(self, version: Version) -> State | None:
        """Return where a version stands; None once its slot was reused or released."""
        record = self._records.get(version)
        return record.state if record else None

    def sealed_info(self, version: Version) -> tuple[int, dict[str, PartInfo], str | None]:
        """Return slot, parts and digest of a sealed or committed version."""
        record = self._require(version, State.SEALED, "read", also=State.COMMITTED)
        return record.slot, record.parts, record.digest

    def error(self, version: Version) -> str | None:
        record = self._records.get(version)
        return record.error if record else None

    def lease(self, reader: Hashable, seconds: float, version: Version | None = None) -> Lease:
        """Lease a committed version, by default the newest, for `seconds`. Raises VersionError: nothing is committed,
        the named one is gone, or the reader was dropped.
        """
        if reader in self._dropped:
            raise VersionError(f"{reader} was given up for dead")
        newest = self._newest_staged
        wanted = version if version is not None else newest
        if wanted is None:
            raise VersionError("no version is committed yet")
        record = self._records.get(wanted)
        if record is None or record.state is not State.COMMITTED:
            raise VersionError(f"version {wanted} is not available (newest: {newest})")
        lease = Lease(
            id=next(self._ids),
            reader=reader,
            version=wanted,
            slot=record.slot,
            expires=self._clock() + seconds,
            parts=record.parts,
            digest=record.digest,
            location=record.location,
        )
        record.leases[lease.id] = lease
        return lease

    def nbytes(self, version: Version | None) -> int:
        """Return the bytes of a version in a slot, by default the newest; 0 where there is none."""
        record = self._records.get(version or self._newest_staged or Version(0, -1))
        return 0 if record is None else sum(info.nbytes for info in record.parts.values())

    def holds(self, lease_id: int) -> bool:
        """Return whether a lease has neither ended nor expired."""
        return any(lease_id in record.leases for record in self._records.values())

    def release(self, lease_id: int) -> bool:
        """End a lease, and return whether it was active."""
        return any(record.leases.pop(lease_id, None) is not None for record in self._records.values())

    def drop_reader(self, reader: Hashable) -> int:
        """End all leases of a dead reader, and return their number. It gets no further leases."""
        self._dropped.add(reader)
        return len(self._end_leases(lambda lease: lease.reader == reader))

    def expire(self) -> list[Lease]:
        """End the expired leases, and return them."""
        now = self._clock()
        return self._end_leases(lambda lease: lease.expires <= now)

    def _end_leases(self, which: Callable[[Lease], bool]) -> list[Lease]:
        ended = [lease for record in self._records.values() for lease in record.leases.values() if which(lease)]
        for lease in ended:
            self.release(lease.id)
        return ended

    @property
    def _newest_staged(self) -> Version | None:
        newest = self._newest.get(Place.SLOT)
        return newest.version if newest is not None else None

    def _seal(self, record: _VersionRecord) -> bool:
        if record.digested and record.parts.keys() == record.expected:
            record.state, record.parts = State.SEALED, SealedParts(record.parts)
            return True
        return False

    def _free_slot(self) -> int | None:
        self.expire()
        newest = self._newest_staged
        for record in sorted(self._records.values(), key=lambda record: record.version):
            idle = record.state is State.COMMITTED and record.version != newest and not record.leases
            if idle or record.state is State.FAILED:
                del self._records[record.version]
        taken = {record.slot for record in self._records.values()}
        return next((slot for slot in range(self._slots) if slot not in taken), None)

    def _require(self, version: Version, state: State, call: str, also: State | None = None) -> _VersionRecord:
        record = self._records.get(version)
        if record is None or record.state not in (state, also):
            found = "unknown" if record is None else record.state.value
            because = f" ({record.error})" if record is not None and record.error else ""
            raise VersionError(f"cannot {call} version {version}: it is {found}{because}")
        return record
