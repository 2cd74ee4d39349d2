"""What the trainer records of versions and loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.samples.helpers import sample
from trinity_sync.actors.explorer_client import LoadReport
from trinity_sync.actors.synchronizer_client import SealedVersion
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.sync.base import Published
from trinity_sync.tracking.events import Event, event_fields
from trinity_sync.trainer.steps import StagedVersion, Steps, record_load


class Log:
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def event(self, event: Event) -> None:
        self.lines.append(event_fields(event))


def recorded(report: Published | None) -> list[Any]:
    log = Log()
    steps: Any = SimpleNamespace(log=log, settings=SimpleNamespace(mode="memory", base=None))
    sealed = SealedVersion(version=Version(0, 1), slot=0, digest="d", parts={})
    Steps.record_publish(steps, StagedVersion(sealed, 0.0, 0.0, 0.0), report)
    return log.lines


def published(report: Published | None) -> Any:
    [line] = recorded(report)
    return line


def test_a_version_by_deltas_is_recorded_with_its_layers_and_time() -> None:
    line = published(Published(encoding="delta", nbytes=1, changed=0.1, changed_ppm={"0": 5}, encode_s=0.5))
    assert (line["changed_ppm"], line["encode_s"]) == ({"0": 5}, 0.5)


def test_a_full_version_is_recorded_without_layers_and_time() -> None:
    assert not {"changed_ppm", "encode_s"} & published(None).keys()


def test_why_deltas_could_not_be_made_is_recorded() -> None:
    _, line = recorded(Published(encoding="full", nbytes=1, fault="no memory"))
    assert (line["where"], line["error"]) == ("deltas", "no memory")


def test_samples_that_an_earlier_attempt_made_are_counted() -> None:
    steps: Any = SimpleNamespace(log=Log(), settings=SimpleNamespace(attempt=1))
    batch = SampleBatch.of(sample(number=number, version=(number // 2, 0)) for number in range(3))
    assert Steps.measure(steps, 1, batch, None)["samples/journaled"] == 2.0
    assert "samples/journaled" not in Steps.measure(steps, 1, batch.take(np.array([2])), None)


def test_a_load_that_was_repeated_in_full_is_recorded_with_why() -> None:
    log: Any = Log()
    sizes = {"bytes_moved": 1, "total_s": 1.0, "paused_s": 1.0, "peak_rss": 1}
    report = LoadReport(explorer="explorer-0", version=Version(0, 1), digest=None, fault="a delta is lost", **sizes)  # type: ignore[arg-type]
    record_load(log, report)
    _, line = log.lines
    assert (line["where"], line["error"]) == ("explorer-0", "a delta is lost")


@pytest.mark.parametrize(("apply_s", "recorded"), [(0.25, 0.25), (0.0, None)], ids=["deltas", "in full"])
def test_a_load_is_recorded_with_the_time_of_its_deltas(apply_s: float, recorded: float | None) -> None:
    log: Any = Log()
    sizes = {"bytes_moved": 1, "total_s": 1.0, "paused_s": 1.0, "peak_rss": 1, "apply_s": apply_s}
    record_load(log, LoadReport(explorer="explorer-0", version=Version(0, 1), digest=None, **sizes))  # type: ignore[arg-type]
    assert log.lines[0].get("apply_s") == recorded
