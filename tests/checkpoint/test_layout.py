"""The manifest and the names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xxhash

from trinity_sync.checkpoint.folder.contents import (
    Manifest,
    ManifestError,
    read_manifest,
    write_manifest,
)
from trinity_sync.host.durable import digest_file
from trinity_sync.protocol.parts import FileEntry

MANIFEST = Manifest(
    step=20,
    attempt=1,
    kind="full",
    backend="fsdp",
    world_size=2,
    created=12.5,
    digest="ab",
    config_digest="cd",
    metrics={"reward/mean": 0.5},
    files=(FileEntry("actor/a.pt", 3, "00"),),
)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST


def test_the_manifest_on_disk_has_the_documented_fields(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    body = json.loads((tmp_path / "manifest.json").read_text())
    assert set(body) == {
        *("format", "step", "attempt", "kind", "backend", "world_size", "created", "digest", "config_digest"),
        *("metrics", "files", "self"),
    }
    assert body["files"] == [{"path": "actor/a.pt", "bytes": 3, "xxh3_128": "00"}]
    own = body.pop("self")
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert own == xxhash.xxh3_128(canonical.encode()).hexdigest()


@pytest.mark.parametrize("field", ["step", "digest", "files", "created"])
def test_a_manifest_that_was_changed_is_refused(tmp_path: Path, field: str) -> None:
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    body = json.loads(path.read_text())
    body[field] = [] if field == "files" else 7
    path.write_text(json.dumps(body))
    with pytest.raises(ManifestError, match=r"manifest.json is not valid"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 2}', "\x00\x00"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError, match=r"manifest.json"):
        read_manifest(tmp_path)


def test_a_folder_without_a_manifest_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="not a committed checkpoint"):
        read_manifest(tmp_path)


def test_a_manifest_in_the_folder_of_another_step_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_21"
    folder.mkdir()
    write_manifest(folder, MANIFEST)
    with pytest.raises(ManifestError, match="step 20"):
        read_manifest(folder)


def test_metrics_that_are_not_finite_are_written_as_null(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest(step=1, attempt=0, kind="full", metrics={"a": float("nan"), "b": float("inf")}))
    assert read_manifest(tmp_path).metrics == {"a": None, "b": None}


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "manifest.json"])
def test_a_file_outside_its_folder_cannot_be_listed(path: str) -> None:
    with pytest.raises(ValueError, match="inside its folder"):
        FileEntry(path, 1, "00")


@pytest.mark.parametrize("size", [0, 1, (4 << 20) - 1, 4 << 20, (4 << 20) + 1])
def test_a_file_is_digested_whole(tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "f").write_bytes(data[:size])
    assert digest_file(tmp_path / "f", durable=True) == (size, xxhash.xxh3_128(data[:size]).hexdigest())
