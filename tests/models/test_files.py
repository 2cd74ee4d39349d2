"""The files of a model folder are kept as bytes, whatever they are; config.json changes in single values alone."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.errors import ConfigError
from trinity_sync.models import files as module
from trinity_sync.models.files import ModelFiles, check_alone, check_code

KEPT = {
    "config.json": b'{"model_type": "qwen3"}',
    "generation_config.json": b'{"do_sample": false, "temperature": 0.6}',
    "tokenizer.json": b"{}",
    "tokenizer.model": b"\x00\xff",
    "tokenizer_config.json": b"not json at all",
    "chat_template.jinja": "{{ '\u00e4' }}\r\n".encode(),
    "additional_chat_templates/tools.jinja": b"x",
    "modeling_mine.py": b"from .layers import L\n",
    "layers/deep/__init__.py": b"",
    "preprocessor_config.json": b"{}",
    "params.json": b"{}",
    "LICENSE": b"MIT",
    "README.md": b"# it",
}
LEFT = """
model.safetensors model-00001-of-00002.safetensors model.safetensors.index.json pytorch_model.bin tf_model.h5
pytorch_model.bin.index.json flax_model.msgpack rust_model.ot model.gguf onnx/model.onnx onnx/model.onnx_data
model.ckpt.index original/consolidated.00.pth MODEL.SAFETENSORS saved_model/1/saved_model.pb training_args.bin
adapter_config.json adapter_model.safetensors draft/adapter_config.json .gitattributes
.cache/huggingface/a.json optimizer.pt trainer_state.json rng_state_0.pth checkpoint-500/config.json
checkpoint-500/optimizer.pt latest global_step5/zero.json runs/now/events.out.tfevents.1.host zero_to_fp32.py
__pycache__/modeling_mine.py lost+found/x
"""


def folder_of(tmp_path: Path, contents: dict[str, bytes]) -> Path:
    folder = tmp_path / "model"
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_everything_but_weights_adapters_hidden_files_and_training_state_is_kept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, KEPT | dict.fromkeys(LEFT.split(), b"?"))
    assert ModelFiles.read(folder).contents == KEPT


def test_what_is_written_does_not_depend_on_the_folder_any_more(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, KEPT)
    files = ModelFiles.read(folder)
    folder.rename(tmp_path / "elsewhere")
    written = files.write(tmp_path / "out")
    assert {path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in written} == KEPT


def test_links_are_followed_and_lead_round_in_no_circle(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"config.json": b"{}", "code/a.py": b"a"})
    (folder / "code" / "up").symlink_to(folder)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "back").symlink_to(folder)
    (folder / "shared").symlink_to(tmp_path / "shared")
    (folder / "same").symlink_to(folder / "code")
    (tmp_path / "blob").write_bytes(b"vocab")
    (folder / "vocab.json").symlink_to(tmp_path / "blob")
    assert ModelFiles.read(folder).contents == {
        "config.json": b"{}",
        "code/a.py": b"a",
        "same/a.py": b"a",
        "vocab.json": b"vocab",
    }


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"config.json": b"{}"})
    os.mkfifo(folder / "pipe")
    assert list(ModelFiles.read(folder).contents) == ["config.json"]


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, KEPT)
    (folder / "vocab.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"model/vocab\.txt cannot be read, .*: No such file"):
        ModelFiles.read(folder)


def test_a_name_that_no_manifest_can_have_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"config.json": b"{}"})
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt")).touch()
    with pytest.raises(ConfigError, match=r"model has a file whose name is not UTF-8: '\\udcff\.txt'"):
        ModelFiles.read(folder)


def test_a_file_that_is_too_large_is_named_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 5)
    files = ModelFiles.read(folder_of(tmp_path, {"config.json": b"{}", "film.mp4": b"123456"}))
    assert (list(files.contents), files.too_large) == (["config.json"], ("film.mp4",))


def test_a_folder_with_far_more_than_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 5)
    folder = folder_of(tmp_path, {"config.json": b"{}", "data/1.parquet": b"1234"})
    with pytest.raises(
        ConfigError, match=r"model has more than 0 MB of files other than weights, such as data/1\.parquet"
    ):
        ModelFiles.read(folder)


CONFIG = """{
    "torch_dtype"  :  "float32",
  "rms_norm_eps": 1e-06, "name": "\\u00e4 {\\"torch_dtype\\": \\"float32\\"}", "eos_token_id": [1, 3],
  "text_config": {"dtype": "float16", "layers": [{"a": 1}], "deep": {"torch_dtype": "float32"}},
  "quantization_config": {"dtype": "float32"},
  "rope_theta": 1000000.0
}
\t"""


def test_a_dtype_changes_where_it_stands_and_nothing_else(tmp_path: Path) -> None:
    files = ModelFiles.read(folder_of(tmp_path, {"config.json": CONFIG.encode(), "a.txt": b"a"}))
    changed = files.with_dtype("bfloat16").contents
    expected = (
        CONFIG.replace('"torch_dtype"  :  "float32"', '"torch_dtype"  :  "bfloat16"')
        .replace('"dtype": "float16"', '"dtype": "bfloat16"')
        .replace('"deep": {"torch_dtype": "float32"}', '"deep": {"torch_dtype": "bfloat16"}')
    )
    assert changed["config.json"].decode() == expected
    assert changed["a.txt"] == b"a"


@pytest.mark.parametrize(
    "text", ['{"dtype":"bfloat16", "vision_config": {"dtype": "float32"}}', '{"torch_dtype": null}', "{ }"]
)
def test_a_config_that_names_the_dtype_or_none_stays_as_it_is(tmp_path: Path, text: str) -> None:
    files = ModelFiles.read(folder_of(tmp_path, {"config.json": text.encode()}))
    assert files.with_dtype("bfloat16").contents["config.json"] == text.encode()


@pytest.mark.parametrize("text", ["{}", ' { "a":1}', '{\n  "a": {"b": [2, "}"]},\n  "c": 3\n}\n'])
def test_a_value_is_set_or_added(tmp_path: Path, text: str) -> None:
    files = ModelFiles.read(folder_of(tmp_path, {"config.json": text.encode()}))
    values = {("vocab_size",): 7, ("a",): {"b": "\u00e4", "c": None}}
    assert files.with_values(values).config == json.loads(text) | {"vocab_size": 7, "a": {"b": "\u00e4", "c": None}}


def test_an_inner_value_is_set(tmp_path: Path) -> None:
    text = '{"a": {"x": 1}, "b": {"x": 1, "y": 2}}'
    files = ModelFiles.read(folder_of(tmp_path, {"config.json": text.encode()}))
    changed = files.with_values({("b", "x"): 5, ("b", "z"): 6}).contents["config.json"].decode()
    assert changed == '{"a": {"x": 1}, "b": {"z": 6, "x": 5, "y": 2}}'


def test_a_value_that_json_has_not_is_refused_with_its_key() -> None:
    files = ModelFiles({"config.json": b'{"a": 1}'})
    with pytest.raises(ConfigError, match=r"^config\.json cannot hold a=\{1\}"):
        files.with_values({("a",): {1}})


@pytest.mark.parametrize(("data", "why"), [(b"[1]", "is not"), (b"{", "cannot be read"), (b"\xff", "read")])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json .*{why}"):
        ModelFiles.read(folder_of(tmp_path, {"config.json": data})).with_dtype("bfloat16")


@pytest.mark.parametrize(
    ("file", "auto_map", "missed"),
    [
        ("config.json", {"AutoConfig": "there.C", "AutoModelForCausalLM": "gone.M", "AutoModel": "m.M"}, "gone.py"),
        ("tokenizer_config.json", {"AutoTokenizer": ["gone.T", None]}, "gone.py"),
        ("tokenizer_config.json", {"AutoTokenizer": ["there.T", "you/it--t.T"]}, None),
        ("config.json", "m.M", None),
    ],
)
def test_code_that_auto_map_names_is_missed(tmp_path: Path, file: str, auto_map: Any, missed: str | None) -> None:
    folder = folder_of(tmp_path, {file: json.dumps({"auto_map": auto_map}).encode(), "there.py": b""})
    told = rf"model/{file} names {missed} in auto_map, but that file is missing$"
    with nullcontext() if missed is None else pytest.raises(ConfigError, match=told):
        check_code(folder)


def test_a_model_folder_with_an_adapters_config_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, KEPT)
    check_alone(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model/adapter_config\.json makes transformers load a LoRA adapter"):
        check_alone(folder)
