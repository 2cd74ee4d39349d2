"""Names of places: what is refused before anything is tried, and what may be shown of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_sync.checkpoint.mirror.copies import Storage
from trinity_sync.host.masking import shown, without_secrets
from trinity_sync.host.urls import are_same, local_folder, place_problem


@pytest.mark.parametrize("place", ["far", "/mnt/far", "file:///mnt/far", "sftp://user@host:22/far"])
def test_places_that_can_be_named(place: str) -> None:
    assert place_problem(place) is None


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("", "empty"),
        ("~/far", "write the whole path"),
        ("memory://far", "name a place that stays"),
        ("file://far", "absolute path"),
        ("s4://bucket/far", "knows no s4://"),
        ("simplecache::s3://bucket/far", "chain"),
        ("simplecache://far", "over another one"),
        ("reference://far", "over another one"),
        ("zip://far", "over another one"),
    ],
)
def test_places_that_cannot_are_refused_with_a_reason(place: str, text: str) -> None:
    assert text in (place_problem(place) or "")


def test_a_client_that_is_not_installed_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def lacking(protocol: str) -> None:
        raise ImportError(f"no client for {protocol}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", lacking)
    assert "pip install 'trinity-sync[s3]'" in (place_problem("s3://bucket/far") or "")
    assert "adlfs" in (place_problem("abfs://container/far") or "")


def test_passwords_are_not_shown() -> None:
    place = "sftp://user:hunter2@host/far"
    assert shown(place) == "sftp://user:***@host/far"
    text = "login of user with hunter2 and k3y-of-mine was refused"
    assert without_secrets(text, place, {"secret": "k3y-of-mine"}) == "login of user with *** and *** was refused"


def test_passwords_are_not_shown_wherever_an_option_has_them_and_as_the_client_sees_them() -> None:
    options = {
        "client_kwargs": {"aws_secret_access_key": "k3y-of-mine", "region_name": "eu-west-1"},
        "hosts": [{"name": "first", "password": "hunter3"}, {"name": "second", "token": ["t0ken", {"value": "deep"}]}],
    }
    text = "p@ss-word, given as p%40ss-word, k3y-of-mine, hunter3, t0ken, deep; first, second in eu-west-1"
    told = without_secrets(text, "sftp://user:p%40ss-word@host/far", options)
    assert told == "***, given as ***, ***, ***, ***, ***; first, second in eu-west-1"


def test_where_a_place_is_on_this_machine() -> None:
    assert local_folder("/mnt/far") == local_folder("file:///mnt/far") == Path("/mnt/far")
    assert local_folder("s3://bucket/far") is None


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "far").write_text("a file")
    with pytest.raises(OSError):
        Storage(str(tmp_path / "far/inner")).write("x", "text")
    assert Storage(str(tmp_path / "none")).files() == {}


def test_a_folder_named_as_the_one_that_holds_it_is_listed_and_a_placeholder_of_itself_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = Storage("memory://of-itself/run")
    storage.write("run/run/name", "text")
    listed = storage._fs.ls

    def ls(path: str, detail: bool) -> list[dict[str, object]]:
        return [{"name": path, "type": "file", "size": 0}, *listed(path, detail=detail)]

    monkeypatch.setattr(storage._fs, "ls", ls)
    assert storage.folders() == ["run"]
    assert storage.files() == {"run/run/name": 4}


def test_a_folder_is_made_once_for_all_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, made = Storage("memory://made-once"), []
    monkeypatch.setattr(storage._fs, "makedirs", lambda path, exist_ok: made.append(path))
    for name in ("folder/one", "folder/two"):
        storage.write(name, "text")
    assert len(made) == 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("/mnt/run", "file:///mnt/run", True),
        ("/mnt/run/", "/mnt/other/../run", True),
        ("s3a://bucket/run", "s3://bucket/run/", True),
        ("gs://bucket/run", "s3://bucket/run", False),
        ("s3://bucket/run", "/bucket/run", False),
        ("/mnt/run", "/mnt/run/store", False),
    ],
)
def test_two_names_of_one_place_are_told(one: str, other: str, same: bool) -> None:
    assert are_same(one, other) == are_same(other, one) == same


def test_a_link_is_the_place_to_which_it_leads(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    assert are_same(str(tmp_path / "link"), f"file://{tmp_path}/there")
