"""The folder of a run that Hydra makes before anybody has looked at the settings."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import ConfigError
from trinity_sync.tracking.run_folder import hold, holds_run, let_go


@dataclass(frozen=True)
class NewFolder:
    """A folder that is about to be made.

    Attributes:
        path: the folder, absolute.
        first: the first folder of its path that is not there yet; None: it is there.
    """

    path: Path
    first: Path | None

    @classmethod
    def of(cls, path: Path) -> NewFolder:
        """Look what of it is there."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        return cls(path, missing[-1] if missing else None)

    def take_back(self) -> None:
        """Remove it, and what was made above it, where no run has begun in it and it was not there before. Of what is
        in it only what a run that does not begin leaves there; where another run is about to begin, nothing.
        """
        try:
            if self.first is None or not self.path.is_dir() or holds_run(self.path):
                return
            let_go(self.path)
            hold(self.path)
        except ConfigError:
            return  # in use
        for name in (".hydra", "logs"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        (self.path / ".lock").unlink(missing_ok=True)
        let_go(self.path)
        with contextlib.suppress(OSError):  # others have put something there
            self.path.rmdir()
            for folder in self.path.parents:
                if folder.is_relative_to(self.first):
                    folder.rmdir()
