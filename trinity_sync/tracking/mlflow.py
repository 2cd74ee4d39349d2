"""The MLflow tracker (`tracker=mlflow`)."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from trinity_sync.errors import ConfigError, in_one_line
from trinity_sync.host.durable import replace_file
from trinity_sync.host.masking import without_secrets
from trinity_sync.host.process import environment
from trinity_sync.tracking.trackers import COLUMNS, ProcessTracker, TrackedRun, cells, name_of, read_id

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_BATCH = 1000
_PARAM_BATCH = 100
_PARAM_CHARACTERS = 6000
"""Limits of MLflow for one call, and for one value."""
_SCHEMES = ("http", "https", "file", "sqlite", "postgresql", "mysql", "mssql", "databricks", "databricks-uc", "uc")
_ENDINGS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowTracker(ProcessTracker):
    """Logs the metrics to one run of an experiment, which a resume continues, and the config as its parameters.
    `experiment`: the experiment's name; created if missing. `uri`: tracking server or store; None:
    ``MLFLOW_TRACKING_URI``, or else a database in the run's folder. `timeout_s`: see `Tracker`.
    """

    def __init__(self, experiment: str, uri: str | None = None, timeout_s: float = 60.0) -> None:
        super().__init__(timeout_s)
        self._experiment, self._uri = experiment, uri
        self._client: MlflowClient | None = None
        self._run_id = ""

    def check(self) -> None:
        """Check that the place can be one, by its form."""
        place = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
        scheme, _, rest = place.partition(":")
        scheme = scheme.lower()
        of_web = scheme in ("http", "https")
        plugins = (found.name for found in entry_points(group="mlflow.tracking_store"))
        known = not rest or "/" in scheme or scheme.partition("+")[0] in _SCHEMES or scheme in plugins
        if not known or (of_web and not re.match(r"//([^/@]*@)?(\[[\w:.]+\]|[\w.-]+)(:\d+)?([/?]|$)", rest)):
            key = "tracker.mlflow.uri" if self._uri else "MLFLOW_TRACKING_URI"
            raise ConfigError(
                without_secrets(f"{key} is {place}, which is no place of MLflow's; name", place, {})
                + " a server such as http://10.0.0.1:5000, or a store such as sqlite:////data/mlflow.db"
            )

    def start(self, run: TrackedRun) -> None:
        """Begin a run, or continue the earlier one."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        folder = run.folder / "mlflow"
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI")
        try:
            from mlflow.tracking import MlflowClient

            if uri is None:
                import alembic  # noqa: F401 - a database needs both, and MLflow says something else
                import sqlalchemy  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"tracker=mlflow needs more than is installed ({error}): pip install 'trinity-sync[trackers]'"
            ) from error
        try:
            folder.mkdir(exist_ok=True)
            artifacts = None if uri else (folder / "artifacts").as_uri()
            uri = uri or _database(str(folder / "mlflow.db"))
            # one short retry while the run waits for its start
            limit_s = str(max(int(self.timeout_s / 3), 1))
            with environment({"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": limit_s}):
                self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
                self._run_id = self._begin(run, folder / "run_id", artifacts)
                self._describe(run)
        except Exception as error:
            said = in_one_line(error)
            text = without_secrets(f"tracker=mlflow cannot use {uri}: {said}", uri or "", {})
            raise ConfigError(f"{text}; see tracker.mlflow.uri") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        assert self._client is not None, "`start` comes first"
        now = int(time.time() * 1000)
        points = [Metric(_name(name), value, now, step) for name, value in values.items()]
        for first in range(0, len(points), _BATCH):
            self._client.log_batch(self._run_id, metrics=points[first : first + _BATCH])

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Add rows to the artifact ``samples.json`` or ``validation_samples.json``, which MLflow shows as a table."""
        assert self._client is not None, "`start` comes first"
        columns = zip(COLUMNS, zip(*cells(rows), strict=True), strict=True)
        self._client.log_table(self._run_id, {name: list(column) for name, column in columns}, f"{name_of(rows)}.json")

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id, status=_ENDINGS[self._status])
            self._client = None

    def _begin(self, run: TrackedRun, kept: Path, artifacts: str | None) -> str:
        assert self._client is not None
        if run_id := read_id(kept):
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment, artifacts)
        run_id = str(self._client.create_run(experiment, run_name=run.name or None).info.run_id)
        replace_file(kept, run_id + "\n")
        return run_id

    def _describe(self, run: TrackedRun) -> None:
        """Log the config and the run's folder. Parameters cannot be changed: a resume adds new ones."""
        from mlflow.entities import Param

        assert self._client is not None
        self._client.set_tag(self._run_id, "folder", str(run.folder))
        self._client.set_tag(self._run_id, "attempt", str(run.attempt))
        known = self._client.get_run(self._run_id).data.params
        new = [Param(name, value) for name, value in dict(_flat(run.config, "")).items() if name not in known]
        for first in range(0, len(new), _PARAM_BATCH):
            self._client.log_batch(self._run_id, params=new[first : first + _PARAM_BATCH])


def _database(path: str) -> str:
    """Return the URL of a SQLite database. SQLAlchemy reads options after "?", and 2.0 reads "%" differently."""
    from sqlalchemy.engine import make_url

    quoted = quote(path)
    forms = {path: path, quoted: path, f"file:{quoted}?uri=true": f"file:{quoted}"}
    urls = {f"sqlite:///{form}": named for form, named in forms.items()}
    return next(url for url, named in urls.items() if make_url(url).database == named)


def _flat(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield _name(key), text[:_PARAM_CHARACTERS]


def _name(text: str) -> str:
    """Return a name that MLflow accepts, without parts that have a meaning in a path."""
    known = re.sub(r"[^\w.\-/ :]", "_", text, flags=re.ASCII)
    return "/".join(part if part.strip(".") else "_" for part in known.split("/"))[:250].rstrip("/")
