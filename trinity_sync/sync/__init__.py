"""From the trainer's snapshot to every explorer: the synchronizer, and one file per sync mode.

Importing this package loads neither torch nor verl.
"""

from trinity_sync.sync.synchronizer import Synchronizer, SynchronizerConfig

__all__ = ["Synchronizer", "SynchronizerConfig"]
