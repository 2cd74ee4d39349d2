"""Ranks without an engine: what they hold is the same however it is cut, and changes as much as it is told to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.models.test_shapes import SMALL
from trinity_sync.backends.bytes_backend import BytesBackend
from trinity_sync.errors import ConfigError
from trinity_sync.models.shapes import SIZES, cut
from trinity_sync.weights.shards import check_complete


def ranks_of(folder: Path, ranks: int, **settings: object) -> list[BytesBackend]:
    folder.mkdir(exist_ok=True)
    fields = settings.pop("fields", SMALL)
    assert isinstance(fields, dict)
    (folder / "config.json").write_text(json.dumps(cut(fields, None)[1]))
    (folder / SIZES).write_text(json.dumps({"lora": settings.pop("lora", None)}))
    given: dict[str, object] = {"changed": 0.25, "master_dtype": "bf16", "optimizer": False, **settings}
    return [
        BytesBackend(folder, "BF16", rank=rank, ranks=ranks, seed=3, device="cpu", **given)  # type: ignore[arg-type]
        for rank in range(ranks)
    ]


def gathered(backends: list[BytesBackend]) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {}
    for backend in backends:
        for name, source in backend.sources().items():
            found.setdefault(name, []).append(source.to(torch.bfloat16))
    return {name: torch.cat(parts) for name, parts in found.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("lora", [None, {"rank": 3, "targets": "all-linear"}], ids=["model", "adapter"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_number_of_ranks_holds_the_same_whole_model(tmp_path: Path, ranks: int, lora: object) -> None:
    backends, alone = ranks_of(tmp_path, ranks, lora=lora), ranks_of(tmp_path, 1, lora=lora)
    saved = {name: tensor[:2] for name, tensor in alone[0].saved().items()}
    check_complete([list(backend.shards()) for backend in backends], saved)
    assert equal(gathered(backends), gathered(alone))
    for step in (1, 2):
        for backend in (*backends, *alone):
            backend.update(step)
    assert equal(gathered(backends), gathered(alone))


@pytest.mark.parametrize("master", ["bf16", "fp32"])
def test_a_step_changes_the_share_of_bf16_values_that_it_is_told_to(tmp_path: Path, master: str) -> None:
    (backend,) = ranks_of(tmp_path, 1, master_dtype=master)
    before = {name: tensor.clone() for name, tensor in gathered([backend]).items()}
    told = backend.update(1)
    after = gathered([backend])
    changed = sum(int((before[name] != after[name]).sum()) for name in before)
    total = sum(tensor.numel() for tensor in before.values())
    assert changed / total == pytest.approx(told)
    assert told == pytest.approx(0.25, rel=0.1)


def test_who_still_copies_is_called_before_weights_change(tmp_path: Path) -> None:
    (backend,) = ranks_of(tmp_path, 1)
    before = {name: tensor.clone() for name, tensor in gathered([backend]).items()}
    seen: list[bool] = []
    backend.before_change(lambda: seen.append(equal(gathered([backend]), before)))
    backend.update(1)
    assert seen == [True]
    assert not equal(gathered([backend]), before)


def test_a_checkpoint_of_another_model_or_without_the_optimizer_is_refused(tmp_path: Path) -> None:
    (backend,) = ranks_of(tmp_path, 1, optimizer=True)
    (adapter,) = ranks_of(tmp_path, 1, lora={"rank": 3, "targets": "all-linear"})
    held = {name: torch.empty(saved.shape) for name, saved in adapter.saved().items()}
    path = tmp_path / "model_world_size_1_rank_0.pt"
    torch.save(held, path)
    with pytest.raises(ConfigError, match=rf"^{path} is of another model, as .* resume with the model\.shapes"):
        backend.load(tmp_path)
    torch.save({name: torch.empty(shape) for name, shape in backend._shapes.items()}, path)
    with pytest.raises(ConfigError, match=r"was saved with workload\.optimizer=false; set that$"):
        backend.load(tmp_path)


def test_a_share_of_one_changes_all_values_and_no_version_comes_back(tmp_path: Path) -> None:
    (backend,) = ranks_of(tmp_path, 1, changed=1.0)
    seen = [gathered([backend])]
    seen[0] = {name: tensor.clone() for name, tensor in seen[0].items()}
    for step in range(1, 9):
        assert backend.update(step) == 1.0
        now = {name: tensor.clone() for name, tensor in gathered([backend]).items()}
        assert not any(torch.equal(tensor, seen[-1][name]) for name, tensor in now.items())
        assert not any(equal(now, before) for before in seen)
        seen.append(now)


def test_no_share_changes_nothing(tmp_path: Path) -> None:
    (backend,) = ranks_of(tmp_path, 1, changed=0.0)
    before = {name: tensor.clone() for name, tensor in gathered([backend]).items()}
    assert backend.update(1) == 0.0
    assert equal(gathered([backend]), before)
