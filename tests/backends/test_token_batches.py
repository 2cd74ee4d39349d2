"""Micro-batches by tokens, and sequences without padding: loss, entropy and gradient are those by hand, over ranks that
have unequal numbers of tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends.engines import Ranks
from tests.backends.gradients import assert_as_by_hand
from tests.backends.measuring import assert_measured, assert_recomputed_as_by_hand
from tests.backends.recomputing import assert_recomputed
from tests.backends.token_ranks import MAX_TOKENS, of_fsdp, of_megatron

Facts = dict[str, list[dict[str, Any]]]

FSDP: dict[str, dict[str, Any]] = {
    "tokens": {"strategy": "fsdp2", "model": "untied", "sharing": 0, "max_tokens": MAX_TOKENS},
    "packed": {"strategy": "fsdp2", "model": "untied", "sharing": 1, "max_tokens": None},
    "packed-tokens": {"strategy": "fsdp2", "model": "tied", "sharing": 1, "max_tokens": MAX_TOKENS},
    "packed-tokens-fsdp": {"strategy": "fsdp", "model": "untied", "sharing": 1, "max_tokens": MAX_TOKENS},
    "shared": {"strategy": "fsdp2", "model": "untied", "sharing": 2, "max_tokens": MAX_TOKENS // 2},
}
MEGATRON: dict[str, dict[str, Any]] = {
    "dp2": {"tp": 1, "pp": 1, "model": "qwen3"},
    "tp2": {"tp": 2, "pp": 1, "model": "qwen3"},
    "pp2": {"tp": 1, "pp": 2, "model": "qwen3"},
}


IN_THE_FAST_SUITE = ("packed-tokens", "shared")


def named(cases: dict[str, dict[str, Any]]) -> list[Any]:
    return [pytest.param(name, marks=() if name in IN_THE_FAST_SUITE else pytest.mark.all) for name in cases]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Facts:
    """Those of the cases that are to be tested, from one start of ranks for each kind of engine."""
    asked = {
        item.callspec.params["case"]
        for item in request.session.items
        if item.fspath == request.fspath and hasattr(item, "callspec")
    }
    found: Facts = {}
    for cases, target in ((FSDP, of_fsdp), (MEGATRON, of_megatron)):
        if mine := {name: case for name, case in cases.items() if name in asked}:
            ranks = Ranks(tmp_path_factory.mktemp("tokens"), 2, list(mine.values()), {}, target=target)
            found |= zip(mine, ranks.facts(), strict=True)
    return found


@pytest.mark.parametrize("case", named(FSDP | MEGATRON))
@pytest.mark.all
def test_learning_is_the_same_however_sequences_are_batched(facts: Facts, case: str) -> None:
    ranks = facts[case]
    assert_as_by_hand([rank["gradients"] for rank in ranks])
    assert_recomputed([rank["recomputing"] for rank in ranks])
    assert len({rank["micro_batches"] for rank in ranks}) == 1, "ranks wait for each other"


@pytest.mark.parametrize("case", named(FSDP | MEGATRON))
def test_the_loss_of_a_validation_is_the_mean_over_tokens_however_it_is_batched(facts: Facts, case: str) -> None:
    assert_measured([rank["measuring"] for rank in facts[case]])


@pytest.mark.parametrize("case", named(FSDP | MEGATRON))
def test_log_probs_of_samples_are_those_of_training_with_its_dropout(facts: Facts, case: str) -> None:
    assert_recomputed_as_by_hand([rank["measuring"] for rank in facts[case]], drops=case in FSDP)


@pytest.mark.parametrize("case", named({name: case for name, case in FSDP.items() if case["max_tokens"]}))
def test_there_are_no_more_micro_batches_than_tokens_ask_for(facts: Facts, case: str) -> None:
    with_and_without_bonus = 2
    of_whom_has_most = 4 if FSDP[case]["sharing"] < 2 else 2
    assert facts[case][0]["micro_batches"] == with_and_without_bonus * of_whom_has_most
