"""The native library: its row digests are xxhash's, and without it everything is as before."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

import hatch_build
from trinity_sync.weights import delta_gaps, native, tensor_rows
from trinity_sync.weights.digests import RowPlan
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import whole

COMPILED = native.library()
pytestmark = pytest.mark.skipif(COMPILED is None, reason="the library is not built here")


def expected(matrix: np.ndarray) -> bytes:
    return b"".join(map(xxh3_128_digest, matrix))


@pytest.mark.parametrize("vectors", [0, 256, 512])
def test_rows_of_every_length_digest_as_with_xxhash(vectors: int) -> None:
    assert COMPILED is not None
    rng = np.random.default_rng(vectors)
    for length in (*range(1300), 2047, 2048, 2049, 4096, 100_001):
        matrix = rng.integers(0, 256, (2, length), np.uint8)
        assert COMPILED.row_digests(matrix, vectors) == expected(matrix), length


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(0, 40), length=st.integers(0, 3000), at=st.integers(0, 7), fill=st.sampled_from([None, 0, 255]))
def test_rows_of_any_bytes_at_any_address(rows: int, length: int, at: int, fill: int | None) -> None:
    assert COMPILED is not None
    data = np.random.default_rng(rows).integers(0, 256, at + rows * length, np.uint8)
    if fill is not None:
        data[:] = fill
    data.flags.writeable = False
    matrix = data[at:].reshape(rows, length)
    assert COMPILED.row_digests(matrix) == expected(matrix) == tensor_rows.rows_digest(matrix)


def test_rows_of_a_version_are_digested_by_threads_and_by_no_process() -> None:
    layout = PartLayout.build("p", [whole("w", "U8", (20_000, 1024))], 1 << 22)
    segment = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
    processes = tensor_rows.RowProcesses(2)
    with ThreadPoolExecutor(2) as pool:
        found = RowPlan([layout]).digest([segment.data], pool, (processes, ["absent"]))
    assert found.tensors["w"].runs[0][1] == expected(segment.reshape(20_000, 1024))
    assert not processes._processes


@pytest.fixture
def loaded_again() -> Iterator[None]:
    native._loaded.cache_clear()
    yield
    native._loaded.cache_clear()


@pytest.mark.usefixtures("loaded_again")
def test_a_library_that_is_older_than_its_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in native.FILE.parent.glob("*.[chs]*"):
        shutil.copy(file, tmp_path)
    with (tmp_path / "digests.h").open("a") as source:
        source.write("/* pulled, but not built */\n")
    monkeypatch.setattr(native, "FILE", tmp_path / "native.so")
    assert native.library() is None
    assert native.state() == (
        "numpy and xxhash do its work: it cannot be loaded (native.so is of other sources); install the package again"
    )


@pytest.mark.usefixtures("loaded_again")
def test_a_library_that_digests_wrongly_here_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = native.NativeLibrary.row_digests
    monkeypatch.setattr(native.NativeLibrary, "row_digests", lambda self, matrix: right(self, matrix ^ 1))
    assert native.library() is None
    assert "native.so digests wrongly on this machine" in native.state()


def test_rows_that_are_not_contiguous_digest_as_copies_do() -> None:
    assert COMPILED is not None
    matrix = np.random.default_rng(0).integers(0, 256, (64, 300), np.uint8)
    for view in (matrix[:, ::2], matrix[::2], matrix.T):
        assert COMPILED.row_digests(view) == expected(view.copy())


def test_a_library_that_cannot_be_loaded_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "native.so").write_bytes(b"not a library")
    program = (
        "from pathlib import Path; from trinity_sync.weights import native, tensor_rows; import numpy as np\n"
        f"native.FILE = Path({str(tmp_path / 'native.so')!r})\n"
        "found = tensor_rows.rows_digest(np.zeros((100, 50), np.uint8)).hex()[:32]\n"
        "print(found, native.library(), native.state()[:50])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    digest = xxh3_128_digest(bytes(50)).hex()
    assert done.stdout == f"{digest} None numpy and xxhash do its work: it cannot be loaded \n"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_code_for_other_processors_gives_the_same(tmp_path: Path) -> None:
    sources = native.FILE.with_name("native.c")
    flags = [
        "-O0",
        "-DPORTABLE",
        hatch_build.sources_flag(sources.parent),
        "-shared",
        "-fPIC",
        "-o",
        str(tmp_path / "portable.so"),
    ]
    subprocess.run(["cc", *flags, str(sources)], check=True)
    portable = native.NativeLibrary(tmp_path / "portable.so")
    assert COMPILED is not None
    rng = np.random.default_rng(0)
    for length in (5, 40, 200, 1024, 3000):
        matrix = rng.integers(0, 256, (3, length), np.uint8)
        assert portable.row_digests(matrix) == expected(matrix)
    old = (rng.standard_normal(20_000, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old + (rng.random(old.size) < 0.02).astype(np.uint16)
    for classes in (1, native.CLASSES):
        form = delta_gaps.FORMS["BF16"].of(128, classes)
        streams = portable.encode(old, new, form)
        assert streams == COMPILED.encode(old, new, form)
        out = np.zeros_like(old)
        assert portable.decode(old, out, form, streams)
        assert (out == new).all()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"TRINITY_SYNC_PURE": "1"}, "TRINITY_SYNC_PURE is set"),
        ({"CC": "no-such-compiler"}, "no-such-compiler cannot be run"),
        ({"CC": "false"}, "false failed"),
        ({"CC": "ls"}, "ls failed"),
    ],
)
def test_without_a_compiler_there_is_no_library_and_a_reason(
    variables: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / hatch_build.LIBRARY).parent.mkdir(parents=True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told = hatch_build.compile_library(tmp_path) or ""
    assert reason in told
    assert "\n" not in told
    assert not list((tmp_path / hatch_build.LIBRARY).parent.iterdir())


def test_without_any_compiler_there_is_no_library_and_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hatch_build.compile_library(tmp_path) == "there is no C compiler"
