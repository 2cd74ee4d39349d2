from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.samples.batch import assign

COUNTS = {"n_prompts": st.integers(0, 200), "replicas": st.integers(1, 40)}


@given(**COUNTS)
def test_every_prompt_is_assigned_once_in_order(n_prompts: int, replicas: int) -> None:
    assert [prompt for block in assign(n_prompts, replicas) for prompt in block] == list(range(n_prompts))


@given(**COUNTS)
def test_every_replica_has_its_fair_share(n_prompts: int, replicas: int) -> None:
    sizes = [len(block) for block in assign(n_prompts, replicas)]
    assert len(sizes) == replicas
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("n_prompts", "replicas"), [(-1, 1), (4, 0)])
def test_nonsense_is_refused(n_prompts: int, replicas: int) -> None:
    with pytest.raises(ValueError, match="cannot be assigned"):
        assign(n_prompts, replicas)
