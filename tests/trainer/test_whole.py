"""Ranks that would publish other tensors than `save_pretrained` of their model writes are refused before they train."""

from __future__ import annotations

import pytest

from trinity_sync.actors.rank_client import RankInfo
from trinity_sync.errors import ConfigError
from trinity_sync.trainer.worker_spec import check_whole
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import Shard, row_slice, whole

NAMES = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in range(3)]
SAVED = {name: ("BF16", (4, 2)) for name in NAMES}


def infos(*parts: list[Shard]) -> list[RankInfo]:
    layouts = [PartLayout.build(f"rank-{rank}", shards, 1 << 16) for rank, shards in enumerate(parts)]
    return [
        RankInfo(rank=rank, part=layout.part, layout=layout, node="here", pid=0, saved=None if rank else SAVED)
        for rank, layout in enumerate(layouts)
    ]


def experts(*numbers: int) -> list[Shard]:
    return [whole(NAMES[number], "BF16", (4, 2)) for number in numbers]


def test_ranks_that_hold_all_experts_between_them_pass() -> None:
    check_whole(infos(experts(0, 2), experts(1)), "megatron")


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([experts(0), experts(1)], f"of 3 tensors 1 missing: {NAMES[2]}"),
        ([experts(0, 1, 2), [whole("mtp.weight", "BF16", (4, 2))]], "1 not among them: mtp.weight"),
        ([experts(0, 1), [whole(NAMES[2], "BF16", (2, 4))]], f"1 different: {NAMES[2]} (BF16 2x4 instead of BF16 4x2)"),
        ([experts(0, 1), experts(1, 2)], f"{NAMES[1]} (row 0 is held twice)"),
        ([experts(0, 1), [row_slice(NAMES[2], "BF16", (4, 2), 0, 3)]], f"{NAMES[2]} (2 of 8 elements are held by no"),
    ],
    ids=["missing", "unknown", "other-shape", "twice", "in-part"],
)
def test_what_would_be_left_out_or_sent_besides_is_named(parts: list[list[Shard]], told: str) -> None:
    with pytest.raises(ConfigError, match=r"^backend=megatron cannot publish this model: ") as refused:
        check_whole(infos(*parts), "megatron")
    assert told in str(refused.value)
    assert refused.value.exit_code == 2
