"""The checks between fields, the digest, the difference of two configurations, and building what `_target_` names."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from tests.model_folders import bare_model
from trinity_sync import config
from trinity_sync.config import (
    anchored,
    build_task,
    check,
    check_inputs,
    compose,
    config_diff,
    config_digest,
    instantiate_target,
)
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.package_source import dataclass_fields
from trinity_sync.models.families import is_known
from trinity_sync.protocol.retention import POLICIES, make_policies


class PairsOnly:
    """A task that knows pairs and no prompts."""

    def __init__(self, seed: int, broken: bool = False) -> None:
        if broken:
            raise ConfigError("train.jsonl line 3: no JSON object")

    def pairs(self, step: int, count: int) -> list[tuple[str, str]]:
        return [("a", "b")] * count


class Judged:
    """A task that is given its reward as a function."""

    def __init__(self, seed: int, reward: Any) -> None:
        self.reward = reward

    def prompts(self, step: int, count: int) -> list[str]:
        return ["?"] * count


def half(prompt: str = "", weight: float = 0.5) -> float:
    return weight


def fail() -> None:
    raise RunError("the reward server is gone")


_DEFAULT = compose()


def with_task(**task: Any) -> DictConfig:
    """The default configuration with a task of the user's own, which no option file types."""
    cfg = OmegaConf.merge(_DEFAULT, {"task": None})
    cfg.task = task
    return cfg


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(compose(overrides))
    return str(caught.value)


def check_all(cfg: DictConfig) -> None:
    """All checks before anything starts, as the entry points make them."""
    check(cfg)
    check_inputs(cfg)


def test_the_default_configuration_passes() -> None:
    check(compose())


@pytest.mark.parametrize(
    ("override", "right"),
    [
        ("backend.ranks=0", "at least 1"),
        ("backend.fsdp_size=-2", "at least -1"),
        ("backend.timeout_s=0", "more than 0"),
        ("seed=-1", "at least 0"),
        ("trainer.steps=-1", "at least 0"),
        ("trainer.lr=0", "more than 0"),
        ("trainer.lr=nan", "finite"),
        ("trainer.clip_grad=inf", "finite"),
        ("trainer.betas=[0.9,-0.1]", "two numbers, at least 0"),
        ("trainer.betas=[0.9]", "two numbers"),
        ("trainer.betas=[0.9,1]", "less than 1"),
        ("trainer.warmup_steps=141", "140 or less"),
        ("trainer.lr_scheduler=linear", "constant, cosine"),
        ("trainer.micro_batch_size=0", "at least 1"),
        ("sync.interval=0", "at least 1"),
        ("sync.slots=1", "at least 2"),
        ("sync.verify=bucketts", "did you mean bucket?"),
        ("sync.wire_dtype=int8", "bf16, fp32, fp16"),
        ("sync.transport=ucx", "auto, nccl, gloo, tcp, nixl, ray"),
        ("sync.encoding=deltas", "did you mean delta?"),
        ("checkpoint.format=zip", "must be one of verl, dcp"),
        ("checkpoint.interval=-1", "at least 0"),
        ("checkpoint.mirror=s4://bucket/runs", "knows no s4://"),
        ("checkpoint.mirror=memory://runs", "name a place that stays"),
        ("checkpoint.mirror_keep=some", "same, all"),
        ("checkpoint.mirror_tries=0", "at least 1"),
        ("checkpoint.mirror_backoff_s=0", "more than 0"),
        ("checkpoint.timeout_s=1e12", "at most 1000000000"),
        ("checkpoint.save_strategy=all", "unrestricted, single_node"),
        ("algorithm.samples_per_prompt=1", "at least 2"),
        ("algorithm.clip_ratio_high=0", "more than 0"),
        ("algorithm.rollout_correction.rollout_is=tokens", "token, sequence (did you mean token?)"),
        ("algorithm.rollout_correction.rollout_is_threshold=0", "more than 0"),
        ("explorer.replicas=33", "32 or less"),
        ("explorer.top_p=1.5", "at most 1"),
        ("cluster.num_cpus=0", "at least 1"),
        ("trainer.schedule=fast", "lockstep, free"),
        ("samples.over_stale=keep", "wait, drop"),
        ("samples.buffer=0", "at least 1"),
        ("model.architecture.hidden_size=0", "at least 1"),
        ("model.architecture.num_key_value_heads=3", "must divide num_attention_heads (4)"),
        ("model.architecture.model_type=null", "qwen3"),
        ("live=loud", "auto, panel, line, off"),
        ("name=a/b", "it becomes a folder"),
        ("name='..'", "it becomes a folder"),
        ("+sync.colour=red", "is not a setting; sync has mode, interval"),
        ("+colour=red", "is not a setting; the configuration has name, seed"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_what_would_be_right(override: str, right: str) -> None:
    message = refused(override)
    assert message.startswith(override.split("=")[0].lstrip("+"))
    assert right in message


@pytest.mark.parametrize(
    ("key", "name"), [("backend.overrides", "use_orig_params"), ("checkpoint.mirror_options", "own_key")]
)
def test_what_is_handed_on_to_others_takes_keys_of_theirs(key: str, name: str) -> None:
    for override in (f"{key}={{{name}: 1}}", f"{key}.{name}=1"):
        cfg = compose([override])
        check(cfg)
        assert OmegaConf.select(cfg, f"{key}.{name}") == 1


def test_all_fields_of_verls_engine_configs_are_known() -> None:
    from verl.workers import config as engines

    for name in ("FSDPEngineConfig", "McoreEngineConfig"):
        public = {field.name for field in fields(getattr(engines, name)) if not field.name.startswith("_")}
        assert dataclass_fields("verl", "workers/config/engine.py", name) == public
    assert dataclass_fields("verl", "workers/config/engine.py", "NoneConfig") is None
    assert dataclass_fields("no_such_package", "engine.py", "NoneConfig") is None


def test_the_options_of_a_mirror_do_not_choose_another_place() -> None:
    message = refused("checkpoint.mirror=/mnt/far", "checkpoint.mirror_options.protocol=memory")
    assert message.startswith("checkpoint.mirror_options.protocol would take the place of")


@pytest.mark.parametrize(
    ("overrides", "right"),
    [
        (["sync=memory"], "sync.store is for sync=checkpoint"),
        (["sync=checkpoint", "sync.store=s4://bucket/runs"], "sync.store is s4://bucket/runs, but fsspec knows no s4"),
        (["sync=checkpoint", "sync.store=memory://runs"], "sync.store is memory://runs, which ends with the process"),
        (["sync=checkpoint", "sync.verify=bucket"], "sync.verify is bucket; followers compare digests"),
        (["sync=checkpoint", "checkpoint.mirror=/mnt/versions/"], "sync.store is the place of checkpoint.mirror"),
        (["sync=checkpoint", "algorithm=sft", "task=conversations"], "this algorithm has no explorers"),
    ],
)
def test_a_store_that_followers_could_not_use_is_refused(overrides: list[str], right: str) -> None:
    assert right in refused("sync.store=/mnt/versions", *overrides)


def test_a_store_whose_client_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # A client that an earlier test of this process took stays known to fsspec.
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    message = refused("sync=checkpoint", "sync.store=s3://bucket/runs")
    assert message.startswith("sync.store is s3://bucket/runs, but the package that speaks s3:// is not installed")


def test_all_problems_are_listed_at_once() -> None:
    message = refused("sync.slots=0", "explorer.replicas=33", "trainer.schedule=fast", "checkpoint.format=zip")
    assert message.startswith("4 settings are wrong")
    for key in ("sync.slots", "explorer.replicas", "trainer.schedule", "checkpoint.format"):
        assert f"\n  {key} is " in message


@pytest.mark.parametrize(
    ("override", "why"), [("algorithm=sft", "no explorers that could run ahead"), ("sync=nccl", "use sync=memory")]
)
def test_a_free_schedule_is_refused_where_it_cannot_be_had(override: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"trainer.schedule is free.*{why}"):
        check_all(compose(["trainer.schedule=free", override]))


def test_a_free_schedule_runs_as_far_ahead_as_samples_may_be_stale() -> None:
    cfg = compose(["trainer.schedule=free", "sync.max_staleness=3"])
    check(cfg)
    assert (cfg.samples.over_stale, cfg.samples.buffer) == ("wait", 4)


def test_a_wrong_value_does_not_cause_follow_up_problems() -> None:
    assert refused("algorithm.prompts_per_step=0") == "algorithm.prompts_per_step is 0; must be at least 1"


def test_off_without_quotes_in_a_yaml_file_is_explained() -> None:
    cfg = compose()
    cfg.sync.verify = False
    with pytest.raises(ConfigError, match='write "off" with its quotes'):
        check(cfg)


@pytest.mark.parametrize("size", [3, 0])
def test_fsdp_size_must_divide_the_ranks(size: int) -> None:
    assert refused("backend.ranks=4", f"backend.fsdp_size={size}").startswith(
        f"backend.fsdp_size is {size}; must divide"
    )


@pytest.mark.parametrize("size", [-1, 1, 2, 4])
def test_fsdp2_takes_every_divisor_of_the_ranks(size: int) -> None:
    check(compose(["backend=fsdp2", "backend.ranks=4", f"backend.fsdp_size={size}"]))


def test_fsdp1_with_a_copy_on_each_rank_is_refused() -> None:
    message = refused("backend=fsdp", "backend.ranks=2", "backend.fsdp_size=1")
    assert "drift apart" in message
    assert "backend.fsdp_size=-1" in message
    assert "backend=fsdp2" in message


def test_fsdp1_with_one_rank_may_have_a_size_of_one() -> None:
    check(compose(["backend=fsdp", "backend.ranks=1", "backend.fsdp_size=1"]))


@given(interval=st.integers(1, 9), staleness=st.integers(0, 9))
def test_staleness_is_at_least_the_interval_less_one(interval: int, staleness: int) -> None:
    cfg = OmegaConf.merge(_DEFAULT, {"sync": {"interval": interval, "max_staleness": staleness}})
    if staleness >= interval - 1:
        check(cfg)
    else:
        with pytest.raises(ConfigError, match=f"set sync.max_staleness={interval - 1} or more"):
            check(cfg)


@pytest.mark.parametrize(
    ("overrides", "fits"),
    [
        (["algorithm.prompts_per_step=3", "algorithm.samples_per_prompt=2"], True),
        (["algorithm.prompts_per_step=3", "algorithm.samples_per_prompt=3"], False),
        (["algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=3", "trainer.mini_batches=3"], True),
        (["algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=3", "trainer.mini_batches=2"], False),
    ],
)
def test_the_sequences_of_a_step_are_shared_out_evenly(overrides: list[str], fits: bool) -> None:
    if fits:
        check(compose(overrides))
    else:
        assert "a multiple of backend.ranks x trainer.mini_batches" in refused(*overrides)


def test_the_pairs_of_a_step_are_shared_out_evenly(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("")
    sft = ["algorithm=sft", "task=pairs", f"task.path={tmp_path}/pairs.jsonl", "explorer.replicas=40"]
    check(compose(sft))
    assert refused(*sft, "algorithm.batch_size=3").startswith("algorithm.batch_size is 3; it must be a multiple")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=jsonl"], "task.path has no value and needs one; give task.path=..."),
        (["model=path"], "model.path has no value and needs one; give model.path=..."),
        (["cluster=existing"], "cluster.address has no value and needs one; give cluster.address=..."),
        (
            ["retention=[]"],
            "retention names no policy; choose at least one, retention=[keep_all] keeps every checkpoint",
        ),
        (["~task"], "task has no value; choose an option of the group, task=..."),
    ],
)
def test_a_missing_value_is_named(overrides: list[str], message: str) -> None:
    assert refused(*overrides) == message


def test_an_interpolation_that_leads_nowhere_is_named() -> None:
    assert refused("checkpoint.dir=${nowhere}").startswith("checkpoint.dir cannot be resolved")


# models


def test_a_model_folder_with_a_config_passes_with_and_without_the_group(tmp_path: Path) -> None:
    bare_model(tmp_path)
    check(compose([f"model.path={tmp_path}"]))
    check(compose(["model=path", f"model.path={tmp_path}"]))


def test_a_hub_id_passes() -> None:
    check(compose(["model.path=Qwen/Qwen3-0.6B"]))


def test_a_model_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    assert "a folder without config.json" in refused(f"model.path={tmp_path}")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_model_folder_whose_config_is_no_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    message = refused(f"model.path={tmp_path}")
    assert message.startswith(f"model.path is {tmp_path}, whose config.json ")
    assert "cannot be read" in message or "not a JSON object" in message


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_folder_without_a_number_of_positions_is_refused(tmp_path: Path, nested: bool) -> None:
    fields: dict[str, object] = {"max_position_embeddings": None}
    config = {"model_type": "qwen3", **({"text_config": fields} if nested else fields)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    key = f"{'text_config.' if nested else ''}max_position_embeddings"
    assert f"whose config.json has null for {key}; it must be a whole number" in refused(f"model.path={tmp_path}")


def test_a_model_folder_of_an_unknown_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_mo"}')
    assert "model_type 'qwen3_mo', which transformers does not know (did you mean qwen3_moe?)" in refused(
        f"model.path={tmp_path}"
    )
    assert "which transformers does not know" in refused(f"model.path={tmp_path}", "model.trust_remote_code=true")


def test_a_model_that_brings_its_own_code_needs_to_be_trusted(tmp_path: Path) -> None:
    bare_model(tmp_path, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    assert refused(f"model.path={tmp_path}").startswith("model.trust_remote_code is false, but ")
    check(compose([f"model.path={tmp_path}", "model.trust_remote_code=true"]))


def test_a_model_of_a_known_family_needs_no_trust_though_it_brings_code(tmp_path: Path) -> None:
    bare_model(tmp_path, model_type="deepseek_v3", auto_map={"AutoConfig": "a.B"})
    check(compose([f"model.path={tmp_path}"]))


def test_an_architecture_of_an_unknown_family_is_refused() -> None:
    assert "model.architecture.model_type is qwen33, which transformers does not know (did you mean qwen3?)" in refused(
        "model.architecture.model_type=qwen33"
    )


def test_a_model_that_no_class_makes_for_texts_is_refused(tmp_path: Path) -> None:
    bare_model(tmp_path, model_type="llava", architectures=["LlavaForConditionalGeneration"])
    told = refused(f"model.path={tmp_path}")
    assert told.startswith(f"model.path is {tmp_path}, whose config.json has model_type llava, a family for images")


def test_a_soft_cap_of_the_attention_is_refused_by_file_and_field(tmp_path: Path) -> None:
    bare_model(tmp_path, model_type="gemma2", architectures=["Gemma2ForCausalLM"], attn_logit_softcapping=2.0)
    told = refused(f"model.path={tmp_path}")
    assert told.startswith("model.attn_implementation is sdpa, which leaves out attn_logit_softcapping (2.0) of ")
    assert f"{tmp_path}/config.json" in told
    check(compose([f"model.path={tmp_path}", "model.attn_implementation=eager"]))


def test_all_families_of_transformers_are_known() -> None:
    from transformers import CONFIG_MAPPING

    assert [name for name in CONFIG_MAPPING if not is_known(name)] == []


def test_a_model_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    assert "a file; name a folder" in refused(f"model.path={tmp_path}/model.bin")


@pytest.mark.parametrize("path", ["/models/none", "./none", "a/b/c", "~/none"])
def test_a_model_path_that_leads_nowhere_is_refused(path: str) -> None:
    assert "which does not exist" in refused(f"model.path='{path}'")


def test_a_model_needs_a_path_or_an_architecture() -> None:
    assert "give one of them" in refused("model.architecture=null")


# folders and files


FOLDERS = ["checkpoint.dir", "cluster.temp_dir"]


@pytest.mark.parametrize("key", FOLDERS)
def test_a_folder_may_be_still_to_be_made(key: str, tmp_path: Path) -> None:
    check(compose([f"{key}={tmp_path}/a/b"]))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("key", FOLDERS)
def test_a_folder_cannot_be_below_a_file(key: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(f"{key}={tmp_path}/file/below").startswith(f"{key} is ")


@pytest.mark.parametrize("key", FOLDERS)
def test_a_folder_cannot_be_where_nobody_may_write(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # root may write anywhere, so the answer of the system is given here
    granted = {tmp_path: os.F_OK}
    monkeypatch.setattr(os, "access", lambda path, mode: mode == granted.get(Path(path)))
    assert "cannot be written to" in refused(f"{key}={tmp_path}/below")


def test_a_task_file_must_be_there(tmp_path: Path) -> None:
    assert refused("task=jsonl", f"task.path={tmp_path}/none.jsonl").startswith("task.path is ")


@pytest.mark.parametrize("key", [*FOLDERS, "model.path"])
def test_a_tilde_is_not_taken_for_a_home(key: str) -> None:
    assert refused(f"{key}='~/folder'").startswith(f"{key} is ~/folder, ")


# tasks and targets


def test_the_default_task_can_be_built() -> None:
    check_inputs(compose())


def test_a_task_without_prompts_cannot_be_trained_by_grpo() -> None:
    with pytest.raises(ConfigError, match=r"has no prompts and no reward\(\), but algorithm=grpo needs it"):
        check_inputs(with_task(_target_=f"{__name__}.PairsOnly"))


def test_a_task_without_pairs_cannot_be_trained_by_sft() -> None:
    with pytest.raises(ConfigError, match="use a task such as task=pairs"):
        check_inputs(compose(["algorithm=sft"]))


def test_an_error_in_the_input_file_keeps_its_words() -> None:
    with pytest.raises(ConfigError, match=r"^train.jsonl line 3: no JSON object$"):
        check_inputs(with_task(_target_=f"{__name__}.PairsOnly", broken=True))


@pytest.mark.parametrize("task", [{}, {"digits": 2}, {"_target_": 3}])
def test_a_task_must_name_its_class(task: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="names no class; choose an option such as task=copy_digits"):
        check(with_task(**task))


def judged(**reward: Any) -> DictConfig:
    return with_task(_target_=f"{__name__}.Judged", reward={"_partial_": True} | reward)


def test_a_reward_function_is_built_with_its_settings() -> None:
    cfg = judged(_target_=f"{__name__}.half", weight=0.25)
    assert build_task(cfg.task, 0).reward() == 0.25


def test_a_task_is_built_from_plain_values() -> None:
    task = OmegaConf.to_container(compose(["task.digits=4"]).task, resolve=True)
    assert isinstance(task, dict)
    assert len(build_task(task, 0).prompts(1, 1)[0].answer) == 4


def test_nothing_is_resolved_once_more_when_a_task_is_built() -> None:
    text = f"${{oc.create:{{_target_: {__name__}.fail}}}}"
    with pytest.raises(ConfigError, match=r"^task\.reward\.weight is \$\{oc\.create:.* cannot be handed to a task"):
        build_task({"_target_": f"{__name__}.Judged", "reward": {"weight": text}}, 0)


@pytest.mark.parametrize("task", ["jsonl", "pairs"])
def test_a_task_with_a_file_can_be_built(tmp_path: Path, task: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "response": "2"}\n')
    algorithm = "sft" if task == "pairs" else "grpo"
    check_inputs(compose([f"task={task}", f"task.path={tmp_path}/rows.jsonl", f"algorithm={algorithm}"]))


def test_a_line_of_the_task_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt"\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl.*2"):
        check_inputs(compose(["task=jsonl", f"task.path={tmp_path}/rows.jsonl"]))


def test_a_function_of_a_sum_that_cannot_be_imported_is_named_with_its_place() -> None:
    cfg = compose(["task=jsonl", "task.path=x", "task.reward=[trinity_sync.tasks.rewards.exact_match,2*no_module.x]"])
    with pytest.raises(
        ConfigError, match=r"^task\.reward\.functions\.1\._target_ is no_module\.x, which cannot be used: No"
    ):
        build_task(cfg.task, 0)


@pytest.mark.parametrize("target", ["nowhere.to_be_found", f"{__name__}.no_such_function"])
def test_a_reward_function_that_cannot_be_imported_is_named_with_its_key(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_inputs(judged(_target_=target))
    assert str(caught.value).startswith(f"task.reward._target_ is {target}, which cannot be used: ")


globals()["bound_by_a_call"] = half


def test_a_reward_function_that_only_an_import_finds_is_taken() -> None:
    check_inputs(judged(_target_=f"{__name__}.bound_by_a_call"))


def test_a_class_that_refuses_its_arguments_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^task._target_ is .*PairsOnly, which cannot be used: .*colour"):
        check_inputs(with_task(_target_=f"{__name__}.PairsOnly", colour="red"))


def test_an_error_of_ours_inside_a_target_comes_out_unchanged() -> None:
    with pytest.raises(RunError, match=r"^the reward server is gone$"):
        instantiate_target(OmegaConf.create({"_target_": f"{__name__}.fail"}))


# retention


@pytest.mark.parametrize(
    ("policy", "override", "right"),
    [
        ("keep_last", "n=0", "at least 1"),
        ("keep_every", "steps=-1", "at least 1"),
        ("keep_best", "mode=most", "max or min"),
        ("keep_for", "seconds=0", "greater than 0"),
        ("keep_for", "seconds=tomorrow", "12h"),
        ("keep_for", "seconds=3GB", "12h"),
        ("keep_for", "seconds=inf", "finite"),
        ("keep_within_budget", "bytes=7days", "100GB"),
        ("keep_within_budget", "bytes=0", "greater than 0"),
    ],
)
def test_a_retention_policy_checks_its_own_fields(policy: str, override: str, right: str) -> None:
    message = refused(f"retention=[{policy}]", f"retention.policies.{policy}.{override}")
    assert message.startswith(f"retention.policies.{policy}.{override.split('=')[0]} is ")
    assert right in message


def test_a_policy_must_hold_fields() -> None:
    assert refused("+retention.policies.keep_few=3").startswith(
        "retention.policies.keep_few is 3; must hold the fields"
    )


def test_a_policy_that_does_not_exist_is_refused() -> None:
    assert "there are keep_all" in refused("+retention.policies.keep_few={n: 3}")


@pytest.mark.parametrize(
    ("override", "plain"),
    [
        ("keep_for.seconds=90", 90),
        ("keep_for.seconds=90s", 90),
        ("keep_for.seconds='1.5 h'", 5400),
        ("keep_for.seconds=7d", 604800),
        ("keep_within_budget.bytes=1000", 1000),
        ("keep_within_budget.bytes=500MB", 500_000_000),
        ("keep_within_budget.bytes=2TiB", 2 * 1024**4),
    ],
)
def test_durations_and_sizes_may_be_given_as_text(override: str, plain: float) -> None:
    policy, field = override.partition("=")[0].split(".")
    cfg = compose([f"retention=[{policy}]", f"retention.policies.{override}"])
    check(cfg)
    (built,) = config.retention_policies(cfg)
    assert built == make_policies({policy: {field: plain}})[0]
    assert type(getattr(built, field)) in (int, float)


def test_retention_policies_are_built_from_the_classes_that_their_options_name() -> None:
    names = ["keep_all", "keep_last", "keep_every", "keep_best", "keep_for", "keep_within_budget", "keep_versions"]
    assert names == list(POLICIES)
    built = config.retention_policies(compose([f"retention=[{','.join(names)}]"]))
    assert [type(policy) for policy in built] == list(POLICIES.values())
    assert [policy.name for policy in built] == names


@pytest.mark.parametrize("sync", [["sync=memory", "sync.encoding=delta"], ["sync=checkpoint"], ["sync=nccl"]], ids=str)
def test_versions_are_kept_where_they_travel_as_files_of_deltas(sync: list[str]) -> None:
    keep = "retention=[keep_last,keep_versions]"
    assert refused(keep, *sync).startswith(
        "retention.policies.keep_versions is for sync=checkpoint sync.encoding=delta"
    )
    check(compose([keep, "sync=checkpoint", "sync.encoding=delta"]))
    unchecked = refused(keep, "sync=checkpoint", "sync.encoding=delta", "sync.verify=bucket")
    assert unchecked.startswith("sync.verify is bucket; keep_versions compares digests")


def test_a_policy_of_ours_may_be_given_by_its_name_alone() -> None:
    cfg = compose(["retention=[keep_all]", "+retention.policies.keep_last={n: 3}"])
    check(cfg)
    assert config.retention_policies(cfg) == make_policies({"keep_all": {}, "keep_last": {"n": 3}})


def test_two_policies_of_one_class_stand_side_by_side_and_name_their_own_keys() -> None:
    twin = "+retention.policies.recent={_target_: trinity_sync.protocol.retention.KeepLast, n: %d}"
    cfg = compose([twin % 5])
    check(cfg)
    assert config.retention_policies(cfg) == make_policies({"keep_last": {"n": 2}}) + make_policies(
        {"keep_last": {"n": 5}}
    )
    assert refused(twin % 0).startswith("retention.policies.recent.n is 0; it has to be a whole number")


def test_a_field_that_a_policy_of_ours_does_not_have_is_refused() -> None:
    message = refused("+retention.policies.keep_last.count=3")
    assert "retention.policies.keep_last.count is not a setting; retention.policies.keep_last has n" in message


# backend.overrides is open


def test_any_setting_of_verls_engine_can_be_given() -> None:
    cfg = compose(["backend.overrides.forward_prefetch=true", "backend.overrides.wrap_policy={min_num_params: 10}"])
    check(cfg)
    assert cfg.backend.overrides == {"forward_prefetch": True, "wrap_policy": {"min_num_params": 10}}


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ("dtype=float16", "backend.param_dtype"),
        ("model_dtype=bf16", "backend.master_dtype"),
        ("param_dtype=fp16", "backend.param_dtype"),
        ("mixed_precision={param_dtype: fp16}", "backend.param_dtype and backend.reduce_dtype"),
        ("fsdp_size=1", "backend.fsdp_size"),
        ("micro_batch_size_per_gpu=2", "trainer.micro_batch_size"),
        ("infer_micro_batch_size_per_gpu=2", "trainer.micro_batch_size"),
        ("use_dynamic_bsz=true", "trainer.max_tokens"),
        ("max_token_len_per_gpu=9", "trainer.max_tokens"),
        ("infer_max_token_len_per_gpu=9", "trainer.max_tokens"),
        ("use_remove_padding=true", "trainer.remove_padding"),
        ("ulysses_sequence_parallel_size=2", "backend.sp"),
    ],
)
@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_a_setting_of_verls_engine_that_has_a_key_is_not_set_past_it(backend: str, field: str, key: str) -> None:
    name = field.partition("=")[0]
    assert refused(f"backend={backend}", f"backend.overrides.{field}") == (
        f"backend.overrides.{name} would take the place of {key}; set that instead"
    )


@pytest.mark.parametrize(
    ("backend", "field", "why"),
    [
        *((backend, "pad_to_length=true", "needs sequences packed") for backend in ("fsdp", "fsdp2", "megatron")),
        *((backend, "use_fused_kernels=true", "needs a fused output") for backend in ("fsdp", "fsdp2", "megatron")),
        *((backend, "forward_only=true", "leaves out the optimizer") for backend in ("fsdp", "fsdp2", "megatron")),
        ("fsdp2", "entropy_from_logits_with_chunking=true", "needs sequences packed"),
        ("megatron", "context_parallel_size=2", "needs sequences packed"),
    ],
)
def test_a_setting_of_verls_engine_that_would_be_passed_over_is_refused(backend: str, field: str, why: str) -> None:
    message = refused(f"backend={backend}", f"backend.overrides.{field}")
    name = field.partition("=")[0]
    assert message.startswith(f"backend.overrides.{name} {why}")
    assert message.endswith(f"leave it out (at a resume: ~backend.overrides.{name})")


@pytest.mark.parametrize("field", ["use_fused_kernels=false", "forward_only=false", "pad_to_length_bucket=null"])
def test_a_setting_that_asks_for_what_is_done_anyway_is_let_through(field: str) -> None:
    check(compose([f"backend.overrides.{field}"]))


def test_nothing_gets_past_by_way_of_the_transformer() -> None:
    way = "backend.overrides.override_transformer_config.context_parallel_size=2"
    assert "needs sequences packed" in refused("backend=megatron", way)


# digest and difference


def test_the_digest_is_the_same_for_the_same_configuration() -> None:
    assert config_digest(compose()) == config_digest(compose(["trainer.steps=140"]))


@pytest.mark.parametrize("override", ["seed=1", "sync=nccl", "retention.policies.keep_last.n=3", "task.digits=3"])
def test_the_digest_differs_where_a_setting_differs(override: str) -> None:
    assert config_digest(compose([override])) != config_digest(compose())


@pytest.mark.parametrize(
    "override",
    [
        "checkpoint.dir=/elsewhere",
        "sync.shm_dir=/tmp",
        "sync.min_rate_mbps=null",
        "cluster.num_cpus=3",
        "live=off",
        "tracker=[tensorboard]",
    ],
)
def test_the_digest_does_not_depend_on_where_a_run_lives(override: str) -> None:
    assert config_digest(compose([override])) == config_digest(compose())


def test_the_digest_follows_a_model_that_is_moved_but_not_another_one(tmp_path: Path) -> None:
    for folder in ("a/one", "b/one", "a/two"):
        (tmp_path / folder).mkdir(parents=True)
    here, moved, other = (config_digest(compose([f"model.path={tmp_path}/{p}"])) for p in ("a/one", "b/one", "a/two"))
    assert here == moved != other


def test_the_digest_survives_saving_and_loading(tmp_path: Path) -> None:
    OmegaConf.save(compose(), tmp_path / "config.yaml")
    assert config_digest(OmegaConf.load(tmp_path / "config.yaml")) == config_digest(compose())


def test_a_task_that_ends_the_program_on_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"^task\._target_ is exits\.Task, which cannot be used"):
        check_inputs(with_task(_target_="exits.Task"))


def test_a_run_of_before_savers_were_options_has_the_same_digest_and_no_difference() -> None:
    before = OmegaConf.create(config.plain(compose()))
    for name in ("monitor", "coordinator"):
        before.checkpoint.pop(name)
    assert config_digest(before) == config_digest(compose())
    assert config_diff(before, compose()) == []
    assert config_digest(before) != config_digest(compose(["checkpoint.monitor._target_=of_mine.saving.Monitor"]))


def test_a_run_of_before_limits_grew_has_the_same_digest() -> None:
    before = OmegaConf.create(config.plain(compose()))
    before.sync.pop("min_rate_mbps")
    assert config_digest(before) == config_digest(compose())


def test_the_digest_leaves_the_configuration_as_it_is() -> None:
    cfg = compose()
    config_digest(cfg)
    assert cfg == compose()


def test_a_difference_names_key_old_and_new_value() -> None:
    changed = config_diff(compose(), compose(["trainer.steps=9", "retention=[keep_every]"]))
    assert changed == [
        ("retention.policies.keep_every.steps", config.ABSENT, 100),
        ("retention.policies.keep_last.n", 2, config.ABSENT),
        ("trainer.steps", 140, 9),
    ]


def test_a_configuration_does_not_differ_from_what_was_saved_of_it(tmp_path: Path) -> None:
    OmegaConf.save(compose(["tracker=[wandb]"]), tmp_path / "config.yaml")
    assert config_diff(OmegaConf.load(tmp_path / "config.yaml"), compose(["tracker=[wandb]"])) == []


@given(
    text=st.text(
        alphabet=st.characters(exclude_characters="$", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1
    )
)
def test_a_quoted_value_comes_out_of_hydras_parser_as_it_went_in(text: str) -> None:
    assert OverridesParser.create().parse_override(f"key={config.quote(text)}").value() == text


def test_shapes_of_a_file_count_from_where_the_run_was_started_and_names_are_none(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    (tmp_path / "qwen3-8b").mkdir()  # as a download of it may be called
    for name, meant in (("mine.json", str(tmp_path / "mine.json")), ("qwen3-8b", "qwen3-8b")):
        cfg = compose(["workload=bytes", f"model.shapes={name}"])
        assert anchored(cfg, tmp_path).model.shapes == meant


def test_weight_decay_that_would_change_a_vision_tower_is_refused(tmp_path: Path) -> None:
    bare_model(tmp_path, model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"])
    given = f"model.path={tmp_path}"
    assert refused("trainer.weight_decay=0.1", given).startswith("trainer.weight_decay is 0.1, which would shrink the")
    for other in ("trainer.weight_decay=0", "model.lora.rank=4"):
        check(compose(["trainer.weight_decay=0.1", given, other]))
