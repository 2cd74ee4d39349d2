"""The command `trinity-sync`, one module for each group of commands."""

import sys
from types import TracebackType

from trinity_sync.host.terminal import open_missing

_told = sys.excepthook


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr)
    else:
        _told(kind, error, trace)


open_missing()  # before any file takes the number of a closed stream
# catches Ctrl-C during the imports, before `main` runs
sys.excepthook = _tell
