"""The shapes of published models: read, cut, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.families import TEXT, WITH_IMAGES
from trinity_sync import config
from trinity_sync.backends import bytes_option
from trinity_sync.backends.option import backend_option
from trinity_sync.errors import ConfigError
from trinity_sync.models.shapes import (
    SIZES,
    adapter_list,
    bytes_by_layers,
    check_made_of,
    cut,
    empty_model,
    read_shapes,
    saved_shapes,
)
from trinity_sync.weights.lora import saved_name
from trinity_sync.weights.saved_views import SavedTensor

SMALL = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "vocab_size": 64,
}
BILLIONS = {"qwen3-0.6b": 0.596, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1}


@pytest.mark.parametrize("name", BILLIONS)
def test_published_shapes_have_the_parameters_that_the_model_is_named_for(name: str) -> None:
    whole, _ = cut(read_shapes(name), None)
    assert bytes_by_layers(saved_shapes(whole))[-1] / 2e9 == pytest.approx(BILLIONS[name], rel=0.005)


def test_the_experts_are_those_that_are_saved_one_by_one() -> None:
    _, left = cut(read_shapes("qwen3-30b-a3b"), 1)
    assert sum(".experts." in name for name in saved_shapes(left)) == 128 * 3


def test_bytes_by_layers_are_those_of_a_cut_model() -> None:
    sums = bytes_by_layers(saved_shapes(cut(SMALL, None)[0]))
    for layers in (1, 2, 3):
        assert bytes_by_layers(saved_shapes(cut(SMALL, layers)[1]))[-1] == sums[layers]


QWEN25 = {"text_config": TEXT | {"layer_types": None}, "vision_config": {"depth": 1, "num_heads": 2, "hidden_size": 32}}


@pytest.mark.parametrize("family", [*WITH_IMAGES, "qwen2_5_vl"])
def test_a_vision_tower_is_not_moved_and_the_language_model_is_cut(family: str) -> None:
    fields = {"model_type": family, **WITH_IMAGES.get(family, QWEN25)}
    whole, left = cut(fields, 1)
    both, one = saved_shapes(whole), saved_shapes(left)
    assert not [name for name in both if "vis" in name or "multi_modal" in name]
    sums = bytes_by_layers(both)
    assert (len(sums), sums[1], sums[2]) == (3, bytes_by_layers(one)[-1], bytes_by_layers(both)[-1])
    assert sums[1] < sums[2]
    with pytest.raises(ConfigError, match=r"model\.layers is 3, but the model has 2"):
        cut(fields, 3)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "names no model_type"),
        ('{"model_type": 3}', "names no model_type"),
        (None, "is not a file"),
    ],
)
def test_a_broken_file_is_refused_with_its_key(tmp_path: Path, content: str | None, text: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=text) as caught:
        config.check(config.compose(["workload=bytes", f"model.shapes={path}"]))
    assert str(caught.value).startswith("model.shapes")


def test_a_path_that_cannot_be_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^model\.shapes: x+ cannot be read"):
        read_shapes("x" * 300)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_type": "t5"}, "transformers has no causal language model of it"),
        ({**SMALL, "hidden_size": "big"}, "does not take this file"),
    ],
)
def test_a_file_of_another_kind_of_model_is_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.shapes: .*{text}"):
        cut(fields, None)


def test_what_transformers_cannot_make_is_refused_whatever_it_raises() -> None:
    _, left = cut({**SMALL, "pad_token_id": 99}, None)  # an assertion of torch's
    with pytest.raises(ConfigError, match=r"^model\.shapes: transformers makes no causal language model of this: "):
        saved_shapes(left)


def test_weights_that_are_moved_in_bf16_are_not_called_quantised() -> None:
    whole, _ = cut({**SMALL, "quantization_config": {"quant_method": "fp8"}}, None)
    assert "quantization_config" not in whole


@pytest.mark.parametrize("changed", [{"shapes": {**SMALL, "vocab_size": 128}}, {"layers": 2}, {"lora": {"rank": 2}}])
def test_a_run_goes_on_with_the_model_that_it_was_begun_with(tmp_path: Path, changed: dict[str, object]) -> None:
    typed = config.typed(config.compose(["workload=bytes", "model.shapes=qwen3-8b"]))
    option = backend_option(typed.backend)
    engine = {**option.engine_fields(typed), "shapes": SMALL, "layers": 1}
    option.make_model(engine, {}, 0, tmp_path)
    check_made_of(tmp_path, engine)
    with pytest.raises(ConfigError, match=rf"^model\.{next(iter(changed))} differs from that of"):
        check_made_of(tmp_path, {**engine, **changed})


def test_an_adapter_that_the_last_layers_lack_counts_for_all_layers() -> None:
    sums = bytes_by_layers({"model.layers.0.lora_A.weight": SavedTensor.as_held("BF16", (2, 3), "x")}, 3)
    assert sums == [0, 12, 12, 12]


def test_a_model_type_that_nobody_knows_and_too_many_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="'qwen99', which transformers does not know"):
        cut({"model_type": "qwen99"}, None)
    with pytest.raises(ConfigError, match=r"model\.layers is 4, but the model has 3"):
        cut(SMALL, 4)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.shapes=qwen3-8b"], "model.shapes is qwen3-8b, which is not trained"),
        (["workload=bytes"], "workload=bytes needs one"),
        (["model.layers=2"], "model.layers is 2, which cuts model.shapes"),
        (["workload=bytes", "model.shapes=qwen3-8b", "backend=fsdp2"], "backend is fsdp2, but workload=bytes"),
        (["backend=bytes"], "a part of workload=bytes"),
        (["workload=bytes", "model.shapes=qwen3-8b", "model.layers=37"], "model.layers is 37, but the model has 36"),
        (["workload=bytes", "model.shapes=qwen3-8b", "workload.changed=1.5"], "workload.changed is 1.5; must be at"),
        (["workload=bytes", "model.shapes=qwen3-8b", "trainer.schedule=free"], "set trainer.schedule=lockstep"),
        (["workload=bytes", "model.shapes=qwen3-8b", "model.lora.rank=4", "sync.what=merged"], "holds no base"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config.check(config.compose(overrides))


@pytest.mark.parametrize(
    ("overrides", "lora"),
    [
        ([], None),
        (["model.lora.rank=4"], {"rank": 4, "targets": "all-linear"}),
        (["model.lora.rank=4", "model.lora.targets=[q_proj]"], {"rank": 4, "targets": ["q_proj"]}),
    ],
)
def test_ranks_are_told_which_adapter_they_hold(overrides: list[str], lora: object) -> None:
    config.check(cfg := config.compose(["workload=bytes", "model.shapes=qwen3-8b", *overrides]))
    typed = config.typed(cfg)
    assert backend_option(typed.backend).engine_fields(typed)["lora"] == lora


def test_what_does_not_fit_is_refused_with_the_most_that_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config.compose(["workload=bytes", "model.shapes=qwen3-8b"])
    option = backend_option(config.typed(cfg).backend)
    engine = {**option.engine_fields(config.typed(cfg)), "shapes": SMALL}
    sums = bytes_by_layers(saved_shapes(cut(SMALL, None)[0]))
    monkeypatch.setattr(bytes_option, "available_memory", lambda: 5 * sums[2])
    with pytest.raises(ConfigError, match=r"model\.layers=2 is the most that fits"):
        option.make_model(engine, {}, 0, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    option.make_model({**engine, "layers": 2}, {}, 0, tmp_path / "model")
    sizes = json.loads((tmp_path / "model" / SIZES).read_text())
    assert sizes == {"bytes": sums[2], "bytes_whole": sums[3], "shapes": SMALL, "layers": 2, "lora": None}


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "mlp.down_proj"]])
def test_an_adapter_has_the_tensors_that_peft_would_make(tmp_path: Path, targets: str | list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    dense = {**SMALL, "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(cut(dense, None)[1]))
    found = adapter_list(empty_model(tmp_path, None, "meta"), 4, targets)
    wrapped = get_peft_model(
        empty_model(tmp_path, None, "cpu"), LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    )
    held = {name: tuple(tensor.shape) for name, tensor in wrapped.named_parameters() if "lora_" in name}
    assert held == {saved.held: saved.shape for saved in found.values()}
    assert found.keys() == {saved_name(name) for name in held}


def test_the_adapter_of_rank_16_is_at_most_a_fiftieth_of_a_small_model() -> None:
    whole, _ = cut(read_shapes("qwen3-0.6b"), None)
    adapter = saved_shapes(whole, {"rank": 16, "targets": "all-linear"})
    assert bytes_by_layers(adapter)[-1] <= 0.02 * bytes_by_layers(saved_shapes(whole))[-1]
