"""From the trainer's snapshot to every explorer: the synchronizer, and one file per sync mode.

Importing this package loads neither torch nor verl.
"""

from trinity_sync.sync.settings import SynchronizerConfig
from trinity_sync.sync.synchronizer_handle import Synchronizer

__all__ = ["Synchronizer", "SynchronizerConfig"]
