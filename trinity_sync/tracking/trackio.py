"""The Trackio tracker (`tracker=trackio`)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trinity_sync.errors import ConfigError
from trinity_sync.tracking.trackers import COLUMNS, TrackedRun, cells, kept_id, lacking, name_of

if TYPE_CHECKING:
    from trackio import Run


class TrackioTracker:
    """Logs the metrics to one run of a project, which a resume continues.

    Args:
        project: the project's name.
        folder: of the local store; None: ``TRACKIO_DIR``, or else ``trackio/`` in the run's folder.
        space: Hugging Face Space for the metrics, such as ``user/name``; None: they stay local, unless
            ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL`` is set.
        timeout_s: see `Tracker`.
    """

    apart = True

    def __init__(
        self, project: str, folder: str | None = None, space: str | None = None, timeout_s: float = 60.0
    ) -> None:
        self._project, self._folder, self._space, self.timeout_s = project, folder, space, timeout_s
        self._run: Run | None = None
        self._complaints: list[str] = []

    def start(self, run: TrackedRun) -> None:
        """Begin a run, or continue the earlier one."""
        folder = self._folder or os.environ.get("TRACKIO_DIR") or str(run.folder / "trackio")
        os.environ["TRACKIO_DIR"] = folder  # read when the package is imported
        if self._space is None and not {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"} & os.environ.keys():
            os.environ["HF_HUB_OFFLINE"] = "1"  # it would ask who is logged in
        try:
            import trackio
        except ImportError as error:
            raise lacking("trackio") from error
        # Its errors are only warnings.
        warnings.showwarning = self._heed  # type: ignore[assignment]
        try:
            self._run = trackio.init(
                project=self._project,
                # Runs are found again by their name.
                name=f"{run.name}-{kept_id(run, 'trackio')}",
                resume="never" if run.resumed_from is None else "allow",
                config=dict(run.config),
                space_id=self._space,
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
            self._complain()
        except Exception as error:
            where = folder if self._space is None else f"the Space {self._space}"
            raise ConfigError(f"tracker=trackio cannot use {where}: {error}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self._run is not None, "`start` comes first"
        self._run.log(dict(values), step=step)
        self._complain()

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        import trackio

        assert self._run is not None, "`start` comes first"
        self._run.log({name_of(rows): trackio.Table(columns=list(COLUMNS), data=cells(rows))}, step=step)
        self._complain()

    def close(self) -> None:
        """Finish the run; wait for writes and uploads."""
        if self._run is not None:
            self._run.finish()
            self._run = None
            self._complain()

    def _heed(self, message: Warning | str, category: type[Warning], filename: str, *where: object) -> None:
        print(f"{category.__name__}: {message}", flush=True)
        if "trackio" in filename:
            self._complaints.append(str(message))

    def _complain(self) -> None:
        texts, self._complaints = self._complaints, []
        if texts:
            raise OSError("; ".join(texts))
