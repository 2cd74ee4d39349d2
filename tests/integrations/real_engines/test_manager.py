"""A plain verl program with our checkpoint manager in its engines: two ranks, real engines, real actors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.integrations.real_engines.ranks import LIMIT, every, merged, outcomes
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.contents import read_manifest, read_tracker, step_dir, versions_dir, write_tracker
from trinity_sync.checkpoint.reading import open_weights
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl.program_run import VerlRun, open_run
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.protocol.retention import KeepEvery

BOTH = pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])


def actor_path(root: Path, step: int) -> str:
    return str(step_dir(root, step) / "actor")


def save(ranks: list[Any], root: Path, step: int, *args: Any, strategy: str = "fsdp2", **kwargs: Any) -> None:
    every(ranks, "manager", strategy, "save_checkpoint", actor_path(root, step), step, *args, **kwargs)


def save_weights(ranks: list[Any], root: Path, step: int) -> None:
    every(ranks, "manager", "fsdp2", "save_state_dict", actor_path(root, step), step)


def wait(ranks: list[Any], strategy: str = "fsdp2") -> None:
    every(ranks, "manager", strategy, "wait_on_save_thread")


def kept(root: Path) -> list[int]:
    """Full checkpoints. Those of weights alone have a rule of their own."""
    return [info.step for info in catalog.scan(root) if info.kind == FULL]


@BOTH
def test_a_checkpoint_is_verls_and_is_loaded_bit_for_bit(
    ranks: list[Any], run: VerlRun, root: Path, step: int, strategy: str
) -> None:
    every(ranks, "use", strategy, run.namespace)
    every(ranks, "train", strategy, 0)
    every(ranks, "train", strategy, 1)
    before = every(ranks, "state", strategy)
    every(ranks, "by_engine", strategy, "save_checkpoint", actor_path(root, step), None, step, None)
    # Training goes on while the files are written, and must not show in them.
    every(ranks, "train", strategy, 2)
    after = every(ranks, "state", strategy)
    wait(ranks, strategy)
    folder = step_dir(root, step)
    manifest = read_manifest(folder)
    assert (manifest.kind, manifest.world_size, manifest.backend) == (FULL, 2, strategy)
    assert catalog.verify(folder).ok
    assert read_tracker(root, FULL).step == step
    names = {path.name for path in (folder / "actor").glob("*.pt")}
    assert names == {
        f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in range(2)
    }
    config = json.loads((folder / "actor" / "fsdp_config.json").read_text())
    assert config == {"FSDP_version": {"fsdp": 1, "fsdp2": 2}[strategy], "world_size": 2}
    assert (folder / "actor" / "huggingface" / "tokenizer.json").is_file()
    every(ranks, "by_engine", strategy, "load_checkpoint", actor_path(root, step))
    assert every(ranks, "state", strategy) == before != after
    every(ranks, "train", strategy, 2)
    assert every(ranks, "state", strategy) == after


@BOTH
@pytest.mark.few(1)
def test_a_hugging_face_export_holds_the_version(
    ranks: list[Any], run: VerlRun, root: Path, step: int, strategy: str
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from trinity_sync.weights.tensors import saved_tensors, state_digest

    every(ranks, "use", strategy, run.namespace, ["model"])
    digest = every(ranks, "digest", strategy)[0]
    save(ranks, root, step, strategy=strategy, save_as_hf=True)
    every(ranks, "train", strategy, 0)
    wait(ranks, strategy)
    folder = step_dir(root, step) / "actor" / "huggingface"
    assert state_digest(load_file(folder / "model.safetensors"), "BF16") == digest
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert state_digest(saved_tensors(loaded), "BF16") == digest
    assert (folder / "generation_config.json").is_file()
    assert catalog.verify(step_dir(root, step)).unlisted == ()


def test_weights_for_sync_are_announced_when_they_are_committed(
    ranks: list[Any], make_run: Callable[..., VerlRun], tmp_path: Path
) -> None:
    run, root = make_run(tmp_path), tmp_path
    every(ranks, "use", "fsdp2", run.namespace)
    save_weights(ranks, root, 0)
    assert run.synchronizer.get_latest_model_version() == 0
    assert catalog.scan(root) == []
    every(ranks, "train", "fsdp2", 3)
    save_weights(ranks, root, 1)
    assert run.synchronizer.wait_new_model_state_dict(0) == 1
    assert run.synchronizer.get_latest_model_path() == actor_path(root, 1)
    assert run.synchronizer.get_model_state_dict() == (None, 1)
    assert read_manifest(step_dir(root, 1)).kind == STATE_DICT
    assert (read_tracker(root, STATE_DICT).step, read_tracker(root, FULL).step) == (1, None)
    written = {path: path.stat() for path in step_dir(root, 1).rglob("model_*.pt")}
    save_weights(ranks, root, 1)
    save(ranks, root, 1)
    wait(ranks)
    assert read_manifest(step_dir(root, 1)).kind == FULL
    assert catalog.verify(step_dir(root, 1)).ok
    for path, before in written.items():
        assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_weights_alone_count_as_a_full_checkpoint_where_nothing_else_is_asked_for(
    ranks: list[Any], run: VerlRun, root: Path, step: int
) -> None:
    every(ranks, "use", "fsdp2", run.namespace, ["model"])
    save_weights(ranks, root, step)
    save(ranks, root, step)
    wait(ranks)
    assert read_manifest(step_dir(root, step)).kind == FULL


@pytest.mark.all
def test_the_limit_holds_after_the_commit_and_after_a_restart(
    ranks: list[Any], make_run: Callable[..., VerlRun], tmp_path: Path
) -> None:
    run, root = make_run(tmp_path), tmp_path
    with pytest.raises(RunError, match="a run is open in Ray namespace"):
        open_run(root, run.namespace)
    every(ranks, "use", "fsdp2", run.namespace, ["model"])
    for step in (1, 2, 3):
        save(ranks, root, step, 2)
        wait(ranks)
        assert kept(root) == [1, 2, 3][max(0, step - 2) : step]
    # The same step again does not delete it, whatever the limit.
    save(ranks, root, 3, 1)
    wait(ranks)
    assert kept(root) == [3]
    save(ranks, root, 4)
    wait(ranks)

    with pytest.raises(ConfigError, match="is in use by the run"):
        make_run(root)
    run.close()
    with pytest.raises(RunError, match="global_step_7 is not a committed full checkpoint"):
        make_run(root, resume_step=7)
    again = make_run(root, resume_step=3)
    assert (again.attempt, again.step, again.resume_path) == (1, 3, step_dir(root, 3))
    # No tracker names what the new run has not made: step 4 is abandoned.
    assert (read_tracker(root, FULL).step, read_tracker(root, STATE_DICT).step) == (3, 3)
    every(ranks, "use", "fsdp2", again.namespace, ["model"])
    # This manager has not loaded step 3, so it saves its weights; not in the place of what the run began with.
    before = read_manifest(step_dir(root, 3))
    save_weights(ranks, root, 3)
    wait(ranks)
    assert read_manifest(step_dir(root, 3)) == before
    place = step_dir(versions_dir(root, 1), 3)
    assert again.synchronizer.get_latest_model_path() == str(place / "actor")
    assert catalog.verify(place).ok
    save(ranks, root, 4, 1)
    wait(ranks)
    assert kept(root) == [4]
    assert read_manifest(step_dir(root, 4)).attempt == 1
    again.close()
    assert not (root / ".versions").exists()


@pytest.mark.all
def test_what_the_limit_or_a_policy_keeps_stays_also_after_the_first_commit_of_a_resume(
    ranks: list[Any], make_run: Callable[..., VerlRun], tmp_path: Path
) -> None:
    for steps in ((1, 2, 3, 4, 5, 6), (7,)):
        run = make_run(tmp_path, policies=[KeepEvery(4)])
        every(ranks, "use", "fsdp2", run.namespace, ["model"])
        for step in steps:
            save(ranks, tmp_path, step, 3)
            wait(ranks)
            assert kept(tmp_path) == [one for one in range(1, step + 1) if one > step - 3 or one == 4]
        run.close()


@pytest.mark.all
def test_a_limit_that_one_role_has_holds_beside_the_policies(
    ranks: list[Any], make_run: Callable[..., VerlRun], tmp_path: Path
) -> None:
    """Where both have one, the smaller."""
    run = make_run(tmp_path, policies=[KeepEvery(4)], roles=("actor", "critic"))
    engines = {"actor": "fsdp2", "critic": "fsdp"}
    for strategy in engines.values():
        every(ranks, "use", strategy, run.namespace, ["model"])
    limits: list[dict[str, int | None]] = [{"actor": 3, "critic": None}] * 5 + [{"actor": 3, "critic": 1}]
    for step, limit in enumerate(limits, 1):
        for role, strategy in engines.items():
            path = str(step_dir(tmp_path, step) / role)
            every(ranks, "manager", strategy, "save_checkpoint", path, step, limit[role])
        for strategy in engines.values():
            wait(ranks, strategy)
        assert kept(tmp_path) == ([4, 6] if step == 6 else [*range(max(1, step - 2), step + 1)])
    run.close()


def test_the_full_weights_reach_the_synchronizer(ranks: list[Any], run: VerlRun, step: int) -> None:
    from trinity_sync.weights.tensors import state_digest

    every(ranks, "use", "fsdp2", run.namespace)
    digest = every(ranks, "digest", "fsdp2")[0]
    every(ranks, "manager", "fsdp2", "upload_state_dict", step)
    state, version = run.synchronizer.get_model_state_dict()
    assert version == step
    assert state is not None
    assert state_digest(state, "BF16") == digest
    raised = outcomes(ranks, "manager", "fsdp2", "upload_state_dict", step - 1)
    assert all(f"version {step - 1} cannot be published after version {step}" in str(error) for error in raised)


def test_nothing_is_done_without_a_path(ranks: list[Any], run: VerlRun, root: Path, step: int) -> None:
    every(ranks, "use", "fsdp2", run.namespace)
    before = kept(root)
    every(ranks, "manager", "fsdp2", "save_checkpoint", None, step)
    every(ranks, "manager", "fsdp2", "save_state_dict", None, step)
    every(ranks, "manager", "fsdp2", "load_checkpoint", None)
    wait(ranks)
    assert kept(root) == before


@pytest.mark.parametrize("strategy", [pytest.param("fsdp", marks=pytest.mark.all), "fsdp2"])
def test_saves_in_a_row_each_hold_the_weights_of_their_time_and_an_automatic_resume_finds_the_last(
    ranks: list[Any], make_run: Callable[..., VerlRun], tmp_path: Path, strategy: str
) -> None:
    """Known of others: each asynchronous save after the first writes the first one's weights; no tracker is written."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    run, root = make_run(tmp_path), tmp_path
    every(ranks, "use", strategy, run.namespace)
    live = []
    for step in (1, 2, 3):
        every(ranks, "train", strategy, step)
        live.append(every(ranks, "digest", strategy)[0])
        every(ranks, "manager", strategy, "save_checkpoint", actor_path(root, step), step)
    every(ranks, "train", strategy, 4)
    every(ranks, "manager", strategy, "wait_on_save_thread")
    assert [open_weights(step_dir(root, step)).digest("BF16") for step in (1, 2, 3)] == live
    assert len(set(live)) == 3
    assert (read_tracker(root, FULL).step, find_latest_ckpt_path(str(root))) == (3, str(step_dir(root, 3)))
    run.close()
    again = make_run(root)
    assert (again.attempt, again.step, again.resume_path) == (1, 3, step_dir(root, 3))


def test_a_later_save_leaves_the_files_of_an_earlier_one_alone(
    ranks: list[Any], run: VerlRun, root: Path, step: int
) -> None:
    every(ranks, "use", "fsdp2", run.namespace, ["model"])
    save(ranks, root, step)
    wait(ranks)
    first = merged(step_dir(root, step) / "actor")
    every(ranks, "train", "fsdp2", 5)
    save(ranks, root, step + 1)
    wait(ranks)
    again, second = merged(step_dir(root, step) / "actor"), merged(step_dir(root, step + 1) / "actor")
    assert all(first[name].equal(again[name]) for name in first)
    assert not all(first[name].equal(second[name]) for name in first)


# ---- several engines in one program


def save_roles(ranks: list[Any], root: Path, step: int, *roles: str) -> None:
    """Actor and critic are an engine each, in the same processes."""
    for role in roles:
        strategy = {"actor": "fsdp2", "critic": "fsdp"}[role]
        every(ranks, "manager", strategy, "save_checkpoint", str(step_dir(root, step) / role), step)


def files_of(root: Path, step: int) -> dict[str, set[str]]:
    manifest = read_manifest(step_dir(root, step))
    assert manifest.kind == FULL
    assert catalog.verify(step_dir(root, step)).ok
    paths = [Path(entry.path) for entry in manifest.files if entry.path.endswith(".pt")]
    return {
        place: {path.name for path in paths if path.parts[0] == place} for place in {path.parts[0] for path in paths}
    }


STATE = {f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in range(2)}


def test_a_checkpoint_holds_all_that_each_role_saved(ranks: list[Any], run: VerlRun, root: Path, step: int) -> None:
    for strategy in ("fsdp", "fsdp2"):
        every(ranks, "use", strategy, run.namespace)
    save_roles(ranks, root, step, "actor", "critic")
    wait(ranks, "fsdp2")
    wait(ranks, "fsdp")
    assert files_of(root, step) == {"actor": STATE, "critic": STATE}
    # One that comes when the other is committed already is added to it.
    save_roles(ranks, root, step + 1, "critic")
    wait(ranks, "fsdp")
    assert files_of(root, step + 1) == {"critic": STATE}
    save_weights(ranks, root, step + 1)
    save_roles(ranks, root, step + 1, "actor")
    wait(ranks, "fsdp2")
    assert files_of(root, step + 1) == {"actor": STATE, "critic": STATE}


def test_a_second_place_at_the_same_step_is_written_too(ranks: list[Any], run: VerlRun, root: Path, step: int) -> None:
    every(ranks, "use", "fsdp2", run.namespace)
    for place in ("actor", "again", "actor"):
        every(ranks, "manager", "fsdp2", "save_checkpoint", str(step_dir(root, step) / place), step)
    wait(ranks)
    assert files_of(root, step) == {"actor": STATE, "again": STATE}


def test_a_run_that_knows_its_roles_commits_nothing_without_one_of_them(
    ranks: list[Any], make_run: Callable[..., VerlRun], tmp_path: Path
) -> None:
    run, root = make_run(tmp_path, roles=("actor", "critic")), tmp_path
    for strategy in ("fsdp", "fsdp2"):
        every(ranks, "use", strategy, run.namespace)
    raised = outcomes(ranks, "manager", "fsdp2", "save_checkpoint", str(step_dir(root, 1) / "policy"), 1)
    assert all("policy" in str(error) and "actor, critic" in str(error) for error in raised)
    save_roles(ranks, root, 2, "actor")
    every(ranks, "finish_writing", "fsdp2")
    status = ray.get(run.monitor.status.remote(2), timeout=LIMIT)
    assert (status["state"], status["missing"]) == ("open", ["part 'critic/announced'"])
    assert catalog.scan(root) == []
    save_roles(ranks, root, 2, "critic")
    wait(ranks, "fsdp2")
    wait(ranks, "fsdp")
    assert files_of(root, 2) == {"actor": STATE, "critic": STATE}


# ---- faults


def test_a_rank_that_cannot_copy_its_state_fails_all_ranks_at_once(
    ranks: list[Any], run: VerlRun, root: Path, step: int
) -> None:
    every(ranks, "use", "fsdp2", run.namespace)
    before = kept(root)
    ray.get(ranks[1].patch.remote("fsdp2", "state_dict", "fail"), timeout=LIMIT)
    raised = outcomes(ranks, "manager", "fsdp2", "save_checkpoint", actor_path(root, step), step)
    assert all(f"could not copy the state of step {step}: rank 1: OSError" in str(error) for error in raised)
    every(ranks, "heal")
    assert kept(root) == before
    # The step is lost, the manager is not.
    save(ranks, root, step + 1)
    wait(ranks)
    assert read_tracker(root, FULL).step == step + 1


def test_a_rank_that_cannot_write_is_told_to_all_ranks(ranks: list[Any], run: VerlRun, root: Path, step: int) -> None:
    every(ranks, "use", "fsdp2", run.namespace)
    save(ranks, root, step, 1)
    wait(ranks)
    ray.get(ranks[1].patch.remote("state", "write_image", "fail"), timeout=LIMIT)
    save(ranks, root, step + 1, 1)
    for error in outcomes(ranks, "manager", "fsdp2", "wait_on_save_thread"):
        assert f"the checkpoint of step {step + 1} failed: " in str(error)
        assert "No space left on device" in str(error)
    # Told once. The checkpoint before is in force, though the limit is 1.
    assert kept(root) == [step]
    save(ranks, root, step + 2)
    raised = outcomes(ranks, "manager", "fsdp2", "save_checkpoint", actor_path(root, step + 3), step + 3)
    assert all("because an earlier save failed: " in str(error) for error in raised)
    assert all("No space left on device" in str(error) for error in raised)
    every(ranks, "heal")
    save(ranks, root, step + 4, 1)
    wait(ranks)
    assert kept(root) == [step + 4]


def test_what_is_asked_for_and_not_there_is_refused(ranks: list[Any], run: VerlRun, root: Path, step: int) -> None:
    every(ranks, "use", "fsdp2", run.namespace)
    ray.get(ranks[1].without.remote("fsdp2", "optimizer"), timeout=LIMIT)
    raised = outcomes(ranks, "manager", "fsdp2", "save_checkpoint", actor_path(root, step), step)
    assert all("rank 1: ConfigError: save_contents has 'optimizer', but" in str(error) for error in raised)


def test_a_path_that_the_monitor_cannot_commit_is_refused(ranks: list[Any], run: VerlRun, tmp_path: Path) -> None:
    every(ranks, "use", "fsdp2", run.namespace)
    raised = outcomes(ranks, "manager", "fsdp2", "save_checkpoint", str(tmp_path / "elsewhere"), 3)
    assert all("it has to be" in str(error) and "global_step_3" in str(error) for error in raised)


def test_a_rank_whose_file_is_missing_stops_all_ranks(ranks: list[Any], run: VerlRun, root: Path, step: int) -> None:
    every(ranks, "use", "fsdp2", run.namespace, ["model"])
    save(ranks, root, step)
    wait(ranks)
    (step_dir(root, step) / "actor" / "model_world_size_2_rank_1.pt").unlink()
    raised = outcomes(ranks, "manager", "fsdp2", "load_checkpoint", actor_path(root, step))
    for error in raised:
        assert "rank 0: RunError" in str(error)
        assert "rank 1: RunError" in str(error)
        assert "has no model_world_size_2_rank_1.pt, optim_world_size_2_rank_1.pt" in str(error)
        assert "it has model_world_size_2" in str(error)


def test_what_is_pickled_in_a_checkpoint_does_not_run(
    ranks: list[Any], run: VerlRun, root: Path, step: int, tmp_path: Path
) -> None:
    every(ranks, "use", "fsdp2", run.namespace)
    save(ranks, root, step)
    wait(ranks)
    mark = tmp_path / "ran"
    for number in range(2):
        path = Path(actor_path(root, step)) / f"extra_state_world_size_2_rank_{number}.pt"
        path.unlink()
        torch.save({"lr_scheduler": None, "rng": Marks(str(mark))}, path)
    for error in outcomes(ranks, "manager", "fsdp2", "load_checkpoint", actor_path(root, step)):
        assert "cannot be loaded" in str(error)
    assert not mark.exists()


class Marks:
    """Leaves a mark where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_without_actors_a_manager_says_who_starts_them(ranks: list[Any]) -> None:
    raised = outcomes(ranks, "use", "fsdp2", "nobody-is-here")
    assert all("open_run before the workers" in str(error) for error in raised)


@pytest.mark.all
def test_what_verl_itself_saved_is_gone_on_from_and_stays_as_it_is(
    ranks: list[Any], make_run: Callable[..., VerlRun], tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    every(ranks, "save_as_verl", "fsdp2", actor_path(root, 3), 3)
    write_tracker(root, FULL, 3)
    files = {path: path.read_bytes() for path in step_dir(root, 3).rglob("*") if path.is_file()}
    run = make_run(root)
    assert (run.step, run.resume_path, run.verified) == (3, step_dir(root, 3), False)
    every(ranks, "use", "fsdp2", run.namespace)
    every(ranks, "by_engine", "fsdp2", "load_checkpoint", actor_path(root, 3))
    save_weights(ranks, root, 3)
    for step in (4, 5):
        save(ranks, root, step, 1)
    wait(ranks)
    assert [(info.step, info.state) for info in catalog.scan(root)] == [(3, "verl"), (5, "committed")]
    assert read_tracker(root, FULL).step == 5
    assert {path: path.read_bytes() for path in step_dir(root, 3).rglob("*") if path.is_file()} == files


# ---- last, as new ranks take long to start


def test_a_writer_that_is_killed_is_noticed_by_its_peers(ranks: list[Any], run: VerlRun, root: Path, step: int) -> None:
    every(ranks, "use", "fsdp2", run.namespace)
    save(ranks, root, step)
    wait(ranks)
    ray.get(ranks[1].patch.remote("state", "write_image", "hang"), timeout=LIMIT)
    save(ranks, root, step + 1)
    os.kill(ray.get(ranks[1].pid.remote(), timeout=LIMIT), signal.SIGKILL)
    (raised,) = outcomes(ranks[:1], "manager", "fsdp2", "wait_on_save_thread")
    assert "the writer rank-1 on node" in str(raised)
    (raised,) = outcomes(ranks[:1], "manager", "fsdp2", "save_checkpoint", actor_path(root, step + 2), step + 2)
    assert "a rank has died" in str(raised)
    assert read_tracker(root, FULL).step == step
