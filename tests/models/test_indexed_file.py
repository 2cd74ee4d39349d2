"""Of a tensor in two files, the one that the index names counts: for the checks, for readers, and for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

from tests.checkpoint import written
from trinity_sync.checkpoint.reading import open_weights
from trinity_sync.explorer.hf import held_model
from trinity_sync.models import files as model_files
from trinity_sync.models.files import INDEX, IndexedFile, follow_indexes
from trinity_sync.models.model_folder import left_out
from trinity_sync.weights.tensors import saved_list


@pytest.fixture
def strayed(tmp_path: Path) -> tuple[Path, str, torch.Tensor]:
    """A folder with a second copy of a tensor in its last file; the tensor's name, and what the index finds of it."""
    written.small_model("untied").save_pretrained(tmp_path, max_shard_size="1KB")
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    first, *_, last = sorted(set(index.values()))
    name = next(name for name, file in index.items() if file == first)
    right = load_file(tmp_path / first)[name]
    save_file({**load_file(tmp_path / last), name: right + 5}, tmp_path / last, {"format": "pt"})
    return tmp_path, name, right


def test_readers_take_the_copy_that_the_index_names(strayed: tuple[Path, str, torch.Tensor]) -> None:
    folder, name, right = strayed
    assert open_weights(folder).read(name).equal(right)


def test_a_stray_copy_does_not_make_a_folder_an_odd_one(strayed: tuple[Path, str, torch.Tensor]) -> None:
    model = written.small_model("untied").to("meta")
    assert left_out(strayed[0], model, saved_list(model)) == ((), ())


def test_transformers_loads_the_copy_that_the_index_names(
    strayed: tuple[Path, str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name, right = strayed
    monkeypatch.setattr(modeling_utils, "safe_open", safe_open)  # is put back afterwards
    follow_indexes()
    assert AutoModelForCausalLM.from_pretrained(folder).state_dict()[name].equal(right)


def test_an_explorer_adds_an_adapter_to_the_copy_that_the_index_names(
    strayed: tuple[Path, str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name, right = strayed
    monkeypatch.setattr(modeling_utils, "safe_open", safe_open)
    model = held_model(
        AutoConfig.from_pretrained(folder),
        torch.float32,
        torch.device("cpu"),
        attn_implementation="eager",
        trust_remote_code=False,
        keep_fp32=None,
        weights=str(folder),
    )
    assert model.state_dict()[name].equal(right)


def test_a_file_that_the_index_does_not_know_is_read_whole(strayed: tuple[Path, str, torch.Tensor]) -> None:
    folder, name, right = strayed
    save_file({name: right}, folder / "model.safetensors", {"format": "pt"})
    with IndexedFile(folder / "model.safetensors", framework="pt") as opened:
        assert list(opened.keys()) == [name]


def test_an_index_is_read_once_for_all_files(
    strayed: tuple[Path, str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Mock(side_effect=json.loads)
    monkeypatch.setattr(model_files, "json", SimpleNamespace(loads=loads))
    (strayed[0] / INDEX).touch()
    open_weights(strayed[0])
    assert loads.call_count == 1


def test_a_broken_index_next_to_a_whole_file_does_not_matter(tmp_path: Path) -> None:
    written.small_model("untied").save_pretrained(tmp_path)
    (tmp_path / INDEX).write_text("{")
    assert len(open_weights(tmp_path)) == len(load_file(tmp_path / "model.safetensors"))
