"""The base of an adapter, read from its folder: its digest, and whether a rank holds what the folder has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.written import small_model
from trinity_sync.backends.base import HeldBase
from trinity_sync.backends.saved_tensors import on_the_wire
from trinity_sync.checkpoint.reading import Weights
from trinity_sync.errors import ConfigError
from trinity_sync.trainer.base_model import BaseModel, check_held
from trinity_sync.weights.shards import flat_range
from trinity_sync.weights.tensors import saved_tensors, state_digest
from trinity_sync.weights.wire import WireFormat

KEPT = "model.norm.weight"


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return small_model("tied")


@pytest.fixture(scope="module")
def folder(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    model.save_pretrained(path)  # type: ignore[operator]
    return path


def held(model: torch.nn.Module, share: tuple[float, float], keep: list[str] | None = None) -> HeldBase:
    """A share of the elements of each tensor, as a rank may hold it."""
    saved = on_the_wire(model, "BF16", keep)
    shards, sources = [], {}
    for name, tensor in saved_tensors(model).items():
        start, stop = (round(part * tensor.numel()) for part in share)
        shards.append(flat_range(name, saved[name].dtype, tuple(tensor.shape), start, stop))
        sources[name] = tensor.reshape(-1)[start:stop].clone()
    return HeldBase(saved, shards, sources)


def test_the_digest_is_that_of_a_version_of_it(model: torch.nn.Module, folder: Path) -> None:
    wire = WireFormat("BF16", frozenset([KEPT]))
    found = check_held(folder, held(model, (0.0, 1.0), [KEPT]), "BF16", digested=True)
    assert found == (state_digest(saved_tensors(model), wire), wire)
    assert found.digest != state_digest(saved_tensors(model), "BF16")
    assert check_held(folder, held(model, (0.0, 0.5)), "BF16", digested=False) is None


def test_each_tensor_is_read_once_and_by_who_tells_no_digest_only_what_it_holds(
    model: torch.nn.Module, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    plainly = Weights.read
    monkeypatch.setattr(Weights, "read", lambda self, name: read.append(name) or plainly(self, name))
    base = held(model, (0.0, 0.5))
    check_held(folder, base, "BF16", digested=True)
    assert sorted(read) == sorted(base.saved)
    read.clear()
    check_held(folder, base._replace(shards=base.shards[:3]), "BF16", digested=False)
    assert sorted(read) == sorted(shard.name for shard in base.shards[:3])


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted), st.data())
def test_a_rank_s_share_is_told_from_another_one(
    model: torch.nn.Module, folder: Path, share: list[float], data: st.DataObject
) -> None:
    base = held(model, (share[0], share[1]))
    whole = BaseModel(folder, base.saved)
    whole.check(base.shards, base.sources)
    some = [name for name, tensor in base.sources.items() if tensor.numel()]
    if not some:
        return
    name = data.draw(st.sampled_from(some))
    base.sources[name][data.draw(st.integers(0, base.sources[name].numel() - 1))] += 1
    with pytest.raises(ConfigError, match=rf"base of the adapter differs from the folder's in {name}, so"):
        whole.check(base.shards, base.sources)


def test_a_folder_of_another_model_is_refused(model: torch.nn.Module, folder: Path, tmp_path: Path) -> None:
    base = held(model, (0.0, 1.0))
    with pytest.raises(ConfigError, match="the folder has no tensor of that name"):
        BaseModel(folder, {**base.saved, "more.weight": base.saved[KEPT]})
    with pytest.raises(ConfigError, match=r"model.norm.weight of \[3\], the folder has it as"):
        BaseModel(folder, {KEPT: base.saved[KEPT]._replace(shape=(3,))})
    with pytest.raises(ConfigError, match=r"the base of an adapter is read from its folder: .*holds no weights"):
        BaseModel(tmp_path, base.saved)
