"""Exporting: the folder that comes out, what it is checked against, and what is left when it fails."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)

from tests.backends.engines import DEEPSEEK, KEPT
from tests.checkpoint import written
from tests.families import WITH_IMAGES
from trinity_sync.checkpoint import export as export_module
from trinity_sync.checkpoint.export import export_checkpoint
from trinity_sync.checkpoint.folder.commits import commit_folder, prepare_staging
from trinity_sync.checkpoint.folder.contents import Manifest
from trinity_sync.checkpoint.reading import Weights, WeightsError, open_weights
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.models.architecture import make_model
from trinity_sync.weights.tensors import saved_tensors, state_digest, version_tensors
from trinity_sync.weights.wire import WireFormat


def committed(root: Path, kind: str = "tied", step: int = 3, **manifest: Any) -> Path:
    """A full checkpoint of a small model in verl's files of two ranks; its digest is in bf16 unless one is given."""
    model = written.small_model(kind)
    actor = prepare_staging(root, step, 0) / "actor"
    written.write_companions(model, actor)
    written.write_verl(actor, model.state_dict(), (2,))
    digest = state_digest(saved_tensors(model), "BF16")
    commit_folder(root, Manifest(**({"step": step, "attempt": 0, "kind": "full", "digest": digest} | manifest)))
    return root / f"global_step_{step}"


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("largest", [5 * 10**9, 700])
@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_an_exported_folder_loads_with_equal_tensors(tmp_path: Path, kind: str, largest: int) -> None:
    done = export_checkpoint(committed(tmp_path, kind), tmp_path / "out", max_shard_bytes=largest)
    assert (len(done.files) > 1) == (largest == 700)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    expected = written.small_model(kind).bfloat16().state_dict()
    found = loaded.state_dict()
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_files_are_those_that_save_pretrained_writes(tmp_path: Path) -> None:
    export_checkpoint(committed(tmp_path), tmp_path / "out")
    written.small_model("tied").bfloat16().save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "theirs"))
    assert sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_config_generation_config_and_tokenizer_come_along(tmp_path: Path) -> None:
    step = committed(tmp_path)
    export_checkpoint(step, tmp_path / "out")
    assert left(tmp_path / "out") == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    GenerationConfig.from_pretrained(tmp_path / "out")
    before, after = ((folder / "config.json").read_text() for folder in (step / "actor/huggingface", tmp_path / "out"))
    assert after == before.replace('"dtype": "float32"', '"dtype": "bfloat16"') != before


def test_files_next_to_the_weights_come_along_as_they_are(tmp_path: Path) -> None:
    step = committed(tmp_path)
    files = {
        "generation_config.json": b'{"do_sample": false, "temperature": 0.6}',  # which transformers refuses to write
        "tokenizer_config.json": b'{"x": 1}  ',
        "modeling_mine.py": b"from .parts import layers\n",
        "parts/layers.py": b"",
        "config.json": (step / "actor/huggingface/config.json").read_bytes().replace(b"\n", b"\r\n"),
    }
    for name, data in files.items():
        (step / "actor/huggingface" / name).parent.mkdir(exist_ok=True)
        (step / "actor/huggingface" / name).write_bytes(data)
    export_checkpoint(step, tmp_path / "out", dtype="fp32")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files


def test_an_adapters_config_next_to_whole_weights_is_left_out(tmp_path: Path) -> None:
    step = committed(tmp_path)
    (step / "actor/huggingface/adapter_config.json").write_text('{"peft_type": "LORA"}')
    export_checkpoint(step, tmp_path / "out")
    assert "adapter_config.json" not in left(tmp_path / "out")


def test_large_models_get_an_index_and_files_below_the_limit(tmp_path: Path) -> None:
    done = export_checkpoint(committed(tmp_path), tmp_path / "out", max_shard_bytes=700)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.bytes
    assert sorted(set(index["weight_map"].values())) == list(done.files)
    for file in done.files:
        tensors = load_file(tmp_path / "out" / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == set(tensors)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 700


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32), ("as-saved", torch.float32)],
)
def test_the_dtype_can_be_chosen(tmp_path: Path, dtype: str, torch_dtype: torch.dtype) -> None:
    done = export_checkpoint(committed(tmp_path), tmp_path / "out", dtype=dtype)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch_dtype}
    assert done.digest == state_digest(tensors, None)
    assert done.digest == open_weights(tmp_path / "out").digest(None)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch_dtype


def test_a_weights_only_checkpoint_takes_its_config_from_another_step(tmp_path: Path) -> None:
    committed(tmp_path, step=2)
    model = written.small_model("tied")
    written.write_parts(tmp_path / "global_step_4" / "actor", saved_tensors(model), 2)
    export_checkpoint(tmp_path / "global_step_4", tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_without_any_config_one_has_to_be_named(tmp_path: Path) -> None:
    model = written.small_model("tied")
    written.write_parts(tmp_path / "global_step_4" / "actor", saved_tensors(model), 2)
    with pytest.raises(ConfigError, match=r"no config\.json of the model was found"):
        export_checkpoint(tmp_path / "global_step_4", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        export_checkpoint(tmp_path / "global_step_4", tmp_path / "out", config=tmp_path)
    model.save_pretrained(tmp_path / "model")
    export_checkpoint(tmp_path / "global_step_4", tmp_path / "out", config=tmp_path / "model")
    assert left(tmp_path / "out") == ["config.json", "generation_config.json", "model.safetensors"]


DRAFTS = {"model.layers.9.eh_proj.weight": torch.arange(6.0).reshape(2, 3)}


def with_drafts(folder: Path) -> dict[str, Any]:
    """A model's folder with draft heads, among others, and what the manifest of a run with it says of them."""
    folder.mkdir()
    save_file({**DRAFTS, "other": torch.ones(2)}, folder / "model.safetensors")
    return {"path": str(folder), "names": list(DRAFTS), "digest": state_digest(DRAFTS, None), "tower": []}


@pytest.fixture(scope="module")
def towered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A model with a vision tower, and its folder in which that has names as published."""
    folder = tmp_path_factory.mktemp("towered")
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("gemma3", **WITH_IMAGES["gemma3"])).bfloat16()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, model


@pytest.mark.parametrize("full", [True, False], ids=["full", "weights only"])
def test_a_vision_tower_is_exported_and_in_no_digest(
    tmp_path: Path, towered: tuple[Path, PreTrainedModel], full: bool
) -> None:
    """A full checkpoint holds it; else it comes from the model's folder, under the names that it has there."""
    folder, model = towered
    stored = load_file(folder / "model.safetensors")
    names = sorted(name for name in stored if name.startswith(("vision_tower.", "multi_modal_projector.")))
    still = state_digest({name: stored[name] for name in names}, None)
    told = {"path": str(folder), "names": names, "digest": still, "tower": names}
    actor = prepare_staging(tmp_path, 3, 0) / "actor"
    written.write_companions(model, actor)
    digest = state_digest(version_tensors(model), "BF16")
    if full:
        written.write_verl(actor, model.state_dict(), (2,))
        told["path"] = "/nowhere"
    else:
        written.write_parts(actor, version_tensors(model), 2)
    kind = "full" if full else "state_dict"
    commit_folder(tmp_path, Manifest(step=3, attempt=0, kind=kind, digest=digest, left_out=told))  # type: ignore[arg-type]
    done = export_checkpoint(tmp_path / "global_step_3", tmp_path / "out")
    assert (done.checked, done.digest, done.missing) == (digest, digest, ())
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(one, loaded[name]) for name, one in model.state_dict().items())


def test_draft_heads_come_along_from_the_models_folder_and_are_in_no_digest(tmp_path: Path) -> None:
    drafts = DRAFTS
    plain = export_checkpoint(committed(tmp_path / "plain"), tmp_path / "theirs")
    done = export_checkpoint(committed(tmp_path / "run", left_out=with_drafts(tmp_path / "model")), tmp_path / "out")
    assert (done.left_out, done.missing) == (tuple(drafts), ())
    assert (done.digest, done.checked) == (plain.digest, plain.checked)
    found, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "theirs"))
    assert found.keys() == theirs.keys() | drafts.keys()
    assert torch.equal(found["model.layers.9.eh_proj.weight"], drafts["model.layers.9.eh_proj.weight"])


@pytest.mark.parametrize(
    "told",
    [{"names": [*DRAFTS, "gone"]}, {"digest": "0" * 32}, {"names": ["other"]}, {"path": "/nowhere"}],
    ids=["gone", "changed", "another", "no folder"],
)
def test_nothing_is_taken_from_the_models_folder_that_is_not_as_the_manifest_says(
    tmp_path: Path, told: dict[str, Any]
) -> None:
    left_out = with_drafts(tmp_path / "model") | told
    done = export_checkpoint(committed(tmp_path / "run", left_out=left_out), tmp_path / "out")
    assert (done.left_out, done.missing) == ((), tuple(left_out["names"]))
    assert not load_file(tmp_path / "out" / "model.safetensors").keys() & {*DRAFTS, "other"}


# the digest


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_the_manifest_says_was_kept_in_fp32_is_exported_so(tmp_path: Path, dtype: str) -> None:
    tensors = saved_tensors(written.small_model("tied"))
    kept = next(name for name in tensors if name.endswith("norm.weight"))
    wire = WireFormat("BF16", frozenset({kept}))
    step = committed(tmp_path, digest=state_digest(saved_tensors(written.small_model("tied")), wire), wire=wire)
    done = export_checkpoint(step, tmp_path / "out", dtype=dtype)
    assert done.checked == state_digest(saved_tensors(written.small_model("tied")), wire)
    assert load_file(tmp_path / "out" / "model.safetensors")[kept].dtype == torch.float32
    assert (done.digest == done.checked) == (dtype == "bf16")


@pytest.mark.parametrize("wire", ["BF16", "F32", "F16"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_weights_have_the_manifests_digest_whatever_the_wire_dtype(tmp_path: Path, wire: str, dtype: str) -> None:
    digest = state_digest(saved_tensors(written.small_model("tied")), wire)
    done = export_checkpoint(committed(tmp_path, digest=digest), tmp_path / "out", dtype=dtype)
    assert done.checked == digest
    assert (done.digest == digest) == ((wire, dtype) in {("BF16", "bf16"), ("F32", "fp32")})


def test_what_the_class_keeps_in_fp32_is_exported_so_where_nothing_tells(tmp_path: Path) -> None:
    """Of a plain folder, and of a checkpoint whose manifest does not say its dtypes and has a digest in bf16."""
    model = make_model({"model_type": "deepseek_v3", **DEEPSEEK}, 3, tmp_path / "model")
    name, tensors = f"model.layers.1.mlp.gate.{KEPT}", load_file(model / "model.safetensors")
    tensors[name] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    export_checkpoint(model, tmp_path / "plain")
    actor = prepare_staging(tmp_path, 3, 0) / "actor"
    held = AutoModelForCausalLM.from_pretrained(model)
    written.write_companions(held, actor)
    written.write_verl(actor, held.state_dict(), (2,))
    digest = state_digest(saved_tensors(held), "BF16")
    commit_folder(tmp_path, Manifest(step=3, attempt=0, kind="full", digest=digest))
    assert export_checkpoint(tmp_path / "global_step_3", tmp_path / "old").checked == digest
    for folder in ("plain", "old"):
        assert torch.equal(load_file(tmp_path / folder / "model.safetensors")[name], tensors[name])


def test_weights_of_another_digest_are_not_exported(tmp_path: Path) -> None:
    step = committed(tmp_path, digest="0" * 32)
    with pytest.raises(RunError, match="its manifest says 00000000000000000000000000000000"):
        export_checkpoint(step, tmp_path / "out")
    assert [name for name in left(tmp_path) if "out" in name] == []


def test_without_a_digest_there_is_nothing_to_compare(tmp_path: Path) -> None:
    assert export_checkpoint(committed(tmp_path, digest=None), tmp_path / "out").checked is None


# what is refused, and what is left


def test_an_empty_folder_is_taken_and_a_full_one_refused(tmp_path: Path) -> None:
    step = committed(tmp_path)
    (tmp_path / "out").mkdir()
    export_checkpoint(step, tmp_path / "out")
    with pytest.raises(ConfigError, match="out is not empty"):
        export_checkpoint(step, tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file"):
        export_checkpoint(step, tmp_path / "file")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), WeightsError("torn")])
def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    step = committed(tmp_path)
    before = left(tmp_path)

    def fail(folder: Path, *rest: object) -> None:
        (folder / "model.safetensors").write_bytes(b"some")
        raise error

    monkeypatch.setattr(export_module, "write_file", fail)
    with pytest.raises(RunError if isinstance(error, OSError) else type(error)):
        export_checkpoint(step, tmp_path / "out")
    assert left(tmp_path) == before


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"max_shard_bytes": 0}])
def test_wrong_arguments_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        export_checkpoint(committed(tmp_path), tmp_path / "out", **wrong)


def test_tensors_are_held_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = []

    def read(weights: Weights, name: str) -> torch.Tensor:
        tensor = real(weights, name).clone()
        held.add(tensor)
        most.append(len(held))
        return tensor

    real = Weights.read
    monkeypatch.setattr(Weights, "read", read)
    done = export_checkpoint(committed(tmp_path, "experts"), tmp_path / "out")
    assert len(most) == done.tensors > 10
    # the one that was just written may still be there when the next is read
    assert max(most) <= 2


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = export_checkpoint(committed(tmp_path), tmp_path / "out", progress=lambda at, total: seen.append((at, total)))
    assert [at for at, _ in seen] == sorted({at for at, _ in seen})
    assert seen[-1] == (done.bytes, done.bytes)
