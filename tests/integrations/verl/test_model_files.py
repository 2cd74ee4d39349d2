"""The files that a verl program's checkpoints have: the folder's own, and what the program has changed in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer
from verl.workers.config import HFModelConfig

from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl.model_files import model_files
from trinity_sync.models.architecture import make_model
from trinity_sync.models.files import ModelFiles

SIZES = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose files transformers would not write so: old keys, a list of ends, sampling that is off."""
    path = make_model({"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 4, **SIZES}, 1, tmp_path / "model")
    body = json.loads((path / "config.json").read_text())
    del body["rope_parameters"]
    body |= {"rope_theta": 1000000.0, "eos_token_id": [2, 3]}
    (path / "config.json").write_text(json.dumps(body, indent=1))
    (path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    (path / "NOTICE").write_text("it")
    return path


def by_verl(folder: Path, **settings: Any) -> HFModelConfig:
    return HFModelConfig(path=str(folder), override_config={"attn_implementation": "sdpa"}, **settings)


def made(model: HFModelConfig) -> ModelFiles:
    return model_files(model.hf_config, model.get_processor())


def edited(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_what_verl_sets_for_its_own_work_changes_no_byte(folder: Path) -> None:
    assert made(by_verl(folder)) == ModelFiles.read(folder)


def test_draft_heads_stay_in_the_config(folder: Path) -> None:
    edited(folder, num_nextn_predict_layers=1)
    model = by_verl(folder)
    assert model.hf_config.num_nextn_predict_layers == 0
    assert made(model).config["num_nextn_predict_layers"] == 1


def test_what_the_program_changes_in_the_config_is_saved(folder: Path) -> None:
    model = by_verl(folder)
    model.hf_config.vocab_size = 48
    model.hf_config.update({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}})
    given = ModelFiles.read(folder).config
    scaling = {"rope_type": "linear", "factor": 2.0}
    assert made(model).config == given | {"vocab_size": 48, "rope_scaling": scaling}


def test_a_value_inside_a_config_is_changed_there(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma3", text_config={"hidden_size": 8, "num_hidden_layers": 1})
    config.save_pretrained(tmp_path)
    held = AutoConfig.from_pretrained(tmp_path)
    held.text_config.vocab_size = 48
    changed = model_files(held, None).config
    given = json.loads((tmp_path / "config.json").read_text())
    assert changed == given | {"text_config": given["text_config"] | {"vocab_size": 48}}


@pytest.mark.parametrize("change", ["template", "token"])
def test_a_tokenizer_that_the_program_changes_is_saved_as_it_is(folder: Path, tmp_path: Path, change: str) -> None:
    model = by_verl(folder, custom_chat_template="{{ messages }}" if change == "template" else None)
    if change == "token":
        model.tokenizer.add_tokens(["<think>"])
    made(model).write(tmp_path / "out")
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (saved.chat_template, saved.get_vocab()) == (model.tokenizer.chat_template, model.tokenizer.get_vocab())
    for name in ("config.json", "generation_config.json", "NOTICE"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_a_tokenizer_of_another_folder_comes_from_there(folder: Path, tmp_path: Path) -> None:
    other = make_model({"model_type": "qwen3", **SIZES, "num_key_value_heads": 1}, 1, tmp_path / "other")
    (other / "tokenizer_config.json").write_text((other / "tokenizer_config.json").read_text() + "\n\n")
    contents = made(by_verl(folder, tokenizer_path=str(other))).contents
    assert contents["tokenizer_config.json"] == (other / "tokenizer_config.json").read_bytes()
    assert contents["config.json"] == (folder / "config.json").read_bytes()


def test_a_model_without_a_folder_is_saved_as_it_is(tmp_path: Path) -> None:
    held = AutoConfig.for_model("qwen3", **SIZES)
    files = model_files(held, None)
    files.write(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == SIZES["vocab_size"]


def test_a_tokenizer_that_cannot_be_written_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = by_verl(folder)
    model.tokenizer.add_tokens(["<think>"])

    def refuse(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(model.tokenizer, "save_pretrained", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written, so no checkpoint could have it: no$"):
        made(model)


def test_a_folder_that_has_lost_its_config_is_none(folder: Path) -> None:
    model = by_verl(folder)
    (folder / "config.json").unlink()
    assert made(model).config["vocab_size"] == SIZES["vocab_size"]
