"""verl's FSDP engines as we see them: one version whatever the layout, and checkpoints that verl and we both read."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from transformers import AutoModelForCausalLM

from tests.backends.engines import KEPT, Ranks
from tests.backends.gradients import assert_as_by_hand
from tests.backends.recomputing import assert_recomputed
from trinity_sync.backends.fsdp import accumulate_without_unused
from trinity_sync.checkpoint.difference import compare
from trinity_sync.checkpoint.export import export_checkpoint
from trinity_sync.checkpoint.reading import open_weights

Facts = dict[str, list[dict[str, Any]]]

TWO = {
    "fsdp2-untied": {"strategy": "fsdp2", "model": "untied", "fsdp_size": -1},
    "fsdp2-tied": {"strategy": "fsdp2", "model": "tied", "fsdp_size": -1},
    "fsdp-untied": {"strategy": "fsdp", "model": "untied", "fsdp_size": -1},
    "fsdp-tied": {"strategy": "fsdp", "model": "tied", "fsdp_size": -1},
}
EXPERTS = {
    "experts-fsdp2": {"strategy": "fsdp2", "model": "experts", "fsdp_size": -1},
    "experts-fsdp": {"strategy": "fsdp", "model": "experts", "fsdp_size": -1},
    "deepseek-fsdp2": {"strategy": "fsdp2", "model": "deepseek", "fsdp_size": -1},
    "deepseek-fsdp": {"strategy": "fsdp", "model": "deepseek", "fsdp_size": -1},
}
ONE = {"one-fsdp2": TWO["fsdp2-untied"], "one-fsdp": TWO["fsdp-tied"]}
FOUR = {
    "hybrid-fsdp2": {"strategy": "fsdp2", "model": "untied", "fsdp_size": 2},
    "hybrid-fsdp": {"strategy": "fsdp", "model": "tied", "fsdp_size": 2},
    "four-fsdp": {"strategy": "fsdp", "model": "untied", "fsdp_size": -1},
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Facts:
    """Facts by case, then rank. Only the numbers of ranks that a selected test asks for are started."""
    folder = tmp_path_factory.mktemp("engines")
    wanted = {
        item.callspec.params["case"]
        for item in request.session.items
        if item.fspath == request.fspath and hasattr(item, "callspec")
    }
    chosen = [
        (ranks, {name: case for name, case in cases.items() if name in wanted})
        for ranks, cases in ((1, ONE), (2, TWO | EXPERTS), (4, FOUR))
    ]
    saved = {f"fsdp2-{case['model']}": multiprocessing.get_context("forkserver").Event() for case in ONE.values()}
    if wanted & ONE.keys():
        chosen[1] = (2, TWO | chosen[1][1])
    started = [(cases, Ranks(folder, ranks, list(cases.values()), saved)) for ranks, cases in chosen if cases]
    found: Facts = {}
    for cases, ranks in started:
        found |= dict(zip(cases, ranks.facts(), strict=True))
    return found


every_case = pytest.mark.parametrize(
    "case", [*ONE, *TWO, *(pytest.param(name, marks=pytest.mark.all) for name in FOUR)]
)


@every_case
def test_the_initial_version_is_that_of_the_model_file(facts: Facts, case: str) -> None:
    assert {rank["initial"] for rank in facts[case]} == {facts[case][0]["file"]}


@every_case
def test_the_ranks_publish_what_save_pretrained_would_write(facts: Facts, case: str) -> None:
    assert {rank["refused"] for rank in facts[case]} == {None}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.all if name == "deepseek-fsdp" else ()) for name in EXPERTS]
)
def test_experts_travel_as_save_pretrained_writes_them(facts: Facts, case: str) -> None:
    for rank in facts[case]:
        assert rank["refused"] is None
        assert rank["initial"] == rank["file"]
        assert rank["after_step"] == facts[case][0]["exported"] != rank["initial"]
        assert rank["explorer"] == rank["initial"]
        assert rank["same_sources"] or rank["kept"]  # a buffer is copied


@pytest.mark.parametrize("case", ["deepseek-fsdp2", pytest.param("deepseek-fsdp", marks=pytest.mark.all)])
def test_router_biases_stay_in_fp32_and_are_not_trained_rounded(facts: Facts, case: str) -> None:
    for rank in facts[case]:
        assert rank["kept"] == [f"model.layers.1.mlp.gate.{KEPT}"]
        assert rank["file"] != rank["file_in_bf16"]
        assert rank["rounded"].startswith(
            "backend.master_dtype is bf16, in which the trainer would round tensors that are kept"
        )
        assert f"model.layers.1.mlp.gate.{KEPT}; set backend.master_dtype=fp32" in rank["rounded"]


@every_case
def test_after_a_step_the_version_is_what_verl_exports(facts: Facts, case: str) -> None:
    assert {rank["after_step"] for rank in facts[case]} == {facts[case][0]["exported_by_verl"]}
    assert facts[case][0]["after_step"] != facts[case][0]["initial"]


@every_case
def test_loss_entropy_and_gradient_are_those_by_hand(facts: Facts, case: str) -> None:
    assert_as_by_hand([rank["gradients"] for rank in facts[case]])


@every_case
def test_logits_are_divided_by_the_temperature_as_explorers_do(facts: Facts, case: str) -> None:
    for rank in facts[case]:
        assert rank["divided"] < 1e-5


@every_case
def test_a_gradient_that_is_not_finite_changes_nothing(facts: Facts, case: str) -> None:
    for rank in facts[case]:
        assert rank["passed_over"] == {"finite": False, "kept": True}


@every_case
def test_all_weights_decay_alike(facts: Facts, case: str) -> None:
    for rank in facts[case]:
        assert rank["decays"] == [0.01]


@every_case
def test_recomputed_log_probs_are_those_of_training(facts: Facts, case: str) -> None:
    assert_recomputed([rank["recomputing"] for rank in facts[case]])


@every_case
def test_who_copies_the_state_later_is_told_before_it_changes(facts: Facts, case: str) -> None:
    """That the copy was whole by then shows when it is loaded, below."""
    for rank in facts[case]:
        assert rank["held"] == 1


@every_case
def test_a_resumed_engine_goes_on_bit_for_bit(facts: Facts, case: str) -> None:
    for rank in facts[case]:
        assert rank["loaded"] == rank["after_step"] != rank["next"]
        assert rank["next_after_load"] == rank["next"]
        # The version is in wire dtype; master weights and optimizer have to be the same too.
        assert rank["next_state_after_load"] == rank["next_state"] != rank["state"]
        assert rank["lr_next_after_load"] == rank["lr_next"]
        assert rank["rng_loaded"] == rank["rng_saved"]


@every_case
def test_a_second_save_in_a_row_holds_the_state_of_its_own_time(facts: Facts, case: str) -> None:
    """Known of others: each save after the first writes the first one's weights again."""
    for rank in facts[case]:
        assert rank["second_loaded"] == rank["next"] != rank["after_step"]
        assert rank["second_state"] == rank["next_state"] != rank["state"]
        assert rank["dcp_second_loaded"] == rank["dcp_changed"] != rank["dcp_saved"]


@every_case
def test_verls_own_checkpoints_are_read_too(facts: Facts, case: str) -> None:
    for rank in facts[case]:
        assert rank["loaded_from_verl"] == rank["next_after_load"]


@every_case
def test_the_format_for_any_number_of_ranks_restores_weights_and_optimizer(facts: Facts, case: str) -> None:
    """Copied while the next step ran, and written after it."""
    for rank in facts[case]:
        assert rank["dcp_loaded"] == rank["dcp_saved"] != rank["dcp_changed"]


@every_case
def test_a_rank_that_fails_or_is_late_fails_such_a_save_on_all_ranks_and_the_next_one_is_sound(
    facts: Facts, case: str
) -> None:
    """The next one is what is loaded, above."""
    *others, last = (rank["dcp_failed"] for rank in facts[case])
    name = f"rank {len(others)}"
    assert last[0] == "no turn"
    assert last[1].startswith(f"{name}: Is a directory")
    for told in others:
        assert told[0] == f"{name}: the monitor is gone"
        assert told[1] == last[1]
        assert told[2] == last[2] == f"{name} did not plan its share (late) within 0.5 s"


@pytest.mark.parametrize("case", ONE)
def test_what_two_ranks_of_fsdp2_saved_is_loaded_by_one_of_either_engine(facts: Facts, case: str) -> None:
    (rank,) = facts[case]
    assert rank["dcp_of_two_loaded"] == rank["dcp_of_two"] != rank["dcp_saved"]


@every_case
def test_the_files_have_verls_names(facts: Facts, case: str) -> None:
    for rank in facts[case]:
        assert rank["names"] == rank["verl_names"]
    assert "actor/fsdp_config.json" in facts[case][0]["metadata"]


@every_case
def test_the_models_files_are_kept_as_they_came(facts: Facts, case: str) -> None:
    assert {"config.json", "generation_config.json", "tokenizer.json"} < set(facts[case][0]["came"])
    assert facts[case][0]["kept"] == facts[case][0]["came"]


@every_case
def test_checkpoints_are_read_without_an_engine(facts: Facts, case: str) -> None:
    first = facts[case][0]
    saves = Path(first["saves"])
    assert open_weights(saves / "ours").digest("BF16") == first["after_step"]
    assert open_weights(saves / "verl").digest("BF16") == first["next_after_load"]
    distributed = open_weights(saves / "dcp", config=saves / "verl" / "actor" / "huggingface")
    assert distributed.digest("BF16") == first["loaded_from_verl"]


@every_case
def test_an_export_is_bit_for_bit_what_verls_merger_writes(facts: Facts, case: str, tmp_path: Path) -> None:
    saves = Path(facts[case][0]["saves"])
    export_checkpoint(saves / "verl", tmp_path / "ours", max_shard_bytes=50_000)
    assert_same_model(tmp_path / "ours", saves / "merged")


@pytest.mark.all
@pytest.mark.parametrize("case", ["fsdp2-tied"])
def test_the_merger_as_a_user_runs_it_agrees_too(facts: Facts, case: str, tmp_path: Path) -> None:
    saves = Path(facts[case][0]["saves"])
    arguments = ["--local_dir", str(saves / "verl" / "actor"), "--target_dir", str(tmp_path / "theirs")]
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    export_checkpoint(saves / "verl", tmp_path / "ours")
    assert_same_model(tmp_path / "ours", tmp_path / "theirs")


def assert_same_model(ours: Path, theirs: Path) -> None:
    compared = compare(open_weights(ours), open_weights(theirs))
    assert [found.name for found in compared if found.differs] == []
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (ours, theirs)]
    assert models[0].dtype == models[1].dtype == torch.bfloat16
    one, other = (model.state_dict() for model in models)
    assert sorted(one) == sorted(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_all_layouts_of_a_model_have_the_same_initial_version(facts: Facts) -> None:
    for model in ("tied", "untied"):
        cases = [name for name, case in {**ONE, **TWO}.items() if case["model"] == model and name in facts]
        assert len({facts[name][0]["initial"] for name in cases}) <= 1
    assert facts


@every_case
def test_fsdp1_on_a_cpu_needs_the_platforms_patch(facts: Facts, case: str) -> None:
    """Were it needless in a new torch, this would fail."""
    assert {(rank["refused_before"], rank["refused_now"]) for rank in facts[case]} == {(True, False)}


@every_case
def test_the_engines_run_on_the_cpu_platform_without_cuda(facts: Facts, case: str) -> None:
    assert {(rank["device"], rank["cuda"]) for rank in facts[case]} == {("cpu", False)}


def test_the_cpus_device_id_has_all_shapes_that_verl_makes_of_one() -> None:
    from trinity_sync.backends.cpu_platform import CpuPlatform

    platform = CpuPlatform()
    device = platform.current_device()
    assert torch.zeros(1).to(device).device.type == "cpu"
    assert torch.device(device).type == "cpu"
    assert torch.device(f"{platform.device_name}:{device}") == torch.device("cpu:0")


def test_the_cpus_device_module_answers_what_verl_asks_of_an_accelerators() -> None:
    from trinity_sync.backends.cpu_platform import CpuPlatform

    module = CpuPlatform().device_module
    assert [module.memory_allocated(), module.max_memory_reserved(), module.mem_get_info()] == [0, 0, (0, 0)]
    state = module.get_rng_state()
    drawn = torch.rand(3)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    module.manual_seed_all(5)
    drawn = torch.rand(3)
    module.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    for name in ("empty_cache", "ipc_collect", "synchronize", "reset_peak_memory_stats"):
        getattr(module, name)()
    module.set_device(0)
    assert module.current_stream is torch.cpu.current_stream


def test_gradients_add_up_where_a_module_is_not_used() -> None:
    """FSDP2 has never gathered the parameters of such a module."""
    never_gathered = object.__new__(FSDPParam)
    never_gathered.reduce_dtype = torch.float32
    accumulate_without_unused()
    never_gathered.to_accumulated_grad_if_needed()
