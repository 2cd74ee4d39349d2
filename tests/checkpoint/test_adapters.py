"""Checkpoints of LoRA adapters: read from every format, exported for peft or merged, with their own base only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.checkpoint import written
from tests.families import FAMILIES
from trinity_sync.checkpoint.export import export_checkpoint
from trinity_sync.checkpoint.folder.catalog import verify
from trinity_sync.checkpoint.folder.commits import commit_folder, prepare_staging
from trinity_sync.checkpoint.folder.contents import (
    Base,
    Manifest,
    ManifestError,
    canonical_digest,
    parse_manifest,
    read_manifest,
)
from trinity_sync.checkpoint.folder.resume_point import noted_base
from trinity_sync.checkpoint.reading import WeightsError, open_weights
from trinity_sync.cli.main import main
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.weights.lora import is_adapter
from trinity_sync.weights.tensors import saved_tensors, state_digest
from trinity_sync.weights.wire import WireFormat

FORMATS = ("verl", "dcp", "parts")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of a model, in bf16."""
    written.small_model("tied").bfloat16().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted() -> Any:
    """The model with an adapter that changes it, in float32."""
    model = written.small_model("tied")
    for parameter in model.parameters():  # and no buffers
        parameter.data = parameter.data.bfloat16().float()
    wrapped = get_peft_model(model, LoraConfig(r=2, lora_alpha=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(11)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return wrapped


def adapter_of(model: Any) -> dict[str, torch.Tensor]:
    """What peft would save."""
    return {name.replace(".default", ""): value for name, value in model.state_dict().items() if is_adapter(name)}


def committed(
    root: Path, model_folder: Path, form: str = "verl", base_known: Base | None = None, **manifest: Any
) -> Path:
    """A checkpoint of the adapter, of two ranks where the format has ranks."""
    model = adapted()
    held = {name: value for name, value in model.state_dict().items() if is_adapter(name)}
    saved = adapter_of(model)
    actor = prepare_staging(root, 3, 0) / "actor"
    actor.mkdir()
    model.peft_config["default"].save_pretrained(actor)
    if form == "verl":
        written.write_verl(actor, held, (2,))
    elif form == "dcp":
        written.write_distributed(actor / "dcp", {f"model.{name}": value for name, value in held.items()}, (2,))
    else:
        written.write_parts(actor, saved, 2)
    found = base_known or Base(
        state_digest(saved_tensors(AutoModelForCausalLM.from_pretrained(model_folder)), "BF16"), str(model_folder)
    )
    fields = {"step": 3, "attempt": 0, "kind": "full", "digest": state_digest(saved, "BF16"), "base": found}
    commit_folder(root, Manifest(**(fields | manifest)))
    return root / "global_step_3"


@pytest.mark.parametrize("form", FORMATS)
def test_an_adapter_is_read_under_the_names_that_peft_saves(tmp_path: Path, base: Path, form: str) -> None:
    weights = open_weights(committed(tmp_path, base, form))
    assert weights.adapter
    expected = adapter_of(adapted())
    assert set(weights) == expected.keys()
    wire = "BF16" if form == "parts" else "F32"
    assert all(torch.equal(weights.read(name).float(), of_wire(tensor, wire)) for name, tensor in expected.items())


def of_wire(tensor: torch.Tensor, wire: str) -> torch.Tensor:
    return tensor.bfloat16().float() if wire == "BF16" else tensor


def test_an_export_loads_in_peft_and_computes_the_same(tmp_path: Path, base: Path) -> None:
    done = export_checkpoint(committed(tmp_path, base), tmp_path / "out", dtype="as-saved")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert done.checked == read_manifest(tmp_path / "global_step_3").digest
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "out"
    )
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, adapted().eval()(tokens).logits)
    assert noted_base(tmp_path / "out") == read_manifest(tmp_path / "global_step_3").base
    again = open_weights(tmp_path / "out")
    assert again.digest("BF16") == done.checked, "an export is read as well"


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_weights_without_a_full_step_are_exported_by_what_their_manifest_says(
    tmp_path: Path, base: Path, form: Literal["adapter", "merged"]
) -> None:
    """As `sync=checkpoint` writes them: the adapter's config lies in full checkpoints alone."""
    config = adapted().peft_config["default"]
    config.save_pretrained(tmp_path)
    digest = state_digest(saved_tensors(AutoModelForCausalLM.from_pretrained(base)), "BF16")
    known = Base(digest, str(base), adapter=json.loads((tmp_path / "adapter_config.json").read_text()))
    step = committed(tmp_path / "run" / "checkpoints", base, "parts", known, kind="state_dict")
    (step / "actor" / "adapter_config.json").unlink()
    export_checkpoint(step, tmp_path / "out", form=form)
    if form == "adapter":
        found = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert (found["r"], found["lora_alpha"]) == (2, 3)


def test_a_merged_export_is_what_peft_merges(tmp_path: Path, base: Path) -> None:
    export_checkpoint(committed(tmp_path, base), tmp_path / "out", form="merged")
    adapted().merge_and_unload().bfloat16().save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "theirs"))
    before = load_file(base / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-2, atol=1e-6)
    assert sum(not torch.equal(before[name], ours[name]) for name in ours) == 7
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


KEPT = "model.norm.weight"


@pytest.mark.parametrize("moved", [False, True])
def test_a_base_with_tensors_in_fp32_and_draft_heads_is_known_again(tmp_path: Path, base: Path, moved: bool) -> None:
    """Both are in its folder; the digest is of the trained model's tensors, in the dtypes that travel."""
    tensors = load_file(base / "model.safetensors")
    tensors[KEPT] = torch.nextafter(tensors[KEPT].float(), torch.tensor(2.0))  # no number of bf16
    drafts = {"model.layers.9.eh_proj.weight": torch.arange(6.0).reshape(2, 3)}
    save_file({**tensors, **drafts}, base / "model.safetensors", metadata={"format": "pt"})
    wire = WireFormat("BF16", frozenset([KEPT]))
    known = Base(state_digest(tensors, wire), str(base), wire=wire)
    left_out = {"path": str(base), "names": list(drafts), "digest": state_digest(drafts, None)}
    step = committed(tmp_path, base, base_known=known, left_out=left_out)
    if moved:
        base.rename(tmp_path / "moved")
    done = export_checkpoint(step, tmp_path / "out", form="merged", base=tmp_path / "moved" if moved else None)
    assert (done.left_out, done.missing) == (tuple(drafts), ())
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported.pop(next(iter(drafts))), drafts["model.layers.9.eh_proj.weight"])
    assert torch.equal(exported[KEPT], tensors[KEPT])
    assert done.digest == state_digest(exported, wire)


def test_nothing_of_a_base_is_left_out_where_no_manifest_knows_it(tmp_path: Path, base: Path) -> None:
    """As verl leaves an adapter."""
    step = committed(tmp_path, base)
    (step / "manifest.json").unlink()
    tensors, draft = load_file(base / "model.safetensors"), "model.layers.9.eh_proj.weight"
    tied = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file({**tensors, **tied, draft: torch.ones(2, 3)}, base / "model.safetensors", metadata={"format": "pt"})
    export_checkpoint(step, tmp_path / "out", form="merged", base=base)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {*tensors, draft}
    del tensors[KEPT]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"is not a whole \w+, which .* describes: it has no model\.norm\.weight"):
        export_checkpoint(step, tmp_path / "less", form="merged", base=base)


def test_a_base_whose_folder_has_a_tied_tensor_twice_is_known_again(tmp_path: Path, base: Path) -> None:
    step = committed(tmp_path, base)
    export_checkpoint(step, tmp_path / "once", form="merged")
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    done = export_checkpoint(step, tmp_path / "out", form="merged")
    assert done.digest == open_weights(tmp_path / "once").digest("BF16")


def test_an_adapter_in_another_wire_dtype_is_merged(tmp_path: Path, base: Path) -> None:
    wire = WireFormat("F16")
    step = committed(tmp_path, base, digest=state_digest(adapter_of(adapted()), wire), wire=wire)
    export_checkpoint(step, tmp_path / "out", form="merged")


def test_another_base_is_refused_with_both_digests(tmp_path: Path, base: Path) -> None:
    step = committed(tmp_path, base)
    other = written.small_model("tied")
    torch.nn.init.zeros_(other.model.norm.weight)
    other.save_pretrained(tmp_path / "other")
    known, found = (open_weights(folder).digest("BF16") for folder in (base, tmp_path / "other"))
    with pytest.raises(RunError, match=f"{known}.*{found}"):
        export_checkpoint(step, tmp_path / "out", form="merged", base=tmp_path / "other")
    assert not (tmp_path / "out").exists()
    export_checkpoint(step, tmp_path / "out", form="merged", base=base)


def test_a_base_that_is_gone_is_a_wrong_command(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = committed(tmp_path, base)
    base.rename(tmp_path / "moved")
    command = ["ckpt", "export", str(step), "--output", str(tmp_path / "out"), "--merged"]
    assert main(command) == 2
    assert f"{base} is not a folder; name it with --base DIR" in capsys.readouterr().err
    assert main([*command, "--base", str(tmp_path / "moved")]) == 0


def test_a_base_of_another_shape_is_refused_where_no_digest_is_known(tmp_path: Path, base: Path) -> None:
    step = committed(tmp_path, base, base=None)
    with pytest.raises(ConfigError, match="the manifest does not name it"):
        export_checkpoint(step, tmp_path / "out", form="merged")
    body = json.loads((base / "config.json").read_text())
    wider = type(written.small_model("tied"))(
        type(written.small_model("tied").config)(**body | {"intermediate_size": 6})
    )
    wider.save_pretrained(tmp_path / "narrow")
    with pytest.raises(WeightsError, match=r"it is for a .*mlp.* of .*12.*, the base has .*6"):
        export_checkpoint(step, tmp_path / "out", form="merged", base=tmp_path / "narrow")


def test_an_adapter_of_a_tied_output_layer_is_not_merged_and_the_layer_is_named(tmp_path: Path, base: Path) -> None:
    wrapped = get_peft_model(written.small_model("tied"), LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    said = r"for lm_head, and this model ties lm_head\.weight to model\.embed_tokens\.weight \(tie_word_embeddings"
    with pytest.raises(WeightsError, match=said):
        export_checkpoint(tmp_path / "adapter", tmp_path / "out", form="merged", base=base)


def test_an_adapter_of_fused_experts_is_not_merged_and_they_are_named(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_moe"](**FAMILIES["qwen3_moe"]))
    model.save_pretrained(tmp_path / "base")
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    config = wrapped.peft_config["default"]
    config.save_pretrained(tmp_path / "adapter")
    save_file(adapter_of(wrapped), tmp_path / "adapter" / "adapter_model.safetensors")
    file = tmp_path / "adapter" / "adapter_config.json"
    body = json.loads(file.read_text())
    plain = {
        key: value for key, value in body.items() if key not in ("target_parameters", "rank_pattern", "alpha_pattern")
    }
    file.write_text(json.dumps(plain))
    with pytest.raises(WeightsError, match=r"for model\.layers\.0\.mlp\.experts, which is fused experts: .*--adapter"):
        export_checkpoint(tmp_path / "adapter", tmp_path / "out", form="merged", base=tmp_path / "base")


def test_an_adapter_that_was_changed_is_not_exported(tmp_path: Path, base: Path) -> None:
    step = committed(tmp_path, base, digest="0" * 32)
    for form in ("adapter", "merged"):
        with pytest.raises(RunError, match="its manifest says 0000"):
            export_checkpoint(step, tmp_path / "out", form=form)  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()


def test_whole_weights_have_no_adapter_to_export(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ConfigError, match="holds whole weights and no LoRA adapter"):
        export_checkpoint(base, tmp_path / "out", form="merged")


def test_a_base_and_its_adapter_in_one_file_are_refused(tmp_path: Path) -> None:
    written.write_verl(tmp_path / "actor", adapted().state_dict(), (1,))
    with pytest.raises(WeightsError, match="together with a LoRA adapter"):
        open_weights(tmp_path)


def test_a_model_with_lora_in_a_layer_s_name_is_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OfItsOwn"]}))
    tensors = {"model.embed.weight": torch.zeros(4, 2), "model.layers.0.lora_gate.weight": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = open_weights(tmp_path)
    assert not weights.adapter
    assert set(weights) == tensors.keys()


def test_the_commands_tell_of_the_base(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = committed(tmp_path / "checkpoints", base)
    digest = read_manifest(step).base.digest  # type: ignore[union-attr]
    assert verify(step).ok
    assert main(["ckpt", "list", str(step)]) == 0
    assert f" on {digest}" in capsys.readouterr().out
    assert main(["ckpt", "inspect", str(step)]) == 0
    assert f"{digest}, {base}" in capsys.readouterr().out
    assert main(["ckpt", "diff", str(step), str(step)]) == 0
    assert "equal" in capsys.readouterr().out
    assert main(["ckpt", "diff", str(base), str(step)]) == 2
    assert f"{step} holds a LoRA adapter and {base} whole weights" in capsys.readouterr().err
    assert main(["ckpt", "export", str(step), "--merged", "--output", str(tmp_path / "out")]) == 0
    assert "compare" not in capsys.readouterr().out, "the manifest's digests were compared with"


def test_a_manifest_keeps_its_base_and_others_have_none() -> None:
    with_base = Manifest(step=1, attempt=0, kind="full", base=Base("ab", "m"))
    assert parse_manifest(with_base.to_text(), "it", 1) == with_base
    with_adapter = replace(with_base, base=Base("ab", "m", adapter={"r": 2, "target_modules": ["q_proj"]}))
    assert parse_manifest(with_adapter.to_text(), "it", 1) == with_adapter
    in_dtypes = replace(with_base, base=Base("ab", "m", wire=WireFormat("BF16", frozenset(["n"]))))
    assert parse_manifest(in_dtypes.to_text(), "it", 1) == in_dtypes
    assert "base" not in replace(with_base, base=None).to_json()
    odd_wire = {"digest": "ab", "path": "m", "what": "lora", "wire": {"dtype": "BF16", "keep_fp32": "norm"}}
    odd_adapter = {"digest": "ab", "path": "m", "what": "lora", "adapter": ["r"]}
    for odd in (
        {"digest": 3, "path": "m", "what": "lora"},
        {"digest": "ab", "path": "m"},
        "ab",
        None,
        odd_wire,
        odd_adapter,
    ):
        body = with_base.to_json() | {"base": odd}
        del body["self"]
        with pytest.raises(ManifestError, match="is not valid"):
            parse_manifest(json.dumps(body | {"self": canonical_digest(body)}), "it", 1)


def test_a_manifest_says_what_is_left_out_in_texts_only() -> None:
    told = {"path": "m", "names": ["a", "b"], "digest": "ab", "tower": ["b"]}
    manifest = Manifest(step=1, attempt=0, kind="full", left_out=told)  # type: ignore[arg-type]
    assert parse_manifest(manifest.to_text(), "it", 1) == manifest
    for odd in ({"path": 3}, {"names": [1]}, {"names": "ab"}, {"digest": None}, {"tower": [1]}, {"tower": "b"}):
        body = manifest.to_json() | {"left_out": told | odd}
        del body["self"]
        with pytest.raises(ManifestError, match=r"is not valid: the (path|names|digest) of what its export takes"):
            parse_manifest(json.dumps(body | {"self": canonical_digest(body)}), "it", 1)
