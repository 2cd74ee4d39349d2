"""What is looked at of a model's folder before Ray starts, beyond what `tests.bad_inputs` has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_folders import bare_model
from trinity_sync.config import compose, typed
from trinity_sync.errors import ConfigError
from trinity_sync.launch.launcher import check_beforehand
from trinity_sync.models import files


def test_a_file_that_checkpoints_do_not_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1 << 20)
    folder = bare_model(tmp_path / "m")
    (folder / "film.mp4").write_bytes(bytes(2 << 20))
    check_beforehand(typed(compose([f"model.path={folder}"])))
    assert "model.path: checkpoints do not have film.mp4" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = bare_model(tmp_path / "m")
    (folder / "vocab.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"^model\.path: .*/m/vocab\.txt cannot be read"):
        check_beforehand(typed(compose([f"model.path={folder}"])))


def test_of_a_reference_no_file_is_kept(tmp_path: Path) -> None:
    folder = bare_model(tmp_path / "m")
    (folder / "vocab.txt").symlink_to(tmp_path / "nowhere")
    check_beforehand(typed(compose(["algorithm=grpo", f"algorithm.kl.reference={folder}"])))
