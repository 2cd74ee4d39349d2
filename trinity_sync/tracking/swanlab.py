"""The SwanLab tracker (`tracker=swanlab`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from trinity_sync.errors import ConfigError
from trinity_sync.tracking.trackers import ProcessTracker, TrackedRun, has_login, kept_id, lacking, markdown, name_of

if TYPE_CHECKING:
    from swanlab import Run

Mode = Literal["online", "offline", "local", "disabled"]

_ENDINGS: dict[str, Literal["success", "crashed", "aborted"]] = {
    "completed": "success",
    "failed": "crashed",
    "interrupted": "aborted",
}


class SwanlabTracker(ProcessTracker):
    """Sends the metrics to one experiment of a project, which a resume continues.

    Args:
        project: the project's name.
        workspace: user or team; None for the account's default.
        mode: ``online``, ``offline`` (kept in the run folder for `swanlab sync`), ``local`` (kept there for
            `swanlab watch`; needs the swanboard package) or ``disabled``.
        tags: shown on the experiment.
        timeout_s: see `Tracker`.
    """

    def __init__(
        self,
        project: str,
        workspace: str | None = None,
        mode: Mode = "offline",
        tags: Iterable[str] = (),
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s)
        self._project, self._workspace, self._mode, self._tags = project, workspace, mode, list(tags)
        self._run: Run | None = None

    def check(self) -> None:
        """Check that there is a login or a package, if the mode needs one."""
        if self._mode == "local" and find_spec("swanboard") is None:
            raise ConfigError(
                "tracker.swanlab.mode=local needs the swanboard package: pip install 'swanlab[dashboard]'; or set the "
                "mode to offline"
            )
        root = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab"
        known = any(has_login(f"{folder}/.netrc") for folder in (".swanlab", root))
        if self._mode == "online" and not os.environ.get("SWANLAB_API_KEY") and not known:
            raise ConfigError(
                "tracker.swanlab.mode is online, but there is no login: log in by `swanlab login`, or set "
                "SWANLAB_API_KEY or tracker.swanlab.mode=offline"
            )

    def start(self, run: TrackedRun) -> None:
        """Open the experiment, the earlier one on a resume."""
        try:
            import swanlab
        except ImportError as error:
            raise lacking("swanlab") from error
        self.check()
        try:
            self._run = swanlab.init(
                id=kept_id(run, "swanlab"),
                resume="allow",
                name=run.name or None,
                log_dir=str(run.folder / "swanlab"),
                config=dict(run.config),
                project=self._project,
                workspace=self._workspace,
                mode=self._mode,
                tags=self._tags,
                settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
            )
        except Exception as error:
            raise ConfigError(
                f"tracker=swanlab cannot start: {error}; log in by `swanlab login`, or set the mode to offline"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self._run is not None, "`start` comes first"
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Add a text, which SwanLab shows as a table."""
        import swanlab

        assert self._run is not None, "`start` comes first"
        self._run.log({name_of(rows): swanlab.Text(markdown(rows))}, step=step)

    def close(self) -> None:
        """Finish the experiment; wait for uploads."""
        if self._run is not None:
            state = _ENDINGS[self._status]
            self._run.finish(state=state, error=None if state == "success" else f"the run was {self._status}")
            self._run = None
