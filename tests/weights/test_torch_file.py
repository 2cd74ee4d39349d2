"""Files written around their tensors: what torch reads from them is what was saved."""

from __future__ import annotations

import gc
import threading
import weakref
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.weights import snapshot as snapshot_module
from trinity_sync.weights.shard_file import ImageError, write_image
from trinity_sync.weights.snapshot import Snapshot, StatePlan, plan, storages, write_skeleton
from trinity_sync.weights.staging import TensorCopy

LIMIT = 30.0
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.fixture(scope="module", autouse=True)
def group() -> Any:
    """DTensors need a process group, if only of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def copied(planned: StatePlan, segment: bytearray, *, in_background: bool = True) -> Snapshot:
    """A snapshot that is being copied."""
    snapshot = Snapshot(planned, segment, "the state of step 7")
    snapshot.copy(in_background=in_background)
    return snapshot


def write(files: dict[str, Any], folder: Path, *, in_background: bool = True) -> list[Path]:
    """All of it, as rank and agent do together."""
    planned = plan(files)
    segment = bytearray(planned.nbytes + 100)
    images = copied(planned, segment, in_background=in_background).file_images(folder, LIMIT)
    for image in images:
        write_image(Path(image.path), image.extents, segment, durable=False)
    return [Path(image.path) for image in images]


def assert_same(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    if isinstance(first, DTensor):
        assert first.placements == second.placements
        assert_same(first.to_local(), second.to_local())
    elif isinstance(first, torch.Tensor):
        assert (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
        assert bits(first).equal(bits(second))
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def state(seed: int) -> dict[str, Any]:
    """As an optimizer's: tensors of all kinds, scalars, some of them sharing storage."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(10, 12, generator=generator)
    mesh = init_device_mesh("cpu", (1,))
    return {
        "state": {
            0: {"step": torch.tensor(3.0), "exp_avg": shared, "tied": shared},
            1: {"view": shared[2:5], "transposed": shared.t(), "empty": torch.empty(0, 4), "flag": True},
        },
        "sharded": DTensor.from_local(torch.randn(6, 4, generator=generator), mesh, [Shard(0)], run_check=False),
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0, 1]}],
    }


def test_torch_reads_back_what_was_saved_and_nothing_needs_unsafe_pickles(tmp_path: Path) -> None:
    first, second = state(1), {"rng": torch.get_rng_state(), "scheduler": {"last_epoch": 7}}
    paths = write({"optim.pt": first, "extra.pt": second}, tmp_path)
    for path, value in zip(paths, (first, second), strict=True):
        assert_same(torch.load(path, weights_only=True), value)
        reference = tmp_path / "reference" / path.name
        reference.parent.mkdir(exist_ok=True)
        torch.save(value, reference)
        assert path.stat().st_size == reference.stat().st_size


@settings(deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=0, max_size=6
    ),
    data=st.data(),
)
def test_any_mixture_of_tensors_survives(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[torch.dtype, list[int]]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("files")
    made = [(torch.rand(shape) * 100).to(dtype) for dtype, shape in shapes]
    picked = data.draw(st.lists(st.sampled_from(range(len(made))), max_size=8)) if made else []
    value = {"list": [made[i] for i in picked], "tuple": tuple(made), "none": None}
    (path,) = write({"x.pt": value}, folder, in_background=False)
    assert_same(torch.load(path, weights_only=True), value)


def test_what_changes_after_the_deadline_is_not_in_the_file(tmp_path: Path) -> None:
    value = {"weight": torch.ones(1000)}
    planned = plan({"x.pt": value})
    segment = bytearray(planned.nbytes)
    snapshot = copied(planned, segment)
    snapshot.wait_until_copied(LIMIT)
    value["weight"].zero_()
    (image,) = snapshot.file_images(tmp_path, LIMIT)
    write_image(Path(image.path), image.extents, segment, durable=True)
    assert torch.load(image.path, weights_only=True)["weight"].eq(1).all()


def test_the_digest_is_that_of_the_whole_file(tmp_path: Path) -> None:
    from trinity_sync.host.durable import digest_file

    planned = plan({"x.pt": state(2)})
    segment = bytearray(planned.nbytes)
    (image,) = copied(planned, segment).file_images(tmp_path, LIMIT)
    assert write_image(Path(image.path), image.extents, segment, durable=False) == digest_file(Path(image.path))


def test_a_tensor_shared_by_two_files_is_copied_once(tmp_path: Path) -> None:
    weight = torch.randn(64)
    assert plan({"a": {"x": weight}, "b": [weight, weight.view(8, 8)]}).nbytes == weight.nbytes
    for path in write({"a": {"x": weight}, "b": [weight]}, tmp_path):
        assert weight.equal(storages_as_tensor(path))


def storages_as_tensor(path: Path) -> torch.Tensor:
    (storage,) = storages(torch.load(path, weights_only=True))
    return torch.empty(0).set_(storage)


def test_a_copy_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorCopy, "_copy", lambda self: None)
    snapshot = copied(plan({"x": torch.ones(3)}), bytearray(64))
    with pytest.raises(WaitTimeout, match="the state of step 7"):
        snapshot.wait_until_copied(0.01)


def test_a_copy_that_fails_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(TensorCopy, "_copy_one", broken)
    snapshot = copied(plan({"x": torch.ones(3)}), bytearray(64))
    snapshot.wait_until_copied(LIMIT)
    with pytest.raises(RunError, match="the state of step 7 could not be copied: device lost"):
        snapshot.file_images(tmp_path, LIMIT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("in_background", [True, False])
def test_what_is_written_is_let_go_and_its_image_stays_good(tmp_path: Path, in_background: bool) -> None:
    mesh = init_device_mesh("cpu", (1,))
    shared, sharded = torch.randn(8), DTensor.from_local(torch.ones(6), mesh, [Shard(0)], run_check=False)
    planned = plan({"a": [shared, torch.full((5,), 2.0)], "b": {"shared": shared, "sharded": sharded}})
    alive = [weakref.ref(storage) for storage, _ in planned.places]
    expected, segment = shared.clone(), bytearray(planned.nbytes)
    snapshot = copied(planned, segment, in_background=in_background)
    del planned, shared, sharded
    (first,) = snapshot.file_images(tmp_path, LIMIT, {"a"})
    snapshot.let_go("a")
    snapshot.let_go("a")
    gc.collect(1)
    assert [storage() is not None for storage in alive] == [True, False, True]
    (second,) = snapshot.file_images(tmp_path, LIMIT)
    snapshot.let_go("b")
    gc.collect(1)
    assert [storage() for storage in alive] == [None, None, None]
    for image in (first, second):
        write_image(Path(image.path), image.extents, segment, durable=False)
    assert_same(torch.load(tmp_path / "a"), [expected, torch.full((5,), 2.0)])
    found = torch.load(tmp_path / "b", weights_only=True)
    assert_same((found["shared"], found["sharded"].to_local()), (expected, torch.ones(6)))


def test_what_is_let_go_while_it_is_copied_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, copy_one = threading.Event(), TensorCopy._copy_one

    def held(self: TensorCopy, source: torch.Tensor, target: torch.Tensor) -> None:
        assert go_on.wait(LIMIT)
        copy_one(self, source, target)

    monkeypatch.setattr(TensorCopy, "_copy_one", held)
    segment = bytearray(128)
    snapshot = copied(plan({"x": [torch.ones(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)]}), segment)
    snapshot.let_go("x")
    gc.collect(1)
    go_on.set()
    snapshot.wait_until_copied(LIMIT)
    assert (segment[:16], segment[64:80]) == (b"\1" * 16, b"\1" * 16)


def test_a_segment_that_is_too_small_is_refused() -> None:
    with pytest.raises(RunError, match="needs 4032 bytes, its segment has 10"):
        copied(plan({"x": torch.ones(1000)}), bytearray(10), in_background=False)


class Hidden:
    """A container that `tensors` does not look into."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_tensors_that_the_plan_does_not_know_are_not_written_as_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "_MAX_CONSTANT_BYTES", 100)
    snapshot = copied(plan({"x": Hidden(torch.ones(100))}), bytearray(10), in_background=False)
    with pytest.raises(RunError, match="a tensor of 400 bytes that the snapshot does not contain"):
        snapshot.file_images(tmp_path, LIMIT)


def test_saving_beside_it_is_left_alone(tmp_path: Path) -> None:
    """torch's hook is global; who does not record is not affected."""
    torch.save({"x": torch.arange(5)}, tmp_path / "plain.pt")
    assert torch.load(tmp_path / "plain.pt", weights_only=True)["x"].tolist() == [0, 1, 2, 3, 4]
    holes = write_skeleton({"x": torch.arange(5)}, tmp_path / "x.pt")
    assert [hole.storage.nbytes() for hole in holes] == [40]


@pytest.mark.parametrize("extents", [[(90, 0, 20)], [(0, 90, 20)], [(10, 0, 10), (15, 0, 10)]])
def test_extents_that_do_not_fit_are_refused(tmp_path: Path, extents: list[tuple[int, int, int]]) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with pytest.raises(ImageError, match="do not fit"):
        write_image(path, extents, bytes(100), durable=False)


def test_torch_loads_what_unzip_calls_damaged(tmp_path: Path) -> None:
    """The manifest's digest stands in the place of the records' CRC."""
    value = {"weight": torch.arange(100.0)}
    (path,) = write({"state.pt": value}, tmp_path)
    with zipfile.ZipFile(path) as file:
        assert {record.CRC for record in file.infolist()} == {0}
    assert_same(torch.load(path), value)
