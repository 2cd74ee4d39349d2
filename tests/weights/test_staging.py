from __future__ import annotations

import mmap
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.weights.helpers import local_elements, random_tensor, raw, without_nan
from trinity_sync.weights import staging
from trinity_sync.weights.layout import LayoutError, PartLayout
from trinity_sync.weights.shards import flat_range, whole
from trinity_sync.weights.slots import MappedSegments, SegmentError
from trinity_sync.weights.staging import StageError, pin_segment, stage, unpin_segment


def one(dtype: str, shape: tuple[int, ...]) -> PartLayout:
    return PartLayout.build("rank-00000", [whole("w", dtype, shape)], 1024)


def test_floating_sources_are_cast_to_the_dtype_of_the_shard() -> None:
    source = without_nan(random_tensor("F32", (5, 9), random.Random(0)))
    segment = bytearray(90)
    stage(one("BF16", (5, 9)), {"w": source}, segment)
    assert bytes(segment) == raw(source.bfloat16())


def test_a_source_may_have_any_shape_and_strides() -> None:
    fused = random_tensor("BF16", (2, 6, 5), random.Random(0))
    query = fused[:, 1:4]
    segment = bytearray(60)
    stage(one("BF16", (6, 5)), {"w": query}, segment)
    assert bytes(segment) == raw(query)


def test_sources_that_need_a_gradient_and_that_are_not_in_the_layout_do_no_harm() -> None:
    segment = bytearray(8)
    stage(one("BF16", (2, 2)), {"w": torch.nn.Parameter(torch.ones(2, 2)), "other": torch.ones(1)}, segment)
    assert bytes(segment) == raw(torch.ones(2, 2).bfloat16())


def test_bytes_between_shards_are_zeroed_and_bytes_behind_the_last_are_left_alone() -> None:
    layout = PartLayout.build("p", [whole("a", "U8", (3,)), whole("b", "U8", (3,))], 64)
    segment = bytearray(b"\xff" * 80)
    source = torch.tensor([1, 2, 3], dtype=torch.uint8)
    stage(layout, {"a": source, "b": source}, segment)
    assert bytes(segment) == b"\1\2\3" + bytes(61) + b"\1\2\3" + b"\xff" * 13


def test_all_that_is_wrong_with_the_sources_is_named_and_nothing_is_written() -> None:
    layout = PartLayout.build(
        "rank-00007",
        [
            whole("fine", "U8", (1,)),
            whole("gone", "BF16", (2,)),
            flat_range("short", "BF16", (9,), 0, 5),
            whole("kind", "BF16", (1,)),
        ],
        64,
    )
    sources = {"fine": torch.ones(1).byte(), "short": torch.ones(4), "kind": torch.ones(1, dtype=torch.int64)}
    segment = bytearray(layout.nbytes)
    with pytest.raises(StageError) as caught:
        stage(layout, sources, segment)
    assert str(caught.value) == (
        "part rank-00007 cannot be staged: gone (no source), short (4 elements, the layout has 5), "
        "kind (torch.int64, which is not cast to BF16)"
    )
    assert not any(segment)


def test_a_segment_that_is_too_small_is_refused() -> None:
    with pytest.raises(LayoutError, match="needs 8 bytes, but only 7"):
        stage(one("BF16", (2, 2)), {"w": torch.ones(2, 2)}, bytearray(7))


@pytest.mark.parametrize("shape", [(100,), (7, 30), (3, 5, 40), (0, 4), ()])
@pytest.mark.parametrize("numel", [1, 16, 64, 10_000])
def test_chunks_for_the_device_are_bounded_and_in_the_order_of_the_elements(shape: tuple[int, ...], numel: int) -> None:
    whole_one = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for tensor in (
        whole_one,
        whole_one.transpose(0, -1) if shape else whole_one,
        whole_one[..., ::2] if shape else whole_one,
    ):
        chunks = list(staging._chunks(tensor, numel))
        assert all(chunk.numel() <= numel for chunk in chunks)
        assert torch.cat([chunk.reshape(-1) for chunk in chunks]).tolist() == tensor.reshape(-1).tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_pinning_is_no_error() -> None:
    segment = mmap.mmap(-1, 4096)
    assert pin_segment(segment) is False
    unpin_segment(segment)
    segment.close()


class Runtime:
    """In place of the CUDA runtime, which needs a GPU: refuses to page-lock, as some drivers do mapped files, and keeps
    each error for the next launch to report.
    """

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.refuses = False
        self.kept = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if self.refuses:
            self.kept = 801
            return 801
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if address not in self.locked:
            self.kept = 713
            return 713
        self.locked.remove(address)
        return 0

    def launch(self, *_: object, **__: object) -> None:
        code, self.kept = self.kept, 0
        if code:
            raise RuntimeError(f"CUDA error {code}")


def test_a_segment_whose_page_locking_was_refused_is_not_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    segment, refused = mmap.mmap(-1, 4096), mmap.mmap(-1, 4096)
    assert pin_segment(segment)
    runtime.refuses = True
    assert not pin_segment(refused)
    unpin_segment(refused)
    runtime.launch()
    unpin_segment(segment)
    unpin_segment(segment)
    runtime.launch()
    assert runtime.locked == set()


def test_a_reader_page_locks_what_it_maps_until_it_lets_it_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that stays locked after it was unmapped would be read in place of what is mapped there next."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    path, next_one = tmp_path / "segment", tmp_path / "next"
    for file in (path, next_one):
        file.write_bytes(bytes(4096))
    segments = MappedSegments(pinned=True)
    unused = segments.get(path, 4096)
    assert runtime.locked == set()  # this process has not used a GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    del unused
    next_one.rename(path)
    first = segments.get(path, 4096)
    address = np.frombuffer(first, np.uint8).ctypes.data
    assert runtime.locked == {address}
    next_one.write_bytes(bytes(4096))
    next_one.rename(path)
    second = segments.get(path, 4096)
    assert runtime.locked == {np.frombuffer(second, np.uint8).ctypes.data} != {address}
    path.unlink()
    with pytest.raises(SegmentError):
        segments.get(path, 4096)
    assert runtime.locked == set()
    next_one.write_bytes(bytes(4096))
    segments.get(next_one, 4096)
    del segments
    assert runtime.locked == set()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("chunk_bytes", [256, 32 << 20])
def test_cuda_sources_arrive_as_cpu_sources_do(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_CHUNK_BYTES", chunk_bytes)
    rng = random.Random(0)
    tensors = {
        "plain": torch.randn(50, 33),
        "turned": torch.randn(20, 31).t(),
        "same": random_tensor("BF16", (1000,), rng),
        "ids": random_tensor("I64", (7,), rng),
        "scalar": torch.randn(()),
    }
    kinds = {"ids": "I64"}
    shards = [whole(name, kinds.get(name, "BF16"), tuple(t.shape)) for name, t in tensors.items()]
    layout = PartLayout.build("p", shards, 1024)
    expected = bytearray(layout.nbytes)
    stage(layout, tensors, expected)
    segment = mmap.mmap(-1, layout.nbytes)
    assert pin_segment(segment)
    stage(layout, {name: tensor.cuda() for name, tensor in tensors.items()}, segment)
    assert segment[:] == bytes(expected)
    unpin_segment(segment)
    segment.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_staging_sees_what_was_enqueued_before_it() -> None:
    source = torch.zeros(8 << 20, device="cuda")
    layout = one("BF16", (8 << 20,))
    segment = mmap.mmap(-1, layout.nbytes)
    for _ in range(100):
        source += 1
    stage(layout, {"w": source}, segment)
    assert segment[:] == raw(torch.full((2,), 100.0).bfloat16())[:2] * (8 << 20)


def test_the_helper_of_these_tests_takes_elements_in_local_order() -> None:
    shard = flat_range("w", "U8", (3, 4), 3, 9)
    assert local_elements(torch.arange(12, dtype=torch.uint8).view(3, 4), shard).tolist() == [3, 4, 5, 6, 7, 8]
