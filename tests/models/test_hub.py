"""Models of the hub, as its cache on this machine has them."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import transformers.utils.hub

from tests.backends.engines import SIZES
from trinity_sync.errors import ConfigError
from trinity_sync.models.architecture import make_model
from trinity_sync.models.files import cached_folder, local_folder
from trinity_sync.models.model_folder import _stored


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache has `org/tiny`; the hub itself is out of reach."""
    for where in (huggingface_hub.constants, transformers.utils.hub.constants):
        monkeypatch.setattr(where, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(where, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("1" * 40)
    return make_model({"model_type": "qwen3", **SIZES}, 3, repository / "snapshots" / ("1" * 40))


def test_a_folder_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert local_folder("m") == tmp_path / "m"


@pytest.mark.parametrize("shards", [False, True])
def test_a_model_of_the_hub_is_where_the_cache_has_it(snapshot: Path, shards: bool) -> None:
    if shards:
        (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00001.safetensors")
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    folder = local_folder("org/tiny")
    assert folder.samefile(snapshot)
    assert "model.norm.weight" in _stored(folder)


def test_what_the_hub_does_not_give_is_refused_by_name(snapshot: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path=org/other: "):
        local_folder("org/other")
    (snapshot / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"^model\.path=org/tiny: "):
        local_folder("org/tiny")


def test_the_cache_is_looked_into_without_a_question_to_the_hub(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cached_folder("org/tiny")
    assert found is not None
    assert found.samefile(snapshot)
    (snapshot / "config.json").unlink()
    assert cached_folder("org/tiny") == found  # a tokenizer's
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert cached_folder("m") == tmp_path / "m"
    assert [cached_folder(name) for name in ("org/other", "", "no such/name/at all", "/nowhere")] == [None] * 4
