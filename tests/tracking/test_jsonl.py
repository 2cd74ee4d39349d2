from __future__ import annotations

import json
import math
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.tracking import synthetic
from trinity_sync.errors import RunError
from trinity_sync.tracking import json_lines
from trinity_sync.tracking.events import event_line_step

RECORDS = st.lists(
    st.dictionaries(st.text(max_size=4), st.one_of(st.integers(), st.text(max_size=6), st.booleans()), max_size=3),
    max_size=6,
)


def write(path: Path, records: list[dict[str, Any]]) -> None:
    writer = json_lines.JsonlWriter(path)
    for record in records:
        writer.append(record)
    writer.close()


@given(records=RECORDS)
def test_what_was_appended_is_read_in_order(tmp_path_factory: pytest.TempPathFactory, records: list[dict]) -> None:
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    write(path, records)
    assert json_lines.read(path) == records


@given(records=RECORDS, torn=st.integers(0, 200))
def test_a_log_cut_anywhere_reads_as_its_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict], torn: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    write(path, records)
    data = path.read_bytes()
    data = data[: len(data) - min(torn, len(data))]
    path.write_bytes(data)
    found = json_lines.read(path)
    assert found == records[: len(found)]
    assert len(found) >= data.count(b"\n")


@given(records=RECORDS, tail=st.binary(max_size=3), chunk=st.integers(1, 60))
def test_a_log_reads_the_same_in_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict], tail: bytes, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    write(path, records)
    with path.open("ab") as file:
        file.write(tail)

    def found() -> list[Any] | str:
        try:
            return json_lines.read(path)
        except RunError as error:
            return str(error)

    whole = found()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_lines, "_CHUNK", chunk)
        assert found() == whole


@pytest.mark.parametrize("tail", [b'{"step": 2', b"\x00\x00\x00", b'{"step": 2, "x": "\xc3'])
def test_a_writer_goes_on_after_the_last_whole_line(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail)
    write(path, [{"step": 3}])
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'


def test_a_whole_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}')
    write(path, [{"step": 2}])
    assert json_lines.read(path) == [{"step": 1}, {"step": 2}]


def test_a_torn_line_longer_than_one_block_is_cut_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\n{"x": "' + b"y" * 200_000)
    write(path, [])
    assert path.read_bytes() == b'{"step": 1}\n'


@given(records=RECORDS, count=st.integers(0, 8), torn=st.binary(max_size=5), long=st.sampled_from([0, 9000, 20000]))
def test_the_last_lines_are_read_without_the_others(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict], count: int, torn: bytes, long: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    write(path, [{**record, "long": "x" * long} for record in records])
    with path.open("ab") as file:
        file.write(torn.replace(b"\n", b"") if records else b"")
    everything, last = json_lines.read(path), json_lines.read_last(path, count)
    assert last == everything[len(everything) - len(last) :]
    assert len(last) >= min(count, len(records))
    assert len(last) * long <= (count + 1) * long + (1 << 14)


def test_damage_among_the_last_lines_is_told_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"x": "{"x" * 20000}"}}\n' * 3 + "nonsense\n{}\n")
    with pytest.raises(RunError, match=r"a\.jsonl, line 2 from its end is not a JSON object"):
        json_lines.read_last(tmp_path / "a.jsonl", 2)


def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"a\.jsonl, line 2"):
        json_lines.read(path)


@pytest.mark.parametrize(
    "lines", ['{"a": [{"b": 1}\n{"c": 2}]}', '{"a": 1}, {"b": 2}\n{"c": 3}', '{"a": [{}\n{}]}\n{"b": 1}, {"c": 2}']
)
def test_damaged_lines_that_would_be_whole_together_are_damaged(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{lines}\n{{"step": 1}}\n')
    with pytest.raises(RunError, match=r"a\.jsonl, line 1"):
        json_lines.read(path)


def test_a_log_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert json_lines.read(tmp_path / "none.jsonl") == []


def test_numbers_that_json_does_not_know_become_null_and_numpy_ones_plain(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [{"a": math.nan, "b": math.inf, "c": np.float32(0.5), "d": np.int64(3), "e": tmp_path}])
    assert json.loads(path.read_text()) == {"a": None, "b": None, "c": 0.5, "d": 3, "e": str(tmp_path)}


def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    writer = json_lines.JsonlWriter(Path("/dev/full"))
    with pytest.raises(RunError, match="/dev/full cannot be written: No space left"):
        writer.append({"step": 1})


def test_a_line_that_was_half_written_on_a_full_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    writer = json_lines.JsonlWriter(path)
    writer.append({"step": 1})
    real = json_lines.os.write

    def full(handle: int, data: memoryview) -> int:
        if len(data) < 8:
            raise OSError(28, "No space left on device")
        return real(handle, data[:-4])

    monkeypatch.setattr(json_lines.os, "write", full)
    with pytest.raises(RunError):
        writer.append({"step": 2})
    monkeypatch.undo()
    writer.append({"step": 3})
    assert json_lines.read(path) == [{"step": 1}, {"step": 3}]


def test_a_closed_writer_refuses(tmp_path: Path) -> None:
    writer = json_lines.JsonlWriter(tmp_path / "a.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(RunError, match="closed"):
        writer.append({})


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    writer = json_lines.JsonlWriter(path)
    threads = [
        threading.Thread(target=lambda name=name: [writer.append({"from": name, "n": n}) for n in range(50)])
        for name in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = json_lines.read(path)
    assert len(found) == 200
    for name in range(4):
        assert [record["n"] for record in found if record["from"] == name] == list(range(50))


def test_a_resume_cuts_the_metrics_of_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": step} for step in range(1, 9)])
    assert json_lines.cut_after(path, 5, key=json_lines.metrics_step) == 3
    assert [line["step"] for line in json_lines.read(path)] == [1, 2, 3, 4, 5]


EVENTS = [
    {"event": "publish", **synthetic.publish(0)},
    {"event": "publish", **synthetic.publish(7)},
    {"event": "load", **synthetic.load(5)},
    {"event": "load", **synthetic.load(6)},
    {"event": "commit", **synthetic.commit(5)},
    {"event": "commit", **synthetic.commit(10)},
    {"event": "prune", "step": 4, "reason": "r"},
    {"event": "prune", "step": 8, "reason": "r"},
    {"event": "generate", "step": 5, "version": 4, "explorer": "explorer-0"},
    {"event": "generate", "step": 6, "version": 4, "explorer": "explorer-0"},
    {"event": "fault", "where": "x", "error": "y", "step": 9},
]


def test_a_resume_cuts_the_events_of_later_versions_and_steps_but_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, EVENTS)
    json_lines.cut_after(path, 5, key=event_line_step)
    assert json_lines.read(path) == [EVENTS[index] for index in (0, 2, 4, 6, 8, 10)]


def test_a_resume_cuts_an_event_without_the_fields_of_this_release(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    agreement = {"event": "agreement", "step": 6, "tokens": 9, "mean": 0.1, "largest": 0.2, "bound": 0.3}
    write(path, [agreement])  # an earlier release named no explorer
    assert json_lines.cut_after(path, 5, key=event_line_step) == 1


def test_cutting_leaves_the_kept_lines_as_they_are_and_removes_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,  "x": 0.10}\n{"step": 2}\n{"step": 1, "x')
    json_lines.cut_after(path, 1, key=json_lines.metrics_step)
    assert path.read_bytes() == b'{"step":1,  "x": 0.10}\n'


def test_cutting_a_missing_log_leaves_it_missing(tmp_path: Path) -> None:
    assert json_lines.cut_after(tmp_path / "a.jsonl", 3, key=json_lines.metrics_step) == 0
    assert not (tmp_path / "a.jsonl").exists()


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("a last line without an end")
    (tmp_path / "log").symlink_to(tmp_path / "theirs")
    with pytest.raises(RunError, match="log cannot be written"):
        json_lines.JsonlWriter(tmp_path / "log")
    assert (tmp_path / "theirs").read_text() == "a last line without an end"


VALUES = st.one_of(
    st.integers(), st.floats(), st.text(max_size=4), st.booleans(), st.none(), st.lists(st.integers(), max_size=2)
)


@given(lines=st.lists(st.dictionaries(st.sampled_from("abc"), VALUES), max_size=12))
@example(lines=[{"a": 2**63}, {"a": 1}])
def test_packed_lines_are_those_that_were_put_in(lines: list[dict[str, Any]]) -> None:
    packed = json_lines.PackedRecords(lines)
    assert repr(list(packed)) == repr(lines)  # of nan and -0.0 too
    assert [list(map(type, line.values())) for line in packed] == [list(map(type, line.values())) for line in lines]
    assert repr(list(json_lines.column(packed, "a"))) == repr([line.get("a") for line in lines])
    assert repr(list(packed[::-1][:3])) == repr(lines[::-1][:3])
    if lines:
        packed[-1] = {"b": 1}
        assert repr(list(packed)) == repr([*lines[:-1], {"b": 1}])


def test_packed_events_are_of_their_classes_and_found_by_them() -> None:
    delta = synthetic.publish(2, changed=0.5, changed_ppm={"0": 7}, of_a_newer_release=[1, 2])
    made = {"publish": [synthetic.publish(1), delta], "load": [synthetic.load(1)], "dance": [{"steps": 3}]}
    events = [synthetic.event(name, time=1.5, **fields) for name, all_ in made.items() for fields in all_]
    packed = json_lines.PackedRecords(events)
    assert list(packed) == events
    for kind in {type(one) for one in events}:
        assert list(packed.of(kind)) == [one for one in events if isinstance(one, kind)]


def test_packed_lines_take_a_small_part_of_the_memory() -> None:
    def lines() -> Iterator[dict[str, Any]]:
        return ({"step": n, "attempt": 0, **{f"metric/{key}": n + key / 7 for key in range(40)}} for n in range(2000))

    def memory(make: Callable[[Iterator[dict[str, Any]]], object]) -> int:
        tracemalloc.start()
        kept = make(lines())
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        del kept
        return size

    assert memory(json_lines.PackedRecords) < memory(list) / 6
