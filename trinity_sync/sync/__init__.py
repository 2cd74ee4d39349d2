"""From the trainer's snapshot to every explorer: the synchronizer, and one file per sync mode.

Importing this package loads neither torch nor verl, and Ray only with `Synchronizer`: vLLM's workers may lack it.
"""

from typing import TYPE_CHECKING

from trinity_sync.sync.settings import SynchronizerConfig

if TYPE_CHECKING:
    from trinity_sync.sync.synchronizer_handle import Synchronizer

__all__ = ["Synchronizer", "SynchronizerConfig"]


def __getattr__(name: str) -> object:
    if name != "Synchronizer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trinity_sync.sync.synchronizer_handle import Synchronizer

    return Synchronizer
