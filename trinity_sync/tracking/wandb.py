"""The Weights & Biases tracker (`tracker=wandb`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from trinity_sync.errors import ConfigError
from trinity_sync.tracking.trackers import COLUMNS, ProcessTracker, TrackedRun, cells, kept_id, lacking, name_of

if TYPE_CHECKING:
    from wandb import Run

Mode = Literal["online", "offline", "disabled"]


class WandbTracker(ProcessTracker):
    """Sends the metrics to one run of a project, which a resume continues.

    Args:
        project: the project's name.
        entity: user or team; None for the account's default.
        mode: ``online``, ``offline`` (kept in the run folder for `wandb sync`) or ``disabled``.
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
        self._project, self._entity, self._mode, self._tags = project, entity, mode, list(tags)
        self._run: Run | None = None

    def start(self, run: TrackedRun) -> None:
        """Open the run, the earlier one on a resume."""
        try:
            import wandb
        except ImportError as error:
            raise lacking("wandb") from error
        try:
            self._run = wandb.init(
                id=kept_id(run, "wandb"),
                resume="allow",
                name=run.name,
                dir=str(run.folder),
                config=dict(run.config),
                project=self._project,
                entity=self._entity,
                mode=self._mode,
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
        table = wandb.Table(columns=list(COLUMNS), data=cells(rows), allow_mixed_types=True)
        self._run.log({name_of(rows): table, "step": step})

    def close(self) -> None:
        """Finish the run; wait for uploads."""
        if self._run is not None:
            self._run.finish(exit_code=0 if self._status == "completed" else 1)
            self._run = None
