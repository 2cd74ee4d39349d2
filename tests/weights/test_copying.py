"""Copies beside the training thread: what is held until they are there, and what is told where they fail."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.weights import staging as module
from trinity_sync.weights.staging import HostMemory, TensorCopy

CPU = [torch.device("cpu")]


def test_the_sources_may_change_once_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COPY_BYTES", 100)
    source = torch.arange(1000, dtype=torch.int64).view(10, 100)
    target = torch.zeros_like(source)
    reached = threading.Event()

    def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        reached.wait(60)
        yield source, target

    copying = TensorCopy(pairs(), CPU, "a state")
    copying.copy(in_background=True)
    with pytest.raises(WaitTimeout, match=r"the snapshot .*copy a state"):
        copying.wait_until_copied(0.01)
    reached.set()
    assert copying.wait_until_copied(60) >= 0
    source += 1
    copying.wait_whole(60)
    assert torch.equal(target, source - 1)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_copy_that_fails_lets_training_go_on_and_fails_the_save(in_background: bool) -> None:
    copying = TensorCopy([(torch.ones(3), torch.ones(4))], CPU, "a state")
    copying.copy(in_background=in_background)
    copying.wait_until_copied(60)
    with pytest.raises(RunError, match="a state could not be copied"):
        copying.wait_whole(60)


def test_a_copy_whose_thread_cannot_start_lets_training_go_on_and_fails_the_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cannot(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    copying = TensorCopy([(torch.ones(3), torch.ones(3))], CPU, "a state")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", cannot)
        copying.copy(in_background=True)
    copying.wait_until_copied(1)
    with pytest.raises(RunError, match="a state could not be copied: can't start new thread"):
        copying.wait_whole(1)


def test_a_source_that_nobody_else_keeps_is_there_until_its_stream_has_read_it() -> None:
    """A stand-in for CUDA's streams, which copy after they were asked to."""
    sources = [torch.ones(3), torch.ones(3)]
    kept = [weakref.ref(source) for source in sources]
    alive: list[bool] = []
    stream = SimpleNamespace(synchronize=lambda: alive.extend(one() is not None for one in kept))
    copying = TensorCopy(zip(sources, [torch.empty(3), torch.empty(3)], strict=True), CPU, "a state")
    copying._streams = {torch.device("cuda"): stream}  # type: ignore[dict-item]
    del sources
    copying.copy(in_background=False)
    assert alive == [True, True]
    assert [one() for one in kept] == [None, None]


def test_places_have_storages_of_their_own_and_are_the_same_at_the_next_save() -> None:
    memory = HostMemory()
    tensors = [
        torch.arange(5, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.zeros(0, 4),
        torch.tensor(7),
    ]
    first = memory.places(tensors)
    copying = TensorCopy(zip(tensors, first, strict=True), CPU, "a state")
    copying.copy(in_background=False)
    copying.wait_whole(60)
    assert all(torch.equal(place, tensor) for place, tensor in zip(first, tensors, strict=True))
    assert [place.dtype for place in first] == [tensor.dtype for tensor in tensors]
    assert all(place.untyped_storage().nbytes() == place.nbytes for place in first)
    again = memory.places(tensors)
    assert [place.data_ptr() for place in again] == [place.data_ptr() for place in first]


def test_as_much_is_page_locked_as_there_is_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's runtime is a stand-in here. torch's own pinned memory comes in powers of two, and is kept when it is let
    go.
    """
    locked: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda start, nbytes, flags: locked.update({start: nbytes}) or 0,
        cudaHostUnregister=lambda start: locked.pop(start) and 0,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = HostMemory()
    for numel in (1_100_000, 1_100_000, 2_200_000):
        [place] = memory.places([torch.empty(numel, dtype=torch.uint8)])
        assert locked.keys() == {place.data_ptr()}
        assert numel <= sum(locked.values()) < numel + 2 * mmap.PAGESIZE


def test_memory_grows_where_more_is_to_be_copied() -> None:
    memory = HostMemory()
    memory.places([torch.ones(4)])
    [larger] = memory.places([torch.ones(100_000)])
    larger.fill_(2)
    assert larger.shape == (100_000,)
