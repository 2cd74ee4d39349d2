"""The tables of docs/verl-reference.md: a test checks each row, and verl has the keys that its rows name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from tests.config.test_objective import algorithm
from tests.pages import ROOT
from trinity_sync.config import compose, typed
from trinity_sync.trainer.worker_spec import worker_spec

PAGE = (ROOT / "docs" / "verl-reference.md").read_text()
KEY = re.compile(r"`([^`]+)`")
VERL = Path(str(getattr(find_spec("verl"), "origin", ""))).parent
PLUGGED_IN, OURS, TRINITY = "verl's keys, with the plug-in on", "verl's keys and ours", "Trinity-RFT's calls"

HERE = "test_verl_tables.py::test_verls_trainers_do_what_the_table_says_of_them"
ENGINE = "test_verl_tables.py::test_a_setting_of_ours_is_one_of_verls_engine"
LOSS = "test_verl_tables.py::test_a_setting_of_ours_is_one_of_verls_loss"
OBJECTIVE = "config/test_objective.py::test_the_keys_are_what_verl_is_given"
REFUSED = (
    "integrations/real_engines/test_megatron_manager.py::"
    "test_what_cannot_be_saved_is_refused_by_name_before_anything_is_written"
)
SEED = "sync/test_seed_calls.py"
EFFECT = "test_keys_have_effect.py::test_a_key_changes_what_a_run_is_built_from"
RESUMING, RUNS = "integrations/verl/test_resuming.py", "cli/test_runs.py"
DAPO, V1 = "experimental/reward_loop/reward_manager/dapo.py", "trainer/ppo/v1/trainer_base.py"
DOCTOR = "cli/test_verl_doctor.py::test_what_is_in_the_way_is_named_by_its_key"

TESTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    PLUGGED_IN: {
        "trainer.default_local_dir": (
            "integrations/verl/test_saves.py::test_a_save_is_committed_when_both_ranks_have_written_and_the_trainer_has_gone_on",
            f"{RESUMING}::test_a_save_goes_on_after_the_step_of_its_folder_that_was_loaded",
        ),
        "trainer.save_freq": (HERE, DOCTOR),
        "trainer.max_actor_ckpt_to_keep": (
            "integrations/verl/test_retention.py::test_the_limit_is_enforced_where_there_is_one",
            "integrations/real_engines/test_manager.py::test_the_limit_holds_after_the_commit_and_after_a_restart",
            "integrations/real_engines/test_manager.py::test_a_limit_that_one_role_has_holds_beside_the_policies",
        ),
        "trainer.remove_previous_ckpt_in_save": (
            HERE,
            "integrations/verl/test_start_line.py::test_a_ppo_program_names_the_limit_that_holds_and_then_loads",
        ),
        "trainer.resume_mode=auto": (
            "checkpoint/test_resume_point.py::test_a_damaged_one_of_ours_is_passed_over_for_verls",
            f"{RESUMING}::test_what_was_committed_and_is_gone_or_unreadable_stops_the_start_unless_the_user_says_so",
            f"{RESUMING}::test_what_the_monitor_of_the_start_before_is_still_to_commit_is_gone_on_from",
        ),
        "trainer.resume_mode=disable": (HERE,),
        "trainer.resume_mode=resume_path": (
            f"{RESUMING}::test_a_save_goes_on_after_the_step_of_its_folder_that_was_loaded",
            "integrations/verl/test_saves.py::test_what_is_not_there_to_be_loaded_is_told_to_all",
        ),
        "trainer.default_hdfs_dir": (
            "integrations/verl/test_remote_copies.py::test_a_driver_copies_what_the_engines_have_written_when_it_is_committed",
            "integrations/verl/test_remote_copies.py::test_a_copy_of_a_driver_that_fails_is_told_at_the_next_one_and_at_the_end",
            "integrations/verl/test_remote_copies.py::test_what_is_being_copied_is_not_deleted_however_long_it_takes",
            "integrations/real_engines/test_megatron_manager.py::test_the_limit_and_the_copy_elsewhere_come_after_the_commit",
            HERE,
        ),
        "trainer.del_local_ckpt_after_load": (HERE,),
        "checkpoint.save_contents": (
            "integrations/verl/test_copies.py::test_an_export_of_a_model_with_an_adapter_is_refused_before_anything_is_trained",
            "integrations/real_engines/test_megatron_manager.py::test_contents_that_are_left_out_are_not_written_and_not_loaded",
            "verl_programs/test_sft.py::test_contents_without_the_optimizer_are_saved_so",
        ),
        "checkpoint.load_contents": (
            "integrations/real_engines/test_manager.py::test_what_is_asked_for_and_not_there_is_refused",
        ),
        "huggingface/": (
            "integrations/verl/test_model_files.py::test_what_verl_sets_for_its_own_work_changes_no_byte",
            "integrations/verl/test_model_files.py::test_what_the_program_changes_in_the_config_is_saved",
            "integrations/verl/test_model_files.py::test_a_tokenizer_that_the_program_changes_is_saved_as_it_is",
        ),
        "checkpoint.save_lora_only": (
            "integrations/verl/test_copies.py::test_of_a_model_whose_adapters_alone_are_saved_these_are_all_that_is",
        ),
        "checkpoint.async_save": (HERE, DOCTOR),
        "checkpoint.mbridge_config": (
            "integrations/real_engines/test_megatron_manager.py::test_an_export_stands_beside_the_tree_and_may_be_the_bridges_own",
        ),
        "trainer.esi_redundant_time": (HERE,),
        "trainer.checkpoint_callback_class": (
            "integrations/verl/test_callback.py::test_a_step_is_committed_though_no_engine_is_used_again",
            HERE,
        ),
        "actor.strategy": (
            "integrations/verl/test_plugin.py::test_engines_of_every_kind_are_ours",
            "integrations/verl/test_plugin.py::test_the_search_for_the_newest_checkpoint_is_ours",
            DOCTOR,
        ),
        "megatron.use_megatron_fsdp": (REFUSED, DOCTOR),
        "actor_rollout_ref.rollout.checkpoint_engine.*": (
            "integrations/weight_sync/test_weight_sync.py::test_the_backend_is_registered_and_the_other_name_only_when_asked",
            "integrations/weight_sync/test_weight_sync_in_verl.py::test_versions_move_in_verls_manager",
            HERE,
        ),
        "data.pt": (
            "integrations/verl/test_trainer_files.py::test_a_rank_whose_file_is_whole_tells_of_that",
            "integrations/verl/test_trainer_files.py::test_what_was_not_written_fails_the_step",
        ),
    },
    OURS: {
        "actor_rollout_ref.actor.strategy": (ENGINE,),
        "actor.megatron.tensor_model_parallel_size": (ENGINE,),
        "actor.megatron.dist_ckpt_optim_fully_reshardable": (ENGINE,),
        "trainer.n_gpus_per_node": (
            "config/test_checks.py::test_fsdp_size_must_divide_the_ranks",
            "e2e/test_bytes.py::test_weights_without_an_engine_are_published_loaded_saved_and_gone_on_with",
        ),
        "actor.fsdp_config.fsdp_size": (ENGINE,),
        "actor.fsdp_config.model_dtype": (ENGINE,),
        "actor.fsdp_config.mixed_precision": (ENGINE,),
        "FSDPEngineConfig": ("config/test_checks.py::test_any_setting_of_verls_engine_can_be_given",),
        "actor.optim.lr": (ENGINE,),
        "actor.clip_ratio": (LOSS,),
        "actor.policy_loss.loss_mode": (OBJECTIVE,),
        "actor.policy_loss.clip_cov_ratio": (OBJECTIVE,),
        "actor.use_kl_loss": (OBJECTIVE, LOSS),
        "algorithm.use_kl_in_reward": (
            "trainer/test_reward_penalty.py::test_rewards_and_metrics_are_those_of_verls_own_function",
        ),
        "algorithm.kl_ctrl.type": (
            "trainer/test_reward_penalty.py::test_an_adaptive_coefficient_goes_the_way_of_verls_controller",
        ),
        "algorithm.filter_groups.enable": (
            "samples/test_filtering.py::test_more_are_drawn_until_the_bound_and_then_the_first_of_the_others_are_taken",
            "samples/test_filtering.py::test_what_has_to_differ_is_the_reward_with_its_penalty_the_score_or_whether_it_is_right",
        ),
        "reward.reward_kwargs.overlong_buffer_cfg.len": ("samples/test_overlong.py::test_it_is_verls",),
        "actor.entropy_coeff": (
            *(LOSS, EFFECT, "backends/test_fsdp.py::test_loss_entropy_and_gradient_are_those_by_hand"),
        ),
        "algorithm.rollout_correction.rollout_is": (
            "trainer/test_policy_loss.py::test_losses_of_tokens_are_multiplied_by_truncated_weights",
            "trainer/test_objectives.py::test_with_the_samplers_log_probs_the_rules_are_those_of_verls_bypass_mode",
        ),
        "algorithm.rollout_correction.rollout_rs": (
            "config/test_objective.py::test_rules_that_verl_has_are_the_ones_that_are_taken",
            "config/test_objective.py::test_bounds_that_pass_are_what_verl_takes",
        ),
        "algorithm.rollout_correction.bypass_mode": (
            "config/test_objective.py::test_log_probs_are_recomputed_where_that_is_asked_for",
            "trainer/test_objectives.py::test_with_the_samplers_log_probs_the_rules_are_those_of_verls_bypass_mode",
        ),
        "data.train_files": (
            "tasks/test_verl.py::test_a_parquet_file_as_verls_data_preparation_writes_it_gives_the_same_prompts",
            EFFECT,
        ),
        "reward.custom_reward_function.path": (
            "tasks/test_verl.py::test_a_function_of_the_users_is_called_as_verl_calls_it",
        ),
        "data.max_prompt_length": (
            "launch/test_row_scan.py::test_what_is_filtered_is_given_out_no_more",
            "launch/test_row_scan.py::test_the_first_that_is_too_long_is_named_and_how_many_there_are",
            "tasks/test_pair_encoding.py::test_a_pair_that_is_too_long_is_refused_or_loses_its_right_end",
        ),
        "data.apply_chat_template_kwargs": (
            "tasks/test_encoding.py::test_a_chat_is_asked_for_an_answer_with_the_arguments_that_are_given",
        ),
        "data.messages_key": (
            "tasks/test_pair_encoding.py::test_tokens_and_mask_are_those_of_verls_dataset",
            "tasks/test_pair_encoding.py::test_a_turn_that_is_another_one_in_the_conversation_is_refused_unless_that_is_allowed",
        ),
        "data.train_batch_size": (
            "config/test_checks.py::test_the_sequences_of_a_step_are_shared_out_evenly",
            "samples/test_queue.py::test_explorers_run_as_far_ahead_as_the_bound_allows_and_then_wait",
        ),
        "actor.ppo_mini_batch_size": (
            "trainer/test_batch.py::test_a_mini_batch_has_the_same_sequences_on_any_number_of_ranks",
        ),
        "actor.ppo_micro_batch_size_per_gpu": (
            "trainer/test_batch.py::test_micro_batches_are_equal_and_within_the_limit",
        ),
        "actor.use_dynamic_bsz": (
            "backends/test_token_batches.py::test_there_are_no_more_micro_batches_than_tokens_ask_for",
        ),
        "trainer.balance_batch": (
            "trainer/test_batch.py::test_balanced_ranks_share_every_sequence_of_a_mini_batch_once",
        ),
        "model.use_remove_padding": (
            "trainer/test_worker_config.py::test_sequences_are_packed_where_the_model_can",
            "trainer/test_worker_config.py::test_they_are_padded_where_that_is_asked_for_or_the_engine_cannot",
        ),
        "actor.ulysses_sequence_parallel_size": (ENGINE,),
        "trainer.save_freq": (
            "e2e/test_short_runs.py::test_a_resumed_run_ends_with_the_same_digests",
            "trainer/test_saves.py::test_a_save_is_committed_behind_the_trainers_back_and_recorded",
        ),
        "trainer.max_actor_ckpt_to_keep": (
            "protocol/test_retention.py::test_keep_last_keeps_the_newest_whatever_order_they_are_given_in",
        ),
        "data.val_files": (
            "config/test_validation.py::test_a_validation_of_a_file_is_of_its_first_rows_in_their_order",
            "tracking/test_names.py::test_a_validation_is_named_by_the_samples_of_a_prompt_and_what_is_right_is_its_core",
        ),
        "the names of metrics at a tracker": ("tracking/test_names.py::test_verl_has_these_names",),
        "trainer.total_training_steps": (f"{RUNS}::test_a_resume_takes_new_settings_and_shows_what_they_change",),
        "trainer.total_epochs": (
            "launch/test_total_epochs.py::test_passes_over_the_rows_are_a_number_of_steps",
        ),
        "trainer.resume_mode": (
            f"{RUNS}::test_a_resume_goes_on_in_place_with_the_settings_of_the_run",
        ),
    },
    TRINITY: {
        "Synchronizer.get_actor": (
            f"{SEED}::test_the_settings_of_trinity_rft_are_read_by_their_names",
            f"{SEED}::test_names_alone_make_one",
            f"{SEED}::test_of_a_synchronizer_that_is_there_its_own_limit_holds",
            f"{SEED}::test_a_synchronizer_of_another_checkpoint_folder_is_refused",
        ),
        "set_model_state_dict": (
            f"{SEED}::test_a_state_dict_goes_in_and_out_by_remote",
            f"{SEED}::test_a_path_is_handed_out_as_it_came",
            f"{SEED}::test_announcing_right_after_the_save_waits_for_its_commit",
            f"{SEED}::test_a_version_is_published_again_with_the_same_weights_only",
            f"{SEED}::test_a_trainer_that_goes_back_begins_the_next_attempt",
        ),
        "get_model_state_dict": (
            "sync/test_handover.py::test_a_version_is_handed_out_with_its_tensors",
            "sync/test_handover.py::test_a_version_on_disk_is_named_by_its_folder",
        ),
        "get_state_dict_meta": ("sync/test_handover.py::test_tensors_of_every_kind_are_handed_out",),
        "wait_new_model_state_dict": (
            "sync/test_synchronizer.py::test_whoever_waits_for_a_newer_version_is_woken_by_the_commit",
            f"{SEED}::test_an_explorer_requires_sync_while_it_waits",
            f"{SEED}::test_before_the_first_version_an_explorer_without_one_is_answered_at_once",
            "sync/test_synchronizer.py::test_nobody_waits_for_a_version_after_the_trainer_has_stopped",
        ),
        "notify_no_new_model_state_dict": (f"{SEED}::test_those_who_wait_are_woken_once",),
        "get_latest_model_version": ("sync/test_synchronizer.py::test_the_seed_calls_go_by_steps",),
        "get_latest_model_path": (
            "sync/test_handover.py::test_a_version_on_disk_is_named_by_its_folder",
            "sync/test_synchronizer.py::test_the_place_of_the_newest_version_is_none_where_it_has_no_folder",
        ),
        "set_trainer_status": (
            f"{SEED}::test_a_status_is_an_enums_member_its_value_or_its_name",
            "sync/test_synchronizer.py::test_a_dead_explorer_is_not_counted_whatever_it_said_last",
        ),
        "ready_to_nccl_sync": (
            f"{SEED}::test_nobody_comes_to_a_broadcast_whose_other_side_has_stopped",
            f"{SEED}::test_trinitys_trainer_is_answered_where_no_explorer_comes",
            f"{SEED}::test_a_broadcasts_version_counts_when_all_are_ready",
        ),
        "coordinate_weight_sync_setup": (
            f"{SEED}::test_trainer_and_explorer_are_led_into_a_group_and_out_of_it",
            f"{SEED}::test_it_stays_until_the_last_module_is_gone",
        ),
        "setup_weight_sync_group": ("sync/test_handover.py::test_a_broadcast_begins_when_all_are_ready",),
        "latest_state_dict_iteration.txt": (
            f"{SEED}::test_a_commit_announces_itself",
            f"{SEED}::test_a_synchronizer_begins_with_what_was_committed_before",
        ),
        "CheckpointCoordinator": ("checkpoint/test_coordinator.py::test_counted_saves_move_the_trackers",),
        "save_async": (
            "checkpoint/test_coordinator.py::test_a_save_that_raises_is_told_by_the_next_of_its_name_too",
            "checkpoint/test_coordinator.py::test_a_save_that_raises_is_told_by_wait_all_and_fails_the_step",
        ),
        "await register_and_monitor": (
            "checkpoint/test_coordinator.py::test_counts_given_with_the_mark_are_added",
            "checkpoint/test_coordinator.py::test_marking_a_step_does_not_wait_for_its_parts",
            f"{SEED}::test_a_commit_that_does_not_come_in_time_names_what_is_missing",
        ),
        "CheckpointMonitor.get_actor": (f"{SEED}::test_a_monitors_calls_are_made_plainly_as_well",),
        "notify_started": ("checkpoint/test_coordinator.py::test_counted_saves_move_the_trackers",),
    },
}  # fmt: skip
"""By the first key or call of the row."""


def rows(title: str) -> dict[str, str]:
    """The first cell of each row of a table, by the row's first key, or all of its text where that is no key."""
    table = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    cells = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")][1:]
    found = {}
    for cell in cells:
        keys = KEY.findall(cell)
        first = keys[0] if keys else cell
        found[keys[1] if first == "data.train_files" and "multi-turn" in cell else first.partition("(")[0]] = cell
    assert len(found) == len(cells), "no two rows have the same first key"
    return found


@pytest.mark.parametrize("title", TESTS)
def test_every_row_has_a_test(title: str) -> None:
    assert rows(title).keys() == TESTS[title].keys()


@pytest.mark.parametrize("named", sorted({name for table in TESTS.values() for row in table.values() for name in row}))
def test_the_test_of_a_row_is_there(named: str) -> None:
    file, _, name = named.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), named


# the left side: verl's


@cache
def verls_keys() -> frozenset[str]:
    """All keys of verl's configurations, from the top."""
    found: set[str] = set()

    def walk(node: Any, above: str) -> None:
        for name, value in node.items():
            found.add(f"{above}{name}")
            if isinstance(value, dict):
                walk(value, f"{above}{name}.")

    for name in ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer_engine"):
        with initialize_config_dir(version_base=None, config_dir=str(VERL / "trainer" / "config")):
            walk(OmegaConf.to_container(hydra_compose(name)), "")
    return frozenset(found)


READ = {
    "trainer.remove_previous_ckpt_in_save": (V1, "trainer.get(\"remove_previous_ckpt_in_save\""),
    "checkpoint.save_lora_only": ("trainer/config/config.py", "save_lora_only: bool"),
    "actor.fsdp_config.mixed_precision": ("workers/config/engine.py", "mixed_precision: Optional"),
    "FSDPEngineConfig": ("workers/config/engine.py", "class FSDPEngineConfig"),
    "reward.reward_kwargs.overlong_buffer_cfg.len": (DAPO, "overlong_buffer_cfg.len"),
    "penalty_factor": (DAPO, "overlong_buffer_cfg.penalty_factor"),
    "reward_kwargs": ("trainer/ppo/reward.py", "reward_fn_config.get(\"reward_kwargs\""),
}  # fmt: skip
"""Keys that verl's programs read and its files do not have, and where they do."""


@pytest.mark.parametrize("title", [PLUGGED_IN, OURS])
def test_verl_has_the_keys_of_a_table(title: str) -> None:
    named = [key.partition("=")[0].removesuffix(".*") for cell in rows(title).values() for key in KEY.findall(cell)]
    ends = {key[dot:] for key in verls_keys() for dot in (0, *(found.end() for found in re.finditer(r"\.", key)))}
    assert not [key for key in named if "/" not in key and key not in {*ends, *READ, "data.pt"}]
    assert not [key for key, (file, text) in READ.items() if text not in (VERL / file).read_text()]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (V1, "if self.config.trainer.save_freq > 0 and ("),
        ("trainer/sft_trainer.py", "if is_last_step or (self.save_freq > 0 and is_save_step):"),
        ("trainer/sft_trainer.py", 'if self.save_freq == "after_each_epoch":'),
        (
            V1,
            'self.config.trainer.get("max_actor_ckpt_to_keep", None) if not remove_previous_ckpt_in_save else 1',
        ),
        (V1, 'if self.config.trainer.resume_mode == "disable":'),
        ("utils/checkpoint/checkpoint_handler.py", 'if resume_mode == "disable":'),
        ("utils/checkpoint/fsdp_checkpoint_manager.py", "hdfs_path: Unused (for API compatibility)."),
        (
            "utils/checkpoint/fsdp_checkpoint_manager.py",
            "os.remove(local_model_path) if is_non_local(local_model_path)",
        ),
        (V1, "skip write latest_checkpointed_iteration.txt when async_save is True"),
        ("utils/checkpoint/checkpoint_manager.py", "redundant_time"),
        (V1, "self.checkpoint_callback.on_save("),
        (V1, 'checkpoint_engine_config.backend = "naive"'),
        (
            "trainer/ppo/v1/trainer_separate_async.py",
            'assert config.actor_rollout_ref.rollout.checkpoint_engine.backend != "naive"',
        ),
    ],
)
def test_verls_trainers_do_what_the_table_says_of_them(file: str, text: str) -> None:
    """What stays verl's is not ours to try: its sources still say so."""
    assert text in " ".join((VERL / file).read_text().split())


# what of ours comes to the same


@pytest.mark.parametrize(
    ("overrides", "given"),
    [
        (["backend=fsdp"], {"strategy": "fsdp"}),
        (["backend=fsdp2"], {"strategy": "fsdp2"}),
        (["backend=megatron"], {"strategy": "megatron"}),
        (
            ["backend=megatron", "backend.ranks=8", "backend.tp=2", "backend.pp=2", "backend.ep=2"],
            {
                **{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
                "sequence_parallel": True,
            },
        ),
        (
            ["backend=megatron", "backend.tp=2", "backend.sequence_parallel=false"],
            {"sequence_parallel": False},
        ),
        (["backend=megatron"], {"dist_ckpt_optim_fully_reshardable": True}),
        (["backend=megatron", "backend.optimizer_format=dp_reshardable"], {"dist_ckpt_optim_fully_reshardable": False}),
        (
            ["backend.fsdp_size=1", "backend.param_offload=true", "backend.optimizer_offload=true"],
            {"fsdp_size": 1, "param_offload": True, "optimizer_offload": True},
        ),
        (["backend.master_dtype=bf16"], {"model_dtype": "bf16"}),
        (
            ["backend.param_dtype=fp16", "backend.reduce_dtype=bf16"],
            {"mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "bf16", "buffer_dtype": "fp32"}},
        ),
        (["backend.sp=2"], {"ulysses_sequence_parallel_size": 2}),
        (
            ["trainer.lr=0.25", "trainer.betas=[0.5,0.75]", "trainer.weight_decay=0.125", "trainer.clip_grad=2"],
            {"lr": 0.25, "betas": [0.5, 0.75], "weight_decay": 0.125, "clip_grad": 2.0},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_setting_of_ours_is_one_of_verls_engine(overrides: list[str], given: dict[str, Any]) -> None:
    spec = worker_spec(typed(compose(overrides)), "model", "logs")
    engine, optimizer = spec.backend.engine_configs(spec.engine, spec.optimizer)
    found = {name: getattr(engine if hasattr(engine, name) else optimizer, name) for name in given}
    assert {name: list(value) if name == "betas" else value for name, value in found.items()} == given


@pytest.mark.parametrize(
    ("overrides", "given"),
    [
        (
            ["algorithm.clip_ratio=0.1", "algorithm.clip_ratio_high=0.3", "algorithm.clip_ratio_c=4"],
            {"clip_ratio": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 4.0},
        ),
        (["algorithm.loss_agg_mode=seq-mean-token-sum"], {"loss_agg_mode": "seq-mean-token-sum"}),
        (["algorithm.kl.coeff=0"], {"use_kl_loss": False}),
        (["algorithm.entropy_coeff=0.5"], {"entropy_coeff": 0.5}),
    ],
)
def test_a_setting_of_ours_is_one_of_verls_loss(overrides: list[str], given: dict[str, Any]) -> None:
    function: Any = algorithm(*overrides).loss("fsdp2")
    cells = [cell.cell_contents for cell in function.__closure__]
    (used,) = [content for content in cells if type(content).__name__ == "ActorConfig"]
    assert {name: getattr(used, name) for name in given} == given
