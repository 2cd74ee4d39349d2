"""What is said of the keys of an objective before anything starts, and what becomes of them."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.model_folders import bare_model
from trinity_sync import config
from trinity_sync.errors import ConfigError
from trinity_sync.trainer.algorithms.base import Algorithm, algorithm_of
from trinity_sync.trainer.worker_spec import worker_spec

RS = "algorithm.rollout_correction.rollout_rs"


def algorithm(*overrides: str) -> Algorithm:
    return algorithm_of(config.typed(config.compose(list(overrides))).algorithm)


def advice(*overrides: str) -> list[str]:
    cfg = config.compose(list(overrides))
    config.check(cfg)
    get = partial(OmegaConf.select, cfg)
    return [problem.key for advise in algorithm(*overrides).advice for problem in advise(get)]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algorithm.loss_mode=ppo"], "algorithm.loss_mode is ppo; must be one of vanilla, gspo"),
        (["algorithm.loss_mode=sapo"], "algorithm.loss_agg_mode is token-mean, but verl's loss sapo"),
        (["algorithm.loss_mode=geo_mean"], "algorithm.loss_agg_mode is token-mean, but verl's loss geo_mean"),
        (["algorithm.loss_agg_mode=seq-mean-token-sum-norm"], "algorithm.loss_scale_factor is null"),
        (["algorithm.loss_scale_factor=3"], "algorithm.loss_scale_factor is 3, but algorithm.loss_agg_mode=token-mean"),
        (["algorithm.policy_loss.clip_cov_lb=9"], "clip_cov_lb is 9.0; must be less than clip_cov_ub (5.0)"),
        (["algorithm.policy_loss.clip_cov_ratio=0"], "clip_cov_ratio is 0.0; must be more than 0"),
        (["algorithm.kl.coeff=-1"], "algorithm.kl.coeff is -1.0; must be at least 0"),
        (["algorithm.kl.estimator=k4"], "algorithm.kl.estimator is k4; must be one of"),
        (["algorithm.kl.reference=/no/where", "algorithm.kl.coeff=1"], "reference is /no/where, which does not exist"),
        (["algorithm.kl.reference=org/name"], "but nothing is compared with it"),
        ([f"{RS}=token_k4", f"{RS}_threshold=2"], f"{RS} is token_k4; 'token_k4' is none of"),
        ([f"{RS}='token_k1,token_k1'", f"{RS}_threshold=2"], "names a rule twice"),
        ([f"{RS}=token_k1"], f"{RS}_threshold is null; rollout_rs=token_k1 needs one"),
        ([f"{RS}_threshold=2"], f"{RS}_threshold is 2, but rollout_rs names no rule"),
        ([f"{RS}=token_k3", f"{RS}_threshold='0.5_2.0'"], "the bound of token_k3 must be a number, above 0"),
        ([f"{RS}=token_k1", f"{RS}_threshold='2.0_0.5'"], "the lower bound of token_k1 is above its upper one"),
        ([f"{RS}=token_k1", f"{RS}_threshold=0.5"], "the lower bound of token_k1 is above its upper one"),
        ([f"{RS}='token_k1,token_k3'", f"{RS}_threshold='2,2,2'"], "must be one bound, or one for each of the 2 rules"),
        (
            ["algorithm.old_log_probs=sampler", "algorithm.rollout_correction.rollout_is=token"],
            "algorithm.rollout_correction.rollout_is is set, but with algorithm.old_log_probs=sampler",
        ),
        (["algorithm.filter_groups.metric=std"], "filter_groups.metric is std; must be one of reward, score, acc"),
        (
            ["algorithm.filter_groups.max_num_gen_batches=0"],
            "filter_groups.max_num_gen_batches is 0; must be at least 1",
        ),
        (["algorithm.kl.in_reward.estimator=k3+"], "in_reward.estimator is k3+; must be one of kl, k1"),
        (["algorithm.kl.in_reward.type=adaptive"], "in_reward.type is adaptive, but nothing grows from"),
        (
            ["algorithm.kl.in_reward={coeff: 1, type: adaptive, horizon: 102}"],
            "in_reward.horizon is 102: with 512 samples a step the coefficient could reach 0",
        ),
        (["algorithm.filter_groups.on_shortage=go"], "filter_groups.on_shortage is go; must be one of fill, stop"),
        (["algorithm.overlong.buffer=4"], "algorithm.overlong.buffer is 4, more than task.response_length (3)"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_by_its_key(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        config.check(config.compose(overrides))


def test_rules_that_verl_has_are_the_ones_that_are_taken() -> None:
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS

    from trinity_sync.trainer.algorithms import grpo

    assert grpo._RULES == SUPPORTED_ROLLOUT_RS_OPTIONS


def test_all_losses_of_verl_are_there_but_what_has_keys_of_its_own() -> None:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    from trinity_sync.config.schema import GrpoConfig

    modes = GrpoConfig.__dataclass_fields__["loss_mode"].metadata["choices"]
    verls = {name for name in POLICY_LOSS_REGISTRY if not name.startswith("trinity_")}
    assert {*modes} == verls - {"bypass_mode"}  # which is algorithm.old_log_probs=sampler


@pytest.mark.parametrize(
    ("rules", "bounds"),
    [("token_k1", "2"), ("token_k1", "0.5_2.0"), ("seq_sum_k2", "3"), ("token_k1,seq_mean_k3", "0.5_2.0,0.1")],
)
def test_bounds_that_pass_are_what_verl_takes(rules: str, bounds: str) -> None:
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_rs_thresholds

    config.check(config.compose([f"{RS}='{rules}'", f"{RS}_threshold='{bounds}'"]))
    assert _parse_rollout_rs_thresholds(rules.split(","), bounds)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            "algorithm.kl.reference is {path}, whose config.json has",
        ),
        (
            {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]},
            "model.attn_implementation is sdpa, which leaves out attn_logit_softcapping (by default) of {path}/config",
        ),
    ],
    ids=["class", "attention"],
)
def test_a_reference_that_would_compute_something_else_is_refused(
    tmp_path: Path, fields: dict[str, object], told: str
) -> None:
    bare_model(tmp_path, **fields)
    with pytest.raises(ConfigError) as refused:
        config.check(config.compose([f"algorithm.kl.reference={tmp_path}", "algorithm.kl.coeff=0.1"]))
    assert str(refused.value).startswith(told.format(path=tmp_path))


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    asked = [f"algorithm.kl.reference={tmp_path}", "algorithm.kl.coeff=0.1"]
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 33})
    )
    with pytest.raises(ConfigError, match="a vocabulary of 33 tokens, the trained model has one of 32"):
        config.check(config.compose(asked))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 32})
    )
    config.check(config.compose(asked))


def test_old_samples_without_a_correction_are_told_of() -> None:
    free = ["trainer.schedule=free", "sync.max_staleness=4"]
    assert advice(*free) == ["sync.max_staleness"]
    assert advice(*free, "algorithm.rollout_correction.rollout_is=token") == []
    assert advice(*free, f"{RS}=token_k1", f"{RS}_threshold=2") == []
    assert advice("trainer.schedule=free", "sync.max_staleness=1") == []
    assert advice("algorithm.kl.coeff=0.1", "algorithm.kl.estimator=k1") == ["algorithm.kl.estimator"]


@pytest.mark.parametrize(
    ("overrides", "recomputes"),
    [
        ([], False),
        (["algorithm.rollout_correction.rollout_is=token"], True),
        ([f"{RS}=token_k1", f"{RS}_threshold=2"], True),
        ([f"{RS}=token_k1", f"{RS}_threshold=2", "algorithm.old_log_probs=sampler"], False),
        (["algorithm.old_log_probs=recomputed"], True),
    ],
    ids=str,
)
def test_log_probs_are_recomputed_where_that_is_asked_for(overrides: list[str], recomputes: bool) -> None:
    assert algorithm(*overrides).recomputes is recomputes


@pytest.mark.parametrize(
    ("overrides", "reference"),
    [
        ([], None),
        (["algorithm.kl.coeff=0.1"], "given"),
        (["algorithm.kl.measure=true"], "given"),
        (["algorithm.kl.coeff=0.1", "algorithm.kl.reference=org/other"], "org/other"),
        (["algorithm.kl.coeff=0.1", "model.lora.rank=4"], None),
        (["algorithm.kl.coeff=0.1", "model.lora.rank=4", "algorithm.kl.reference=org/other"], "org/other"),
    ],
    ids=str,
)
def test_the_reference_is_the_model_that_the_run_was_given(overrides: list[str], reference: str | None) -> None:
    """Also where it trains the weights of another engine's checkpoint."""
    cfg = config.compose(overrides)
    assert worker_spec(config.typed(cfg), "taken", "logs", "given").reference == reference


def test_the_keys_are_what_verl_is_given() -> None:
    overrides = [
        "algorithm.loss_mode=clip_cov",
        "algorithm.policy_loss.clip_cov_ub=7",
        "algorithm.policy_loss.tau_neg=2",
        "algorithm.kl.coeff=0.2",
        "algorithm.kl.estimator=k3+",
        "algorithm.loss_agg_mode=seq-mean-token-sum-norm",
        "algorithm.loss_scale_factor=9",
    ]
    function: Any = algorithm(*overrides).loss("fsdp2")
    (used,) = [
        cell.cell_contents for cell in function.__closure__ if type(cell.cell_contents).__name__ == "ActorConfig"
    ]
    assert (used.policy_loss.loss_mode, used.policy_loss.clip_cov_ub, used.tau_neg) == ("clip_cov", 7.0, 2.0)
    assert (used.use_kl_loss, used.kl_loss_coef, used.kl_loss_type) == (True, 0.2, "k3+")
    assert (used.loss_agg_mode, used.loss_scale_factor) == ("seq-mean-token-sum-norm", 9)
