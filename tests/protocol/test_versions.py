"""The version book under any order of calls: what readers see is whole, newest first, and no slot is shared or lost."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import State, Version, VersionBook, VersionError

PARTS = ("rank-00000", "rank-00001")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def committed(book: VersionBook, step: int) -> Version:
    version = Version(0, step)
    assert book.open(version, PARTS) is not None
    book.stage(version, {part: step for part in PARTS})
    book.digest(version, f"digest of {step}")
    book.commit(version)
    return version


@pytest.fixture
def book() -> VersionBook:
    return VersionBook(2, Clock())


def test_the_parts_of_a_sealed_version_are_pickled_once_for_all_of_its_readers(book: VersionBook) -> None:
    version, pickled = Version(0, 1), list[str]()

    class Part(str):
        def __reduce__(self) -> tuple[type[str], tuple[str]]:
            pickled.append(self)
            return str, (str(self),)

    book.open(version, PARTS)
    book.stage(version, {name: Part(name) for name in PARTS})  # type: ignore[misc]
    book.digest(version, "d")
    book.commit(version)
    sent = [pickle.loads(pickle.dumps(book.lease(name, 1.0))) for name in "abc"]
    assert [lease.parts for lease in sent] == [{name: name for name in PARTS}] * 3
    assert len(pickled) == len(PARTS)


def test_a_version_is_sealed_by_its_last_part_or_its_digest_whichever_comes_last(book: VersionBook) -> None:
    version = Version(0, 1)
    book.open(version, PARTS)
    assert not book.stage(version, {PARTS[0]: "a"})
    assert not book.digest(version, "d")
    assert book.stage(version, {PARTS[1]: "b"})
    assert book.sealed_info(version) == (0, {PARTS[0]: "a", PARTS[1]: "b"}, "d")


def test_an_unsealed_version_cannot_be_committed(book: VersionBook) -> None:
    version = Version(0, 1)
    book.open(version, PARTS)
    book.stage(version, {PARTS[0]: "a"})
    with pytest.raises(VersionError, match="cannot commit version 1: it is opened"):
        book.commit(version)
    assert book.newest is None


def test_a_lease_gives_version_parts_and_digest_together(book: VersionBook) -> None:
    committed(book, 3)
    lease = book.lease("explorer-0", 10)
    assert (lease.version, lease.digest, lease.parts) == (Version(0, 3), "digest of 3", dict.fromkeys(PARTS, 3))


def test_a_leased_slot_is_not_reused_until_the_lease_expires() -> None:
    clock = Clock()
    book = VersionBook(2, clock)
    committed(book, 1)
    book.lease("explorer-0", 10)
    committed(book, 2)
    assert book.open(Version(0, 3), PARTS) is None
    clock.now = 10
    assert book.open(Version(0, 3), PARTS) == 0


def test_a_reader_that_is_gone_holds_nothing(book: VersionBook) -> None:
    committed(book, 1)
    book.lease("explorer-0", 1e9)
    committed(book, 2)
    assert book.drop_reader("explorer-0") == 1
    assert book.open(Version(0, 3), PARTS) == 0


def test_a_lease_that_a_dead_reader_asked_for_comes_too_late_and_its_successor_keeps_its_own(book: VersionBook) -> None:
    dead, successor = RoundMember.new("explorer-0"), RoundMember.new("explorer-0")
    committed(book, 1)
    book.lease(dead, 1e9)
    held = book.lease(successor, 1e9)
    assert book.drop_reader(dead) == 1
    with pytest.raises(VersionError, match="explorer-0 was given up for dead"):
        book.lease(dead, 1e9)
    committed(book, 2)
    assert book.open(Version(0, 3), PARTS) is None
    assert book.drop_reader(dead) == 0
    assert book.release(held.id)
    assert book.open(Version(0, 3), PARTS) == 0


def test_a_lease_is_held_until_it_is_released_expires_or_its_reader_is_dropped() -> None:
    clock = Clock()
    book = VersionBook(2, clock)
    committed(book, 1)
    released, expired, dropped = (book.lease(reader, 10.0).id for reader in ("a", "b", "c"))
    assert all(map(book.holds, (released, expired, dropped)))
    book.release(released)
    book.drop_reader("c")
    assert [*map(book.holds, (released, expired, dropped))] == [False, True, False]
    clock.now += 11.0
    book.expire()
    assert not book.holds(expired)


def test_a_failed_version_is_never_seen_and_its_slot_comes_back(book: VersionBook) -> None:
    committed(book, 1)
    book.open(Version(0, 2), PARTS)
    assert book.fail(Version(0, 2), "rank 1 died")
    with pytest.raises(VersionError, match="rank 1 died"):
        book.commit(Version(0, 2))
    assert book.lease("explorer-0", 1).version == Version(0, 1)
    assert book.open(Version(0, 3), PARTS) == 1


def test_versions_go_forward_only_attempts_first(book: VersionBook) -> None:
    committed(book, 5)
    with pytest.raises(VersionError, match="cannot be opened after version 5"):
        book.open(Version(0, 5), PARTS)
    assert book.open(Version(1, 3), PARTS) is not None


def test_a_part_reported_twice_counts_once_and_an_unknown_one_is_refused(book: VersionBook) -> None:
    version = Version(0, 1)
    book.open(version, PARTS)
    book.stage(version, {PARTS[0]: "a"})
    assert not book.stage(version, {PARTS[0]: "a"})
    with pytest.raises(VersionError, match="no part other"):
        book.stage(version, {"other": "x"})


def test_one_slot_is_too_few() -> None:
    with pytest.raises(ValueError, match="at least 2 slots"):
        VersionBook(1, Clock())


class Book(RuleBasedStateMachine):
    """Random interleavings against what must hold whatever happens."""

    versions = Bundle("versions")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.book = VersionBook(3, self.clock)
        self.step = 0
        self.newest: Version | None = None
        self.slots: dict[Version, int] = {}
        self.held: dict[int, tuple[Version, float]] = {}
        self.holders: dict[int, RoundMember] = {}
        self.readers = [RoundMember.new("reader")]

    @rule(target=versions)
    def open(self) -> object:
        version = Version(0, self.step + 1)
        slot = self.book.open(version, PARTS)
        if slot is None:
            return multiple()
        for lease_version, expires in self.held.values():
            if expires > self.clock.now:
                assert self.slots[lease_version] != slot, "a leased slot was handed out"
        assert self.newest is None or self.slots[self.newest] != slot, "the newest version's slot was handed out"
        self.step += 1
        self.slots[version] = slot
        return version

    @rule(version=versions, part=st.sampled_from(PARTS))
    def stage(self, version: Version, part: str) -> None:
        if self.book.state(version) in (State.OPENED, State.SEALED):
            self.book.stage(version, {part: version})

    @rule(version=versions)
    def digest(self, version: Version) -> None:
        if self.book.state(version) in (State.OPENED, State.SEALED):
            self.book.digest(version, str(version))

    @rule(version=versions)
    def commit(self, version: Version) -> None:
        may = self.book.state(version) is State.SEALED and (self.newest is None or version > self.newest)
        try:
            self.book.commit(version)
        except VersionError:
            assert not may
        else:
            assert may
            self.newest = version

    @rule(version=versions)
    def fail(self, version: Version) -> None:
        self.book.fail(version, "told to")

    @rule(version=versions)
    def discard(self, version: Version) -> None:
        if self.book.state(version) in (State.OPENED, State.SEALED):
            self.book.discard(version)
            assert self.book.state(version) is None

    @rule()
    def the_reader_is_started_again(self) -> None:
        dead = self.readers[-1]
        ended = [
            number
            for number, (_, until) in self.held.items()
            if self.holders[number] == dead and until > self.clock.now
        ]
        assert self.book.drop_reader(dead) >= len(ended)
        for lease in ended:
            assert not self.book.release(lease), "a lease outlived its holder"
            del self.held[lease]
        self.readers.append(RoundMember.new("reader"))

    @rule(data=st.data())
    def what_a_dead_one_asked_for_comes_late(self, data: st.DataObject) -> None:
        dead = data.draw(st.sampled_from(self.readers))
        if dead != self.readers[-1]:
            with pytest.raises(VersionError):
                self.book.lease(dead, 1000)
            assert self.book.drop_reader(dead) == 0

    @precondition(lambda self: self.newest is not None)
    @rule(target=leases, seconds=st.integers(1, 5))
    def lease(self, seconds: int) -> int:
        lease = self.book.lease(self.readers[-1], seconds)
        self.holders[lease.id] = self.readers[-1]
        assert lease.version == self.newest
        assert lease.parts == dict.fromkeys(PARTS, self.newest), "a lease mixes versions"
        assert lease.digest == str(self.newest)
        self.held[lease.id] = (lease.version, lease.expires)
        return lease.id

    @rule(lease=consumes(leases))
    def release(self, lease: int) -> None:
        self.book.release(lease)
        self.held.pop(lease, None)

    @rule(seconds=st.integers(1, 4))
    def pass_time(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def the_newest_is_what_was_committed_last(self) -> None:
        assert self.book.newest == self.newest
        if self.newest is not None:
            assert self.book.state(self.newest) is State.COMMITTED

    @invariant()
    def living_versions_never_share_a_slot(self) -> None:
        living = [v for v in self.slots if self.book.state(v) not in (None, State.FAILED)]
        assert len({self.slots[v] for v in living}) == len(living)


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
