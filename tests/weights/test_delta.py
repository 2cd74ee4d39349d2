"""Deltas: what they make is bitwise the new array, in C and in numpy, and what is damaged or wrong is found."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trinity_sync.weights import delta, delta_gaps, native, shards
from trinity_sync.weights.delta import CODECS, DeltaError, WrongBaseError

Array = np.ndarray[Any, np.dtype[Any]]
COMPILED = native.library()
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
needs_library = pytest.mark.skipif(COMPILED is None, reason="the library is not built here")


@pytest.fixture(params=["numpy", pytest.param("c", marks=needs_library)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(native, "library", lambda: None if request.param == "numpy" else COMPILED)
    monkeypatch.setattr(delta_gaps, "_BLOCK", 300)  # of numpy: several blocks in small arrays
    monkeypatch.setattr(delta, "_BLOCK", 500)
    return request.param


def joined(*arguments: Any, **more: Any) -> bytes:
    return b"".join(delta.encode(*arguments, **more))


def weights(count: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count).astype(np.float32) * 0.02).view(np.uint32).__rshift__(16).astype(np.uint16)


def trained(old: Array, share: float, seed: int = 1) -> Array:
    rng = np.random.default_rng(seed)
    steps = rng.integers(-2, 3, old.shape) * (rng.random(old.shape) < share)
    return (old.astype(np.int64) + steps).astype(old.dtype)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, Array, Array]:
    """Two arrays of one dtype and shape, of arbitrary bits; mostly equal ones among them."""
    dtype = draw(st.sampled_from(shards.NAMES))
    kind = np.dtype(f"<u{shards.itemsize(dtype)}")
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old, new = (rng.integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind)[..., 0] for _ in range(2))
    share = draw(st.sampled_from([0.0, 0.01, 0.2, 1.0]))
    near = old + rng.integers(0, 5, shape).astype(kind)
    new = np.where(rng.random(shape) < share, near if draw(st.booleans()) else new, old).astype(kind)
    return dtype, np.ascontiguousarray(old).reshape(shape), np.ascontiguousarray(new).reshape(shape)


@quick
@given(pair=pairs(), codec=st.sampled_from(list(CODECS)))
def test_any_bits_come_back(way: str, pair: tuple[str, Array, Array], codec: str) -> None:
    dtype, old, new = pair
    made = joined(old, new, dtype, codec)
    kept = old.copy()
    assert delta.apply(old, made, dtype).tobytes() == new.tobytes()
    assert old.tobytes() == kept.tobytes()
    assert delta.apply(old, made, dtype, old).tobytes() == new.tobytes(), "in place"


@needs_library
@quick
@given(pair=pairs(), codec=st.sampled_from(["gap8z", "class_gap"]), block=st.integers(1, 700))
def test_numpy_and_c_give_the_same_bytes(pair: tuple[str, Array, Array], codec: str, block: int) -> None:
    dtype, old, new = pair
    with pytest.MonkeyPatch.context() as patch:
        in_c = joined(old, new, dtype, codec)
        patch.setattr(native, "library", lambda: None)
        patch.setattr(delta_gaps, "_BLOCK", block)
        assert joined(old, new, dtype, codec) == in_c


@needs_library
@pytest.mark.parametrize("share", [0.0005, 0.05, 0.9])
def test_streams_longer_than_the_buffers_of_c_are_the_same_in_numpy(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = weights(200_000)
    new = trained(old, share)
    found = [joined(old, new, "BF16", codec) for codec in ("gap8z", "class_gap")]
    assert all((delta.apply(old, one, "BF16") == new).all() for one in found)
    monkeypatch.setattr(native, "library", lambda: None)
    assert [joined(old, new, "BF16", codec) for codec in ("gap8z", "class_gap")] == found


VECTORS = {
    "unchanged": "10",
    "sparse": (
        "12545344070000002c010000000000000300000000000000b5dd3a3a9c36d1f3"
        "c9d4b65383a9765d73d263062d114a4a49397d24d3f6210b2b1c477441d57a6c"
        "020018012701813f7f3f00bc"
    ),
    "gap8z": (
        "13545344070100002c010000000000000300000000000000b5dd3a3a9c36d1f3"
        "c9d4b65383a9765d73d263062d114a4a49397d24d3f6210b57833e26a19c7714"
        "03040403010202ff160e01ff0000bc"
    ),
    "class_gap": (
        "1354534407107f002c010000000000000300000000000000b5dd3a3a9c36d1f3"
        "c9d4b65383a9765d73d263062d114a4a49397d24d3f6210b1dfe4fe309a9902d"
        "020303020000000000000000010101010102000000000000000002ff1601ff05"
        "0000bc"
    ),
    "full": (
        "115453440600000003000000000000000300000000000000290fe138bc4f7fc6"
        "4b40113bb02d6a6c946f219ef886451a7bd9ff45c14b822cf7b98af3ff158e86"
        "06000000013c00bc0180"
    ),
}
"""Of the arrays of `vector_arrays`, but `full` of three F16 elements; docs/delta.md has them, too."""

COMPRESSED = {
    "planes": (
        "11545344070000002c010000000000002c01000000000000b5dd3a3a9c36d1f3"
        "c9d4b65383a9765d73d263062d114a4a49397d24d3f6210b8d1118bedf9bbaf1"
        "2800000028b52ffd605801f5000090808081807f80003f3c3c3c3c3cbc3c3c3c"
        "3c0410001e4af42570844a04"
    ),
    "gap8z": (
        "13545344070100002c010000000000002c01000000000000b5dd3a3a9c36d1f3"
        "c9d4b65383a9765d3c445d03c42c1fcbc9ec9a8220d241cea36887d2b63749bf"
        "ac02ac021313000028b52ffd602c004d00001000000100272ac00228b52ffd60"
        "2c004d00001001010100272ac002"
    ),
}
"""Of the base of `vector_arrays`, to be decoded only, as another zstd may give other bytes: `planes` makes the same
result, `gap8z` that of which each element is an ulp up. docs/delta.md has them, too.
"""


def vector_arrays() -> tuple[Array, Array]:
    """300 elements, of which three change: one by an ulp up, one by an ulp down, one in its sign."""
    old = np.full(300, 0x3F80, "<u2")
    old[290:] = 0x3C00
    new = old.copy()
    new[[2, 280, 295]] = [0x3F81, 0x3F7F, 0xBC00]
    return old, new


@pytest.mark.parametrize("name", ["unchanged", "sparse", "gap8z", "class_gap"])
def test_the_vectors_of_the_format(way: str, name: str) -> None:
    old, new = vector_arrays()
    made = joined(old, old if name == "unchanged" else new, "BF16", "gap8z" if name == "unchanged" else name)
    assert made.hex() == VECTORS[name]
    assert (delta.apply(old, bytes.fromhex(VECTORS[name]), "BF16") == (old if name == "unchanged" else new)).all()


def test_the_vector_of_a_full_shard(way: str) -> None:
    old, new = (np.array(bits, "<u2") for bits in ([0x3C00, 0xBC00, 0x0001], [0x3C01, 0xBC00, 0x8001]))
    assert joined(old, new, "F16", "full").hex() == VECTORS["full"]
    assert (delta.apply(old, bytes.fromhex(VECTORS["full"]), "F16") == new).all()


@pytest.mark.parametrize("name", COMPRESSED)
def test_the_compressed_vectors_are_decoded(way: str, name: str) -> None:
    old, new = vector_arrays()
    expected = new if name == "planes" else old + 1
    assert (delta.apply(old, bytes.fromhex(COMPRESSED[name]), "BF16") == expected).all()


def test_the_page_of_the_format_has_the_vectors() -> None:
    page = (Path(__file__).parents[2] / "docs" / "delta.md").read_text()
    assert all(f"| `{name}` | `{made}` |" in page for name, made in [*VECTORS.items(), *COMPRESSED.items()])


def test_a_thousand_versions_in_a_row_end_bitwise_equal(way: str) -> None:
    held = version = weights(257)
    names = list(CODECS)
    for number in range(1000):
        following = trained(version, 0.02, number)
        made = joined(version, following, "BF16", names[number % len(names)])
        held, version = delta.apply(held, made, "BF16"), following
    assert held.tobytes() == version.tobytes()


def test_one_delta_leads_over_many_versions(way: str) -> None:
    versions = [weights(2000)]
    for number in range(5):
        versions.append(trained(versions[-1], 0.05, number))
    merged = joined(versions[0], versions[-1], "BF16")
    assert (delta.apply(versions[0], merged, "BF16") == versions[-1]).all()
    assert len(merged) < sum(len(joined(a, b, "BF16")) for a, b in pairwise(versions))


@pytest.fixture
def chain() -> tuple[list[Array], list[bytes]]:
    versions = [weights(900)]
    for number in range(4):
        versions.append(trained(versions[-1], 0.05, number))
    return versions, [joined(old, new, "BF16") for old, new in pairwise(versions)]


def test_a_chain_leads_to_its_end_and_digests_the_array_twice(
    way: str, chain: tuple[list[Array], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, *_, last), deltas = chain
    digested: list[int] = []
    monkeypatch.setattr(delta, "digest", lambda array, of=delta.digest: digested.append(1) or of(array))
    delta.apply_chain(held := first.copy(), deltas, "BF16", kept=True)
    assert (held == last).all()
    assert len(digested) == 2


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_a_chain_with_a_gap_is_found(chain: tuple[list[Array], list[bytes]], gap: int) -> None:
    (first, *_), deltas = chain
    del deltas[gap]
    if gap == 3:
        deltas.append(deltas[0])
    with pytest.raises(WrongBaseError):
        delta.apply_chain(first.copy(), deltas, "BF16", kept=True)


def test_a_chain_whose_middle_leads_elsewhere_is_found_at_its_end(chain: tuple[list[Array], list[bytes]]) -> None:
    """A delta whose names are right and whose contents are not, as of a sender with an error."""
    versions, deltas = chain
    wrong = trained(versions[1], 0.05, 9)
    deltas[1] = joined(versions[1], wrong, "BF16", result_digest=delta.digest(versions[2]))
    with pytest.raises(DeltaError, match="another digest"):
        delta.apply_chain(versions[0].copy(), deltas, "BF16", kept=True)


@pytest.mark.parametrize("codec", CODECS)
def test_a_delta_on_another_base_is_found_before_anything_is_written(way: str, codec: str) -> None:
    old = weights(900)
    made = joined(old, trained(old, 0.1), "BF16", codec)
    other = trained(old, 0.01, 7)
    out = np.zeros_like(old)
    with pytest.raises(WrongBaseError):
        delta.apply(other, made, "BF16", out)
    assert not out.any()


@pytest.mark.parametrize(("dtype", "count"), [("F16", 900), ("BF16", 899), ("I16", 900)])
def test_a_delta_of_another_dtype_or_size_is_found(dtype: str, count: int) -> None:
    old = weights(900)
    made = joined(old, trained(old, 0.1), "BF16")
    with pytest.raises(WrongBaseError, match=f"a delta of 900 BF16 for a shard of {count} {dtype}"):
        delta.apply(old[:count], made, dtype)


@pytest.mark.parametrize("codec", CODECS)
def test_a_flipped_bit_is_found_at_every_byte(way: str, codec: str) -> None:
    old = weights(150)
    made = joined(old, trained(old, 0.1), "BF16", codec)
    for at in range(len(made)):
        for bit in (0, 4, 7):
            flipped = bytearray(made)
            flipped[at] ^= 1 << bit
            held = old.copy()
            with pytest.raises(DeltaError):
                delta.apply(held, flipped, "BF16", held)
            assert (held == old).all()


@pytest.mark.parametrize("codec", CODECS)
def test_a_truncated_or_longer_delta_is_found(codec: str) -> None:
    old = weights(150)
    made = joined(old, trained(old, 0.1), "BF16", codec)
    for wrong in [*(made[:end] for end in range(len(made))), made + b"\x00"]:
        with pytest.raises(DeltaError):
            delta.apply(old, wrong, "BF16")


@pytest.mark.parametrize("kind", range(256))
def test_another_format_or_codec_than_the_known_is_found(kind: int) -> None:
    if kind == 0x10:
        pytest.skip("an unchanged shard")
    with pytest.raises(DeltaError):
        delta.apply(weights(150), bytes([kind]), "BF16")
    if kind >> 4 != 1:
        with pytest.raises(DeltaError, match=f"format {kind >> 4}; this program reads format 1"):
            delta.apply(weights(150), bytes([kind]), "BF16")


def forged(made: bytes, body: bytes, **fields: Any) -> bytes:
    """A delta with other fields and another body, whose checksum fits: by a sender with an error, or an attacker."""
    header = delta._Header(*delta._HEADER.unpack(made[: delta._HEADER.size]))._replace(**fields)
    sum_ = delta._checksum(delta._HEADER.pack(*header), [body])
    return delta._HEADER.pack(*header._replace(checksum=sum_)) + body


@quick
@given(body=st.binary(max_size=200), codec=st.sampled_from(list(CODECS)), changes=st.integers(0, 160))
def test_a_body_of_arbitrary_bytes_reads_and_writes_nothing_outside(
    way: str, body: bytes, codec: str, changes: int
) -> None:
    old = weights(150)
    made = joined(old, trained(old, 0.1), "BF16", codec)
    room = np.full(250, 7, np.uint16)
    with pytest.raises(DeltaError):
        delta.apply(old, forged(made, body, changes=changes), "BF16", room[50:200])
    assert (room[:50] == 7).all()
    assert (room[200:] == 7).all()


@quick
@given(places=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_streams_that_were_changed_are_decoded_to_an_error_or_to_a_wrong_digest(
    way: str, places: list[tuple[int, int]]
) -> None:
    old = weights(900)
    made = joined(old, trained(old, 0.3), "BF16")
    body = bytearray(made[delta._HEADER.size :])
    before = bytes(body)
    for at, value in places:
        body[at % len(body)] = value
    if bytes(body) != before:
        with pytest.raises(DeltaError):
            delta.apply(old, forged(made, bytes(body)), "BF16")


def test_lengths_that_a_shard_cannot_have_allocate_nothing() -> None:
    old = weights(150)
    made = joined(old, trained(old, 0.1), "BF16", "gap8z")
    bomb = delta._zstd().compress(bytes(1 << 24), asbytes=True)
    table = b"".join(map(delta._varint, (10, 1 << 24, len(bomb), 10, 0, 0)))
    with pytest.raises(DeltaError, match="longer than the shard allows"):
        delta.apply(old, forged(made, table + bomb + bytes(10), changes=10), "BF16")
    table = b"".join(map(delta._varint, (10, 10, len(bomb), 10, 0, 0)))
    with pytest.raises(DeltaError, match=r"cannot be decompressed|bytes instead of"):
        delta.apply(old, forged(made, table + bomb + bytes(10), changes=10), "BF16")


def test_arrays_may_be_read_only_and_lie_at_any_address(way: str) -> None:
    old, new = weights(3000), trained(weights(3000), 0.05)
    placed = [np.frombuffer(b"x" + array.tobytes(), "<u2", offset=1) for array in (old, new)]
    assert not placed[0].flags.aligned
    assert not placed[0].flags.writeable
    made = b"".join(delta.encode(*placed, "BF16"))
    assert made == joined(old, new, "BF16")
    room = np.zeros(6001, np.uint8)
    out = room[1:].view("<u2")
    assert (delta.apply(placed[0], memoryview(made), "BF16", out) == new).all()


def test_what_is_no_shard_or_no_place_for_one_is_refused() -> None:
    old = weights(100)
    with pytest.raises(ValueError, match="contiguous"):
        delta.encode(old[::2], old[::2], "BF16")
    with pytest.raises(ValueError, match="4 bytes an item"):
        delta.encode(old, old, "F32")
    with pytest.raises(ValueError, match="shapes"):
        delta.encode(old, old[:50], "BF16")
    with pytest.raises(ValueError, match="is not a codec"):
        delta.encode(old, old, "BF16", "gap9")
    with pytest.raises(ValueError, match="share no memory"):
        delta.apply(old[:50], b"\x10", "BF16", old[10:60])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["BF16", "I64"])  # numpy's, too, where there is the library
def test_a_read_only_place_is_refused_and_not_written(codec: str, dtype: str) -> None:
    old = weights(900).astype(np.int64 if dtype == "I64" else np.uint16)
    made = joined(old, trained(old, 0.1), dtype, codec)
    held = old.tobytes()
    base = np.frombuffer(held, old.dtype)
    with pytest.raises(ValueError, match="read-only"):
        delta.apply(base, made, dtype, base)
    assert held == old.tobytes()


@pytest.mark.parametrize("ending", [b"\x00", b"\xff", b"\xff\xff\xff\xff\xff", b"\xff\xff\x00"])
@pytest.mark.parametrize("classes", [1, native.CLASSES])
def test_a_gap_that_leads_to_no_change_is_an_error(way: str, ending: bytes, classes: int) -> None:
    old = np.full(600, 0x3F80, "<u2")
    form = delta_gaps.FORMS["BF16"].of(127, classes)
    none = [(b"", b"", b"")] * (classes - 1)
    assert delta_gaps.decode(old, None, form, [(b"\xff\x05", b"\x01", b""), *none])
    assert not delta_gaps.decode(old, None, form, [(b"\xff\x05" + ending, b"\x01", b""), *none])


def test_a_sparse_code_of_a_shard_of_which_all_changes_takes_no_more_than_the_shard(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_BLOCK", 10_000)
    old, new = weights(300_000), ~weights(300_000)
    tracemalloc.start()
    request.addfinalizer(tracemalloc.stop)
    delta._sparse(old, new)
    assert tracemalloc.get_traced_memory()[1] < 1.5 * old.nbytes


@pytest.mark.all
@pytest.mark.parametrize("codec", ["planes", "gap8z", "class_gap"])
def test_no_copy_of_the_shard_is_made_but_the_result(codec: str, request: pytest.FixtureRequest) -> None:
    old = weights(6_000_000)
    new = trained(old, 0.01)
    base, out = delta.digest(old), np.empty_like(old)
    delta.encode(old[:100], new[:100], "BF16", codec)  # imports
    tracemalloc.start()
    request.addfinalizer(tracemalloc.stop)
    parts = delta.encode(old, new, "BF16", codec, base_digest=base)
    made = sum(map(len, parts))
    assert tracemalloc.get_traced_memory()[1] < 2.5 * made + (8 << 20)
    joined_parts = b"".join(parts)
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    delta.apply(old, joined_parts, "BF16", out)
    assert tracemalloc.get_traced_memory()[1] - held < 2.5 * made + (8 << 20)


def test_a_shard_of_which_all_changes_is_no_longer_than_a_full_one(way: str) -> None:
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 2**32, 5000, np.uint32) for _ in range(2))
    for codec in CODECS:
        assert len(joined(old, new, "F32", codec)) <= old.nbytes + delta._HEADER.size + 4 * 10


def test_digests_that_the_caller_has_are_believed() -> None:
    old, new = weights(300), trained(weights(300), 0.1)
    made = joined(old, new, "BF16")
    assert joined(old, new, "BF16", base_digest=delta.digest(old), result_digest=delta.digest(new)) == made
    with pytest.raises(WrongBaseError):
        delta.apply(old, made, "BF16", base_digest=bytes(16))


def test_every_dtype_that_travels_has_a_number_in_the_format() -> None:
    assert set(delta._DTYPES) == set(shards.NAMES)


@pytest.mark.parametrize("share", [0.002, 0.01, 0.06, 0.3])
@pytest.mark.parametrize("codec", ["sparse", "gap8z"])
def test_the_bytes_are_about_as_expected(share: float, codec: str) -> None:
    old = weights(400_000)
    new = trained(old, share)
    expected = delta.expected_bytes(codec, old.size, 2, int((old != new).sum()))
    assert len(joined(old, new, "BF16", codec)) == pytest.approx(expected, rel=0.3)
