"""The TensorBoard tracker (`tracker=tensorboard`). It uses TensorBoard's own writer, so the driver needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trinity_sync.errors import ConfigError
from trinity_sync.tracking.trackers import TrackedRun, lacking, markdown, name_of


class _Writer(Protocol):
    """The part of TensorBoard's writer that is used."""

    def add_event(self, event: object) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Writes scalars to `tensorboard/` in the run folder; look at them by `tensorboard --logdir RUN_DIR`. `flush_s`:
    seconds after which points are on the disk at the latest. `clock`: returns Unix seconds.
    """

    def __init__(self, flush_s: float = 10.0, clock: Callable[[], float] = time.time) -> None:
        self._flush_s = flush_s
        self._clock = clock
        self._writer: _Writer | None = None

    def start(self, run: TrackedRun) -> None:
        """Open a new event file."""
        try:
            from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]
            from tensorboard.summary.writer.event_file_writer import (  # type: ignore[import-untyped]
                EventFileWriter,
            )
        except ImportError as error:
            raise lacking("tensorboard") from error
        try:
            self._writer = EventFileWriter(str(run.folder / "tensorboard"), flush_secs=self._flush_s)
        except OSError as error:
            raise ConfigError(f"tracker=tensorboard cannot write {run.folder / 'tensorboard'}: {error}") from error
        if run.resumed_from is not None:
            # TensorBoard hides points from the step of a session start on.
            begin = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(
                event_pb2.Event(wall_time=self._clock(), step=run.resumed_from + 1, session_log=begin)
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        assert self._writer is not None, "`start` comes first"
        points = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = summary_pb2.Summary(value=points)
        self._writer.add_event(event_pb2.Event(wall_time=self._clock(), step=step, summary=summary))

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Add a text, which TensorBoard shows as a table."""
        from tensorboard.compat.proto import event_pb2
        from tensorboard.plugins.text import summary_v2  # type: ignore[import-untyped]

        assert self._writer is not None, "`start` comes first"
        summary = summary_v2.text_pb(f"{name_of(rows)}/text_summary", markdown(rows))
        self._writer.add_event(event_pb2.Event(wall_time=self._clock(), step=step, summary=summary))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
