"""The Weights & Biases tracker (`tracker=wandb`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast
from urllib.parse import urlsplit

from trinity_sync.errors import ConfigError
from trinity_sync.tracking import trackers

if TYPE_CHECKING:
    from wandb import Run

Mode = Literal["online", "offline", "disabled"]

_LOGINS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_ANONYMOUS")


class WandbTracker(trackers.ProcessTracker):
    """Sends the metrics to one run of a project, which a resume continues.

    Args:
        project: the project's name.
        entity: user or team; None for the account's default.
        mode: ``online``, or in its place what ``WANDB_MODE`` says; ``offline`` (kept in the run folder for `wandb
            sync`); or ``disabled``.
        tags: shown on the run.
        timeout_s: see `Tracker`.
    """

    def __init__(
        self,
        project: str,
        entity: str | None = None,
        mode: Mode = "online",
        tags: Iterable[str] = (),
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s)
        self._mode = os.environ.get("WANDB_MODE") or mode if mode == "online" else mode
        self._project, self._entity, self._tags = project, entity, list(tags)
        self._run: Run | None = None

    def check(self) -> None:
        """Check that there is a login, if one is needed."""
        if self._mode != "online" or any(map(os.environ.get, _LOGINS)):
            return
        here = os.environ.get("WANDB_DIR") or "."
        for folder in (os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb", f"{here}/wandb", f"{here}/.wandb"):
            with suppress(OSError, RuntimeError):  # of the latter: there is no home
                settings = Path(folder, "settings").expanduser().read_text(errors="replace")
                if re.search("api_key|base_url", settings):
                    return
        host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
        files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
        if not any(trackers.has_login(file, host) for file in files):
            raise ConfigError(
                f"tracker.wandb.mode is online, but there is no login for {host}: log in by `wandb login`, set "
                "WANDB_API_KEY, or set tracker.wandb.mode=offline"
            )

    def start(self, run: trackers.TrackedRun) -> None:
        """Open the run, the earlier one on a resume."""
        try:
            import wandb
        except ImportError as error:
            raise trackers.lacking("wandb") from error
        try:
            self._run = wandb.init(
                id=trackers.kept_id(run, "wandb"),
                resume="allow",
                name=run.name,
                dir=str(run.folder),
                config=dict(run.config),
                project=self._project,
                entity=self._entity,
                mode=cast(Mode, self._mode),
                tags=self._tags,
            )
            # The step is a value of its own: wandb's counter cannot go back, as a resume requires.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            raise ConfigError(
                f"tracker=wandb cannot start: {error}; log in by `wandb login`, or set the tracker's mode to offline"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self._run is not None, "`start` comes first"
        self._run.log({**values, "step": step})

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        import wandb

        assert self._run is not None, "`start` comes first"
        # Columns may mix types, as numbers and a missing `exact`.
        table = wandb.Table(columns=list(trackers.COLUMNS), data=trackers.cells(rows), allow_mixed_types=True)
        self._run.log({trackers.name_of(rows): table, "step": step})

    def close(self) -> None:
        """Finish the run; wait for uploads."""
        if self._run is not None:
            self._run.finish(exit_code=0 if self._status == "completed" else 1)
            self._run = None
