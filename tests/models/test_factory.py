from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.explorer.helpers import ARCHITECTURE
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.models.architecture import CHARACTERS, make_model
from trinity_sync.weights.tensors import state_digest

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 30}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(ARCHITECTURE, 0, tmp_path_factory.mktemp("models") / "model")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# weights


def test_the_default_model_is_the_documented_one(made: Path) -> None:
    weights = load_file(made / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == 303_872
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(made)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert model.generation_config.eos_token_id == 2
    assert weights["lm_head.weight"].float().std().item() == pytest.approx(0.02, rel=0.05)


def test_the_same_seed_gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    assert contents(make_model(ARCHITECTURE, 0, tmp_path / "again")) == contents(made)


def test_another_seed_gives_other_weights(made: Path, tmp_path: Path) -> None:
    other = make_model(ARCHITECTURE, 1, tmp_path / "other")
    digests = {state_digest(load_file(path / "model.safetensors"), "BF16") for path in (made, other)}
    assert len(digests) == 2


def test_nobody_elses_random_numbers_change(tmp_path: Path) -> None:
    def draws() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    def seed_all() -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)

    seed_all()
    expected = draws()
    seed_all()
    make_model(ARCHITECTURE | SMALL, 0, tmp_path / "model")
    assert draws() == expected


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
def test_other_families_of_models_can_be_made(tmp_path: Path, model_type: str) -> None:
    path = make_model(ARCHITECTURE | SMALL | {"model_type": model_type, "head_dim": 4}, 0, tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(path).config.model_type == model_type


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    path = make_model(ARCHITECTURE | SMALL | {"tie_word_embeddings": True}, 0, tmp_path / "model")
    assert "lm_head.weight" not in load_file(path / "model.safetensors")


# the tokenizer


def test_there_is_one_token_per_character_and_one_character_per_token(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer(CHARACTERS)["input_ids"] == [1, *range(3, 25)]
    text = tokenizer.decode(range(32))
    assert len(text) == len(tokenizer) == 32
    assert text[3:25] == CHARACTERS


def test_responses_are_encoded_without_the_begin_token(made: Path) -> None:
    assert AutoTokenizer.from_pretrained(made)("61", add_special_tokens=False)["input_ids"] == [9, 4]


def test_prompts_are_padded_on_the_left(made: Path) -> None:
    batch = AutoTokenizer.from_pretrained(made)(["61=", "6"], padding=True)
    assert batch["input_ids"] == [[1, 9, 4, 13], [0, 0, 1, 9]]


@pytest.mark.parametrize("text", ["6 1", "6a", "6\n", "é"])
def test_an_unknown_character_is_not_dropped(made: Path, text: str) -> None:
    with pytest.raises(Exception, match="vocabulary"):
        AutoTokenizer.from_pretrained(made)(text)


# errors


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"model_type": "qwen33"}, r"model_type is 'qwen33', .* \(did you mean qwen3\?\)"),
        ({"model_type": None}, "model_type is None"),
        (
            {"hiden_size": 8},
            r"model\.architecture\.hiden_size: Qwen3Config has no such field \(did you mean hidden_size\?\)",
        ),
        ({"vocab_size": 24}, r"vocab_size is 24; the character tokenizer needs at least 25"),
        ({"eos_token_id": 5}, r"eos_token_id is 5; the character tokenizer has it at 2"),
        ({"hidden_size": "wide"}, "not one that Qwen3Config takes: .*hidden_size"),
        ({"hidden_act": "magic"}, "cannot build this qwen3 model: .*magic"),
    ],
)
def test_an_impossible_architecture_is_named_and_leaves_nothing(
    tmp_path: Path, change: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ConfigError, match=wrong):
        make_model(ARCHITECTURE | change, 0, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="Directory not empty"):
        make_model(ARCHITECTURE | SMALL, 0, tmp_path / "model")
    assert contents(tmp_path / "model") == {"notes.txt": b"mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_empty_folder_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for path in (tmp_path / "model", tmp_path / "runs" / "1" / "model"):
        assert (make_model(ARCHITECTURE | SMALL, 0, path) / "config.json").is_file()
