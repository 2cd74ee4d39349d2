"""Trinity Sync: checkpoints and weight sync for RL post-training. Importing the package loads nothing heavy."""

__version__ = "0.1.0"
