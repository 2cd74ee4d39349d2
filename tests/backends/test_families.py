"""A tiny model of each family that people train, on verl's own engines: one digest wherever its weights are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.backends.engines import Ranks
from tests.backends.family_ranks import rank_of_families
from tests.families import FAMILIES

OFTEN = {("gemma3_text", "fsdp2"), ("gpt_oss", "fsdp2"), ("deepseek_v3", "fsdp2")}
"""What `make test` runs; `test_fsdp.py` has Qwen3-MoE."""

CASES = [
    pytest.param(*case, marks=() if case in OFTEN else pytest.mark.all, id="-".join(case))
    for case in itertools.product(sorted(FAMILIES.keys() - {"gpt2"}), ("fsdp2", "fsdp"))
]

Facts = dict[tuple[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Facts:
    """Facts by case, then rank. Two ranks are started, once for all cases that a selected test asks for."""
    params = [
        item.callspec.params
        for item in request.session.items
        if item.fspath == request.fspath and hasattr(item, "callspec")
    ]
    cases = list(dict.fromkeys((param["family"], param["strategy"]) for param in params))
    described = [{"family": family, "strategy": strategy} for family, strategy in cases]
    ranks = Ranks(tmp_path_factory.mktemp("families"), 2, described, {}, target=rank_of_families)
    return dict(zip(cases, ranks.facts(), strict=True))


@pytest.mark.parametrize(("family", "strategy"), CASES)
@pytest.mark.all
def test_a_family_has_one_digest_wherever_its_weights_are(facts: Facts, family: str, strategy: str) -> None:
    """In the model's own folder, on the ranks, in a checkpoint, and in an explorer that took what the ranks staged."""
    for rank in facts[family, strategy]:
        assert rank["refused"] is None
        assert rank["initial"] == rank["file"]
        assert rank["trained"] != rank["initial"]
        assert {rank["exported"], *rank["held"]} == {rank["trained"]}
