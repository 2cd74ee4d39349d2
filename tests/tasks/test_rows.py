from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from trinity_sync.errors import ConfigError
from trinity_sync.host.references import matched_files
from trinity_sync.tasks.pairs import PairsTask
from trinity_sync.tasks.rows import FileRows


def rows_of(path: Path, *, seed: int = 0, shuffle: bool = False) -> FileRows:
    return FileRows(path, seed=seed, shuffle=shuffle)


def written(folder: Path, content: str | bytes, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def numbered(folder: Path, count: int) -> Path:
    return written(folder, "".join(json.dumps({"n": number}) + "\n" for number in range(count)))


def numbers(file: FileRows, step: int, count: int) -> list[int]:
    return [row.values["n"] for row in file.following((step - 1) * count, count)]


# reading


def test_blank_lines_and_a_byte_order_mark_are_passed_over_and_lines_counted_with_them(tmp_path: Path) -> None:
    file = rows_of(written(tmp_path, b'\xef\xbb\xbf{"n": 0}\n\n  \r\n{"n": 1}'))
    assert [(row.number, row.values) for row in file.rows] == [(1, {"n": 0}), (4, {"n": 1})]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b'{"n": 1', "not JSON: "),
        (b"{'n': 1}", "not JSON: Expecting property name"),
        (b"[1, 2]", "a list; each line must be a JSON object"),
        (b'"n"', "a text; each line must be a JSON object"),
        (b"null", "NoneType; each line must be a JSON object"),
        (b'{"n": "\xff"}', "not UTF-8 at column 8"),
        (b'{"n": 1, "m": ', "not JSON: Expecting value at column 15"),
        (b'{"n": 1, "m": [1}', "not JSON: Expecting ',' delimiter at column 17"),
        (b"[", "Expecting value at column 2; where the file is one JSON document: jq -c '.[]' FILE"),
        (b"{\r", "where the file is one JSON document: jq -c '.[]' FILE"),
        (b'[{"n": 1}]', "a list; each line must be a JSON object; where the file is one JSON document: jq"),
        (b'{"n": 1, "m": {"k": 0}, "n": 1}', "the field 'n' is there twice"),
        (
            b'{"n": ' + b"[" * 1000 + b"]" * 1000 + b"}",
            "more than 200 lists and objects within one another at column 206",
        ),
        (b'{"[": "' + b"[" * 1000 + b'", "m": 1', "not JSON: Expecting ',' delimiter at column 1017"),
        (b'{"n": "' + b"1" * 5000 + b'", "m": -' + b"9" * 5000 + b"}", "of more than 4300 digits at column 5016"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, wrong: str) -> None:
    path = written(tmp_path, b'{"n": 0}\n\n' + line + b"\n")
    with pytest.raises(ConfigError) as caught:
        rows_of(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert wrong in str(caught.value)


@pytest.mark.parametrize("name", ["data.jsonl.gz", "DATA.JSONL.GZ", "data.jsonl"])
def test_lines_that_are_compressed_by_gzip_are_read(tmp_path: Path, name: str) -> None:
    assert numbers(rows_of(written(tmp_path, gzip.compress(b'{"n": 0}\n{"n": 1}\n'), name)), 1, 2) == [0, 1]


def test_a_compressed_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(b'{"n": 0}\n' * 1000)[:-20], "data.jsonl.gz")
    with pytest.raises(ConfigError, match=r"data\.jsonl\.gz cannot be read: "):
        rows_of(path)


@pytest.mark.parametrize(("start", "packed"), [(b"\x28\xb5\x2f\xfd", "Zstandard"), (b"PK\x03\x04", "a zip archive")])
def test_of_another_compression_the_name_is_told(tmp_path: Path, start: bytes, packed: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.jsonl is compressed as {packed}; unpack it, or compress it by gzip"):
        rows_of(written(tmp_path, start + b"..."))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match=r"data.jsonl is empty; it must have one object per line"):
        rows_of(written(tmp_path, content))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.jsonl cannot be read: No such file"):
        rows_of(tmp_path / "none.jsonl")


def test_the_home_folder_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(tmp_path, 2)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert numbers(rows_of(Path("~/data.jsonl")), 1, 2) == [0, 1]


def test_parquet_rows_are_objects_too(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"q": ["a", "b"], "chat": [[{"role": "user", "content": "x"}], None]}), path)
    file = rows_of(path)
    assert [row.values["q"] for row in file.rows] == ["a", "b"]
    assert file.text_or_messages(file.rows[0], "chat") == ({"role": "user", "content": "x"},)
    with pytest.raises(ConfigError, match=r"data.parquet: row 2: the field 'chat' is null"):
        file.value(file.rows[1], "chat")


@pytest.mark.parametrize("name", ["DATA.PARQUET", "data", "data.parquet.gz"])
def test_a_parquet_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    parquet.write_table(pyarrow.table({"n": [0, 1]}), path)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert numbers(rows_of(path), 1, 2) == [0, 1]


BAD_TEXT = pyarrow.StringArray.from_buffers(
    3, pyarrow.array([0, 1, 3, 4], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"a\xff\xfeb")
)
BAD_DATE = pyarrow.array([0, 2**62, 0], pyarrow.timestamp("us"))


@pytest.mark.parametrize(
    ("bad", "told"), [(BAD_TEXT, "'utf-8' codec can't decode"), (BAD_DATE, "date value out of range")]
)
def test_a_value_of_parquet_that_cannot_be_read_is_refused_where_it_is_asked_for(
    tmp_path: Path, bad: Any, told: str
) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"n": [0, 1, 2], "q": bad}), path)
    file = rows_of(path)
    assert numbers(file, 1, 3) == [0, 1, 2]
    assert file.value(file.rows[2], "q")
    with pytest.raises(ConfigError, match=rf"data\.parquet: row 2: the column 'q' cannot be read: {told}"):
        file.value(file.rows[1], "q")


def test_a_column_that_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"n": [0], "q": ["a"]}), path)
    file = FileRows(path, seed=0, shuffle=False, columns=("q", "answer"))
    assert file.rows[0].values == {"q": "a"}
    with pytest.raises(ConfigError, match=r"row 1: there is no field 'answer'; there is: 'n', 'q'"):
        file.value(file.rows[0], "answer")


def test_a_map_of_parquet_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    parquet.write_table(pyarrow.table({"m": pyarrow.array([[("x", 1)]], kind)}), path)
    assert rows_of(path).rows[0].values == {"m": {"x": 1}}


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], ["n", "n"]), path)
    with pytest.raises(ConfigError, match=r"data\.parquet: the column 'n' is there twice"):
        rows_of(path)


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"n": pyarrow.array([], pyarrow.int64())}), path)
    with pytest.raises(ConfigError, match="one object per row"):
        rows_of(path)


def test_a_parquet_file_with_deep_columns_is_refused(tmp_path: Path) -> None:
    kind = pyarrow.int64()
    for _ in range(1000):
        kind = pyarrow.list_(kind)
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"n": pyarrow.array([None], kind)}), path)
    with pytest.raises(ConfigError, match=r"data.parquet cannot be read as Parquet: .* too deeply nested"):
        rows_of(path)


def test_what_is_no_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.parquet cannot be read as Parquet: "):
        rows_of(written(tmp_path, '{"n": 0}', "data.parquet"))


# several files


def test_rows_of_several_files_follow_in_the_order_given_and_those_of_a_pattern_by_name(tmp_path: Path) -> None:
    for name in "cab":
        written(tmp_path, f'{{"n": "{name}1"}}\n{{"n": "{name}2"}}\n', f"{name}.jsonl")
    paths = [tmp_path / "c.jsonl", str(tmp_path / "[ab].jsonl")]
    rows = FileRows(paths, seed=0, shuffle=False)
    assert [row.values["n"] for row in rows.rows] == ["c1", "c2", "a1", "a2", "b1", "b2"]
    assert [row.where for row in rows.rows[-2:]] == [f"{tmp_path}/b.jsonl:1", f"{tmp_path}/b.jsonl:2"]
    assert numbers(rows, 2, 4) == ["b1", "b2", "c1", "c2"]


def test_files_of_several_kinds_are_mixed_and_errors_have_the_words_of_each(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"n": [0], "q": BAD_TEXT[1:2]}), tmp_path / "a.parquet")
    packed = written(tmp_path, gzip.compress(b'{"n": 1}\r\n'), "b.jsonl.gz")
    rows = FileRows([tmp_path / "a.parquet", packed], seed=0, shuffle=False)
    assert numbers(rows, 1, 2) == [0, 1]
    assert [text.partition(":")[0] for text in rows.unread] == [f"{tmp_path}/a.parquet"]
    with pytest.raises(ConfigError, match=r"a\.parquet: row 1: the column 'q' cannot be read"):
        rows.value(rows.rows[0], "q")
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz:1: there is no field 'q'; there is: 'n'"):
        rows.value(rows.rows[1], "q")


def test_examples_of_several_files_with_the_same_lines_are_told_apart(tmp_path: Path) -> None:
    paths = [written(tmp_path, f'{{"prompt": "p", "response": "{name}"}}\n', name) for name in ("a", "b")]
    task = PairsTask(paths, "prompt", "response", 0)
    assert sorted(pair.response for pair in task.pairs(1, 2)) == ["a", "b"]
    task.leave_out([0])
    assert [where for where, _ in task.all_rows()] == [f"{tmp_path}/b:1"]


def test_a_file_with_the_signs_of_a_pattern_in_its_name_is_that_file(tmp_path: Path) -> None:
    named, other = written(tmp_path, '{"n": 0}', "d[1].jsonl"), written(tmp_path, '{"n": 1}', "d1.jsonl")
    assert matched_files(str(named)) == [str(named)]
    assert matched_files([str(tmp_path / "d*.jsonl")]) == [str(other), str(named)]


def test_a_file_and_links_to_it_that_match_one_pattern_are_one_file(tmp_path: Path) -> None:
    written(tmp_path, '{"n": 0}', "b.jsonl")
    (tmp_path / "a.jsonl").symlink_to("b.jsonl")
    assert matched_files(str(tmp_path / "*.jsonl")) == [str(tmp_path / "a.jsonl")]


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        (
            "none/*.jsonl",
            r"has none/\*\.jsonl, which does not exist and as a pattern matches no file; name an existing",
        ),
        ("gone[1].jsonl", r"has gone\[1\]\.jsonl, which does not exist and as a pattern matches no file"),
        ("*", r"has \*, which does not exist and as a pattern matches no file"),
        ([], "is an empty list; name a file"),
        (["x/a", "x/b", "./x/a"], r"has the file \./x/a twice, by x/a and by \./x/a; name it once"),
        (["x/link", "x/a"], "has the file x/a twice, by x/link and by x/a; name it once"),
        (["x/*", "x/*"], r"has the file x/a twice, by x/\*"),
        (["x/b", "x/*"], r"has the file x/b twice, by x/b and by x/\*; name it once"),
    ],
)
def test_a_pattern_without_files_and_a_file_named_twice_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: Any, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    for name in "ab":
        written(tmp_path / "x", '{"n": 0}', name)
    if "x/link" in paths:
        (tmp_path / "x" / "link").symlink_to("a")
    with pytest.raises(ConfigError, match=f"^the path of the rows {told}"):
        FileRows(paths, seed=0, shuffle=False)


# fields


def refused(folder: Path, value: Any, getter: str, key: str = "q") -> str:
    file = rows_of(written(folder, json.dumps({"q": value})))
    with pytest.raises(ConfigError) as caught:
        getattr(file, getter)(file.rows[0], key)
    return str(caught.value).removeprefix(f"{file.rows[0].where}: ")


def test_a_missing_field_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    assert refused(tmp_path, 1, "value", "answer") == "there is no field 'answer'; there is: 'q'"


@pytest.mark.parametrize(
    ("value", "wrong"),
    [(None, "is null"), (3, "is a number; it must be a text"), ([], "is a list;"), ("", "is an empty text")],
)
def test_what_is_no_text_is_refused_as_a_text(tmp_path: Path, value: Any, wrong: str) -> None:
    assert wrong in refused(tmp_path, value, "text")


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (3, "is a number; it must be a text or a list of chat messages"),
        ("", "is an empty text"),
        ([], "is an empty list"),
        (["hello"], "message 1 of the field 'q' must be an object"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 2 of the field 'q'"),
        ([{"role": "user", "content": 3}], "message 1 of the field 'q'"),
    ],
)
def test_what_is_neither_text_nor_chat_is_refused_as_a_prompt(tmp_path: Path, value: Any, wrong: str) -> None:
    assert wrong in refused(tmp_path, value, "text_or_messages")


# order


def test_without_shuffling_steps_go_through_the_file_and_begin_again(tmp_path: Path) -> None:
    file = rows_of(numbered(tmp_path, 5))
    assert [numbers(file, step, 3) for step in (1, 2, 3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


@given(size=st.integers(1, 12), count=st.integers(1, 30), seed=st.integers(0, 2**32 - 1))
def test_each_epoch_has_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, size: int, count: int, seed: int
) -> None:
    file = rows_of(numbered(tmp_path_factory.mktemp("rows"), size), seed=seed, shuffle=True)
    steps = -(-3 * size // count)
    drawn = [number for step in range(1, steps + 1) for number in numbers(file, step, count)]
    for epoch in range(3):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_the_order_is_a_function_of_seed_and_step(tmp_path: Path) -> None:
    path = numbered(tmp_path, 20)
    in_order, one_only = rows_of(path, seed=4, shuffle=True), rows_of(path, seed=4, shuffle=True)
    drawn = [numbers(in_order, step, 8) for step in range(1, 9)]
    assert numbers(one_only, 8, 8) == drawn[7]
    assert numbers(in_order, 2, 8) == drawn[1]


def test_epochs_and_seeds_have_orders_of_their_own(tmp_path: Path) -> None:
    path = numbered(tmp_path, 50)
    first, other = rows_of(path, seed=0, shuffle=True), rows_of(path, seed=1, shuffle=True)
    orders = [numbers(first, 1, 50), numbers(first, 2, 50), numbers(other, 1, 50), list(range(50))]
    assert len(set(map(tuple, orders))) == 4
