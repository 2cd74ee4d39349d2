"""A verl program that trains with Megatron, with our checkpoint manager in its engine: two ranks, real engines."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from tests.backends.megatron_ranks import make_models
from tests.integrations.real_engines.megatron_workers import file_hashes, start
from tests.integrations.real_engines.ranks import LIMIT, START_LIMIT, every, outcomes
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.contents import read_manifest, read_tracker, step_dir
from trinity_sync.integrations.verl.program_run import VerlRun
from trinity_sync.protocol.parts import FULL, STATE_DICT

TREES = ("model/dist_ckpt", "optimizer/dist_ckpt", "extra/dist_ckpt")
# Saves of a verl program in parts: `test_manager.py` with FSDP, `tests/backends/test_megatron.py` the layouts.
pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def started(room: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    models = tmp_path_factory.mktemp("models")
    found = {"models": models, "ranks": start(models, 2)}
    make_models(models)
    yield found
    for rank in found["ranks"]:
        ray.kill(rank)


@pytest.fixture
def ranks(started: dict[str, Any]) -> Iterator[list[Any]]:
    """Two ranks; new ones where a test has killed some."""
    try:
        ray.get([rank.pid.remote() for rank in started["ranks"]], timeout=START_LIMIT)
    except RayActorError:
        for rank in started["ranks"]:
            ray.kill(rank)
        started["ranks"] = start(started["models"], 2)
        ray.get([rank.pid.remote() for rank in started["ranks"]], timeout=START_LIMIT)
    yield started["ranks"]
    for rank in started["ranks"]:
        try:
            ray.get(rank.heal.remote(), timeout=LIMIT)
        except RayActorError:
            continue


def actor_path(root: Path, step: int) -> str:
    return str(step_dir(root, step) / "actor")


def save(ranks: list[Any], layout: str, root: Path, step: int, **kwargs: Any) -> None:
    every(ranks, "by_engine", layout, "save_checkpoint", actor_path(root, step), global_step=step, **kwargs)


def load(ranks: list[Any], layout: str, root: Path, step: int) -> None:
    every(ranks, "by_engine", layout, "load_checkpoint", actor_path(root, step))


def save_by_verl(ranks: list[Any], layout: str, contents: list[str] | None, path: Path, step: int) -> None:
    """verl's own save, which starts processes."""
    calls = [rank.by_verl.remote(layout, "save_checkpoint", contents, str(path), None, step) for rank in ranks]
    ray.get(calls, timeout=START_LIMIT)


def wait(ranks: list[Any], layout: str) -> None:
    every(ranks, "manager", layout, "wait_on_save_thread")


def contents_of(folder: Path) -> dict[str, Any]:
    """What verl is told that the checkpoint consists of."""
    found: dict[str, Any] = json.loads((folder / "actor" / "ckpt_contents.json").read_text())["contents"]
    return found


def kept(root: Path) -> list[int]:
    return [info.step for info in catalog.scan(root)]


@pytest.mark.parametrize(
    ("layout", "trees"),
    [
        pytest.param("tp2", False, id="tp2-hugging-face"),
        *(
            pytest.param(name, trees, id=f"{name}-{'trees' if trees else 'hugging-face'}")
            for name, trees in (("tp2", True), ("pp2", True), ("dp2", True), ("dp2", False), ("tp2-same", True))
        ),
        pytest.param("dp2-late", True, id="dp2-late"),
        pytest.param("dp2-same", True, id="dp2-same"),
    ],
)
def test_a_checkpoint_is_verls_and_is_loaded_bit_for_bit(
    ranks: list[Any], run: VerlRun, root: Path, step: int, layout: str, trees: bool
) -> None:
    every(ranks, "use", layout, run.namespace, trees=trees)
    every(ranks, "train", layout, 0)
    every(ranks, "train", layout, 1)
    every(ranks, "draw", 100)
    before = every(ranks, "state", layout)
    save(ranks, layout, root, step)
    # Training goes on while the files are written, and must not show in them.
    every(ranks, "train", layout, 2)
    after = every(ranks, "state", layout)
    wait(ranks, layout)
    folder = step_dir(root, step)
    manifest = read_manifest(folder)
    assert (manifest.kind, manifest.world_size, manifest.backend) == (FULL, 2, "megatron")
    assert catalog.verify(folder).ok
    assert catalog.verify(folder).unlisted == ()
    assert read_tracker(root, FULL).step == step
    contents = json.loads((folder / "actor" / "ckpt_contents.json").read_text())
    assert (contents["schema_version"], contents["global_step"], contents["world_size"]) == (2, step, 2)
    for of in contents["contents"].values():
        assert any((folder / "actor" / of["path"]).iterdir()) if of["format"] != "json" else True
    assert (folder / "actor" / "model" / "huggingface" / "tokenizer.json").is_file()
    assert (folder / "actor" / "model" / "dist_ckpt").exists() == trees
    assert (folder / "actor" / "model" / "huggingface" / "model.safetensors").exists() != trees
    every(ranks, "draw", 7)
    load(ranks, layout, root, step)
    assert every(ranks, "state", layout) == before != after
    every(ranks, "train", layout, 2)
    assert every(ranks, "state", layout) == after


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
@pytest.mark.parametrize("trees", [True, False])
def test_verl_itself_loads_what_was_saved(
    ranks: list[Any], run: VerlRun, root: Path, step: int, layout: str, trees: bool
) -> None:
    # verl's load of a tree of the model uses up what its load of the optimizer needs.
    contents = ["model", "extra"] if trees else ["model", "optimizer", "extra"]
    every(ranks, "use", layout, run.namespace, contents, trees=trees)
    every(ranks, "train", layout, 0)
    every(ranks, "train", layout, 1)
    every(ranks, "draw_alike", 100)
    before = every(ranks, "state", layout)
    save(ranks, layout, root, step)
    every(ranks, "train", layout, 2)
    after = every(ranks, "state", layout)
    wait(ranks, layout)
    every(ranks, "draw", 7)
    every(ranks, "load_as_verl", layout, contents, actor_path(root, step))
    found = every(ranks, "state", layout)
    weights_and_generators = [(state[0], state[3]) for state in before]
    assert [(state[0], state[3]) for state in found] == weights_and_generators != [(s[0], s[3]) for s in after]
    if not trees:
        assert [state[1] for state in found] == [state[1] for state in before]


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
@pytest.mark.parametrize("trees", [True, False])
def test_what_verl_itself_saved_is_loaded_bit_for_bit(
    ranks: list[Any], run: VerlRun, root: Path, tmp_path: Path, layout: str, trees: bool
) -> None:
    every(ranks, "use", layout, run.namespace, trees=trees)
    every(ranks, "train", layout, 0)
    every(ranks, "train", layout, 1)
    every(ranks, "draw_alike", 100)
    before = every(ranks, "state", layout)
    save_by_verl(ranks, layout, None, tmp_path / "actor", 5)
    every(ranks, "train", layout, 2)
    after = every(ranks, "state", layout)
    files = file_hashes(tmp_path)
    every(ranks, "draw", 7)
    every(ranks, "by_engine", layout, "load_checkpoint", str(tmp_path / "actor"))
    assert every(ranks, "state", layout) == before != after
    assert file_hashes(tmp_path) == files
    every(ranks, "train", layout, 2)
    assert every(ranks, "state", layout) == after


def test_our_files_have_the_names_of_verls(
    ranks: list[Any], run: VerlRun, root: Path, step: int, tmp_path: Path
) -> None:
    contents = ["model", "optimizer", "extra", "hf_model"]
    every(ranks, "use", "tp2", run.namespace, contents)
    every(ranks, "train", "tp2", 0)
    save(ranks, "tp2", root, step)
    save_by_verl(ranks, "tp2", contents, tmp_path / "actor", step)
    wait(ranks, "tp2")
    ours, theirs = file_hashes(step_dir(root, step) / "actor"), file_hashes(tmp_path / "actor")
    shares = {name for name in {*ours, *theirs} if name.endswith(".distcp")}  # verl has two files for a rank
    assert ours.keys() - shares == theirs.keys() - shares
    same = {name for name in ours.keys() - shares if ours[name] == theirs[name]}
    assert "transformer_config.json" in same
    (of_ours, of_theirs) = (
        json.loads((folder / "ckpt_contents.json").read_text())
        for folder in (step_dir(root, step) / "actor", tmp_path / "actor")
    )
    assert of_ours.pop("layout") == {"tp": 2, "pp": 1, "dp": 1, "ep": 1, "optimizer_format": "fully_reshardable"}
    assert of_ours == of_theirs


def test_a_save_while_one_is_being_written_waits_for_it_and_each_holds_its_own_state(
    ranks: list[Any], run: VerlRun, root: Path, step: int
) -> None:
    every(ranks, "use", "tp2", run.namespace)
    states = []
    for number in range(3):
        every(ranks, "train", "tp2", number)
        states.append(every(ranks, "state", "tp2"))
        save(ranks, "tp2", root, step + number)
    every(ranks, "train", "tp2", 3)
    wait(ranks, "tp2")
    for number in (1, 0, 2):
        load(ranks, "tp2", root, step + number)
        assert every(ranks, "state", "tp2") == states[number]
    assert len({repr(state) for state in states}) == 3


def test_contents_that_are_left_out_are_not_written_and_not_loaded(
    ranks: list[Any], run: VerlRun, root: Path, step: int
) -> None:
    every(ranks, "use", "tp2", run.namespace, ["model", "extra"])
    every(ranks, "train", "tp2", 0)
    every(ranks, "train", "tp2", 1)
    weights = every(ranks, "weights", "tp2")
    save(ranks, "tp2", root, step)
    wait(ranks, "tp2")
    place = Path(actor_path(root, step))
    assert not (place / "optimizer").exists()
    every(ranks, "train", "tp2", 2)
    load(ranks, "tp2", root, step)
    assert every(ranks, "weights", "tp2") == weights
    # The optimizer goes on from the weights that were loaded, not from those that it had.
    assert every(ranks, "weights_after_a_step", "tp2") == weights
    every(ranks, "use", "tp2", run.namespace)
    for error in outcomes(ranks, "by_engine", "tp2", "load_checkpoint", str(place)):
        assert "has no optimizer/dist_ckpt; it has model/dist_ckpt, extra/dist_ckpt" in str(error)
    for error in outcomes(ranks, "by_engine", "tp2", "load_checkpoint", actor_path(root, step + 1)):
        assert f"{actor_path(root, step + 1)} is not there" in str(error)


def test_another_layout_says_what_is_wrong_and_loads_what_can_be_loaded(
    ranks: list[Any], started: dict[str, Any], run: VerlRun, root: Path, step: int
) -> None:
    for number, layout in enumerate(("tp2", "tp2-same")):
        every(ranks, "use", layout, run.namespace)
        every(ranks, "train", layout, 0)
        save(ranks, layout, root, step + number)
        wait(ranks, layout)
    every(ranks, "use", "dp2", run.namespace)
    said = "was saved with tp=2 pp=1 dp=1 ep=1, this engine has tp=1 pp=1 dp=2 ep=1"
    for error in outcomes(ranks, "by_engine", "dp2", "load_checkpoint", actor_path(root, step)):
        assert said in str(error)
        assert "leave 'extra' out of load_contents" in str(error)
    every(ranks, "use", "dp2", run.namespace, load=["model", "optimizer"])
    for error in outcomes(ranks, "by_engine", "dp2", "load_checkpoint", actor_path(root, step + 1)):
        assert "dist_ckpt_optim_fully_reshardable=False, which other values of tp, pp and ep cannot load" in str(error)
    load(ranks, "dp2", root, step)
    every(ranks, "train", "dp2", 1)
    one = start(started["models"], 1)
    try:
        ray.get(one[0].pid.remote(), timeout=START_LIMIT)
        every(one, "use", "one", run.namespace)
        for error in outcomes(one, "by_engine", "one", "load_checkpoint", actor_path(root, step)):
            assert "was saved with tp=2 pp=1 dp=1 ep=1, this engine has tp=1 pp=1 dp=1 ep=1" in str(error)
        every(one, "use", "one", run.namespace, load=["model", "optimizer"])
        load(one, "one", root, step)
        every(one, "train", "one", 1)
    finally:
        ray.kill(one[0])


def test_random_generators_of_other_numbers_of_replicas_are_those_of_their_place_in_the_model(
    ranks: list[Any], started: dict[str, Any], run: VerlRun, root: Path, step: int
) -> None:
    every(ranks, "use", "dp2", run.namespace)
    every(ranks, "train", "dp2", 1)
    every(ranks, "draw", 100)
    states = every(ranks, "state", "dp2")
    save(ranks, "dp2", root, step)
    wait(ranks, "dp2")
    one = start(started["models"], 1)
    try:
        ray.get(one[0].pid.remote(), timeout=START_LIMIT)
        every(one, "use", "one", run.namespace)
        load(one, "one", root, step)
        (state,) = every(one, "state", "one")
        assert (state[0], state[2], state[3]) == (states[0][0], states[0][2], states[0][3])
    finally:
        ray.kill(one[0])


def test_an_export_stands_beside_the_tree_and_may_be_the_bridges_own(
    ranks: list[Any], run: VerlRun, root: Path, step: int
) -> None:
    from safetensors.torch import load_file

    every(ranks, "use", "tp2", run.namespace, ["model", "hf_model"])
    save(ranks, "tp2", root, step)
    wait(ranks, "tp2")
    every(ranks, "use", "tp2", run.namespace, ["model"], trees=False, bridge="itself")
    save(ranks, "tp2", root, step + 1)
    every(ranks, "train", "tp2", 1)
    wait(ranks, "tp2")
    names = ("model/huggingface/model.safetensors", "model/huggingface/config.json")
    for at in (step, step + 1):
        listed = {entry.path for entry in read_manifest(step_dir(root, at)).files}
        assert {f"actor/{name}" for name in names} <= listed
        assert catalog.verify(step_dir(root, at)).ok
    first, second = (load_file(Path(actor_path(root, at)) / names[0]) for at in (step, step + 1))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    load(ranks, "tp2", root, step + 1)


def test_the_limit_and_the_copy_elsewhere_come_after_the_commit(
    ranks: list[Any], make_run: Callable[..., VerlRun], tmp_path: Path
) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    every(ranks, "use", "tp2", make_run(root).namespace, ["model"])
    for step in (1, 2, 3):
        save(ranks, "tp2", root, step, hdfs_path=str(elsewhere / str(step)), max_ckpt_to_keep=2)
        wait(ranks, "tp2")
        assert kept(root) == [1, 2, 3][max(0, step - 2) : step]
        assert file_hashes(elsewhere / str(step)) == file_hashes(Path(actor_path(root, step)))
    save(ranks, "tp2", root, 3, max_ckpt_to_keep=1)
    wait(ranks, "tp2")
    assert kept(root) == [3]
    every(ranks, "manager", "tp2", "save_checkpoint", None)
    every(ranks, "manager", "tp2", "load_checkpoint", None)


def test_what_cannot_be_saved_is_refused_by_name_before_anything_is_written(
    ranks: list[Any], make_run: Callable[..., VerlRun], tmp_path: Path
) -> None:
    run, root = make_run(tmp_path / "root"), tmp_path / "root"
    for replaced, said in (
        ({"use_megatron_fsdp": True}, "use_megatron_fsdp is set"),
        ({"peft_cls": "an adapter"}, "the engine trains a LoRA adapter through Megatron-Bridge"),
    ):
        raised = outcomes(ranks, "use", "tp2", run.namespace, **replaced)
        assert all(said in str(error) for error in raised)
    every(ranks, "use", "tp2", run.namespace, optimizer=None)
    for error in outcomes(ranks, "by_engine", "tp2", "save_checkpoint", actor_path(root, 1), global_step=1):
        assert "save_contents has 'optimizer', but the checkpoint manager was made without an optimizer" in str(error)
    in_turn = make_run(tmp_path / "in-turn", save_strategy="single_thread")
    every(ranks, "use", "tp2", in_turn.namespace)
    place = actor_path(tmp_path / "in-turn", 1)
    for error in outcomes(ranks, "by_engine", "tp2", "save_checkpoint", place, global_step=1):
        assert "save_strategy is single_thread" in str(error)
        assert "has to be unrestricted" in str(error)
    assert [*root.glob("global_step_*"), *(tmp_path / "in-turn").glob("global_step_*")] == []
    every(ranks, "use", "tp2", run.namespace, ["model"])
    save(ranks, "tp2", root, 2)
    for error in outcomes(ranks, "function", "megatron_save_state_dict", "tp2", actor_path(root, 2), 2, None):
        assert "megatron_save_state_dict is for an engine with verl's own checkpoint manager" in str(error)
    every(ranks, "narrow", "tp2", ["model", "extra"])
    for error in outcomes(ranks, "by_engine", "tp2", "save_checkpoint", actor_path(root, 2), global_step=2):
        assert "step 2 was saved with model; it is not saved again with extra, model" in str(error)
    wait(ranks, "tp2")


# ---- weights for explorers


@pytest.mark.parametrize(
    ("layout", "trees"),
    [pytest.param("tp2", True, id="trees"), pytest.param("tp2", False, id="hugging-face", marks=pytest.mark.all)],
)
def test_weights_alone_are_saved_and_announced_and_a_full_save_of_the_step_adds_the_rest(
    ranks: list[Any], run: VerlRun, root: Path, step: int, layout: str, trees: bool
) -> None:
    every(ranks, "use", layout, run.namespace, trees=trees)
    every(ranks, "train", layout, 0)
    every(ranks, "manager", layout, "save_state_dict", None, step)
    every(ranks, "manager", layout, "save_state_dict", actor_path(root, step), step)
    wait(ranks, layout)
    folder = step_dir(root, step)
    assert read_manifest(folder).kind == STATE_DICT
    assert run.synchronizer.get_latest_model_version() == step
    assert {"optimizer", "rng_state"}.isdisjoint(contents_of(folder))
    weights = file_hashes(folder / "actor" / "model")
    before = every(ranks, "state", layout)
    place = actor_path(root, step)
    every(ranks, "manager", layout, "save_checkpoint", place, global_step=step, save_as_hf=True)
    wait(ranks, layout)
    assert read_manifest(folder).kind == FULL
    assert catalog.verify(folder).ok
    assert {"model", "optimizer", "rng_state"} <= set(contents_of(folder))
    after = file_hashes(folder / "actor" / "model")
    assert {name: after.get(name) for name in weights} == weights
    assert (folder / "actor" / "model" / "huggingface" / "model.safetensors").is_file()
    every(ranks, "train", layout, 1)
    load(ranks, layout, root, step)
    assert every(ranks, "state", layout) == before


# ---- faults


def test_what_fails_on_one_rank_is_raised_on_all_and_the_next_save_is_sound(
    ranks: list[Any], run: VerlRun, root: Path, step: int
) -> None:
    every(ranks, "use", "tp2", run.namespace)
    save(ranks, "tp2", root, step)
    wait(ranks, "tp2")
    before = kept(root)
    ray.get(ranks[1].patch.remote("copies", "copy", "fail"), timeout=LIMIT)
    for error in outcomes(
        ranks, "by_engine", "tp2", "save_checkpoint", actor_path(root, step + 1), global_step=step + 1
    ):
        assert f"could not copy the state of step {step + 1}: rank 1: OSError" in str(error)
    every(ranks, "heal")
    for where, name in (("share", "write"), ("coordinator", "is_saved")):
        ray.get(ranks[1].patch.remote(where, name, "fail"), timeout=LIMIT)
        step += 2
        save(ranks, "tp2", root, step, max_ckpt_to_keep=1)
        for error in outcomes(ranks, "manager", "tp2", "wait_on_save_thread"):
            assert f"the checkpoint of step {step} failed: " in str(error)
            assert "No space left on device" in str(error)
        every(ranks, "heal")
        assert kept(root) == before
    save(ranks, "tp2", root, step + 1)
    wait(ranks, "tp2")
    assert kept(root) == [*before, step + 1]
    assert catalog.verify(step_dir(root, step + 1)).ok


def test_nothing_that_is_pickled_in_a_checkpoint_runs(
    ranks: list[Any], run: VerlRun, root: Path, tmp_path: Path
) -> None:
    from tests.backends.test_safe_loading import spoil_metadata

    every(ranks, "use", "tp2", run.namespace)
    save_by_verl(ranks, "tp2", None, tmp_path / "actor", 5)
    mark = tmp_path / "mark"
    for tree in TREES:
        spoil_metadata(tmp_path / "actor" / tree, mark)
    for error in outcomes(ranks, "by_engine", "tp2", "load_checkpoint", str(tmp_path / "actor")):
        assert "cannot be read" in str(error)
    assert not mark.exists()


def test_a_rank_that_is_killed_in_a_save_leaves_nothing_and_is_noticed_by_its_peers(
    ranks: list[Any], run: VerlRun, root: Path, step: int
) -> None:
    every(ranks, "use", "tp2", run.namespace)
    save(ranks, "tp2", root, step)
    wait(ranks, "tp2")
    before = kept(root)
    ray.get(ranks[1].patch.remote("share", "write", "hang"), timeout=LIMIT)
    save(ranks, "tp2", root, step + 1)
    os.kill(ray.get(ranks[1].pid.remote(), timeout=LIMIT), signal.SIGKILL)
    (raised,) = outcomes(ranks[:1], "manager", "tp2", "wait_on_save_thread")
    assert "the writer rank-1 on node" in str(raised)
    assert kept(root) == before
    assert read_tracker(root, FULL).step == step
    assert not step_dir(root, step + 1).exists()
