"""A run goes on from a checkpoint of what it trains, on the base that it was trained on."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trinity_sync.checkpoint.folder.contents import Base, Manifest
from trinity_sync.checkpoint.folder.resume_point import check_adapter, check_base, check_kind, noted_base
from trinity_sync.errors import ConfigError
from trinity_sync.weights.wire import WireFormat

WHOLE = Manifest(step=2, attempt=0, kind="full")
ADAPTER = Manifest(step=2, attempt=0, kind="full", base=Base("ab" * 16, "models/base"))
FOLDER = Path("checkpoints/global_step_2")


def test_an_adapter_goes_on_as_an_adapter_and_a_model_as_a_model() -> None:
    check_kind(FOLDER, WHOLE, lora=False)
    check_kind(FOLDER, ADAPTER, lora=True)
    with pytest.raises(ConfigError, match="of a whole model, this run trains a LoRA adapter"):
        check_kind(FOLDER, WHOLE, lora=True)
    with pytest.raises(ConfigError, match="is of a LoRA adapter on models/base, this run trains the whole model"):
        check_kind(FOLDER, ADAPTER, lora=False)


def test_another_base_is_refused_with_both_digests_and_the_folder() -> None:
    check_base(FOLDER, ADAPTER.base, Base("ab" * 16, "elsewhere", wire=WireFormat("BF16")))
    with pytest.raises(ConfigError, match=f"{FOLDER}.*{'ab' * 16}.*{'cd' * 16}"):
        check_base(FOLDER, ADAPTER.base, Base("cd" * 16, "models/base", wire=WireFormat("BF16")))


def test_a_digest_of_other_dtypes_is_not_held_against_the_base() -> None:
    known = Manifest(
        step=2, attempt=0, kind="full", base=Base("ab" * 16, "m", wire=WireFormat("BF16", frozenset(["norm"])))
    )
    with pytest.raises(
        ConfigError, match=r"go on with the sync\.wire_dtype and sync\.keep_fp32 .* \(BF16, in fp32 norm\)"
    ):
        check_base(FOLDER, known.base, Base("cd" * 16, "m", wire=WireFormat("F32")))
    with pytest.raises(ConfigError, match="an adapter continues on its own base only"):
        check_base(FOLDER, known.base, Base("cd" * 16, "m", wire=WireFormat("BF16", frozenset(["norm"]))))


def test_another_rank_alpha_and_other_targets_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    path = tmp_path / "actor" / "adapter_config.json"
    path.write_text(json.dumps({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}))
    check_adapter(tmp_path, 4, 8, ["v_proj", "q_proj"])
    check_adapter(tmp_path, 4, 8, None)
    with pytest.raises(ConfigError, match=r"an adapter of rank 4, this run asks for model\.lora\.rank=8"):
        check_adapter(tmp_path, 8, 8, None)
    with pytest.raises(ConfigError, match=r"an adapter with alpha 8, this run asks for model\.lora\.alpha=16"):
        check_adapter(tmp_path, 4, 16, None)
    with pytest.raises(ConfigError, match=r"for \[q_proj, v_proj\], this run asks for model\.lora\.targets=\[q_proj\]"):
        check_adapter(tmp_path, 4, 8, ["q_proj"])
    path.write_text(json.dumps({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": True}))
    check_adapter(tmp_path, 4, 8, None, rslora=True)
    with pytest.raises(
        ConfigError, match=r"scaled by alpha / sqrt\(rank\), that of this run by alpha / rank; .*lora\.path"
    ):
        check_adapter(tmp_path, 4, 8, None)
    for broken in (
        "[]",
        '{"r": 4, "lora_alpha": 8, "target_modules": null}',
        '{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", 1]}',
    ):
        path.write_text(broken)
        with pytest.raises(ConfigError, match=r"adapter_config\.json cannot be read"):
            check_adapter(tmp_path, 4, 8, None)


@pytest.mark.parametrize(
    ("kept", "asked", "fits"),
    [
        (["model.language_model.layers.0.self_attn.q_proj", "v_proj"], ["q_proj", "v_proj"], True),
        (["q_proj", "v_proj"], ["self_attn.q_proj", "v_proj"], True),
        (["q_proj", "v_proj"], ["q_proj"], False),
        (["q_proj"], ["q_proj", "v_proj"], False),
        (["qq_proj"], ["q_proj"], False),
    ],
)
def test_targets_are_compared_by_the_ends_of_names(
    tmp_path: Path, kept: list[str], asked: list[str], fits: bool
) -> None:
    (tmp_path / "actor").mkdir()
    body = {"r": 4, "lora_alpha": 8, "target_modules": kept}
    (tmp_path / "actor" / "adapter_config.json").write_text(json.dumps(body))
    with nullcontext() if fits else pytest.raises(ConfigError, match="holds an adapter for"):
        check_adapter(tmp_path, 4, 8, asked)


def test_a_file_of_peft_notes_no_base_and_one_that_is_damaged_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    save_file({"a": torch.ones(1)}, file)
    assert noted_base(tmp_path) is None
    check_base(tmp_path, None, Base("cd" * 16, "m"))
    save_file({"a": torch.ones(1)}, file, metadata={"trinity_base": '{"digest": 3}'})
    with pytest.raises(ConfigError, match=r"model\.lora\.path=.*the base that .* was trained on cannot be determined"):
        noted_base(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.lora\.path=.*cannot be determined"):
        noted_base(tmp_path)
