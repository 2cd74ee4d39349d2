"""Versions found over as a whole, in the book without a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.protocol.versions import Place, Version, VersionBook, VersionError, VersionPlace


def at(step: int, attempt: int = 0) -> Version:
    return Version(attempt, step)


def test_a_version_and_its_tensors_come_together() -> None:
    book = VersionBook(2, lambda: 0.0)
    assert (book.find(), book.newest) == (None, None)
    book.publish(at(3), "tensors 3")
    book.publish(at(4), "tensors 4")
    assert book.find() == VersionPlace(at(4), "tensors 4", None)


@pytest.mark.parametrize("late", [at(3), at(4), at(9, attempt=0)])
def test_labels_never_go_back(late: Version) -> None:
    book = VersionBook(2, lambda: 0.0)
    book.publish(at(4, attempt=1), "tensors")
    with pytest.raises(VersionError, match=f"version {late.step} cannot be published after version 4"):
        book.publish(late, "others")
    assert book.find() == VersionPlace(at(4, attempt=1), "tensors", None)


def test_a_new_attempt_may_publish_an_earlier_step() -> None:
    book = VersionBook(2, lambda: 0.0)
    book.publish(at(9), "abandoned")
    book.publish(at(4, attempt=1), "resumed")
    assert book.find() == VersionPlace(at(4, attempt=1), "resumed", None)


def test_the_last_checkpoint_serves_when_the_tensors_are_lost() -> None:
    book = VersionBook(2, lambda: 0.0)
    book.publish(at(6), "tensors 6")
    book.announce(at(5), "/run/global_step_5")  # its save took longer
    assert book.find() == VersionPlace(at(6), "tensors 6", None)
    assert book.lost(at(4)) == VersionPlace(at(6), "tensors 6", None)
    assert book.lost(at(6)) == VersionPlace(at(5), None, "/run/global_step_5")
    assert book.newest == at(5)


def test_nothing_serves_where_no_checkpoint_is_known() -> None:
    book = VersionBook(2, lambda: 0.0)
    book.publish(at(6), "tensors 6")
    assert book.lost(at(6)) is None


def test_a_version_in_memory_and_on_disk_says_both() -> None:
    book = VersionBook(2, lambda: 0.0)
    book.publish(at(6), "tensors 6")
    book.announce(at(6), "/run/global_step_6")
    assert book.find() == VersionPlace(at(6), "tensors 6", "/run/global_step_6")
    book.announce(at(7), "/run/global_step_7")
    assert book.find() == VersionPlace(at(7), None, "/run/global_step_7")


calls = st.lists(
    st.tuples(st.sampled_from(["publish", "announce", "lost"]), st.integers(0, 1), st.integers(0, 5)), max_size=30
)


@given(calls)
def test_what_is_handed_out_always_belongs_to_its_label(story: list[tuple[str, int, int]]) -> None:
    book = VersionBook(2, lambda: 0.0)
    for call, attempt, step in story:
        version = Version(attempt, step)
        if call == "publish":
            try:
                book.publish(version, version)
            except VersionError:
                assert book.latest is not None
                assert version <= book.latest
        elif call == "announce":
            book.announce(version, str(version))
        else:
            book.lost(version)
        found = book.find()
        assert (found.version if found else None) == book.newest
        if found is not None:
            assert found.state in (None, found.version)
            assert found.location in (None, str(found.version))


def staged(book: VersionBook, version: Version, location: str | None = None) -> int:
    """Bring a version through a slot; the number of the slot."""
    slot = book.open(version, ["rank-00000"])
    assert slot is not None
    book.stage(version, {"rank-00000": None})
    book.digest(version, None)
    book.commit(version, location)
    return slot


def test_versions_in_slots_and_whole_ones_have_one_newest() -> None:
    book = VersionBook(2, lambda: 0.0)
    staged(book, at(3), "/run/global_step_3")
    assert book.find() == VersionPlace(at(3), location="/run/global_step_3")
    book.publish(at(4), "tensors 4")
    assert (book.newest, book.location) == (at(4), "/run/global_step_3")
    staged(book, at(5))
    assert (book.find(), book.location) == (VersionPlace(at(5)), None)
    book.announce(at(6), place=Place.SENT)
    assert book.find() == VersionPlace(at(6))
    book.announce(at(6), "/run/global_step_6")
    assert (book.find(), book.location) == (VersionPlace(at(6), None, "/run/global_step_6"), "/run/global_step_6")
    assert book.lost(at(4)) == book.find()
    staged(book, at(7))
    book.announce(at(7), "/run/global_step_7")
    assert (book.find(), book.location) == (VersionPlace(at(7), None, "/run/global_step_7"), "/run/global_step_7")


def test_what_is_handed_over_whole_takes_no_slot_from_its_readers() -> None:
    book = VersionBook(2, lambda: 0.0)
    held = staged(book, at(3))
    book.publish(at(4), "tensors 4")
    assert book.lease("explorer-0", 1.0).version == at(3)
    book.drop_reader("explorer-0")
    assert book.open(at(5), ["rank-00000"]) not in (held, None)
    assert book.open(at(6), ["rank-00000"]) is None


def test_what_was_sent_does_not_go_back() -> None:
    book = VersionBook(2, lambda: 0.0)
    book.announce(at(2, attempt=1), place=Place.SENT)
    book.announce(at(9), place=Place.SENT)
    assert book.newest == at(2, attempt=1)
