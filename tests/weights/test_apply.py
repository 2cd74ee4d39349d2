from __future__ import annotations

import random
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from tests.weights.helpers import CutVersion, cut, random_tensor, raw
from trinity_sync.weights.apply import ChecksumError, MismatchError, Receiver
from trinity_sync.weights.digests import bucket_digests, version_digest
from trinity_sync.weights.layout import LayoutError, PartLayout
from trinity_sync.weights.shards import CoverageError, Rect, Shard, row_slice, whole
from trinity_sync.weights.staging import stage


def load(receiver: Receiver, version: CutVersion) -> None:
    for layout, sources in zip(version.layouts, version.sources, strict=True):
        segment = bytearray(layout.nbytes)
        stage(layout, sources, segment)
        receiver.apply(layout, bytes(segment), bucket_digests(segment, layout))


def example(seed: int = 0) -> CutVersion:
    rng = random.Random(seed)
    tensors = {name: torch.randn(shape) for name, shape in {"w": (40, 33), "b": (70,), "s": (), "c": (4, 3, 5)}.items()}
    return cut(tensors, "BF16", 3, 64, rng)


def layout(*shards: Shard) -> PartLayout:
    return PartLayout.build("rank-00000", shards, 64)


@pytest.mark.parametrize("seed", range(8))
def test_destinations_of_another_floating_dtype_receive_the_values(seed: int) -> None:
    version = example(seed)
    destinations = {name: torch.zeros(tensor.shape, dtype=torch.float32) for name, tensor in version.tensors.items()}
    load(Receiver(destinations), version)
    assert all(torch.equal(destinations[n], t.bfloat16().float()) for n, t in version.tensors.items())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_destinations_may_be_slices_of_fused_or_transposed_tensors(seed: int, dtype: torch.dtype) -> None:
    version = example(seed)
    columns = torch.full((40, 50), -1.0, dtype=dtype)
    destinations = {
        "w": columns[:, 10:43],
        "b": torch.zeros(140, dtype=dtype)[::2],
        "s": torch.zeros(9, dtype=dtype)[4],
        "c": torch.zeros(9, 3, 5, dtype=dtype)[3:7],
    }
    load(Receiver(destinations), version)
    assert all(torch.equal(destinations[n], t.bfloat16().to(dtype)) for n, t in version.tensors.items())
    assert bool((columns[:, :10] == -1).all() and (columns[:, 43:] == -1).all())


def test_a_transposed_matrix_can_receive() -> None:
    version = cut({"w": torch.randn(40, 33)}, "BF16", 2, 64, random.Random(1))
    destination = torch.zeros(33, 40).bfloat16().t()
    load(Receiver({"w": destination}), version)
    assert torch.equal(destination, version.tensors["w"].bfloat16())


def test_a_destination_whose_rows_are_scattered_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^conv: strides"):
        Receiver({"conv": torch.zeros(4, 5, 6).permute(0, 2, 1)})


def test_parameters_receive_without_a_gradient() -> None:
    version = example()
    model = {name: torch.nn.Parameter(torch.zeros(tensor.shape)) for name, tensor in version.tensors.items()}
    load(Receiver(model), version)
    assert all(torch.equal(model[n].data, t.bfloat16().float()) for n, t in version.tensors.items())


def test_a_destination_that_moved_is_refused_by_name() -> None:
    """What would be loaded is not what the model holds then."""
    version = example()
    model = {name: torch.nn.Parameter(torch.zeros(tensor.shape)) for name, tensor in version.tensors.items()}
    receiver = Receiver(model)
    receiver.begin()
    load(receiver, version)
    model["b"].data = model["b"].data.clone()
    with pytest.raises(MismatchError, match=r"^b moved to other memory"):
        receiver.begin()


def test_a_later_version_in_the_same_layout_and_in_another_one_replaces_the_first() -> None:
    first = example(0)
    destinations = {name: torch.zeros_like(tensor) for name, tensor in first.on_wire.items()}
    receiver = Receiver(destinations)
    load(receiver, first)
    for seed in (0, 1):
        again = cut({n: torch.randn(t.shape) for n, t in first.tensors.items()}, "BF16", 3, 64, random.Random(seed))
        load(receiver, again)
        assert {n: raw(t) for n, t in destinations.items()} == {n: raw(t) for n, t in again.on_wire.items()}


def test_integer_tensors_keep_their_bits() -> None:
    tensors = {"ids": random_tensor("I64", (6, 5), random.Random(0))}
    destinations = {"ids": torch.zeros(6, 5, dtype=torch.int64)}
    load(Receiver(destinations), cut(tensors, "BF16", 2, 64, random.Random(0)))
    assert torch.equal(destinations["ids"], tensors["ids"])


def test_check_lists_everything_that_does_not_fit() -> None:
    receiver = Receiver({"a": torch.zeros(2), "m": torch.zeros(1), "s": torch.zeros(2, 3), "i": torch.zeros(1)})
    parts = [
        layout(whole("a", "BF16", (2,)), whole("x", "BF16", (2,))),
        layout(whole("s", "BF16", (3, 2)), whole("i", "I64", (1,))),
    ]
    with pytest.raises(MismatchError) as caught:
        receiver.check(parts)
    assert str(caught.value) == (
        "the published tensors do not fit this model: 1 missing (m); 1 unexpected (x); "
        "1 of another shape (s: 3x2 published, 2x3 here); 1 of another dtype (i: I64 published, F32 here)"
    )


def test_check_shows_twenty_names_and_counts_the_rest() -> None:
    receiver = Receiver({f"w{i:02d}": torch.zeros(1) for i in range(23)})
    with pytest.raises(MismatchError, match=r"23 missing \(w00, .*, w19 and 3 more\)"):
        receiver.check([])


def test_check_finds_a_part_that_is_absent() -> None:
    receiver = Receiver({"w": torch.zeros(4, 2)})
    with pytest.raises(CoverageError, match="w \\(4 of 8 elements are held by no part\\)"):
        receiver.check([layout(row_slice("w", "BF16", (4, 2), 0, 2))])


def test_check_accepts_what_fits() -> None:
    version = example()
    Receiver({name: torch.zeros_like(tensor) for name, tensor in version.tensors.items()}).check(version.layouts)


@pytest.mark.parametrize("shard", [whole("x", "BF16", (2,)), whole("w", "BF16", (3,)), whole("w", "I64", (2,))])
def test_apply_refuses_a_shard_without_a_place_and_changes_nothing(shard: Shard) -> None:
    destination = torch.zeros(2)
    one = layout(shard)
    with pytest.raises(MismatchError, match="do not fit this model"):
        Receiver({"w": destination}).apply(one, b"\x11" * one.nbytes)
    assert destination.tolist() == [0, 0]


def test_a_digest_too_few_is_no_checksum() -> None:
    one = layout(whole("w", "U8", (200,)))
    receiver = Receiver({"w": torch.zeros(200, dtype=torch.uint8)})
    digests = bucket_digests(bytes(200), one)
    with pytest.raises(ChecksumError, match="has 4 buckets, but 3 digests"):
        receiver.apply(one, bytes(200), digests[:3])


def test_exchanged_buckets_are_found() -> None:
    one = layout(whole("w", "U8", (128,)))
    data = bytes(range(128))
    with pytest.raises(ChecksumError, match="bucket 0 of part rank-00000"):
        Receiver({"w": torch.zeros(128, dtype=torch.uint8)}).apply(
            one, data[64:] + data[:64], bucket_digests(data, one)
        )


def test_only_bytes_that_stay_together_as_they_are_have_a_room() -> None:
    destinations = {
        "rows": torch.zeros(8, 64, dtype=torch.uint8),
        "columns": torch.zeros(4, 128, dtype=torch.uint8),
        "cast": torch.zeros(64),
        "strided": torch.zeros(4, 128, dtype=torch.uint8)[:, ::2],
        "small": torch.zeros(8, dtype=torch.uint8),
    }
    one = layout(
        row_slice("rows", "U8", (8, 64), 2, 5),
        Shard("columns", "U8", (4, 128), (Rect(0, 0, 0, 4, 32),)),
        whole("cast", "BF16", (64,)),
        whole("strided", "U8", (4, 64)),
        whole("small", "U8", (8,)),
    )
    receiver = Receiver(destinations)
    pieces = one.pieces("tensor")
    rooms = [receiver.destination(one, number, "tensor") for number in range(len(pieces))]
    found = {start: room.data_ptr() for (start, _), room in zip(pieces, rooms, strict=True) if room is not None}
    at = {shard.name: offset for shard, offset in one.entries}
    rows, small = destinations["rows"], destinations["small"]
    expected = {at["rows"] + 64 * row: rows[2 + row].data_ptr() for row in range(3)}
    assert found == {**expected, at["small"]: small.data_ptr()}
    assert all(receiver.destination(one, number, "bucket") is not None for number in range(3))


def test_a_segment_that_is_too_short_is_refused() -> None:
    one = layout(whole("w", "U8", (128,)))
    with pytest.raises(LayoutError, match="part rank-00000 needs 128 bytes, but only 100"):
        Receiver({"w": torch.zeros(128, dtype=torch.uint8)}).apply(one, bytes(100))


def test_without_digests_the_bytes_are_trusted() -> None:
    destination = torch.zeros(3, 4, dtype=torch.uint8)
    one = layout(Shard("w", "U8", (3, 4), (Rect(0, 0, 1, 3, 2), Rect(6, 1, 0, 1, 1))))
    Receiver({"w": destination}).apply(one, bytes(range(1, 8)))
    assert destination.tolist() == [[0, 1, 2, 0], [7, 3, 4, 0], [0, 5, 6, 0]]


def test_a_bucket_of_another_length_is_refused_and_changes_nothing() -> None:
    destination = torch.zeros(200, dtype=torch.uint8)
    one = layout(whole("w", "U8", (200,)))
    with pytest.raises(ChecksumError, match="bucket 3 of part rank-00000 has 64 bytes instead of 8"):
        Receiver({"w": destination}).take(one, 3, b"\x01" * 64)
    assert not destination.any()


def test_what_is_taken_digests_to_what_is_there_even_where_a_part_never_came() -> None:
    destinations = {"w": torch.arange(6, dtype=torch.uint8).view(3, 2), "v": torch.ones(5)}
    receiver = Receiver(destinations)
    receiver.begin()
    receiver.apply(layout(row_slice("w", "U8", (3, 2), 1, 2)), b"\x09\x09")
    assert version_digest(receiver.taken()) == receiver.digest(None)


def test_the_segment_can_be_released_after_a_load() -> None:
    one = layout(whole("w", "U8", (128,)))
    segment = bytearray(128)
    Receiver({"w": torch.zeros(128, dtype=torch.uint8)}).apply(one, segment, bucket_digests(segment, one))
    segment.clear()  # refused by Python as long as a view of it lives


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A stand-in for the wait for a GPU's stream: there is none here."""
    stream = Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream.synchronize


@pytest.mark.parametrize("damaged", [False, True])
def test_a_load_waits_for_a_gpu_once_also_when_it_fails(waits: Mock, damaged: bool) -> None:
    one = layout(whole("w", "U8", (640,)))
    segment = bytearray(640)
    digests = bucket_digests(segment, one)
    assert len(digests) == 10
    segment[-1] ^= damaged
    receiver = Receiver({"w": torch.zeros(640, dtype=torch.uint8)})
    receiver._cuda_devices = {torch.device("cuda")}
    with pytest.raises(ChecksumError) if damaged else nullcontext():
        receiver.apply(one, segment, digests)
    assert waits.call_count == 1


def test_a_piece_whose_memory_is_used_again_is_waited_for(waits: Mock) -> None:
    one = layout(whole("w", "U8", (64,)))
    receiver = Receiver({"w": torch.zeros(64, dtype=torch.uint8)})
    receiver._cuda_devices = {torch.device("cuda")}
    receiver.take(one, 0, bytes(64))
    assert waits.call_count == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_destinations_on_a_gpu_receive(dtype: torch.dtype) -> None:
    version = example()
    destinations = {n: torch.zeros(t.shape, dtype=dtype, device="cuda") for n, t in version.tensors.items()}
    receiver = Receiver(destinations)
    load(receiver, version)
    assert all(torch.equal(destinations[n].cpu(), t.bfloat16().to(dtype)) for n, t in version.tensors.items())
    cpu = Receiver({name: tensor.cpu() for name, tensor in destinations.items()})
    assert receiver.digest("BF16") == cpu.digest("BF16")
