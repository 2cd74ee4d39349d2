"""Reading weights: the same tensors out of every format, and a clear word for every damaged one."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM

from tests.checkpoint import written
from tests.checkpoint.written import Tensors
from trinity_sync.checkpoint.folder.commits import commit_folder, prepare_staging
from trinity_sync.checkpoint.folder.contents import Manifest
from trinity_sync.checkpoint.reading import Weights, WeightsError, open_weights
from trinity_sync.weights.tensors import saved_tensors, state_digest

KINDS = ["tied", "untied", "experts"]


def assert_reads(weights: Weights, expected: Tensors) -> None:
    assert sorted(weights) == sorted(expected)
    for name, tensor in expected.items():
        found = weights.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found, tensor), name
        assert weights.info(name).shape == tuple(tensor.shape)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return tmp_path / "global_step_3"


# what is read


@pytest.mark.parametrize("mesh", [(1,), (2,), (5,), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_verls_files_hold_what_save_pretrained_would_write(step: Path, kind: str, mesh: tuple[int, ...]) -> None:
    model = written.small_model(kind)
    written.write_companions(model, step / "actor")
    written.write_verl(step / "actor", model.state_dict(), mesh)
    assert_reads(open_weights(step), saved_tensors(model))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_files_of_fsdp1_without_a_mesh_need_no_process_group(step: Path, ranks: int) -> None:
    state = {"a": torch.randn(7, 5), "b": torch.randn(7), "c": torch.randn(2, 1, 3)}
    written.write_fsdp1(step / "actor", state, ranks)
    assert not torch.distributed.is_initialized()
    assert_reads(open_weights(step), state)


def test_meshes_of_older_releases_of_torch_are_understood(step: Path) -> None:
    state = {"a": torch.randn(5, 3)}

    def as_before(rank: int, cut: dict[str, Any]) -> None:
        mesh = cut["a"].device_mesh
        vars(mesh)["mesh"] = mesh.mesh
        for name in ("_layout", "_rank_map"):
            del vars(mesh)[name]

    written.write_verl(step / "actor", state, (2, 2), as_before)
    assert_reads(open_weights(step), state)


def test_plain_tensors_are_held_whole_by_every_rank(step: Path) -> None:
    state = {"a": torch.randn(4, 3), "scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    written.write_verl(step / "actor", state, (2,))
    assert_reads(open_weights(step), state)


def test_of_files_of_two_sizes_the_config_names_the_ones(step: Path) -> None:
    old, new = {"a": torch.zeros(6)}, {"a": torch.ones(6)}
    written.write_verl(step / "actor", old, (3,))
    written.write_verl(step / "actor", new, (2,))
    assert_reads(open_weights(step), new)
    (step / "actor" / "fsdp_config.json").unlink()
    with pytest.raises(WeightsError, match="model files of 2 and of 3 ranks"):
        open_weights(step)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_only_checkpoints_are_read(step: Path, kind: str, ranks: int) -> None:
    saved = saved_tensors(written.small_model(kind))
    written.write_parts(step / "actor", saved, ranks)
    expected = {name: tensor.bfloat16() for name, tensor in saved.items()}
    weights = open_weights(step)
    assert_reads(weights, expected)
    assert weights.digest(None) == state_digest(saved, "BF16")


@pytest.mark.parametrize("mesh", [(1,), (2,), (2, 2)], ids=str)
def test_torchs_distributed_checkpoints_are_read(step: Path, mesh: tuple[int, ...]) -> None:
    model = written.small_model("experts")
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    others = {"optim.state.a": torch.ones(7), "optim.step": 3, "model._extra_state": b"none"}
    written.write_companions(model, step / "actor")
    written.write_distributed(step / "actor" / "dcp", {**state, **others}, mesh)
    assert_reads(open_weights(step), saved_tensors(model))


def test_distributed_checkpoints_of_sharded_tensors_are_read(step: Path) -> None:
    state = {"model.a": torch.randn(7, 5), "model.b": torch.randn(4)}
    written.write_distributed(step / "actor" / "dcp", state, (3,), written.sharded_tensors)
    assert_reads(open_weights(step), {name.removeprefix("model."): tensor for name, tensor in state.items()})


def test_what_torch_saves_by_itself_is_read(step: Path) -> None:
    from torch.distributed.checkpoint import save

    state = {"model": {"a": torch.randn(3, 4).bfloat16(), "b": torch.arange(5)}, "optim": {"a": torch.zeros(2)}}
    save(state, checkpoint_id=step / "actor" / "dcp", no_dist=True)
    assert_reads(open_weights(step), state["model"])


@pytest.mark.parametrize("largest", ["1GB", "1KB"])
def test_hugging_face_folders_are_read(tmp_path: Path, largest: str) -> None:
    model = written.small_model("tied")
    model.save_pretrained(tmp_path / "model", max_shard_size=largest)
    assert (tmp_path / "model" / "model.safetensors").exists() == (largest == "1GB")
    weights = open_weights(tmp_path / "model")
    assert_reads(weights, saved_tensors(model))
    assert weights.config == tmp_path / "model"


def test_of_a_folder_that_was_saved_over_the_file_is_read_that_transformers_loads(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    written.small_model("tied").save_pretrained(folder, max_shard_size="1KB")
    model = written.small_model("tied")
    torch.nn.init.ones_(model.get_input_embeddings().weight)
    model.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "model.safetensors").rename(folder / "model.safetensors")
    assert_reads(open_weights(folder), saved_tensors(model))
    loaded = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings()
    assert loaded.weight.detach().eq(1).all()


@pytest.mark.parametrize("where", ["", "actor"])
def test_a_checkpoint_is_named_by_its_step_or_its_actor_folder(step: Path, where: str) -> None:
    state = {"a": torch.randn(4)}
    written.write_verl(step / "actor", state, (2,))
    assert_reads(open_weights(step / where), state)


def test_a_checkpoint_without_a_config_takes_that_of_the_nearest_step(tmp_path: Path) -> None:
    for number in (1, 5, 9):
        actor = tmp_path / f"global_step_{number}" / "actor"
        actor.mkdir(parents=True)
        if number != 5:
            written.write_companions(written.small_model("tied"), actor)
    written.write_parts(tmp_path / "global_step_5" / "actor", {"a": torch.ones(2)}, 1)
    assert open_weights(tmp_path / "global_step_5").config == tmp_path / "global_step_1" / "actor" / "huggingface"


def test_weights_of_an_architecture_that_transformers_lacks_keep_their_names(step: Path) -> None:
    state = {"a": torch.randn(4)}
    written.write_verl(step / "actor", state, (2,))
    (step / "actor" / "huggingface").mkdir()
    (step / "actor" / "huggingface" / "config.json").write_text('{"architectures": ["OwnModel"]}')
    assert_reads(open_weights(step), state)


# what is refused


def read_all(folder: Path) -> None:
    weights = open_weights(folder)
    for name in weights:
        weights.read(name)


def refused(folder: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        read_all(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


STATE = {"a": torch.arange(24.0).reshape(6, 4), "b": torch.arange(5.0)}

Damage = Callable[[list[Path]], object]


def cut_short(files: list[Path]) -> None:
    files[1].write_bytes(files[1].read_bytes()[:-200])


def saved_over(value: object) -> Damage:
    return lambda files: torch.save(value, files[1])


class Evil:
    """A pickle that would make a file called ``evil`` when it is read by an unpickler that runs anything."""

    def __reduce__(self) -> Any:
        return exec, ("open('evil', 'w').close()",)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (cut_short, "it is damaged or no file of weights"),
        (lambda files: files[1].write_bytes(b""), "it is damaged or no file of weights"),
        (lambda files: files[1].write_bytes(b"garbage" * 100), "it is damaged or no file of weights"),
        (lambda files: files[1].unlink(), "is missing: a model of 2 ranks needs the files of all"),
        (lambda files: shutil.copy(files[0], files[1]), "elements of a are missing, the first of [6, 4] at [3, 0]"),
        (saved_over({"a": torch.ones(3, 4)}), "hold different tensors, such as b"),
        (saved_over({"a": torch.ones(6, 5), "b": torch.ones(5)}), "a is F32 6x4 in"),
        (saved_over({"a": torch.ones(6, 4).half(), "b": torch.ones(5)}), "a is F32 6x4 in"),
        (saved_over({"a": torch.ones(6, 4), "b": torch.ones(5)}), "hold the same elements of a"),
        (saved_over({"a": torch.ones(6, 4), "b": 5}), "something else than tensors, such as 'b'"),
        (saved_over([torch.ones(2)]), "holds no state dict, but a list"),
        (saved_over({"a": Evil()}), "Unsupported global"),
    ],
)
def test_damaged_files_of_verl_are_named(
    step: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage, fault: str
) -> None:
    monkeypatch.chdir(step.parent)
    files = written.write_verl(step / "actor", STATE, (2,))
    damage(files)
    message = refused(step)
    assert fault in message
    assert files[0].name in message or files[1].name in message
    assert not Path("evil").exists()


def test_a_local_part_of_another_size_than_its_placement_says_is_refused(step: Path) -> None:
    def shrink(rank: int, cut: dict[str, Any]) -> None:
        cut["a"]._local_tensor = cut["a"]._local_tensor[:2].clone()

    written.write_verl(step / "actor", STATE, (2,), shrink)
    assert "holds [2, 4] of a, whose placement says [3, 4] of [6, 4]" in refused(step)


def test_a_placement_that_fsdp_does_not_make_is_refused(step: Path) -> None:
    from torch.distributed.tensor import Partial

    def alter(rank: int, cut: dict[str, Any]) -> None:
        mesh = cut["a"].device_mesh
        cut["a"] = DTensor.from_local(torch.ones(6, 4), mesh, [Partial()], run_check=False)

    written.write_verl(step / "actor", STATE, (2,), alter)
    assert "is none of FSDP's" in refused(step)


def test_tensors_cut_along_another_dimension_are_put_together(step: Path) -> None:
    def alter(rank: int, cut: dict[str, Any]) -> None:
        local, mesh = STATE["a"].chunk(2, dim=1)[rank].clone(), cut["a"].device_mesh
        cut["a"] = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=STATE["a"].shape, stride=(4, 1))

    written.write_verl(step / "actor", STATE, (2,), alter)
    assert_reads(open_weights(step), STATE)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"hidden_size": 16}, "the config in"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "is missing"),
        ({"num_hidden_layers": 0, "layer_types": []}, "which is stored"),
        ({"num_attention_heads": "many"}, "does not describe a model that transformers can make"),
    ],
)
def test_a_config_of_another_model_is_refused(step: Path, change: dict[str, Any], fault: str) -> None:
    model = written.small_model("tied")
    written.write_companions(model, step / "actor")
    written.write_verl(step / "actor", model.state_dict(), (2,))
    config = step / "actor" / "huggingface" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    message = refused(step)
    assert fault in message
    assert str(config.parent) in message


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (cut_short, "is torn"),
        (lambda files: files[1].write_bytes(b"garbage" * 100), "not a safetensors file"),
        (lambda files: files[1].unlink(), "elements of a are missing"),
        (lambda files: shutil.copy(files[0], files[0].with_name("weights_rank-00007.safetensors")), None),
        (lambda files: save_file({"a": torch.ones(2)}, files[1]), "is not a shard file"),
    ],
)
def test_damaged_parts_are_named(step: Path, damage: Damage, fault: str | None) -> None:
    damage(written.write_parts(step / "actor", STATE, 2))
    if fault is None:
        open_weights(step)  # a second copy of the same rows contradicts nothing
    else:
        assert fault in refused(step)


def test_parts_that_overlap_are_refused(step: Path) -> None:
    written.write_parts(step / "actor", STATE, 2)
    written.write_parts(step / "other", STATE, 3)
    shutil.copy(step / "other" / "weights_rank-00001.safetensors", step / "actor" / "weights_rank-00009.safetensors")
    assert "hold the same elements of a" in refused(step)


def metadata(files: list[Path]) -> Path:
    return files[0].parent / ".metadata"


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda files: metadata(files).unlink(), ".metadata is missing"),
        (lambda files: metadata(files).write_bytes(b"garbage"), "it is damaged"),
        (lambda files: metadata(files).write_bytes(metadata(files).read_bytes()[:-20]), "it is damaged"),
        (lambda files: metadata(files).write_bytes(pickle.dumps(Evil())), "names builtins.exec, which does not belong"),
        (lambda files: metadata(files).write_bytes(pickle.dumps({"a": 1})), "it is damaged"),
        (lambda files: files[1].unlink(), "is missing, which holds model."),
        (lambda files: files[1].write_bytes(files[1].read_bytes()[:-20]), "is torn"),
        (lambda files: files[1].write_bytes(b"x" * files[1].stat().st_size), "cannot be read, it is damaged"),
    ],
)
def test_damaged_distributed_checkpoints_are_named(
    step: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage, fault: str
) -> None:
    monkeypatch.chdir(step.parent)
    folder = step / "actor" / "dcp"
    written.write_distributed(folder, {f"model.{name}": tensor for name, tensor in STATE.items()}, (2,))
    damage(sorted(folder.glob("*.distcp")))
    assert fault in refused(step)
    assert not Path("evil").exists()


def test_a_distributed_checkpoint_without_a_model_is_refused(step: Path) -> None:
    written.write_distributed(step / "actor" / "dcp", {"optim.a": torch.ones(3)}, (1,))
    assert "lists no tensor below 'model.'" in refused(step)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (cut_short, "is damaged or no safetensors file"),
        (lambda files: files[1].unlink(), "is missing"),
        (
            lambda files: (
                shutil.copy(files[0], files[1]),
                (files[0].parent / "model.safetensors.index.json").unlink(),
            ),
            "both hold",
        ),
        (lambda files: shutil.copy(files[0], files[1]), "says that"),
        (lambda files: save_file({"x": torch.ones(2)}, files[1]), "says that"),
        (lambda files: (files[0].parent / "model.safetensors.index.json").write_text("{}"), "cannot be read"),
        (
            lambda files: (files[0].parent / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "../b"}}'
            ),
            "names of files next to it",
        ),
    ],
)
def test_damaged_hugging_face_folders_are_named(tmp_path: Path, damage: Damage, fault: str) -> None:
    written.small_model("untied").save_pretrained(tmp_path, max_shard_size="1KB")
    damage(sorted(tmp_path.glob("*.safetensors")))
    assert fault in refused(tmp_path)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ((), "holds no weights of a format that is read"),
        (("model/dist_ckpt/.metadata", "model/dist_ckpt/metadata.json"), "cannot be read without its config.json"),
        (("pytorch_model.bin",), "only those with safetensors are read"),
    ],
)
def test_what_is_not_read_is_named(step: Path, files: tuple[str, ...], fault: str) -> None:
    (step / "actor").mkdir(parents=True)
    for name in files:
        (step / "actor" / name).parent.mkdir(parents=True, exist_ok=True)
        (step / "actor" / name).write_text("{}")
    assert fault in refused(step)
    assert "is not a folder" in refused(step / "none")


def test_a_file_that_is_not_as_it_was_committed_is_found_by_its_size(tmp_path: Path) -> None:
    staging = prepare_staging(tmp_path, 3, 0)
    files = written.write_verl(staging / "actor", STATE, (2,))
    (staging / "actor" / "optim.pt").write_bytes(b"1234")
    commit_folder(tmp_path, Manifest(step=3, attempt=0, kind="full"))
    step = tmp_path / "global_step_3"
    (step / "actor" / "optim.pt").write_bytes(b"")  # not needed for the weights
    assert_reads(open_weights(step), STATE)
    with (step / "actor" / files[1].name).open("ab") as file:
        file.write(b"more")
    assert "is torn: it has" in refused(step)
    (step / "actor" / files[1].name).unlink()
    assert "is missing" in refused(step)


def test_reading_a_tensor_does_not_change_the_file(step: Path) -> None:
    written.write_parts(step / "actor", STATE, 2)
    open_weights(step).read("a").zero_()
    assert_reads(open_weights(step), {name: tensor.bfloat16() for name, tensor in STATE.items()})


def test_the_same_weights_have_one_digest_in_all_formats(tmp_path: Path) -> None:
    model = written.small_model("tied")
    written.write_companions(model, tmp_path / "verl" / "actor")
    written.write_verl(tmp_path / "verl" / "actor", model.state_dict(), (2,))
    written.write_parts(tmp_path / "parts" / "actor", saved_tensors(model), 2)
    model.save_pretrained(tmp_path / "hf")
    digests = {open_weights(tmp_path / name).digest("BF16") for name in ("verl", "parts", "hf")}
    assert digests == {state_digest(load_file(tmp_path / "hf" / "model.safetensors"), "BF16")}
