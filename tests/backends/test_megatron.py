"""verl's Megatron engine as we see it: one version in all layouts, and checkpoints that any layout can load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.backends import megatron_ranks
from tests.backends.engines import PLATFORM, Ranks
from tests.backends.gradients import assert_as_by_hand
from tests.backends.recomputing import assert_recomputed

Facts = dict[str, list[dict[str, Any]]]

# Cases run in this order, those of more ranks first; what is saved under a name is loaded by later ones.
TWO: dict[str, dict[str, Any]] = {
    "tp2": {"world": 2, "tp": 2, "pp": 1, "model": "qwen3", "do": ["version", "save"], "save": "a"},
    "tp2-to-pp2": {"world": 2, "tp": 1, "pp": 2, "model": "qwen3", "do": ["load"], "load": "a"},
    "pp2": {"world": 2, "tp": 1, "pp": 2, "model": "qwen3-tied", "do": ["version", "save", "functions"], "save": "b"},
    "dp2": {"world": 2, "tp": 1, "pp": 1, "model": "llama-tied", "do": ["version", "save"], "save": "c"},
    "dp2-to-tp2": {
        **{"world": 2, "tp": 2, "pp": 1, "model": "llama-tied", "do": ["load"], "load": "c"},
        **{"lr": 2e-2, "weight_decay": 0.5, "beta": 0.8},
    },
    "late": {"world": 2, "tp": 1, "pp": 1, "model": "qwen2", "do": ["late"], "overlap_param_gather": True},
    "prompt": {"world": 2, "tp": 1, "pp": 1, "model": "qwen2", "do": ["late"]},
    "ep2": {
        "world": 2,
        "tp": 1,
        "pp": 1,
        "ep": 2,
        "model": "experts",
        "do": ["version", "uneven", "save"],
        "save": "h",
    },
    "bad": {"world": 2, "tp": 2, "pp": 1, "model": "qwen2", "do": ["failing", "refusals"]},
    "tp2-to-one": {"world": 1, "tp": 1, "pp": 1, "model": "qwen3", "do": ["load"], "load": "a"},
    "poisoned": {"world": 1, "tp": 1, "pp": 1, "model": "qwen2", "do": ["poisoned"]},
    "pp2-to-one": {"world": 1, "tp": 1, "pp": 1, "model": "qwen3-tied", "do": ["version", "load"], "load": "b"},
    "recompute": {"world": 1, "tp": 1, "pp": 1, "model": "qwen2", "do": ["version"], "recompute": True},
    "ep2-to-one": {"world": 1, "tp": 1, "pp": 1, "model": "experts", "do": ["load"], "load": "h"},
}
# On two ranks, for four to load.
FOR_FOUR: dict[str, dict[str, Any]] = {
    "tp2": {"world": 2, "tp": 2, "pp": 1, "model": "qwen2", "do": ["version", "save"], "save": "f"},
}
FOUR: dict[str, dict[str, Any]] = {
    "tp2pp2": {"world": 4, "tp": 2, "pp": 2, "model": "qwen3-tied", "do": ["version", "save"], "save": "d"},
    "tp2dp2": {"world": 4, "tp": 2, "pp": 1, "model": "qwen3", "do": ["version", "save"], "save": "e"},
    "pp2dp2": {"world": 4, "tp": 1, "pp": 2, "model": "llama-tied", "do": ["version"]},
    "tp2dp2-to-tp2pp2": {"world": 4, "tp": 2, "pp": 2, "model": "qwen3", "do": ["load"], "load": "e"},
    "tp2-to-tp2dp2": {"world": 4, "tp": 2, "pp": 1, "model": "qwen2", "do": ["load"], "load": "f"},
    "tp2-no-sequence-parallel": {
        **{"world": 2, "tp": 2, "pp": 1, "model": "qwen3", "do": ["version"]},
        "sequence_parallel": False,
    },
    "dp2-same": {
        **{"world": 2, "tp": 1, "pp": 1, "model": "qwen3", "do": ["version", "save"], "save": "g"},
        "format": "dp_reshardable",
    },
    "dp2-to-one": {
        **{"world": 1, "tp": 1, "pp": 1, "model": "qwen3", "do": ["load"], "load": "g"},
        "format": "dp_reshardable",
    },
}
# A model with experts, on four ranks and fewer.
EXPERTS: dict[str, dict[str, Any]] = {
    name: {"model": "experts", "tp": 1, "pp": 1, "ep": 1, **case}
    for name, case in {
        "tp2ep2": {"world": 4, "tp": 2, "ep": 2, "do": ["version", "save"], "save": "a"},
        "pp2ep2": {"world": 4, "pp": 2, "ep": 2, "do": ["version", "save"], "save": "b"},
        "dp2ep2": {"world": 4, "ep": 2, "do": ["version", "save"], "save": "c"},
        "dp2ep2-to-ep4": {"world": 4, "ep": 4, "do": ["load"], "load": "c"},
        "tp2ep2-to-pp2ep2": {"world": 4, "pp": 2, "ep": 2, "do": ["load"], "load": "a"},
        "dp2ep2-same": {"world": 4, "ep": 2, "do": ["version", "save"], "save": "g", "format": "dp_reshardable"},
        "tp2ep2-to-ep2": {"world": 2, "ep": 2, "do": ["load"], "load": "a"},
        "pp2ep2-to-tp2": {"world": 2, "tp": 2, "do": ["load"], "load": "b"},
        "dp2ep2-to-dp2": {"world": 2, "do": ["load"], "load": "c"},
        "dp2ep2-same-to-ep2": {"world": 2, "ep": 2, "do": ["load"], "load": "g", "format": "dp_reshardable"},
        "tp2": {"world": 2, "tp": 2, "do": ["version", "save"], "save": "d"},
        "tp2-to-ep2": {"world": 2, "ep": 2, "do": ["load"], "load": "d"},
        "dp2": {"world": 2, "do": ["version", "save"], "save": "e"},
        "dp2-to-ep2": {"world": 2, "ep": 2, "do": ["load"], "load": "e"},
        "ep2-same": {"world": 2, "ep": 2, "do": ["version", "save"], "save": "f", "format": "dp_reshardable"},
        "late": {"world": 2, "ep": 2, "do": ["late"], "overlap_param_gather": True},
        "prompt": {"world": 2, "ep": 2, "do": ["late"]},
        "of-all": {"world": 2, "ep": 2, "model": "experts-of-all", "do": ["version"]},
        "recompute": {"world": 2, "ep": 2, "do": ["version"], "recompute": True},
        "tp2ep2-to-one": {"world": 1, "do": ["version", "load"], "load": "a"},
    }.items()
}


def _facts(folder: Path, ranks: int, cases: dict[str, dict[str, Any]]) -> Facts:
    started = Ranks(folder, ranks, list(cases.values()), {}, megatron_ranks.run)
    found = dict(zip(cases, started.facts(), strict=True))
    return {name: [rank for rank in of_case if len(rank) > 2] for name, of_case in found.items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Facts of the layouts on one and two ranks, by case, then rank."""
    return _facts(tmp_path_factory.mktemp("two"), 2, TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Facts of the layouts on four ranks."""
    folder = tmp_path_factory.mktemp("four")
    return _facts(folder, 2, FOR_FOUR) | _facts(folder, 4, FOUR)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Facts of the layouts of a model with experts."""
    return _facts(tmp_path_factory.mktemp("experts"), 4, EXPERTS)


def _doing(what: str) -> list[Any]:
    """(fixture, case) of the cases that do it; those that start four ranks are long."""
    return [
        *(pytest.param("two", name, id=name) for name, case in TWO.items() if what in case["do"]),
        *(
            pytest.param(start, name, id=f"{start}-{name}", marks=pytest.mark.all)
            for start, cases in (("four", FOR_FOUR | FOUR), ("experts", EXPERTS))
            for name, case in cases.items()
            if what in case["do"]
        ),
    ]


@pytest.fixture
def case_facts(request: pytest.FixtureRequest, start: str, case: str) -> list[dict[str, Any]]:
    return request.getfixturevalue(start)[case]


@pytest.mark.parametrize(("start", "case"), _doing("version"))
def test_the_initial_version_is_that_of_the_model_file(case_facts: list[dict[str, Any]]) -> None:
    assert {rank["initial"] for rank in case_facts} == {case_facts[0]["file"]}


@pytest.mark.parametrize(("start", "case"), _doing("version"))
def test_the_ranks_publish_what_save_pretrained_would_write(case_facts: list[dict[str, Any]]) -> None:
    assert {rank["refused"] for rank in case_facts} == {None}


@pytest.mark.parametrize(("start", "case"), _doing("version"))
def test_after_a_step_the_version_is_what_mbridge_exports(case_facts: list[dict[str, Any]]) -> None:
    assert {rank["after_step"] for rank in case_facts} == {case_facts[0]["exported"]} != {case_facts[0]["initial"]}


@pytest.mark.parametrize(("start", "case"), _doing("version"))
def test_log_probs_are_those_of_transformers(case_facts: list[dict[str, Any]], record_property: Any) -> None:
    found = [rank for rank in case_facts if "log_probs" in rank]
    worst = max(rank["log_probs"] for rank in found)
    record_property("max_log_prob_difference", worst)
    assert worst < 5e-3
    assert all(rank["finite"] for rank in found), "the padding of the vocabulary reaches the entropy"


@pytest.mark.parametrize(("start", "case"), _doing("version"))
def test_gradients_are_as_large_as_those_of_transformers(case_facts: list[dict[str, Any]]) -> None:
    """Of all layouts: tensors are shared by other ranks in each, and experts by others than the rest."""
    wanted, of_experts = case_facts[0]["wanted_gradient"]
    found = [rank["gradient"] for rank in case_facts if rank["gradient"] is not None]
    assert found == pytest.approx([wanted] * len(found), rel=0.02)
    clipping = max(found[0], 1.0)
    assert case_facts[0]["clipped_of_experts"] * clipping == pytest.approx(of_experts, rel=0.05)


@pytest.mark.parametrize(("start", "case"), _doing("version"))
def test_loss_entropy_and_gradient_are_those_by_hand(case_facts: list[dict[str, Any]]) -> None:
    assert_as_by_hand([rank["gradients"] for rank in case_facts])


@pytest.mark.parametrize(("start", "case"), _doing("version"))
def test_a_gradient_that_is_not_finite_changes_nothing(case_facts: list[dict[str, Any]]) -> None:
    for rank in case_facts:
        assert rank["passed_over"] == {"finite": False, "kept": True}


@pytest.mark.parametrize(("start", "case"), _doing("version"))
def test_the_scale_of_gradients_which_earlier_checkpoints_lack_is_in_none(case_facts: list[dict[str, Any]]) -> None:
    assert all(facts["saves_scale"] and not any(facts["saves_scale"]) for facts in case_facts)


@pytest.mark.parametrize(("start", "case"), _doing("version"))
def test_all_weights_decay_alike(case_facts: list[dict[str, Any]]) -> None:
    """Norms and biases, too."""
    for rank in case_facts:
        assert rank["decays"] == [0.01]


@pytest.mark.parametrize(("start", "case"), _doing("version"))
def test_recomputed_log_probs_are_those_of_training_wherever_a_loss_is_computed(
    case_facts: list[dict[str, Any]],
) -> None:
    assert_recomputed([rank["recomputing"] for rank in case_facts])


@pytest.mark.parametrize(("start", "case"), _doing("save"))
def test_a_resumed_engine_goes_on_bit_for_bit(case_facts: list[dict[str, Any]]) -> None:
    for rank in case_facts:
        assert rank["loaded"] == rank["before_save"] != rank["next"]
        assert rank["next_after_load"] == rank["next"]
        assert rank["next_state_after_load"] == rank["next_state"]
        assert rank["lr_next_after_load"] == rank["lr_next"]
        assert rank["rng_loaded"] == rank["rng_saved"]
        assert rank["rng_kept"], "backend.restore_rng=false"


@pytest.mark.parametrize(("start", "case"), _doing("save"))
def test_models_hold_nothing_that_a_forward_pass_changes(case_facts: list[dict[str, Any]]) -> None:
    """So what is saved may be copied beside one. A family with persistent buffers has to copy these at once."""
    for rank in case_facts:
        assert rank["persistent_buffers"] == []


@pytest.mark.parametrize(("start", "case"), _doing("save"))
def test_a_second_save_in_a_row_holds_the_state_of_its_own_time(case_facts: list[dict[str, Any]]) -> None:
    """Known of others: each save after the first writes the first one's weights again."""
    for rank in case_facts:
        assert rank["second_loaded"] == rank["next"] != rank["before_save"]
        assert rank["after_second"] != rank["next"]
        assert rank["second_state"] == rank["next_state"]


@pytest.mark.parametrize(("start", "case"), _doing("save"))
def test_each_rank_names_the_files_it_wrote(case_facts: list[dict[str, Any]]) -> None:
    first, *others = (rank["files"] for rank in case_facts)
    assert {"ckpt_contents.json", "transformer_config.json", "model/huggingface/config.json"} < set(first)
    assert {f"{tree}/dist_ckpt/.metadata" for tree in ("model", "optimizer", "extra")} < set(first)
    for rank, files in enumerate(others, 1):
        assert files
        assert all(name.endswith(f"__{rank}_0.distcp") for name in files)


@pytest.mark.parametrize(("start", "case"), _doing("save"))
def test_the_models_files_are_kept_as_they_came(case_facts: list[dict[str, Any]]) -> None:
    assert {"config.json", "tokenizer.json"} < set(case_facts[0]["came"])
    assert case_facts[0]["beside"] == case_facts[0]["came"]


@pytest.mark.parametrize(("start", "case"), _doing("save"))
def test_a_checkpoint_is_read_without_an_engine(case_facts: list[dict[str, Any]]) -> None:
    assert case_facts[0]["read"] == case_facts[0]["before_save"]


@pytest.mark.parametrize(("start", "case"), _doing("load"))
def test_another_layout_holds_the_same_weights_and_optimizer_state(case_facts: list[dict[str, Any]]) -> None:
    for rank in case_facts:
        assert rank["contents"] == rank["contents_loaded"]
        assert any(key.startswith("optimizer: optimizer.state.exp_avg_sq") for key in rank["contents"]) or all(
            "dp_group_idx" in key for key in rank["contents"] if key.startswith("optimizer")
        )


def test_a_load_in_another_layout_has_the_version_and_learning_rate_of_the_save(two: Facts) -> None:
    for case, saved in (("tp2-to-pp2", "tp2"), ("tp2-to-one", "tp2"), ("pp2-to-one", "pp2")):
        assert {rank["loaded"] for rank in two[case]} == {two[saved][0]["before_save"]}
        assert {rank["lr"] for rank in two[case]} == {0.01}


def test_a_load_leaves_the_settings_of_the_optimizer_as_they_are(two: Facts) -> None:
    """At the end of the warm-up, where the learning rate is the one that is set."""
    for rank in two["dp2-to-tp2"]:
        assert rank["settings"] == [[2e-2, 0.8, 0.5]]


STARTS = [pytest.param("two"), pytest.param("experts", marks=pytest.mark.all)]


@pytest.mark.parametrize("start", STARTS)
def test_versions_are_right_when_parameters_are_gathered_during_the_next_forward_pass(
    request: pytest.FixtureRequest, start: str
) -> None:
    facts: Facts = request.getfixturevalue(start)
    assert facts["late"][0]["versions"] == facts["prompt"][0]["versions"]
    assert facts["late"][0]["after_offload"] == facts["prompt"][0]["after_offload"]


@pytest.mark.parametrize("start", STARTS)
def test_versions_are_read_from_the_host_while_the_model_is_offloaded(
    request: pytest.FixtureRequest, start: str
) -> None:
    facts: Facts = request.getfixturevalue(start)
    for rank in facts["prompt"] + facts["late"]:
        assert rank["storage"] == 0
        assert rank["offloaded"] == rank["versions"][-1]


def test_the_functions_for_verl_programs_save_upload_and_send_the_weights(two: Facts) -> None:
    first, last = two["pp2"]
    assert first["contents_after"]
    assert last["contents_after"]
    assert first["saved"] == ["ckpt_contents.json", "model"], "the model alone"
    assert first["calls"] == [[3, True, "actor/model-rank-00000"]] * 2 + [[4, first["digest"], 0]]
    assert last["calls"] == [[3, True, "actor/model-rank-00001"]] * 2
    assert sorted(first["reported"] + last["reported"]) == first["written"], "every file, by one rank"
    assert first["left_to_us"], "it was staged, and verl does not count it among its own"
    assert first["again"]
    assert last["again"], "of what is committed nothing is written again"
    assert {first["saved_digest"], last["received"]} == {first["digest"]}
    assert set(first["kept"]) <= set(first["meta"])
    assert last["meta"] == []


def test_what_one_rank_fails_of_in_these_functions_is_raised_on_all_and_leaves_none_behind(two: Facts) -> None:
    """What follows them, above, works."""
    first, last = two["pp2"]
    assert first["failures"] == last["failures"]
    no_turn, no_room, *not_begun = first["failures"]
    assert "rank 1: RunError: could not begin to save the weights of step 3" in no_turn
    assert "rank 1: RunError: no turn" in no_turn
    assert no_room == "could not upload version 3: rank 0: RunError: no room"
    assert not_begun == [
        "could not upload version 3: rank 1: RuntimeError: out of memory",
        "could not broadcast the weights: rank 1: RuntimeError: out of memory",
    ]


def test_a_rank_that_fails_or_is_late_fails_the_save_on_all_ranks_and_the_next_one_is_sound(two: Facts) -> None:
    first, last = two["bad"]
    assert "rank 1: Is a directory" in first["told"]["torn"]
    assert "rank 1: the training state could not be copied: out of memory" in first["told"]["not-copied"]
    assert first["told"]["no-turn"] == "rank 1: the monitor is gone"
    assert "Not a directory" in first["told"]["no-folder"]
    assert first["told"]["late"] == "rank 1 did not write its share (late) within 0.5 s"
    assert last["told"] == first["told"] | {"no-turn": "no turn"}
    for rank in (first, last):
        assert len(rank["after"]) == 5
        assert min(rank["after"]) >= 3


def test_nothing_that_is_pickled_in_a_checkpoint_runs(two: Facts) -> None:
    poisoned = two["poisoned"][0]["poisoned"]
    trees = ("model", "optimizer", "extra")
    assert set(poisoned) == {f"{tree}/dist_ckpt/{name}" for tree in trees for name in (".metadata", "common.pt")} | {
        "an object in extra/dist_ckpt"
    }
    for name, (error, ran) in poisoned.items():
        assert not ran, name
        assert error.startswith("RunError: "), name
        assert "cannot be" in error
    assert two["poisoned"][0]["sound"]


def test_tokens_of_other_numbers_on_each_rank_are_gathered_and_summed_over_gloo(two: Facts) -> None:
    """As experts get them that tensor-parallel ranks share: on four ranks, as in the long tests."""
    for rank in two["ep2"]:
        assert set(rank["uneven"].values()) == {True}, rank["uneven"]


def test_models_that_would_be_built_wrongly_are_refused(two: Facts) -> None:
    family, bias, activation, rotary, uneven, dense, mixed, unknown = two["bad"][0]["said"]
    assert "llama, qwen2, qwen3" in family
    assert "gpt2" in family
    assert "attention_bias" in bias
    assert "hidden_act=gelu" in activation
    assert "yarn" in rotary
    assert uneven == "backend.ep is 3; it must divide the model's num_experts (4)"
    assert dense == "backend.ep is 2; it must divide the model's num_experts (0)"
    assert "mlp_only_layers" in mixed
    assert unknown.startswith("backend=megatron cannot publish decoder.unknown_weight of this model: ")
    assert two["bad"][0]["llama3"] == {"rotary_base": 5e5, "rope_scaling": True, "rope_scaling_factor": 8.0}


def test_a_gpu_without_transformer_engine_is_told_of_once(two: Facts) -> None:
    assert two["bad"][0]["te"] == [False, False]
    assert len(two["bad"][0]["warnings"]) == 1
    assert "transformer-engine is not installed" in two["bad"][0]["warnings"][0]


def test_each_stand_in_for_a_function_of_cuda_is_needed_and_used(two: Facts) -> None:
    """Were one needless, because the original works or nobody calls it, this would fail."""
    from trinity_sync.backends.megatron.cpu import STAND_INS

    for rank in two["tp2"]:
        assert rank["raised"] == sorted(STAND_INS)
        assert rank["used"] == sorted(STAND_INS)


def test_the_engines_run_without_cuda(two: Facts) -> None:
    assert {rank["cuda"] for of_case in two.values() for rank in of_case} == {False}


def test_cuda_means_the_cpu_inside_the_mode_and_only_there() -> None:
    import torch

    from trinity_sync.backends.megatron.cpu import CudaMeansCpu

    with CudaMeansCpu():
        made = torch.ones(2, device="cuda", pin_memory=True)
        assert made.device.type == "cpu"
        assert made.type() == "torch.cuda.FloatTensor"
        assert made.to("cuda:0") is made
        assert made.cuda() is made
        assert torch.empty_like(made, device=torch.device("cuda", 0)).device.type == "cpu"
        assert not torch.cuda.is_available()
    assert made.type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(2, device="cuda")


@pytest.mark.all
def test_a_run_of_another_backend_does_not_import_megatron() -> None:
    program = "import sys, trinity_sync.trainer.worker; print([m for m in sys.modules if m.startswith('megatron')])"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], env=_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"


def _environment() -> dict[str, str]:
    return {**os.environ, **PLATFORM}
