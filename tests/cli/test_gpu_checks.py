"""`trinity-sync doctor --gpu`: its report and exit codes, and its parts, which run on the CPU here. Streams of a GPU
have stand-ins, and the digests run in Triton's interpreter, where Triton is installed and ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trinity_sync.cli import gpu_checks
from trinity_sync.cli import main as cli
from trinity_sync.cli.gpu_checks import PARTS, DifferenceError, GpuReport, GpuResult, OmissionError, Work, run_parts
from trinity_sync.host import durable
from trinity_sync.launch import machine
from trinity_sync.launch.machine import Finding

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run trinity-sync doctor --gpu")


def passing(report: GpuReport) -> str:
    return "as on the CPU"


def measuring(report: GpuReport) -> str:
    report.measure({"step": (10**6, lambda: None)})
    return "as on the CPU"


def failing(report: GpuReport) -> str:
    raise DifferenceError("3 bytes differ")


def raising(report: GpuReport) -> str:
    raise ValueError("no such kernel")


def leaving_out(report: GpuReport) -> str:
    raise OmissionError("there is one GPU")


# -- the command


def doctor(monkeypatch: pytest.MonkeyPatch, parts: dict[str, Work], *given: str) -> int:
    """Run the command with stand-ins for the GPU and the parts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "findings", lambda: [Finding("disk", "1 GiB free")])
    monkeypatch.setattr(gpu_checks, "versions", lambda: {"torch": "2.13.0"})
    monkeypatch.setattr(gpu_checks, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_checks, "PARTS", parts)
    return cli.main(["doctor", "--gpu", *given])


def test_without_a_gpu_nothing_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--gpu", "--json", str(tmp_path / "gpu.json")]) == 2
    said = capsys.readouterr()
    assert (f"torch {torch.__version__} finds no GPU" in said.err, said.out, list(tmp_path.iterdir())) == (True, "", [])


def test_the_file_of_a_report_without_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", "gpu.json"]) == 2
    assert "--json: the file is the report of --gpu" in capsys.readouterr().err


def test_the_report_has_results_speeds_versions_and_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor(monkeypatch, {"one": measuring, "two": leaving_out}) == 0
    found = json.loads(Path("trinity-sync-gpu.json").read_text())
    assert found["parts"] == {
        "one": {"result": "passed", "told": "as on the CPU"},
        "two": {"result": "left out", "told": "there is one GPU"},
    }
    assert (found["versions"], found["machine"][0]["told"]) == ({"torch": "2.13.0"}, "1 GiB free")
    assert (found["speeds"]["step"]["bytes"], found["speeds"]["step"]["repetitions"]) == (10**6, 5)
    told = capsys.readouterr().out
    assert "1 passed, 0 failed, 1 left out; the report is trinity-sync-gpu.json" in told
    assert "measured step" in told


@pytest.mark.parametrize(
    ("work", "told"), [(failing, "3 bytes differ"), (raising, "ValueError: no such kernel")], ids=["failing", "raising"]
)
def test_a_check_that_fails_is_named_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], work: Work, told: str
) -> None:
    file = tmp_path / "gpu.json"
    assert doctor(monkeypatch, {"bad": work, "good": passing}, "--json", str(file)) == 1
    parts = json.loads(file.read_text())["parts"]
    assert parts["bad"] == {"result": "failed", "told": told}
    assert parts["good"]["result"] == "passed"
    assert f"failed   bad: {told}" in capsys.readouterr().out


def test_the_versions_name_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"card {number}")
    found = gpu_checks.versions()
    assert (found["gpus"], found["torch"]) == ("card 0, card 1", torch.__version__)


def test_a_file_that_cannot_be_written_is_refused_before_the_first_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(monkeypatch, {"bad": failing}, "--json", str(tmp_path / "none" / "gpu.json")) == 2
    said = capsys.readouterr()
    assert "--json: " in said.err
    assert "3 bytes differ" not in said.out


def test_a_check_is_left_out_for_want_of_time(tmp_path: Path) -> None:
    times = iter([0.0, 0.0, 541.0, 541.0, 541.0])
    report = GpuReport({}, [])
    found = dict(run_parts(tmp_path / "gpu.json", report, {"one": passing, "two": passing}, lambda: next(times)))
    assert found["two"] == GpuResult("left out", "no time: 541 s of 600 are over")
    assert (found["one"].result, report.seconds) == ("passed", 541.0)


def test_an_interrupted_command_has_written_what_it_found(tmp_path: Path) -> None:
    def interrupted(report: GpuReport) -> str:
        raise KeyboardInterrupt

    file = tmp_path / "gpu.json"
    parts = {"one": passing, "two": interrupted, "three": passing}
    with pytest.raises(KeyboardInterrupt):
        list(run_parts(file, GpuReport({}, []), parts))
    found = {name: part["result"] for name, part in json.loads(file.read_text())["parts"].items()}
    assert found == {"one": "passed", "two": "left out", "three": "left out"}


# -- the parts


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the parts run on the CPU, with little memory."""
    for name, value in {
        "DEVICE": "cpu",
        "TRANSPORT": "gloo",
        "_MOST_BYTES": 4_000_000,
        "_BROADCAST_BYTES": 1 << 20,
        "_LATE_VALUES": 1 << 12,
        "_ROW_BYTES": (16, 248, 1032),
        "_ROW_COUNTS": (1, 9),
        "pin_segment": lambda segment: True,
    }.items():
        monkeypatch.setattr(gpu_checks, name, value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))


def part(name: str) -> GpuResult:
    return gpu_checks._result(PARTS[name], GpuReport({}, []))


@pytest.mark.parametrize(
    "name",
    [
        "the driver page-locks memory",
        "staging gives the CPU's bytes",
        "a load has the published digest",
        "speeds",
        "an NCCL group of one rank",
        "an NCCL group of two ranks",
    ],
)
def test_a_part_passes_where_each_step_is_right(on_cpu: None, name: str) -> None:
    found = part(name)
    assert found.result == "passed", found.told


def test_every_step_has_a_speed(on_cpu: None) -> None:
    report = GpuReport({}, [])
    told = PARTS["speeds"](report)
    assert "the most that is measured" in told
    assert len(report.speeds) == 10
    assert all(speed.repetitions == 5 and speed.gb_s > 0 for speed in report.speeds.values())


def test_little_memory_is_measured_with_less(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6_000_000, 0))
    assert gpu_checks._size() == (1_000_000, "by the free memory of the GPU")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_000))
    assert gpu_checks._size() == (800, "by the free room in /dev/shm")


@pytest.mark.parametrize("nbytes", [64_000, 1_200_000_000, 8_000_000_000])
def test_the_tensors_fill_the_bytes(nbytes: int) -> None:
    held = sum(2 * torch.Size(shape).numel() for shape in gpu_checks._shapes(nbytes).values())
    assert 0.1 * nbytes < held <= nbytes


def test_a_byte_that_staging_gets_wrong_is_told(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_checks.stage

    def wrong(layout: Any, sources: Any, segment: Any, after: Any = None) -> None:
        right(layout, sources, segment)
        segment[7] ^= not isinstance(segment, bytearray)

    monkeypatch.setattr(gpu_checks, "stage", wrong)
    assert part("staging gives the CPU's bytes") == GpuResult(
        "failed", "F32 staged as BF16: 1 bytes differ from the CPU's, the first is 7"
    )


def test_a_model_of_other_bytes_than_the_version_is_told(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks.Receiver, "apply", lambda *given: None)
    assert part("a load has the published digest").result == "failed"
    assert part("speeds") == GpuResult("failed", "the model on the GPU has another digest than the version")


@pytest.mark.parametrize(
    ("refused", "told"),
    [(range(2), "not for writing and reading"), ([1], "not for reading"), ([2], "not for the copy of a state")],
    ids=["slots", "reading", "state"],
)
def test_memory_that_is_not_page_locked_is_told(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, refused: Sequence[int], told: str
) -> None:
    calls = count()
    monkeypatch.setattr(gpu_checks, "pin_segment", lambda segment: next(calls) not in refused)
    assert part("the driver page-locks memory") == GpuResult(
        "failed", f"memory is not page-locked, so copies take several times as long: {told}"
    )


def test_digests_are_left_out_without_triton_and_compared_with_it(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        import triton  # noqa: F401
    except ImportError:
        assert part("digests on the GPU are the CPU's").result == "left out"
        pytest.skip("Triton is not installed")
    if not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
    from trinity_sync.weights import cuda_digests

    assert part("digests on the GPU are the CPU's") == GpuResult("passed", "36 matrices")
    monkeypatch.setattr(cuda_digests, "row_digests", lambda matrix, dtype: bytes(16 * len(matrix)))
    assert part("digests on the GPU are the CPU's").told == "1 rows of 248 bytes, BF16: another digest than on the CPU"


def test_one_gpu_has_no_group_of_two(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "TRANSPORT", "nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert part("an NCCL group of two ranks").result == "left out"


def test_a_broadcast_that_arrives_wrong_is_told(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = gpu_checks._payload
    monkeypatch.setattr(gpu_checks, "_payload", lambda group, nbytes: payload(group, nbytes) + 1)  # not in the child
    assert part("an NCCL group of two ranks") == GpuResult("failed", "rank 1 received 6 broadcasts wrong")


def test_a_second_rank_that_dies_is_told(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    start = gpu_checks.start_child
    monkeypatch.setattr(gpu_checks, "_GROUP_S", 3.0)
    monkeypatch.setattr(gpu_checks, "start_child", lambda module, log: start("trinity_sync.host.durable", log))
    assert not hasattr(durable, "serve")
    assert part("an NCCL group of two ranks").result == "failed"


class Training:
    """A stand-in for the training's stream."""

    def __init__(self, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


@pytest.fixture
def streams(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Stand-ins for streams; give whether the training's has written when a copy has begun."""

    def stand_in(done: bool) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda: Training(done))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)

    return stand_in


LATE = [f"a lazy copy of a {what} waits for the training's stream" for what in ("version", "state")]


@pytest.mark.parametrize("name", LATE)
def test_a_copy_that_waits_for_the_write_passes(streams: Callable[[bool], None], name: str) -> None:
    streams(False)
    assert part(name) == GpuResult("passed", "values of after the write")


@pytest.mark.parametrize("name", LATE)
def test_a_copy_after_the_write_shows_nothing(streams: Callable[[bool], None], name: str) -> None:
    streams(True)
    assert part(name).result == "left out"


def test_a_copy_that_does_not_wait_fails(streams: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    streams(False)
    monkeypatch.setattr(gpu_checks, "stage", lambda *given: None)
    assert part(LATE[0]) == GpuResult("failed", "the copy did not wait: 4096 of 4096 values are those of before")
