"""The journal of a run's samples: what a run that goes on finds in it, and what it does with a damaged one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.samples.helpers import sample
from trinity_sync.samples.batch import SampleBatch, VersionSpans
from trinity_sync.samples.journal import Journal, UpdateGroupIds
from trinity_sync.samples.position import GroupId

Make = Callable[..., Journal]


@pytest.fixture
def faults() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, faults: list[str]) -> Iterator[Make]:
    """Makes the journal of an attempt; the one before has ended."""
    made: list[Journal] = []

    def of(attempt: int = 0, *, run: str = "run", made_with: str = "settings", most: int = 1 << 20) -> Journal:
        for earlier in made:
            earlier.close()
        made.append(
            Journal(
                tmp_path / "journal",
                run=run,
                made_with=made_with,
                attempt=attempt,
                most_bytes=most,
                fault=lambda where, error: faults.append(error),
            )
        )
        return made[-1]

    yield of
    for one in made:
        one.close()


def batch(step: int, *prompts: int, version: int | None = None, text: str = "text") -> SampleBatch:
    return SampleBatch.of(
        replace(
            sample(
                step=step,
                prompt=prompt,
                number=number,
                version=(0, step - 1 if version is None else version),
                reward=None if number else 0.5,
            ),
            text=text,
        )
        for prompt in prompts
        for number in range(2)
    )


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "journal").glob("*"))


def everything(group: GroupId) -> bool:
    return True


def rich() -> SampleBatch:
    """Samples with all that a batch may have."""
    made = replace(batch(1, 0, 1, text="ä\ud800\n"), explorers=np.array(["explorer-0", "e", "", "explorer-10"]))
    parts = {"format": np.array([0.5, np.nan, -0.0, 1.0]), "length": np.arange(4.0)}
    spans = VersionSpans.of([((0, 1, 0), (1, 2, 1)), ((0, 2, 0),), ((0, 2, 1),), ((0, 1, 0), (1, 2, 2))])
    return replace(made, parts=parts, spans=spans, errors=("", "it failed", "", ""))


def same(one: SampleBatch | None, other: SampleBatch) -> bool:
    return one is not None and list(one) == list(other) and one.explorers.tolist() == other.explorers.tolist()


# -- lockstep


def test_samples_of_the_same_prompts_and_weights_come_back_as_they_were(make: Make) -> None:
    made = batch(3, 0, 1)
    make().append(made, "digest")
    assert same(make(1).find(3, [0, 1], "digest"), made)


@pytest.mark.parametrize(("step", "prompts"), [(3, [0]), (3, [0, 1, 2]), (4, [0, 1])])
def test_other_prompts_are_not_found(make: Make, step: int, prompts: list[int]) -> None:
    make().append(batch(3, 0, 1), "digest")
    assert make(1).find(step, prompts, "digest") is None


def test_samples_of_other_weights_are_not_used_and_it_is_told_once(make: Make, faults: list[str]) -> None:
    make().append(batch(3, 0), "digest")
    again = make(1)
    assert again.find(3, [0], "other") is None
    assert again.find(3, [0], "other") is None
    (told,) = faults
    assert "step 3" in told
    assert "this attempt has other" in told


@pytest.mark.parametrize("changed", [{"run": "other"}, {"made_with": "other"}])
def test_a_journal_of_another_run_or_of_other_settings_is_removed(
    make: Make, tmp_path: Path, faults: list[str], changed: dict[str, str]
) -> None:
    make().append(batch(3, 0), "digest")
    assert make(1, **changed).find(3, [0], "digest") is None
    assert files(tmp_path) == []
    (told,) = faults
    assert "is deleted" in told


def test_a_commit_removes_what_no_run_needs_and_no_more(make: Make, tmp_path: Path) -> None:
    journal = make()
    for step in (1, 2):
        journal.append(batch(step, 0), "digest")
    journal.cut(1)  # the file has step 2 too
    journal.append(batch(3, 0), "digest")
    assert len(files(tmp_path)) == 2
    journal.cut(2)
    assert len(files(tmp_path)) == 1
    again = make(1)
    assert [again.find(step, [0], "digest") is None for step in (1, 2, 3)] == [True, True, False]


def test_a_file_of_an_earlier_attempt_is_removed_at_a_commit_too(make: Make, tmp_path: Path) -> None:
    make().append(batch(3, 0), "digest")
    make(1).cut(3)
    assert files(tmp_path) == []


def test_each_attempt_writes_files_of_its_own_also_when_it_is_the_same_again(make: Make, tmp_path: Path) -> None:
    for step in (1, 2):
        make(1).append(batch(step, 0), "digest")
    assert len(files(tmp_path)) == 2
    assert make(2).find(1, [0], "digest") is not None


@given(cut=st.integers(1, 400))
def test_a_torn_or_damaged_record_ends_a_file_and_what_comes_before_is_used(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder, told = tmp_path_factory.mktemp("journal"), list[str]()

    def journal(attempt: int) -> Journal:
        return Journal(
            folder,
            run="run",
            made_with="settings",
            attempt=attempt,
            most_bytes=1 << 20,
            fault=lambda where, error: told.append(error),
        )

    first = journal(0)
    first.append(batch(1, 0), "digest")
    first.append(batch(2, 0), "digest")
    first.close()
    (path,) = folder.iterdir()
    content = path.read_bytes()
    if cut % 2:
        path.write_bytes(content[:-cut])
    else:
        path.write_bytes(content[:-cut] + bytes([content[-cut] ^ 1]) + content[len(content) - cut + 1 :])
    again = journal(1)
    assert same(again.find(1, [0], "digest"), batch(1, 0))
    assert again.find(2, [0], "digest") is None
    (why,) = told
    assert str(path) in why


def test_a_file_that_a_full_disk_left_empty_is_no_other_run_s(make: Make, tmp_path: Path, faults: list[str]) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "000000-000000.samples").touch()
    make(1).cut(1)
    assert (faults, files(tmp_path)) == ([], [])


def test_a_file_that_cannot_be_read_is_told_and_the_run_generates_again(
    make: Make, tmp_path: Path, faults: list[str]
) -> None:
    make().append(batch(1, 0), "digest")
    (path,) = files(tmp_path)
    path.rename(path.with_suffix(".moved"))
    path.mkdir()
    assert make(1).find(1, [0], "digest") is None
    (told,) = faults
    assert str(path) in told


def test_a_record_that_is_damaged_after_the_start_is_told_and_generated_again(
    make: Make, tmp_path: Path, faults: list[str]
) -> None:
    make().append(batch(1, 0), "digest")
    again = make(1)
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert again.find(1, [0], "digest") is None
    assert "cannot be read" in faults[0]


def test_a_full_journal_is_told_once_and_goes_on_after_a_commit(make: Make, faults: list[str]) -> None:
    journal = make(most=4000)
    for step in range(1, 9):
        journal.append(batch(step, 0), "digest")
    (told,) = faults
    assert "samples.journal_mb" in told
    journal.cut(8)
    journal.append(batch(9, 0), "digest")
    again = make(1)
    assert again.find(9, [0], "digest") is not None
    assert again.find(8, [0], "digest") is None


def test_a_disk_that_cannot_be_written_is_told_once_and_the_run_goes_on(
    make: Make, tmp_path: Path, faults: list[str]
) -> None:
    (tmp_path / "journal").write_text("a file")
    journal = make()
    for step in (1, 2):
        journal.append(batch(step, 0), "digest")
    (told,) = faults
    assert "cannot be written" in told


def test_every_value_comes_back_bit_for_bit(make: Make) -> None:
    make().append(made := rich(), "digest")
    found = make(1).find(1, [0, 1], "digest")
    assert found is not None
    assert values(found) == values(made)


def values(one: object) -> list[object]:
    """Return all values below dataclasses, arrays as bytes in hex."""
    if isinstance(one, np.ndarray):
        return one.tolist() if one.dtype.kind == "U" else [one.tobytes().hex(), one.dtype.str]
    if isinstance(one, dict):
        return [value for name in sorted(one) for value in (name, *values(one[name]))]
    if is_dataclass(one):
        return [value for column in fields(one) for value in (column.name, *values(getattr(one, column.name)))]
    return [one]


# -- free

FIRST, SECOND, THIRD, FOURTH = (GroupId(1, prompt) for prompt in range(4))


def test_a_free_run_takes_the_same_groups_again_and_then_those_that_were_finished(make: Make) -> None:
    journal = make()
    journal.append(batch(1, 0, 1, 2, version=0), flat=[SECOND])
    journal.took(1, UpdateGroupIds([FIRST], [SECOND]))
    taken, finished = make(1).go_on(0, everything)
    assert taken == {1: UpdateGroupIds([FIRST], [SECOND], [])}
    assert {group: one.flat for group, one in finished.items()} == {FIRST: False, SECOND: True, THIRD: False}
    assert same(finished[THIRD].batch.take(finished[THIRD].rows), batch(1, 2, version=0))


def test_groups_of_versions_that_are_not_repeated_are_left_out_also_if_their_first_tokens_are_older(
    make: Make,
) -> None:
    mixed = replace(batch(1, 0, version=0), spans=VersionSpans.of([((0, 1, 0), (1, 2, 3)), ((0, 2, 0),)]))
    make().append(mixed)
    assert make(1).go_on(2, everything)[1] == {}
    make(2).append(mixed)
    assert set(make(3).go_on(3, everything)[1]) == {FIRST}


def test_a_group_whose_newest_samples_could_not_be_written_is_not_repeated_with_its_older_ones(
    make: Make, faults: list[str]
) -> None:
    journal = make(most=1900)
    journal.append(batch(1, 0, version=0, text="first"))
    journal.append(batch(1, 0, version=0, text="x" * 4000))
    journal.cut(0)
    journal.took(1, UpdateGroupIds([FIRST]))
    assert make(1).go_on(0, everything) == ({}, {})
    (told,) = faults
    assert "samples.journal_mb" in told


def test_a_full_journal_of_a_free_run_is_emptied_by_a_commit(make: Make, tmp_path: Path) -> None:
    journal = make(most=1900)
    for step in range(1, 6):
        journal.append(batch(1, step, version=0))
        journal.took(step, UpdateGroupIds([GroupId(1, step)]))
    journal.cut(5)
    assert files(tmp_path) == []
    journal.append(batch(2, 0, version=5))
    assert set(make(1).go_on(5, everything)[1]) == {GroupId(2, 0)}


def test_a_step_that_shares_a_group_with_an_earlier_one_is_of_another_history(make: Make) -> None:
    journal = make()
    journal.append(batch(1, 0, 1, version=0))
    for step, groups in ((1, [FIRST]), (2, [SECOND]), (3, [FIRST])):
        journal.took(step, UpdateGroupIds(groups))
    assert list(make(1).go_on(0, everything)[0]) == [1, 2]


def test_the_record_of_what_is_void_outlives_the_files_that_it_is_about(make: Make) -> None:
    journal = make()
    journal.append(batch(1, 0, 1, version=0))
    journal.took(9, UpdateGroupIds([FIRST]))
    second = make(1)
    second.go_on(0, everything)  # from scratch: step 1 is unknown
    second.took(1, UpdateGroupIds([SECOND]))
    second.cut(1)
    second.append(batch(9, 0, version=1))
    second.cut(8)
    assert make(2).go_on(8, everything)[0] == {}


def test_a_step_in_which_an_attempt_has_died_again_is_made_anew(make: Make) -> None:
    journal = make()
    journal.append(batch(1, 0, 1, version=0))
    journal.took(1, UpdateGroupIds([FIRST]))
    journal.took(2, UpdateGroupIds([SECOND]))
    assert list(make(1).go_on(0, everything)[0]) == [1, 2]
    taken, finished = make(2).go_on(0, everything)
    assert (list(taken), set(finished)) == ([1], {FIRST})


def test_a_disk_that_hangs_is_told_once_and_holds_nobody_else(
    make: Make, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.samples.journal._HANGS_S", 0.01)
    journal = make()
    with journal._lock:
        journal.append(batch(1, 0))
        journal.took(1, UpdateGroupIds([FIRST]))
        assert journal.find(1, [0], "digest") is None
    (told,) = faults
    assert "takes longer than" in told


def test_nothing_is_written_after_a_disk_has_hung_as_samples_may_be_missing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.samples.journal._HANGS_S", 0.01)
    journal = make()
    journal.append(batch(1, 0, version=0, text="first"))
    with journal._lock:
        journal.append(batch(1, 0, version=0, text="second"))
    journal.took(1, UpdateGroupIds([FIRST]))  # the second ones
    assert make(1).go_on(0, everything)[0] == {}


def test_what_a_full_journal_declares_void_stays_void(make: Make) -> None:
    journal = make()
    journal.append(batch(1, 0, 1, version=0))
    for step, group in ((1, FIRST), (3, SECOND)):
        journal.took(step, UpdateGroupIds([group]))
    full = make(1, most=1)
    assert list(full.go_on(0, everything)[0]) == [1]
    full.took(2, UpdateGroupIds([THIRD]))
    full.cut(2)
    assert make(2).go_on(2, everything)[0] == {}


def test_groups_that_cannot_be_read_after_the_start_are_made_again(
    make: Make, tmp_path: Path, faults: list[str]
) -> None:
    make().append(batch(1, 0, 1, version=0))
    again = make(1)
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert again.go_on(0, everything) == ({}, {})
    (told,) = faults
    assert "cannot be read" in told


def test_nothing_is_written_after_the_end(make: Make, tmp_path: Path) -> None:
    journal = make()
    journal.append(batch(1, 0, version=0))
    journal.close()
    before = [path.read_bytes() for path in files(tmp_path)]
    journal.append(batch(1, 1, version=0))
    journal.took(1, UpdateGroupIds([GroupId(1, 0)]))
    assert [path.read_bytes() for path in files(tmp_path)] == before != []


def test_a_run_that_is_over_leaves_no_journal(make: Make, tmp_path: Path) -> None:
    journal = make()
    journal.append(batch(1, 0, version=0))
    journal.close(remove=True)
    assert files(tmp_path) == []


def test_steps_after_a_gap_are_not_repeated_nor_the_samples_of_their_versions(make: Make) -> None:
    journal = make()
    journal.append(batch(1, 0, version=0))
    journal.append(batch(1, 1, version=2))
    journal.took(2, UpdateGroupIds([FIRST]))
    taken, finished = make(1).go_on(0, everything)
    assert taken == {}
    assert set(finished) == {FIRST}


def test_a_step_whose_groups_are_missing_is_not_repeated(make: Make) -> None:
    journal = make()
    journal.append(batch(1, 0, version=0))
    journal.took(1, UpdateGroupIds([FIRST]))
    journal.took(2, UpdateGroupIds([SECOND]))
    taken, _ = make(1).go_on(0, everything)
    assert list(taken) == [1]


def test_what_another_history_made_is_not_used_by_a_third_attempt(make: Make) -> None:
    journal = make()
    journal.append(batch(1, 0, 1, version=0))
    journal.append(batch(1, 2, version=2))
    journal.took(1, UpdateGroupIds([FIRST]))
    journal.took(3, UpdateGroupIds([SECOND]))  # step 2 is missing: the second attempt does it anew
    second = make(1)
    assert list(second.go_on(0, everything)[0]) == [1]
    second.took(2, UpdateGroupIds([SECOND]))
    taken, finished = make(2).go_on(0, everything)
    assert taken == {1: UpdateGroupIds([FIRST], [], []), 2: UpdateGroupIds([SECOND], [], [])}
    assert THIRD not in finished


def test_groups_that_were_trained_on_before_the_checkpoint_are_left_out_and_their_file_goes(
    make: Make, tmp_path: Path
) -> None:
    make().append(batch(1, 0, 1, version=0))
    again = make(1)
    _, finished = again.go_on(1, lambda group: group != FIRST)
    assert set(finished) == {SECOND}
    again.took(2, UpdateGroupIds([SECOND]))
    again.cut(2)
    assert files(tmp_path) == []


def test_a_group_that_was_made_again_is_used_as_it_was_made_last(make: Make) -> None:
    journal = make()
    journal.append(batch(1, 0, version=0, text="first"))
    journal.append(batch(1, 0, version=0, text="second"))
    _, finished = make(1).go_on(0, everything)
    one = finished[FIRST]
    assert {one.batch.texts[row] for row in one.rows.tolist()} == {"second"}


def test_a_commit_keeps_the_files_of_groups_that_are_still_to_be_trained_on(make: Make, tmp_path: Path) -> None:
    journal = make()
    journal.append(batch(1, 0, 1, version=0))
    journal.took(1, UpdateGroupIds([FIRST]))
    journal.cut(1)
    assert len(files(tmp_path)) == 1
    journal.took(2, UpdateGroupIds([SECOND]))
    journal.cut(2)
    assert files(tmp_path) == []


def test_the_version_of_a_group_is_its_oldest(make: Make) -> None:
    mixed = SampleBatch.concatenate([batch(1, 0, version=3), batch(1, 0, version=1)])
    make().append(mixed)
    _, finished = make(1).go_on(3, everything)
    assert finished[FIRST].version_step == 1
    assert np.array_equal(finished[FIRST].rows, range(4))
